"""PCIe links that came up with fewer lanes than both of their ends have."""

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
from probes.pci_links import is_at_work, median, nvml_widths, same_model, sysfs
from probes.pci_places import (
    Expected,
    Place,
    basis_of,
    cost_of,
    excused,
    nothing_to_judge,
    places,
)
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.view import Node


@probe("pcie.width-trained-down", needs=())
def width_trained_down(node: Node) -> Statements:
    """A PCIe link came up with fewer lanes than both of its ends have.

    Half the lanes is half the rate of every copy between host and GPU, and between GPU and
    network adapter: this rank is late at each collective. NCCL plans with the maximum and does
    not see it; nvidia-smi shows the GPU's own link only, so a switch's uplink that trained down
    slows everything behind it unnoticed. Each link up to the root port is judged by itself.

    No fault: fewer lanes than the card has because the slot or the switch port has no more (that
    is pcie.slot-limited); GPUs with C2C, whose PCIe link is narrow by design; in a virtual
    machine, GPUs that all show the same, and a lone one (info): how the host is wired can't be
    seen from inside, and clouds do wire x8. At rest links lower their speed, hardly ever their
    width (NVIDIA documents that they may), so width counts at rest too.

    Sure: proven when both ends are seen, a job runs and a sibling has all its lanes, or when the
    device is no GPU. Likely at rest or without siblings, since some cards and ports claim lanes
    that are not wired; likely also where the port above can't be seen and the expectation is
    NVML's maximum for GPU and system together, or the siblings' width. Possible when three or more
    cards are all alike: that is rather how the machine is wired or its slots are split
    (configuration). Info when an adapter's ports are slower than even the narrow link.

    Do: drain, reseat or re-cable, look at the width again. Receiver errors on the same link
    (pcie.aer-correctable-rate) point at the contact.
    """
    if (nothing := nothing_to_judge(node)) is not None:
        yield nothing
    for place in places(node):
        yield excused(place) or _judge(node, place)


def _judge(node: Node, place: Place) -> Statement:
    if not place.widths:
        return place.unread("current_link_width_lanes", "pcie_link_width_lanes")
    width = min(place.widths)
    link = place.link
    if link is not None:
        own = link.lower.max_link_width_lanes
        if own is not None and width >= own:
            return Clear(place.component)
        if (limit := link.width_max) is not None:
            if width >= limit:
                return Clear(place.component)
            return _finding(node, place, width, Expected(
                value=limit,
                basis=basis_of(own, limit),
                words=f"both ends support x{limit}",
                confidence=_how_sure(node, place, width),
            ))  # fmt: skip
    if place.gpu is not None and place.gpu.limits.pcie_max_link_width_lanes is not None:
        return _by_nvml(node, place, width)
    return _by_siblings(node, place, width)


def _how_sure(node: Node, place: Place, width: int) -> Confidence:
    """Both ends claim more lanes; some cards and ports claim lanes that nobody wired."""
    if place.link is None or not place.link.lower.is_nvidia_gpu:
        return Confidence.PROVEN
    others = [max(other.widths) for other in same_model(node, place.link.lower) if other.widths]
    if len(others) >= 2 and set(others) == {width}:
        return Confidence.POSSIBLE
    if any(other > width for other in others) and is_at_work(place.gpu):
        return Confidence.PROVEN
    return Confidence.LIKELY


def _by_nvml(node: Node, place: Place, width: int) -> Statement:
    """NVML's maximum for GPU and system together, where the port above can't be seen."""
    gpu = place.gpu
    limit = gpu.limits.pcie_max_link_width_lanes if gpu else None
    if gpu is None or limit is None or width >= limit:
        return Clear(place.component)
    siblings = [min(values) for other in node.siblings(gpu) if (values := nvml_widths(other))]
    alike = bool(siblings) and set(siblings) == {width}
    if width == 1 and (alike or gpu.memory_total_bytes is None):
        return NotApplicable("x1 by design: another path carries this model's traffic")
    guest = node.snapshot.virtualization is not None
    if guest and alike:
        note = f"all {len(siblings) + 1} are x{width}: the host's wiring, unseen from a guest"
        return Clear(place.component, note)
    return _finding(node, place, width, Expected(
        value=limit,
        basis=Basis.DEVICE_MAX,
        words=f"NVML's maximum for GPU and slot is x{limit}",
        confidence=Confidence.POSSIBLE if guest and not siblings else Confidence.LIKELY,
    ))  # fmt: skip


def _by_siblings(node: Node, place: Place, width: int) -> Statement:
    """Neither the port above nor NVML is there: only other cards of the kind tell."""
    if place.link is None:
        return place.unread("", "pcie_max_link_width_lanes")
    device = place.link.lower
    others = [min(other.widths) for other in same_model(node, device) if other.widths]
    usual = median(others)
    if usual is None or usual <= width:
        return Unread("pci", "parent", device.address)
    return _finding(node, place, width, Expected(
        value=int(usual),
        basis=Basis.PEER_MEDIAN,
        words=f"it supports x{device.max_link_width_lanes}, "
        f"the median of its {len(others)} siblings is x{usual:g}",
        confidence=Confidence.LIKELY,
    ))  # fmt: skip


def _finding(node: Node, place: Place, width: int, expected: Expected) -> Finding:
    cost = cost_of(node, place)
    by_setting = expected.confidence is Confidence.POSSIBLE  # all are alike
    # a lone GPU of a guest: the host may have wired it so
    unseen = by_setting and node.snapshot.virtualization is not None
    return Finding(
        id=width_trained_down.id,
        severity=Severity.INFO if unseen else cost.severity,
        confidence=expected.confidence,
        fault_class=FaultClass.CONFIGURATION if by_setting else FaultClass.HARDWARE,
        job_impact=JobImpact.NONE if unseen else cost.job_impact,
        component=place.component,
        summary=f"{place.words} trained x{width}, {expected.words}{place.shared}",
        evidence=tuple(_evidence(place, width, expected)),
        explains=(
            "pcie.peer-differs",
            "manifest.pcie-width",
            "pcie.aer-correctable-rate",
            "pcie.replay-growth",
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Look at how the slots are split (bifurcation) in the firmware's setup, and at "
            "the board's manual: all are alike, so the cards are not to blame.",
            disruptive=False,
        )
        if by_setting
        else Remedy(
            action=Action.RESEAT,
            text="Drain the node, reseat or re-cable the lower device of this link (riser, cable, "
            "slot) and look at its width again. If it stays narrow, try the card in another slot: "
            "a fault that moves with it is the card's.",
            disruptive=True,
        ),
    )


def _evidence(place: Place, width: int, expected: Expected) -> Iterator[Evidence]:
    link, gpu = place.link, place.gpu
    if link is not None:
        wanted = (int(expected.value), expected.basis)
        yield sysfs(link.lower, "current_link_width", width, unit="lanes", expected=wanted)
        ends = [end for end in (link.lower, link.upper) if end is not None]
        for end in ends:
            if end.max_link_width_lanes is not None:
                yield sysfs(end, "max_link_width", end.max_link_width_lanes, unit="lanes")
        for end in ends:
            counts = end.readings[-1].aer_correctable if end.readings else None
            if counts and any(counts.values()):
                total = counts.get("TOTAL_ERR_COR", sum(counts.values()))
                quote = " ".join(f"{name} {count}" for name, count in counts.items() if count)
                yield sysfs(end, "aer_dev_correctable", total, unit="since boot", quote=quote)
    if gpu is not None and (seen := nvml_widths(gpu)):
        yield shown(
            "nvmlDeviceGetCurrPcieLinkWidth",
            min(seen),
            place.recheck(),
            unit="lanes",
            expected=(gpu.limits.pcie_max_link_width_lanes, Basis.DEVICE_MAX),
        )
