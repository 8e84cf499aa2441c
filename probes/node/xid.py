"""Xid lines of the kernel log: what the driver says is wrong with a GPU."""

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
from probes.kernel_evidence import evidence, times
from probes.registry import Clear, Statements, probe
from probes.view import Node
from probes.xid_decode import Recovery, recovery_words
from probes.xid_findings import asks, nothing_to_judge, sayings
from probes.xid_story import Line, Story, story


def _statements(node: Node, id: str) -> Statements:
    """The findings of one id, why others are none, and clear for the GPUs without either."""
    if (nothing := nothing_to_judge(node)) is not None:
        yield from nothing
        return
    said = sayings(node)
    spoken = [*said.findings.get(id, ()), *said.clear.get(id, ())]
    yield from spoken
    seen = {statement.component.pci for statement in spoken}
    for pci, component in story(node).components.items():
        if pci not in seen:
            yield Clear(component)


@probe("xid.off-bus", needs=())
def off_bus(node: Node) -> Statements:
    """A GPU has fallen off the bus (Xid 79, 167, or the driver's line without an Xid).

    The GPU no longer answers over PCIe. Every process on it dies or hangs, and a job that spans
    the node stops with it. Readings of it (temperatures, error counts, link width) are all ones,
    not measurements. The other GPUs of the node are fine until shown otherwise.

    No fault now: a fall from before the last reset or driver load, and a GPU that NVML reads again
    (then it is listed as information). NVLink errors of its peers within ten seconds, Xid 43, 45
    and 154, and the bus errors (AER) just before are the same fault and are shown as its evidence.

    Proven by the driver's own line. Class hardware: power, seating, board, or slot.

    What to do: drain and power-cycle the node (a warm reboot often does not bring it back). When
    the same board drops again, check power and seating, then have it replaced.
    """
    return _statements(node, "xid.off-bus")


@probe("xid.memory-error", needs=())
def memory_error(node: Node) -> Statements:
    """Uncorrectable GPU memory error (Xid 48, 95, 140).

    Data in GPU memory was lost. 95 and 140 were not contained: any process on the GPU may compute
    with wrong values, so everything there must end. 48 names the unit: DRAM rows are remapped at
    the next reset (then 63 follows), SRAM faults count towards the vendor's threshold flag.

    Xid 171 and 172 are details of a 48; alone they are a warning only, because the line that
    matters has left the log. 43, 45, 63, 94 and 154 near it are the same fault. What is older than
    the last reset is cured. Where the driver has a recovery action (field 230, Xid 154), that
    decides: none means cured, "drain and reset" means that the running job may end first.

    What to do: drain, reset the GPU. When it comes back after the reset, see xid.hardware.
    """
    return _statements(node, "xid.memory-error")


@probe("xid.contained-memory-error", needs=())
def contained_memory_error(node: Node) -> Statements:
    """Uncorrectable memory error that was contained to one process (Xid 94).

    The process that used the bad row was ended, everything else on the GPU is untouched. This is
    no reason to drain, reset or reboot now: start the application again. The row is replaced at
    the next reset (memory.row-remap-pending says so until then).

    Information; a warning when the driver itself asks for drain and reset, critical when it asks
    for more.
    """
    return _statements(node, "xid.contained-memory-error")


@probe("xid.row-remap", needs=())
def row_remap(node: Node) -> Statements:
    """Memory repair was recorded (Xid 63) or failed (Xid 64; 156, 157, 160, 161 on newer parts).

    63 is good news: a bad row was found and a spare one takes its place at the next reset. Jobs
    may go on, and nothing needs replacing; it does not slow anything. 64 means that the
    repair could not be recorded or no spare row is left: reset now, and when a second 64 follows
    after the reset the board is bad (xid.hardware).

    63 is information, or nothing when NVML says that no remap is pending. 64 is critical. 157 and
    161 (no spare left) are a warning: plan a replacement.
    """
    return _statements(node, "xid.row-remap")


@probe("xid.nvlink", needs=())
def nvlink(node: Node) -> Statements:
    """NVLink error that asks for something (Xid 74, 136, 144 to 150, 155).

    A link between GPUs, or to the switch, failed: collectives that use it hang or die with it.
    The registers of the line say what kind: 74 has seven, of which some bits mean nothing, some a
    by-product, some a bad seat; 144 to 150 name a unit with a status. Signal integrity and cable
    codes ask for reseating, "peer" means that the device at the other end went away, "intended"
    that somebody took the link down.

    No fault: registers that the catalog tells to ignore; links that fall with a GPU off the bus
    within ten seconds (that GPU is the fault). Registers the catalog does not name are a warning,
    quoted raw. The sub-code's place in the register changed with driver R575.

    What to do: as the decoded text says; the links' state now is judged by nvlink.down.
    """
    return _statements(node, "xid.nvlink")


@probe("xid.gsp", needs=())
def gsp(node: Node) -> Statements:
    """The GPU's firmware processor does not answer (Xid 119, 120).

    Every driver call to this GPU waits seconds for a timeout, or for ever: jobs hang without an
    error, nvidia-smi stalls. Mostly firmware or driver software, seldom the board.

    A single one soon after a driver load (ten minutes: own choice) is no pattern: information. A
    single one while the GPU answers is a warning. Repeated, or with a GPU that NVML can't reach, it
    is critical.

    What to do: drain and reset the GPU; when it returns, update the driver, and give the
    vendor the nvidia-bug-report.
    """
    return _statements(node, "xid.gsp")


@probe("xid.reset-required", needs=())
def reset_required(node: Node) -> Statements:
    """An Xid that needs a GPU reset (46, 62, 109, 110, 143, 158, 169, 173).

    An engine or a micro-controller of the GPU stopped: work on the GPU hangs or dies until it is
    reset. Whether the part or its firmware is to blame can't be told from one occurrence; when it
    comes back after the reset, xid.hardware says so.

    No fault now: what is older than the last reset or driver load, and what the driver has since
    declared to need no action (field 230 is 0, or Xid 154 to 0x0).

    Likely; proven where the driver's recovery action says the same. What to do: drain, reset.
    """
    return _statements(node, "xid.reset-required")


@probe("xid.reboot-required", needs=())
def reboot_required(node: Node) -> Statements:
    """An Xid after which the driver asks for a reboot (Xid 154 to 0x2, or field 230), or 151.

    A GPU reset is not enough: the driver can't bring the GPU back without a restart of the node,
    or for 151 of the virtual machine. A job must not start here.

    Nothing outranks the driver's own verdict, but a later one does: only the last counts.

    What to do: drain and reboot.
    """
    return _statements(node, "xid.reboot-required")


@probe("xid.hardware", needs=())
def hardware(node: Node) -> Statements:
    """An Xid that speaks for broken hardware (54, 142, or the same one again after a reset).

    54: the board's auxiliary power is not connected. A memory, engine or repair Xid (48, 95, 64,
    62, 143 ...) that was cured by a reset and is here again in the same boot is no accident.

    Likely for repeats: two epochs of one boot, a driver load or reset between them.

    What to do: check power cables (54); else drain, field diagnostic, replace.
    """
    return _statements(node, "xid.hardware")


@probe("xid.recovery-action", needs=())
def recovery_action(node: Node) -> Statements:
    """The driver asked for a recovery action (Xid 154) and the log has no other Xid for it.

    154 is never alone: it tells what the driver wants after another error. Here that error has
    left the log, or was none of the known ones. Only the last one counts, and only its second
    number: "from 0x1 to 0x0" means that nothing is due any more, "from 0x4 to 0x1" asks for less.

    Where NVML gives the action now (field 230), gpu.recovery-action says it and this is silent.
    Proven: the driver's own word. An unknown number is shown raw.
    """
    if (nothing := nothing_to_judge(node)) is not None:
        yield from nothing
        return
    told = story(node)
    accused = {incident.pci for incident in told.incidents}
    for pci, component in told.components.items():
        line = told.actions.get(pci)
        if line is None or pci in accused:
            yield Clear(component)
        elif (gpu := told.gpus.get(pci or "")) and gpu.recovery_action is not None:
            yield Clear(component, "Xid 154: field 230 tells the action now")
        else:
            yield _action_finding(node, told, component, line)


def _action_finding(node: Node, told: Story, component: Component, line: Line) -> Finding | Clear:
    event = line.event
    action = event.recovery_to
    if action == 0:
        return Clear(component, "Xid 154 to 0x0: nothing is due any more")
    known = action is not None and action in set(Recovery)
    drains = action == Recovery.DRAIN_AND_RESET
    reboots = action in (Recovery.REBOOT, Recovery.REBOOT_SYSTEM)
    severity = Severity.WARNING if drains or not known else Severity.CRITICAL
    words = recovery_words(action) if action is not None else "an action that the line hides"
    return Finding(
        id="xid.recovery-action",
        severity=severity,
        confidence=Confidence.PROVEN if known else Confidence.POSSIBLE,
        fault_class=FaultClass.CANNOT_TELL,
        job_impact=JobImpact.BREAKS if severity is Severity.CRITICAL else JobImpact.NONE,
        component=component,
        summary=f"GPU {event.pci}: {asks(told, event.pci) or f'driver asks for {words}'}"
        f"{times(1, event)}; its cause is not in the log",
        evidence=(evidence(node, event),),
        explains=("gpu.not-usable", "memory.row-remap-pending"),
        remedy=Remedy(
            action=Action.REBOOT if reboots else Action.RESET_GPU,
            text="Do what the driver asks for: drain, then reboot."
            if reboots
            else "Do what the driver asks for: drain, then reset the GPU.",
            disruptive=True,
        ),
    )
