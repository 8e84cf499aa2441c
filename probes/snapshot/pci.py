"""PCI devices from /sys/bus/pci: GPUs, NICs, NVSwitches and every bridge above them.

Source: Documentation/ABI/testing/sysfs-bus-pci, sysfs-bus-pci-devices-aer_stats.
"""

from probes.record import Record


class PciReading(Record, frozen=True, kw_only=True):
    """What moves, at one instant of the monotonic clock. Counters are since boot or hot-plug."""

    at_ns: int
    current_link_speed_gts: float | None = None
    current_link_width_lanes: int | None = None
    aer_correctable: dict[str, int] | None = None  # by error name; TOTAL_ERR_COR is the sum
    aer_nonfatal: dict[str, int] | None = None
    aer_fatal: dict[str, int] | None = None
    config_all_ones: bool | None = None  # the vendor id reads 0xffff: off the bus
    link_status_all_ones: bool | None = None  # the width reads 63: off the bus, or about to be


class PciDevice(Record, frozen=True, kw_only=True):
    """One function. ``parent`` is the address of the bridge above, None at the root complex."""

    address: str  # dddd:bb:dd.f
    parent: str | None = None
    class_code: int | None = None  # 0xccsspp
    vendor_id: int | None = None
    device_id: int | None = None
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    revision: int | None = None
    driver: str | None = None
    numa_node: int | None = None  # None when the firmware names none (the kernel's -1)
    local_cpulist: str | None = None
    iommu_group: str | None = None
    iommu_group_type: str | None = None  # identity (no translation), DMA, DMA-FQ
    physical_slot: str | None = None
    power_state: str | None = None
    is_virtual_function: bool = False
    max_link_speed_gts: float | None = None
    max_link_width_lanes: int | None = None
    acs_control: int | None = None  # ACS control register of a switch's downstream port; root
    readings: tuple[PciReading, ...] = ()

    @property
    def is_nvidia_gpu(self) -> bool:
        """Vendor 10de, class 0x0300 (VGA) or 0x0302 (3D controller)."""
        return self.vendor_id == 0x10DE and (self.class_code or 0) >> 8 in (0x0300, 0x0302)

    @property
    def is_nvswitch(self) -> bool:
        """Vendor 10de, class 0x0680 (other bridge)."""
        return self.vendor_id == 0x10DE and (self.class_code or 0) >> 8 == 0x0680

    @property
    def is_nic(self) -> bool:
        """Class 0x02 (network) or 0x0c06 (InfiniBand)."""
        code = (self.class_code or 0) >> 8
        return code >> 8 == 0x02 or code == 0x0C06

    @property
    def is_bridge(self) -> bool:
        """Class 0x0604: a root port or a port of a switch."""
        return (self.class_code or 0) >> 8 == 0x0604


class PciSection(Record, frozen=True, kw_only=True):
    """The devices that matter and the chains above them, by address."""

    devices: tuple[PciDevice, ...] = ()
