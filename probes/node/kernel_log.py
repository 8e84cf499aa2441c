"""What the kernel itself says of tasks, memory and processors: the host's share of a stall."""

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
from probes.kernel_evidence import events_of, evidence, is_recent, times
from probes.process_view import was_blocked
from probes.registry import Clear, Limit, Limits, Statement, Statements, probe
from probes.snapshot.kernel import KernelEvent
from probes.view import Node
from probes.xid_story import when

_MAX_LINES = 6
_NFS_LEAD_S = 600.0
_HOUR = Limit(
    3600, "s", "own choice: within the hour before the check; what is older concerns past jobs"
)
_DAY = Limit(86400, "s", "own choice: a lost page of memory is replaced or retired within a day")


def _finding(
    node: Node,
    id: str,
    events: Iterable[KernelEvent],
    summary: str,
    *,
    severity: Severity,
    fault_class: FaultClass,
    remedy: Remedy,
    confidence: Confidence = Confidence.PROVEN,
    impact: JobImpact = JobImpact.NONE,
    component: Component | None = None,
    explains: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        id=id,
        severity=severity,
        confidence=confidence,
        fault_class=fault_class,
        job_impact=impact,
        component=component or node.host_component(),
        summary=summary[:200],
        evidence=tuple(evidence(node, event) for event in list(events)[:_MAX_LINES]),
        explains=explains,
        remedy=remedy,
    )


@probe("kernel.hung-task", needs=("kernel",), limits={"recent_s": _HOUR})
def hung_task(node: Node, limits: Limits) -> Statements:
    """The kernel reports a task that was blocked for long (khungtaskd, 120 s by default).

    The thread waits in the kernel and can't be killed: a dead file server, a disk, or the GPU
    driver. A rank in that state stops the whole job, mostly without an error. It is a free witness
    of a hang, also after the fact.

    The line tells that the task was blocked then. Whether it is now is judged by
    process.stuck-in-driver and process.d-state where processes could be read; a task that has gone
    on since is information. The kernel prints ten such lines and then no more
    (kernel.hung_task_warnings), so silence proves little.

    Proven. A warning while the line is fresh and nobody knows better. What to do: see the lines
    before it (a file server, Xid 119) and the task's kernel stack; do not attach a debugger.
    """
    events = events_of(node, "hung-task")
    tasks: dict[int | None, list[KernelEvent]] = {}
    for event in events:
        tasks.setdefault(event.pid, []).append(event)
    for lines in tasks.values():
        yield _judge_task(node, lines, limits["recent_s"])
    if not tasks:
        yield Clear(node.host_component())


def _judge_task(node: Node, lines: list[KernelEvent], recent_s: float) -> Statement:
    last = lines[-1]
    component = Component(type="host", host=node.host, pid=last.pid)
    section = node.snapshot.processes
    now = section and any(
        was_blocked(process)
        and (process.pid == last.pid or last.pid in {t.tid for t in process.readings[-1].blocked})
        for process in section.processes
    )
    task = f"Task {last.process}:{last.pid}"
    if now:
        return Clear(component, f"{task} is blocked now: process.* judges it")
    fresh = is_recent(node, last, recent_s) and section is None
    server = _silent_server(node, last)
    cause = (
        f"; NFS server {server.server} not responding since {server.at_s or 0:.0f} s"
        if server
        else ""
    )
    ended = "" if fresh else "; not blocked now" if section else "; long ago"
    count = sum(event.count for event in lines)
    return _finding(
        node,
        "kernel.hung-task",
        [last, *([server] if server else []), *lines[:-1]],
        f"{task} blocked for more than {last.seconds} s{times(count, last)}{cause}{ended}",
        severity=Severity.WARNING if fresh else Severity.INFO,
        fault_class=FaultClass.SOFTWARE if server else FaultClass.CANNOT_TELL,
        impact=JobImpact.BREAKS if fresh else JobImpact.NONE,
        component=component,
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text=f"Read /proc/{last.pid}/wchan and stack; look for Xid 119, 120, 79 and file "
            "servers in the kernel log. Do not attach a debugger.",
            disruptive=False,
        ),
    )


def _silent_server(node: Node, task: KernelEvent) -> KernelEvent | None:
    """An NFS server that stopped answering in the minutes before and has not come back."""
    found: dict[str | None, KernelEvent] = {}
    for event in events_of(node, "nfs"):
        if event.what == "ok":
            found.pop(event.server, None)
        elif -_NFS_LEAD_S <= when(event) - when(task) <= 0:
            found.setdefault(event.server, event)
    return next(iter(found.values()), None)


@probe("kernel.nfs-not-responding", needs=("kernel",))
def nfs_not_responding(node: Node) -> Statements:
    """An NFS server does not answer, and has not since.

    On a hard mount every process that touches it waits in the kernel until the server is back: a
    rank that saves a checkpoint or reads data stands still, and its peers wait at the next barrier.

    No fault: a server whose later line says OK. The kernel prints the line once per request that
    is late, so its time is the beginning, not the end.

    Likely: the log's last word. A warning. What to do: ping the server, `nfsstat -m`; a hard mount
    goes on by itself.
    """
    silent: dict[str | None, list[KernelEvent]] = {}
    back: set[str | None] = set()
    for event in events_of(node, "nfs"):
        if event.what == "ok":
            silent.pop(event.server, None)
            back.add(event.server)
        else:
            silent.setdefault(event.server, []).append(event)
            back.discard(event.server)
    hung = events_of(node, "hung-task")
    all_wait = bool(hung) and all(_silent_server(node, event) for event in hung)
    for server, lines in silent.items():
        yield _finding(
            node,
            "kernel.nfs-not-responding",
            lines,
            f"NFS server {server} not responding{times(sum(e.count for e in lines), lines[0])}, "
            "and no OK since",
            severity=Severity.WARNING,
            fault_class=FaultClass.SOFTWARE,
            confidence=Confidence.LIKELY,
            impact=JobImpact.SLOWS,
            explains=("kernel.hung-task",) if all_wait else (),
            remedy=Remedy(
                action=Action.INSPECT_APP,
                text=f"Restore the server or the path to it (ping {server}; nfsstat -m). A hard "
                "mount goes on by itself.",
                disruptive=False,
            ),
        )
    if not silent:
        note = f"NFS server {', '.join(map(str, sorted(back, key=str)))} answers again"
        yield Clear(node.host_component(), note if back else None)


@probe("kernel.oom", needs=("kernel",), limits={"recent_s": _HOUR})
def oom(node: Node, limits: Limits) -> Statements:
    """The kernel killed a process for lack of memory.

    A rank that is killed so takes its job with it: the others hang in the next collective until
    their timeout. With a memory cgroup (a container's limit) it is the job that asked for too
    little; without one the whole host was out of memory, which hits any job.

    Information for a cgroup, and for what is older than the limit; a warning for a host that ran
    out of memory just now. Proven: the kernel's line.

    What to do: raise the container's memory, look for a leak (data loader workers, pinned memory).
    """
    scopes: dict[str, list[KernelEvent]] = {}
    for event in events_of(node, "oom"):
        scopes.setdefault(event.what or "global", []).append(event)
    for scope, lines in scopes.items():
        last = lines[-1]
        whole = scope == "global"
        fresh = is_recent(node, last, limits["recent_s"])
        victims = {event.pid for event in lines}
        cgroup = next((event.cgroup for event in reversed(lines) if event.cgroup), None)
        where = "the host ran out of memory" if whole else f"memory cgroup {cgroup or '?'} is full"
        yield _finding(
            node,
            "kernel.oom",
            reversed(lines),
            f"OOM killer ended {len(victims)} process{'es' if len(victims) > 1 else ''}, last "
            f"{last.process} ({last.pid}){times(1, last)}: {where}",
            severity=Severity.WARNING if whole and fresh else Severity.INFO,
            fault_class=FaultClass.SOFTWARE,
            remedy=Remedy(
                action=Action.INSPECT_APP,
                text="Find what used the memory (data loader workers, pinned buffers, page cache "
                "limits) and give the job more or let it use less.",
                disruptive=False,
            ),
        )
    if not scopes:
        yield Clear(node.host_component())


@probe("kernel.machine-check", needs=("kernel",), limits={"recent_s": _DAY})
def machine_check(node: Node, limits: Limits) -> Statements:
    """The processor or the host's memory reports errors (machine check, EDAC).

    An uncorrected error means lost data in host memory or in the CPU: a process is killed, or the
    host goes down with the job. Corrected ones cost nothing; a flood of them can slow a core.

    Corrected errors are information, with their count. Uncorrected ones are critical within a day
    and a warning for the rest of the boot. "Machine check events logged" says only that
    something was logged and corrected; temperature messages are not counted here.

    Likely: the line's own severity. What to do: see the DIMM in `ras-mc-ctl --errors` or the BMC's
    event log; drain, replace the DIMM.
    """
    groups: dict[bool, list[KernelEvent]] = {}
    for event in events_of(node, "mce"):
        groups.setdefault(event.severity == "uncorrected", []).append(event)
    for bad, lines in groups.items():
        fresh = is_recent(node, lines[-1], limits["recent_s"])
        severity = Severity.CRITICAL if fresh else Severity.WARNING
        devices = sorted({event.device for event in lines if event.device})
        where = f" ({', '.join(devices[:4])})" if devices else ""
        yield _finding(
            node,
            "kernel.machine-check",
            lines,
            f"{'Uncorrected' if bad else 'Corrected'} hardware errors of the host{where}"
            f"{times(sum(event.count for event in lines), lines[0])}",
            severity=severity if bad else Severity.INFO,
            fault_class=FaultClass.HARDWARE,
            confidence=Confidence.LIKELY,
            impact=JobImpact.BREAKS if bad and fresh else JobImpact.NONE,
            remedy=Remedy(
                action=Action.DRAIN if bad else Action.NONE,
                text="See the DIMM or CPU in `ras-mc-ctl --errors` or the BMC's event log; drain "
                "and replace it."
                if bad
                else "Nothing now; compare the count with other hosts.",
                disruptive=bad,
            ),
        )
    if not groups:
        yield Clear(node.host_component())


@probe("kernel.lockup", needs=("kernel",), limits={"recent_s": _HOUR})
def lockup(node: Node, limits: Limits) -> Statements:
    """A CPU was stuck in the kernel (soft or hard lockup, RCU stall).

    A CPU that does not schedule for 20 s and more stops whatever should run there: a rank's main
    thread, a NIC's interrupts, the heartbeat of a whole job. Drivers that wait for a dead GPU do
    this, too.

    In a virtual machine the hypervisor may have stopped the whole guest (migration, overcommitted
    CPUs): then no kernel code was at fault, and it is possible only. What is older than the limit
    is information.

    A warning; a hard lockup is critical. What to do: see which function and process the lines
    name; look for Xids at that time.
    """
    events = [*events_of(node, "lockup"), *events_of(node, "rcu-stall")]
    groups: dict[str, list[KernelEvent]] = {}
    for event in events:
        groups.setdefault(event.what or "RCU", []).append(event)
    guest = node.snapshot.virtualization
    for what, lines in groups.items():
        last = lines[-1]
        fresh = is_recent(node, last, limits["recent_s"])
        severity = Severity.CRITICAL if what == "hard" and not guest else Severity.WARNING
        who = f" in {last.process} ({last.pid})" if last.process else ""
        long = f" for {last.seconds} s" if last.seconds else ""
        kind = "RCU stall" if what == "RCU" else f"CPU {what} lockup"
        yield _finding(
            node,
            "kernel.lockup",
            reversed(lines),
            f"{kind}{long}{who}{times(sum(event.count for event in lines), lines[0])}"
            + (f"; {guest} guest: perhaps the hypervisor stopped it" if guest else ""),
            severity=severity if fresh else Severity.INFO,
            fault_class=FaultClass.CANNOT_TELL,
            confidence=Confidence.POSSIBLE if guest else Confidence.LIKELY,
            impact=JobImpact.SLOWS if fresh else JobImpact.NONE,
            remedy=Remedy(
                action=Action.INSPECT_APP,
                text="See which function the call trace after the line names, and look for Xid "
                "lines at that time.",
                disruptive=False,
            ),
        )
    if not groups:
        yield Clear(node.host_component())


@probe("kernel.library-crash", needs=("kernel",))
def library_crash(node: Node) -> Statements:
    """A process crashed inside NCCL, CUDA or another library of the job.

    The rank died with a segmentation fault; its peers hang in the next collective until their
    timeout. It is software: mostly a mismatch of NCCL, plugin and driver versions, or memory that
    was freed too early. It says nothing against the node.

    Information. What to do: the job's log and core dump; compare library versions with a job that
    works.
    """
    libraries: dict[str, list[KernelEvent]] = {}
    for event in events_of(node, "segfault"):
        libraries.setdefault(event.device or "?", []).append(event)
    for library, lines in libraries.items():
        last = lines[-1]
        yield _finding(
            node,
            "kernel.library-crash",
            reversed(lines),
            f"{last.process} ({last.pid}) crashed in {library}"
            f"{times(sum(event.count for event in lines), lines[0])}",
            severity=Severity.INFO,
            fault_class=FaultClass.SOFTWARE,
            remedy=Remedy(
                action=Action.INSPECT_APP,
                text="See the job's log and core dump; compare library versions with a job that "
                "works.",
                disruptive=False,
            ),
        )
    if not libraries:
        yield Clear(node.host_component())
