"""Folds kernel log lines that say the same: a flood of one message must not cost memory or time."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from probes.snapshot.kernel import KernelEvent

# Distinct events kept of each kind: a flood of one kind can't crowd out another.
MAX_PER_KIND = 400
QUOTE_CHARS = 300


class _Entry(msgspec.Struct):
    event: KernelEvent
    locator: str
    at_s: float | None
    at_ns: int | None
    last_at_s: float | None
    last_at_ns: int | None
    count: int = 1


class KernelFold:
    """Events with the same facts (all but the line itself) within one minute become one.

    A driver load, a GPU reset or a cleared recovery action (Xid 154 to 0x0) ends the minute, so
    that what came before is never counted with what came after. Beyond ``MAX_PER_KIND`` an event
    is counted with the last one of the same kind, device and code; ``dropped`` counts those.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._entries: dict[object, _Entry] = {}
        self._kept: dict[str, int] = {}
        self._same_code: dict[object, _Entry] = {}
        self._identities: dict[KernelEvent, KernelEvent] = {}
        self._epoch = 0

    def add(
        self, event: KernelEvent, locator: str, at_s: float | None, at_ns: int | None = None
    ) -> None:
        """Take one more line."""
        key = (self._identity(event), self._epoch, _minute(at_s, at_ns))
        entry = self._entries.get(key)
        if entry is None:
            code = (event.kind, event.pci, event.code, event.what)
            kept = self._kept.get(event.kind, 0)
            if kept >= MAX_PER_KIND:
                self.dropped += 1
                entry = self._same_code.get(code)
                if entry is None:
                    return
            else:
                self._kept[event.kind] = kept + 1
                entry = _Entry(event, locator, at_s, at_ns, at_s, at_ns, 0)
                self._entries[key] = self._same_code[code] = entry
        entry.count += 1
        entry.last_at_s, entry.last_at_ns = at_s, at_ns
        if event.kind in ("driver-load", "gpu-reset") or event.recovery_to == 0:
            self._epoch += 1

    def _identity(self, event: KernelEvent) -> KernelEvent:
        found = self._identities.get(event)
        if found is None:
            if len(self._identities) > 10_000:
                self._identities.clear()
            found = self._identities[event] = replace(event, line="")
        return found

    def events(self) -> tuple[KernelEvent, ...]:
        """What was folded, in the order of first appearance."""
        return tuple(
            replace(
                entry.event,
                line=entry.event.line[:QUOTE_CHARS],
                locator=entry.locator,
                at_s=entry.at_s,
                at_ns=entry.at_ns,
                last_at_s=entry.last_at_s,
                last_at_ns=entry.last_at_ns,
                count=entry.count,
            )
            for entry in self._entries.values()
        )


def _minute(at_s: float | None, at_ns: int | None) -> int | None:
    if at_s is not None:
        return int(at_s // 60)
    return None if at_ns is None else at_ns // (60 * 10**9)
