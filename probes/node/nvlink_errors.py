"""NVLink error counters as rates, per link.

Source: nvml.h nvmlNvLinkErrorCounter_t (Hopper and older), NVML_FI_DEV_NVLINK_COUNT_* (Blackwell);
NVIDIA/DCGM's limits: CRC 100/s, any recovery in the window.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.finding import Confidence, Evidence, FaultClass, Finding, JobImpact, Severity
from probes.gap import GapReason
from probes.gpu_facts import called, shown, smi
from probes.node.nvlink import CHECK_LINK, each_linked
from probes.registry import Clear, Limit, Limits, Statements, Unread, probe
from probes.snapshot.gpu import Gpu, GpuReading, NvLink
from probes.view import Node, delta

# Counted for every packet that is sent again: CRC errors, harmful by their rate.
_CRC = ("crc_flit", "crc_data")
# Harmful by their mere growth: the link had to be retrained, or data was lost.
_EVENTS = (
    "recovery",
    "link_recovery_successful",
    "link_recovery_failed",
    "ecc_data",
    "malformed_packets",
    "buffer_overrun",
    "local_link_integrity",
    "effective_errors",
)
# Repaired on the way, at any count: replays, received errors, errors before correction.
_NAMES = {
    "crc_flit": "CRC errors (flit)",
    "crc_data": "CRC errors (data)",
    "recovery": "recoveries",
    "link_recovery_successful": "recoveries",
    "link_recovery_failed": "failed recoveries",
    "ecc_data": "ECC errors",
    "malformed_packets": "malformed packets",
    "buffer_overrun": "buffer overruns",
    "local_link_integrity": "link integrity errors",
    "effective_errors": "errors after correction",
}


@probe(
    "nvlink.errors",
    needs=("nvml",),
    limits={
        "crc_per_second": Limit(100.0, "errors/s", "NVIDIA/DCGM: NVLink CRC errors per second"),
        "events_per_hour": Limit(
            1.0, "events/h", "NVIDIA/DCGM: any recovery in its window; here as a rate"
        ),
    },
)
def link_errors(node: Node, limits: Limits) -> Statements:
    """An NVLink makes errors at a rate that costs bandwidth.

    CRC errors are sent again, recoveries stop the link for a moment; each time the collective
    waits. Errors are counted where they arrive: the sender, the wire and this end are all suspect.

    No fault: totals since the driver loaded, however large; replays and corrected symbol errors
    alone; a CRC rate below the limit. Only growth over the sample, or since the last run, counts.

    Sure: proven when it grew during the sample, likely since the last run.

    Do: see whether the far end's counters grow, too; reset the GPUs, then reseat the board.
    """
    for item in each_linked(node):
        if not isinstance(item, tuple):
            yield item
            continue
        gpu, links = item
        readings = [r for r in gpu.readings if r.nvlink_errors is not None]
        if not readings:
            yield Unread("nvml", "nvlink_errors", gpu.key)
            continue
        bad = list(_bad_links(node, limits, gpu, links, readings))
        yield from bad
        if bad:
            continue
        if len(readings) < 2 and not node.has_last_run("gpu", gpu.uuid):
            yield Unread("nvml", "readings", gpu.key, reason=GapReason.NOT_COLLECTED)
        else:
            counted = any(_nonzero(readings[-1]))
            note = "NVLink error counts stand still or grow slowly" if counted else None
            yield Clear(node.gpu_component(gpu), note)


def _nonzero(reading: GpuReading) -> Iterator[bool]:
    for errors in reading.nvlink_errors or ():
        for name in (*_CRC, *_EVENTS, "replay"):
            yield bool(getattr(errors, name))


def _bad_links(
    node: Node,
    limits: Limits,
    gpu: Gpu,
    links: tuple[NvLink, ...],
    readings: list[GpuReading],
) -> Iterator[Finding]:
    first, last = readings[0], readings[-1]
    still = len(readings) > 1 and first.nvlink_errors == last.nvlink_errors
    if still and not node.has_last_run("gpu", gpu.uuid):
        return
    # strict=False: a reading may have failed after some links
    for position, (link, counts) in enumerate(zip(links, last.nvlink_errors or (), strict=False)):
        rates = {}
        for name in (*_CRC, *_EVENTS):
            if not getattr(counts, name):
                continue
            per_second, live = _rate(node, gpu, link, position, name)
            allowed = limits["crc_per_second"] if name in _CRC else limits["events_per_hour"] / 3600
            if per_second and per_second >= allowed:
                rates[name] = (per_second, live)
        if rates:
            yield _finding(node, gpu, link, rates)


def _rate(node: Node, gpu: Gpu, link: NvLink, at: int, name: str) -> tuple[float, bool]:
    """Growth per second, and whether it was seen now rather than since the last run."""

    def counter(reading: GpuReading) -> int | None:
        errors = reading.nvlink_errors
        value: int | None = getattr(errors[at], name) if errors and at < len(errors) else None
        return value

    moved = delta(gpu.readings, counter)
    live = moved is not None and moved[0] > 0
    if not live:
        now = next((c for r in reversed(gpu.readings) if (c := counter(r)) is not None), None)
        moved = node.since_last_run("gpu", gpu.uuid, f"nvlink{link.link}.{name}", now)
    return (moved[0] / (moved[1] / 1e9) if moved else 0.0), live


def _finding(node: Node, gpu: Gpu, link: NvLink, rates: dict[str, tuple[float, bool]]) -> Finding:
    live = any(seen_now for _, seen_now in rates.values())
    worst = list(rates.items())[:3]
    return Finding(
        id="nvlink.errors",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN if live else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=node.nvlink_component(gpu, link),
        summary=f"{called(gpu)} NVLink {link.link}"
        f"{f' from {link.remote_pci}' if link.remote_pci else ''}: "
        + ", ".join(f"{_per(rate)} {_NAMES[name]}" for name, (rate, _) in worst)
        + (_traffic(gpu) if live else " since the last run"),
        evidence=tuple(_shown(gpu, link, name, rate) for name, (rate, _) in rates.items()),
        remedy=CHECK_LINK,
    )


def _per(rate: float) -> str:
    if rate >= 10:
        return f"{rate:.0f}/s"
    return f"{rate:.2g}/s" if rate >= 0.1 else f"{rate * 3600:.2g}/h"


def _traffic(gpu: Gpu) -> str:
    """What the GPU's links carried meanwhile, so that a rate can be weighed."""
    sent = delta(gpu.readings, lambda reading: reading.nvlink_tx_kib)
    received = delta(gpu.readings, lambda reading: reading.nvlink_rx_kib)
    if sent is None or received is None:
        return ""
    kib = sent[0] + received[0]
    return f" at {kib * 1024 / sent[1]:.3g} GB/s on all its links"


def _shown(gpu: Gpu, link: NvLink, name: str, rate: float) -> Evidence:
    unit, value = ("errors/s", rate) if name in _CRC else ("events/h", rate * 3600)
    return shown(f"NVLink {link.link} {name}", round(value, 1), smi(gpu, "nvlink -e"), unit=unit)
