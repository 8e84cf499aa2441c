"""Snapshot x probes -> outcomes and findings. Pure but for the probes' own import."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import msgspec

from probes.finding import Finding, Severity
from probes.gap import Gap, GapReason, fold_gaps
from probes.registry import Clear, NotApplicable, Probe, Unread
from probes.result import Health, Outcome, ProbeResult, worst
from probes.snapshot.node import NodeSnapshot
from probes.view import Node


class Policy(msgspec.Struct, frozen=True):
    """What the operator decided: selection is by the caller, this is what changes judgement."""

    limits: Mapping[str, Mapping[str, float]] = msgspec.field(default_factory=dict)
    severities: Mapping[str, Severity] = msgspec.field(default_factory=dict)
    require: frozenset[str] = frozenset()  # ids whose missing inputs always count
    accept_unknown: frozenset[str] = frozenset()  # ids whose missing inputs never count


class Evaluation(msgspec.Struct, frozen=True):
    """What all probes said of one snapshot.

    ``hidden``: something that exists here and is required could not be read.
    """

    results: tuple[ProbeResult, ...]
    findings: tuple[Finding, ...]
    health: Health
    hidden: bool = False


def evaluate(
    snapshot: NodeSnapshot,
    probes: Iterable[Probe],
    policy: Policy = Policy(),
    not_selected: Iterable[str] = (),
) -> Evaluation:
    """Run the probes. A probe that raises is our bug: outcome ``error``, the others go on."""
    node = Node(snapshot)
    results: list[ProbeResult] = []
    findings: list[Finding] = []
    any_hidden = False
    for item in probes:
        result, found, hidden = _run(item, node, policy)
        results.append(result)
        findings.extend(found)
        any_hidden = any_hidden or hidden or result.outcome is Outcome.ERROR
    results.extend(ProbeResult(id=id, outcome=Outcome.NOTSELECTED) for id in not_selected)
    results.sort(key=lambda result: result.id)
    findings.sort(key=_order)
    return Evaluation(tuple(results), tuple(findings), health_of(findings, any_hidden), any_hidden)


def health_of(findings: Iterable[Finding], hidden: bool) -> Health:
    """The roll-up of findings and of whether a required reading stayed hidden."""
    unknown = (Health.UNKNOWN,) if hidden else ()
    return worst(*unknown, *(Health.of(finding.severity) for finding in findings))


def _order(finding: Finding) -> tuple[int, int, str, str]:
    return (
        -finding.severity.rank,
        -finding.confidence.rank,
        finding.id,
        finding.component.label(),
    )


def _run(item: Probe, node: Node, policy: Policy) -> tuple[ProbeResult, list[Finding], bool]:
    """The result, the findings, and whether something that exists here stayed hidden."""
    snapshot = node.snapshot
    for section in item.needs:
        if getattr(snapshot, section if section != "host" else "host_facts") is None:
            reason, text = _why(snapshot.gaps, section, None, None)
            outcome, hidden = _missing_outcome(item, [reason], policy)
            return ProbeResult(id=item.id, outcome=outcome, missing=(text,)), [], hidden

    limits = {name: limit.default for name, limit in item.limits.items()}
    limits.update(policy.limits.get(item.id, {}))
    findings: list[Finding] = []
    judged = 0
    notes: list[str] = []
    not_applicable: list[str] = []
    reasons: list[GapReason] = []
    missing: list[str] = []
    try:
        for statement in item.check(node, limits):
            if isinstance(statement, Finding):
                judged += 1
                findings.append(_with_severity(statement, policy))
            elif isinstance(statement, Clear):
                judged += 1
                if statement.note:
                    notes.append(f"{statement.component.label()}: {statement.note}")
            elif isinstance(statement, Unread):
                reason, text = _why(
                    snapshot.gaps, statement.source, statement.field, statement.device
                )
                reasons.append(statement.reason or reason)
                missing.append(text)
            elif isinstance(statement, NotApplicable):
                not_applicable.append(statement.why)
    except Exception:
        return (
            ProbeResult(id=item.id, outcome=Outcome.ERROR, error=traceback.format_exc(limit=-3)),
            findings,
            False,
        )

    gap_outcome, hidden = _missing_outcome(item, reasons, policy) if reasons else (None, False)
    if any(finding.severity is not Severity.INFO for finding in findings):
        outcome = Outcome.FAIL
    elif gap_outcome is Outcome.UNKNOWN:
        outcome = Outcome.UNKNOWN
    elif judged:
        outcome = Outcome.PASS
    elif gap_outcome is not None:
        outcome = gap_outcome
    else:
        outcome, hidden = _missing_outcome(item, [GapReason.UNSUPPORTED], policy)
    result = ProbeResult(
        id=item.id,
        outcome=outcome,
        judged=judged,
        notes=tuple(dict.fromkeys([*notes, *not_applicable])),
        missing=tuple(dict.fromkeys(missing)),
    )
    return result, findings, hidden


def _missing_outcome(item: Probe, reasons: list[GapReason], policy: Policy) -> tuple[Outcome, bool]:
    """The outcome that missing inputs lead to, and whether it counts in the health."""
    required = item.id in policy.require
    if required:
        return Outcome.UNKNOWN, True
    if any(reason.hides_something for reason in reasons):
        return Outcome.UNKNOWN, item.id not in policy.accept_unknown
    if GapReason.NOT_COLLECTED in reasons:
        return Outcome.UNKNOWN, False
    return Outcome.NOTAPPLICABLE, False


def _why(
    gaps: tuple[Gap, ...], source: str, field_name: str | None, device: str | None
) -> tuple[GapReason, str]:
    what = " of ".join(part for part in (field_name or source, device) if part)
    for gap in gaps:
        if gap.covers(source, field_name, device):
            if not gap.fields and not gap.devices:  # the same for whatever was asked of it
                what = source
            return gap.reason, f"{what}: {gap.reason.value}" + (
                f" ({gap.detail})" if gap.detail else ""
            )
    return GapReason.NOT_COLLECTED, f"{what}: {GapReason.NOT_COLLECTED.value}"


def _with_severity(finding: Finding, policy: Policy) -> Finding:
    severity = policy.severities.get(finding.id)
    return msgspec.structs.replace(finding, severity=severity) if severity else finding


def visible_gaps(snapshot: NodeSnapshot, *, verbose: bool) -> tuple[Gap, ...]:
    """The gaps a reader is shown: folded, and *unsupported* only on request."""
    return fold_gaps(
        tuple(gap for gap in snapshot.gaps if verbose or gap.reason is not GapReason.UNSUPPORTED)
    )
