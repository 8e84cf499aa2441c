"""One line of at most 80 bytes, for node-problem-detector and drain reasons."""

from __future__ import annotations

from agent.report import RenderOptions
from agent.report.words import alarming, cut
from probes.result import Health, Report

LIMIT_BYTES = 80


def render(report: Report, options: RenderOptions) -> str:
    """``critical xid.off-bus 0000:3b:00.0 (+2)``, or why it can't be told."""
    findings = alarming(report)
    if findings:
        first = findings[0]
        more = f" (+{len(findings) - 1})" if len(findings) > 1 else ""
        head = f"{report.health.value} {first.id} {first.component.label()}"
        return cut(head, LIMIT_BYTES - len(more)) + more + "\n"
    if report.health is Health.OK:
        return cut(f"ok {report.host} fit", LIMIT_BYTES) + "\n"
    return cut(f"{report.health.value} {report.verdicts[0].summary}", LIMIT_BYTES) + "\n"
