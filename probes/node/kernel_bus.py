"""What the kernel itself says of PCIe, the NVIDIA driver and network adapters."""

from __future__ import annotations

from probes.finding import (
    Action,
    Component,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.kernel_evidence import events_of, evidence, is_recent, times
from probes.registry import Clear, Limit, Limits, NotApplicable, Statement, Statements, probe
from probes.snapshot.gpu import GpuState
from probes.snapshot.kernel import KernelEvent
from probes.view import Node
from probes.xid_findings import bus_errors
from probes.xid_story import story

_MAX_LINES = 6
_BOOT_S = 60.0  # links are trained and firmware hands over: errors then are of no account
_FLAPS = Limit(3, "times", "own choice: one drop can be a reset or a swap")
_HOUR = Limit(
    3600, "s", "own choice: within the hour before the check; what is older concerns past jobs"
)
_ORDER = ("correctable", "nonfatal", "fatal")


def _component(node: Node, pci: str | None) -> Component:
    device = node.pci_by_address.get(pci or "")
    if device is not None:
        return node.pci_component(device)
    for gpu in node.gpus:
        if gpu.pci == pci and pci is not None:
            return node.gpu_component(gpu)
    return story(node).components.get(pci) or Component(type="link", host=node.host, pci=pci)


def _matters(node: Node, *addresses: str | None) -> bool:
    """Whether a device is a GPU or NIC or on the way to one; unknown without a PCI section."""
    return node.snapshot.pci is None or any(a in node.pci_by_address for a in addresses)


def _part_of_a_fall(node: Node) -> set[KernelEvent]:
    """Bus errors that belong to a GPU's fall from the bus, which is reported by itself."""
    return {event for item in story(node).incidents for event in bus_errors(node, item)}


@probe("kernel.aer", needs=("kernel",), limits={"recent_s": _HOUR})
def aer(node: Node, limits: Limits) -> Statements:
    """The kernel logged PCIe errors (AER, DPC) of a GPU, a NIC or a bridge above them.

    Uncorrectable errors lose a transaction: a copy fails, a device resets or falls off the bus.
    The kernel names the error and the device that sent it; "CmpltTO" is a device that did not
    answer, "MalfTLP" and "DLP" speak of the link.

    Correctable errors were repaired by the link itself and are information (their rate is judged
    by pcie.aer-correctable-rate). Errors of the first minute after boot are link training.
    Lines that belong to a GPU's fall from the bus stand there. Devices that are neither GPU nor
    NIC nor above one are information.

    Non-fatal: a warning; fatal or contained by DPC: critical; older than the limit: one step less.
    Proven. What to do: see the named hop; reseat, swap slot or riser; firmware of the switch.
    """
    excused = _part_of_a_fall(node)
    groups: dict[str | None, list[KernelEvent]] = {}
    for event in events_of(node, "aer", "dpc"):
        groups.setdefault(event.pci, []).append(event)
    for pci, lines in groups.items():
        component = _component(node, pci)
        left = [event for event in lines if event not in excused]
        if not left:
            yield Clear(component, "PCIe errors just before it fell off the bus: see xid.off-bus")
            continue
        yield _judge_aer(node, component, left, limits["recent_s"])
    if not groups:
        yield Clear(node.host_component())


def _judge_aer(
    node: Node, component: Component, lines: list[KernelEvent], recent_s: float
) -> Statement:
    worst = max(lines, key=lambda event: _ORDER.index(event.severity or "nonfatal"))
    severity_name = worst.severity or "nonfatal"
    same = [event for event in lines if (event.severity or "nonfatal") == severity_name]
    last = same[-1]
    if last.last_at_s is not None and last.last_at_s < _BOOT_S:
        return Clear(component, "PCIe errors during boot only: link training")
    fresh = is_recent(node, last, recent_s)
    severity = Severity.INFO
    if _matters(node, *(a for event in same for a in (event.pci, event.port_pci))):
        if severity_name == "fatal":
            severity = Severity.CRITICAL if fresh else Severity.WARNING
        elif severity_name == "nonfatal" and fresh:
            severity = Severity.WARNING
    names = ", ".join(sorted({event.what for event in same if event.what}))[:60]
    ports = sorted({event.port_pci for event in same if event.port_pci} - {worst.pci})
    via = f", seen by port {ports[0]}" if ports else ""
    bad = severity_name != "correctable"
    count = sum(event.count for event in same)
    return Finding(
        id="kernel.aer",
        severity=severity,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS if severity is Severity.CRITICAL else JobImpact.NONE,
        component=component,
        summary=f"{worst.pci}: PCIe {severity_name} errors{f' ({names})' if names else ''}"
        f"{times(count, same[0])}{via}"[:200],
        evidence=tuple(evidence(node, event) for event in same[-_MAX_LINES:]),
        explains=("pcie.aer-uncorrectable",) if bad else (),
        remedy=Remedy(
            action=Action.RESEAT if bad else Action.NONE,
            text="Drain; reseat the device or its riser, try another slot; look at firmware of "
            "switches on the way."
            if bad
            else "Nothing now: the link repaired them. Watch pcie.aer-correctable-rate.",
            disruptive=bad,
        ),
    )


@probe("kernel.pcie-link", needs=("kernel",), limits={"flaps": _FLAPS, "recent_s": _HOUR})
def pcie_link(node: Node, limits: Limits) -> Statements:
    """A PCIe link went down, came and went, or could not be trained again.

    The device behind the port is gone for its driver: jobs on it die. A link that flaps can come
    back slower than before, without any error.

    No fault: a link that went down and came up again no more often than the limit (a reset, a hot
    swap), ports with neither GPU nor NIC behind them, a link that fell with a GPU off the bus.

    A warning; likely. What to do: reseat, look at the port's and device's speed and width.
    """
    excused = _part_of_a_fall(node)
    ports: dict[str | None, list[KernelEvent]] = {}
    for event in events_of(node, "pcie-link"):
        ports.setdefault(event.pci, []).append(event)
    for pci, lines in ports.items():
        component = _component(node, pci)
        last = lines[-1]
        drops = sum(event.count for event in lines if event.what != "link-up")
        if all(event in excused for event in lines if event.what != "link-up"):
            yield Clear(component, "link down with a GPU off the bus: see xid.off-bus")
        elif not _matters(node, pci):
            yield Clear(component, "PCIe link events of a port without GPU or NIC")
        elif last.what == "link-up" and drops <= limits["flaps"]:
            yield Clear(component, f"link down {drops} times, up again: a reset or a swap")
        else:
            down = last.what != "link-up"
            fresh = down or is_recent(node, last, limits["recent_s"])
            state = (last.what or "").replace("-", " ")
            yield Finding(
                id="kernel.pcie-link",
                severity=Severity.WARNING if fresh else Severity.INFO,
                confidence=Confidence.LIKELY,
                fault_class=FaultClass.HARDWARE,
                job_impact=JobImpact.BREAKS if down else JobImpact.SLOWS,
                component=component,
                summary=f"PCIe port {pci}: link lost {drops} times, last state {state}"
                f"{times(1, last)}",
                evidence=tuple(evidence(node, event) for event in lines[-_MAX_LINES:]),
                explains=("gpu.missing", "gpu.off-bus"),
                remedy=Remedy(
                    action=Action.RESEAT,
                    text="Drain; reseat the device behind the port, then compare its link speed "
                    "and width with its siblings'.",
                    disruptive=True,
                ),
            )
    if not ports:
        yield Clear(node.host_component())


@probe("kernel.pcie-bandwidth-limited", needs=("kernel",))
def pcie_bandwidth_limited(node: Node) -> Statements:
    """The kernel names the hop that limits a device's PCIe bandwidth.

    When it finds a device (or a driver starts) the kernel computes what the whole way to memory can
    carry, and says which link is the narrowest: that hop, not the device, is where to look.

    It is a statement about that moment. A GPU at rest runs its link at 2.5 GT/s by design, and a
    slot may be wired narrow on purpose; so this is information that tells others where to look.
    Where the hop runs faster now than the line says, it is a note only.

    What to do: compare with siblings; see pcie.speed-trained-down, pcie.width-trained-down and
    pcie.slot-limited, which judge the links as they are now.
    """
    devices: dict[str | None, KernelEvent] = {}
    for event in events_of(node, "pcie-bandwidth"):
        if _matters(node, event.pci):
            devices[event.pci] = event
    for pci, event in devices.items():
        component = _component(node, pci)
        then = f"{event.speed_gts:g} GT/s x{event.width_lanes}"
        hop = node.pci_by_address.get(event.port_pci or "")
        now = hop.readings[-1] if hop is not None and hop.readings else None
        speed = now.current_link_speed_gts if now else None
        width = now.current_link_width_lanes if now else None
        faster = (
            speed is not None
            and width is not None
            and (speed > (event.speed_gts or 0) or width > (event.width_lanes or 0))
        )
        if faster:
            note = f"limited to {then} at {event.port_pci} then; {speed:g} GT/s x{width} now"
            yield Clear(component, note)
            continue
        yield Finding(
            id="kernel.pcie-bandwidth-limited",
            severity=Severity.INFO,
            confidence=Confidence.LIKELY,
            fault_class=FaultClass.CANNOT_TELL,
            job_impact=JobImpact.NONE,
            component=component,
            summary=f"{pci}: PCIe limited to {event.available_gbps:g} of {event.capable_gbps:g} "
            f"Gb/s by the {then} link at {event.port_pci or '?'}{times(1, event)}",
            evidence=(evidence(node, event),),
            remedy=Remedy(
                action=Action.NONE,
                text=f"Look at that hop under load: `lspci -vv -s {event.port_pci or pci}`.",
                disruptive=False,
            ),
        )
    if not devices:
        yield Clear(node.host_component())


# what -> severity, class, words, what to do
_NVRM = {
    "init-failed": (
        FaultClass.CANNOT_TELL,
        "the driver could not initialise it (RmInitAdapter failed)",
        "Drain and power-cycle; if it stays, reseat the board, then replace it.",
        Action.REBOOT,
    ),
    "probe-failed": (
        FaultClass.CANNOT_TELL,
        "the driver's probe routine failed",
        "Read the NVRM lines before it: another driver, an unsupported board, or a dead one.",
        Action.REBOOT,
    ),
    "bar-invalid": (
        FaultClass.CONFIGURATION,
        "its PCI memory region is invalid (BAR not assigned)",
        "Enable 'above 4G decoding' in the firmware, or boot with pci=realloc.",
        Action.RECONFIGURE,
    ),
    "api-mismatch": (
        FaultClass.CONFIGURATION,
        "driver library and kernel module differ",
        "Reboot, or reload the driver when nothing uses it; in a container use the host's library.",
        Action.REBOOT,
    ),
}


@probe("kernel.nvrm", needs=("kernel",))
def nvrm(node: Node) -> Statements:
    """The NVIDIA driver said in the kernel log that it can't use a GPU, without an Xid.

    RmInitAdapter failed: the GPU does not start. Probe failed, region invalid: the driver does not
    take the device. API mismatch: a program came with another version of the driver library than
    the kernel module (an upgrade without reboot, or a container with its own library).

    No fault now: what is older than the last driver load, and a GPU that NVML reads fine. An API
    mismatch while NVML itself works is one program's or container's library: information. Chatter
    such as NV_WARN_NOTHING_TO_DO is not looked at.

    Likely; critical. What to do depends on the line; it is quoted.
    """
    groups: dict[tuple[str | None, str], list[KernelEvent]] = {}
    for event in events_of(node, "nvrm", "driver-load"):
        if event.kind == "driver-load":
            groups.clear()
        elif event.what in _NVRM:
            groups.setdefault((event.pci, event.what or ""), []).append(event)
    for (pci, what), lines in groups.items():
        yield _judge_nvrm(node, pci, what, lines)
    if not groups:
        yield Clear(node.host_component())


def _judge_nvrm(node: Node, pci: str | None, what: str, lines: list[KernelEvent]) -> Statement:
    last = lines[-1]
    fault_class, words, text, action = _NVRM[what]
    component = _component(node, pci) if pci else node.host_component()
    nvml = node.snapshot.nvml
    nvml_works = nvml is not None and nvml.init_error is None and bool(nvml.gpus)
    if what == "api-mismatch":
        severity = Severity.INFO if nvml_works else Severity.CRITICAL
        if len(last.versions) == 2:
            words += f": library {last.versions[0]}, module {last.versions[1]}"
        if nvml_works:
            words += "; NVML works here, so it was one program's or container's library"
    else:
        fine = [gpu.pci for gpu in node.gpus if gpu.state is GpuState.OK]
        if pci in fine or (pci is None and nvml_works):
            return Clear(component, f"{words}, but NVML reads it now")
        severity = Severity.CRITICAL
    subject = f"GPU {pci}" if pci else "NVIDIA driver"
    count = sum(event.count for event in lines)
    return Finding(
        id="kernel.nvrm",
        severity=severity,
        confidence=Confidence.LIKELY,
        fault_class=fault_class,
        # a library that does not fit stops new processes only
        job_impact=JobImpact.BREAKS
        if severity is Severity.CRITICAL and what != "api-mismatch"
        else JobImpact.NONE,
        component=component,
        summary=f"{subject}: {words}{times(count, lines[0])}"[:200],
        evidence=tuple(evidence(node, event) for event in lines[-_MAX_LINES:]),
        explains=("gpu.missing", "gpu.not-usable", "nvml.init-failed")
        if severity is Severity.CRITICAL
        else (),
        remedy=Remedy(action=action, text=text, disruptive=severity is Severity.CRITICAL),
    )


_NIC = {
    "health": ("firmware does not answer or reports an internal error", Severity.CRITICAL),
    "slot-power": ("the slot does not give it enough power", Severity.WARNING),
    "module": ("its optical module or cable reports an error", Severity.WARNING),
}


@probe("kernel.nic-health", needs=("kernel",), limits={"recent_s": _HOUR})
def nic_health(node: Node, limits: Limits) -> Statements:
    """A network adapter's driver reports that its firmware, power or module is bad (mlx5).

    An adapter whose firmware died drops its ports: every collective over it hangs or falls back to
    a slower way. Link up and down messages are not judged here; the ports' state is (nic.*).

    What is older than the limit is information: the driver resets the adapter by itself.

    Proven by the driver's line. What to do: drain; mlxfwreset or power-cycle, then replace.
    """
    groups: dict[tuple[str | None, str], list[KernelEvent]] = {}
    for event in events_of(node, "nic"):
        if event.what in _NIC:
            groups.setdefault((event.pci, event.what or ""), []).append(event)
    for (pci, what), lines in groups.items():
        words, severity = _NIC[what]
        fresh = is_recent(node, lines[-1], limits["recent_s"])
        critical = severity is Severity.CRITICAL
        yield Finding(
            id="kernel.nic-health",
            severity=severity if fresh else Severity.INFO,
            confidence=Confidence.PROVEN,
            fault_class=FaultClass.HARDWARE,
            job_impact=JobImpact.BREAKS if critical and fresh else JobImpact.NONE,
            component=Component(type="nic", host=node.host, pci=pci, device=lines[-1].device),
            summary=f"Adapter {pci}: {words}{times(sum(event.count for event in lines), lines[0])}",
            evidence=tuple(evidence(node, event) for event in lines[-_MAX_LINES:]),
            explains=("nic.port-down",) if fresh else (),
            remedy=Remedy(
                action=Action.DRAIN if critical else Action.RESEAT,
                text="Drain; reset the adapter (mlxfwreset) or power-cycle, then replace it."
                if critical
                else "Drain; check slot power, module and cable.",
                disruptive=True,
            ),
        )
    if not groups:
        if any(device.is_nic for device in node.pci_by_address.values()) or not node.snapshot.pci:
            yield Clear(node.host_component())
        else:
            yield NotApplicable("no network adapter on this machine")
