"""Words and small helpers that several renderers share."""

from __future__ import annotations

from collections import Counter

from probes.finding import Component, FaultClass, Finding, JobImpact, Severity
from probes.result import Health, Report

HEALTH_TITLES = {
    Health.OK: "FIT",
    Health.UNKNOWN: "CAN'T TELL",
    Health.WARNING: "FIT, WITH WARNINGS",
    Health.CRITICAL: "NOT FIT",
}

JOB_WORDS = {
    JobImpact.NONE: "a job may go on",
    JobImpact.SLOWS: "a job may go on, but slower",
    JobImpact.BREAKS: "a job can't go on here",
}

CLASS_WORDS = {
    FaultClass.HARDWARE: "hardware",
    FaultClass.CONFIGURATION: "configuration",
    FaultClass.SOFTWARE: "software",
    FaultClass.LOAD: "load",
    FaultClass.NO_FAULT: "no fault",
    FaultClass.CANNOT_TELL: "cause unknown",
}


def one_line(text: str) -> str:
    """Text without control characters: a log line must not steer a terminal or break a line."""
    return "".join(char if char.isprintable() else " " for char in text)


def cut(text: str, limit_bytes: int) -> str:
    """At most ``limit_bytes`` bytes of UTF-8, ending in an ellipsis when cut."""
    encoded = text.encode()
    if len(encoded) <= limit_bytes:
        return text
    return encoded[: limit_bytes - 3].decode(errors="ignore").rstrip() + "…"


def in_order(report: Report) -> tuple[Finding, ...]:
    """The worst first; of equals those that a verdict accuses, before what they cause."""
    codes = [verdict.code for verdict in report.verdicts]

    def place(finding: Finding) -> tuple[int, int]:
        accused = codes.index(finding.id) if finding.id in codes else len(codes)
        return -finding.severity.rank, accused

    return tuple(sorted(report.findings, key=place))


def alarming(report: Report) -> tuple[Finding, ...]:
    """Findings that count: worse than info and not acknowledged."""
    quiet = {item.fingerprint for item in report.acknowledged}
    return tuple(
        finding
        for finding in in_order(report)
        if finding.severity is not Severity.INFO and finding.fingerprint not in quiet
    )


def counts(findings: tuple[Finding, ...]) -> str:
    """``2 critical, 1 warning``."""
    by_severity = Counter(finding.severity for finding in findings)
    return ", ".join(
        f"{by_severity[severity]} {severity.value}"
        for severity in (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
        if by_severity[severity]
    )


def job_sentence(report: Report) -> str:
    """Whether a job may go on, as far as it can be told."""
    if report.health is Health.UNKNOWN and report.job_impact is JobImpact.NONE:
        return "nothing seen that stops a job"
    return JOB_WORDS[report.job_impact]


def name(component: Component, host: str) -> str:
    """A component with what identifies it best; its host only when it is another one."""
    parts = [component.label() if component.label() != component.host else component.type]
    if component.type != "host" and not parts[0].startswith(component.type):
        parts.insert(
            0, component.type.upper() if component.type in ("gpu", "nic") else component.type
        )
    if component.type == "gpu" and component.index is not None and component.pci:
        parts.append(f"(NVML index {component.index})")
    if component.host and component.host != host:
        parts.append(f"on {component.host}")
    return " ".join(parts)
