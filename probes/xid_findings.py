"""From the story of the Xids to what is said of each GPU: one finding per fault, else why not."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from probes.finding import (
    Component,
    Evidence,
    Finding,
    JobImpact,
    Severity,
)
from probes.kernel_evidence import evidence, times
from probes.registry import Clear, NotApplicable, Statements, Unread
from probes.snapshot.gpu import Gpu
from probes.snapshot.kernel import KernelEvent
from probes.view import Node
from probes.xid_decode import recovery_words
from probes.xid_judge import Judgement, judge
from probes.xid_story import WINDOW_S, Incident, Line, Story, story, when

_MAX_LINES = 8
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

_IMPACT = {
    Severity.CRITICAL: JobImpact.BREAKS,
    Severity.WARNING: JobImpact.NONE,
    Severity.INFO: JobImpact.NONE,
}


class Sayings(msgspec.Struct):
    """Findings and clearances by probe id."""

    findings: dict[str, list[Finding]] = msgspec.field(default_factory=dict)
    clear: dict[str, list[Clear]] = msgspec.field(default_factory=dict)

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
        judged = judge(node, told, incident)
        if isinstance(judged, str):
            said.note(probe, component, f"{name(incident.primary)}: {judged}")
            continue
        finding = _finding(node, told, incident, component, judged)
        found = said.findings.setdefault(finding.id, [])
        if all(other.fingerprint != finding.fingerprint for other in found):
            found.append(finding)
    return said


def name(line: Line) -> str:
    """``Xid 119 GSP_RPC_TIMEOUT (the GPU's firmware processor does not answer)``."""
    if not line.code:
        return "GPU has fallen off the bus (NVRM line without an Xid)"
    own = f" {line.entry.name}" if line.entry.name else ""
    if own.replace("_", " ").strip().lower() == line.entry.meaning.lower():
        own = ""
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
    node: Node, told: Story, incident: Incident, component: Component, judged: Judgement
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
        job_impact=_IMPACT[judged.severity],
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
