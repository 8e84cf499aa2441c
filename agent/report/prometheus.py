"""Prometheus text format 0.0.4 for the node exporter's textfile collector.

Only gauges, no timestamps, a final newline: anything else makes the collector refuse the file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from agent.report import RenderOptions
from agent.report.words import alarming
from probes.finding import Component, Severity
from probes.result import Health, Outcome, Report

Sample = tuple[Mapping[str, str], float]


def render(report: Report, options: RenderOptions) -> str:
    """All metrics of one run."""
    quiet = {item.fingerprint for item in report.acknowledged}
    loudest: dict[tuple[str, str, str, str], tuple[Severity, bool]] = {}
    for finding in report.findings:
        key = (finding.id, *_component_labels(finding.component))
        value = (finding.severity, finding.fingerprint in quiet)
        if key not in loudest or loudest[key][0].rank < value[0].rank:
            loudest[key] = value

    counted = alarming(report)
    lines: list[str] = []
    _family(
        lines,
        "laggard_health",
        "Roll-up of the last run: 1 for the state that holds.",
        (({"state": state.value}, float(state is report.health)) for state in Health),
    )
    _family(
        lines,
        "laggard_findings",
        "Findings of the last run that are not acknowledged, by severity.",
        (
            (
                {"severity": severity.value},
                float(
                    sum(
                        finding.severity is severity
                        for finding in (report.findings if severity is Severity.INFO else counted)
                    )
                ),
            )
            for severity in Severity
        ),
    )
    _family(
        lines,
        "laggard_finding",
        "One for each finding of the last run.",
        (
            (
                {
                    "id": key[0],
                    "severity": severity.value,
                    "type": key[1],
                    "component": key[2],
                    "gpu_uuid": key[3],
                    "acknowledged": str(acknowledged).lower(),
                },
                1.0,
            )
            for key, (severity, acknowledged) in sorted(loudest.items())
        ),
    )
    _family(
        lines,
        "laggard_probe_outcome",
        "Outcome of each selected probe: 1 for the one that holds.",
        (
            ({"probe": result.id, "outcome": result.outcome.value}, 1.0)
            for result in report.results
            if result.outcome is not Outcome.NOTSELECTED
        ),
    )
    _family(
        lines,
        "laggard_gaps",
        "Readings that exist here but could not be had, by source and reason.",
        _gap_samples(report),
    )
    _family(
        lines,
        "laggard_run_timestamp_seconds",
        "When the last run read the node (Unix time).",
        (({}, report.taken_at_ns / 1e9),),
    )
    _family(
        lines,
        "laggard_build_info",
        "Version of laggard and Python that wrote this file.",
        (
            (
                {
                    "version": report.tool_version,
                    "python": f"{sys.version_info.major}.{sys.version_info.minor}",
                },
                1.0,
            ),
        ),
    )
    return "\n".join(lines) + "\n"


def _component_labels(component: Component) -> tuple[str, str, str]:
    """Type, name and UUID; a pid is no label (each one would be a new series)."""
    label = component.type if component.pid is not None else component.label()
    return component.type, label, component.gpu_uuid or ""


def _gap_samples(report: Report) -> Iterable[Sample]:
    sums: dict[tuple[str, str], int] = {}
    for gap in report.gaps:
        if gap.reason.hides_something:
            key = (gap.source, gap.reason.value)
            sums[key] = sums.get(key, 0) + max(1, len(gap.fields)) * max(1, len(gap.devices))
    for (source, reason), count in sorted(sums.items()):
        yield {"source": source, "reason": reason}, float(count)


def _family(lines: list[str], name: str, text: str, samples: Iterable[Sample]) -> None:
    body = [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    if body:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} gauge", *body))


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
