"""Files of ``name number`` lines: meminfo, vmstat, cgroup cpu.stat, memory.stat, memory.events."""

from __future__ import annotations

import re

_LINE = re.compile(r"([^\s:]+):?[ \t]+(\d{1,20})(?:[ \t]+kB)?[ \t]*\Z", re.ASCII)


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
            scale = 1024 if line.rstrip().endswith("kB") else 1
            found[match[1]] = int(match[2]) * scale
    return found
