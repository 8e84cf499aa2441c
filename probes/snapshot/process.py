"""Processes that hold GPU device files, and those stuck in the kernel. Source: proc(5)."""

from probes.record import Record


class BlockedThread(Record, frozen=True, kw_only=True):
    """A thread in uninterruptible sleep (state D); the main thread's ``tid`` is the pid."""

    tid: int
    wchan: str | None = None  # kernel function it waits in; None when hidden
    stack: tuple[str, ...] = ()  # kernel functions, innermost first: "nfs_file_fsync [nfs]"
    context_switches: int | None = None  # voluntary and not: unchanged means it never ran


class ProcessReading(Record, frozen=True, kw_only=True):
    """State at one instant of the monotonic clock."""

    at_ns: int
    state: str | None = None  # of the main thread: R S D Z T t X I
    cpu_ticks: int | None = None  # of all threads
    kill_pending: bool | None = None  # SIGKILL was sent and has not taken effect
    blocked: tuple[BlockedThread, ...] = ()  # all threads of a GPU holder, else the main one


class Process(Record, frozen=True, kw_only=True):
    """One process. ``pid`` is the one in the /proc that was read."""

    pid: int
    comm: str | None = None
    ppid: int | None = None
    uid: int | None = None
    threads: int | None = None
    start_ticks: int | None = None
    is_kernel_thread: bool = False
    nspids: tuple[int, ...] = ()  # outermost first; more than one: inside a PID namespace
    cgroup: str | None = None
    container: str | None = None  # first 12 characters of its id
    nvidia_devices: tuple[str, ...] | None = None  # /dev/nvidia* held open; None: not readable
    cpus_allowed_list: str | None = None
    readings: tuple[ProcessReading, ...] = ()

    @property
    def key(self) -> str:
        """The name that gaps use: the pid."""
        return str(self.pid)


class ProcessSection(Record, frozen=True, kw_only=True):
    """GPU holders, zombies and D-state processes among all that were looked at.

    Only the first zombies and D-state processes are kept as records; the counts are complete.
    """

    scanned: int = 0
    unreadable: int = 0  # processes whose open files could not be listed (other users')
    zombies: int = 0
    blocked: int = 0  # processes whose main thread was in state D at the first reading
    host_pid_namespace: bool | None = None
    processes: tuple[Process, ...] = ()
