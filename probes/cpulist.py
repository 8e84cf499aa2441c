"""CPU lists as sysfs and cgroups write them. Source: cpuset(7), list format."""

from __future__ import annotations

import re

_MOST_CPUS = 1 << 16  # CONFIG_NR_CPUS is at most 8192; a bound against nonsense

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?\Z", re.ASCII)


def parse_cpulist(text: str) -> tuple[int, ...]:
    """The numbers of ``0-2,8,10-11``, ascending; an empty list is empty. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        match = _RANGE.match(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last >= _MOST_CPUS:
            raise ValueError(f"not a CPU list: {text[:80]!r}")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))
