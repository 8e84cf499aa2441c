"""GPUs' PCIe links against their siblings and against the operator's manifest."""

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
    Scalar,
    Severity,
)
from probes.gpu_facts import shown
from probes.node.pcie import width_trained_down
from probes.node.pcie_slot import slot_limited
from probes.node.pcie_speed import speed_drop_under_load, speed_trained_down
from probes.pci_links import generation_of, is_at_work, median, speed_of, speed_words, sysfs
from probes.pci_places import Place, excused, places
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.view import Node

_COMPARE = Remedy(
    action=Action.RECONFIGURE,
    text="Compare slot, riser, cable and firmware settings (bifurcation, speed) with a sibling's; "
    "swap the two cards: what moves with the card is the card's.",
    disruptive=True,
)


@probe("pcie.peer-differs", needs=())
def peer_differs(node: Node) -> Statements:
    """A GPU's PCIe link is narrower or slower than its siblings', and nothing else says why.

    GPUs of one model in one machine are wired alike as a rule, and in a synchronous job all of
    them wait for the one with the slowest copies. This is the net below the other PCIe rules: it
    speaks where the port above can't be seen (virtual machine, container) or where the card
    itself claims less than its siblings do.

    No fault: a slower link at rest. Only GPUs that are all busy are compared in speed.

    Sure: likely with three or more siblings, else possible: nobody knows which of two is right.

    Do: compare the two slots; swap the cards.
    """
    told = node.memo("pcie told", _told)
    groups: dict[object, list[Place]] = {}
    for place in _gpu_places(node):
        groups.setdefault(_model(place), []).append(place)
    for members in groups.values():
        for place in members:
            others = [other for other in members if other is not place]
            if (excuse := excused(place)) is not None:
                yield excuse
            elif not others:
                yield NotApplicable("no other GPU of the model to compare with")
            elif place.component in told:
                yield Clear(place.component, "its link has a finding of its own")
            else:
                yield _against_peers(place, others)


@probe("manifest.pcie-width", needs=())
def manifest_width(node: Node) -> Statements:
    """A GPU's PCIe link has fewer lanes than the manifest expects.

    The manifest's gpu_pcie_width_lanes says what this machine is built for, also where neither
    the port above nor a sibling tells. Width does not shrink at rest. Proven: both numbers are
    exact; whether the slot or the link is at fault, pcie.slot-limited and pcie.width-trained-
    down say.

    What to do: reseat or move the card, or correct the manifest.
    """
    wanted = node.snapshot.manifest.gpu_pcie_width_lanes if node.snapshot.manifest else None
    if wanted is None:
        yield NotApplicable("the manifest expects no PCIe width")
        return
    for place in _gpu_places(node):
        if not place.widths:
            yield place.unread("current_link_width_lanes", "pcie_link_width_lanes")
        elif (width := min(place.widths)) >= wanted:
            yield Clear(place.component)
        else:
            yield _manifest_finding(
                manifest_width.id, place, f"trained x{width}, the manifest expects x{wanted}",
                _width_evidence(place, width, (wanted, Basis.MANIFEST)),
            )  # fmt: skip


@probe("manifest.pcie-generation", needs=())
def manifest_generation(node: Node) -> Statements:
    """A GPU's PCIe link does not reach the generation that the manifest expects.

    Judged under load, and at rest by what the two ends can reach at all. No fault: a lower
    generation at rest. Proven under load.

    What to do: look for a speed forced in the firmware's setup, reseat the card, or correct the
    manifest.
    """
    wanted = node.snapshot.manifest.gpu_pcie_generation if node.snapshot.manifest else None
    if wanted is None:
        yield NotApplicable("the manifest expects no PCIe generation")
        return
    for place in _gpu_places(node):
        yield _generation(place, wanted)


def _gpu_places(node: Node) -> Iterator[Place]:
    for place in places(node):
        if place.gpu is not None or (place.link is not None and place.link.lower.is_nvidia_gpu):
            yield place


def _told(node: Node) -> frozenset[object]:
    """The components that another rule about the link has already named."""
    rules = (width_trained_down, speed_trained_down, speed_drop_under_load, slot_limited)
    return frozenset(
        statement.component
        for rule in rules
        for statement in rule.check(node, {})
        if isinstance(statement, Finding)
    )


def _model(place: Place) -> object:
    if place.gpu is not None and place.gpu.name:
        return place.gpu.name
    device = place.link.lower if place.link else None
    return device and (device.vendor_id, device.device_id, device.subsystem_device_id)


def _against_peers(place: Place, others: list[Place]) -> Statement:
    if not place.widths:
        return place.unread("current_link_width_lanes", "pcie_link_width_lanes")
    width = min(place.widths)
    usual = median(min(other.widths) for other in others if other.widths)
    if usual is not None and width < usual:
        words = f"x{width}, the median of its {len(others)} siblings is x{usual:g}"
        wanted = (int(usual), Basis.PEER_MEDIAN)
        return _peer_finding(place, others, words, _width_evidence(place, width, wanted))
    if place.speeds and is_at_work(place.gpu):
        speed = max(place.speeds)
        busy = [max(other.speeds) for other in others if other.speeds and is_at_work(other.gpu)]
        fast = median(busy)
        if fast is not None and speed < fast:
            words = (
                f"{speed_words(speed)} under load, the median of {len(busy)} busy siblings is "
                f"{speed_words(fast)}"
            )
            return _peer_finding(
                place, others, words, _speed_evidence(place, speed, (fast, Basis.PEER_MEDIAN))
            )
    return Clear(place.component)


def _peer_finding(
    place: Place, others: list[Place], words: str, proof: Iterator[Evidence]
) -> Finding:
    return Finding(
        id=peer_differs.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY if len(others) >= 3 else Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=place.component,
        summary=f"{place.words} is {words}",
        evidence=tuple(proof),
        remedy=_COMPARE,
    )


def _generation(place: Place, wanted: int) -> Statement:
    able = _reachable(place)
    if able is not None and able < wanted:
        speed = speed_of(able) or 0.0
        proof = _speed_evidence(place, speed, (speed_of(wanted) or 0.0, Basis.MANIFEST), most=True)
        words = f"reaches Gen{able} at most, the manifest expects Gen{wanted}"
        return _manifest_finding(manifest_generation.id, place, words, proof)
    if not place.speeds:
        return place.unread("current_link_speed_gts", "pcie_link_generation")
    speed = max(place.speeds)
    generation = generation_of(speed)
    if generation is None or generation >= wanted:
        return Clear(place.component)
    work = is_at_work(place.gpu)
    if work is None:
        key = place.gpu.key if place.gpu else place.component.pci
        return Unread("nvml", "utilization_gpu_percent", key)
    if not work:
        return Clear(place.component, f"Gen{generation} at rest: re-measure under load")
    words = f"runs at Gen{generation} under load, the manifest expects Gen{wanted}"
    proof = _speed_evidence(place, speed, (speed_of(wanted) or 0.0, Basis.MANIFEST))
    return _manifest_finding(manifest_generation.id, place, words, proof)


def _reachable(place: Place) -> int | None:
    """The generation that GPU and slot reach together."""
    if place.link is not None and place.link.speed_max is not None:
        return generation_of(place.link.speed_max)
    return place.gpu.limits.pcie_max_link_generation if place.gpu else None


def _manifest_finding(id: str, place: Place, words: str, proof: Iterator[Evidence]) -> Finding:
    return Finding(
        id=id,
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=place.component,
        summary=f"{place.words} {words}",
        evidence=tuple(proof),
        remedy=_COMPARE,
    )


def _width_evidence(place: Place, width: int, wanted: tuple[Scalar, Basis]) -> Iterator[Evidence]:
    if place.link is not None and place.link.widths:
        yield sysfs(place.link.lower, "current_link_width", width, unit="lanes", expected=wanted)
    else:
        yield shown("nvmlDeviceGetCurrPcieLinkWidth", width, place.recheck(), unit="lanes",
                    expected=wanted)  # fmt: skip


def _speed_evidence(
    place: Place, speed: float, wanted: tuple[Scalar, Basis], *, most: bool = False
) -> Iterator[Evidence]:
    if place.link is not None and place.link.speeds:
        name = "max_link_speed" if most else "current_link_speed"
        yield sysfs(place.link.upper or place.link.lower if most else place.link.lower, name, speed,
                    unit="GT/s", expected=wanted)  # fmt: skip
    else:
        call = (
            "nvmlDeviceGetMaxPcieLinkGeneration" if most else "nvmlDeviceGetCurrPcieLinkGeneration"
        )
        yield shown(call, speed, place.recheck(), unit="GT/s", expected=wanted)
