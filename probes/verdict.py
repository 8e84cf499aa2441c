"""The verdict on a node: findings and results folded into the answer to "is this node fit?".

A finding that another one causes (``explains``) is a symptom: it stands under its cause, and its
component is a victim unless it is a culprit itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from probes.causes import Cause, causes_of, is_nameless_gpu, key_of, rank, reaches
from probes.finding import (
    Component,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    Severity,
)
from probes.gap import Gap, GapReason, fold_gaps
from probes.result import Outcome, ProbeResult, RuledOut, Verdict
from probes.snapshot.gpu import GpuState
from probes.view import Node, is_busy, last_reading

SUMMARY_LIMIT = 300
NO_GPU = "no NVIDIA GPU here; host judged only"
_RULED_OUT_LIMIT = 8
_EVIDENCE_LIMIT = 12
# A summary that already tells how many GPUs answer.
_COUNTS_GPUS = re.compile(r"\bGPUs? answers?\b")
# Families of rules by how much their lines look like a fault to a reader; the rest comes after.
_TEMPTING = ("xid", "sxid", "gpu", "kernel", "memory", "clocks", "power", "nvlink", "fabric",
             "pcie", "thermal", "nic", "process")  # fmt: skip
# Nobody is to blame for these.
_BLAMELESS = (FaultClass.LOAD, FaultClass.NO_FAULT)


def node_verdicts(
    node: Node, findings: Iterable[Finding], results: tuple[ProbeResult, ...], *, hidden: bool
) -> tuple[Verdict, ...]:
    """At least one verdict; the first answers whether the node is fit.

    ``findings`` are those that alarm: not the acknowledged ones. ``hidden`` says that a required
    reading, which exists here, was not to be had.
    """
    findings = list(findings)
    alarming = [finding for finding in findings if finding.severity is not Severity.INFO]
    mild = [finding for finding in findings if finding.severity is Severity.INFO]
    causes = causes_of(node, alarming)
    if not causes:
        ruled_out = tuple((_informed(mild) + _tempting(node, results))[:_RULED_OUT_LIMIT])
        if hidden:
            return (_cannot_tell(node, results, ruled_out),)
        return (_fit(node, results, ruled_out),)
    mild = [
        finding
        for finding in mild
        if not any(finding.id in f.explains and reaches(node, f, finding) for f in alarming)
    ]
    culprits = {key_of(culprit) for cause in causes for culprit in _culprits(cause)}
    return tuple(
        _accuse(
            node,
            cause,
            causes,
            culprits,
            _informed(mild) + _tempting(node, results, _culprits(cause)) if position == 0 else [],
        )
        for position, cause in enumerate(causes)
    )


def _culprits(cause: Cause) -> tuple[Component, ...]:
    if cause.worst.fault_class in _BLAMELESS:
        return ()
    found = {key_of(finding.component): finding.component for finding in reversed(cause.findings)}
    return tuple(reversed(found.values()))


# --- something is wrong ---


def _accuse(
    node: Node,
    cause: Cause,
    causes: tuple[Cause, ...],
    all_culprits: set[tuple[object, ...]],
    tempting: list[RuledOut],
) -> Verdict:
    worst, first = cause.worst, cause is causes[0]
    victims = {
        key_of(finding.component): finding.component
        for finding in cause.symptoms
        if finding.component.type != "host"
        and key_of(finding.component) not in all_culprits
        and not is_nameless_gpu(finding.component)  # then it is the culprit itself
    }
    effects: dict[str, list[str]] = {}
    for effect in cause.symptoms:
        if not is_nameless_gpu(effect.component):  # which one it is can't be told
            effects.setdefault(effect.id, []).append(effect.component.label())
    ruled_out = [
        RuledOut(
            what=f"{id} on {_several(parts)} as a fault of its own", why=f"{worst.id} causes it"
        )
        for id, parts in effects.items()
    ]
    tail = [_more(cause), _others(node, causes) if first else ""]
    if first and len(causes) > 1:
        tail.append("also " + ", ".join(other.worst.id for other in causes[1:]))
    remedy = worst.remedy
    return Verdict(
        kind="node",
        fault_class=worst.fault_class,
        code=worst.id,
        culprits=_culprits(cause),
        summary=_joined(worst.summary, *tail),
        confidence=worst.confidence,
        evidence=_evidence(cause),
        ruled_out=tuple((ruled_out + tempting)[:_RULED_OUT_LIMIT]),
        victims=tuple(victims.values()),
        next_step=remedy.text if remedy else f"Read `laggard explain {worst.id}`.",
    )


def _evidence(cause: Cause) -> tuple[Evidence, ...]:
    """All of the cause's and the first of each symptom; of each part the first when too many."""
    effects = [finding.evidence[0] for finding in cause.symptoms]
    every = [item for finding in cause.findings for item in finding.evidence] + effects
    if len(every) > _EVIDENCE_LIMIT:
        every = [finding.evidence[0] for finding in cause.findings] + effects + every
    return tuple(dict.fromkeys(every))[:_EVIDENCE_LIMIT]


def _more(cause: Cause) -> str:
    """The other parts with the same fault."""
    others = [finding.component.label() for finding in cause.findings[1:]]
    if not others:
        return ""
    named = ", ".join(others[:7]) + (" ..." if len(others) > 7 else "")
    return f"the same on {len(others)} more: {named}"


def _others(node: Node, causes: tuple[Cause, ...]) -> str:
    """What the GPUs that the verdict does not accuse do; or that there is none at all."""
    if _without_gpu(node):
        return NO_GPU
    accused = [finding.component for finding in causes[0].findings]
    if not any(component.type in ("gpu", "nvlink") for component in accused):
        return ""
    named = _names(accused)
    count = len(node.gpus) + (0 if any(not gpu.pci for gpu in node.gpus) else _unlisted(node))
    if any(_names((node.gpu_component(gpu),)) & named for gpu in node.live_gpus):
        spoken = _names(f.component for c in causes for f in (*c.findings, *c.symptoms))
        clean = sum(not _names((node.gpu_component(gpu),)) & spoken for gpu in node.live_gpus)
        return f"nothing found on the other {clean} of {count} GPUs" if clean else ""
    answer = len(node.live_gpus)
    if not answer or _COUNTS_GPUS.search(causes[0].worst.summary):
        return ""
    return f"the other {answer} of {count} GPUs {'answer' if answer > 1 else 'answers'}"


def _unlisted(node: Node) -> int:
    """GPUs of this node that NVML leaves out altogether."""
    return len(node.unlisted_gpus) - sum(map(node.is_named_by_bus, node.gpus))


def _names(components: Iterable[Component]) -> set[str]:
    both = (name for component in components for name in (component.pci, component.gpu_uuid))
    return {name for name in both if name}


def _joined(*parts: str) -> str:
    """Sentence parts behind each other, as many as fit."""
    text = parts[0].rstrip(".")
    for part in parts[1:]:
        if part and len(text) + len(part) + 2 <= SUMMARY_LIMIT:
            text += f"; {part}"
    return text if len(text) <= SUMMARY_LIMIT else text[: SUMMARY_LIMIT - 1].rstrip() + "…"


def _tempting(
    node: Node, results: tuple[ProbeResult, ...], accused: tuple[Component, ...] = ()
) -> list[RuledOut]:
    """Alarms that were looked into and not raised: the notes of parts that were judged.

    The most tempting come first: of the accused part, then lines that look like a GPU's fault.
    """
    parts = _labels(node)
    labels = {component.label() for component in accused}
    out: list[tuple[bool, int, RuledOut]] = []
    for result in results:
        if result.outcome is Outcome.NOTAPPLICABLE:
            continue
        by_note: dict[str, list[str]] = {}  # equal notes of one rule are one line
        for note in result.notes:
            part, found, why = note.partition(": ")
            if found and part.partition(" link ")[0] in parts:
                by_note.setdefault(why, []).append(part)
        for why, members in by_note.items():
            line, colon, rest = why.partition(": ")
            named = bool(colon) and line.startswith(("Xid ", "SXid ", "GPU has fallen"))
            ruled_out = RuledOut(
                what=f"{line if named else result.id} on {_several(members)}",
                why=rest if named else why,
            )
            family = result.id.partition(".")[0]
            at = _TEMPTING.index(family) if family in _TEMPTING else len(_TEMPTING)
            out.append((labels.isdisjoint(members), at, ruled_out))
    return [ruled_out for _, _, ruled_out in sorted(out, key=lambda item: item[:2])]


def _informed(mild: list[Finding]) -> list[RuledOut]:
    """What is worth knowing and keeps no job away."""
    return [
        RuledOut(
            what=f"{finding.id} on {finding.component.label()}",
            why=f"no reason to keep a job away: {finding.summary}",
        )
        for finding in sorted(mild, key=rank)
    ]


def _several(parts: list[str]) -> str:
    return parts[0] + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")


def _labels(node: Node) -> set[str]:
    snapshot = node.snapshot
    labels = {node.host, "host", *node.pci_by_address}
    for gpu in node.gpus:
        labels |= {gpu.pci or gpu.uuid or f"gpu {gpu.index}", gpu.uuid or ""}
    for port in snapshot.nics.ports if snapshot.nics else ():
        labels |= {port.device, port.key}
    for process in snapshot.processes.processes if snapshot.processes else ():
        labels.add(f"pid {process.pid}")
    return labels


# --- nothing is wrong, as far as can be seen ---


def _unjudged(results: tuple[ProbeResult, ...]) -> list[ProbeResult]:
    return [result for result in results if result.outcome in (Outcome.UNKNOWN, Outcome.ERROR)]


def _cannot_tell(
    node: Node, results: tuple[ProbeResult, ...], ruled_out: tuple[RuledOut, ...]
) -> Verdict:
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
        summary=_joined(
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


def _fit(node: Node, results: tuple[ProbeResult, ...], ruled_out: tuple[RuledOut, ...]) -> Verdict:
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
        summary=_joined(
            f"Nothing wrong found: {_judged(node, results)}",
            f"{_count(len(blind), 'rule')} could not judge" if blind else "",
            f"{_count(concealed, 'GPU')} hidden from this user or container, not judged"
            if concealed
            else "",
            f"{' and '.join(unseen)} not seen from here" if unseen else "",
            at_rest,
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
    if _without_gpu(node):
        return f"{NO_GPU}; {text}"
    if not node.gpus and not on_bus:
        blind = "PCI" if snapshot.pci is None else "NVML"
        return f"no GPU seen, and {blind} could not be read; {text}"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _without_gpu(node: Node) -> bool:
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
