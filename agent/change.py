"""What is new and what has cleared since the last run, for ``--on-change``."""

from __future__ import annotations

from collections.abc import Iterable

from agent.state import State
from probes.finding import Finding, Severity
from probes.record import Record
from probes.result import Health, Outcome, Report

FILE = "last_run.json"


class Seen(Record, frozen=True, kw_only=True):
    """A finding as the last run said it; ``quiet`` when it was acknowledged then."""

    fingerprint: str
    id: str
    severity: Severity
    component: str
    summary: str
    quiet: bool = False


class LastRun(Record, frozen=True, kw_only=True):
    """What the last run said of this node."""

    health: Health
    findings: tuple[Seen, ...] = ()


class Change(Record, frozen=True, kw_only=True):
    """The difference between two runs; ``kept`` is what the next run compares with."""

    health_before: Health | None
    new: tuple[Finding, ...]
    worse: tuple[Finding, ...]
    cleared: tuple[Seen, ...]
    unseen: tuple[Seen, ...]  # can't be judged now: not cleared
    kept: LastRun

    @property
    def anything(self) -> bool:
        """Whether there is something to tell."""
        before = self.health_before or Health.OK
        return bool(self.new or self.worse or self.cleared) or before is not self.kept.health


def change_since(last: LastRun | None, report: Report, least: Severity = Severity.INFO) -> Change:
    """Compare by fingerprint. A first run has everything new.

    A finding whose rule can't judge now, or was not asked, has not cleared: it is kept. What is
    milder than ``least`` is kept and not told.
    """
    before = {seen.fingerprint: seen for seen in last.findings} if last else {}
    quiet = {item.fingerprint for item in report.acknowledged}
    now = {
        finding.fingerprint: Seen(
            fingerprint=finding.fingerprint,
            id=finding.id,
            severity=finding.severity,
            component=finding.component.label(),
            summary=finding.summary,
            quiet=finding.fingerprint in quiet,
        )
        for finding in report.findings
    }
    judged = {
        result.id
        for result in report.results
        if result.outcome in (Outcome.PASS, Outcome.FAIL, Outcome.NOTAPPLICABLE)
    }
    gone = [seen for key, seen in before.items() if key not in now]
    unseen = tuple(seen for seen in gone if seen.id not in judged)
    loud = [
        finding
        for finding in report.findings
        if finding.fingerprint not in quiet and finding.severity.rank >= least.rank
    ]
    return Change(
        health_before=last.health if last else None,
        new=tuple(f for f in loud if f.fingerprint not in before or before[f.fingerprint].quiet),
        worse=tuple(f for f in loud if _rose(f, before.get(f.fingerprint))),
        cleared=tuple(s for s in gone if s.id in judged and s.severity.rank >= least.rank),
        unseen=unseen,
        kept=LastRun(health=report.health, findings=(*now.values(), *unseen)),
    )


def _rose(finding: Finding, before: Seen | None) -> bool:
    return before is not None and not before.quiet and finding.severity.rank > before.severity.rank


def read_last_run(state: State) -> LastRun | None:
    """What the last run kept."""
    return state.read(FILE, LastRun)


def keep_last_run(state: State, kept: LastRun) -> None:
    """Keep it for the next run."""
    state.write(FILE, kept)


def change_lines(change: Change, host: str) -> Iterable[str]:
    """The difference for a mail: one line each, the health first."""
    if change.health_before is None:
        yield f"{host}: {change.kept.health.value} (first run)"
    elif change.health_before is change.kept.health:
        yield f"{host}: still {change.kept.health.value}"
    else:
        yield f"{host}: {change.health_before.value} -> {change.kept.health.value}"
    for word, findings in (("new", change.new), ("worse", change.worse)):
        for finding in findings:
            yield f"{word:<7}  {finding.severity.value}  {finding.id}  {finding.summary}"
    for seen in change.cleared:
        yield f"cleared  {seen.severity.value}  {seen.id}  was: {seen.summary}"
    for seen in change.unseen:
        yield f"unknown  {seen.severity.value}  {seen.id}  can't be judged now, was: {seen.summary}"
