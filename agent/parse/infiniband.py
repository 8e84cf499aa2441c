"""Files under /sys/class/infiniband/DEVICE/ports/N.

Source: Documentation/ABI/stable/sysfs-class-infiniband; drivers/infiniband/core/sysfs.c.
"""

from __future__ import annotations

import re

import msgspec

_STATE = re.compile(r"\s*(\d+)\s*:\s*(\S.*?)\s*")
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec(?:\s*\((\d+)X[^)]*\))?\s*")


class PortRate(msgspec.Struct, frozen=True):
    """Speed and lanes of a port."""

    gbps: float
    width_lanes: int | None


def parse_port_state(text: str) -> str:
    """The name in ``state`` or ``phys_state``; text without a number is kept as it is.

    ::

        4: ACTIVE
    """
    found = _STATE.fullmatch(text)
    return found[2] if found else text.strip()


def parse_port_rate(text: str) -> PortRate:
    """Speed in Gbit/s and number of lanes. Raises ValueError.

    ::

        200 Gb/sec (4X HDR)
    """
    found = _RATE.fullmatch(text)
    if not found:
        raise ValueError(f"no port rate: {text[:60]!r}")
    return PortRate(float(found[1]), int(found[2]) if found[2] else None)


def parse_port_counter(text: str) -> int | None:
    """A counter's value; None when the device has no performance management. Raises ValueError.

    ::

        N/A (no PMA)
    """
    text = text.strip()
    if text.startswith("N/A"):
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"no counter: {text[:60]!r}")
    return int(text)
