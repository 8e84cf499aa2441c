"""What could not be read, where, why, and how to allow it."""

import enum
from collections.abc import Callable, Iterable

from probes.record import Record


class GapReason(str, enum.Enum):
    """Why a reading is missing."""

    ABSENT = "absent"  # the thing is not on this machine (or the device no longer answers)
    UNSUPPORTED = "unsupported"  # it is here, but this part or driver has no such reading
    DENIED = "denied"  # it is here, and permission is missing
    TIMEOUT = "timeout"  # the reading did not return within its deadline
    MALFORMED = "malformed"  # an answer came, but not one that can be used
    NOT_COLLECTED = "not-collected"  # nobody asked

    @classmethod
    def _missing_(cls, value: object) -> "GapReason":
        """A reason that a newer minor version added reads as not-collected."""
        return cls.NOT_COLLECTED

    @property
    def hides_something(self) -> bool:
        """True when the reading exists on this machine but could not be had."""
        return self in (GapReason.DENIED, GapReason.TIMEOUT, GapReason.MALFORMED)


class Gap(Record, frozen=True, kw_only=True):
    """One source and reason, folded over the fields and devices it concerns.

    ``source`` is the section's name in the snapshot (``nvml``, ``pci``, ``kernel``, ``nics``,
    ``processes``, ``host``). Empty ``fields`` means the whole section; empty ``devices`` means
    all of them. ``fields`` are the record's own field names.
    """

    source: str
    reason: GapReason
    fields: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    detail: str | None = None  # what was tried and what the system said
    allow: str | None = None  # how to let laggard read it

    def covers(self, source: str, field: str | None, device: str | None) -> bool:
        """Whether this gap explains why ``field`` of ``device`` is missing from ``source``."""
        return (
            self.source == source
            and (not self.fields or (field is not None and field in self.fields))
            and (not self.devices or (device is not None and device in self.devices))
        )


def fold_gaps(gaps: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """Fold gaps of one source, reason, detail and remedy into one, order kept.

    Two gaps fold when they differ in their fields only or in their devices only, so that a
    folded gap never claims a (field, device) pair that nobody reported.
    """
    folded = _fold(gaps, key=lambda gap: (gap.fields, bool(gap.devices)), join_devices=True)
    return _fold(folded, key=lambda gap: (gap.devices, bool(gap.fields)), join_devices=False)


def _fold(
    gaps: tuple[Gap, ...], *, key: Callable[[Gap], object], join_devices: bool
) -> tuple[Gap, ...]:
    groups: dict[object, list[Gap]] = {}
    for gap in gaps:
        groups.setdefault((gap.source, gap.reason, gap.detail, gap.allow, key(gap)), []).append(gap)
    out = []
    for members in groups.values():
        first = members[0]
        out.append(
            Gap(
                source=first.source,
                reason=first.reason,
                fields=first.fields if join_devices else _union(gap.fields for gap in members),
                devices=_union(gap.devices for gap in members) if join_devices else first.devices,
                detail=first.detail,
                allow=first.allow,
            )
        )
    return tuple(out)


def _union(many: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    seen: dict[str, None] = {}
    for items in many:
        seen.update(dict.fromkeys(items))
    return tuple(seen)
