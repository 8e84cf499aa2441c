"""/proc/pressure/*. Source: Documentation/accounting/psi.rst."""

from __future__ import annotations

import re

from probes.snapshot.host import Pressure

_LINE = re.compile(
    r"(some|full) avg10=(\d{1,3}\.\d+) avg60=(\d{1,3}\.\d+) avg300=\d{1,3}\.\d+ total=(\d{1,18})",
    re.ASCII,
)


def parse_psi(text: str) -> Pressure:
    """Read both lines; CPU pressure has no ``full`` line before Linux 5.13. Raises ValueError.

    ::

        some avg10=1.53 avg60=0.87 avg300=0.27 total=6900871
        full avg10=0.00 avg60=0.00 avg300=0.00 total=1200
    """
    found = {match[1]: match for match in _LINE.finditer(text)}
    if "some" not in found:
        raise ValueError(f"not a pressure file: {text[:80]!r}")
    some, full = found["some"], found.get("full")
    return Pressure(
        some_avg10_percent=float(some[2]),
        some_avg60_percent=float(some[3]),
        some_total_us=int(some[4]),
        full_avg10_percent=float(full[2]) if full else None,
        full_avg60_percent=float(full[3]) if full else None,
        full_total_us=int(full[4]) if full else None,
    )
