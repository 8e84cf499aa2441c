"""/proc/PID/limits. Source: proc(5), fs/proc/base.c."""

from __future__ import annotations

import re

from probes.snapshot.host import ResourceLimit

_UNLIMITED = 1 << 63  # limits near RLIM_INFINITY are meant to be none
_LINE = re.compile(
    r"(Max [a-z ]+?) {2,}(unlimited|\d{1,20}) +(unlimited|\d{1,20})(?: |\Z)", re.ASCII
)


def parse_limits(text: str) -> dict[str, ResourceLimit]:
    """Soft and hard limit by the kernel's label; ``unlimited`` is None.

    ::

        Limit                     Soft Limit           Hard Limit           Units
        Max open files            1024                 524288               files
        Max locked memory         unlimited            unlimited            bytes
    """
    found: dict[str, ResourceLimit] = {}
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match:
            found[match[1]] = ResourceLimit(soft=_limit(match[2]), hard=_limit(match[3]))
    return found


def _limit(text: str) -> int | None:
    if text == "unlimited" or int(text) >= _UNLIMITED:
        return None
    return int(text)
