"""The verdict on a node with which nothing is wrong, as far as can be seen."""

from __future__ import annotations

from collections.abc import Iterable

from probes.finding import Confidence, Evidence, FaultClass
from probes.gap import Gap, GapReason, fold_gaps
from probes.result import Outcome, ProbeResult, RuledOut, Verdict
from probes.snapshot.gpu import GpuState
from probes.view import Node, is_busy, last_reading

SUMMARY_LIMIT = 300
NO_GPU = "no NVIDIA GPU here; host judged only"
_EVIDENCE_LIMIT = 12


def joined(*parts: str) -> str:
    """Sentence parts behind each other, as many as fit."""
    text = parts[0].rstrip(".")
    for part in parts[1:]:
        if part and len(text) + len(part) + 2 <= SUMMARY_LIMIT:
            text += f"; {part}"
    return text if len(text) <= SUMMARY_LIMIT else text[: SUMMARY_LIMIT - 1].rstrip() + "…"


def _unjudged(results: tuple[ProbeResult, ...]) -> list[ProbeResult]:
    return [result for result in results if result.outcome in (Outcome.UNKNOWN, Outcome.ERROR)]


def cannot_tell(
    node: Node, results: tuple[ProbeResult, ...], ruled_out: tuple[RuledOut, ...]
) -> Verdict:
    """Something that exists here and is required could not be read."""
    unjudged = _unjudged(results)
    # what nobody asked for (a rate, with one reading only) is no reason; alone it was required
    blind = [result for result in unjudged if _was_hidden(result)] or unjudged
    hiding = fold_gaps(tuple(gap for gap in node.snapshot.gaps if gap.reason.hides_something))
    missing = dict.fromkeys(text.partition(" (")[0] for result in blind for text in result.missing)
    broken = [result.id for result in blind if result.outcome is Outcome.ERROR]
    reasons = [f"{', '.join(broken)} broke, a bug in laggard"] if broken else []
    reasons += list(missing)[:3]
    ids = [result.id for result in blind]
    named = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    allow = dict.fromkeys(gap.allow for gap in hiding if gap.allow)
    settle = "; ".join(list(allow)[:4])
    return Verdict(
        kind="node",
        fault_class=FaultClass.CANNOT_TELL,
        code="node.cannot-tell",
        culprits=(),
        summary=joined(
            f"Nothing wrong seen, but {_count(len(ids), 'rule')} could not judge ({named})",
            *reasons,
            _judged(node, results),
        ),
        confidence=Confidence.POSSIBLE,
        evidence=tuple(_gap_evidence(gap) for gap in hiding[:_EVIDENCE_LIMIT]),
        ruled_out=ruled_out,
        victims=(),
        next_step=f"To settle it: {settle}."
        if settle
        else "`laggard doctor` says how to let laggard read the rest.",
    )


def _was_hidden(result: ProbeResult) -> bool:
    nobody_asked = f": {GapReason.NOT_COLLECTED.value}"
    return result.outcome is Outcome.ERROR or not all(
        nobody_asked in text for text in result.missing
    )


def _gap_evidence(gap: Gap) -> Evidence:
    fields, devices = ", ".join(gap.fields) or "everything", ", ".join(gap.devices)
    return Evidence(
        source=gap.source,
        locator=f"{fields} of {devices}" if devices else fields,
        observed=gap.reason.value,
        quote=gap.detail[:300] if gap.detail else None,
        recheck="laggard doctor",
    )


def fit(
    node: Node, results: tuple[ProbeResult, ...], ruled_out: tuple[RuledOut, ...], known: str
) -> Verdict:
    """All that was to be judged is fine; ``known`` tells what is worth knowing all the same."""
    blind = _unjudged(results)
    at_rest = _at_rest(node)
    sections = {"kernel log": node.snapshot.kernel, "PCI bus": node.snapshot.pci}
    unseen = [name for name, section in sections.items() if section is None and node.gpus]
    concealed = sum(gpu.state is GpuState.NO_PERMISSION for gpu in node.gpus)
    return Verdict(
        kind="node",
        fault_class=FaultClass.NO_FAULT,
        code="node.fit",
        culprits=(),
        summary=joined(
            f"Nothing wrong found: {_judged(node, results)}",
            f"{_count(len(blind), 'rule')} could not judge" if blind else "",
            f"{_count(concealed, 'GPU')} hidden from this user or container, not judged"
            if concealed
            else "",
            f"{' and '.join(unseen)} not seen from here" if unseen else "",
            at_rest,
            known,
        ),
        confidence=Confidence.LIKELY
        if blind or at_rest or concealed or unseen
        else Confidence.PROVEN,
        evidence=tuple(_fit_evidence(node)),
        ruled_out=ruled_out,
        victims=(),
        next_step="To judge clocks, power and PCIe speed, check again under load, while each GPU "
        "computes and copies for some seconds."
        if at_rest
        else "",
    )


def _at_rest(node: Node) -> str:
    """What idle GPUs leave open; empty when one of them works."""
    newest = [last_reading(gpu) for gpu in node.live_gpus]
    if not newest or any(is_busy(reading) is not False for reading in newest):
        return ""
    pstates = {reading.pstate for reading in newest if reading is not None}
    (pstate,) = pstates if len(pstates) == 1 else (None,)
    shown = f" (P{pstate})" if pstate is not None else ""
    return (
        f"{'all ' if len(newest) > 1 else ''}{_count(len(newest), 'GPU')} idle{shown}: "
        "clocks and link speed can't be judged at rest"
    )


def _judged(node: Node, results: tuple[ProbeResult, ...]) -> str:
    """What the answer rests on."""
    snapshot = node.snapshot
    parts = []
    on_bus = sum(device.is_nvidia_gpu for device in node.pci_by_address.values())
    if node.gpus:
        names = sorted({gpu.name for gpu in node.gpus if gpu.name})
        model = f" ({names[0]})" if len(names) == 1 else ""
        parts.append(f"{len(node.live_gpus)} of {len(node.gpus)} GPUs{model}")
        nvlinks = sum(len(gpu.nvlinks or ()) for gpu in node.live_gpus)
        parts += [f"{nvlinks} NVLinks"] if nvlinks else []
    elif on_bus:
        parts.append(f"{on_bus} GPUs on the bus, none of them through the driver")
    ports = len(snapshot.nics.ports) if snapshot.nics else 0
    parts += [_count(ports, "network port")] if ports else []
    if snapshot.kernel is not None:
        parts.append(_count(snapshot.kernel.lines_read, "kernel log line"))
    passed = sum(result.outcome is Outcome.PASS for result in results)
    text = f"{_count(passed, 'rule')} passed" + (f" on {', '.join(parts)}" if parts else "")
    if without_gpu(node):
        return f"{NO_GPU}; {text}"
    if not node.gpus and not on_bus:
        blind = "PCI" if snapshot.pci is None else "NVML"
        return f"no GPU seen, and {blind} could not be read; {text}"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def without_gpu(node: Node) -> bool:
    """Whether it is known that there is no NVIDIA GPU: PCI shows none, and NVML is not silent.

    Under WSL and in some containers a GPU is seen through NVML alone.
    """
    return (
        not node.gpus
        and node.snapshot.pci is not None
        and not any(device.is_nvidia_gpu for device in node.pci_by_address.values())
        and not any(
            gap.source == "nvml" and gap.reason.hides_something for gap in node.snapshot.gaps
        )
    )


def _fit_evidence(node: Node) -> Iterable[Evidence]:
    snapshot = node.snapshot
    if snapshot.nvml is not None and snapshot.nvml.device_count is not None:
        yield Evidence(
            source="nvml",
            locator="nvmlDeviceGetCount",
            observed=snapshot.nvml.device_count,
            unit="GPUs",
            recheck="nvidia-smi -L",
        )
    if snapshot.pci is not None:
        yield Evidence(
            source="sysfs",
            locator="/sys/bus/pci/devices",
            observed=sum(device.is_nvidia_gpu for device in snapshot.pci.devices),
            unit="NVIDIA GPUs",
            recheck="lspci -d 10de:",
        )
    if snapshot.kernel is not None:
        yield Evidence(
            source="kernel log",
            locator=snapshot.kernel.source,
            observed=len(snapshot.kernel.events),
            unit="events",
            recheck="dmesg -T",
        )
