"""/proc/modules. Source: proc(5), kernel/module/procfs.c."""

from __future__ import annotations

import re

_LINE = re.compile(r"(\S+) \d+ (?:\d+|-) \S+ (Live|Loading|Unloading)\b", re.ASCII)


def parse_proc_modules(text: str) -> tuple[str, ...]:
    """The names of the modules that are live, as the kernel spells them (underscores).

    ::

        nvidia_uvm 4890624 12 - Live 0x0000000000000000 (OE)
        nvidia 14372864 412 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (OE)
    """
    matches = (_LINE.match(line) for line in text.split("\n"))
    return tuple(match[1] for match in matches if match and match[2] == "Live")
