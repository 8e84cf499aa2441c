"""Slots and switch uplinks that can do less than the devices on them."""

from __future__ import annotations

from collections.abc import Iterator

from probes.finding import (
    Action,
    Basis,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gpu_facts import shown
from probes.pci_links import (
    Link,
    bandwidth_gbps,
    device_words,
    links,
    port_rate_gbps,
    same_model,
    sharers_words,
    speed_of,
    speed_words,
    sysfs,
    unknown_chains,
)
from probes.pci_places import Place, excused, places
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.snapshot.pci import PciDevice
from probes.view import Node

Shape = tuple[float | None, int | None]  # GT/s, lanes


@probe("pcie.slot-limited", needs=())
def slot_limited(node: Node) -> Statements:
    """The slot or switch port above a card has fewer lanes or a lower generation than the card.

    The link is trained as well as it can be; the machine is built, or the card plugged, this way.
    Copies are slower than the card could make them.

    It is info when all cards of the model have the same (that is the design of the machine:
    x8 slots, a Gen5 card in a Gen4 board), and nothing at all for an adapter whose ports are
    slower than the link. It is a warning when other cards of the same model on this node have a
    better slot, or when an adapter's ports are faster than its link: then moving the card helps.

    Not applicable: GPUs with C2C, and virtual machines, where the port above is invented.

    Sure: proven where the port above is seen, likely where only NVML's two maxima (GPU alone, GPU
    and system) differ.

    Do: move the card to a wider slot, or look for a bifurcation or speed setting of this slot in
    the firmware's setup.
    """
    for place in places(node):
        if place.link is None or not place.link.is_uplink:
            yield excused(place) or _slot(node, place)


@probe("pcie.upstream-bottleneck", needs=("pci",))
def upstream_bottleneck(node: Node) -> Statements:
    """A switch's uplink is built narrower or slower than a device behind it.

    Copies to and from host memory, and between sockets, pass through the uplink, shared by all
    devices behind the switch. nvidia-smi does not show it: it reads the GPU's own link only.

    No fault: an uplink as wide as one device that several share. That is how these machines are
    built; traffic between devices on one switch does not take it. An uplink that trained down is
    pcie.width-trained-down or pcie.speed-trained-down.

    A warning when the node's other GPUs of the model have a better way up, else info. Proven.

    Do: look at the slot and cable of the switch board and at the bifurcation of the root port.
    """
    if node.snapshot.virtualization is not None:
        yield NotApplicable("virtual machine: its bridges are the hypervisor's invention")
        return
    uplinks = [link for link in links(node) if link.is_uplink]
    yield from unknown_chains(node)
    if not uplinks:
        yield NotApplicable("no PCIe switch between the devices and the root ports")
    for link in uplinks:
        yield _uplink(node, link)


# --- slot ---


def _slot(node: Node, place: Place) -> Statement:
    if node.snapshot.virtualization is not None:
        return NotApplicable("virtual machine: the port above the device is invented")
    card, slot = _card(place), _above(place)
    if place.link is not None and card == (None, None):
        return Unread("pci", "max_link_width_lanes", place.link.lower.address)
    if slot == (None, None):
        return place.unread("parent", "pcie_max_link_generation")
    lost = [
        text
        for text in (
            f"x{slot[1]} of x{card[1]}" if _below(slot[1], card[1]) else "",
            f"{speed_words(slot[0] or 0)} of {speed_words(card[0] or 0)}"
            if _below(slot[0], card[0])
            else "",
        )
        if text
    ]
    if not lost:
        return Clear(place.component)
    return _slot_finding(node, place, slot, card, " and ".join(lost))


def _card(place: Place) -> Shape:
    gpu, link = place.gpu, place.link
    speed = link.lower.max_link_speed_gts if link else None
    if speed is None and gpu is not None:
        speed = speed_of(gpu.limits.pcie_gpu_max_link_generation)
    return speed, link.lower.max_link_width_lanes if link else None


def _above(place: Place) -> Shape:
    """What the port above can do; from NVML what GPU and system can do together."""
    if place.link is not None and place.link.upper is not None:
        upper = place.link.upper
        return upper.max_link_speed_gts, upper.max_link_width_lanes
    if place.gpu is None:
        return None, None
    limits = place.gpu.limits
    return speed_of(limits.pcie_max_link_generation), limits.pcie_max_link_width_lanes


def _below(value: float | None, of: float | None) -> bool:
    return value is not None and of is not None and value < of


def _slot_finding(node: Node, place: Place, slot: Shape, card: Shape, lost: str) -> Finding | Clear:
    seen = place.link is not None and place.link.upper is not None
    name = place.words.partition(": link")[0]
    better = _better_slots(node, place, slot)
    rate = port_rate_gbps(node, place.link.lower) if place.link else None
    left = bandwidth_gbps(slot[0], slot[1])
    severity, impact, why = Severity.INFO, JobImpact.NONE, "as built: not trained down"
    if better:
        severity, impact = Severity.WARNING, JobImpact.SLOWS
        why = f"siblings with a better slot: {better}"
    elif rate is not None and left is not None:
        if left >= rate:
            return Clear(place.component, f"slot gives {lost}: enough for ports of {rate:g} Gbit/s")
        severity, impact = Severity.WARNING, JobImpact.SLOWS
        why = f"{left:.0f} Gbit/s for ports of {rate:g} Gbit/s"
    return Finding(
        id=slot_limited.id,
        severity=severity,
        confidence=Confidence.PROVEN if seen else Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=impact,
        component=place.component,
        summary=f"{name} sits in a slot that gives {lost} ({why})",
        evidence=tuple(_slot_evidence(place, slot, card)),
        explains=("pcie.peer-differs", "manifest.pcie-width", "manifest.pcie-generation"),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Move the card to a slot that gives what it can, or look for bifurcation and "
            f"speed of slot {_slot_name(node, place) or '(unnamed)'} in the firmware's setup; "
            "nothing to do where the machine is built like this.",
            disruptive=True,
        ),
    )


def _better_slots(node: Node, place: Place, slot: Shape) -> int:
    """How many cards of the same model have a slot with more."""
    if place.link is not None and place.link.upper is not None:
        shapes = [
            (other.upper.max_link_speed_gts, other.upper.max_link_width_lanes)
            for other in same_model(node, place.link.lower)
            if other.upper is not None
        ]
    elif place.gpu is not None:
        shapes = [
            (
                speed_of(other.limits.pcie_max_link_generation),
                other.limits.pcie_max_link_width_lanes,
            )
            for other in node.siblings(place.gpu)
        ]
    else:
        shapes = []
    return sum(_below(slot[0], speed) or _below(slot[1], width) for speed, width in shapes)


def _slot_name(node: Node, place: Place) -> str | None:
    """The nearest named slot on the way up."""
    if place.link is None:
        return None
    chain = node.pci_chain(place.link.lower.address)
    return next((device.physical_slot for device in chain if device.physical_slot), None)


def _slot_evidence(place: Place, slot: Shape, card: Shape) -> Iterator[Evidence]:
    link, gpu = place.link, place.gpu
    if link is not None and link.upper is not None:
        yield from _maxima(link.upper, Basis.SLOT_MAX, card)
        yield from _maxima(link.lower, Basis.DEVICE_MAX, (None, None))
    elif gpu is not None:
        limits = gpu.limits
        if limits.pcie_gpu_max_link_generation is not None:
            yield shown(
                "nvmlDeviceGetMaxPcieLinkGeneration",
                limits.pcie_max_link_generation,
                place.recheck(),
                unit="generation",
                expected=(limits.pcie_gpu_max_link_generation, Basis.DEVICE_MAX),
            )
        if card[1] is not None:
            yield shown(
                "nvmlDeviceGetMaxPcieLinkWidth",
                slot[1],
                place.recheck(),
                unit="lanes",
                expected=(card[1], Basis.DEVICE_MAX),
            )


def _maxima(device: PciDevice, basis: Basis, expected: Shape) -> Iterator[Evidence]:
    speed, width = device.max_link_speed_gts, device.max_link_width_lanes
    if width is not None:
        wanted = (expected[1], basis) if expected[1] is not None else None
        yield sysfs(device, "max_link_width", width, unit="lanes", expected=wanted)
    if speed is not None:
        wanted_speed = (expected[0], basis) if expected[0] is not None else None
        yield sysfs(device, "max_link_speed", speed, unit="GT/s", expected=wanted_speed)


# --- uplink ---


def _uplink(node: Node, link: Link) -> Statement:
    component = node.pci_component(link.lower)
    have = bandwidth_gbps(link.speed_max, link.width_max)
    if have is None:
        return Unread("pci", "max_link_width_lanes", link.lower.address)
    needs = {
        own.lower.address: need
        for own in _children(node, link)
        if (need := bandwidth_gbps(own.speed_max, own.width_max)) is not None
    }
    if not needs:
        return Unread("pci", "max_link_width_lanes", link.behind[0].address)
    widest = max(needs, key=lambda address: needs[address])
    if have >= needs[widest]:
        total = sum(needs.values())
        note = f"{len(needs)} devices share it, by design" if total > have else None
        return Clear(component, note)
    child = next(own for own in _children(node, link) if own.lower.address == widest)
    others = [
        other
        for other in links(node)
        if other.is_uplink
        and other.lower.address != link.lower.address
        and (bandwidth_gbps(other.speed_max, other.width_max) or 0) > have
    ]
    return Finding(
        id=upstream_bottleneck.id,
        severity=Severity.WARNING if others else Severity.INFO,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS if others else JobImpact.NONE,
        component=component,
        summary=_uplink_summary(node, link, child),
        evidence=(
            *_maxima(link.lower, Basis.SLOT_MAX, (child.speed_max, child.width_max)),
            *(_maxima(link.upper, Basis.SLOT_MAX, (None, None)) if link.upper else ()),
            *_maxima(child.lower, Basis.DEVICE_MAX, (None, None)),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text=f"{len(others)} uplinks of this node are better: compare slot, cable and root "
            "port of the switch board."
            if others
            else "Nothing to do where the machine is built like this; else look at the slot, the "
            "cable and the bifurcation of the root port above the switch.",
            disruptive=bool(others),
        ),
    )


def _children(node: Node, link: Link) -> list[Link]:
    """The own links of the devices behind an uplink."""
    behind = {device.address for device in link.behind}
    return [own for own in links(node) if not own.is_uplink and own.lower.address in behind]


def _uplink_summary(node: Node, link: Link, child: Link) -> str:
    upper = f" to {device_words(node, link.upper)}" if link.upper else ""
    return (
        f"Switch uplink {link.lower.address}{upper} has {_shape(link)} at most, "
        f"{device_words(node, child.lower)} behind it {_shape(child)}{sharers_words(node, link)}"
    )


def _shape(link: Link) -> str:
    return f"{speed_words(link.speed_max or 0)} x{link.width_max}"
