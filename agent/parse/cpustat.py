"""The CPU lines of /proc/stat. Source: proc(5)."""

from __future__ import annotations

import re

_TICKS = re.compile(r"\d{1,18}\Z", re.ASCII)


def parse_cpustat(text: str) -> dict[int, tuple[int, int]]:
    """``(busy, total)`` ticks per CPU; idle and iowait are not busy, guest is in user already.

    ::

        cpu  8875 0 2854 1093326 3021 0 121 278 0 0
        cpu0 1679 0 991 551285 16 0 48 146 0 0
    """
    found: dict[int, tuple[int, int]] = {}
    for line in text.split("\n"):
        if not line.startswith("cpu"):
            break  # the CPU lines come first; the interrupt line behind them is long
        name, *fields = line.split()
        number = name[3:]
        ticks = [int(field) for field in fields[:8] if _TICKS.match(field)]
        if not (number.isascii() and number.isdigit()) or len(ticks) < 4:
            continue
        total = sum(ticks)
        found[int(number[:9])] = (total - sum(ticks[3:5]), total)
    return found
