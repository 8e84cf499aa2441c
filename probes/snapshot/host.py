"""The machine around the GPUs: CPU, memory, limits, services, versions.

Source: proc(5), cgroups(7), Documentation/ABI/testing/sysfs-devices-system-cpu,
Documentation/accounting/psi.rst, Documentation/admin-guide/{cgroup-v2,pm/cpufreq}.rst.
"""

from probes.record import Record


class CpuPolicy(Record, frozen=True, kw_only=True):
    """cpufreq settings; CPUs whose settings are equal stand in one record."""

    cpus: tuple[int, ...]
    driver: str | None = None  # intel_pstate (active), intel_cpufreq (passive), amd-pstate-epp, …
    governor: str | None = None
    min_mhz: int | None = None  # scaling_min_freq: what is allowed now
    max_mhz: int | None = None  # scaling_max_freq
    hardware_max_mhz: int | None = None  # cpuinfo_max_freq, boost included where the driver says it
    base_mhz: int | None = None  # base_frequency: guaranteed under all-core load (intel_pstate)


class CpuReading(Record, frozen=True, kw_only=True):
    """Per CPU, in the order of ``CpuFacts.online``."""

    mhz: tuple[int | None, ...] = ()  # measured (APERF/MPERF) on x86, else what cpufreq reports
    busy_ticks: tuple[int, ...] = ()  # of /proc/stat: all but idle and iowait
    total_ticks: tuple[int, ...] = ()


class PackageThrottle(Record, frozen=True, kw_only=True):
    """Thermal throttling of one socket since boot; ``core_count`` is the sum over its cores."""

    package: int
    package_count: int | None = None
    package_ms: int | None = None
    core_count: int | None = None
    core_max_ms: int | None = None  # of the core that was throttled longest


class NumaNode(Record, frozen=True, kw_only=True):
    """One NUMA node."""

    node: int
    cpulist: str | None = None


class CpuFacts(Record, frozen=True, kw_only=True):
    """What does not move."""

    online: tuple[int, ...] = ()
    model: str | None = None
    sockets: int | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    policies: tuple[CpuPolicy, ...] | None = None  # empty: no cpufreq here (most guests)


class Pressure(Record, frozen=True, kw_only=True):
    """/proc/pressure: share of time in which some, or all, runnable tasks were stalled."""

    some_avg10_percent: float | None = None
    some_avg60_percent: float | None = None
    some_total_us: int | None = None
    full_avg10_percent: float | None = None
    full_avg60_percent: float | None = None
    full_total_us: int | None = None


class FileSystem(Record, frozen=True, kw_only=True):
    """A mounted file system, as the caller's mount namespace has it."""

    path: str
    type: str | None = None
    options: str | None = None
    size_bytes: int | None = None
    free_bytes: int | None = None


class ResourceLimit(Record, frozen=True, kw_only=True):
    """A limit of the calling process; None is unlimited."""

    soft: int | None = None
    hard: int | None = None


class CallerLimits(Record, frozen=True, kw_only=True):
    """laggard's own limits: those of a job only where the job is started the same way."""

    memlock_bytes: ResourceLimit | None = None
    nofile: ResourceLimit | None = None
    can_exceed_memlock: bool | None = None  # CAP_IPC_LOCK is effective


class CgroupLevel(Record, frozen=True, kw_only=True):
    """The caller's cgroup or an ancestor that is visible and limits something."""

    cgroup_path: str  # the directory below /sys/fs/cgroup that was read
    cpu_quota: float | None = None  # CPUs' worth of time; None is no limit
    memory_max_bytes: int | None = None  # None is no limit


class CgroupReading(Record, frozen=True, kw_only=True):
    """The counters of one level."""

    cgroup_path: str
    periods: int | None = None
    throttled_periods: int | None = None
    throttled_us: int | None = None
    memory_current_bytes: int | None = None
    memory_inactive_file_bytes: int | None = None  # page cache that can be dropped at once
    oom_kills: int | None = None


class Cgroup(Record, frozen=True, kw_only=True):
    """The control group that laggard runs in."""

    version: int  # 1 or 2
    cgroup_path: str
    levels: tuple[CgroupLevel, ...] = ()  # the innermost first; only those with a limit
    cpuset: str | None = None  # effective CPUs


class Clock(Record, frozen=True, kw_only=True):
    """Whether the clock is disciplined, and what it is made of."""

    synchronized: bool | None = None  # adjtimex status without STA_UNSYNC (0x40)
    status_bits: int | None = None
    estimated_error_us: int | None = None
    clocksource: str | None = None
    available_clocksources: tuple[str, ...] = ()


class KernelModule(Record, frozen=True, kw_only=True):
    """A loaded kernel module that matters to GPUs."""

    name: str
    version: str | None = None
    taint: str | None = None  # P proprietary, O out of tree, E unsigned


class DeviceNode(Record, frozen=True, kw_only=True):
    """A device file; ``access_error`` is what access(2) said of reading and writing it.

    EACCES is the file's mode; EPERM is the device cgroup. Nothing was opened.
    """

    path: str
    access_error: str | None = None


class Service(Record, frozen=True, kw_only=True):
    """A daemon of the driver; ``running`` None: this view of /proc can't tell."""

    name: str
    running: bool | None = None
    pid: int | None = None
    seen_in: str | None = None  # where it was found, or what was searched
    installed: bool | None = None
    version: str | None = None  # of the program on disk


class DriverFacts(Record, frozen=True, kw_only=True):
    """The NVIDIA driver as files show it, without asking it anything."""

    module_version: str | None = None  # of the module that runs in the kernel
    module_flavor: str | None = None  # open | proprietary
    library_paths: tuple[str, ...] = ()  # libnvidia-ml.so.VERSION on disk
    library_versions: tuple[str, ...] = ()
    gpu_addresses: tuple[str, ...] | None = None  # /proc/driver/nvidia/gpus
    devices: tuple[DeviceNode, ...] | None = None
    peer_memory_clients: tuple[str, ...] = ()  # /sys/kernel/mm/memory_peers
    services: tuple[Service, ...] = ()


class HostReading(Record, frozen=True, kw_only=True):
    """Everything that moves, at one instant of the monotonic clock."""

    at_ns: int
    cpu: CpuReading | None = None
    throttle: tuple[PackageThrottle, ...] = ()
    load_1m: float | None = None
    load_5m: float | None = None
    cpu_pressure: Pressure | None = None
    memory_pressure: Pressure | None = None
    io_pressure: Pressure | None = None
    memory_available_bytes: int | None = None
    swap_free_bytes: int | None = None
    pages_swapped_in: int | None = None
    pages_swapped_out: int | None = None
    cgroups: tuple[CgroupReading, ...] = ()


class HostSection(Record, frozen=True, kw_only=True):
    """Facts of the host and the readings of what moves."""

    cpu_count: int | None = None  # online, not what the caller may use
    cpu: CpuFacts = CpuFacts()
    memory_total_bytes: int | None = None
    swap_total_bytes: int | None = None
    shared_memory: FileSystem | None = None  # /dev/shm
    file_systems: tuple[FileSystem, ...] = ()  # the local ones that a stall can come from
    limits: CallerLimits | None = None
    cgroup: Cgroup | None = None
    clock: Clock = Clock()
    modules: tuple[KernelModule, ...] | None = None
    driver: DriverFacts = DriverFacts()
    readings: tuple[HostReading, ...] = ()
