"""Xid lines that accuse no GPU: applications, unknown codes, and what repeats on one GPU."""

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
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, probe
from probes.view import Node
from probes.xid_catalog import PATTERN, XidClass
from probes.xid_findings import name, nothing_to_judge
from probes.xid_story import Line, Story, story

_MAX_EVIDENCE = 6


@probe("xid.unknown", needs=())
def unknown(node: Node) -> Statements:
    """An Xid code that the catalog does not use or does not know.

    Shown raw and never called fatal: newer drivers have new codes, and event data 999 means that
    the driver did not know itself. What it means for a job can't be told from the number; the
    driver's text in the line and Xid 154 near it say more.

    Information. What to do: read the line; look the code up in the vendor's catalog.
    """
    if (nothing := nothing_to_judge(node)) is not None:
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
    if (nothing := nothing_to_judge(node)) is not None:
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
    if (nothing := nothing_to_judge(node)) is not None:
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
