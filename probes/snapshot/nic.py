"""InfiniBand, RoCE and Ethernet ports.

Source: Documentation/ABI/stable/sysfs-class-infiniband, Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

from probes.record import Record


class PortReading(Record, frozen=True, kw_only=True):
    """What moves, at one instant of the monotonic clock; counters are the kernel's own names."""

    at_ns: int
    counters: dict[str, int] = {}


class NicPort(Record, frozen=True, kw_only=True):
    """One port of an RDMA device, or one network interface without RDMA (``port`` is None)."""

    device: str  # mlx5_0, eth0
    port: int | None = None
    pci: str | None = None
    driver: str | None = None
    netdevs: tuple[str, ...] = ()
    link_layer: str | None = None  # InfiniBand | Ethernet
    state: str | None = None  # ACTIVE, DOWN, INIT, ARMED; for a netdev: operstate
    phys_state: str | None = None  # LinkUp, Polling, Disabled
    admin_up: bool | None = None
    rate_gbps: float | None = None
    rate_text: str | None = None
    max_rate_gbps: float | None = None
    firmware_version: str | None = None
    board_id: str | None = None
    readings: tuple[PortReading, ...] = ()


class NicSection(Record, frozen=True, kw_only=True):
    """All ports."""

    ports: tuple[NicPort, ...] = ()
