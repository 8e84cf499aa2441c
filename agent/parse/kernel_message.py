"""The kernel's messages that bear on GPUs, links, memory and hung tasks: text to KernelEvent.

Sources: Xid and NVRM shapes as the driver prints them (open-gpu-kernel-modules), AER and DPC
(drivers/pci/pcie), the available-bandwidth line (pcie_print_link_status), khungtaskd, watchdog,
rcu stall, oom_kill, mce and EDAC, mlx5 health.
"""

from __future__ import annotations

import functools
import re

from msgspec.structs import replace

from agent.parse.lazy_pattern import Pattern
from agent.parse.nvrm_message import MODULE_VERSION, PCI, RESET, new_event, parse_nvrm, parse_sxid
from probes.kernel_fold import QUOTE_CHARS
from probes.pci_address import normalize_pci_address
from probes.snapshot.kernel import KernelEvent

# A line that matters here has one of these; searching for plain words is several times faster than
# one expression of all of them.
WORDS = (
    "NVRM", "SXid", "AER: ", "PCIe Bus Error", "error status/mask=", ":    [", "DPC: ", "Slot(",
    "retrain", "available PCIe bandwidth", "blocked for more than", "lockup", "LOCKUP", " stall",
    "illed process ", "oom-kill:", "[Hardware Error]", "EDAC ", "Memory failure: ", "segfault at",
    "general protection", "mlx5_core", "nfs: server", "Linux version ", "-- Boot ", "-- Reboot ",
    " reset",
)  # fmt: skip

_AER_PORT = Pattern(
    rf"{PCI}: AER: (?:Multiple )?"
    r"(Corrected|Correctable|Uncorrected \(Non-Fatal\)|Uncorrectable \(Non-Fatal\)|"
    r"Uncorrected \(Fatal\)|Uncorrectable \(Fatal\)) error (?:message )?received"
    rf"(?:(?: from|:) {PCI})?",
    re.ASCII,
    words=(": AER: ",),
)
_AER_ERROR = Pattern(
    rf"{PCI}: (?:AER: )?PCIe Bus Error: severity=([^,]+),", re.ASCII, words=("PCIe Bus Error",)
)
_AER_BIT = Pattern(rf"{PCI}: (?:AER: )? *\[ ?\d{{1,2}}\] (\w+)", re.ASCII)
_DPC = Pattern(
    rf"{PCI}: DPC: (?:containment event|ERR_FATAL|ERR_NONFATAL|unmasked uncorrectable|"
    r"RP PIO error)",
    re.ASCII,
    words=(": DPC: ",),
)
_SEVERITY = (("non-fatal", "nonfatal"), ("fatal", "fatal"), ("correct", "correctable"))

_SLOT = Pattern(
    rf"{PCI}: (?:pciehp: )?Slot\([^)]*\): (Link Down|Link Up|Card not present)", words=("Slot(",)
)
_RETRAIN = Pattern(
    rf"{PCI}: (?:broken device, )?(?:retraining failed|.*retrain.* fail)", words=("retrain",)
)
_BANDWIDTH = Pattern(
    rf"{PCI}: (\d+\.\d+) Gb/s available PCIe bandwidth(?:, limited by (\d+(?:\.\d+)?) GT/s "
    rf"PCIe x(\d{{1,2}}) link(?: at {PCI})? \(capable of (\d+\.\d+) Gb/s)?",
    re.ASCII,
    words=("available PCIe bandwidth",),
)

_HUNG = Pattern(
    r"task (.{1,80}):(\d{1,10}) blocked for more than (\d{1,9}) seconds",
    re.ASCII,
    words=("blocked for more than",),
)
_SOFT_LOCKUP = Pattern(
    r"soft lockup - CPU#\d+ stuck for (\d{1,6})s! \[(.{1,40}):(\d{1,10})\]",
    re.ASCII,
    words=("soft lockup",),
)
_HARD_LOCKUP = Pattern(r"hard LOCKUP on cpu (\d+)", re.ASCII, words=("hard LOCKUP",))
_STALL = Pattern(
    r"\brcu\w*\b.*\b(?:self-)?detected (?:expedited )?stall", re.ASCII, words=("stall",)
)
_KILLED = Pattern(
    r"(.*)Killed process (\d{1,10}),? \(([^)]{1,40})\)", re.ASCII, words=("Killed process",)
)
_OOM_KILL = Pattern(r"oom-kill:constraint=(\w+)", re.ASCII, words=("oom-kill:",))
_OOM_FIELD = {
    "cgroup": Pattern(r"oom_memcg=([^,]+)"),
    "task": Pattern(r"task=([^,]+)"),
    "pid": Pattern(r"pid=(\d{1,10})", re.ASCII),
}
_EDAC = Pattern(r"EDAC (MC\d+|\w+): (\d{1,9}) (CE|UE)\b", re.ASCII, words=("EDAC ",))
_SEGFAULT = Pattern(
    r"(.{1,40})\[(\d{1,10})\]:? (?:segfault at|general protection)",
    re.ASCII,
    words=(
        "segfault at",
        "general protection",
    ),
)
_LIBRARY = Pattern(
    r" in (lib(?:nccl|cuda|nvidia|cublas|cudnn|ibverbs|mlx5|uc[pst]|fabric|torch|c10)[\w.+-]*)"
)
_MLX5 = Pattern(rf"mlx5_core {PCI}(?: (\w[\w.@-]*))?: (.*)", re.ASCII, words=("mlx5_core",))
_MLX5_WHAT = (
    ("health compromised", "health"),
    ("internal error", "health"),
    ("irisc not responding", "health"),
    ("insufficient power", "slot-power"),
    ("Port module event[error]", "module"),
    ("Link down", "link-down"),
    ("Link up", "link-up"),
)
_NFS = Pattern(r"nfs: server (\S{1,255}) (not responding|OK)", words=("nfs: server",))


@functools.lru_cache(maxsize=4096)
def parse_kernel_message(text: str) -> KernelEvent | None:
    """The event that one message of the kernel stands for; None for all others.

    ::

        NVRM: Xid (PCI:0000:9a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
        NVRM: Xid (PCI:0000:9a:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
        nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
        pcieport 0000:99:00.0: AER: Multiple Uncorrected (Non-Fatal) error received: 0000:9a:00.0
        nvidia 0000:9a:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x4 link at 0000:97:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)
        INFO: task python:4711 blocked for more than 120 seconds.
    """  # noqa: E501 - the kernel's lines are long
    if "NVRM: " in text:
        return parse_nvrm(text)
    for parse in (parse_sxid, _pcie, _tasks, _memory, _network):
        if event := parse(text):
            return event
    return None


def _aer_severity(text: str) -> str | None:
    return next((name for words, name in _SEVERITY if words in text.lower()), None)


def _pcie(text: str) -> KernelEvent | None:
    if match := _AER_PORT.search(text):
        port = normalize_pci_address(match[1])
        return replace(
            new_event("aer", text),
            severity="correctable" if match[2].startswith("Correct") else _aer_severity(match[2]),
            pci=(normalize_pci_address(match[3]) if match[3] else None) or port,
            port_pci=port,
        )
    if match := _AER_ERROR.search(text):
        return replace(
            new_event("aer", text),
            pci=normalize_pci_address(match[1]),
            severity=_aer_severity(match[2]),
        )
    if match := _DPC.search(text):
        pci = normalize_pci_address(match[1])
        return replace(new_event("dpc", text), pci=pci, port_pci=pci, severity="fatal")
    if match := _SLOT.search(text):
        what = {"Link Down": "link-down", "Link Up": "link-up"}.get(match[2], "not-present")
        return replace(new_event("pcie-link", text), pci=normalize_pci_address(match[1]), what=what)
    if match := _BANDWIDTH.search(text):
        if match[3] is None:
            return None  # as fast as the device can: nothing limits it
        return replace(
            new_event("pcie-bandwidth", text),
            pci=normalize_pci_address(match[1]),
            port_pci=normalize_pci_address(match[5]) if match[5] else None,
            available_gbps=float(match[2]),
            speed_gts=float(match[3]),
            width_lanes=int(match[4]),
            capable_gbps=float(match[6]),
        )
    if match := _RETRAIN.search(text):
        pci = normalize_pci_address(match[1])
        return replace(new_event("pcie-link", text), pci=pci, what="retrain-failed")
    if match := RESET.search(text):
        return replace(
            new_event("gpu-reset", text), pci=normalize_pci_address(match[1] or match[2])
        )
    return None


def _tasks(text: str) -> KernelEvent | None:
    if match := _HUNG.search(text):
        return replace(
            new_event("hung-task", text),
            process=match[1],
            pid=int(match[2]),
            seconds=int(match[3]),
        )
    if match := _SOFT_LOCKUP.search(text):
        return replace(
            new_event("lockup", text),
            what="soft",
            seconds=int(match[1]),
            process=match[2],
            pid=int(match[3]),
        )
    if _HARD_LOCKUP.search(text):
        return replace(new_event("lockup", text), what="hard")
    if _STALL.search(text):
        return new_event("rcu-stall", text)
    if match := _SEGFAULT.search(text):
        library = _LIBRARY.search(text)
        if library is None:
            return None
        name = match[1].removeprefix("traps: ")
        return replace(
            new_event("segfault", text), process=name, pid=int(match[2]), device=library[1]
        )
    return None


def _memory(text: str) -> KernelEvent | None:
    if match := _KILLED.search(text):
        return replace(
            new_event("oom", text),
            what="cgroup" if "cgroup" in match[1] else "global",
            pid=int(match[2]),
            process=match[3],
        )
    if match := _OOM_KILL.search(text):
        found = {key: pattern.search(text) for key, pattern in _OOM_FIELD.items()}
        values = {key: value[1] for key, value in found.items() if value}
        return replace(
            new_event("oom", text),
            what="cgroup" if match[1] == "CONSTRAINT_MEMCG" else "global",
            cgroup=values.get("cgroup"),
            process=values.get("task"),
            pid=int(values["pid"]) if "pid" in values else None,
        )
    if match := _EDAC.search(text):
        return replace(
            new_event("mce", text),
            severity="corrected" if match[3] == "CE" else "uncorrected",
            device=match[1],
        )
    if text.startswith("Memory failure: ") and "recovery action" in text:
        return replace(new_event("mce", text), severity="uncorrected")
    if "[Hardware Error]" in text:
        return _machine_check(text)
    return None


def _machine_check(text: str) -> KernelEvent | None:
    """The lines that say how bad it was; register dumps and section headings say nothing more."""
    low = text.lower()
    if "machine check exception" in low or "uncorrected" in low or "severity: fatal" in low:
        return replace(new_event("mce", text), severity="uncorrected")
    if "severity: recoverable" in low or "deferred error" in low:
        return replace(new_event("mce", text), severity="uncorrected")
    if "corrected" in low or "machine check events logged" in low:
        return replace(new_event("mce", text), severity="corrected")
    return None


def _network(text: str) -> KernelEvent | None:
    if match := _NFS.search(text):
        what = "ok" if match[2] == "OK" else "not-responding"
        return replace(new_event("nfs", text), what=what, server=match[1])
    match = _MLX5.search(text)
    if match is None:
        return None
    for words, what in _MLX5_WHAT:
        if words in match[3]:
            return replace(
                new_event("nic", text),
                what=what,
                pci=normalize_pci_address(match[1]),
                device=match[2],
            )
    return None


def awaits_more(event: KernelEvent) -> bool:
    """Whether the kernel says the rest of it in the next lines."""
    if event.kind == "nvrm":
        return event.what in (None, "api-mismatch") and len(event.versions) < 2
    return event.kind == "aer" and event.port_pci is None


def add_line(event: KernelEvent, text: str) -> KernelEvent | None:
    """The event with one more of its lines; None when the line is not part of it.

    ::

        NVRM: The NVIDIA GPU 0000:9a:00.0
        NVRM: (PCI ID: 10de:2330) installed in this system has
        NVRM: fallen off the bus and is not responding to commands.

        nvidia 0000:9a:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
        nvidia 0000:9a:00.0:   device [10de:2330] error status/mask=00004000/00000000
        nvidia 0000:9a:00.0:    [14] CmpltTO                (First)
    """  # noqa: E501 - the kernel's lines are long
    if event.kind == "aer":
        match = _AER_BIT.search(text)
        if match and normalize_pci_address(match[1]) == event.pci:
            names = " ".join(part for part in (event.what, match[2]) if part)
            return replace(event, what=names[:80])
        return event if "error status/mask=" in text else None
    if not text.startswith("NVRM: ") or parse_kernel_message(text) not in (None, event):
        joined = "fallen off the bus" in text and event.what is None
        if not joined:
            return None
    rest = text.removeprefix("NVRM: ").strip()
    line = f"{event.line} {rest}"[:QUOTE_CHARS]
    if event.what == "api-mismatch":
        module = MODULE_VERSION.search(text)
        if module is None:
            return event
        return replace(event, line=line, versions=(*event.versions, module[1]))
    return replace(event, line=line, what="off-bus" if "fallen off the bus" in line else None)


def is_complete(event: KernelEvent) -> bool:
    """False for a message of the driver whose rest says nothing of interest here."""
    return event.kind != "nvrm" or event.what is not None
