"""What an evaluation says: outcome per probe, health, verdicts, and the report that holds them."""

import enum
from typing import Literal

import msgspec

from probes.finding import Component, Confidence, Evidence, FaultClass, Finding, JobImpact, Severity
from probes.gap import Gap
from probes.record import Record

REPORT_SCHEMA = "laggard.report/1"


class Health(str, enum.Enum):
    """The roll-up. Unknown outranks ok: what could not be read is never healthy."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Order: ok < unknown < warning < critical."""
        return _HEALTH_ORDER[self]

    @classmethod
    def of(cls, severity: Severity) -> "Health":
        """The health that a finding of this severity stands for; info leaves a node ok."""
        return {
            Severity.INFO: cls.OK,
            Severity.WARNING: cls.WARNING,
            Severity.CRITICAL: cls.CRITICAL,
        }[severity]


_HEALTH_ORDER = {Health.OK: 0, Health.UNKNOWN: 1, Health.WARNING: 2, Health.CRITICAL: 3}


class Outcome(str, enum.Enum):
    """What became of one probe."""

    PASS = "pass"
    FAIL = "fail"
    NOTAPPLICABLE = "notapplicable"
    UNKNOWN = "unknown"  # a required input could not be read
    ERROR = "error"  # laggard's own bug
    NOTSELECTED = "notselected"


class ProbeResult(Record, frozen=True, kw_only=True):
    """The outcome of one probe on one snapshot.

    ``judged`` counts the components that were looked at and could be judged. ``notes`` say why a
    tempting alarm was not raised, ``missing`` which required readings were not to be had.
    """

    id: str
    outcome: Outcome
    judged: int = 0
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    error: str | None = None


class RuledOut(Record, frozen=True, kw_only=True):
    """A tempting wrong answer and why it is wrong."""

    what: str
    why: str


VerdictKind = Literal["node", "hang", "slow", "transport", "ring", "tooling"]


class Verdict(Record, frozen=True, kw_only=True):
    """The answer to one question; every field is always present."""

    kind: VerdictKind
    fault_class: FaultClass = msgspec.field(name="class")
    code: str
    culprits: tuple[Component, ...]
    summary: str
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    ruled_out: tuple[RuledOut, ...]
    victims: tuple[Component, ...]
    next_step: str


class Acknowledged(Record, frozen=True, kw_only=True):
    """A known fault that stays listed and no longer alarms until the date passes."""

    fingerprint: str
    id: str
    until: str  # RFC 3339 date
    reason: str


class Report(Record, frozen=True, kw_only=True):
    """Everything a run has to say; every field is always present."""

    schema: str
    tool_version: str
    command: str
    host: str
    taken_at: str  # RFC 3339, UTC
    taken_at_ns: int
    health: Health
    job_impact: JobImpact
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]
    acknowledged: tuple[Acknowledged, ...]
    results: tuple[ProbeResult, ...]
    gaps: tuple[Gap, ...]
    snapshot_digest: str


def worst(*healths: Health) -> Health:
    """The maximum; ok when there is nothing to say."""
    return max(healths, key=lambda health: health.rank, default=Health.OK)
