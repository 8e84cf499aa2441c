"""PCIe links as the rules see them: both ends, what they can do, what they run at, who is behind.

A device's way to the root complex is a row of functions, and every second step of it is a wire:
from the device to the port above it, then from the switch's own upstream port to the port above
that. Between a switch's upstream and downstream ports there is no link, so nothing to compare.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from probes.finding import Basis, Evidence, Expectation, Scalar
from probes.gpu_facts import LOADED_PERCENT, not_for_vgpu
from probes.registry import Unread
from probes.snapshot.gpu import Gpu, GpuReading
from probes.snapshot.pci import PciDevice
from probes.stats import median_low
from probes.view import Node, is_busy

NumberT = TypeVar("NumberT", int, float)

_DEVICES = "/sys/bus/pci/devices"
# PCI Express Base Specification: GT/s, generation, and Gbit/s per lane after line coding.
_GENERATIONS = (
    (2.5, 1, 2.0),
    (5.0, 2, 4.0),
    (8.0, 3, 7.877),
    (16.0, 4, 15.754),
    (32.0, 5, 31.508),
    (64.0, 6, 60.5),
    (128.0, 7, 121.0),
)
_BY_SPEED = {speed: (generation, gbps) for speed, generation, gbps in _GENERATIONS}
_BY_GENERATION = {generation: speed for speed, generation, _ in _GENERATIONS}
_DEEPEST_WORKING_PSTATE = 2  # compute runs in P0 or P2, rest is P5 and deeper


def generation_of(speed_gts: float | None) -> int | None:
    """The PCIe generation of a speed; None for one that no specification knows."""
    return _BY_SPEED[speed_gts][0] if speed_gts in _BY_SPEED else None


def speed_of(generation: int | None) -> float | None:
    """GT/s of a PCIe generation."""
    return _BY_GENERATION.get(generation) if generation is not None else None


def speed_words(speed_gts: float) -> str:
    """The speed in a line of text."""
    generation = generation_of(speed_gts)
    return f"Gen{generation}" if generation else f"{speed_gts:g} GT/s"


def bandwidth_gbps(speed_gts: float | None, width_lanes: int | None) -> float | None:
    """Gbit/s of a link in one direction, line coding taken off, packets' headers not."""
    if speed_gts not in _BY_SPEED or width_lanes is None:
        return None
    return _BY_SPEED[speed_gts][1] * width_lanes


class Link(msgspec.Struct, frozen=True):
    """One wire: the function at its lower end and the port at its upper end.

    ``upper`` is None where it can't be seen or is a hypervisor's invention. ``behind`` are the
    GPUs and network adapters whose traffic takes this link.
    """

    lower: PciDevice
    upper: PciDevice | None
    behind: tuple[PciDevice, ...]
    width_max: int | None  # the lanes that both ends have; None unless both are known
    speed_max: float | None  # the speed that both ends reach; None unless both are known
    widths: tuple[int, ...]  # lanes in use, by reading; the two ends show the same link
    speeds: tuple[float, ...]  # speed in use, by reading

    @property
    def is_uplink(self) -> bool:
        """Whether a switch hangs on it, not a device."""
        return self.lower.is_bridge


def _link(lower: PciDevice, upper: PciDevice | None, behind: list[PciDevice]) -> Link:
    above = upper.readings if upper else ()
    pairs = list(itertools.zip_longest(lower.readings, above[: len(lower.readings)]))
    return Link(
        lower=lower,
        upper=upper,
        behind=tuple(behind),
        width_max=_both(lower.max_link_width_lanes, upper.max_link_width_lanes) if upper else None,
        speed_max=_both(lower.max_link_speed_gts, upper.max_link_speed_gts) if upper else None,
        widths=_first(
            (own.current_link_width_lanes, up.current_link_width_lanes if up else None)
            for own, up in pairs
        ),
        speeds=_first(
            (own.current_link_speed_gts, up.current_link_speed_gts if up else None)
            for own, up in pairs
        ),
    )


def _both(one: NumberT | None, other: NumberT | None) -> NumberT | None:
    return None if one is None or other is None else min(one, other)


def _first(values: Iterable[tuple[NumberT | None, NumberT | None]]) -> tuple[NumberT, ...]:
    """Of each pair the first that is known."""
    return tuple(found for one, other in values if (found := one or other))


def links(node: Node) -> tuple[Link, ...]:
    """Every link that a GPU's or a network adapter's traffic takes, by the lower end's address."""
    return node.memo("pci links", _find_links)


def own_links(node: Node) -> tuple[Link, ...]:
    """The links that GPUs and network adapters hang on themselves."""
    return tuple(link for link in links(node) if not link.is_uplink)


def _find_links(node: Node) -> tuple[Link, ...]:
    ends: dict[str, tuple[PciDevice, PciDevice | None]] = {}
    behind: dict[str, list[PciDevice]] = {}
    guest = node.snapshot.virtualization is not None
    for device in sorted(node.pci_by_address.values(), key=lambda device: device.address):
        if not (device.is_nvidia_gpu or device.is_nic) or device.is_virtual_function:
            continue
        chain = node.pci_chain(device.address)
        for at in range(0, len(chain), 2):
            lower = chain[at]
            if guest and lower.is_bridge:
                break  # a guest's bridges are the hypervisor's invention
            upper = chain[at + 1] if at + 1 < len(chain) and not guest else None
            # the functions of one device, and all devices below one port, share a link
            key = upper.address if upper else lower.address[:-2]
            ends.setdefault(key, (lower, upper if upper and _is_plausible(lower, upper) else None))
            behind.setdefault(key, []).append(device)
    found = [_link(lower, upper, behind[key]) for key, (lower, upper) in ends.items()]
    return tuple(sorted(found, key=lambda link: link.lower.address))


def _is_plausible(lower: PciDevice, upper: PciDevice) -> bool:
    """False for an emulated port, whose maximum is below what the link runs at."""
    return all(
        (reading.current_link_width_lanes or 0) <= (upper.max_link_width_lanes or 255)
        and (reading.current_link_speed_gts or 0) <= (upper.max_link_speed_gts or 1000)
        for reading in lower.readings
    )


def ports_between(devices: Mapping[str, PciDevice]) -> list[PciDevice]:
    """Downstream ports of a switch through which a GPU reaches another device on it."""
    under: dict[str, dict[str, PciDevice]] = {}
    with_gpu: set[str] = set()
    for device in devices.values():
        if not (device.is_nvidia_gpu or device.is_nic) or device.is_virtual_function:
            continue
        port = devices.get(device.parent or "")
        for _ in devices:  # a chain is not longer than there are functions
            if port is None or port.parent is None:
                break
            under.setdefault(port.parent, {})[port.address] = port
            if device.is_nvidia_gpu:
                with_gpu.add(port.parent)
            port = devices.get(port.parent)
    return [
        port
        for switch, ports in under.items()
        if len(ports) > 1 and switch in with_gpu
        for port in ports.values()
    ]


def same_model(node: Node, device: PciDevice) -> tuple[Link, ...]:
    """The own links of the node's other devices with the same ids."""
    return tuple(
        link
        for link in own_links(node)
        if link.lower.address[:-2] != device.address[:-2]
        and (link.lower.vendor_id, link.lower.device_id) == (device.vendor_id, device.device_id)
        and link.lower.subsystem_device_id == device.subsystem_device_id
    )


def is_off_bus(device: PciDevice) -> bool:
    """Whether the newest reading shows that nobody answers: all ones.

    A device in D3cold is switched off on purpose and reads the same.
    """
    if not device.readings or device.power_state == "D3cold":
        return False
    newest = device.readings[-1]
    return bool(newest.config_all_ones or newest.link_status_all_ones)


def is_unknown(node: Node, field: str, address: str) -> bool:
    """Whether a field is None because it could not be read, not because there is nothing."""
    return any(gap.covers("pci", field, address) for gap in node.snapshot.gaps)


def unknown_chains(node: Node) -> Iterator[Unread]:
    """One statement for each GPU whose bridges are not known (a copy without links)."""
    for device in node.pci_by_address.values():
        if device.is_nvidia_gpu and is_unknown(node, "parent", device.address):
            yield Unread("pci", "parent", device.address)


def off_bus_above(node: Node, device: PciDevice) -> PciDevice | None:
    """The highest function on the device's way that does not answer; maybe the device itself."""
    silent = [at for at in node.pci_chain(device.address) if is_off_bus(at)]
    return silent[-1] if silent else None


# --- GPUs ---


def pci_gpus(node: Node) -> list[PciDevice]:
    """The NVIDIA GPUs on the PCI bus, virtual functions left out."""
    return [
        device
        for device in node.pci_by_address.values()
        if device.is_nvidia_gpu and not device.is_virtual_function
    ]


def gpu_at(node: Node, address: str) -> Gpu | None:
    """The GPU that NVML lists at an address."""
    return node.memo("gpu by pci", lambda n: {gpu.pci: gpu for gpu in n.gpus if gpu.pci}).get(
        address
    )


def gpu_of(node: Node, link: Link) -> Gpu | None:
    """The GPU on the link's lower end as NVML shows it."""
    return gpu_at(node, link.lower.address) if link.lower.is_nvidia_gpu else None


def not_by_pcie(gpu: Gpu) -> str | None:
    """Why a GPU's PCIe link says nothing about its speed."""
    if gpu.c2c_enabled or gpu.c2c_link_count:
        return "C2C carries this GPU's traffic; its PCIe link may be narrow and slow by design"
    return not_for_vgpu(gpu)


def is_at_work(gpu: Gpu | None) -> bool | None:
    """True when every reading shows the GPU busy and out of its resting P-states.

    A desktop's few percent in P8 are no reason for the link to wake up.
    """
    if gpu is None or not gpu.readings:
        return None
    answers = [_works(reading) for reading in gpu.readings]
    return False if False in answers else None if None in answers else True


def _works(reading: GpuReading) -> bool | None:
    busy = is_busy(reading)
    if not busy or reading.pstate is None or reading.pstate <= _DEEPEST_WORKING_PSTATE:
        return busy
    return (reading.utilization_gpu_percent or 0) >= LOADED_PERCENT


def nvml_widths(gpu: Gpu | None) -> tuple[int, ...]:
    """Lanes in use as NVML reads them; a lost GPU's all ones are none."""
    values = [r.pcie_link_width_lanes for r in gpu.readings] if gpu else []
    return tuple(value for value in values if value and value <= 32)


def nvml_speeds(gpu: Gpu | None) -> tuple[float, ...]:
    """Speed in use as NVML reads the generation."""
    values = [speed_of(r.pcie_link_generation) for r in gpu.readings] if gpu else []
    return tuple(value for value in values if value is not None)


# --- network adapters ---


def port_names(node: Node, device: PciDevice) -> tuple[str, ...]:
    """The RDMA devices or interfaces of an adapter, all its functions together."""
    ports = node.snapshot.nics.ports if node.snapshot.nics else ()
    names = [port.device for port in ports if _is_of(port.pci, device)]
    return tuple(dict.fromkeys(names))


def port_rate_gbps(node: Node, device: PciDevice) -> float | None:
    """What the adapter's ports bring together; None when no port's rate is known."""
    ports = node.snapshot.nics.ports if node.snapshot.nics else ()
    rates = [port.rate_gbps for port in ports if _is_of(port.pci, device) and port.rate_gbps]
    return sum(rates) if rates else None


def _is_of(pci: str | None, device: PciDevice) -> bool:
    return pci is not None and pci[:-2] == device.address[:-2]


# --- words ---


def device_words(node: Node, device: PciDevice) -> str:
    """A device or port in a line of text."""
    if device.is_nvidia_gpu:
        return f"GPU {device.address}"
    if device.is_nic:
        names = port_names(node, device)
        return f"NIC {device.address}" + (f" ({', '.join(names[:2])})" if names else "")
    if device.is_bridge:
        return f"{'switch' if device.parent else 'root'} port {device.address}"
    return f"{'NVSwitch' if device.is_nvswitch else 'device'} {device.address}"


def link_words(node: Node, link: Link) -> str:
    """A link in a line of text, both ends named."""
    to = f" to {device_words(node, link.upper)}" if link.upper else ""
    if link.is_uplink:
        return f"Switch uplink {link.lower.address}{to}"
    return f"{device_words(node, link.lower)}: link{to}"


def sharers_words(node: Node, link: Link) -> str:
    """Who uses a switch's uplink: by address when they are few."""
    if not link.is_uplink:
        return ""
    gpus = _devices(device for device in link.behind if device.is_nvidia_gpu)
    nics = _devices(device for device in link.behind if device.is_nic)
    if len(gpus) + len(nics) > 3:
        parts = [_count(len(gpus), "GPU"), _count(len(nics), "NIC")]
    else:
        parts = [*(f"GPU {at}" for at in gpus), *(f"NIC {at}" for at in nics)]
    return "; shared by " + ", ".join(part for part in parts if part)


def _devices(functions: Iterable[PciDevice]) -> list[str]:
    """The first function's address of each device."""
    firsts: dict[str, str] = {}
    for function in functions:
        firsts.setdefault(function.address[:-2], function.address)
    return list(firsts.values())


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}" if number else ""


def sysfs(
    device: PciDevice,
    name: str,
    observed: Scalar | None,
    *,
    unit: str | None = None,
    expected: tuple[Scalar, Basis] | None = None,
    quote: str | None = None,
) -> Evidence:
    """A file of a PCI function as evidence."""
    path = f"{_DEVICES}/{device.address}/{name}"
    return Evidence(
        source="sysfs",
        locator=path,
        observed=observed,
        unit=unit,
        expected=Expectation(value=expected[0], basis=expected[1]) if expected else None,
        quote=quote,
        recheck=f"{'readlink' if name == 'driver' else 'cat'} {path}",
    )


def median(values: Iterable[float]) -> float | None:
    """The lower median, so that it is one of the values; None of nothing."""
    known = list(values)
    return median_low(known) if known else None
