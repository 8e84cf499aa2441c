"""Files under /proc/PID. Source: proc(5), include/linux/sched.h, cgroups(7)."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

# include/linux/sched.h
_PF_FORKNOEXEC = 0x00000040
_PF_KTHREAD = 0x00200000
_SIGKILL_BIT = 1 << 8  # signal 9 in a mask that begins with signal 1
_STACK_FRAMES = 12
_FRAME = re.compile(
    r"(?:\[<[0-9a-f]*>\]\s*)?([A-Za-z_][\w.]*)\+0x[0-9a-f]+/0x[0-9a-f]+(\s+\[\w+\])?"
)
_CONTAINER_ID = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")
_LXC = re.compile(r"/lxc(?:\.payload)?[./]([^/]+)")


class ProcStat(NamedTuple):
    """The parts of /proc/PID/stat that are used; a tuple, because every process costs one."""

    comm: str
    state: str
    ppid: int
    cpu_ticks: int | None
    threads: int
    start_ticks: int | None
    is_kernel_thread: bool
    is_fork: bool = False  # it runs its parent's program: forked, and no exec since


class ProcStatus(msgspec.Struct, frozen=True):
    """The parts of /proc/PID/status that are used; what an older kernel lacks is None."""

    name: str | None = None
    state: str | None = None
    ppid: int | None = None
    uid: int | None = None
    threads: int | None = None
    nspids: tuple[int, ...] = ()
    kill_pending: bool | None = None
    cpus_allowed_list: str | None = None
    context_switches: int | None = None


def parse_stat(text: str) -> ProcStat:
    """One line; the command name may hold blanks and parentheses. Raises ValueError.

    ::

        4711 (python3 (rank)) D 4700 4711 47 0 -1 4194560 9 0 0 0 5123 877 0 0 20 0 59 0 90210
    """
    head, opened, rest = text.partition("(")
    comm, closed, tail = rest.rpartition(")")
    values = tail.split(None, 20)
    if not (opened and closed) or len(values) < 20 or not head.strip().isdigit():
        raise ValueError(f"no process status line: {text[:60]!r}")
    flags = int(values[6])
    return ProcStat(
        comm=comm,
        state=values[0],
        ppid=int(values[1]),
        cpu_ticks=int(values[11]) + int(values[12]),
        threads=int(values[17]),
        start_ticks=int(values[19]),
        is_kernel_thread=bool(flags & _PF_KTHREAD),
        is_fork=bool(flags & _PF_FORKNOEXEC),
    )


def parse_status(text: str) -> ProcStatus:
    """``Name: value`` lines. Never raises: a line that makes no sense is as if it were absent.

    ::

        Name:	python
        State:	D (disk sleep)
        PPid:	4700
        Uid:	1000	1000	1000	1000
        NSpid:	4711	61
        Threads:	59
        SigPnd:	0000000000000000
        ShdPnd:	0000000000000100
        Cpus_allowed_list:	0-31,64-95
        voluntary_ctxt_switches:	918233
        nonvoluntary_ctxt_switches:	4112
    """
    values: dict[str, str] = {}
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            values.setdefault(name, value.strip())
    masks = [_number(values.get(name), 16) for name in ("SigPnd", "ShdPnd")]
    switches = [
        _number(values.get(f"{name}_ctxt_switches")) for name in ("voluntary", "nonvoluntary")
    ]
    known = [mask for mask in masks if mask is not None]
    return ProcStatus(
        name=values.get("Name"),
        state=values.get("State", "")[:1] or None,
        ppid=_number(values.get("PPid")),
        uid=_number(next(iter(values.get("Uid", "").split()), None)),
        threads=_number(values.get("Threads")),
        nspids=tuple(
            pid for item in values.get("NSpid", "").split() if (pid := _number(item)) is not None
        ),
        kill_pending=any(mask & _SIGKILL_BIT for mask in known) if known else None,
        cpus_allowed_list=values.get("Cpus_allowed_list") or None,
        context_switches=None if None in switches else sum(n for n in switches if n is not None),
    )


def _number(text: str | None, base: int = 10) -> int | None:
    if not text or not text.isascii() or not text.isalnum():
        return None
    try:
        return int(text, base)
    except ValueError:
        return None


def parse_wchan(text: str) -> str | None:
    """The function a thread waits in; ``0`` (running, or hidden from this user) is None.

    ::

        folio_wait_bit_common
    """
    text = text.strip()
    return None if text in ("", "0") else text[:120]


def parse_stack(text: str) -> tuple[str, ...]:
    """Functions of /proc/PID/stack, innermost first, with the module that each belongs to.

    ::

        [<0>] folio_wait_bit_common+0x136/0x330
        [<0>] nfs_file_fsync+0x7a/0x1b0 [nfs]
    """
    frames = []
    for line in text.split("\n"):
        if found := _FRAME.fullmatch(line.strip()):
            frames.append(found[1] + (" " + found[2].strip() if found[2] else ""))
            if len(frames) == _STACK_FRAMES:
                break
    return tuple(frames)


def parse_cgroup(text: str) -> tuple[str | None, str | None]:
    """The most telling cgroup path, and the first 12 characters of the container id in it.

    ::

        0::/docker/4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01
    """
    paths = [line.split(":", 2)[2] for line in text.split("\n") if line.count(":") >= 2]
    if not paths:
        return None, None
    for path in paths:
        if ids := _CONTAINER_ID.findall(path):
            return path, ids[-1][:12]
        if found := _LXC.search(path):
            return path, found[1]
    return max(paths, key=len), None
