"""Processes that can't go on: stuck in the driver, in a file system, or killed and still there."""

from __future__ import annotations

from probes.finding import (
    Action,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import GapReason
from probes.process_view import (
    DRIVER,
    VFORK,
    Stuck,
    component,
    hung_task,
    hung_task_evidence,
    killed,
    name_of,
    place_of,
    processes,
    sick_gpus,
    stuck_threads,
    thread_evidence,
    was_blocked,
)
from probes.registry import (
    Clear,
    Limit,
    Limits,
    NotApplicable,
    Statement,
    Statements,
    Unread,
    probe,
)
from probes.snapshot.process import Process
from probes.view import Node

_STUCK_S = Limit(
    10,
    "s",
    "own choice: above the 6 s that one GSP timeout takes, and above slow disks; the kernel's own "
    "hung-task line (120 s) counts whatever the sample was",
)
_NO_DEBUGGER = (
    "Do not attach a debugger: it would hang as well. Kill has no effect until the wait ends."
)


def _in_driver(process: Process) -> bool:
    """Whether it waits in the driver, or holds a GPU and hides where it waits."""
    if process.nvidia_devices and _hides_where(process):
        return True
    return any(
        place_of(thread) == DRIVER for reading in process.readings for thread in reading.blocked
    )


def _hides_where(process: Process) -> bool:
    """Whether it is in state D and neither wait channel nor stack can be read."""
    places = [place_of(thread) for reading in process.readings for thread in reading.blocked]
    return bool(places) and set(places) == {None}


@probe("process.stuck-in-driver", needs=("processes",), limits={"stuck_s": _STUCK_S})
def stuck_in_driver(node: Node, limits: Limits) -> Statements:
    """A process is stuck in the NVIDIA driver, in uninterruptible sleep.

    A thread that called the driver and does not come back: the GPU's firmware does not answer, or
    another thread holds the driver's lock for ever. The rank stands still, its peers wait in the
    next collective, and often every later call on any GPU of the node waits for the same lock.

    Waiting in the driver for seconds is normal: the first process on a node without persistence
    mode, a memory map that is torn down, a slow GPU firmware call. So it counts as a fault only
    after the limit, or when something else says so: the kernel's hung-task line for this thread,
    a SIGKILL that has no effect, a GPU that it holds and that no longer answers. Short of that it
    is information. A thread that ran in between (its context switches moved) is not stuck.

    Proven with the kernel's line or an ineffective SIGKILL; likely otherwise; possible where wait
    channel and stack are hidden from this user. What to do: look for Xid 119, 120 or 79 in the
    kernel log; a GPU reset needs every holder gone, so it mostly takes a reboot.
    """
    looked_at = False
    for process in processes(node):
        if _in_driver(process):
            looked_at = True
            yield _judge_driver(node, process, limits["stuck_s"])
        elif process.nvidia_devices:
            looked_at = True
            yield Clear(component(node, process))
        elif process.nvidia_devices is None and _hides_where(process):
            looked_at = True
            yield Unread("processes", "wchan", process.key)
    section = node.snapshot.processes
    if not looked_at and section is not None:
        hidden = f" (the files of {section.unreadable} are hidden)" if section.unreadable else ""
        yield NotApplicable(f"no visible process holds a GPU{hidden}")


def _judge_driver(node: Node, process: Process, limit_s: float) -> Statement:
    who = component(node, process)
    stuck = [item for item in stuck_threads(process) if item.place in (DRIVER, None)]
    if not stuck:
        return Clear(who, "state D in the driver at one reading only: short waits are normal")
    worst = stuck[0]
    lines = [event for item in stuck if (event := hung_task(node, item.thread))]
    sick = sick_gpus(node, process)
    dead = killed(process)
    if worst.seconds == 0 and not (lines or sick or dead):
        return Unread("processes", "readings", process.key, GapReason.NOT_COLLECTED)
    certain = bool(lines) or (dead and worst.seconds > 0)
    fault = certain or bool(sick) or worst.seconds >= limit_s
    confidence = (
        Confidence.PROVEN if certain else Confidence.LIKELY if fault else Confidence.POSSIBLE
    )
    where = worst.place or "the kernel (where is hidden from this user) and holds a GPU"
    if worst.place is None:
        confidence = Confidence.POSSIBLE if not certain else Confidence.LIKELY
    also = [
        text
        for holds, text in (
            (lines, "the kernel reports it as a hung task"),
            (dead, "SIGKILL has no effect"),
            (sick, f"GPU {sick[0].key} is {sick[0].state.value}" if sick else ""),
        )
        if holds
    ]
    return Finding(
        id=stuck_in_driver.id,
        severity=Severity.CRITICAL if fault else Severity.INFO,
        confidence=confidence,
        fault_class=FaultClass.HARDWARE if sick else FaultClass.CANNOT_TELL,
        job_impact=JobImpact.BREAKS if fault else JobImpact.NONE,
        component=who,
        summary=_summary(process, worst, where, also, limit_s),
        evidence=(
            *(thread_evidence(process, item) for item in stuck[:4]),
            *(hung_task_evidence(line) for line in lines[:2]),
        ),
        explains=(kill_pending.id, "process.zombie-holder", "gpu.ghost-memory") if fault else (),
        remedy=Remedy(
            action=Action.REBOOT if fault else Action.NONE,
            text=f"Look for Xid 119, 120 or 79 in the kernel log. {_NO_DEBUGGER} A GPU reset needs "
            "every holder gone, so a reboot is the usual way out."
            if fault
            else "Look again with a sample of 10 s or more: "
            "`laggard check --sample 10 --only 'process.*'`.",
            disruptive=fault,
        ),
    )


def _summary(process: Process, worst: Stuck, where: str, also: list[str], limit_s: float) -> str:
    thread = worst.thread.tid
    which = f"thread {thread} of " if thread != process.pid else ""
    time = f"{worst.seconds:.1f} s (limit {limit_s:g} s)" if worst.seconds else "one reading"
    text = f"{which}{name_of(process)} in state D for {time} in {where}"
    return "; ".join([text[:1].upper() + text[1:], *also])[:200]


@probe("process.d-state", needs=("processes",), limits={"stuck_s": _STUCK_S})
def d_state(node: Node, limits: Limits) -> Statements:
    """A process is stuck in uninterruptible sleep outside the GPU driver.

    Mostly a file system: a dead NFS server, a stalled Lustre or FUSE mount, a disk that does not
    answer. A rank that saves a checkpoint or reads data there stands still, its peers wait at the
    next barrier, and a debugger attached to it hangs too.

    State D for some seconds is ordinary input and output, so only a thread that did not run once
    for longer than the limit, or that the kernel itself reports as a hung task, counts. Kernel
    threads sleep in D by design, and a parent waits in D while a vforked child starts.

    A warning with the kernel's line (then it is proven) or when the process holds a GPU (then a
    job stands still); else information, and likely. The wait channel and the stack name the place.
    What to do: see the mount or device that it waits for; a hard NFS mount goes on by itself when
    the server is back.
    """
    looked_at = False
    for process in processes(node):
        if was_blocked(process) and not _in_driver(process):
            looked_at = True
            yield _judge_elsewhere(node, process, limits["stuck_s"])
    if not looked_at:
        yield Clear(node.host_component())


def _judge_elsewhere(node: Node, process: Process, limit_s: float) -> Statement:
    who = component(node, process)
    if process.is_kernel_thread:
        return Clear(who, f"kernel thread {process.comm}: sleeps in state D by design")
    stuck = stuck_threads(process)
    if not stuck:
        return Clear(who, "state D at one reading, or it ran in between: input and output")
    worst = next((item for item in stuck if hung_task(node, item.thread)), stuck[0])
    line = hung_task(node, worst.thread)
    if worst.place == VFORK and line is None:
        return Clear(who, "waits in state D for its vforked child, which is normal")
    if worst.seconds == 0 and line is None:
        return Unread("processes", "readings", process.key, GapReason.NOT_COLLECTED)
    if worst.seconds < limit_s and line is None:
        return Clear(
            who,
            f"state D for the {worst.seconds:.1f} s of the sample in {worst.place or '?'}: below "
            f"{limit_s:g} s it can be slow input and output",
        )
    holds_gpu = bool(process.nvidia_devices)
    also = ["the kernel reports it as a hung task"] if line else []
    where = worst.place or "the kernel (where is hidden from this user)"
    return Finding(
        id=d_state.id,
        severity=Severity.WARNING if holds_gpu or line else Severity.INFO,
        confidence=Confidence.PROVEN if line else Confidence.LIKELY,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.BREAKS if holds_gpu else JobImpact.NONE,
        component=who,
        summary=_summary(process, worst, where, also, limit_s),
        evidence=(
            *(thread_evidence(process, item) for item in stuck[:4]),
            *((hung_task_evidence(line),) if line else ()),
        ),
        explains=(kill_pending.id,),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text=f"See what it waits for (mounts, the server's health, the disk). {_NO_DEBUGGER}",
            disruptive=False,
        ),
    )


@probe("process.kill-pending", needs=("processes",))
def kill_pending(node: Node) -> Statements:
    """A process was killed and can't end.

    SIGKILL is pending and the process does not run: it is blocked in the kernel. It keeps its GPU
    memory and its device files, so the next job on that GPU runs out of memory and a GPU reset is
    refused.

    Tearing down a large process takes a while: pinned memory of hundreds of gigabytes is freed
    page by page. A killed process that still uses CPU time is ending, and that is no fault. A
    zombie has ended; only its parent has not looked.

    Proven: two readings, signal pending, no CPU time, not scheduled once. Critical when it holds a
    GPU. What to do: find out what it waits for; if that does not end, only a reboot frees the GPU.
    """
    looked_at = False
    for process in processes(node):
        if not killed(process) or process.readings[-1].state == "Z":
            continue
        looked_at = True
        yield _judge_killed(node, process)
    if not looked_at:
        yield Clear(node.host_component())


def _judge_killed(node: Node, process: Process) -> Statement:
    who = component(node, process)
    first, last = process.readings[0], process.readings[-1]
    seconds = (last.at_ns - first.at_ns) / 1e9
    if len(process.readings) < 2:
        return Unread("processes", "readings", process.key, GapReason.NOT_COLLECTED)
    stuck = stuck_threads(process)
    if first.cpu_ticks != last.cpu_ticks or not stuck:
        return Clear(who, "killed and still ending: it runs")
    holds_gpu = bool(process.nvidia_devices)
    where = stuck[0].place or "the kernel"
    return Finding(
        id=kill_pending.id,
        severity=Severity.CRITICAL if holds_gpu else Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CANNOT_TELL if where == DRIVER else FaultClass.SOFTWARE,
        job_impact=JobImpact.BREAKS if holds_gpu else JobImpact.NONE,
        component=who,
        summary=f"SIGKILL is pending on {name_of(process)}, which did not run for {seconds:.1f} s"
        f": stuck in {where}"[:200],
        evidence=(
            Evidence(
                source="procfs",
                locator=f"/proc/{process.pid}/status",
                observed="SIGKILL in SigPnd or ShdPnd",
                recheck=f"grep -E 'State|Pnd|ctxt' /proc/{process.pid}/status",
            ),
            *(thread_evidence(process, item) for item in stuck[:2]),
        ),
        explains=("process.zombie-holder", "gpu.ghost-memory"),
        remedy=Remedy(
            action=Action.REBOOT if holds_gpu else Action.INSPECT_APP,
            text="Find out what it waits for; if that does not end, only a reboot frees what it "
            f"holds. {_NO_DEBUGGER}",
            disruptive=holds_gpu,
        ),
    )
