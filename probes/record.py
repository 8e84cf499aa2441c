"""The base of every record: immutable, keyword-only, unknown values left out of the JSON.

Modules of records do without ``from __future__ import annotations``: msgspec would have to compile
each annotation again at run time, which costs more than all the rest of a record.
"""

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value that came from a reading or a rule.

    A field that could not be read is ``None`` (and a ``Gap`` says why); it is omitted when
    encoded. Fields without a default are always present in the JSON.
    """
