"""The configuration space of a PCI function, as /sys/bus/pci/devices/ADDRESS/config gives it.

Source: PCI Express Base Specification (registers), include/uapi/linux/pci_regs.h (offsets).
"""

from __future__ import annotations

HEADER_BYTES = 16  # vendor, device, command, status, revision, class, header type
LEGACY_BYTES = 256  # the extended space begins behind
EXTENDED_BYTES = 4096
_ACS = 0x000D  # PCI_EXT_CAP_ID_ACS
_ACS_CONTROL = 6  # PCI_ACS_CTRL


def is_all_ones(config: bytes) -> bool:
    """Whether nobody answered: a read of a device that is not there gives ones.

    Then nothing in the bytes means anything (revision ff, header type 7f). The ids alone prove
    nothing: a virtual function reads as 0xffff there, and has a command register.
    """
    return len(config) >= 4 and not config.strip(b"\xff")


def find_acs_control(config: bytes) -> int | None:
    """The ACS control register; None when the function has no such capability.

    Raises EOFError with the number of bytes wanted when the list of capabilities leads out of
    ``config``, and ValueError when it leads nowhere.
    """
    at = LEGACY_BYTES
    seen: set[int] = set()
    while at:
        if at < LEGACY_BYTES or at in seen:
            raise ValueError(f"the list of extended capabilities leads to 0x{at:x}")
        seen.add(at)
        if at + 8 > EXTENDED_BYTES:
            raise ValueError(f"an extended capability at 0x{at:x}")
        if at + 8 > len(config):
            raise EOFError(at + 8)
        header = int.from_bytes(config[at : at + 4], "little")
        if header in (0, 0xFFFFFFFF):  # no extended capability at all, or nobody answered
            return None
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[at + _ACS_CONTROL : at + _ACS_CONTROL + 2], "little")
        at = header >> 20 & 0xFFC
    return None
