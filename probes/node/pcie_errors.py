"""Errors on PCIe links: replays, and what Advanced Error Reporting counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from probes.finding import (
    Action,
    Basis,
    Component,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import GapReason
from probes.gpu_facts import called, not_for_vgpu, shown, smi
from probes.pci_links import device_words, is_off_bus, link_words, links, speed_of, sysfs
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
from probes.snapshot.pci import PciDevice, PciReading
from probes.view import Node, delta, last_reading

_ERROR_RATE = Limit(
    1e-12,
    "errors per bit",
    "the bit error ratio that the PCI Express Base Specification allows a lane; NVIDIA's DCGM "
    "derives its allowance of replays from the same",
)
_CONTACT = Remedy(
    action=Action.RESEAT,
    text="Watch whether it goes on under load; at the next gap drain the node and reseat or "
    "re-cable the lower device of this link.",
    disruptive=True,
)
_TOTALS = ("TOTAL_ERR_COR", "TOTAL_ERR_NONFATAL", "TOTAL_ERR_FATAL")
Counts = dict[str, int]


class Growth(msgspec.Struct, frozen=True):
    """How much a counter grew, over how long, and in words."""

    count: int
    minutes: float
    words: str
    in_sample: bool


def allowed_per_minute(speed_gts: float, width_lanes: int, error_rate: float) -> int:
    """Errors a minute that a healthy link of this speed and width may make, rounded up."""
    return math.ceil(error_rate * speed_gts * 1e9 * 60 * width_lanes)


def _grown(sample: tuple[int, int] | None, since: tuple[int, int] | None) -> Iterator[Growth]:
    """The growth over the sample and since the last run, where there is one."""
    if sample is not None:
        count, elapsed_ns = sample
        yield Growth(count, elapsed_ns / 60e9, f"in {elapsed_ns / 1e9:.1f} s", True)
    if since is not None:
        count, elapsed_ns = since
        minutes = elapsed_ns / 60e9
        yield Growth(count, minutes, f"in the {minutes:.0f} min since the last run", False)


def _excess(growths: list[Growth], allowed: int) -> Growth | None:
    """The first growth above the allowance.

    A window shorter than a minute has to hold a whole minute's allowance: one error in two
    seconds is thirty a minute by arithmetic and chance by nature.
    """
    return next((g for g in growths if g.count > allowed * max(1.0, g.minutes)), None)


@probe("pcie.replay-growth", needs=("nvml",), limits={"bit_error_rate": _ERROR_RATE})
def replay_growth(node: Node, limits: Limits) -> Statements:
    """A GPU's PCIe link resends packets more often than a healthy link does.

    Each replay means that a packet arrived broken. A few cost nothing; many are a bad contact,
    slow every copy, and often come before a link that trains down or a GPU that falls off.

    No fault: the total. It counts since the driver loaded, and healthy GPUs have some. Only
    growth counts, against what the specification's bit error ratio allows a link of this GPU's
    maximum generation and width in a minute (Gen4 x16: 16; the maximum, because a link that
    trained down must not earn itself a smaller allowance or a larger one).

    Sure: likely. With one reading and no earlier run nothing can be said.

    Do: if it goes on under load, reseat or re-cable.
    """
    for gpu in node.live_gpus:
        yield not_applicable(gpu) or _replays(node, gpu, limits["bit_error_rate"])


def not_applicable(gpu: Gpu) -> NotApplicable | None:
    """A vGPU guest has no link of its own."""
    return NotApplicable(why) if (why := not_for_vgpu(gpu)) else None


def _replays(node: Node, gpu: Gpu, error_rate: float) -> Statement:
    newest = last_reading(gpu)
    total = newest.pcie_replay_count if newest else None
    if total is None:
        return Unread("nvml", "pcie_replay_count", gpu.key)
    speed = speed_of(gpu.limits.pcie_gpu_max_link_generation or gpu.limits.pcie_max_link_generation)
    width = gpu.limits.pcie_max_link_width_lanes
    if speed is None or width is None:
        field = "pcie_max_link_generation" if speed is None else "pcie_max_link_width_lanes"
        return Unread("nvml", field, gpu.key)
    growths = list(
        _grown(
            delta(gpu.readings, lambda reading: reading.pcie_replay_count),
            node.since_last_run("gpu", gpu.uuid, "pcie_replay_count", total),
        )
    )
    component = node.gpu_component(gpu)
    if not growths and total:
        return Unread("nvml", "pcie_replay_count", gpu.key, GapReason.NOT_COLLECTED)
    allowed = allowed_per_minute(speed, width, error_rate)
    if (much := _excess(growths, allowed)) is None:
        return Clear(component, _trace(growths, total, "replays"))
    return Finding(
        id=replay_growth.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=component,
        summary=f"{called(gpu)}: {much.count} PCIe replays {much.words}, "
        f"a healthy link makes up to {allowed} a minute",
        evidence=(
            shown(
                "nvmlDeviceGetPcieReplayCounter",
                much.count,
                smi(gpu, "-q -d PCIE") + " | grep -i replay",
                unit=f"replays {much.words}",
                expected=(allowed, Basis.VENDOR_LIMIT),
            ),
        ),
        remedy=_CONTACT,
    )


def _trace(growths: list[Growth], total: int, what: str) -> str | None:
    """The note for errors that are too few to matter."""
    grown = next((growth for growth in growths if growth.count), None)
    if grown is not None:
        return f"{grown.count} {what} {grown.words}: within what a healthy link makes"
    return f"{total} {what} so far, none in this sample" if total else None


# --- Advanced Error Reporting ---


@probe("pcie.aer-correctable-rate", needs=("pci",), limits={"bit_error_rate": _ERROR_RATE})
def aer_correctable_rate(node: Node, limits: Limits) -> Statements:
    """A PCIe link makes corrected errors faster than a healthy link does.

    Receiver errors and bad packets (RxErr, BadTLP, BadDLLP) are repaired by sending again, which
    costs time; many of them are a bad contact. The port at either end may be the one that counts,
    so both ends of each link up to the root port are read.

    No fault: the total since boot, which holds errors of the training at power-on. Only growth
    counts, within the sample or since the last run, against what the specification's bit error
    ratio allows this link's maximum speed and width.

    Sure: likely. With one reading and no earlier run only a total of zero says anything.

    Do: reseat or re-cable the lower device of the link; look at its width.
    """
    for link in links(node):
        speed = link.speed_max or link.lower.max_link_speed_gts
        width = link.width_max or link.lower.max_link_width_lanes
        if speed is None or width is None:
            field = "max_link_speed_gts" if speed is None else "max_link_width_lanes"
            yield Unread("pci", field, link.lower.address)
            continue
        allowed = allowed_per_minute(speed, width, limits["bit_error_rate"])
        ends = tuple(end for end in (link.lower, link.upper) if end is not None)
        yield _correctable(node, ends, link_words(node, link), allowed)


def _correctable(node: Node, ends: tuple[PciDevice, ...], words: str, allowed: int) -> Statement:
    component = node.pci_component(ends[0])
    seen: list[tuple[PciDevice, int, list[Growth]]] = []
    for end in ends:
        total = _total(end, _correctable_of)
        if total is not None:
            growths = _growths(node, end, "aer_correctable", _correctable_of) if total else []
            seen.append((end, total, growths))
    if not seen:
        return Unread("pci", "aer_correctable", ends[0].address)
    for end, _, growths in seen:
        if (much := _excess(growths, allowed)) is not None:
            return _correctable_finding(component, end, much, f"{words}: {much.count}", allowed)
    if any(total and not growths for _, total, growths in seen):
        return Unread("pci", "aer_correctable", ends[0].address, GapReason.NOT_COLLECTED)
    end, total, growths = max(seen, key=lambda item: item[1])
    return Clear(component, _trace(growths, total, f"corrected errors at {end.address}"))


def _correctable_finding(
    component: Component, end: PciDevice, much: Growth, words: str, allowed: int
) -> Finding:
    return Finding(
        id=aer_correctable_rate.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=component,
        summary=f"{words} corrected errors {much.words} seen by {end.address}, "
        f"a healthy link makes up to {allowed} a minute",
        evidence=(
            sysfs(
                end,
                "aer_dev_correctable",
                much.count,
                unit=f"errors {much.words}",
                expected=(allowed, Basis.VENDOR_LIMIT),
                quote=_names(end.readings[-1].aer_correctable),
            ),
        ),
        explains=("pcie.replay-growth",),
        remedy=_CONTACT,
    )


@probe("pcie.aer-uncorrectable", needs=("pci",))
def aer_uncorrectable(node: Node) -> Statements:
    """A PCIe device or port reports errors that could not be corrected.

    A non-fatal one lost a transaction: a driver or a job may fail on it. A fatal one made the link
    unreliable; the kernel resets it, and the GPU is usually lost to its jobs.

    No fault: non-fatal errors since boot that do not grow, which firmware and drivers cause when
    they look for devices; they are noted. Fatal ones since boot are info.

    Sure: proven when the counter grew within the sample; likely when it grew since the last run.

    Do: read the kernel log for AER lines of this address (which error, which requester). Drain;
    reset the device for fatal ones; reseat it if they come again.
    """
    for device in node.pci_by_address.values():
        if device.readings and not device.is_nvswitch and not is_off_bus(device):
            yield _uncorrectable(node, device)


def _uncorrectable(node: Node, device: PciDevice) -> Statement:
    component = node.pci_component(device)
    totals = [_total(device, _fatal_of), _total(device, _nonfatal_of)]
    if None in totals:
        field = "aer_fatal" if totals[0] is None else "aer_nonfatal"
        return Unread("pci", field, device.address)
    if not any(totals):
        return Clear(component)
    for kind, counts_of in (("fatal", _fatal_of), ("nonfatal", _nonfatal_of)):
        growths = _growths(node, device, f"aer_{kind}", counts_of)
        if (grown := next((growth for growth in growths if growth.count), None)) is not None:
            return _uncorrectable_finding(node, device, kind, counts_of, grown)
    fatal, nonfatal = totals
    if fatal:
        return _uncorrectable_finding(node, device, "fatal", _fatal_of, None)
    note = f"{nonfatal} non-fatal since boot, not known to grow" if nonfatal else None
    return Clear(component, note)


def _uncorrectable_finding(
    node: Node,
    device: PciDevice,
    kind: str,
    counts_of: Callable[[PciReading], Counts | None],
    grown: Growth | None,
) -> Finding:
    counts = counts_of(device.readings[-1])
    count = grown.count if grown else _total(device, counts_of) or 0
    when = grown.words if grown else "since boot, none of them new"
    word = "fatal" if kind == "fatal" else "non-fatal"
    bad = Severity.CRITICAL if kind == "fatal" else Severity.WARNING
    return Finding(
        id=aer_uncorrectable.id,
        severity=bad if grown else Severity.INFO,
        confidence=Confidence.PROVEN if grown is None or grown.in_sample else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.NONE
        if grown is None
        else JobImpact.BREAKS
        if kind == "fatal"
        else JobImpact.SLOWS,
        component=node.pci_component(device),
        summary=f"{device_words(node, device)}: {count} uncorrectable {word} PCIe errors {when}",
        evidence=(
            sysfs(
                device,
                f"aer_dev_{kind}",
                count,
                unit=f"errors {when}",
                expected=(0, Basis.VENDOR_LIMIT),
                quote=_names(counts),
            ),
        ),
        remedy=Remedy(
            action=Action.DRAIN if grown else Action.NONE,
            text=f"journalctl -k | grep {device.address} names the error. "
            "If they come again, drain the node and reseat the device.",
            disruptive=bool(grown),
        ),
    )


def _growths(
    node: Node, device: PciDevice, counter: str, counts_of: Callable[[PciReading], Counts | None]
) -> list[Growth]:
    counts = counts_of(device.readings[-1]) or {}
    kernels = _total_name(counts)
    return list(
        _grown(
            delta(device.readings, lambda reading: total_of(counts_of(reading))),
            node.since_last_run(
                "pci", device.address, f"{counter}.{kernels}", counts.get(kernels or "")
            ),
        )
    )


def total_of(counts: Counts | None) -> int | None:
    """The sum of AER counters; the kernel's own total where it is given."""
    if counts is None:
        return None
    name = _total_name(counts)
    return counts[name] if name else sum(counts.values())


def _total_name(counts: Counts) -> str | None:
    return next((name for name in _TOTALS if name in counts), None)


def _total(device: PciDevice, counts_of: Callable[[PciReading], Counts | None]) -> int | None:
    return total_of(counts_of(device.readings[-1])) if device.readings else None


def _correctable_of(reading: PciReading) -> Counts | None:
    return reading.aer_correctable


def _nonfatal_of(reading: PciReading) -> Counts | None:
    return reading.aer_nonfatal


def _fatal_of(reading: PciReading) -> Counts | None:
    return reading.aer_fatal


def _names(counts: Counts | None) -> str | None:
    """The counters that are not zero, as the kernel names them."""
    text = " ".join(f"{name} {value}" for name, value in (counts or {}).items() if value)
    return text[:300] or None
