"""aer_dev_correctable, aer_dev_nonfatal and aer_dev_fatal of a PCIe function.

Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats.
"""

from __future__ import annotations


def parse_aer(text: str) -> dict[str, int]:
    """Errors by the kernel's names, the total included. Raises ValueError.

    A fatal error's name is the name the kernel gives it, also one that is not known here.

    ::

        RxErr 3
        BadTLP 0
        BadDLLP 1
        Rollover 0
        Timeout 0
        NonFatalErr 0
        CorrIntErr 0
        HeaderOF 0
        TOTAL_ERR_COR 4
    """
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        name, _, value = line.strip().rpartition(" ")
        if not name or not (value.isascii() and value.isdigit()):
            raise ValueError(f"no AER counter: {line[:60]!r}")
        counts[name.strip()] = int(value)
    if not counts:
        raise ValueError("no AER counter: empty")
    return counts
