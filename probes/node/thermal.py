"""Temperature against the part's own limits and against siblings that draw the same power."""

from __future__ import annotations

import msgspec

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
from probes.gpu_facts import called, clocks_of, missing, not_for_vgpu, shown, smi
from probes.registry import (
    Clear,
    Limit,
    Limits,
    NotApplicable,
    Statement,
    Statements,
    Unread,
    probe,
)
from probes.snapshot.gpu import Gpu
from probes.stats import median
from probes.view import Node, last_reading, median_of

_THERMAL_BITS = 0x20 | 0x40
_COOL = Remedy(
    action=Action.NONE,
    text="Compare with the neighbours at equal power; check fan, heat sink and airflow of this "
    "slot before it slows.",
    disruptive=False,
)


class _Headroom(msgspec.Struct, frozen=True):
    """Degrees left until a threshold of the part itself; negative is beyond it."""

    degrees: int
    what: str
    evidence: Evidence


@probe(
    "thermal.near-limit",
    needs=("nvml",),
    limits={
        "headroom_c": Limit(
            2.0, "C", "H100: 2 C lie between maximum operating and slowdown temperature"
        )
    },
)
def near_limit(node: Node, limits: Limits) -> Statements:
    """The GPU or its memory is within a few degrees of its own slowdown temperature.

    A little more load or warmer air, and the clock is cut: then every rank waits for this GPU.

    No fault: hot but not slowed. Each part has its own limits, so no fixed temperature is
    used: only the thresholds that the part itself reports. A GPU without them is not judged.

    Sure: the reading is; that it will slow down is a guess. At most a warning, and only at or
    beyond the slowdown threshold. A GPU that *is* slowed has a finding of its own (clocks.*).

    Do: compare with the neighbours at equal power; check fan, heat sink and airflow of the slot.
    """
    for gpu in node.live_gpus:
        yield _near(node, limits["headroom_c"], gpu)


def _near(node: Node, headroom_c: float, gpu: Gpu) -> Statement:
    newest = last_reading(gpu)
    if newest is None or newest.temperature_c is None:
        return missing(gpu, "temperature_c", not_for_vgpu(gpu))
    rooms = [room for room in (_core_room(node, gpu), _memory_room(gpu)) if room is not None]
    if not rooms:
        return Unread("nvml", "temperature_slowdown_c", gpu.key)
    room = min(rooms, key=lambda room: room.degrees)
    component = node.gpu_component(gpu)
    if room.degrees > headroom_c:
        peers = median_of(
            reading.temperature_c
            for sibling in node.siblings(gpu)
            if (reading := last_reading(sibling)) is not None
        )
        hot = peers is not None and newest.temperature_c >= peers + 5
        return Clear(component, "warmer than its siblings, but not slowed" if hot else None)
    slowed = any((r.clocks_event_reasons or 0) & _THERMAL_BITS for r in gpu.readings)
    side = f"{abs(room.degrees)} C {'below' if room.degrees > 0 else 'beyond'}"
    if not room.degrees:
        side = "exactly at"
    return Finding(
        id="thermal.near-limit",
        severity=Severity.WARNING if room.degrees <= 0 else Severity.INFO,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS if slowed else JobImpact.NONE,
        component=component,
        summary=f"{called(gpu)} at {newest.temperature_c} C, {side} its {room.what}"
        f"{', slowed' if slowed else ', not slowed'}",
        evidence=(room.evidence,),
        remedy=_COOL,
    )


def _core_room(node: Node, gpu: Gpu) -> _Headroom | None:
    """Degrees to the slowdown temperature, absolute where the part tells it, else by margin.

    The margin (nvidia-smi's "T.Limit") counts down from the maximum operating temperature, and
    field 194 says at which margin the slowdown begins (H100: -2).
    """
    newest = gpu.readings[-1]
    now, slowdown = newest.temperature_c, gpu.limits.temperature_slowdown_c
    if now is not None and slowdown:
        return _Headroom(
            slowdown - now,
            f"slowdown temperature {slowdown} C",
            shown(
                "nvmlDeviceGetTemperature",
                now,
                smi(gpu, "-q -d TEMPERATURE"),
                unit="C",
                expected=(slowdown, Basis.VENDOR_LIMIT),
            ),
        )
    margin, at = newest.margin_temperature_c, gpu.limits.tlimit_slowdown_c
    if margin is None or at is None or not _margin_is_real(node, gpu):
        return None
    return _Headroom(
        margin - at,
        f"slowdown point (margin {margin}, slowdown at {at})",
        shown(
            "nvmlDeviceGetMarginTemperature",
            margin,
            smi(gpu, "-q -d TEMPERATURE"),
            unit="C",
            expected=(at, Basis.VENDOR_LIMIT),
        ),
    )


def _margin_is_real(node: Node, gpu: Gpu) -> bool:
    """Some parts answer a margin of 0 or less at any temperature.

    Temperature and margin add up to the maximum operating temperature, which siblings share.
    """
    newest = gpu.readings[-1]
    if newest.margin_temperature_c is None or newest.temperature_c is None:
        return False
    if newest.margin_temperature_c > 0 or (newest.clocks_event_reasons or 0) & _THERMAL_BITS:
        return True
    sums = [
        reading.temperature_c + reading.margin_temperature_c
        for sibling in node.siblings(gpu)
        if (reading := last_reading(sibling)) is not None
        and reading.temperature_c is not None
        and reading.margin_temperature_c is not None
        and reading.margin_temperature_c > 0
    ]
    own = newest.temperature_c + newest.margin_temperature_c
    return bool(sums) and abs(median(sums) - own) <= 3


def _memory_room(gpu: Gpu) -> _Headroom | None:
    """Degrees to the memory's maximum; cards without such a sensor have none."""
    now, most = gpu.readings[-1].memory_temperature_c, gpu.limits.temperature_mem_max_c
    if not now or not most:
        return None
    return _Headroom(
        most - now,
        f"memory maximum ({now} of {most} C)",
        shown(
            "NVML_FI_DEV_MEMORY_TEMP",
            now,
            smi(gpu, "-q -d TEMPERATURE"),
            unit="C",
            expected=(most, Basis.VENDOR_LIMIT),
        ),
    )


@probe(
    "thermal.peer-outlier",
    needs=("nvml",),
    limits={
        "above_peers_c": Limit(
            15.0,
            "C above siblings",
            "laggard: rows of an air-cooled chassis differ by up to some 10 C at equal power",
        ),
        "power_percent": Limit(10.0, "% difference in power", "laggard: heat follows power"),
    },
)
def peer_outlier(node: Node, limits: Limits) -> Statements:
    """The GPU is far hotter than siblings that draw the same power.

    Cooling of this slot is worse than its neighbours': a fan, a heat sink, a blocked duct. It will
    slow down first when load or inlet air rise.

    No fault: hotter because it draws more; the rear row of an air-cooled chassis (10 C);
    being the hottest of eight. Only info: the GPU is not slowed by it yet.

    Sure: possible. At least three loaded siblings within 10 % of its power must exist.

    Do: look at the slot's cooling at the next opportunity.
    """
    for gpu in node.live_gpus:
        newest = last_reading(gpu)
        if newest is None or newest.temperature_c is None or newest.power_mw is None:
            field = "power_mw" if newest is not None and newest.temperature_c else "temperature_c"
            yield missing(gpu, field, not_for_vgpu(gpu))
            continue
        component = node.gpu_component(gpu)
        if clocks_of(node, gpu).loaded is not True:
            yield NotApplicable("not loaded: temperatures at rest compare nothing")
            continue
        peers = [
            reading.temperature_c
            for sibling in node.siblings(gpu)
            if clocks_of(node, sibling).loaded
            and (reading := last_reading(sibling)) is not None
            and reading.temperature_c is not None
            and reading.power_mw is not None
            and 100 * abs(reading.power_mw - newest.power_mw)
            <= limits["power_percent"] * newest.power_mw
        ]
        if len(peers) < 3:
            yield NotApplicable("fewer than three loaded siblings at the same power")
            continue
        middle = median(peers)
        above = newest.temperature_c - middle
        if above < limits["above_peers_c"]:
            yield Clear(component, "warmest of its siblings, not slowed" if above >= 8 else None)
            continue
        yield Finding(
            id="thermal.peer-outlier",
            severity=Severity.INFO,
            confidence=Confidence.POSSIBLE,
            fault_class=FaultClass.HARDWARE,
            job_impact=JobImpact.NONE,
            component=component,
            summary=f"{called(gpu)} at {newest.temperature_c} C is {above:.0f} C hotter than "
            f"{len(peers)} siblings at the same {newest.power_mw / 1000:.0f} W",
            evidence=(
                shown(
                    "nvmlDeviceGetTemperature",
                    newest.temperature_c,
                    smi(gpu, "--query-gpu=temperature.gpu,power.draw --format=csv"),
                    unit="C",
                    expected=(round(middle), Basis.PEER_MEDIAN),
                ),
            ),
            explains=("thermal.near-limit",),
            remedy=_COOL,
        )
