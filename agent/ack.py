"""Acknowledged faults: they stay listed and no longer alarm, until the day that was said."""

from __future__ import annotations

from datetime import date, datetime, timezone

from agent.state import State
from probes.finding import Component, Finding
from probes.pci_address import normalize_pci_address
from probes.record import Record
from probes.result import Acknowledged

FILE = "acks.json"


class Ack(Record, frozen=True, kw_only=True):
    """A fault that somebody knows of; without ``component`` on every part of this node."""

    id: str
    component: str | None = None
    until: str  # the last day, UTC
    reason: str
    added_at: str
    added_by: str | None = None

    def holds(self, day: date) -> bool:
        """Whether it still counts on a day."""
        return self.until >= day.isoformat()

    def covers(self, finding: Finding) -> bool:
        """Whether it means this finding."""
        if self.id != finding.id:
            return False
        return self.component is None or self.component.lower() in names_of(finding.component)


def names_of(component: Component) -> frozenset[str]:
    """Everything that a person may call a component, in lower case."""
    names = {component.label(), component.pci, component.gpu_uuid, component.device, component.host}
    return frozenset(name.lower() for name in names if name)


def component_name(text: str) -> str:
    """A part as it is kept, however a PCI address was spelled (nvidia-smi: 00000000:9D:00.0)."""
    return normalize_pci_address(text) or text.strip().lower()


def read_acks(state: State) -> tuple[Ack, ...]:
    """All that are kept, expired ones too."""
    return state.read(FILE, tuple[Ack, ...]) or ()


def keep_acks(state: State, acks: tuple[Ack, ...]) -> bool:
    """Keep them; False when the state can't be written."""
    return state.write(FILE, acks)


def day_of(time_ns: int) -> date:
    """The UTC day of a Unix time."""
    return datetime.fromtimestamp(time_ns / 1e9, timezone.utc).date()


def acknowledged(
    findings: tuple[Finding, ...], acks: tuple[Ack, ...], day: date
) -> tuple[Acknowledged, ...]:
    """The findings that are known and quiet on this day."""
    valid = [ack for ack in acks if ack.holds(day)]
    return tuple(
        Acknowledged(
            fingerprint=finding.fingerprint, id=finding.id, until=ack.until, reason=ack.reason
        )
        for finding in findings
        if (ack := next((ack for ack in valid if ack.covers(finding)), None)) is not None
    )
