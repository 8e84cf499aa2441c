"""What the host probes share: whether GPUs and RDMA ports are here, busy CPUs, evidence."""

from __future__ import annotations

from collections.abc import Callable

from probes.finding import Basis, Evidence, Expectation, Scalar
from probes.registry import NotApplicable
from probes.snapshot.host import CpuPolicy, HostReading, HostSection
from probes.snapshot.nic import NicPort
from probes.view import Node, delta

MIB = 1 << 20
GIB = 1 << 30

NO_GPU = NotApplicable("no NVIDIA GPU on this machine")


def facts(node: Node) -> HostSection:
    """The host section; the probes that call this need it."""
    section = node.snapshot.host_facts
    return section if section is not None else HostSection()


def gpu_count(node: Node) -> int:
    """GPUs that this machine itself works with, by whichever source saw most of them.

    A GPU bound to another driver (vfio-pci) is handed to a guest, as virtual functions are.
    """
    pci = node.snapshot.pci
    on_bus = [
        device
        for device in (pci.devices if pci else ())
        if device.is_nvidia_gpu
        and not device.is_virtual_function
        and device.driver in (None, "nvidia", "nouveau")
    ]
    known_to_driver = facts(node).driver.gpu_addresses or ()
    return max(len(node.gpus), len(on_bus), len(known_to_driver))


def rdma_ports(node: Node) -> tuple[NicPort, ...]:
    """Ports of RDMA devices that have a link."""
    nics = node.snapshot.nics
    return tuple(
        port
        for port in (nics.ports if nics else ())
        if port.port is not None and port.state == "ACTIVE"
    )


def last(section: HostSection) -> HostReading | None:
    """The newest reading."""
    return section.readings[-1] if section.readings else None


def per_second(section: HostSection, value: Callable[[HostReading], int | None]) -> float | None:
    """The rate of a counter over the sample; None with one reading or after a reset."""
    moved = delta(section.readings, value)
    return None if moved is None else moved[0] * 1e9 / moved[1]


def busy_cpus(section: HostSection, busy_percent: float) -> dict[int, int] | None:
    """MHz of every CPU that was busy during the sample: the highest of its readings.

    None when it can't be told: one reading only, or no ticks or frequencies.
    """
    readings = [reading.cpu for reading in section.readings if reading.cpu]
    if len(readings) < 2:
        return None
    first, newest = readings[0], readings[-1]
    online = section.cpu.online
    if not all(len(r.busy_ticks) == len(r.total_ticks) == len(online) for r in (first, newest)):
        return None
    if not any(len(reading.mhz) == len(online) for reading in readings):
        return None
    found = {}
    for at, cpu in enumerate(online):
        total = newest.total_ticks[at] - first.total_ticks[at]
        busy = newest.busy_ticks[at] - first.busy_ticks[at]
        clocks = [r.mhz[at] for r in readings if len(r.mhz) == len(online)]
        known = [mhz for mhz in clocks if mhz is not None]
        if known and total > 0 and 100 * busy >= busy_percent * total:
            found[cpu] = max(known)
    return found


def expected_mhz(
    policy: CpuPolicy, below_base_percent: float, below_max_percent: float
) -> tuple[float, int, str] | None:
    """``(least MHz, reference MHz, its name)`` of a busy CPU; None when nothing bounds it.

    The base clock is what the vendor guarantees under all-core load; the maximum is a one-core
    boost, so much less than that is still normal.
    """
    if policy.base_mhz is not None:
        return policy.base_mhz * (1 - below_base_percent / 100), policy.base_mhz, "base"
    if policy.hardware_max_mhz is not None:
        least = policy.hardware_max_mhz * (1 - below_max_percent / 100)
        return least, policy.hardware_max_mhz, "maximum"
    return None


def evidence(
    locator: str,
    observed: Scalar | None,
    recheck: str,
    *,
    unit: str | None = None,
    expected: tuple[Scalar, Basis] | None = None,
    quote: str | None = None,
    source: str | None = None,
) -> Evidence:
    """One reading; the source follows from the path unless it is named."""
    if source is None:
        source = "procfs" if locator.startswith("/proc") else "sysfs"
    return Evidence(
        source=source,
        locator=locator,
        observed=observed,
        unit=unit,
        expected=Expectation(value=expected[0], basis=expected[1]) if expected else None,
        quote=quote[:300] if quote else None,
        recheck=recheck,
    )


def size(count: float) -> str:
    """Bytes for people."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{count:.0f} B"
