"""Queues: tasks that wait for a CPU or for storage."""

from __future__ import annotations

from probes.finding import (
    Action,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.host_facts import (
    evidence,
    facts,
    gpu_count,
    last,
)
from probes.registry import Clear, Limit, Limits, Statements, Unread, probe
from probes.snapshot.host import HostSection
from probes.view import Node, delta


@probe(
    "host.load",
    needs=("host",),
    limits={
        "per_cpu": Limit(
            2.0, "runnable or blocked tasks per CPU", "laggard: over one and five minutes both"
        )
    },
)
def load(node: Node, limits: Limits) -> Statements:
    """Far more tasks want to run, or are stuck in the kernel, than there are CPUs.

    Threads that launch kernels wait their turn, so every rank here is late. Linux counts tasks in
    uninterruptible sleep too: a high load with idle CPUs means tasks stuck in I/O or in a driver.

    No fault in itself: it is load, not a slower machine. A short burst is left out (both averages
    have to be high), and data loaders up to twice the CPUs are common.

    Sure: proven as a number; what it costs is seen in host.cpu-pressure.

    Do: `ps -eo stat,pid,comm,wchan --sort=stat | head -50`: R is busy, D is stuck.
    """
    section, host = facts(node), node.host_component()
    newest = last(section)
    if newest is None or newest.load_1m is None or newest.load_5m is None:
        yield Unread("host", "load_1m")
        return
    cpus = section.cpu_count
    if not cpus:
        yield Unread("host", "cpu_count")
        return
    if min(newest.load_1m, newest.load_5m) < limits["per_cpu"] * cpus:
        yield Clear(host)
        return
    share = _busy_share(section)
    stuck = share is not None and share < 50
    gpus = gpu_count(node) > 0
    yield Finding(
        id="host.load",
        severity=Severity.WARNING if gpus else Severity.INFO,
        confidence=Confidence.PROVEN if share is not None else Confidence.LIKELY,
        fault_class=FaultClass.SOFTWARE if stuck else FaultClass.LOAD,
        job_impact=JobImpact.SLOWS if gpus else JobImpact.NONE,
        component=host,
        summary=f"load average {newest.load_1m:g} and {newest.load_5m:g} (1, 5 min) on {cpus} CPUs"
        + (f", CPUs {share:.0f}% busy" if share is not None else "")
        + (": tasks are stuck in I/O or a driver" if stuck else ""),
        evidence=(evidence("/proc/loadavg", newest.load_1m, "cat /proc/loadavg; nproc --all"),),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="ps -eo stat,pid,comm,wchan --sort=stat | head -50: R is busy, D is stuck.",
            disruptive=False,
        ),
    )


def _busy_share(section: HostSection) -> float | None:
    """Percent of all CPU time that was busy during the sample."""
    readings = section.readings
    busy = delta(readings, lambda reading: sum(reading.cpu.busy_ticks) if reading.cpu else None)
    total = delta(readings, lambda reading: sum(reading.cpu.total_ticks) if reading.cpu else None)
    if busy is None or total is None or not total[0]:
        return None
    return 100 * busy[0] / total[0]


@probe(
    "host.cpu-pressure",
    needs=("host",),
    limits={
        "some_percent": Limit(
            50.0, "% of time", "laggard: half of the time some task waits for a CPU, a minute long"
        )
    },
)
def cpu_pressure(node: Node, limits: Limits) -> Statements:
    """Tasks wait for a CPU most of the time.

    Pressure stall information is the time lost itself, not a count of tasks. Launch threads and
    NCCL proxies that wait for a CPU delay the GPUs.

    No fault: a machine that is simply busy. It is load; a burst of seconds is left out (the
    averages over ten and sixty seconds both have to be high).

    Sure: proven that tasks waited; which ones, the number does not tell.

    Do: fewer data-loader workers, pin the ranks, move other work away; see also
    host.cgroup-cpu-throttled.
    """
    section, host = facts(node), node.host_component()
    newest = last(section)
    pressure = newest.cpu_pressure if newest else None
    if (
        pressure is None
        or pressure.some_avg60_percent is None
        or pressure.some_avg10_percent is None
    ):
        yield Unread("host", "cpu_pressure")
        return
    if min(pressure.some_avg60_percent, pressure.some_avg10_percent) < limits["some_percent"]:
        yield Clear(host)
        return
    gpus = gpu_count(node) > 0
    yield Finding(
        id="host.cpu-pressure",
        severity=Severity.WARNING if gpus else Severity.INFO,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.LOAD,
        job_impact=JobImpact.SLOWS if gpus else JobImpact.NONE,
        component=host,
        summary=f"some task waited for a CPU {pressure.some_avg60_percent:.0f}% of the last minute",
        evidence=(
            evidence(
                "/proc/pressure/cpu",
                pressure.some_avg60_percent,
                "cat /proc/pressure/cpu",
                unit="% of 60 s",
            ),
        ),
        explains=("host.load",),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="Find what runs (top -H); fewer loader workers, pinned ranks, less beside them.",
            disruptive=False,
        ),
    )


@probe(
    "host.io-pressure",
    needs=("host",),
    limits={
        "full_percent": Limit(
            40.0, "% of time", "laggard: over ten and sixty seconds both; loaders read in bursts"
        )
    },
)
def io_pressure(node: Node, limits: Limits) -> Statements:
    """All tasks wait for storage much of the time.

    Loading data and writing checkpoints stop the ranks of this node; with one slow disk or mount
    the others wait at the next all-reduce.

    No fault: reading hard for a while (the averages over ten and sixty seconds both have to be
    high). It says nothing about the GPUs.

    Sure: proven that time was lost; whether by a slow disk or by much work, it can't tell.

    Do: `iostat -x 1 3`; compare await and %util with a node of the same kind.
    """
    section, host = facts(node), node.host_component()
    newest = last(section)
    pressure = newest.io_pressure if newest else None
    if (
        pressure is None
        or pressure.full_avg60_percent is None
        or pressure.full_avg10_percent is None
    ):
        yield Unread("host", "io_pressure")
        return
    if min(pressure.full_avg60_percent, pressure.full_avg10_percent) < limits["full_percent"]:
        yield Clear(host)
        return
    gpus = gpu_count(node) > 0
    yield Finding(
        id="host.io-pressure",
        severity=Severity.WARNING if gpus else Severity.INFO,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.LOAD,
        job_impact=JobImpact.SLOWS if gpus else JobImpact.NONE,
        component=host,
        summary=f"all tasks waited for I/O {pressure.full_avg60_percent:.0f}% of the last minute",
        evidence=(
            evidence(
                "/proc/pressure/io",
                pressure.full_avg60_percent,
                "cat /proc/pressure/io",
                unit="% of 60 s",
            ),
        ),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="iostat -x 1 3; compare await and %util with a node of the same kind.",
            disruptive=False,
        ),
    )
