"""Memory and swap."""

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
from probes.gap import GapReason
from probes.host_facts import (
    evidence,
    facts,
    last,
    per_second,
    size,
)
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, Unread, probe
from probes.view import Node

_STALL_SOURCE = "laggard: a tenth of the time lost, over ten and sixty seconds both"


@probe(
    "host.memory-pressure",
    needs=("host",),
    limits={
        "full_percent": Limit(10.0, "% of time", _STALL_SOURCE),
        "available_percent": Limit(
            2.0, "% of memory", "laggard: less than this, and the OOM killer is near"
        ),
    },
)
def memory_pressure(node: Node, limits: Limits) -> Statements:
    """The machine runs out of memory: everything waits for it, or almost none is left.

    While the kernel reclaims memory all tasks stall together, so ranks here become stragglers; when
    nothing is left the OOM killer ends a process, often the one that holds most: a rank.

    No fault: little *free* memory. The page cache fills it and gives it back; MemAvailable and the
    time lost (PSI full) are what counts.

    Sure: proven that it happens now. Who uses the memory, the number does not tell.

    Do: `ps -eo rss,pid,comm --sort=-rss | head`; look for pinned host buffers and loader workers.
    """
    section, host = facts(node), node.host_component()
    newest = last(section)
    pressure = newest.memory_pressure if newest else None
    available = newest.memory_available_bytes if newest else None
    total = section.memory_total_bytes
    stalled = None
    if (
        pressure
        and pressure.full_avg10_percent is not None
        and pressure.full_avg60_percent is not None
    ):
        stalled = min(pressure.full_avg10_percent, pressure.full_avg60_percent)
    if stalled is None and (available is None or not total):
        yield Unread("host", "memory_pressure")
        return
    proofs, parts = [], []
    if stalled is not None and pressure is not None and stalled >= limits["full_percent"]:
        parts.append(
            f"all tasks stalled on memory {pressure.full_avg60_percent:.0f}% of the last minute"
        )
        proofs.append(
            evidence(
                "/proc/pressure/memory",
                pressure.full_avg60_percent,
                "cat /proc/pressure/memory",
                unit="% of 60 s",
            )
        )
    if available is not None and total and 100 * available < limits["available_percent"] * total:
        parts.append(f"{size(available)} of {size(total)} memory available")
        proofs.append(
            evidence("/proc/meminfo", available, "grep MemAvailable /proc/meminfo", unit="bytes")
        )
    if not proofs:
        yield Clear(host)
        return
    yield Finding(
        id="host.memory-pressure",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.SLOWS,
        component=host,
        summary=", ".join(parts),
        evidence=tuple(proofs),
        explains=("host.swap-active", "host.io-pressure"),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="ps -eo rss,pid,comm --sort=-rss | head; fewer loader workers or pinned buffers.",
            disruptive=False,
        ),
    )


@probe(
    "host.swap-active",
    needs=("host",),
    limits={
        "pages_per_s": Limit(
            256.0,
            "pages/s swapped in",
            "laggard: 1 MiB/s at 4 KiB pages; an idle daemon stays below",
        )
    },
)
def swap_active(node: Node, limits: Limits) -> Statements:
    """Memory is being read back from swap now.

    A rank whose pages come back from disk waits milliseconds for each; one such rank holds all the
    others at the all-reduce.

    No fault: swap that is used and stands still: old pages of idle daemons lie there for weeks.
    Writing to swap alone is no stall either; reading back is.

    Sure: proven over the sample.

    Do: free memory (host.memory-pressure says how much is left), or turn swap off on GPU nodes.
    """
    section, host = facts(node), node.host_component()
    if section.swap_total_bytes == 0:
        yield NotApplicable("no swap space")
        return
    newest = last(section)
    if newest is None or newest.pages_swapped_in is None:
        yield Unread("host", "pages_swapped_in")
        return
    rate = per_second(section, lambda reading: reading.pages_swapped_in)
    if rate is None:
        yield Unread("host", "pages_swapped_in", reason=GapReason.NOT_COLLECTED)
        return
    if rate < limits["pages_per_s"]:
        used = (section.swap_total_bytes or 0) - (newest.swap_free_bytes or 0)
        idle = used > 0 and newest.swap_free_bytes is not None
        yield Clear(host, f"{size(used)} of swap used, and it stands still" if idle else None)
        return
    yield Finding(
        id="host.swap-active",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.SLOWS,
        component=host,
        summary=f"{rate:.0f} pages a second are read back from swap",
        evidence=(
            evidence("/proc/vmstat", round(rate), "vmstat 1 5  # column si", unit="pages/s"),
        ),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="Free memory: see who holds it with ps -eo rss,pid,comm --sort=-rss | head.",
            disruptive=False,
        ),
    )
