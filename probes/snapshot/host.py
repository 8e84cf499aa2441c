"""The machine around the GPUs: CPU, memory, limits, services, versions.

Source: proc(5), cgroups(7), Documentation/ABI.
"""

from __future__ import annotations

from probes.record import Record


class HostSection(Record, frozen=True, kw_only=True):
    """Facts of the host; the owner of the host collector fills this in."""

    cpu_count: int | None = None
