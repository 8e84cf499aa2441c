"""Nagios plugin output: one line of at most 1 KB, perfdata behind the bar.

Source: Nagios plugin API; old NRPE cuts at 1024 bytes.
"""

from __future__ import annotations

from collections import Counter

from agent.report import RenderOptions
from agent.report.words import alarming, cut, one_line
from probes.finding import Severity
from probes.result import Outcome, Report

LIMIT_BYTES = 1024


def render(report: Report, options: RenderOptions) -> str:
    """``LAGGARD CRITICAL - summary; summary | critical=1;;0 …``."""
    findings = alarming(report)
    by_severity = Counter(finding.severity for finding in findings)
    by_outcome = Counter(result.outcome for result in report.results)
    perfdata = " ".join(
        (
            f"critical={by_severity[Severity.CRITICAL]};;0;0",
            f"warning={by_severity[Severity.WARNING]};0;;0",
            f"passed={by_outcome[Outcome.PASS]};;;0",
            f"unknown={by_outcome[Outcome.UNKNOWN]};;;0",
        )
    )
    said = "; ".join(finding.summary for finding in findings) or report.verdicts[0].summary
    text = one_line(f"LAGGARD {report.health.value.upper()} - {said}").replace("|", "/")
    return f"{cut(text, LIMIT_BYTES - len(perfdata) - 4)} | {perfdata}\n"
