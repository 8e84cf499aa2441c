"""Snapshot and evaluation -> Report."""

from __future__ import annotations

from datetime import datetime, timezone

from agent import __version__
from agent.ack import Ack, acknowledged, day_of
from agent.evaluate import Evaluation, health_of, visible_gaps
from agent.snapshot_file import snapshot_digest
from probes.finding import JobImpact
from probes.result import REPORT_SCHEMA, Report
from probes.snapshot.node import NodeSnapshot
from probes.verdict import node_verdicts
from probes.view import Node


def build_report(
    snapshot: NodeSnapshot,
    evaluation: Evaluation,
    *,
    command: str = "check",
    acks: tuple[Ack, ...] = (),
    verbose: bool = False,
) -> Report:
    """Everything a run has to say. Acknowledged findings stay listed and count for nothing."""
    known = acknowledged(evaluation.findings, acks, day_of(snapshot.taken_at_ns))
    quiet = {item.fingerprint for item in known}
    loud = tuple(f for f in evaluation.findings if f.fingerprint not in quiet)
    taken = datetime.fromtimestamp(snapshot.taken_at_ns / 1e9, timezone.utc)
    return Report(
        schema=REPORT_SCHEMA,
        tool_version=__version__,
        command=command,
        host=snapshot.host,
        taken_at=taken.isoformat(timespec="seconds").replace("+00:00", "Z"),
        taken_at_ns=snapshot.taken_at_ns,
        health=health_of(loud, evaluation.hidden),
        job_impact=max(
            (finding.job_impact for finding in loud),
            key=lambda impact: impact.rank,
            default=JobImpact.NONE,
        ),
        verdicts=node_verdicts(Node(snapshot), loud, evaluation.results, hidden=evaluation.hidden),
        findings=evaluation.findings,
        acknowledged=known,
        results=evaluation.results,
        gaps=visible_gaps(snapshot, verbose=verbose),
        snapshot_digest=snapshot_digest(snapshot),
    )
