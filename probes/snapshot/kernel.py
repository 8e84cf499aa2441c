"""Kernel log lines of this boot that bear on GPUs, links, memory and hung tasks."""

from probes.record import Record


class KernelEvent(Record, frozen=True, kw_only=True):
    """A line, or several that say the same within one minute, folded (``count``).

    ``kind`` is one of: xid, sxid, nvrm, gpu-map, driver-load, gpu-reset, aer, dpc, pcie-link,
    pcie-bandwidth, hung-task, lockup, rcu-stall, oom, mce, segfault, nic, nfs. ``what`` narrows it:

    - nvrm: off-bus, init-failed, api-mismatch, probe-failed, bar-invalid
    - pcie-link: link-down, link-up, not-present, retrain-failed
    - lockup: soft, hard
    - oom: cgroup, global
    - nic: health, link-down, link-up, slot-power, module
    - nfs: not-responding, ok
    - aer, dpc: the names of the errors, as the kernel prints them
    """

    kind: str
    line: str  # verbatim, escapes stripped, at most 300 characters
    locator: str  # kmsg sequence number or line number: "seq 4711", "line 12"
    at_s: float | None = None  # seconds since boot, of the first
    last_at_s: float | None = None
    at_ns: int | None = None  # wall clock of the first, where the source has one
    last_at_ns: int | None = None
    count: int = 1
    what: str | None = None
    severity: str | None = None  # fatal | nonfatal | correctable | corrected | uncorrected
    pci: str | None = None
    port_pci: str | None = None  # AER: the port that received it; bandwidth: the limiting hop
    code: int | None = None  # Xid or SXid number
    pid: int | None = None
    process: str | None = None
    gpu_uuid: str | None = None
    unit: str | None = None  # DRAM or SRAM (48, 171, 172), NVLink unit (144-150), engine (94, 95)
    link: int | None = None  # NVLink number
    gpc: int | None = None  # Xid 13
    tpc: int | None = None
    registers: tuple[int, ...] = ()  # Xid 74: seven; 144-150: intr_info, error_status, ...
    recovery_from: int | None = None  # Xid 154
    recovery_to: int | None = None
    recovery_text: str | None = None  # the driver's word for recovery_to
    switch: int | None = None  # SXid: N of nvidia-nvswitchN
    seconds: int | None = None  # how long a task was blocked or a CPU stuck
    device: str | None = None  # network interface, library, memory controller
    server: str | None = None  # NFS server
    cgroup: str | None = None  # that ran out of memory
    versions: tuple[str, ...] = ()  # driver-load: module; api-mismatch: client, module
    speed_gts: float | None = None  # pcie-bandwidth: of the limiting hop
    width_lanes: int | None = None
    available_gbps: float | None = None
    capable_gbps: float | None = None


class KernelSection(Record, frozen=True, kw_only=True):
    """The events of this boot, oldest first."""

    source: str  # kmsg | journal | the file's path
    first_at_s: float | None = None  # the oldest line that is still there
    truncated: bool | None = None  # older lines of this boot are gone (the ring buffer wrapped)
    lines_read: int = 0
    events: tuple[KernelEvent, ...] = ()
    dropped_events: int = 0  # lines beyond what is kept: counted with an older one, or not at all
