"""The driver's daemons, found by /proc and /run rather than by asking systemd.

A unit's cgroup names its processes; a pid file does where there is no unit (a driver container);
the last resort is every process's name. "Not running" is said only where all processes are seen.
"""

from __future__ import annotations

import re

import msgspec

from agent.collect.gaps import Gaps
from agent.collect.identity import sees_all_processes
from agent.host import Host
from probes.gap import GapReason
from probes.snapshot.host import Service

_COMM_LENGTH = 15  # TASK_COMM_LEN without its NUL
_VERSION = re.compile(rb"Fabric Manager version is\s*:\s*(\d+(?:\.\d+)+)")
_VERSION_TIMEOUT_S = 2.0
_PID = re.compile(r"\d{1,9}\Z", re.ASCII)


class _Daemon(msgspec.Struct, frozen=True):
    name: str  # the unit's, without .service
    program: str
    pid_file: str | None = None

    @property
    def comm(self) -> str:
        """The program's name as the kernel keeps it."""
        return self.program[:_COMM_LENGTH]


_DAEMONS = (
    _Daemon(
        "nvidia-fabricmanager", "nv-fabricmanager", "/run/nvidia-fabricmanager/nv-fabricmanager.pid"
    ),
    _Daemon(
        "nvidia-persistenced",
        "nvidia-persistenced",
        "/run/nvidia-persistenced/nvidia-persistenced.pid",
    ),
    _Daemon("nvidia-imex", "nvidia-imex"),
)


def read_services(host: Host, gaps: Gaps) -> tuple[Service, ...]:
    """State of fabric manager, persistence daemon and IMEX."""
    found = {
        daemon.name: _by_unit(host, daemon) or _by_pid_file(host, daemon) for daemon in _DAEMONS
    }
    complete = sees_all_processes(host)
    if complete and not all(found.values()):
        by_comm = _processes_by_comm(host)
        for daemon in _DAEMONS:
            pid = by_comm.get(daemon.comm)
            if not found[daemon.name] and pid is not None:
                found[daemon.name] = (pid, f"/proc/{pid}/comm")
    hidden = [name for name, place in found.items() if place is None]
    if hidden and not complete:
        inside = host.exists("/proc/1/comm")
        names = ", ".join(hidden)
        gaps.add(
            GapReason.DENIED if inside else GapReason.NOT_COLLECTED,
            "services",
            detail=f"{names}: not among the processes seen here, and the host's are hidden"
            if inside
            else "no processes were collected",
            allow="run on the host, or in a container with --pid=host (hostPID: true)",
        )
    return tuple(_service(host, daemon, found[daemon.name], complete) for daemon in _DAEMONS)


def _service(host: Host, daemon: _Daemon, place: tuple[int, str] | None, complete: bool) -> Service:
    program = f"/usr/bin/{daemon.program}"
    installed = host.exists(program)
    return Service(
        name=daemon.name,
        running=True if place else False if complete else None,
        pid=place[0] if place else None,
        seen_in=place[1] if place else "/proc/*/comm" if complete else None,
        installed=installed,
        version=_fabric_manager_version(host, program)
        if installed and daemon.program == "nv-fabricmanager"
        else None,
    )


def _by_unit(host: Host, daemon: _Daemon) -> tuple[int, str] | None:
    for tree in ("", "/systemd", "/unified"):
        path = f"/sys/fs/cgroup{tree}/system.slice/{daemon.name}.service/cgroup.procs"
        try:
            pids = host.read_text(path).split()
        except OSError:
            continue
        if pids and _PID.match(pids[0]):
            return int(pids[0]), path
    return None


def _by_pid_file(host: Host, daemon: _Daemon) -> tuple[int, str] | None:
    """A pid file outlives its process: the process's name has to agree."""
    if daemon.pid_file is None:
        return None
    try:
        pid = host.read_text(daemon.pid_file, 64).strip()
        if not _PID.match(pid) or host.read_text(f"/proc/{pid}/comm", 64) != daemon.comm:
            return None
    except OSError:
        return None
    return int(pid), daemon.pid_file


def _processes_by_comm(host: Host) -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        names = host.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if not _PID.match(name):
            continue
        try:
            found.setdefault(host.read_text(f"/proc/{name}/comm", 64), int(name))
        except OSError:
            continue  # it has ended
    return found


def _fabric_manager_version(host: Host, program: str) -> str | None:
    """Of the program on disk, by its own word (no file tells it); prints and exits."""
    try:
        out = host.run((program, "--version"), _VERSION_TIMEOUT_S).stdout
    except (OSError, ValueError):
        return None
    match = _VERSION.search(out)
    return match[1].decode() if match else None
