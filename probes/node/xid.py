"""Xid lines of the kernel log: what the driver says is wrong with a GPU."""

from __future__ import annotations

from collections.abc import Iterable

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
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, Unread, probe
from probes.view import Node
from probes.xid_catalog import PATTERN, XidClass
from probes.xid_decode import Recovery, recovery_words
from probes.xid_findings import asks, name, sayings
from probes.xid_story import Line, Story, story

_NO_GPU = NotApplicable("no NVIDIA GPU on this machine")
_MAX_EVIDENCE = 6


def _unreadable(node: Node) -> Statements | None:
    """What there is to say without a kernel log, or without a GPU; None when both are there."""
    if story(node).components:
        return None if node.snapshot.kernel is not None else (Unread("kernel", "events"),)
    if node.snapshot.pci is not None:
        return (_NO_GPU,)
    if node.snapshot.kernel is None:
        return (Unread("kernel", "events"),)
    return (Clear(node.host_component()),)


def _statements(node: Node, id: str) -> Statements:
    """The findings of one id, why others are none, and clear for the GPUs without either."""
    if (nothing := _unreadable(node)) is not None:
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
    if (nothing := _unreadable(node)) is not None:
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


@probe("xid.unknown", needs=())
def unknown(node: Node) -> Statements:
    """An Xid code that the catalog does not use or does not know.

    Shown raw and never called fatal: newer drivers have new codes, and event data 999 means that
    the driver did not know itself. What it means for a job can't be told from the number; the
    driver's text in the line and Xid 154 near it say more.

    Information. What to do: read the line; look the code up in the vendor's catalog.
    """
    if (nothing := _unreadable(node)) is not None:
        yield from nothing
        return
    told = story(node)
    groups: dict[tuple[str | None, int], list[Line]] = {}
    for line in told.unknown:
        groups.setdefault((line.event.pci, line.code), []).append(line)
    for (pci, code), lines in groups.items():
        count = sum(line.event.count for line in lines)
        own = f" {lines[0].entry.name}" if lines[0].entry.name else ""
        yield Finding(
            id="xid.unknown",
            severity=Severity.INFO,
            confidence=Confidence.POSSIBLE,
            fault_class=FaultClass.CANNOT_TELL,
            job_impact=JobImpact.NONE,
            component=told.components.get(pci) or node.host_component(),
            summary=f"GPU {pci}: unknown Xid {code}{own}{times(count, lines[0].event)}; no catalog "
            "entry, judged as nothing",
            evidence=tuple(evidence(node, line.event) for line in lines[:_MAX_EVIDENCE]),
            remedy=Remedy(
                action=Action.NONE, text="Read the line, look the code up.", disruptive=False
            ),
        )
    seen = {pci for pci, _ in groups}
    for pci, component in told.components.items():
        if pci not in seen:
            yield Clear(component)


@probe("xid.app", needs=())
def app(node: Node) -> Statements:
    """An application faulted on a GPU (Xid 13, 31, 43, 45, 68, 69 and the like).

    A process used an illegal address or instruction, was killed, or a library is at odds with the
    driver: its channel is torn down and the rank dies. The GPU and the node are fine, and other
    processes go on. So this never degrades a node; it names the process to look at.

    The notes say which other Xid lines were judged innocent, and why: 43 and 45 follow another
    error or a kill, 162 to 165 tell of wear, 92 of corrected errors, 37, 38, 44, 66, 67, 121, 141
    ask for nothing, and what is older than the last reset is cured. A broken part can look like
    an application fault when it happens again and again on one GPU only: see
    xid.repeats-on-one-gpu.

    What to do: look at the application: its traceback, compute-sanitizer, recent changes.
    """
    if (nothing := _unreadable(node)) is not None:
        yield from nothing
        return
    told = story(node)
    groups: dict[int, list[Line]] = {}
    for line in told.applications:
        groups.setdefault(line.code, []).append(line)
    for lines in groups.values():
        yield _app_finding(node, lines)
    notes = list(_innocent(told))
    yield from notes
    seen = {note.component.pci for note in notes}
    for pci, component in told.components.items():
        if pci not in seen:
            yield Clear(component)


def _app_finding(node: Node, lines: list[Line]) -> Finding:
    first, last = lines[0], lines[-1]
    count = sum(line.event.count for line in lines)
    gpus = sorted({line.event.pci or "?" for line in lines})
    pids = {line.event.pid for line in lines if line.event.pid}
    who = f"process {last.event.pid} ({last.event.process or '?'})" if last.event.pid else "unnamed"
    more = f" and {len(pids) - 1} others" if len(pids) > 1 else ""
    where = gpus[0] if len(gpus) == 1 else f"{len(gpus)} GPUs"
    software = first.entry.kind is XidClass.SOFTWARE
    look = "software or firmware" if software else "inspect the application"
    component = Component(
        type="host", host=node.host, pid=next(iter(pids)) if len(pids) == 1 else None
    )
    return Finding(
        id="xid.app",
        severity=Severity.INFO,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.NONE,
        component=component,
        summary=f"{name(first)}{times(count, first.event)} on {where}: {who}{more}; {look}"[:200],
        evidence=tuple(evidence(node, line.event) for line in lines[-_MAX_EVIDENCE:]),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="Look at the application's own log and traceback; compute-sanitizer finds illegal "
            "addresses. The node needs nothing.",
            disruptive=False,
        ),
    )


def _innocent(told: Story) -> Iterable[Clear]:
    """One note per GPU, code and reason: how many lines, of whom."""
    groups: dict[tuple[str | None, int, str], list[Line]] = {}
    for line, why in told.innocent:
        groups.setdefault((line.event.pci, line.code, why), []).append(line)
    for (pci, code, why), lines in groups.items():
        count = sum(line.event.count for line in lines)
        pids = sorted({line.event.pid for line in lines if line.event.pid})
        shown = ", ".join(map(str, pids[:3])) + (f" +{len(pids) - 3}" if len(pids) > 3 else "")
        who = f"process {shown} " if pids else ""
        often = f" ({count} lines)" if count > 1 else ""
        component = told.components.get(pci) or Component(type="gpu", pci=pci)
        label = f"Xid {code}" if code else "GPU has fallen off the bus"
        yield Clear(component, f"{label}{often}: {who}{why}")


@probe(
    "xid.repeats-on-one-gpu",
    needs=(),
    limits={
        "processes": Limit(
            3,
            "processes",
            "own choice: NVIDIA's Xid 13 and 31 workflows ask whether it stays with one GPU while "
            "processes change",
        )
    },
)
def repeats_on_one_gpu(node: Node, limits: Limits) -> Statements:
    """Application-like Xids of several processes, all on one GPU (13 on one TPC, 31, engines).

    One process with an illegal access is an application's bug. The same Xid from three or more
    processes, always on this GPU (for 13: always on the same GPC and TPC) while its siblings stay
    clean, speaks for the GPU.

    A warning and possible only: a job that is restarted with the same bug meets the same GPU again
    with the same rank. A node with one GPU has no siblings to compare with, so nothing is said.

    What to do: run the same rank on another GPU. If the Xid follows the rank it is the
    application; if it stays, drain and run the vendor's field diagnostic.
    """
    if (nothing := _unreadable(node)) is not None:
        yield from nothing
        return
    told = story(node)
    if len(told.components) < 2:
        yield NotApplicable("one GPU: no siblings to compare with")
        return
    groups: dict[tuple[int, str | None, int | None, int | None], list[Line]] = {}
    hit: dict[int, set[str | None]] = {}
    for line in told.applications:
        if line.code in PATTERN:
            hit.setdefault(line.code, set()).add(line.event.pci)
            key = (line.code, line.event.pci, line.event.gpc, line.event.tpc)
            groups.setdefault(key, []).append(line)
    seen: set[str | None] = set()
    for (code, pci, gpc, tpc), lines in groups.items():
        pids = {line.event.pid for line in lines if line.event.pid}
        located = code != 13 or (gpc is not None and tpc is not None)
        if len(pids) < limits["processes"] or not located:
            continue
        component = told.components[pci]
        seen.add(pci)
        if len(hit[code]) > 1:
            note = f"Xid {code} from {len(pids)} processes, but on {len(hit[code])} GPUs: software"
            yield Clear(component, note)
            continue
        place = f" at GPC {gpc} TPC {tpc}" if code == 13 else ""
        clean = len(told.components) - 1
        yield Finding(
            id="xid.repeats-on-one-gpu",
            severity=Severity.WARNING,
            confidence=Confidence.POSSIBLE,
            fault_class=FaultClass.HARDWARE,
            job_impact=JobImpact.SLOWS,
            component=component,
            summary=f"GPU {pci}: Xid {code}{place} from {len(pids)} processes, limit "
            f"{limits['processes']:g}; none on its {clean} siblings",
            evidence=tuple(evidence(node, line.event) for line in lines[-_MAX_EVIDENCE:]),
            remedy=Remedy(
                action=Action.DRAIN,
                text="Run the same rank on another GPU: if the Xid follows it, it is the "
                "application; if it stays, drain and run the vendor's field diagnostic.",
                disruptive=True,
            ),
        )
    for pci, component in told.components.items():
        if pci not in seen:
            yield Clear(component)
