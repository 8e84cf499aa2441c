"""CPU lists as the kernel writes them (Documentation/admin-guide/cputopology.rst)."""

from __future__ import annotations

_MOST_CPUS = 1 << 16  # NR_CPUS is below it on every architecture


def parse_cpulist(text: str) -> frozenset[int]:
    """The CPU numbers of a list such as ``0-31,64-95``. Raises ValueError."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, dash, last = part.partition("-")
        start, end = int(first), int(last if dash else first)
        if not 0 <= start <= end < _MOST_CPUS:
            raise ValueError(f"no CPU list: {text[:60]!r}")
        cpus.update(range(start, end + 1))
    return frozenset(cpus)
