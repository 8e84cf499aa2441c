"""/proc/loadavg. Source: proc(5)."""

from __future__ import annotations

import re

_LINE = re.compile(r"(\d{1,9}\.\d+) (\d{1,9}\.\d+) \d{1,9}\.\d+ \d+/\d+ \d+", re.ASCII)


def parse_loadavg(text: str) -> tuple[float, float]:
    """The averages over one and five minutes. Raises ValueError.

    ::

        12.05 8.08 4.04 3/912 7232
    """
    match = _LINE.match(text)
    if not match:
        raise ValueError(f"not a load average: {text[:80]!r}")
    return float(match[1]), float(match[2])
