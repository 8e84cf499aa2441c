"""One spelling for PCI addresses."""

from __future__ import annotations

import re

# Virtual roots (VMD, Hyper-V) have domains above 0xffff; sysfs prints them with as many digits.
_ADDRESS = re.compile(
    r"(?:PCI:)?(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])(?:\.([0-7]))?",
    re.IGNORECASE | re.ASCII,
)


def normalize_pci_address(text: str) -> str | None:
    """``dddd:bb:dd.f`` in lower case, None for what is no address.

    The kernel, NVML, the driver's log and lspci spell one function ``0000:3b:00.0``,
    ``00000000:3B:00.0``, ``PCI:0000:3b:00`` and ``3b:00.0``; a missing domain or function is 0.
    """
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    domain = (domain or "").lstrip("0").zfill(4)
    return f"{domain}:{bus}:{device}.{function or '0'}".lower()
