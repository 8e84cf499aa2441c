"""Processes from /proc: holders of /dev/nvidia*, zombies, and those in uninterruptible sleep.

Only files that never wait for the process's address space are read (stat, status, wchan, stack,
cgroup, fd): cmdline, environ and maps block on a process whose memory map is locked, and hold what
is nobody's business. Kernel threads have no open files and are passed over after their stat.
"""

from __future__ import annotations

from msgspec.structs import replace

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.proc_pid import (
    ProcStat,
    ProcStatus,
    parse_cgroup,
    parse_stack,
    parse_stat,
    parse_status,
    parse_wchan,
)
from probes.gap import Gap, GapReason
from probes.snapshot.process import BlockedThread, Process, ProcessReading, ProcessSection

_KEPT = 128  # zombies and D-state processes kept as records, of each kind; all are counted
_FILES = 8192  # open files looked at per process
_THREADS = 1024  # threads looked at per GPU holder
_STACK_BYTES = 4096
_AS_ROOT = "run as root on the host, or grant CAP_SYS_PTRACE"
_STACK_AS_ROOT = "run as root: wchan and stack of a thread are hidden from other users"


def collect(host: Host) -> tuple[ProcessSection | None, tuple[Gap, ...]]:
    """Everything worth a record, with a first reading."""
    return _Collector(host).collect()


def resample(host: Host, section: ProcessSection) -> tuple[ProcessSection, tuple[Gap, ...]]:
    """One more reading of each process that is still the same one."""
    collector = _Collector(host)
    processes = tuple(collector.again(process) for process in section.processes)
    return replace(section, processes=processes), collector.gaps.folded()


class _Collector:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.gaps = Gaps("processes")
        self.hidden_stacks: list[str] = []

    def collect(self) -> tuple[ProcessSection | None, tuple[Gap, ...]]:
        try:
            pids = sorted(int(name) for name in self.host.listdir("/proc") if name.isdecimal())
        except OSError as error:
            self.gaps.add_error(error, path="/proc", allow="mount /proc")
            return None, self.gaps.folded()
        own = self._own_pids()
        scan_files = self._driver_may_be_loaded()
        scanned = unreadable = zombies = blocked = truncated = 0
        kthreadd = False
        found: list[Process] = []
        for pid in pids:
            stat = self._stat(pid)
            if stat is None or pid in own or stat.ppid in own:
                continue
            scanned += 1
            kthreadd = kthreadd or (pid == 2 and stat.comm == "kthreadd" and stat.ppid == 0)
            devices: tuple[str, ...] | None = ()
            if scan_files and not stat.is_kernel_thread:
                devices, whole = self._devices(pid, stat)
                unreadable += devices is None
                truncated += not whole
            is_zombie, is_blocked = stat.state == "Z", stat.state == "D"
            zombies += is_zombie
            blocked += is_blocked
            if (
                devices
                or (is_zombie and (stat.threads > 1 or zombies <= _KEPT))
                or (is_blocked and blocked <= _KEPT)
            ):
                found.append(self._process(pid, stat, devices))
        self._report(scanned, unreadable, truncated, zombies, blocked)
        section = ProcessSection(
            scanned=scanned,
            unreadable=unreadable,
            zombies=zombies,
            blocked=blocked,
            host_pid_namespace=self._host_namespace(kthreadd),
            processes=tuple(found),
        )
        return section, self.gaps.folded()

    def again(self, process: Process) -> Process:
        """The process with one more reading; unchanged when it has ended."""
        stat = self._stat(process.pid)
        if stat is None or stat.start_ticks != process.start_ticks:
            return process
        reading = self._reading(process.pid, stat, self._status(process.pid), process)
        return replace(process, readings=(*process.readings, reading))

    # --- one process ---

    def _process(self, pid: int, stat: ProcStat, devices: tuple[str, ...] | None) -> Process:
        status = self._status(pid)
        cgroup, container = parse_cgroup(self._text(f"/proc/{pid}/cgroup") or "")
        process = Process(
            pid=pid,
            comm=stat.comm,
            ppid=stat.ppid,
            uid=status.uid,
            threads=stat.threads,
            start_ticks=stat.start_ticks,
            is_kernel_thread=stat.is_kernel_thread,
            nspids=status.nspids,
            cgroup=cgroup,
            container=container,
            nvidia_devices=devices,
            cpus_allowed_list=status.cpus_allowed_list,
        )
        return replace(process, readings=(self._reading(pid, stat, status, process),))

    def _reading(
        self, pid: int, stat: ProcStat, status: ProcStatus, process: Process
    ) -> ProcessReading:
        tids = [pid] if stat.state == "D" else []
        if process.nvidia_devices or (stat.state == "Z" and stat.threads > 1):
            tids += self._other_blocked(pid)
        return ProcessReading(
            at_ns=self.host.monotonic_ns(),
            state=stat.state,
            cpu_ticks=stat.cpu_ticks,
            kill_pending=status.kill_pending,
            blocked=tuple(self._blocked(pid, tid, status) for tid in tids),
        )

    def _other_blocked(self, pid: int) -> list[int]:
        """Threads in state D besides the main one."""
        found = []
        for name in self._list(f"/proc/{pid}/task")[:_THREADS]:
            if name.isdecimal() and int(name) != pid:
                text = self._text(f"/proc/{pid}/task/{name}/stat")
                if text and (stat := _parsed(text)) and stat.state == "D":
                    found.append(int(name))
        return found

    def _blocked(self, pid: int, tid: int, status: ProcStatus) -> BlockedThread:
        base = f"/proc/{pid}" if tid == pid else f"/proc/{pid}/task/{tid}"
        own = status if tid == pid else parse_status(self._text(f"{base}/status") or "")
        wchan = parse_wchan(self._text(f"{base}/wchan") or "")
        stack = parse_stack(self._text(f"{base}/stack", _STACK_BYTES) or "")
        if wchan is None and not stack:
            self.gaps.add(
                GapReason.DENIED,
                "wchan",
                "stack",
                device=str(pid),
                detail="wchan reads 0 and stack is refused",
                allow=_STACK_AS_ROOT,
            )
        return BlockedThread(
            tid=tid, wchan=wchan, stack=stack, context_switches=own.context_switches
        )

    def _devices(self, pid: int, stat: ProcStat) -> tuple[tuple[str, ...] | None, bool]:
        """``/dev/nvidia*`` held open (None: not readable), and whether all files were looked at.

        The files of a process whose main thread has ended stand under its other threads.
        """
        base = f"/proc/{pid}"
        if stat.state == "Z":
            if stat.threads < 2:
                return (), True
            others = [name for name in self._list(f"{base}/task") if name != str(pid)]
            if not others:
                return (), True
            base = f"{base}/task/{others[0]}"
        try:
            names = self.host.listdir(f"{base}/fd")
        except OSError:
            return (None if self._stat(pid) else ()), True  # () when it ended meanwhile
        found = set()
        for name in names[:_FILES]:
            try:
                target = self.host.readlink(f"{base}/fd/{name}")
            except OSError:
                continue
            if target.startswith("/dev/nvidia"):
                found.add(target.removesuffix(" (deleted)"))
        return tuple(sorted(found)), len(names) <= _FILES

    # --- files ---

    def _stat(self, pid: int) -> ProcStat | None:
        """From stat, else from status (a copied /proc often holds only that)."""
        if text := self._text(f"/proc/{pid}/stat"):
            return _parsed(text)
        status = self._status(pid)
        if status.state is None:
            return None
        return ProcStat(
            comm=status.name or "",
            state=status.state,
            ppid=status.ppid or 0,
            cpu_ticks=None,
            threads=status.threads or 1,
            start_ticks=None,
            is_kernel_thread=False,
        )

    def _status(self, pid: int) -> ProcStatus:
        return parse_status(self._text(f"/proc/{pid}/status") or "")

    def _text(self, path: str, limit: int = 16384) -> str | None:
        """A file's text, None when the process has ended or this user may not read it."""
        try:
            return self.host.read_text(path, limit)
        except OSError:
            return None

    def _list(self, path: str) -> list[str]:
        try:
            return self.host.listdir(path)
        except OSError:
            return []

    def _driver_may_be_loaded(self) -> bool:
        """Without the driver nobody holds its files. A copy without /dev says nothing of that."""
        return not self.host.exists("/dev/null") or any(
            self.host.exists(path) for path in ("/dev/nvidiactl", "/proc/driver/nvidia")
        )

    def _own_pids(self) -> tuple[int, ...]:
        """This process, and the one that forked it for the reading: both are laggard.

        Their children are left out as well: laggard holds GPU files through its NVML child.
        """
        try:
            own = int(self.host.readlink("/proc/self"))
        except (OSError, ValueError):
            return ()
        stat = self._stat(own)
        return (own, stat.ppid) if stat and stat.is_fork else (own,)

    def _host_namespace(self, kthreadd: bool) -> bool | None:
        """Whether this /proc shows every process of the machine.

        kthreadd (pid 2) is only in the initial PID namespace. A /proc mounted with hidepid hides
        it from other users: then pid 1 is hidden as well, and nothing can be told.
        """
        if kthreadd:
            return True
        if self.host.exists("/proc/1/stat"):
            return False
        self.gaps.add(
            GapReason.DENIED,
            "host_pid_namespace",
            "nvidia_devices",
            detail="/proc/1 is not there: /proc is mounted with hidepid, or only copied in part",
            allow="run as root on the host",
        )
        return None

    def _report(
        self, scanned: int, unreadable: int, truncated: int, zombies: int, blocked: int
    ) -> None:
        if unreadable:
            self.gaps.add(
                GapReason.DENIED,
                "nvidia_devices",
                detail=f"the open files of {unreadable} of {scanned} processes could not be listed",
                allow=_AS_ROOT,
            )
        if truncated:
            self.gaps.add(
                GapReason.NOT_COLLECTED,
                "nvidia_devices",
                detail=f"{truncated} processes have more than {_FILES} open files: "
                "the rest was not looked at",
            )
        for what, count in (("zombies", zombies), ("processes in state D", blocked)):
            if count > _KEPT:
                self.gaps.add(
                    GapReason.NOT_COLLECTED,
                    "processes",
                    detail=f"{count} {what}: the first {_KEPT} were recorded",
                )


def _parsed(text: str) -> ProcStat | None:
    try:
        return parse_stat(text)
    except ValueError:
        return None
