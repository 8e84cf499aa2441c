"""PCIe links that run at a lower generation than both of their ends reach."""

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
from probes.gap import GapReason
from probes.gpu_facts import shown
from probes.pci_links import gpu_at, is_at_work, nvml_speeds, speed_of, speed_words, sysfs
from probes.pci_places import (
    Expected,
    Place,
    basis_of,
    cost_of,
    excused,
    nothing_to_judge,
    places,
)
from probes.registry import Clear, Statement, Statements, Unread, probe
from probes.view import Node


@probe("pcie.speed-trained-down", needs=())
def speed_trained_down(node: Node) -> Statements:
    """A PCIe link in use runs at a lower generation than both of its ends reach.

    Each generation halves the rate of every copy. It gives no error: a card can stay at Gen2 for
    hours of full load.

    No fault: a low generation at rest. Idle GPUs lower their link speed to save power, so a link
    is judged only while its GPU is busy in every reading and out of its resting P-states; a
    switch's uplink when a GPU behind it is busy. Network adapters do not rest like this and are
    always judged.

    Sure: proven when both ends are seen and two readings agree; likely otherwise. Info when an
    adapter's ports are slower than even the slow link.

    Do: look for a speed forced in the firmware's setup (Gen3 instead of Auto), reseat, compare
    with a sibling under load.
    """
    if (nothing := nothing_to_judge(node)) is not None:
        yield nothing
    for place in places(node):
        yield excused(place) or _judge(node, place)


@probe("pcie.speed-drop-under-load", needs=())
def speed_drop_under_load(node: Node) -> Statements:
    """A GPU's PCIe link became slower between two readings while the GPU was busy.

    A link that renegotiates under load stalls traffic each time and may stay slow.

    No fault: an idle GPU's link, which changes its speed as it likes.

    Sure: likely: two readings show one drop, not why.

    Do: take more readings under load; if it comes again, treat it as pcie.speed-trained-down.
    """
    for place in places(node):
        if place.gpu is not None:
            yield excused(place) or _drop(node, place)


def _judge(node: Node, place: Place) -> Statement:
    if not place.speeds:
        return place.unread("current_link_speed_gts", "pcie_link_generation")
    link, gpu = place.link, place.gpu
    speed = max((*place.speeds, *nvml_speeds(gpu)))
    own = link.lower.max_link_speed_gts if link else None
    if own is not None and speed >= own:
        return Clear(place.component)
    limit = link.speed_max if link else None
    words, basis = "both ends support", basis_of(own, limit or 0)
    if limit is None and gpu is not None:
        limit = speed_of(gpu.limits.pcie_max_link_generation)
        words, basis = "NVML's maximum for GPU and slot is", Basis.DEVICE_MAX
        if limit is None:
            return Unread("nvml", "pcie_max_link_generation", gpu.key)
    if limit is None:
        return place.unread("parent", "pcie_max_link_generation")
    if speed >= limit:
        return Clear(place.component)
    if (excuse := _at_rest(node, place, speed, limit)) is not None:
        return excuse
    sure = link is not None and link.upper is not None and len(place.speeds) > 1
    return _finding(node, place, speed, Expected(
        value=limit,
        basis=basis,
        words=f"{words} {speed_words(limit)}",
        confidence=Confidence.PROVEN if sure else Confidence.LIKELY,
    ))  # fmt: skip


def _at_rest(node: Node, place: Place, speed: float, limit: float) -> Statement | None:
    """Why a low speed says nothing: nobody is known to use the link."""
    change = f"{speed_words(speed)} of {speed_words(limit)}"
    if place.gpu is not None:
        work = is_at_work(place.gpu)
        if work is None:
            return Unread("nvml", "utilization_gpu_percent", place.gpu.key)
        return (
            None
            if work
            else Clear(place.component, f"idle-shrunk to {change}: re-measure under load")
        )
    if place.link is None:
        return None
    gpus = [device.address for device in place.link.behind if device.is_nvidia_gpu]
    if not gpus:
        state = place.link.lower.power_state or "D0"
        return None if state in ("D0", "unknown") else Clear(place.component, f"asleep ({state})")
    works = [is_at_work(gpu_at(node, address)) for address in gpus]
    if True in works:
        return None
    if None in works:
        return Unread("nvml", "utilization_gpu_percent", gpus[works.index(None)])
    return Clear(place.component, f"{change}, no GPU behind it is busy: re-measure under load")


def _finding(node: Node, place: Place, speed: float, expected: Expected) -> Finding:
    cost = cost_of(node, place)
    busy = " under load" if place.gpu is not None else ""
    return Finding(
        id=speed_trained_down.id,
        severity=cost.severity,
        confidence=expected.confidence,
        fault_class=FaultClass.HARDWARE,
        job_impact=cost.job_impact,
        component=place.component,
        summary=f"{place.words} runs at {speed_words(speed)}{busy}, {expected.words}{place.shared}",
        evidence=tuple(_evidence(place, speed, expected)),
        explains=("pcie.peer-differs", "manifest.pcie-generation"),
        remedy=Remedy(
            action=Action.RESEAT,
            text="Look in the firmware's setup for a forced link speed of this slot. If it is on "
            "Auto, drain the node and reseat or re-cable the lower device of this link, then look "
            "at the speed under load again.",
            disruptive=True,
        ),
    )


def _evidence(place: Place, speed: float, expected: Expected) -> Iterator[Evidence]:
    link, gpu = place.link, place.gpu
    if link is not None:
        wanted = (expected.value, expected.basis)
        yield sysfs(link.lower, "current_link_speed", speed, unit="GT/s", expected=wanted)
        for end in (link.lower, link.upper):
            if end is not None and end.max_link_speed_gts is not None:
                yield sysfs(end, "max_link_speed", end.max_link_speed_gts, unit="GT/s")
    if gpu is not None:
        last = gpu.readings[-1]
        yield shown(
            "nvmlDeviceGetCurrPcieLinkGeneration",
            last.pcie_link_generation,
            place.recheck(),
            unit="generation",
            expected=(gpu.limits.pcie_max_link_generation, Basis.DEVICE_MAX),
        )
        yield shown(
            "nvmlDeviceGetUtilizationRates", last.utilization_gpu_percent, place.recheck(), unit="%"
        )


def _drop(node: Node, place: Place) -> Statement:
    link, gpu = place.link, place.gpu
    from_sysfs = link is not None and len(link.speeds) > 1
    speeds = place.speeds if from_sysfs else nvml_speeds(gpu)
    if gpu is None or len(speeds) < 2:
        return place.unread(
            "current_link_speed_gts", "pcie_link_generation", GapReason.NOT_COLLECTED
        )
    limit = (link.speed_max if link else None) or speed_of(gpu.limits.pcie_max_link_generation)
    # below its maximum in every reading it is pcie.speed-trained-down
    if speeds[-1] >= speeds[0] or (limit is not None and max(speeds) < limit):
        return Clear(place.component)
    if (work := is_at_work(gpu)) is None:
        return Unread("nvml", "utilization_gpu_percent", gpu.key)
    if not work:
        return Clear(place.component, "its speed fell with the load: idle links save power")
    return Finding(
        id=speed_drop_under_load.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=place.component,
        summary=f"{place.words} fell from {speed_words(speeds[0])} to {speed_words(speeds[-1])} "
        "within the sample while the GPU was busy",
        evidence=tuple(_drop_evidence(place, speeds, from_sysfs)),
        explains=("pcie.peer-differs",),
        remedy=Remedy(
            action=Action.RESEAT,
            text="Repeat with a longer --sample under load. If it falls again, drain the node and "
            "reseat or re-cable this link.",
            disruptive=True,
        ),
    )


def _drop_evidence(place: Place, speeds: tuple[float, ...], from_sysfs: bool) -> Iterator[Evidence]:
    before = (speeds[0], Basis.OWN_BASELINE)
    if from_sysfs and place.link is not None:
        yield sysfs(
            place.link.lower, "current_link_speed", speeds[-1], unit="GT/s", expected=before
        )
    else:
        yield shown(
            "nvmlDeviceGetCurrPcieLinkGeneration",
            speeds[-1],
            place.recheck(),
            unit="GT/s",
            expected=before,
        )
