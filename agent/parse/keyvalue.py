"""Files of ``name number`` lines: meminfo, vmstat, cgroup cpu.stat, memory.stat, memory.events."""

from __future__ import annotations

import re

# More digits would not fit a 64-bit integer; no counter that is used gets there in a lifetime.
_LINE = re.compile(r"([^\s:]+):?[ \t]+(?:(\d{1,18})|(\d{1,15})[ \t]+kB)[ \t]*\Z", re.ASCII)


def parse_keyvalue(text: str) -> dict[str, int]:
    """The numbers by name, a ``kB`` behind a number turned into bytes; other lines are left out.

    ::

        MemTotal:       528000000 kB
        pswpin 12
    """
    found: dict[str, int] = {}
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match:
            found[match[1]] = int(match[2]) if match[2] else int(match[3]) * 1024
    return found
