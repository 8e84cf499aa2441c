"""Decodes what an Xid line carries: NVLink registers (74, 144 to 150) and the recovery action.

Source: the workflow sheets of NVIDIA's Xid catalog, see ``probes.xid_catalog``.
"""

from __future__ import annotations

import enum

import msgspec

from probes.snapshot.kernel import KernelEvent


class Decoded(str, enum.Enum):
    """What the registers of an NVLink error ask for."""

    IGNORE = "ignore"
    FOLLOW = "follow"  # the driver's recovery action, else restart the application
    SUPPORT = "support"  # ignore now; report it when it comes again
    SECONDARY = "secondary"  # the by-product of an error elsewhere
    RESET = "reset"
    CABLE = "cable"  # signal integrity: reseat, look at cables and temperature
    INTENDED = "intended"  # somebody took the link down on purpose
    PEER = "peer"  # the device at the other end went away
    UNDECODED = "undecoded"


class Reading(msgspec.Struct, frozen=True):
    """The decoded registers in words."""

    verdict: Decoded
    text: str


_IGNORED_74 = (0, 23, 30)
_SECONDARY_74 = (1, 20)
_PARITY_74 = (4, 5)
_RESEAT_74 = (8, 9, 12, 16, 17, 24, 28)
PARITY_REPEATS = 2  # more than this many ECC or parity errors on one link accuse the part


def decode_74(event: KernelEvent) -> Reading:
    """NVLink 4 and older: seven registers, the first says most; bits by the catalog's workflow."""
    if not event.registers:
        return Reading(Decoded.UNDECODED, "the line has no registers")
    first, rest = event.registers[0], event.registers[1:]
    bits = [bit for bit in range(32) if first >> bit & 1]
    if any(bit in _RESEAT_74 for bit in bits):
        bad = ", ".join(str(bit) for bit in bits if bit in _RESEAT_74)
        return Reading(Decoded.CABLE, f"first register bit {bad}: link hardware or seating")
    if any(bit in _PARITY_74 for bit in bits):
        if event.count > PARITY_REPEATS:
            return Reading(Decoded.RESET, f"ECC or parity error on the link, {event.count} times")
        return Reading(Decoded.SUPPORT, "ECC or parity error on the link; counts when it repeats")
    if any(bit in _SECONDARY_74 for bit in bits):
        return Reading(Decoded.SECONDARY, "by-product of an error elsewhere")
    if bits and all(bit in _IGNORED_74 for bit in bits) and not any(rest):
        return Reading(Decoded.IGNORE, "first register has only bits that mean no fault")
    return Reading(Decoded.UNDECODED, "registers the catalog does not name")


# unit -> {bit of error_status: verdict}; a unit that is not here is ignored (145) or undecoded.
_RESET, _SUPPORT, _IGNORE, _FOLLOW = (
    Decoded.RESET,
    Decoded.SUPPORT,
    Decoded.IGNORE,
    Decoded.FOLLOW,
)
_STATUS: dict[str, dict[int, Decoded]] = {
    "SAW_MVB": {
        0x1: _SUPPORT, 0x8: _SUPPORT, 0x2: _RESET, 0x10: _RESET, 0x4: _IGNORE, 0x20: _IGNORE,
    },
    "RLW_CTRL": {0x80000000: _SUPPORT},
    "RLW_REMAP": {
        0x1: _FOLLOW, 0x2: _FOLLOW, 0x4: _FOLLOW, 0x8: _FOLLOW, 0x10: _FOLLOW, 0x20: _FOLLOW,
        0x40: _RESET, 0x80: _RESET,
    },
    "RLW_RSPCOL": {0x2: _RESET},
    "RLW_TAGSTATE": {0x2: _RESET, 0x20000: _RESET, 0x100000: _RESET},
    "RLW_SRC_TRACK": {0x1: _RESET, 0x10: _RESET, 0x20: _RESET},
    "RLW_RXPIPE": {0x1: _FOLLOW, 0x2: _FOLLOW, 0x4: _FOLLOW},
    "NVLPW_CTRL": {0x80000000: _SUPPORT},
}  # fmt: skip
_TLW = {0x1: _IGNORE, 0x2: Decoded.SECONDARY, 0x4: _RESET}
_MFDE_RESET = (1, 4, 5, 7)  # values, not bits

_LINK_DOWN_REASONS: dict[int, Reading] = {
    0b000001: Reading(Decoded.SUPPORT, "counts when it comes more than once a day"),
    0b100110: Reading(Decoded.IGNORE, "the reason code means no fault"),
    0b101000: Reading(Decoded.INTENDED, "the host took it down out of band"),
    **{
        code: Reading(Decoded.CABLE, "signal integrity")
        for code in (0b000010, 0b000100, 0b001010)
    },
    **{
        code: Reading(Decoded.INTENDED, "software or a user took it down")
        for code in (0b001111, 0b010001, 0b010110)
    },
    **{
        code: Reading(Decoded.PEER, "the device at the other end went away")
        for code in (0b010101, *range(0b100000, 0b100110))
    },
    **{code: Reading(Decoded.CABLE, "cable or its temperature") for code in (0b101010, 0b101011)},
}  # fmt: skip


def decode_nvlink5(event: KernelEvent, driver_branch: int | None) -> Reading:
    """Xid 144 to 150: the unit's name and the two first registers, intr_info and error_status."""
    unit = event.unit or ""
    info = event.registers[0] if event.registers else None
    status = event.registers[1] if len(event.registers) > 1 else None
    found = _decode_unit(event.code or 0, unit, info, status)
    if info is not None:
        found = Reading(found.verdict, f"{found.text} ({subcode_text(info, driver_branch)})")
    return found


def _decode_unit(code: int, unit: str, info: int | None, status: int | None) -> Reading:
    if code == 147:
        return Reading(Decoded.IGNORE, "unit TREX: not used in production")
    if code == 150:
        return Reading(Decoded.RESET, "management engine degraded or its watchdog fired")
    if unit.startswith(("NETIR_LINK_EVT", "NETIR_LINK_DOWN")):
        if info is None:
            return Reading(Decoded.RESET, "link down, no reason given")
        reason = info >> 20 & 0x3F
        known = _LINK_DOWN_REASONS.get(reason)
        text = f"link down, reason {reason:06b}"
        return Reading(known.verdict, f"{text}: {known.text}") if known else Reading(_RESET, text)
    if unit.startswith("NETIR_BER"):
        return Reading(Decoded.SUPPORT, "bit error rate event: look at the cables")
    if unit.startswith("NETIR_INT"):
        return Reading(Decoded.RESET, "internal error of the link")
    if status is None:
        return Reading(Decoded.UNDECODED, "the line has no error status")
    if unit.startswith("NETIR_MFDE"):
        if status == 3:
            return Reading(Decoded.IGNORE, "firmware event 3 means no fault")
        verdict = Decoded.RESET if status in _MFDE_RESET else Decoded.UNDECODED
        return Reading(verdict, f"firmware event {status}")
    table = _TLW if code == 146 else _STATUS.get(unit)
    if table is None:
        verdict = Decoded.IGNORE if code == 145 else Decoded.UNDECODED
        return Reading(verdict, f"status 0x{status:x}")
    unlisted = Decoded.IGNORE if code == 145 else Decoded.UNDECODED
    verdicts = {table.get(1 << bit, unlisted) for bit in range(32) if status >> bit & 1}
    for verdict in (Decoded.RESET, Decoded.UNDECODED, Decoded.FOLLOW, Decoded.SUPPORT,
                    Decoded.SECONDARY, Decoded.IGNORE):  # fmt: skip
        if verdict in verdicts:
            return Reading(verdict, f"status 0x{status:x}")
    return Reading(Decoded.UNDECODED, "error status 0")


def nvlink5_subcode(intr_info: int, driver_branch: int) -> int:
    """The unit's sub-code: bits 9 to 5 before R575, bits 6 to 0 from then on."""
    return intr_info & 0x7F if driver_branch >= 575 else intr_info >> 5 & 0x1F


def subcode_text(intr_info: int, driver_branch: int | None) -> str:
    """The sub-code, for support; both readings when the driver is not known."""
    if driver_branch is not None:
        return f"sub-code {nvlink5_subcode(intr_info, driver_branch)}"
    before, since = nvlink5_subcode(intr_info, 570), nvlink5_subcode(intr_info, 575)
    return f"sub-code {before} before R575, {since} since"


class Recovery(enum.IntEnum):
    """NVML field 230 and the hex values of Xid 154 (nvmlDeviceGpuRecoveryAction_t)."""

    NONE = 0
    RESET = 1
    REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    IMEX = 5
    RESET_BUS = 6
    REBOOT_SYSTEM = 7


RECOVERY_WORDS = {
    Recovery.NONE: "nothing",
    Recovery.RESET: "a GPU reset",
    Recovery.REBOOT: "a node reboot",
    Recovery.DRAIN_P2P: "draining peer-to-peer traffic",
    Recovery.DRAIN_AND_RESET: "drain and reset",
    Recovery.IMEX: "recovery of the IMEX domain",
    Recovery.RESET_BUS: "a bus reset",
    Recovery.REBOOT_SYSTEM: "a system reboot",
}


def recovery_words(action: int) -> str:
    """In words; a value that is not known is kept as a number."""
    try:
        return RECOVERY_WORDS[Recovery(action)]
    except ValueError:
        return f"recovery action 0x{action:x} (unknown)"


def driver_branch(version: str | None) -> int | None:
    """550 of ``550.127.05``."""
    head = (version or "").partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() else None
