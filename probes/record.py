"""The base of every record: immutable, keyword-only, unknown values left out of the JSON."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value that came from a reading or a rule.

    A field that could not be read is ``None`` (and a ``Gap`` says why); it is omitted when
    encoded. Fields without a default are always present in the JSON.
    """
