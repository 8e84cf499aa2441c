"""InfiniBand, RoCE and Ethernet ports.

Source: Documentation/ABI/stable/sysfs-class-infiniband, Documentation/ABI/testing/sysfs-class-net.
"""

from probes.record import Record


class PortReading(Record, frozen=True, kw_only=True):
    """What moves, at one instant of the monotonic clock; counters are the kernel's own names.

    Counters count since the device was initialised. The InfiniBand ones stop at their ceiling
    (255 for an 8-bit counter) instead of wrapping.
    """

    at_ns: int
    state: str | None = None  # as NicPort.state
    counters: dict[str, int] = {}


class NicPort(Record, frozen=True, kw_only=True):
    """One port of an RDMA device, or one network interface without RDMA (``port`` is None)."""

    device: str  # mlx5_0, eth0
    port: int | None = None
    pci: str | None = None
    driver: str | None = None
    pci_id: str | None = None  # vendor:device subsystem-vendor:subsystem-device, in hex
    is_virtual_function: bool = False
    netdevs: tuple[str, ...] = ()
    link_layer: str | None = None  # InfiniBand | Ethernet
    state: str | None = None  # ACTIVE, DOWN, INIT, ARMED; for a netdev: operstate
    phys_state: str | None = None  # LinkUp, Polling, Disabled
    admin_up: bool | None = None  # IFF_UP of the Ethernet interface
    carrier: bool | None = None  # of the Ethernet interface; unreadable while it is down
    rate_gbps: float | None = None  # of a port without link it means nothing
    rate_text: str | None = None
    width_lanes: int | None = None  # the "4X" of the rate
    firmware_version: str | None = None
    board_id: str | None = None
    readings: tuple[PortReading, ...] = ()

    @property
    def key(self) -> str:
        """The name that gaps and baselines use: ``device/port``, of a netdev ``device``."""
        return self.device if self.port is None else f"{self.device}/{self.port}"


class NicSection(Record, frozen=True, kw_only=True):
    """All ports of physical network adapters, RDMA devices first."""

    ports: tuple[NicPort, ...] = ()
