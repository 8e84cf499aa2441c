"""Link files and names of a PCI function under /sys/bus/pci/devices.

Source: Documentation/ABI/testing/sysfs-bus-pci; drivers/pci/pci-sysfs.c and probe.c (the words for
a speed), include/linux/pci.h (the widths).
"""

from __future__ import annotations

import re

import msgspec

# LnkSta holds the width in six bits: a device that no longer answers reads as all ones.
ALL_ONES_WIDTH = 63
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_NO_WIDTH = (0, 255)  # PCIE_LNK_WIDTH_RESRV, PCIE_LNK_WIDTH_UNKNOWN
_SPEED = re.compile(r"(\d{1,4}(?:\.\d{1,2})?) GT/s(?: PCIe)?", re.ASCII)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_HEX = re.compile(r"(?:0x)?[0-9a-f]{1,8}", re.ASCII | re.IGNORECASE)


def parse_link_speed(text: str) -> float | None:
    """GT/s of ``current_link_speed`` or ``max_link_speed``; None for Unknown. Raises ValueError.

    ::

        16.0 GT/s PCIe
    """
    text = text.strip()
    if text.startswith("Unknown"):  # older kernels: "Unknown speed"
        return None
    found = _SPEED.fullmatch(text)
    if not found or not float(found[1]):
        raise ValueError(f"no link speed: {text[:60]!r}")
    return float(found[1])


def parse_link_width(text: str) -> int | None:
    """Lanes of ``current_link_width`` or ``max_link_width``; None where there is no link.

    ``ALL_ONES_WIDTH`` is given back: it is no width, and the caller has to say so. Raises
    ValueError on anything that is no width of the PCIe specification.

    ::

        16
    """
    text = text.strip()
    value = int(text) if text.isascii() and text.isdigit() and len(text) <= 3 else -1
    if value in _NO_WIDTH:
        return None
    if value not in _WIDTHS and value != ALL_ONES_WIDTH:
        raise ValueError(f"no link width: {text[:60]!r}")
    return value


def parse_hex(text: str) -> int:
    """A number of ``vendor``, ``device`` or ``class``. Raises ValueError.

    ::

        0x10de
    """
    text = text.strip()
    if not _HEX.fullmatch(text):
        raise ValueError(f"no hexadecimal number: {text[:60]!r}")
    return int(text, 16)


def parse_device_path(target: str) -> tuple[str, ...]:
    """The functions on the way from the root complex to the device, root port first.

    ``target`` is what the link /sys/bus/pci/devices/ADDRESS holds. A host bridge in the middle
    (a device that makes a PCI domain of its own) begins a new way. Empty when it names none.

    ::

        ../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0
    """
    way: list[str] = []
    for part in target.split("/"):
        if _ADDRESS.fullmatch(part):
            way.append(part)
        else:
            way.clear()
    return tuple(way)


class PciIdentity(msgspec.Struct, frozen=True):
    """What the kernel's uevent says of a function; ``driver`` is None when none is bound."""

    class_code: int
    vendor_id: int
    device_id: int | None
    subsystem_vendor_id: int | None = None
    subsystem_device_id: int | None = None
    driver: str | None = None


def parse_pci_uevent(text: str) -> PciIdentity:
    """Class, ids and driver from ``uevent``. Raises ValueError.

    ::

        DRIVER=nvidia
        PCI_CLASS=30200
        PCI_ID=10DE:2330
        PCI_SUBSYS_ID=10DE:16C1
        PCI_SLOT_NAME=0000:17:00.0
        MODALIAS=pci:v000010DEd00002330sv000010DEsd000016C1bc03sc02i00
    """
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    vendor, _, device = values.get("PCI_ID", "").partition(":")
    subsystem_vendor, _, subsystem_device = values.get("PCI_SUBSYS_ID", "").partition(":")
    return PciIdentity(
        class_code=parse_hex(values.get("PCI_CLASS", "")),
        vendor_id=parse_hex(vendor),
        device_id=parse_hex(device),
        subsystem_vendor_id=parse_hex(subsystem_vendor) if subsystem_vendor else None,
        subsystem_device_id=parse_hex(subsystem_device) if subsystem_device else None,
        driver=values.get("DRIVER") or None,
    )
