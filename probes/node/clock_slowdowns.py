"""Clocks cut by heat, by the power supply, or by the hardware without saying why."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from probes.clock_reasons import (
    ANY_THERMAL,
    DUTY,
    HW_SLOWDOWN,
    HW_THERMAL,
    POWER_BRAKE,
    SW_THERMAL,
    Activity,
    Held,
    Reason,
    activity,
    clear,
    cost,
    each_gpu,
    held,
    held_finding,
    sm_while,
)
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
from probes.gpu_facts import clocks_of, shown, smi
from probes.registry import Clear, Limit, Limits, Statement, Statements, probe
from probes.snapshot.gpu import Gpu
from probes.view import Node, last_reading

_Hit = tuple[Gpu, Activity, Held, Reason]
_CHASSIS = Limit(
    50.0,
    "% of the node's GPUs",
    "laggard: what half the GPUs suffer at once comes from what they share (NVIDIA/NVSentinel#1668 "
    "saw power brakes fleet-wide)",
)
_COOL = Remedy(
    action=Action.DRAIN,
    text="Move the job off. Check fan, heat sink and airflow of this slot and the inlet air; "
    "compare its temperature with its neighbours' at equal power.",
    disruptive=True,
)
_AIR = Remedy(
    action=Action.DRAIN,
    text="Move the job off. Check the inlet air, the chassis fans and blanking panels, or the "
    "coolant loop; compare with the nodes next to it.",
    disruptive=True,
)
_FEED = Remedy(
    action=Action.DRAIN,
    text="Read the power supplies' state and the baseboard controller's log; check feeds and any "
    "rack or chassis power limit.",
    disruptive=True,
)


@probe(
    "clocks.hw-thermal-slowdown",
    needs=("nvml",),
    limits={"duty_percent": DUTY, "chassis_percent": _CHASSIS},
)
def hw_thermal(node: Node, limits: Limits) -> Statements:
    """Hardware thermal slowdown: the GPU or its memory is too hot and its clock is cut.

    The hardware halves the clock or worse. In a synchronous job every rank then waits for this
    GPU. What counts is the share of time (the driver's nanosecond counter over the sample, or
    since the last run), and the cost in MHz against the maximum and the loaded siblings.

    No fault: a hot GPU that is not slowed; a few nanoseconds on the counter.

    Sure (proven) when the counter moved; likely when only the readings' bits show it, or when it
    happened since the last run; possible when a single reading shows it.

    Half the node's GPUs at once are no eight bad coolers: then the host is named.

    Do: move the job off, check fan, heat sink and airflow of that slot; for the host the inlet air
    and the chassis fans, or the coolant loop.
    """
    yield from _slowed(
        node,
        limits,
        HW_THERMAL,
        "clocks.sw-thermal-slowdown",
        "clocks.hw-slowdown",
        "thermal.near-limit",
        "thermal.peer-outlier",
    )


@probe(
    "clocks.sw-thermal-slowdown",
    needs=("nvml",),
    limits={"duty_percent": DUTY, "chassis_percent": _CHASSIS},
)
def sw_thermal(node: Node, limits: Limits) -> Statements:
    """Software thermal slowdown: the driver lowers the clock to stay below the part's limit.

    It begins at the maximum operating temperature, before the hardware acts, and costs clock in
    small steps. In a synchronous job every rank waits for the hottest GPU.

    No fault: a hot GPU that is not slowed; a few nanoseconds on the counter.

    Drivers before 575 time both kinds of thermal slowdown in one counter. When that one moved and
    no reading shows which kind it was, it is reported here.

    On half the node's GPUs at once it is the node's cooling: then the host is named.

    Do: check airflow and inlet air, compare with the neighbours at equal power.
    """
    yield from _slowed(node, limits, SW_THERMAL, "thermal.near-limit", "thermal.peer-outlier")


@probe(
    "clocks.hw-power-brake",
    needs=("nvml",),
    limits={"duty_percent": DUTY, "chassis_percent": _CHASSIS},
)
def power_brake(node: Node, limits: Limits) -> Statements:
    """Power brake: the chassis tells the GPU to cut its clock.

    An outside signal (power supply, power board, baseboard controller) halves the clock or worse
    at once. Every rank then waits for this GPU.

    On many GPUs of the node at once the cause is the chassis' power and not the GPUs: then the
    host is named. A fleet can show brief brakes and be healthy, so only the share of time counts.

    Sure (proven) when the counter moved over the sample.

    Do: read the power supplies' state and the baseboard controller's log, check the feeds and
    the power cable of that slot; look for a rack power limit.
    """
    hit: list[_Hit] = []
    judged = 0
    for item in each_gpu(node, POWER_BRAKE):
        if not isinstance(item, tuple):
            yield item
            continue
        judged += 1
        gpu, acts, _ = item
        if (how := held(acts, limits["duty_percent"])) is None:
            yield clear(node, gpu, acts, POWER_BRAKE)
        else:
            hit.append((gpu, acts, how, POWER_BRAKE))
    if _is_shared(hit, judged, limits):
        yield from _by_chassis(
            node,
            POWER_BRAKE,
            hit,
            judged,
            what="chassis power",
            remedy=_FEED,
            explains=("clocks.hw-slowdown",),
        )
        return
    for gpu, acts, how, _ in hit:
        yield held_finding(
            node,
            gpu,
            POWER_BRAKE,
            acts,
            how,
            more=_power(gpu),
            explains=("clocks.hw-slowdown",),
            remedy=Remedy(
                action=Action.DRAIN,
                text="Check the power cable and feed of this slot, the power supplies and the "
                "baseboard controller's log.",
                disruptive=True,
            ),
        )


def _is_shared(hit: list[_Hit], judged: int, limits: Limits) -> bool:
    return len(hit) >= 2 and 100 * len(hit) >= limits["chassis_percent"] * judged


def _by_chassis(
    node: Node,
    reason: Reason,
    hit: list[_Hit],
    judged: int,
    *,
    what: str,
    remedy: Remedy,
    explains: tuple[str, ...],
) -> Iterator[Statement]:
    """One finding on the host for what its GPUs suffer together."""
    gpu, acts, how, name = max(hit, key=lambda item: item[1].percent or 0.0)
    clocks = clocks_of(node, gpu)
    most = "up to " if acts.percent is not None else ""
    yield Finding(
        id=reason.probe_id,
        severity=Severity.WARNING,
        confidence=min((h.confidence for _, _, h, _ in hit), key=lambda c: c.rank)
        if reason is POWER_BRAKE
        else Confidence.LIKELY,  # that they are slowed is proven, that the air is to blame is not
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=node.host_component(),
        summary=f"{len(hit)} of {judged} GPUs under {name.name} at once ({most}{how.text})"
        f"{cost(sm_while(gpu, name, clocks), clocks)}: {what}, not the GPUs",
        evidence=tuple(
            shown(
                f"{name.field or name.name} of {gpu.key}", how.text, smi(gpu, "-q -d PERFORMANCE")
            )
            for gpu, _, how, name in hit
        ),
        explains=explains,
        remedy=remedy,
    )
    for gpu, *_ in hit:
        yield Clear(node.gpu_component(gpu), f"slowed with the others: {what}")


@probe(
    "clocks.hw-slowdown",
    needs=("nvml",),
    limits={
        "halved_percent": Limit(
            40.0, "% below", "nvml.h: hardware slowdown cuts the clock by a factor of 2 or more"
        ),
        "readings_percent": Limit(
            25.0,
            "% of the readings",
            "laggard: a change of clock shows the bit for one reading, not for one in four",
        ),
    },
)
def hw_slowdown(node: Node, limits: Limits) -> Statements:
    """Hardware slowdown (bit 0x8) without the reason that should come with it.

    The bit is an umbrella over thermal slowdown (0x40) and power brake (0x80). Alone it can mean
    fast protection against a power surge, a missing auxiliary power cable, or a part that can't
    name its reason. The clock is halved or worse while it lasts.

    No fault: the bit alone in one reading, which every change of clock or P-state shows; at rest.
    No counter times it, so it must stand in both readings of a loaded GPU (in a quarter of a
    longer series); a single reading counts only together with a halved clock.

    Sure: likely with two or more readings, possible with one.

    Do: run again with a longer --sample; check the auxiliary power cable and the kernel log.
    """
    for item in each_gpu(node, HW_SLOWDOWN):
        if not isinstance(item, tuple):
            yield item
            continue
        gpu, acts, clocks = item
        alone = sum(1 for r in gpu.readings if (r.clocks_event_reasons or 0) & 0xC8 == 0x8)
        component = node.gpu_component(gpu)
        below = max(clocks.below_max_percent or 0.0, clocks.below_peers_percent or 0.0)
        if not alone:
            yield Clear(component)
        elif clocks.loaded is False:
            yield Clear(component, "hardware slowdown bit at rest: a change of clock shows it")
        elif not (
            100 * alone >= limits["readings_percent"] * acts.of
            if alone > 1
            else acts.of == 1 and below >= limits["halved_percent"]
        ):
            yield Clear(component, "lone hardware slowdown bit: a change of clock shows it")
        else:
            how = (
                Held(f"in {alone} of {acts.of} readings", Confidence.LIKELY)
                if alone > 1
                else Held("now (one reading)", Confidence.POSSIBLE)
            )
            yield held_finding(
                node,
                gpu,
                HW_SLOWDOWN,
                acts,
                how,
                more=_power(gpu),
                remedy=Remedy(
                    action=Action.DRAIN,
                    text="Sample longer (--sample 10). Check the auxiliary power cable and the "
                    "kernel log (Xid 54); drain the node if it stays.",
                    disruptive=True,
                ),
            )


def _slowed(node: Node, limits: Limits, reason: Reason, *explains: str) -> Iterator[Statement]:
    hit: list[_Hit] = []
    judged = 0
    for item in each_gpu(node, reason):
        if not isinstance(item, tuple):
            yield item
            continue
        judged += 1
        gpu, acts, _ = item
        timed, name = _shared_timer(node, gpu, reason, acts)
        how = held(timed, limits["duty_percent"])
        if how is None:
            yield clear(node, gpu, timed, reason)
        else:
            hit.append((gpu, timed, how, name))
    if _is_shared(hit, judged, limits):
        yield from _by_chassis(
            node, reason, hit, judged, what="the node's cooling", remedy=_AIR, explains=explains
        )
        return
    for gpu, timed, how, name in hit:
        yield held_finding(
            node, gpu, name, timed, how, more=_heat(gpu), explains=explains, remedy=_COOL
        )


def _shared_timer(node: Node, gpu: Gpu, reason: Reason, acts: Activity) -> tuple[Activity, Reason]:
    """An older driver's one counter for both kinds of heat, where the bits allow to assign it."""
    if acts.percent is not None:
        return acts, reason
    shared = activity(node, gpu, ANY_THERMAL)
    if shared.percent is None or not (acts.seen or (reason is SW_THERMAL and not shared.seen)):
        return acts, reason
    timed = msgspec.structs.replace(shared, seen=acts.seen, of=acts.of)
    named = msgspec.structs.replace(ANY_THERMAL, probe_id=reason.probe_id, bit=reason.bit)
    return timed, msgspec.structs.replace(named, name=reason.name) if acts.seen else named


def _heat(gpu: Gpu) -> Iterator[Evidence]:
    """The temperature against the part's own slowdown threshold."""
    newest = last_reading(gpu)
    recheck = smi(gpu, "-q -d TEMPERATURE")
    if newest is not None and newest.temperature_c is not None:
        yield shown(
            "nvmlDeviceGetTemperature",
            newest.temperature_c,
            recheck,
            unit="C",
            expected=(gpu.limits.temperature_slowdown_c, Basis.VENDOR_LIMIT),
        )
    if newest is not None and newest.memory_temperature_c is not None:
        yield shown(
            "NVML_FI_DEV_MEMORY_TEMP",
            newest.memory_temperature_c,
            recheck,
            unit="C",
            expected=(gpu.limits.temperature_mem_max_c, Basis.VENDOR_LIMIT),
        )


def _power(gpu: Gpu) -> Iterator[Evidence]:
    """The draw against the limit in force."""
    newest = last_reading(gpu)
    if newest is not None and newest.power_mw is not None:
        yield shown(
            "nvmlDeviceGetPowerUsage",
            newest.power_mw,
            smi(gpu, "-q -d POWER"),
            unit="mW",
        )
