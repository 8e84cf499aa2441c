"""Processes that hold GPU device files, and those stuck in the kernel. Source: proc(5)."""

from __future__ import annotations

from probes.record import Record


class ProcessReading(Record, frozen=True, kw_only=True):
    """State at one instant of the monotonic clock."""

    at_ns: int
    state: str | None = None  # R S D Z T t X I
    wchan: str | None = None
    cpu_ticks: int | None = None


class Process(Record, frozen=True, kw_only=True):
    """One process. ``pid`` is the one in the /proc that was read."""

    pid: int
    comm: str | None = None
    ppid: int | None = None
    uid: int | None = None
    threads: int | None = None
    start_ticks: int | None = None
    nspids: tuple[int, ...] = ()  # outermost first, when in a PID namespace
    cgroup: str | None = None
    container: str | None = None
    nvidia_devices: tuple[str, ...] = ()  # /dev/nvidia* that it holds open
    cpus_allowed_list: str | None = None
    mems_allowed_list: str | None = None
    kill_pending: bool | None = None
    d_state_threads: int | None = None
    readings: tuple[ProcessReading, ...] = ()


class ProcessSection(Record, frozen=True, kw_only=True):
    """GPU holders, zombies and D-state processes; ``scanned`` counts all that were looked at."""

    scanned: int = 0
    unreadable: int = 0  # processes whose open files could not be listed (other users')
    host_pid_namespace: bool | None = None
    processes: tuple[Process, ...] = ()
