"""The NVIDIA driver's messages: Xid, SXid, and what it says without a code.

Source: the shapes as the open kernel modules print them, and as the tests of public monitors quote.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from agent.parse.lazy_pattern import Pattern
from probes.kernel_fold import QUOTE_CHARS
from probes.pci_address import normalize_pci_address
from probes.snapshot.kernel import KernelEvent

PCI = r"((?:PCI:)?(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"

_XID = Pattern(rf"NVRM: Xid \({PCI}(?: [^)]*)?\): (\d{{1,6}})\b,? ?(.*)", re.ASCII)
_PID = Pattern(r"pid=(\d{1,10})", re.ASCII)
_NAME = Pattern(r"name='?([^,']+)")
_RECOVERY = Pattern(
    r"from 0x([0-9a-fA-F]{1,8})\b.*? to 0x([0-9a-fA-F]{1,8})(?: \(([^)]*)\))?", re.ASCII
)
_GPC_TPC = Pattern(r"GPC (\d{1,3}), ?TPC (\d{1,3})", re.ASCII)
_NVLINK4 = Pattern(r"\blink (\d{1,3}) ?\(([^)]*)\)", re.ASCII | re.IGNORECASE)
_NVLINK5 = Pattern(
    r"\b([A-Z][A-Z0-9_]+)\s+(Fatal|Non-?fatal)\b.*?\bLink (-?\d{1,3}) ?\(([^)]*)\)",
    re.ASCII | re.IGNORECASE,
)
_CONTAINED = Pattern(r"\b(?:Unc|C)ontained: ([^(.,]{1,40})")
_REGISTER = Pattern(r"0x([0-9a-fA-F]{1,16})\b", re.ASCII)
_DRAM = Pattern(r"framebuffer|\bDRAM\b|\bHBM\b|\bFB\b")
_SRAM = Pattern(r"\bSRAM\b|\bL1\b|\bL2\b|\bLTC\b|register file", re.IGNORECASE)

_SXID = Pattern(
    rf"nvidia-nvswitch(\d{{1,3}}): SXid \({PCI}\): (\d{{1,6}}), ?(Fatal|Non-?fatal)?(.*)",
    re.ASCII | re.IGNORECASE,
    words=("SXid",),
)
_SXID_LINK = Pattern(r"\b[Ll]ink (\d{1,3})\b", re.ASCII)
_SXID_DETAIL = Pattern(r"\s*(?:Severity \d|Data \{)", re.ASCII)

_GPU_MAP = Pattern(rf"NVRM: GPU at {PCI}: (GPU-[0-9a-fA-F-]{{36}})", re.ASCII)
_DRIVER_LOAD = Pattern(r"NVRM: loading (?:NVIDIA )?UNIX .*?Kernel Module .*?(\d+\.\d+[\d.]*)")
_NVRM_GPU = Pattern(rf"NVRM: (?:GPU )?{PCI}: (.*)", re.ASCII)
_NVRM_DEVICE = Pattern(rf"NVRM: The NVIDIA GPU {PCI}", re.ASCII)
_NVRM_WHAT = (
    ("fallen off the bus", "off-bus"),
    ("GPU is lost", "off-bus"),
    ("RmInitAdapter failed", "init-failed"),
    ("rm_init_adapter failed", "init-failed"),
    ("API mismatch", "api-mismatch"),
    ("NVIDIA probe routine failed", "probe-failed"),
    ("PCI I/O region assigned to your NVIDIA device is invalid", "bar-invalid"),
    ("BAR0 is 0M", "bar-invalid"),
)
_CLIENT_VERSION = Pattern(r"client has the version (\d[\d.]*\d)", re.ASCII)
MODULE_VERSION = Pattern(r"kernel module has the version (\d[\d.]*\d)", re.ASCII)
RESET = Pattern(
    rf"(?:NVRM: |nvidia |nvidia-\w+: |vfio-pci )(?:GPU )?{PCI}.*"
    r"\breset(?:ting)?\b ?(?:done|complete|completed|successful|succeeded|finished|$)|"
    rf"NVRM: GPU {PCI}.* (?:was|has been) reset\b",
    re.ASCII | re.IGNORECASE,
    words=(
        "reset",
        "Reset",
        "RESET",
    ),
)


def new_event(kind: str, text: str) -> KernelEvent:
    """An event of which only the line is known yet."""
    return KernelEvent(kind=kind, line=text[:QUOTE_CHARS], locator="")


def parse_nvrm(text: str) -> KernelEvent | None:
    """A line of the driver.

    ::

        NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python, Ch 00000010
        NVRM: GPU 0000:9a:00.0: RmInitAdapter failed! (0x22:0x56:762)
        NVRM: GPU at PCI:0000:9a:00: GPU-00000009-c28a-b849-d89b-6517ee75c267
        NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024
    """
    if match := _XID.search(text):
        return _xid(text, match)
    if match := _GPU_MAP.search(text):
        pci = normalize_pci_address(match[1])
        return replace(new_event("gpu-map", text), pci=pci, gpu_uuid=match[2])
    if match := _DRIVER_LOAD.search(text):
        return replace(new_event("driver-load", text), versions=(match[1],))
    if match := _NVRM_DEVICE.search(text):
        return replace(new_event("nvrm", text), pci=normalize_pci_address(match[1]))
    if match := RESET.search(text):
        return replace(
            new_event("gpu-reset", text), pci=normalize_pci_address(match[1] or match[2])
        )
    for words, what in _NVRM_WHAT:
        if words in text:
            found = _NVRM_GPU.search(text)
            versions = [
                m[1] for m in (_CLIENT_VERSION.search(text), MODULE_VERSION.search(text)) if m
            ]
            return replace(
                new_event("nvrm", text),
                what=what,
                pci=normalize_pci_address(found[1]) if found else None,
                versions=tuple(versions),
            )
    return None


def _xid(text: str, match: re.Match[str]) -> KernelEvent:
    code, rest = int(match[2]), match[3]
    pid, name = _PID.search(rest), _NAME.search(rest)
    process = name[1].strip() if name else None
    event = replace(
        new_event("xid", text),
        pci=normalize_pci_address(match[1]),
        code=code,
        pid=int(pid[1]) if pid else None,
        process=process if process and process != "<unknown>" else None,
    )
    if code == 154 and (found := _RECOVERY.search(rest)):
        return replace(
            event,
            recovery_from=int(found[1], 16),
            recovery_to=int(found[2], 16),
            recovery_text=found[3],
        )
    if code == 13 and (found := _GPC_TPC.search(rest)):
        return replace(event, gpc=int(found[1]), tpc=int(found[2]))
    if code in (48, 171, 172):
        unit = "SRAM" if _SRAM.search(rest) else "DRAM" if _DRAM.search(rest) else None
        return replace(event, unit=unit)
    if code in (94, 95) and (found := _CONTAINED.search(rest)):
        return replace(event, unit=found[1].strip())
    if code == 74 and (found := _NVLINK4.search(rest)):
        return replace(event, link=int(found[1]), registers=_registers(found[2]))
    if 144 <= code <= 150 and (found := _NVLINK5.search(rest)):
        return replace(
            event,
            unit=found[1].upper(),
            severity="fatal" if found[2].lower() == "fatal" else "nonfatal",
            link=int(found[3]) if int(found[3]) >= 0 else None,
            registers=_registers(found[4]),
        )
    return event


def _registers(text: str) -> tuple[int, ...]:
    return tuple(int(value, 16) for value in _REGISTER.findall(text)[:8])


def parse_sxid(text: str) -> KernelEvent | None:
    """A line of the NVSwitch driver.

    ::

        nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
    """
    match = _SXID.search(text)
    if match is None or _SXID_DETAIL.match(match[5]):
        return None  # the detail lines repeat the code of the line above them
    link = _SXID_LINK.search(match[5])
    word = (match[4] or "").lower()
    return replace(
        new_event("sxid", text),
        switch=int(match[1]),
        pci=normalize_pci_address(match[2]),
        code=int(match[3]),
        severity=None if not word else "fatal" if word == "fatal" else "nonfatal",
        link=int(link[1]) if link else None,
    )
