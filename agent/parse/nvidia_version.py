"""/proc/driver/nvidia/version. Source: open-gpu-kernel-modules nv-procfs.c."""

from __future__ import annotations

import re

_LINE = re.compile(
    r"NVRM version:\s+NVIDIA UNIX (?:(Open) Kernel Module for \S+|\S+ Kernel Module)\s+(\S+)",
    re.ASCII,
)


def parse_nvidia_version(text: str) -> tuple[str, str]:
    """``(version, flavor)`` of the module that runs; flavor is open or proprietary.

    Raises ValueError on another first line (Tegra's driver has none of the two).

    ::

        NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build
        GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
    """
    match = _LINE.search(text)
    if not match:
        raise ValueError(f"no NVRM version line: {text[:80]!r}")
    return match[2], "open" if match[1] else "proprietary"
