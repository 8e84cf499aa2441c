"""From the story of the Xids to what is said of each GPU: one finding per fault, else why not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from probes.finding import (
    Action,
    Component,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.kernel_evidence import evidence, is_recent, times
from probes.registry import Clear, NotApplicable, Statements, Unread
from probes.snapshot.gpu import Gpu
from probes.snapshot.kernel import KernelEvent
from probes.view import Node
from probes.xid_catalog import XidClass
from probes.xid_decode import Decoded, Reading, Recovery, driver_branch, recovery_words
from probes.xid_story import WINDOW_S, Incident, Line, Story, story, when

_OLD_S = 86400.0
DRIVER_LOAD_S = 600.0  # a firmware timeout this soon after a driver load is no pattern yet
_MAX_LINES = 8
_URGENT = frozenset({1, 2, 3, 5, 6, 7})  # recovery actions that a job can't run with
_REBOOTS = frozenset({Recovery.REBOOT, Recovery.REBOOT_SYSTEM})
_UNCONTAINED = frozenset({64, 95, 140})

_GPU_STATE = ("gpu.recovery-action", "gpu.not-usable", "gpu.hung", "xid.recovery-action")
_EXPLAINS = {
    "xid.off-bus": (
        *_GPU_STATE, "gpu.lost", "gpu.off-bus", "gpu.missing", "kernel.aer", "kernel.pcie-link",
        "pcie.aer-uncorrectable", "pcie.width-trained-down", "pcie.speed-trained-down",
        "nvlink.down", "process.stuck-in-driver",
    ),
    "xid.memory-error": (
        *_GPU_STATE, "memory.ecc-uncorrectable", "memory.ecc-aggregate",
        "memory.row-remap-pending",
    ),
    "xid.contained-memory-error": ("memory.ecc-uncorrectable", "memory.ecc-aggregate"),
    "xid.row-remap": ("memory.row-remap-failure", "memory.ecc-uncorrectable"),
    "xid.gsp": (
        *_GPU_STATE, "nvml.slow-call", "nvml.init-failed", "process.stuck-in-driver",
        "kernel.hung-task",
    ),
    "xid.nvlink": (*_GPU_STATE, "nvlink.down", "nvlink.errors", "nvlink.speed"),
    "xid.reset-required": _GPU_STATE,
    "xid.reboot-required": _GPU_STATE,
    "xid.hardware": (*_GPU_STATE, "memory.ecc-uncorrectable", "memory.row-remap-failure"),
}  # fmt: skip

_RESET = Remedy(
    action=Action.RESET_GPU,
    text="Drain, then `nvidia-smi --gpu-reset -i ADDRESS`; reboot if that is refused. If it comes "
    "back after the reset, the board is suspect.",
    disruptive=True,
)
_REBOOT = Remedy(
    action=Action.REBOOT,
    text="Drain the node and reboot it.",
    disruptive=True,
)
_POWER_CYCLE = Remedy(
    action=Action.REBOOT,
    text="Drain and power-cycle the node; if it drops again check power and seating, then have the "
    "board replaced.",
    disruptive=True,
)
_REPLACE = Remedy(
    action=Action.REPLACE,
    text="Drain the node, run the vendor's field diagnostic, have the board replaced.",
    disruptive=True,
)
_RESET_LATER = Remedy(
    action=Action.RESET_GPU,
    text="A job may go on. Reset the GPU at the next gap between jobs.",
    disruptive=True,
)
_RESTART_APP = Remedy(
    action=Action.INSPECT_APP,
    text="Start the application again; the row is replaced at the next GPU reset.",
    disruptive=False,
)
_CABLE = Remedy(
    action=Action.RESEAT,
    text="Drain, reset the GPU; if the link fails again reseat the board or cable and run the "
    "vendor's field diagnostic.",
    disruptive=True,
)
_WATCH = Remedy(
    action=Action.NONE, text="Nothing now; report it when it repeats.", disruptive=False
)


@dataclass(frozen=True, slots=True)
class _Judgement:
    severity: Severity
    remedy: Remedy
    fault_class: FaultClass = FaultClass.HARDWARE
    confidence: Confidence = Confidence.PROVEN
    impact: JobImpact | None = None  # None: as the severity implies
    probe: str | None = None  # None: the primary's own
    tail: str = ""  # what the summary adds


_IMPACT = {
    Severity.CRITICAL: JobImpact.BREAKS,
    Severity.WARNING: JobImpact.NONE,
    Severity.INFO: JobImpact.NONE,
}


@dataclass(slots=True)
class Sayings:
    """Findings and clearances by probe id."""

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    clear: dict[str, list[Clear]] = field(default_factory=dict)

    def note(self, probe: str, component: Component, text: str) -> None:
        """Why the tempting alarm is wrong."""
        self.clear.setdefault(probe, []).append(Clear(component, text))


def nothing_to_judge(node: Node) -> Statements | None:
    """What there is to say without a kernel log, or without a GPU; None when both are there."""
    if story(node).components:
        return None if node.snapshot.kernel is not None else (Unread("kernel", "events"),)
    if node.snapshot.pci is not None:
        return (NotApplicable("no NVIDIA GPU on this machine"),)
    if node.snapshot.kernel is None:
        return (Unread("kernel", "events"),)
    return (Clear(node.host_component()),)


def sayings(node: Node) -> Sayings:
    """What the incidents of this node lead to, judged once."""
    return node.memo("xid-sayings", _say)


def _say(node: Node) -> Sayings:
    told = story(node)
    said = Sayings()
    for incident in told.incidents:
        component = told.components.get(incident.pci) or node.host_component()
        probe = incident.primary.entry.probe
        judged = _judge(node, told, incident)
        if isinstance(judged, str):
            said.note(probe, component, f"{name(incident.primary)}: {judged}")
            continue
        finding = _finding(node, told, incident, component, _aged(node, told, incident, judged))
        said.findings.setdefault(finding.id, []).append(finding)
    return said


def _aged(node: Node, told: Story, incident: Incident, judged: _Judgement) -> _Judgement:
    """A reset leaves no line on older drivers, so a day later a GPU that works counts for it."""
    newest = max(incident.lines, key=lambda line: line.last_at).event
    old = not is_recent(node, newest, _OLD_S)
    silent = told.action(incident.pci) is None and told.answers(incident.pci)
    if old and silent and judged.severity is Severity.CRITICAL:
        return dataclasses.replace(
            judged,
            severity=Severity.WARNING,
            confidence=Confidence.POSSIBLE,
            tail="more than a day ago and NVML works with the GPU: reset since?",
        )
    return judged


def _judge(node: Node, told: Story, incident: Incident) -> _Judgement | str:
    """The verdict on an incident, or why it is none."""
    primary = incident.primary
    probe, kind = primary.entry.probe, primary.entry.kind
    action = told.action(incident.pci)
    if probe == "xid.off-bus":
        return _off_bus(told, incident)
    if _driver_is_content(node, told, incident):
        if incident.has(94) and primary.code != 94:
            return _contained(action, primary)
        if kind in (XidClass.RESET, XidClass.LINK) or primary.code == 64:
            return "the driver asks for no action now (field 230): cured since"
    of_the_board = kind is XidClass.RESET and probe not in ("xid.gsp", "xid.nvlink")
    if incident.earlier and (of_the_board or primary.code == 64):
        return _Judgement(
            Severity.CRITICAL,
            _REPLACE,
            confidence=Confidence.LIKELY,
            probe="xid.hardware",
            tail="back after a reset",
        )
    if probe == "xid.gsp":
        return _gsp(told, incident, action)
    if probe == "xid.nvlink" and primary.code not in (136, 155):
        return _nvlink(incident, action)
    if probe == "xid.contained-memory-error":
        return _contained(action, primary)
    if probe == "xid.row-remap":
        return _row_remap(told, incident, action)
    if kind is XidClass.SYMPATHETIC:
        return _Judgement(
            Severity.WARNING, _RESET, confidence=Confidence.POSSIBLE, tail="its Xid 48 is not here"
        )
    if probe == "xid.memory-error":
        return _memory(told, incident, action)
    if probe == "xid.hardware":
        return _hardware(primary)
    return _reset(primary, action)


def _driver_is_content(node: Node, told: Story, incident: Incident) -> bool:
    """The driver could ask for an action (field 230), for such a code, and asks for none."""
    gpu = told.gpus.get(incident.pci or "")
    if gpu is None or gpu.recovery_action != 0:
        return False
    since = incident.primary.entry.recovery_since
    branch = driver_branch(node.snapshot.nvml.driver_version if node.snapshot.nvml else None)
    return since is not None and (branch is None or branch >= since)


def _off_bus(told: Story, incident: Incident) -> _Judgement:
    if told.answers(incident.pci):
        return _Judgement(
            Severity.INFO,
            _WATCH,
            confidence=Confidence.LIKELY,
            tail="it answers now, so it was reset since; whatever ran on it then died",
        )
    again = "again after a reset" if incident.earlier else ""
    return _Judgement(Severity.CRITICAL, _REPLACE if again else _POWER_CYCLE, tail=again)


def _memory(told: Story, incident: Incident, action: int | None) -> _Judgement | str:
    gpu = told.gpus.get(incident.pci or "")
    volatile = gpu.readings[-1].ecc_volatile_uncorrectable if gpu and gpu.readings else None
    if volatile == 0 and not action and incident.primary.code != 140:
        return "NVML counts no uncorrectable error since the last reset: cured by one"
    units = {line.event.unit for line in incident.lines if line.event.unit}
    text = "Drain, then reset the GPU (`nvidia-smi --gpu-reset`)."
    if incident.has(63, 64):
        text = "Let the job end, start nothing new here, then reset the GPU: a row is remapped."
    if "SRAM" in units:
        text += " SRAM: look at the SRAM threshold flag (nvidia-smi -q -d ECC, as root); when it "
        text += "is set, run the vendor's field diagnostic."
    warns = action == Recovery.DRAIN_AND_RESET and incident.primary.code not in _UNCONTAINED
    return _Judgement(
        Severity.WARNING if warns else Severity.CRITICAL,
        replace(_RESET, text=text),
        tail=", ".join(sorted(units & {"SRAM", "DRAM"})),
    )


def _contained(action: int | None, primary: Line) -> _Judgement:
    if action in _URGENT:
        return _reset(primary, action)
    drain = action == Recovery.DRAIN_AND_RESET
    return _Judgement(
        Severity.WARNING if drain else Severity.INFO,
        _RESET_LATER if drain else _RESTART_APP,
        probe="xid.contained-memory-error",
        tail="only that process died",
    )


def _row_remap(told: Story, incident: Incident, action: int | None) -> _Judgement | str:
    code = incident.primary.code
    if action in _URGENT:
        return _reset(incident.primary, action)
    gpu = told.gpus.get(incident.pci or "")
    remap = gpu.row_remap if gpu else None
    done = remap is not None and remap.pending is False and remap.failure_occurred is False
    if code in (63, 64) and done:
        return "NVML has no remap pending and none failed: repaired"
    if code == 64:
        return _Judgement(Severity.CRITICAL, _RESET, tail="a second one after the reset: replace")
    if code in (157, 161):
        return _Judgement(
            Severity.WARNING, _WATCH, confidence=Confidence.LIKELY, tail="plan a replacement"
        )
    drain = action == Recovery.DRAIN_AND_RESET
    return _Judgement(
        Severity.WARNING if drain else Severity.INFO,
        _RESET_LATER,
        tail="takes effect at the next reset; a job may go on",
    )


def _gsp(told: Story, incident: Incident, action: int | None) -> _Judgement:
    answers = told.answers(incident.pci)
    count = sum(line.event.count for line in incident.lines if line.code in (119, 120))
    if count > 1 or answers is False or action in _URGENT:
        return _Judgement(
            Severity.CRITICAL,
            _RESET,
            FaultClass.SOFTWARE,
            Confidence.LIKELY,
            tail="NVML does not get through to it" if answers is False else "",
        )
    loads = [when(event) for event in told.driver_loads]
    if any(0 <= incident.primary.at - load <= DRIVER_LOAD_S for load in loads):
        return _Judgement(
            Severity.INFO,
            _WATCH,
            FaultClass.SOFTWARE,
            Confidence.POSSIBLE,
            tail="once, soon after the driver loaded: firmware software",
        )
    return _Judgement(
        Severity.WARNING,
        _RESET_LATER,
        FaultClass.SOFTWARE,
        Confidence.POSSIBLE,
        tail="once",
    )


_LINK_VERDICTS: dict[Decoded, tuple[Severity, Remedy, FaultClass, Confidence]] = {
    Decoded.RESET: (Severity.CRITICAL, _RESET, FaultClass.HARDWARE, Confidence.LIKELY),
    Decoded.CABLE: (Severity.CRITICAL, _CABLE, FaultClass.HARDWARE, Confidence.LIKELY),
    Decoded.UNDECODED: (Severity.WARNING, _RESET, FaultClass.CANNOT_TELL, Confidence.POSSIBLE),
    Decoded.PEER: (Severity.WARNING, _WATCH, FaultClass.CANNOT_TELL, Confidence.LIKELY),
    Decoded.INTENDED: (Severity.INFO, _WATCH, FaultClass.SOFTWARE, Confidence.LIKELY),
    Decoded.SUPPORT: (Severity.INFO, _WATCH, FaultClass.HARDWARE, Confidence.POSSIBLE),
    Decoded.FOLLOW: (Severity.INFO, _WATCH, FaultClass.HARDWARE, Confidence.POSSIBLE),
}


def _nvlink(incident: Incident, action: int | None) -> _Judgement | str:
    reading = _worst_reading(incident)
    if action in _URGENT and reading.verdict is not Decoded.CABLE:
        asked = _reset(incident.primary, action)
        return dataclasses.replace(asked, tail=reading.text)
    known = _LINK_VERDICTS.get(reading.verdict)
    if known is None:
        return reading.text
    severity, remedy, fault_class, confidence = known
    return _Judgement(severity, remedy, fault_class, confidence, tail=reading.text)


def _worst_reading(incident: Incident) -> Reading:
    order = list(_LINK_VERDICTS)
    readings = [line.decoded for line in incident.lines if line.decoded is not None]
    known = [reading for reading in readings if reading.verdict in _LINK_VERDICTS]
    if known:
        return min(known, key=lambda reading: order.index(reading.verdict))
    return readings[0] if readings else Reading(Decoded.UNDECODED, "")


def _hardware(primary: Line) -> _Judgement:
    if primary.code == 54:
        remedy = Remedy(
            action=Action.RESEAT,
            text="Power off and check the auxiliary power cables of this board.",
            disruptive=True,
        )
        return _Judgement(Severity.CRITICAL, remedy, FaultClass.CONFIGURATION)
    return _Judgement(Severity.WARNING, _WATCH, confidence=Confidence.POSSIBLE)


def _reset(primary: Line, action: int | None) -> _Judgement:
    reboot = action in _REBOOTS or primary.entry.kind is XidClass.RESTART_VM
    later = action == Recovery.DRAIN_AND_RESET
    probe = primary.entry.probe
    if reboot and probe == "xid.reset-required":
        probe = "xid.reboot-required"
    remedy = _REBOOT if reboot else _RESET_LATER if later else _RESET
    if primary.entry.kind is XidClass.RESTART_VM:
        remedy = replace(_REBOOT, text="Drain and restart the virtual machine.")
    return _Judgement(
        Severity.WARNING if later else Severity.CRITICAL,
        remedy,
        FaultClass.CANNOT_TELL if probe.startswith("xid.re") else FaultClass.HARDWARE,
        Confidence.PROVEN if action in _URGENT else Confidence.LIKELY,
        probe=probe,
    )


def name(line: Line) -> str:
    """``Xid 79 GPU_HAS_FALLEN_OFF_THE_BUS (GPU has fallen off the bus)``."""
    if not line.code:
        return "GPU has fallen off the bus (NVRM line without an Xid)"
    own = f" {line.entry.name}" if line.entry.name else ""
    return f"Xid {line.code}{own} ({line.entry.meaning})"


def asks(told: Story, pci: str | None) -> str:
    """``driver asks for a node reboot (154: 0x2)``; empty when it asks for nothing."""
    action, gpu, line = told.action(pci), told.gpus.get(pci or ""), told.actions.get(pci)
    if not action:
        return ""
    live = gpu is not None and gpu.recovery_action is not None
    source = f"field 230: {action}" if live or line is None else f"154: 0x{action:x}"
    return f"driver asks for {recovery_words(action)} ({source})"


def _finding(
    node: Node, told: Story, incident: Incident, component: Component, judged: _Judgement
) -> Finding:
    primary = incident.primary
    id = judged.probe or primary.entry.probe
    links = {line.event.link for line in incident.lines if line.event.link is not None}
    link = ""
    if id == "xid.nvlink" and links:
        link = ", link " + ", ".join(map(str, sorted(links)[:4]))
        if len(links) == 1:
            component = replace(component, type="nvlink", link=min(links))
    tail = "; ".join(
        part
        for part in (
            judged.tail,
            asks(told, incident.pci) or f"class: {primary.entry.kind.value}",
        )
        if part
    )
    subject = f"GPU {incident.pci}" if incident.pci else "A GPU that the line does not name"
    text = judged.remedy.text.replace("ADDRESS", incident.pci or "ADDRESS")
    summary = f"{subject}: {name(primary)}{link}{times(incident.count, primary.event)}; {tail}"
    return Finding(
        id=id,
        severity=judged.severity,
        confidence=judged.confidence,
        fault_class=judged.fault_class,
        job_impact=judged.impact or _IMPACT[judged.severity],
        component=component,
        summary=summary[:200],
        evidence=_evidence(node, told, incident),
        explains=_EXPLAINS.get(id, ()) if judged.severity is not Severity.INFO else (),
        remedy=replace(judged.remedy, text=text),
    )


def _evidence(node: Node, told: Story, incident: Incident) -> tuple[Evidence, ...]:
    """The telling lines: the primary, the driver's action, then the others as they came."""
    action = told.actions.get(incident.pci)
    rest = sorted(
        [line for line in (*incident.lines, *incident.by_products) if line is not incident.primary],
        key=lambda line: line.position,
    )
    events = [incident.primary.event, *([action.event] if action else [])]
    events += [line.event for line in rest]
    events += bus_errors(node, incident)
    shown = [evidence(node, event) for event in events[:_MAX_LINES]]
    gpu = told.gpus.get(incident.pci or "")
    if gpu is not None and gpu.recovery_action:
        shown.insert(1, _field_230(gpu))
    return tuple(shown)


def _field_230(gpu: Gpu) -> Evidence:
    return Evidence(
        source="nvml",
        locator="NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        observed=gpu.recovery_action,
        recheck=f"nvidia-smi -q -i {gpu.pci} | grep 'Recovery Action'",
    )


def bus_errors(node: Node, incident: Incident) -> Iterable[KernelEvent]:
    """Uncorrectable errors of the PCIe chain that stand near a fall from the bus."""
    if incident.primary.entry.probe != "xid.off-bus" or incident.pci is None:
        return
    chain = {incident.pci, *(device.address for device in node.pci_chain(incident.pci))}
    for event in node.snapshot.kernel.events if node.snapshot.kernel else ():
        concerned = event.pci in chain or event.port_pci in chain
        near = abs(when(event) - incident.primary.at) <= WINDOW_S
        bad = event.kind in ("aer", "dpc") and event.severity != "correctable"
        if concerned and near and (bad or event.kind == "pcie-link"):
            yield event
