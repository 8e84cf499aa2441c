"""Clocks held below what was asked for by power, sync boost, board or reliability limits."""

from __future__ import annotations

from collections.abc import Iterator

from probes.clock_reasons import (
    BELOW_PEERS,
    BOARD_LIMIT,
    DUTY,
    KNOWN_BITS,
    POWER_CAP,
    RELIABILITY,
    SYNC_BOOST,
    Activity,
    Reason,
    clear,
    clock_evidence,
    each_gpu,
    held,
    held_finding,
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
from probes.gpu_facts import Clocks, called, clocks_of, missing, not_for_vgpu, shown, smi
from probes.registry import (
    Clear,
    Limit,
    Limits,
    Statement,
    Statements,
    probe,
)
from probes.snapshot.gpu import Gpu
from probes.view import Node, median_of

BELOW_MAX = Limit(
    10.0,
    "% below the part's maximum",
    "laggard: without a loaded sibling, what siblings differ by (5-10 %) is no loss",
)


@probe(
    "clocks.sw-power-cap",
    needs=("nvml",),
    limits={
        "duty_percent": DUTY,
        "below_peers_percent": BELOW_PEERS,
        "hidden_cap_percent": Limit(
            80.0,
            "% of the enforced limit",
            "laggard: while capped a GPU draws its limit, so over the sample it draws at least "
            "the limit times the share of time; a fifth less leaves room for the 1 s averaging",
        ),
    },
)
def sw_power_cap(node: Node, limits: Limits) -> Statements:
    """The driver's power cap holds the clock down, and not by design.

    At full load a healthy GPU runs into its power limit, so the cap alone is no fault, also on
    every GPU at once. It is one when the limit was set below the board's default (or below the
    manifest's); when the draw is far below the limit though the cap is active most of the time (a
    cap from outside); or when siblings with the same limit and draw run clearly faster.

    No fault: the cap at full load with the clock near the siblings'; the cap on an idle GPU;
    5-10 % between siblings (silicon, place in the air stream); a Grace module, whose CPU and GPU
    share one limit.

    Sure: proven for a lowered limit or a hidden cap when the counter moved; possible for
    the comparison with siblings, because a heavier kernel also costs clock: compare at equal load.

    Do: see power.limit-low for a lowered limit; ask who set it. For a hidden cap read the
    baseboard controller's power policy and check the power cabling.
    """
    for item in each_gpu(node, POWER_CAP):
        if isinstance(item, tuple):
            yield _power_cap(node, limits, *item)
        else:
            yield item


def _power_cap(
    node: Node, limits: Limits, gpu: Gpu, acts: Activity, clocks: Clocks
) -> Finding | Clear:
    how = held(acts, limits["duty_percent"])
    if how is None:
        return clear(node, gpu, acts, POWER_CAP)
    if clocks.loaded is False and how.now:
        return Clear(node.gpu_component(gpu), "power cap bit at rest: nothing is slowed")
    enforced = gpu.limits.power_limit_enforced_mw
    default = _expected_limit_mw(node, gpu)
    draw = max((r.power_mw for r in gpu.readings if r.power_mw is not None), default=None)
    if enforced is not None and default is not None and enforced < default:
        alike = all(
            sibling.limits.power_limit_enforced_mw == enforced for sibling in node.siblings(gpu)
        )
        return held_finding(
            node,
            gpu,
            POWER_CAP,
            acts,
            how,
            # the same limit on every GPU is somebody's decision
            severity=Severity.INFO if alike else Severity.WARNING,
            fault_class=FaultClass.CONFIGURATION,
            why=f"; limit {enforced / 1000:.0f} W, expected {default / 1000:.0f} W",
            more=(_limit_shown(gpu, enforced, default),),
            remedy=Remedy(
                action=Action.RECONFIGURE,
                text=f"Ask who lowered the limit; `nvidia-smi -pl {default // 1000} "
                f"-i {gpu.pci or gpu.index}` restores it.",
                disruptive=False,
            ),
        )
    if clocks.loaded is not True or draw is None or not enforced:
        return Clear(node.gpu_component(gpu), "power cap at the default limit: the design point")
    share = (acts.percent or 0) / 100
    if share >= 0.5 and 100 * draw < limits["hidden_cap_percent"] * share * enforced:
        if gpu.c2c_enabled:
            return Clear(node.gpu_component(gpu), "Grace module: CPU and GPU share its power")
        return held_finding(
            node,
            gpu,
            POWER_CAP,
            acts,
            how,
            why=f"; draws {draw / 1000:.0f} W of {enforced / 1000:.0f} W",
            more=(_draw_shown(gpu, draw, enforced),),
            remedy=Remedy(
                action=Action.DRAIN,
                text="Something caps the board below NVML's limit: read the baseboard "
                "controller's power policy, check the power cables and supplies.",
                disruptive=True,
            ),
        )
    peers = [s for s in node.siblings(gpu) if _draws_alike(s, draw, enforced)]
    peers_mhz = median_of(clocks_of(node, s).sm_mhz for s in peers)
    sm_mhz = clocks.sm_mhz
    if (
        peers_mhz
        and sm_mhz is not None
        and 100 * (peers_mhz - sm_mhz) >= limits["below_peers_percent"] * peers_mhz
    ):
        return held_finding(
            node,
            gpu,
            POWER_CAP,
            acts,
            how,
            confidence=Confidence.POSSIBLE,
            why=f"; {len(peers)} siblings run {peers_mhz:.0f} MHz at the same {draw / 1000:.0f} W",
            more=(_draw_shown(gpu, draw, enforced),),
            remedy=Remedy(
                action=Action.NONE,
                text="Compare again with the same work on each GPU; if the gap stays, check the "
                "cooling of this slot, then swap the board.",
                disruptive=False,
            ),
        )
    return Clear(node.gpu_component(gpu), "power cap at full load is the design point")


def _expected_limit_mw(node: Node, gpu: Gpu) -> int | None:
    """The manifest's limit where it names one, else the board's default."""
    manifest = node.snapshot.manifest
    if manifest is not None and manifest.gpu_power_limit_w is not None:
        return round(manifest.gpu_power_limit_w * 1000)
    return gpu.limits.power_limit_default_mw


def _draws_alike(sibling: Gpu, draw_mw: float, enforced_mw: int) -> bool:
    """The sibling has the same limit, and draws within 5 % of as much."""
    theirs = median_of(reading.power_mw for reading in sibling.readings)
    return (
        sibling.limits.power_limit_enforced_mw == enforced_mw
        and theirs is not None
        and abs(theirs - draw_mw) <= 0.05 * draw_mw
    )


def _limit_shown(gpu: Gpu, enforced: int, default: int) -> Evidence:
    return shown(
        "nvmlDeviceGetEnforcedPowerLimit",
        enforced,
        smi(gpu, "-q -d POWER"),
        unit="mW",
        expected=(default, Basis.DEVICE_MAX),
    )


def _draw_shown(gpu: Gpu, draw: float, enforced: int) -> Evidence:
    return shown(
        "nvmlDeviceGetPowerUsage",
        round(draw),
        smi(gpu, "-q -d POWER"),
        unit="mW",
        expected=(enforced, Basis.DEVICE_MAX),
    )


_COSTLY = {
    "duty_percent": DUTY,
    "below_peers_percent": BELOW_PEERS,
    "below_max_percent": BELOW_MAX,
}


@probe("clocks.sync-boost", needs=("nvml",), limits=_COSTLY)
def sync_boost(node: Node, limits: Limits) -> Statements:
    """Sync boost ties this GPU's clock to the slowest one of its group.

    Somebody put GPUs into a sync boost group (`nvidia-smi boost-slider` or DCGM); then all of
    them run at the clock of the slowest. It costs speed when one of them is slow.

    No fault: sync boost without a lower clock; at rest.

    Sure: likely. The culprit is the group's slowest member, or the setting, not this GPU.

    Do: look for a finding on another GPU of the group; dissolve the group if nobody wants it.
    """
    yield from _costly(
        node,
        limits,
        SYNC_BOOST,
        FaultClass.CONFIGURATION,
        Remedy(
            action=Action.RECONFIGURE,
            text="Find the slowest GPU of the sync boost group; remove the group if unwanted.",
            disruptive=False,
        ),
    )


@probe("clocks.board-limit", needs=("nvml",), limits=_COSTLY)
def board_limit(node: Node, limits: Limits) -> Statements:
    """A limit of the board (voltage regulators, input power) holds the clock down.

    The board's own protection caps the clock below what power limit and temperature would allow.

    No fault: the limit without a lower clock than siblings (or the part's maximum); at rest.

    Sure: likely when the clock is clearly lower. Few tools name this bit (0x200).

    Do: check the board's power input and cooling of the regulators; swap the board if it stays.
    """
    yield from _costly(
        node,
        limits,
        BOARD_LIMIT,
        FaultClass.HARDWARE,
        Remedy(
            action=Action.DRAIN,
            text="Check power input and airflow of this board; swap it if the limit stays.",
            disruptive=True,
        ),
    )


@probe("clocks.reliability", needs=("nvml",), limits=_COSTLY)
def reliability(node: Node, limits: Limits) -> Statements:
    """The reliability limit (voltage) holds the clock down.

    The part has reached the highest voltage that it may run at, so it can't clock higher.

    No fault: the limit at or near the maximum clock, where every part ends up when neither power
    nor heat stops it; the limit without a lower clock than siblings; at rest.

    Sure: likely when the clock is clearly lower. Few tools name this bit (0x400).

    Do: compare with siblings under the same load; swap the board if the gap stays.
    """
    yield from _costly(
        node,
        limits,
        RELIABILITY,
        FaultClass.HARDWARE,
        Remedy(
            action=Action.DRAIN,
            text="Compare with siblings at equal load; swap the board if the gap stays.",
            disruptive=True,
        ),
    )


def _costly(
    node: Node, limits: Limits, reason: Reason, fault_class: FaultClass, remedy: Remedy
) -> Iterator[Statement]:
    """A reason that matters only where the clock is lower for it."""
    for item in each_gpu(node, reason):
        if not isinstance(item, tuple):
            yield item
            continue
        gpu, acts, clocks = item
        how = held(acts, limits["duty_percent"])
        if how is None:
            yield clear(node, gpu, acts, reason)
            continue
        below = clocks.below_peers_percent
        too_low = (
            below >= limits["below_peers_percent"]
            if below is not None
            else (clocks.below_max_percent or 0.0) >= limits["below_max_percent"]
        )
        # Sync boost lowers the whole group, so siblings can't show its cost.
        if reason is SYNC_BOOST:
            too_low = (clocks.below_max_percent or 0.0) >= limits["below_max_percent"]
        if not too_low or clocks.loaded is not True:
            yield Clear(node.gpu_component(gpu), f"{reason.name} without a lower clock under load")
            continue
        yield held_finding(
            node,
            gpu,
            reason,
            acts,
            how,
            confidence=min(how.confidence, Confidence.LIKELY, key=lambda c: c.rank),
            fault_class=fault_class,
            remedy=remedy,
        )


@probe("clocks.unknown-reason", needs=("nvml",), limits={"below_peers_percent": BELOW_PEERS})
def unknown_reason(node: Node, limits: Limits) -> Statements:
    """The driver gives a clock reason that this version does not know.

    A newer driver can have reasons that are not in our table. They are kept and shown raw.

    No fault by itself: unknown is not bad. It is worth knowing when the clock is low.

    Sure: only that the bit is set. It is a warning when it stands in every reading of a loaded
    GPU that is clearly slower than its siblings.

    Do: look the bit up in the nvml.h of that driver (nvmlClocksEventReason*).
    """
    for gpu in node.live_gpus:
        clocks = clocks_of(node, gpu)
        if clocks.ever is None:
            yield missing(gpu, "clocks_event_reasons", not_for_vgpu(gpu))
            continue
        bits = clocks.ever & ~KNOWN_BITS
        if not bits:
            yield Clear(node.gpu_component(gpu))
            continue
        slow = (
            clocks.loaded is True
            and clocks.always & bits != 0
            and (clocks.below_peers_percent or 0.0) >= limits["below_peers_percent"]
        )
        evidence = [
            shown(
                "nvmlDeviceGetCurrentClocksEventReasons",
                f"0x{clocks.ever:x}",
                smi(gpu, "--query-gpu=clocks_event_reasons.active --format=csv"),
            )
        ]
        if slow and clocks.sm_mhz is not None:
            evidence.append(clock_evidence(gpu, clocks.sm_mhz, clocks))
        yield Finding(
            id="clocks.unknown-reason",
            severity=Severity.WARNING if slow else Severity.INFO,
            confidence=Confidence.POSSIBLE,
            fault_class=FaultClass.CANNOT_TELL,
            job_impact=JobImpact.SLOWS if slow else JobImpact.NONE,
            component=node.gpu_component(gpu),
            summary=f"{called(gpu)} has clock reason bits unknown to laggard: 0x{bits:x} "
            f"(all 0x{clocks.ever:x}){_slow_text(clocks) if slow else ''}",
            evidence=tuple(evidence),
            remedy=Remedy(
                action=Action.NONE,
                text="Look the bit up in the nvml.h of this driver.",
                disruptive=False,
            ),
        )


def _slow_text(clocks: Clocks) -> str:
    return f"; SM {clocks.sm_mhz:.0f} MHz, siblings {clocks.peers_mhz:.0f}"
