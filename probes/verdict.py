"""The verdict on a node: findings and results folded into the answer to "is this node fit?".

A finding that another one causes (``explains``) is a symptom: it stands under its cause, and its
component is a victim unless it is a culprit itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from probes.all_clear import NO_GPU, cannot_tell, fit, joined, without_gpu
from probes.causes import Cause, causes_of, is_nameless_gpu, key_of, rank, reaches
from probes.finding import (
    Component,
    Evidence,
    FaultClass,
    Finding,
    Severity,
)
from probes.result import Outcome, ProbeResult, RuledOut, Verdict
from probes.view import Node

_RULED_OUT_LIMIT = 8
_EVIDENCE_LIMIT = 12
_NO_COINCIDENCE = 4  # so many parts do not break at once
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
            return (cannot_tell(node, results, ruled_out),)
        known = ", ".join(dict.fromkeys(finding.id for finding in sorted(mild, key=rank)))
        return (fit(node, results, ruled_out, f"worth knowing: {known}" if known else ""),)
    culprits = {key_of(culprit) for cause in causes for culprit in _culprits(node, cause)}
    mild = [
        finding
        for finding in mild
        if key_of(finding.component) not in culprits
        and not any(finding.id in f.explains and reaches(node, f, finding) for f in alarming)
    ]
    return tuple(
        _accuse(
            node,
            cause,
            causes,
            culprits,
            _informed(mild) + _tempting(node, results, _culprits(node, cause))
            if position == 0
            else [],
        )
        for position, cause in enumerate(causes)
    )


def _culprits(node: Node, cause: Cause) -> tuple[Component, ...]:
    if cause.worst.fault_class in _BLAMELESS:
        return ()
    if _is_common(node, cause):
        return (node.host_component(),)
    found = {key_of(finding.component): finding.component for finding in reversed(cause.findings)}
    return tuple(reversed(found.values()))


def _is_common(node: Node, cause: Cause) -> bool:
    """Whether all the node's GPUs have it alike: then it is what they share."""
    named = {f.component.pci for f in cause.findings if f.component.type == "gpu"} - {None}
    every = {device.address for device in node.pci_by_address.values() if device.is_nvidia_gpu}
    every |= {gpu.pci for gpu in node.gpus if gpu.pci}
    few = 2 if cause.worst.fault_class is FaultClass.CONFIGURATION else _NO_COINCIDENCE
    return len(named) >= few and named == every


# --- something is wrong ---


def _accuse(
    node: Node,
    cause: Cause,
    causes: tuple[Cause, ...],
    all_culprits: set[tuple[object, ...]],
    tempting: list[RuledOut],
) -> Verdict:
    worst, first = cause.worst, cause is causes[0]
    suffering = cause.symptoms + (cause.findings if _is_common(node, cause) else ())
    victims = {
        key_of(finding.component): finding.component
        for finding in suffering
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
        culprits=_culprits(node, cause),
        summary=joined(worst.summary, *tail),
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
    if without_gpu(node):
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
    listed = {gpu.pci for gpu in node.gpus}
    return sum(device.address not in listed for device in node.unlisted_gpus)


def _names(components: Iterable[Component]) -> set[str]:
    both = (name for component in components for name in (component.pci, component.gpu_uuid))
    return {name for name in both if name}


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
    by_id: dict[str, list[Finding]] = {}
    for finding in sorted(mild, key=rank):
        by_id.setdefault(finding.id, []).append(finding)
    return [
        RuledOut(
            what=f"{id} on {_several([finding.component.label() for finding in members])}",
            why=f"no reason to keep a job away: {members[0].summary}",
        )
        for id, members in by_id.items()
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
