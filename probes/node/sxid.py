"""SXid lines of the kernel log: what the driver says of the NVSwitches."""

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
from probes.registry import Clear, NotApplicable, Statements, Unread, probe
from probes.snapshot.kernel import KernelEvent
from probes.view import Node
from probes.xid_catalog import SXIDS_ALWAYS_FATAL
from probes.xid_story import WINDOW_S, story, when

_MAX_LINES = 6


def _is_fatal(event: KernelEvent) -> bool:
    """The driver's own word on the line, else the list of codes that always are."""
    if event.severity is not None:
        return event.severity == "fatal"
    return event.code in SXIDS_ALWAYS_FATAL


def _switch(node: Node, event: KernelEvent) -> Component:
    number = "" if event.switch is None else str(event.switch)
    return Component(type="link", host=node.host, pci=event.pci, device=f"nvidia-nvswitch{number}")


def _groups(node: Node) -> dict[str | None, list[KernelEvent]]:
    """SXid events by switch, without those from before the last driver load."""
    groups: dict[str | None, list[KernelEvent]] = {}
    for event in node.snapshot.kernel.events if node.snapshot.kernel else ():
        if event.kind == "driver-load":
            groups.clear()
        elif event.kind == "sxid":
            groups.setdefault(event.pci, []).append(event)
    return groups


def _statements(node: Node, id: str, fatal: bool) -> Statements:
    if node.snapshot.kernel is None:
        pci = node.snapshot.pci
        if pci is not None and not any(device.is_nvswitch for device in pci.devices):
            yield NotApplicable("no NVSwitch on this machine")
        else:
            yield Unread("kernel", "events")
        return
    groups = _groups(node)
    for events in groups.values():
        wanted = [event for event in events if _is_fatal(event) is fatal]
        if wanted:
            yield _finding(node, id, wanted, fatal)
        else:
            yield Clear(_switch(node, events[0]))
    for device in node.pci_by_address.values():
        if device.is_nvswitch and device.address not in groups:
            yield Clear(Component(type="link", host=node.host, pci=device.address))
    if not groups and not any(device.is_nvswitch for device in node.pci_by_address.values()):
        yield NotApplicable("no NVSwitch seen, and no SXid in the kernel log")


def _finding(node: Node, id: str, events: list[KernelEvent], fatal: bool) -> Finding:
    first = events[0]
    codes = sorted({event.code for event in events if event.code is not None})
    links = sorted({event.link for event in events if event.link is not None})
    count = sum(event.count for event in events)
    text = f"NVSwitch {first.switch if first.switch is not None else '?'} ({first.pci}): "
    text += f"{'fatal' if fatal else 'non-fatal'} SXid {', '.join(map(str, codes[:6]))}"
    if links:
        text += f" on link {', '.join(map(str, links[:6]))}"
    joined = _joined(node, events)
    gpus = sorted({event.pci for event in joined if event.pci})
    if gpus:
        plural = "s" if len(gpus) > 1 else ""
        text += f"; GPU link errors within {WINDOW_S:g} s on {len(gpus)} GPU{plural}"
    return Finding(
        id=id,
        severity=Severity.CRITICAL if fatal else Severity.INFO,
        confidence=Confidence.PROVEN if first.severity else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS if fatal else JobImpact.NONE,
        component=_switch(node, first),
        summary=f"{text}{times(count, first)}"[:200],
        evidence=tuple(evidence(node, event) for event in [*events, *joined][:_MAX_LINES]),
        explains=("xid.nvlink", "nvlink.down", "fabric.state", "fabric.health") if fatal else (),
        remedy=Remedy(
            action=Action.DRAIN,
            text="Drain, then reset all GPUs and the switches together (`nvidia-smi --gpu-reset` "
            "without -i) or reboot; when it comes back the baseboard is suspect.",
            disruptive=True,
        )
        if fatal
        else Remedy(
            action=Action.NONE, text="Nothing now; watch how often it comes.", disruptive=False
        ),
    )


def _joined(node: Node, events: list[KernelEvent]) -> list[KernelEvent]:
    """NVLink errors of GPUs that stand near in time: the other end of the same fault."""
    return [
        line.event
        for incident in story(node).incidents
        if incident.primary.entry.probe == "xid.nvlink"
        for line in incident.lines
        if any(abs(when(event) - line.at) <= WINDOW_S for event in events)
    ]


@probe("sxid.fatal", needs=())
def fatal(node: Node) -> Statements:
    """An NVSwitch reported a fatal error (SXid).

    Traffic through the switch stops: every GPU behind it loses its peers, and each collective of
    the node hangs or fails. GPUs often log Xid 74 or 149 for the same link at the same time; those
    are shown with it.

    The driver's own word on the line (Fatal, Non-fatal) decides; codes that are always fatal count
    where the line has no word (11004, 12020, 12028, 19084, 22003, 22011, 23001 to 23017). What is
    older than the last driver load is cured.

    What to do: drain, reset all GPUs and switches together, or reboot. Again after that: the
    baseboard.
    """
    return _statements(node, "sxid.fatal", fatal=True)


@probe("sxid.nonfatal", needs=())
def nonfatal(node: Node) -> Statements:
    """An NVSwitch reported a non-fatal error (SXid).

    Corrected bit errors (11012, 12021, 12023), retransmissions (20001) and the like: the switch
    goes on, and so do jobs.
    Information: the switch's own word that it is not fatal.

    What to do: nothing; look at the cable or board of a link on which it comes all the time.
    """
    return _statements(node, "sxid.nonfatal", fatal=False)
