"""What an Xid incident amounts to: how bad, how sure, what to do, or why it is nothing."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from probes.finding import Action, Confidence, FaultClass, Remedy, Severity
from probes.kernel_evidence import is_recent
from probes.snapshot.gpu import GpuState
from probes.view import Node
from probes.xid_catalog import XidClass
from probes.xid_decode import Decoded, Reading, Recovery, driver_branch
from probes.xid_story import Incident, Line, Story, when

_OLD_S = 86400.0
DRIVER_LOAD_S = 600.0  # a firmware timeout this soon after a driver load is no pattern yet
_URGENT = frozenset({1, 2, 3, 5, 6, 7})  # recovery actions that a job can't run with
_REBOOTS = frozenset({Recovery.REBOOT, Recovery.REBOOT_SYSTEM})
_UNCONTAINED = frozenset({64, 95, 140})

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
_REBOOT_HUNG = Remedy(
    action=Action.REBOOT,
    text="Start nothing here, and no further GPU tools: they hang, too. Drain and reboot, "
    "power-cycle if that hangs; when it returns update driver and firmware, keep the log.",
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


class Judgement(msgspec.Struct, frozen=True):
    """What an incident comes to; ``tail`` ends the summary."""

    severity: Severity
    remedy: Remedy
    fault_class: FaultClass = FaultClass.HARDWARE
    confidence: Confidence = Confidence.PROVEN
    probe: str | None = None  # None: the primary's own
    tail: str = ""


def _aged(node: Node, told: Story, incident: Incident, judged: Judgement) -> Judgement:
    """A reset leaves no line on older drivers, so a day later a GPU that works counts for it."""
    newest = max(incident.lines, key=lambda line: line.last_at).event
    old = not is_recent(node, newest, _OLD_S)
    silent = told.action(incident.pci) is None and told.answers(incident.pci)
    if old and silent and judged.severity is Severity.CRITICAL:
        return msgspec.structs.replace(
            judged,
            severity=Severity.WARNING,
            confidence=Confidence.POSSIBLE,
            tail="more than a day ago and NVML works with the GPU: reset since?",
        )
    return judged


def judge(node: Node, told: Story, incident: Incident) -> Judgement | str:
    """The verdict on an incident, or why it is none."""
    judged = _judge(node, told, incident)
    return judged if isinstance(judged, str) else _aged(node, told, incident, judged)


def _judge(node: Node, told: Story, incident: Incident) -> Judgement | str:
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
        return Judgement(
            Severity.CRITICAL,
            _REPLACE,
            confidence=Confidence.LIKELY,
            probe="xid.hardware",
            tail="back after a reset",
        )
    if probe == "xid.gsp":
        return _gsp(node, told, incident, action)
    if probe == "xid.nvlink" and primary.code not in (136, 155):
        return _nvlink(incident, action)
    if probe == "xid.contained-memory-error":
        return _contained(action, primary)
    if probe == "xid.row-remap":
        return _row_remap(told, incident, action)
    if kind is XidClass.SYMPATHETIC:
        return Judgement(
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


def _off_bus(told: Story, incident: Incident) -> Judgement:
    if told.answers(incident.pci):
        return Judgement(
            Severity.INFO,
            _WATCH,
            confidence=Confidence.LIKELY,
            tail="it answers now, so it was reset since; whatever ran on it then died",
        )
    again = "again after a reset" if incident.earlier else ""
    return Judgement(Severity.CRITICAL, _REPLACE if again else _POWER_CYCLE, tail=again)


def _memory(told: Story, incident: Incident, action: int | None) -> Judgement | str:
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
    return Judgement(
        Severity.WARNING if warns else Severity.CRITICAL,
        replace(_RESET, text=text),
        tail=", ".join(sorted(units & {"SRAM", "DRAM"})),
    )


def _contained(action: int | None, primary: Line) -> Judgement:
    if action in _URGENT:
        return _reset(primary, action)
    drain = action == Recovery.DRAIN_AND_RESET
    return Judgement(
        Severity.WARNING if drain else Severity.INFO,
        _RESET_LATER if drain else _RESTART_APP,
        probe="xid.contained-memory-error",
        tail="only that process died",
    )


def _row_remap(told: Story, incident: Incident, action: int | None) -> Judgement | str:
    code = incident.primary.code
    if action in _URGENT:
        return _reset(incident.primary, action)
    gpu = told.gpus.get(incident.pci or "")
    remap = gpu.row_remap if gpu else None
    done = remap is not None and remap.pending is False and remap.failure_occurred is False
    if code in (63, 64) and done:
        return "NVML has no remap pending and none failed: repaired"
    if code == 64:
        if remap is not None and remap.failure_occurred:
            return Judgement(Severity.CRITICAL, _REPLACE, tail="NVML says the same of the GPU now")
        return Judgement(Severity.CRITICAL, _RESET, tail="a second one after the reset: replace")
    if code in (157, 161):
        return Judgement(
            Severity.WARNING, _WATCH, confidence=Confidence.LIKELY, tail="plan a replacement"
        )
    drain = action == Recovery.DRAIN_AND_RESET
    return Judgement(
        Severity.WARNING if drain else Severity.INFO,
        _RESET_LATER,
        tail="takes effect at the next reset; a job may go on",
    )


def _gsp(node: Node, told: Story, incident: Incident, action: int | None) -> Judgement:
    answers, gpu = told.answers(incident.pci), told.gpus.get(incident.pci or "")
    nvml = node.snapshot.nvml
    hangs = nvml is not None and nvml.init_error == "hung"
    if hangs or (gpu is not None and gpu.state is GpuState.HUNG):
        return Judgement(
            Severity.CRITICAL,
            _REBOOT_HUNG,
            FaultClass.SOFTWARE,
            Confidence.LIKELY,
            tail="nvmlInit does not return" if hangs else "NVML calls to it do not return",
        )
    count = sum(line.event.count for line in incident.lines if line.code in (119, 120))
    if count > 1 or answers is False or action in _URGENT:
        return Judgement(
            Severity.CRITICAL,
            _RESET,
            FaultClass.SOFTWARE,
            Confidence.LIKELY,
            tail="NVML does not get through to it" if answers is False else "",
        )
    loads = [when(event) for event in told.driver_loads]
    if any(0 <= incident.primary.at - load <= DRIVER_LOAD_S for load in loads):
        return Judgement(
            Severity.INFO,
            _WATCH,
            FaultClass.SOFTWARE,
            Confidence.POSSIBLE,
            tail="once, soon after the driver loaded: firmware software",
        )
    return Judgement(
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


def _nvlink(incident: Incident, action: int | None) -> Judgement | str:
    reading = _worst_reading(incident)
    if action in _URGENT and reading.verdict is not Decoded.CABLE:
        asked = _reset(incident.primary, action)
        return msgspec.structs.replace(asked, tail=reading.text)
    known = _LINK_VERDICTS.get(reading.verdict)
    if known is None:
        return reading.text
    severity, remedy, fault_class, confidence = known
    return Judgement(severity, remedy, fault_class, confidence, tail=reading.text)


def _worst_reading(incident: Incident) -> Reading:
    order = list(_LINK_VERDICTS)
    readings = [line.decoded for line in incident.lines if line.decoded is not None]
    known = [reading for reading in readings if reading.verdict in _LINK_VERDICTS]
    if known:
        return min(known, key=lambda reading: order.index(reading.verdict))
    return readings[0] if readings else Reading(Decoded.UNDECODED, "")


def _hardware(primary: Line) -> Judgement:
    if primary.code == 54:
        remedy = Remedy(
            action=Action.RESEAT,
            text="Power off and check the auxiliary power cables of this board.",
            disruptive=True,
        )
        return Judgement(Severity.CRITICAL, remedy, FaultClass.CONFIGURATION)
    return Judgement(Severity.WARNING, _WATCH, confidence=Confidence.POSSIBLE)


def _reset(primary: Line, action: int | None) -> Judgement:
    reboot = action in _REBOOTS or primary.entry.kind is XidClass.RESTART_VM
    later = action == Recovery.DRAIN_AND_RESET
    probe = primary.entry.probe
    if reboot and probe == "xid.reset-required":
        probe = "xid.reboot-required"
    remedy = _REBOOT if reboot else _RESET_LATER if later else _RESET
    if primary.entry.kind is XidClass.RESTART_VM:
        remedy = replace(_REBOOT, text="Drain and restart the virtual machine.")
    return Judgement(
        Severity.WARNING if later else Severity.CRITICAL,
        remedy,
        FaultClass.CANNOT_TELL if probe.startswith("xid.re") else FaultClass.HARDWARE,
        Confidence.PROVEN if action in _URGENT else Confidence.LIKELY,
        probe=probe,
    )
