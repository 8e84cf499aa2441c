"""Clocks that are low under load though no reason is given, and clocks that somebody set."""

from __future__ import annotations

from probes.clock_reasons import BELOW_PEERS, DUTY, clock_evidence
from probes.finding import (
    Action,
    Basis,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gpu_facts import (
    Clocks,
    below_percent,
    called,
    clocks_of,
    is_mig,
    missing,
    not_for_vgpu,
    shown,
    smi,
)
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
from probes.view import REASON_GPU_IDLE, Node, delta, last_reading, median_of

# P0 and P1 are for full speed, P2 is what GeForce uses under CUDA, P5 and up are for rest
# (nvml.h nvmlPstates_t: 0 is the maximum, 15 the minimum).
REST_PSTATE = 5

_TIMERS = (
    "violation_power_ns",
    "violation_thermal_ns",
    "violation_sync_boost_ns",
    "violation_board_limit_ns",
    "violation_low_utilization_ns",
    "violation_reliability_ns",
    "reason_sw_thermal_ns",
    "reason_hw_thermal_ns",
    "reason_hw_power_brake_ns",
)
_UNLOCK = Remedy(
    action=Action.RECONFIGURE,
    text="Ask who locked the clocks; `nvidia-smi -rgc` (as root) lifts a lock. If the clock stays "
    "low, reset the GPU once it is free.",
    disruptive=False,
)


@probe(
    "clocks.low-without-reason",
    needs=("nvml",),
    limits={
        "below_peers_percent": BELOW_PEERS,
        "below_max_percent": Limit(
            25.0,
            "% below the part's maximum",
            "a healthy GeForce runs 11 to 19 % below its nominal maximum under compute",
        ),
        "below_boost_percent": Limit(
            15.0,
            "% below the customer boost clock",
            "a data-centre part with power and heat to spare runs at it; two steps beyond what "
            "siblings differ by",
        ),
        "duty_percent": DUTY,
    },
)
def low_without_reason(node: Node, limits: Limits) -> Statements:
    """The SM clock is low under load and the driver gives no reason for it.

    A stuck performance state, or clocks that somebody locked (`nvidia-smi -lgc`, which no NVML
    getter shows). Nothing else tells: temperature, power and reasons all look fine, and every
    rank waits for this GPU.

    No fault: low clocks at rest or with little work; a GeForce that does not reach its nominal
    maximum; 5-10 % between siblings (silicon, place in the air stream); low clocks with a reason
    (that reason's own probe judges it).

    Sure: likely when loaded siblings under the same power limit run faster, or when a fully
    loaded GPU sits in a resting P-state; possible when only the part's maximum speaks.

    Do: `nvidia-smi -rgc`, then a GPU reset when it is free.
    """
    for gpu in node.live_gpus:
        clocks = clocks_of(node, gpu)
        if clocks.ever is None or clocks.sm_mhz is None:
            field = "clocks_event_reasons" if clocks.ever is None else "sm_clock_mhz"
            yield missing(gpu, field, not_for_vgpu(gpu))
        elif clocks.loaded is None:
            yield (
                NotApplicable("MIG: utilisation of the parent is not to be had")
                if is_mig(gpu)
                else Unread("nvml", "utilization_gpu_percent", gpu.key)
            )
        else:
            yield _low(node, limits, gpu, clocks, clocks.sm_mhz)


def _low(node: Node, limits: Limits, gpu: Gpu, clocks: Clocks, sm_mhz: float) -> Finding | Clear:
    component = node.gpu_component(gpu)
    if not clocks.loaded:
        return Clear(component, "low clocks at rest are power saving")
    if (clocks.ever or 0) & ~REASON_GPU_IDLE:
        return Clear(component)
    if any(_timer_moved(gpu, timer, limits["duty_percent"]) for timer in _TIMERS):
        return Clear(component, "a reason's counter moves: low clocks have a reason")
    peers_below = clocks.below_peers_percent
    pstate = max((r.pstate for r in gpu.readings if r.pstate is not None), default=None)
    resting = pstate is not None and pstate >= REST_PSTATE
    slower = peers_below is not None and peers_below >= limits["below_peers_percent"]
    # Siblings that are as low may be locked as well, or this is what the part reaches: a
    # GeForce has no customer boost clock, and its maximum is nominal.
    boost = gpu.limits.sm_clock_customer_boost_max_mhz
    bound = clocks.max_mhz if boost is None else min(boost, clocks.max_mhz or boost)
    allowed = limits["below_max_percent" if boost is None else "below_boost_percent"]
    far_below = (below_percent(sm_mhz, bound) or 0.0) >= allowed
    if not (slower or far_below or resting):
        return Clear(
            component,
            f"{peers_below:.0f} % below its siblings: within what equal boards differ by"
            if peers_below is not None and peers_below >= 5
            else None,
        )
    what = f", in resting P-state P{pstate}" if resting else ""
    against = (
        f"{clocks.peers} loaded siblings run {clocks.peers_mhz:.0f}"
        if slower
        else f"the part's maximum is {bound}"
    )
    evidence = [clock_evidence(gpu, sm_mhz, clocks)]
    if not slower and bound is not None:
        evidence = [
            shown(
                "nvmlDeviceGetClockInfo(NVML_CLOCK_SM)",
                round(sm_mhz),
                smi(gpu, "--query-gpu=clocks.sm,clocks.max.sm,utilization.gpu --format=csv"),
                unit="MHz",
                expected=(bound, Basis.DEVICE_MAX),
            )
        ]
    evidence.append(
        shown(
            "nvmlDeviceGetCurrentClocksEventReasons",
            f"0x{clocks.ever or 0:x}",
            smi(gpu, "-q -d PERFORMANCE"),
        )
    )
    return Finding(
        id="clocks.low-without-reason",
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY if slower or resting else Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=component,
        summary=f"{called(gpu)} runs SM {sm_mhz:.0f} MHz under load without a reason{what}; "
        f"{against} MHz",
        evidence=tuple(evidence),
        explains=("clocks.memory-low",) if resting else (),
        remedy=_UNLOCK,
    )


def _timer_moved(gpu: Gpu, timer: str, duty_percent: float) -> bool:
    moved = delta(gpu.readings, lambda reading: getattr(reading, timer))
    return moved is not None and 100 * moved[0] >= duty_percent * moved[1]


@probe(
    "clocks.memory-low",
    needs=("nvml",),
    limits={
        "below_percent": Limit(
            5.0, "% below", "laggard: memory clocks come in steps far wider than this"
        )
    },
)
def memory_low(node: Node, limits: Limits) -> Statements:
    """The memory clock is below the maximum under load.

    Memory-bound kernels (decoding, optimizer steps, norms) slow down in proportion.

    No fault: GeForce and other cards that run P2 under CUDA, whose memory clock is then below
    the maximum; any memory clock at rest.

    Sure: likely. Loaded siblings are the measure; without them only a GPU in P0 or P1, where the
    memory should be at its maximum, or a loaded GPU in a resting P-state is judged.

    Do: `nvidia-smi -rmc` lifts a memory clock lock; a GPU reset once it is free.
    """
    for gpu in node.live_gpus:
        clocks = clocks_of(node, gpu)
        component = node.gpu_component(gpu)
        now = median_of(reading.mem_clock_mhz for reading in gpu.readings)
        newest = last_reading(gpu)
        if now is None or clocks.loaded is None:
            field = "mem_clock_mhz" if now is None else "utilization_gpu_percent"
            why = not_for_vgpu(gpu) or ("MIG: load of the parent unknown" if is_mig(gpu) else None)
            yield missing(gpu, field, why)
            continue
        if not clocks.loaded:
            yield Clear(component)
            continue
        peers = median_of(
            median_of(reading.mem_clock_mhz for reading in sibling.readings)
            for sibling in node.siblings(gpu)
            if clocks_of(node, sibling).loaded
        )
        pstate = newest.pstate if newest else None
        most = gpu.limits.mem_clock_max_mhz
        expected: tuple[float | None, Basis] = (peers, Basis.PEER_MEDIAN)
        if peers is None or (pstate is not None and pstate <= 1):
            expected = (most if most is not None else peers, Basis.DEVICE_MAX)
        if peers is None and pstate is not None and 2 <= pstate < REST_PSTATE:
            yield Clear(component, f"P{pstate} under CUDA: memory below its maximum by design")
            continue
        bound = expected[0]
        if bound is None:
            yield Unread("nvml", "mem_clock_max_mhz", gpu.key)
        elif 100 * (bound - now) < limits["below_percent"] * bound:
            yield Clear(component)
        else:
            yield Finding(
                id="clocks.memory-low",
                severity=Severity.WARNING,
                confidence=Confidence.LIKELY,
                fault_class=FaultClass.CONFIGURATION,
                job_impact=JobImpact.SLOWS,
                component=component,
                summary=f"{called(gpu)} memory clock {now:.0f} MHz under load"
                f"{f' in P{pstate}' if pstate is not None else ''}, "
                f"{'siblings run' if expected[1] is Basis.PEER_MEDIAN else 'the part runs'} "
                f"{bound:.0f}",
                evidence=(
                    shown(
                        "nvmlDeviceGetClockInfo(NVML_CLOCK_MEM)",
                        round(now),
                        smi(gpu, "--query-gpu=clocks.mem,clocks.max.mem,pstate --format=csv"),
                        unit="MHz",
                        expected=(round(bound), expected[1]),
                    ),
                ),
                remedy=Remedy(
                    action=Action.RECONFIGURE,
                    text="`nvidia-smi -rmc` (as root) lifts a memory clock lock; else reset the "
                    "GPU once it is free.",
                    disruptive=False,
                ),
            )


@probe("clocks.application-clocks", needs=("nvml",))
def application_clocks(node: Node) -> Statements:
    """Application clocks are set below the board's default.

    Somebody set them (`nvidia-smi -ac`); under load the GPU goes no higher.

    No fault by itself: it is a setting, often on purpose. It is told so that a slower GPU
    finds its cause. Drivers from 590 on no longer have application clocks.

    Sure: proven, the driver says so itself. Only info: whether it was meant, laggard can't know.

    Do: `nvidia-smi -rac` (as root) sets them back.
    """
    for gpu in node.live_gpus:
        yield _application_clocks(node, gpu)


def _application_clocks(node: Node, gpu: Gpu) -> Statement:
    limits = gpu.limits
    pairs = (
        ("SM", limits.sm_application_clock_mhz, limits.sm_default_application_clock_mhz),
        ("memory", limits.mem_application_clock_mhz, limits.mem_default_application_clock_mhz),
    )
    known = [(n, now, default) for n, now, default in pairs if now is not None and default]
    if not known:
        return missing(gpu, "sm_application_clock_mhz", not_for_vgpu(gpu))
    lowered = [(n, now, default) for n, now, default in known if now < default]
    if not lowered:
        return Clear(node.gpu_component(gpu))
    return Finding(
        id="clocks.application-clocks",
        severity=Severity.INFO,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=node.gpu_component(gpu),
        summary=f"{called(gpu)} application clocks set low: "
        + ", ".join(f"{n} {now} MHz, default {default}" for n, now, default in lowered),
        evidence=tuple(
            shown(
                f"nvmlDeviceGetApplicationsClock({n})",
                now,
                smi(gpu, "-q -d CLOCK"),
                unit="MHz",
                expected=(default, Basis.DEVICE_MAX),
            )
            for n, now, default in lowered
        ),
        explains=("clocks.memory-low",) if any(n == "memory" for n, _, _ in lowered) else (),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="If nobody wants it: `nvidia-smi -rac` (as root).",
            disruptive=False,
        ),
    )
