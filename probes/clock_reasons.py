"""Why clocks are held down: NVML's clock-event reasons as shares of time, and their cost.

Source: nvml.h nvmlClocksEventReason*, NVML_FI_DEV_PERF_POLICY_*, NVML_FI_DEV_CLOCKS_EVENT_REASON_*.
The mask is an instant and flickers; the nanosecond counters say for how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from probes.finding import (
    Basis,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gpu_facts import Clocks, clocks_of, gpu_finding, not_for_vgpu, shown, smi
from probes.registry import Clear, Limit, NotApplicable, Statement, Unread
from probes.snapshot.gpu import Gpu
from probes.view import Node, delta, last_reading, median_of

DUTY = Limit(
    5.0,
    "% of the time",
    "laggard: a reason that halves the clock for 5 % of the time costs 2.5 %, below what siblings "
    "differ by; counters tick by single ns on healthy parts (NVIDIA/DCGM#242, #285)",
)
BELOW_PEERS = Limit(
    10.0,
    "% below siblings",
    "equal boards differ by 8 % on average (arXiv 2208.11035), siblings by 5-10 %",
)


class Reason(msgspec.Struct, frozen=True):
    """One clock-event reason: its probe, its bit, its name, and the counter that times it."""

    probe_id: str
    bit: int
    name: str
    counter: str | None = None  # the GpuReading field
    field: str | None = None  # NVML's name of that counter


HW_THERMAL = Reason(
    "clocks.hw-thermal-slowdown",
    0x40,
    "hardware thermal slowdown",
    "reason_hw_thermal_ns",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
)
SW_THERMAL = Reason(
    "clocks.sw-thermal-slowdown",
    0x20,
    "software thermal slowdown",
    "reason_sw_thermal_ns",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
)
# Drivers without those two counters time heat of both kinds in one.
ANY_THERMAL = Reason(
    "clocks.sw-thermal-slowdown",
    0x60,
    "thermal slowdown",
    "violation_thermal_ns",
    "NVML_FI_DEV_PERF_POLICY_THERMAL",
)
POWER_BRAKE = Reason(
    "clocks.hw-power-brake",
    0x80,
    "power brake",
    "reason_hw_power_brake_ns",
    "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
)
POWER_CAP = Reason(
    "clocks.sw-power-cap",
    0x4,
    "software power cap",
    "violation_power_ns",
    "NVML_FI_DEV_PERF_POLICY_POWER",
)
SYNC_BOOST = Reason(
    "clocks.sync-boost",
    0x10,
    "sync boost",
    "violation_sync_boost_ns",
    "NVML_FI_DEV_PERF_POLICY_SYNC_BOOST",
)
BOARD_LIMIT = Reason(
    "clocks.board-limit",
    0x200,
    "board limit",
    "violation_board_limit_ns",
    "NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT",
)
RELIABILITY = Reason(
    "clocks.reliability",
    0x400,
    "reliability limit",
    "violation_reliability_ns",
    "NVML_FI_DEV_PERF_POLICY_RELIABILITY",
)
HW_SLOWDOWN = Reason("clocks.hw-slowdown", 0x8, "hardware slowdown")
# idle, application clocks and display clocks: said, never a fault
BENIGN_BITS = 0x1 | 0x2 | 0x100
KNOWN_BITS = 0x7FF


class Activity(msgspec.Struct, frozen=True):
    """How long a reason was active, by every measure at hand."""

    percent: float | None  # of the sample, by the counter
    sample_s: float
    seen: int  # readings whose mask has the bit
    of: int  # readings that have a mask
    since_percent: float | None = None  # of the time since the last run
    since_s: float = 0.0

    @property
    def known(self) -> bool:
        """Whether anything at all tells."""
        return self.percent is not None or self.of > 0


class Held(msgspec.Struct, frozen=True):
    """A reason that was active long enough to matter: in words, and how sure that is."""

    text: str
    confidence: Confidence
    now: bool = True


def activity(node: Node, gpu: Gpu, reason: Reason) -> Activity:
    """The share of time by the counter over the sample, by the readings, and since the last run."""
    counter = reason.counter
    seen = of = 0
    for reading in gpu.readings:
        if (mask := reading.clocks_event_reasons) is not None:
            of += 1
            seen += 1 if mask & reason.bit else 0
    if counter is None:
        return Activity(None, 0.0, seen, of)
    moved = delta(gpu.readings, lambda reading: getattr(reading, counter))
    percent, sample_s = _share(moved) if moved else (None, 0.0)
    newest = last_reading(gpu)
    since = node.since_last_run("gpu", gpu.uuid, counter, getattr(newest, counter, None))
    if since is None:
        return Activity(percent, sample_s, seen, of)
    since_percent, since_s = _share(since)
    return Activity(percent, sample_s, seen, of, since_percent, since_s)


def _share(moved: tuple[int, int]) -> tuple[float, float]:
    active_ns, elapsed_ns = moved
    return min(100.0, 100.0 * active_ns / elapsed_ns), elapsed_ns / 1e9


def held(acts: Activity, duty_percent: float) -> Held | None:
    """Whether the reason was active for at least ``duty_percent`` of the time.

    A counter that stays at 0 while every reading shows the bit does not count on this part.
    """
    if acts.percent is not None and acts.percent >= duty_percent:
        text = f"{acts.percent:.0f} % of {acts.sample_s:.1f} s"
        return Held(text, Confidence.PROVEN)
    always = acts.seen == acts.of > 0
    if not acts.percent:
        if acts.of >= 3 and 100 * acts.seen >= duty_percent * acts.of:
            sure = Confidence.PROVEN if acts.seen >= 3 else Confidence.LIKELY
            return Held(f"in {acts.seen} of {acts.of} readings", sure)
        if always and acts.of == 2:
            return Held("in both readings", Confidence.LIKELY)
        if acts.seen and acts.percent is None:
            text = "now" if acts.of == 1 else f"in {acts.seen} of {acts.of} readings"
            return Held(f"{text} (for how long is unknown)", Confidence.POSSIBLE)
    if acts.since_percent is not None and acts.since_percent >= duty_percent:
        text = f"{acts.since_percent:.0f} % of the last {_period(acts.since_s)}"
        return Held(text, Confidence.LIKELY, now=acts.seen > 0)
    return None


def _period(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def trace_note(acts: Activity, name: str) -> str | None:
    """The note for a reason that showed, but too briefly to matter."""
    if acts.percent:
        return f"{name} {acts.percent:.2g} % of {acts.sample_s:.1f} s: too little to matter"
    if acts.seen:
        return f"{name} seen in {acts.seen} of {acts.of} readings, its counter stands still"
    return None


def bit_unsupported(gpu: Gpu, reason: Reason) -> NotApplicable | None:
    """A bit outside the supported mask can't be called inactive."""
    supported = gpu.limits.supported_clocks_event_reasons
    if supported is None or supported & reason.bit:
        return None
    return NotApplicable(f"{gpu.name or 'this part'} does not report {reason.name}")


def each_gpu(node: Node, reason: Reason) -> Iterator[tuple[Gpu, Activity, Clocks] | Statement]:
    """Live GPUs with what is known of the reason; a statement where nothing can be judged."""
    for gpu in node.live_gpus:
        acts = activity(node, gpu, reason)
        if (why := not_for_vgpu(gpu)) is not None and not acts.known:
            yield NotApplicable(why)
        elif not acts.known:
            yield Unread("nvml", "clocks_event_reasons", gpu.key)
        elif not acts.seen and acts.percent is None and (off := bit_unsupported(gpu, reason)):
            yield off
        else:
            yield gpu, acts, clocks_of(node, gpu)


def sm_while(gpu: Gpu, reason: Reason, clocks: Clocks) -> float | None:
    """The SM clock in the readings that show the reason, else in all."""
    active = median_of(
        reading.sm_clock_mhz
        for reading in gpu.readings
        if (reading.clocks_event_reasons or 0) & reason.bit
    )
    return active if active is not None else clocks.sm_mhz


def cost(sm_mhz: float | None, clocks: Clocks) -> str:
    """``: SM 1410 MHz of 1980, siblings 1965``; empty when the clock says nothing (idle)."""
    if sm_mhz is None or clocks.loaded is False:
        return ": not loaded now" if clocks.loaded is False else ""
    text = f": SM {sm_mhz:.0f} MHz"
    if clocks.max_mhz:
        text += f" of {clocks.max_mhz}"
    if clocks.peers_mhz is not None:
        text += f", {clocks.peers} loaded siblings {clocks.peers_mhz:.0f}"
    return text


def reason_evidence(
    gpu: Gpu, reason: Reason, acts: Activity, sm_mhz: float | None, clocks: Clocks
) -> Iterator[Evidence]:
    """The duty cycle, the mask, and the clock against siblings or the maximum."""
    recheck = smi(gpu, "-q -d PERFORMANCE")
    if acts.percent is not None and reason.field:
        yield shown(reason.field, round(acts.percent, 1), recheck, unit="% of the sample")
    if acts.since_percent is not None and reason.field:
        yield shown(
            reason.field, round(acts.since_percent, 1), recheck, unit="% since the last run"
        )
    if clocks.ever is not None:
        yield shown("nvmlDeviceGetCurrentClocksEventReasons", f"0x{clocks.ever:x}", recheck)
    if sm_mhz is not None and clocks.loaded is not False:
        yield clock_evidence(gpu, sm_mhz, clocks)


def clock_evidence(gpu: Gpu, sm_mhz: float, clocks: Clocks) -> Evidence:
    """The SM clock, expected at the siblings' median, else at the part's maximum."""
    return shown(
        "nvmlDeviceGetClockInfo(NVML_CLOCK_SM)",
        round(sm_mhz),
        smi(gpu, "--query-gpu=clocks.sm,clocks.max.sm,utilization.gpu --format=csv"),
        unit="MHz",
        expected=(
            (round(clocks.peers_mhz), Basis.PEER_MEDIAN)
            if clocks.peers_mhz is not None
            else (clocks.max_mhz, Basis.DEVICE_MAX)
        ),
    )


def held_finding(
    node: Node,
    gpu: Gpu,
    reason: Reason,
    acts: Activity,
    how: Held,
    *,
    remedy: Remedy,
    severity: Severity = Severity.WARNING,
    fault_class: FaultClass = FaultClass.HARDWARE,
    confidence: Confidence | None = None,
    why: str = "",
    more: Iterable[Evidence] = (),
    explains: tuple[str, ...] = (),
) -> Finding:
    """A GPU whose clock a reason holds down: for how long, and what it costs."""
    clocks = clocks_of(node, gpu)
    sm_mhz = sm_while(gpu, reason, clocks)
    return gpu_finding(
        node,
        gpu,
        reason.probe_id,
        f"under {reason.name} {how.text}{cost(sm_mhz, clocks)}{why}",
        severity=severity,
        impact=JobImpact.SLOWS,
        confidence=confidence or how.confidence,
        fault_class=fault_class,
        evidence=(*reason_evidence(gpu, reason, acts, sm_mhz, clocks), *more),
        explains=explains,
        remedy=remedy,
    )


def clear(node: Node, gpu: Gpu, acts: Activity, reason: Reason) -> Clear:
    """Judged, and not held down by this reason."""
    return Clear(node.gpu_component(gpu), trace_note(acts, reason.name))
