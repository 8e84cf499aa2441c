"""What NVML says of the GPUs. Names follow nvml.h; units are in the names.

Source: nvml.h (CUDA 11.4 to 13.3). Static facts stand on ``Gpu``; what moves stands on
``GpuReading``, of which a live run takes two.
"""

import enum

from probes.record import Record


class GpuState(str, enum.Enum):
    """Whether NVML could work with the GPU; from the return code of the first failing call."""

    OK = "ok"
    LOST = "lost"  # NVML_ERROR_GPU_IS_LOST (15)
    HUNG = "hung"  # a call did not return within its deadline
    RESET_REQUIRED = "reset-required"  # NVML_ERROR_RESET_REQUIRED (16)
    NO_PERMISSION = "no-permission"  # NVML_ERROR_NO_PERMISSION (4): hidden by cgroup or MIG
    INSUFFICIENT_POWER = "insufficient-power"  # NVML_ERROR_INSUFFICIENT_POWER (8)
    IRQ_ISSUE = "irq-issue"  # NVML_ERROR_IRQ_ISSUE (11)
    NOT_READY = "not-ready"  # NVML_ERROR_NOT_READY (27)
    NOT_FOUND = "not-found"  # NVML_ERROR_NOT_FOUND (6), NVML_ERROR_GPU_NOT_FOUND (28)
    UNKNOWN = "unknown"  # any other code

    @classmethod
    def _missing_(cls, value: object) -> "GpuState":
        return cls.UNKNOWN


class CallTiming(Record, frozen=True, kw_only=True):
    """An NVML call that was slow, or the one that did not return."""

    call: str
    duration_ms: float
    returned: bool


class NvLinkErrors(Record, frozen=True, kw_only=True):
    """Counters of one link since the driver loaded.

    The first five are nvmlDeviceGetNvLinkErrorCounter (Hopper and older), the rest the
    NVML_FI_DEV_NVLINK_* fields of Blackwell. Bit error rates are plain numbers (1e-15).
    """

    replay: int | None = None
    recovery: int | None = None
    crc_flit: int | None = None
    crc_data: int | None = None
    ecc_data: int | None = None
    malformed_packets: int | None = None
    buffer_overrun: int | None = None
    rx_errors: int | None = None
    local_link_integrity: int | None = None
    link_recovery_successful: int | None = None
    link_recovery_failed: int | None = None
    effective_errors: int | None = None
    symbol_errors: int | None = None
    effective_ber: float | None = None
    symbol_ber: float | None = None


class NvLink(Record, frozen=True, kw_only=True):
    """One NVLink of a GPU.

    ``state`` is field 165 (or nvmlDeviceGetNvLinkState): 0 off, 1 on, 2 sleep. ``version`` is
    NVML's enum (not a generation: 6 = NVLink 4.0, 7 = 5.0).
    """

    link: int
    state: int | None = None
    version: int | None = None
    speed_mbps: int | None = None  # field 164, MB/s per direction
    remote_pci: str | None = None
    remote_type: int | None = None  # 0 GPU, 1 IBM NPU, 2 switch, 255 unknown


class GpuProcess(Record, frozen=True, kw_only=True):
    """A process that holds the GPU; ``pid`` is the one NVML reports (the host's)."""

    pid: int
    kind: str  # compute | graphics | mps
    used_memory_bytes: int | None = None


class MigInstance(Record, frozen=True, kw_only=True):
    """A MIG device under its parent."""

    uuid: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    memory_total_bytes: int | None = None


class GpuReading(Record, frozen=True, kw_only=True):
    """Everything that moves, at one instant. ``at_ns`` is the monotonic clock.

    ``*_ns`` violation counters grow while the limit is active (fields 74-81 and the newer event
    reason counters); only their differences mean something.
    """

    at_ns: int
    pstate: int | None = None
    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    graphics_clock_mhz: int | None = None
    clocks_event_reasons: int | None = None  # nvmlClocksEventReason* bits, unknown ones kept
    violation_power_ns: int | None = None  # field 74: software power cap
    violation_thermal_ns: int | None = None  # field 75: thermal, software and hardware
    violation_sync_boost_ns: int | None = None  # field 76
    violation_board_limit_ns: int | None = None  # field 77
    violation_low_utilization_ns: int | None = None  # field 78
    violation_reliability_ns: int | None = None  # field 79
    reason_sw_thermal_ns: int | None = None  # field 269 (251 before 580.82)
    reason_hw_thermal_ns: int | None = None  # field 270 (252)
    reason_hw_power_brake_ns: int | None = None  # field 271 (253)
    power_mw: int | None = None
    total_energy_mj: int | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    margin_temperature_c: int | None = None
    fan_speed_percent: int | None = None
    utilization_gpu_percent: int | None = None
    utilization_memory_percent: int | None = None
    pcie_link_generation: int | None = None
    pcie_link_width_lanes: int | None = None
    pcie_replay_count: int | None = None
    pcie_l0_to_recovery_count: int | None = None
    pcie_correctable_error_count: int | None = None
    pcie_fatal_error_count: int | None = None
    pcie_nonfatal_error_count: int | None = None
    pcie_tx_bytes: int | None = None  # cumulative, wraps
    pcie_rx_bytes: int | None = None
    memory_used_bytes: int | None = None
    ecc_volatile_correctable: int | None = None
    ecc_volatile_uncorrectable: int | None = None
    ecc_aggregate_correctable: int | None = None
    ecc_aggregate_uncorrectable: int | None = None
    ecc_volatile_sram_uncorrectable: int | None = None
    ecc_volatile_dram_uncorrectable: int | None = None
    nvlink_errors: tuple[NvLinkErrors, ...] | None = None  # in the order of Gpu.nvlinks
    nvlink_tx_kib: int | None = None  # fields 138-141, cumulative
    nvlink_rx_kib: int | None = None


class RowRemap(Record, frozen=True, kw_only=True):
    """nvmlDeviceGetRemappedRows and the bank histogram (Ampere and newer)."""

    correctable_rows: int | None = None
    uncorrectable_rows: int | None = None
    pending: bool | None = None
    failure_occurred: bool | None = None
    banks_max: int | None = None  # banks with all their spare rows left
    banks_high: int | None = None
    banks_partial: int | None = None
    banks_low: int | None = None
    banks_none: int | None = None  # banks with no spare row left


class RetiredPages(Record, frozen=True, kw_only=True):
    """nvmlDeviceGetRetiredPages (older than Ampere)."""

    multiple_single_bit: int | None = None
    double_bit: int | None = None
    pending: bool | None = None


class SramEcc(Record, frozen=True, kw_only=True):
    """nvmlDeviceGetSramEccErrorStatus (root)."""

    volatile_uncorrectable_parity: int | None = None
    volatile_uncorrectable_sec_ded: int | None = None
    volatile_correctable: int | None = None
    aggregate_uncorrectable_parity: int | None = None
    aggregate_uncorrectable_sec_ded: int | None = None
    aggregate_correctable: int | None = None
    threshold_exceeded: bool | None = None


class Fabric(Record, frozen=True, kw_only=True):
    """nvmlDeviceGetGpuFabricInfoV; the mask is raw, decoding it is the probe's work."""

    state: int | None = None  # 0 not supported, 1 not started, 2 in progress, 3 completed
    status: int | None = None  # nvmlReturn_t of the registration
    health_mask: int | None = None
    health_summary: int | None = None  # v3: 0 not supported, 1 healthy, 2 unhealthy, 3 limited
    clique_id: int | None = None
    cluster_uuid: str | None = None


class GpuLimits(Record, frozen=True, kw_only=True):
    """The part's own bounds and what an operator set."""

    sm_clock_max_mhz: int | None = None
    mem_clock_max_mhz: int | None = None
    graphics_clock_max_mhz: int | None = None
    sm_clock_customer_boost_max_mhz: int | None = None
    sm_application_clock_mhz: int | None = None
    mem_application_clock_mhz: int | None = None
    sm_default_application_clock_mhz: int | None = None
    mem_default_application_clock_mhz: int | None = None
    power_limit_mw: int | None = None  # what was asked for
    power_limit_enforced_mw: int | None = None  # the lower of that and out-of-band caps
    power_limit_default_mw: int | None = None
    power_limit_min_mw: int | None = None
    power_limit_max_mw: int | None = None
    temperature_shutdown_c: int | None = None
    temperature_slowdown_c: int | None = None
    temperature_gpu_max_c: int | None = None
    temperature_mem_max_c: int | None = None
    tlimit_shutdown_c: int | None = None  # fields 193-196: relative to the T.Limit, often <= 0
    tlimit_slowdown_c: int | None = None
    tlimit_mem_max_c: int | None = None
    tlimit_gpu_max_c: int | None = None
    supported_clocks_event_reasons: int | None = None
    pcie_max_link_generation: int | None = None  # GPU and system together
    pcie_gpu_max_link_generation: int | None = None  # the GPU alone
    pcie_max_link_width_lanes: int | None = None  # GPU and system together


class Gpu(Record, frozen=True, kw_only=True):
    """One GPU as NVML lists it. Identify it by ``uuid`` and ``pci``, never by ``index`` alone."""

    index: int
    state: GpuState
    state_detail: str | None = None  # the return code's name and text
    state_call: str | None = None  # the call that answered so, or did not return
    slow_calls: tuple[CallTiming, ...] = ()
    uuid: str | None = None
    pci: str | None = None
    name: str | None = None
    architecture: int | None = None  # NVML_DEVICE_ARCH_*: 5 Volta 6 Turing 7 Ampere 8 Ada 9 Hopper
    cuda_compute_capability: str | None = None
    serial: str | None = None
    board_part_number: str | None = None
    minor_number: int | None = None
    module_id: int | None = None
    vbios_version: str | None = None
    inforom_image_version: str | None = None
    gsp_firmware_version: str | None = None
    virtualization_mode: int | None = None  # 0 none 1 passthrough 2 vGPU 3 host vGPU 4 host vSGA
    mig_mode: bool | None = None
    mig_mode_pending: bool | None = None
    mig_instances: tuple[MigInstance, ...] = ()
    persistence_mode: bool | None = None
    compute_mode: int | None = None
    display_active: bool | None = None
    memory_total_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    ecc_mode: bool | None = None
    ecc_mode_pending: bool | None = None
    limits: GpuLimits = GpuLimits()
    row_remap: RowRemap | None = None
    retired_pages: RetiredPages | None = None
    sram_ecc: SramEcc | None = None
    recovery_action: int | None = (
        None  # field 230: 0 none 1 reset 2 reboot 3 drain-P2P 4 drain+reset 5 IMEX
    )
    fabric: Fabric | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    c2c_enabled: bool | None = None
    c2c_link_count: int | None = None
    confidential_compute: bool | None = None
    processes: tuple[GpuProcess, ...] | None = None
    readings: tuple[GpuReading, ...] = ()

    @property
    def key(self) -> str:
        """The name that gaps use for this GPU: its PCI address, else ``index N``."""
        return self.pci or f"index {self.index}"


class NvmlSection(Record, frozen=True, kw_only=True):
    """The driver as NVML shows it.

    ``init_error`` is the return code's name when nvmlInit failed
    (``NVML_ERROR_DRIVER_NOT_LOADED``), or ``hung`` when it did not return; then ``gpus`` is empty
    and says nothing.
    """

    init_error: str | None = None
    init_error_code: int | None = None
    init_detail: str | None = None
    init_ms: float | None = None
    library_path: str | None = None
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_driver_version: str | None = None
    device_count: int | None = None
    gpus: tuple[Gpu, ...] = ()
