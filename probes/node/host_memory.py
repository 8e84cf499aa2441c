"""Memory, swap, I/O, shared memory and full file systems."""

from __future__ import annotations

from probes.finding import (
    Action,
    Basis,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import GapReason
from probes.host_facts import GIB, MIB, NO_GPU, evidence, facts, gpu_count, last, per_second, size
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, Unread, probe
from probes.view import Node

# One receive buffer of an SHM leg with default sizes: head and LL, LL128 and Simple buffers
_NCCL_SEGMENT_BYTES = 9_637_892
_CONTAINER_DEFAULT_BYTES = 64 * MIB
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


@probe(
    "host.shm-small",
    needs=("host",),
    limits={
        "channels": Limit(
            4.0,
            "segments per GPU",
            "laggard: NCCL opens one 9.6 MB segment a channel and neighbour; 4 is a modest ring",
        )
    },
)
def shm_small(node: Node, limits: Limits) -> Statements:
    """Shared memory (/dev/shm) is too small for NCCL between the GPUs here.

    Where GPUs can't reach each other directly NCCL copies through files in /dev/shm, about 9.6 MB
    a channel and neighbour; PyTorch's loader workers use it too. Containers get 64 MiB unless told
    otherwise. Then a job dies at its first collective ("failed to extend /dev/shm … No space left
    on device") or a loader worker gets SIGBUS.

    No fault: one GPU alone. With NVLink between all GPUs, or NCCL 2.24 and CUDA 12.6 or newer, NCCL
    may not need it at all: hence never critical. What is read is the caller's own /dev/shm: that
    of the job only when laggard runs in the job's container.

    Sure: likely at 64 MiB or less; possible (info) when it is bigger and still below the need.

    Do: start the container with --shm-size=8g or --ipc=host; in Kubernetes mount an emptyDir with
    medium: Memory at /dev/shm.
    """
    section, host = facts(node), node.host_component()
    gpus = gpu_count(node)
    if not gpus:
        yield NO_GPU
        return
    if gpus < 2:
        yield NotApplicable("one GPU: NCCL opens no shared memory between GPUs")
        return
    shm = section.shared_memory
    if shm is None or shm.size_bytes is None:
        yield Unread("host", "shared_memory", shm.path if shm else None)
        return
    if shm.size_bytes == 0:
        yield Clear(host, "the tmpfs has no size limit")
        return
    need = round(gpus * limits["channels"] * _NCCL_SEGMENT_BYTES)
    default = shm.size_bytes <= _CONTAINER_DEFAULT_BYTES
    if shm.size_bytes >= need and not default:
        yield Clear(host)
        return
    yield Finding(
        id="host.shm-small",
        severity=Severity.WARNING if default else Severity.INFO,
        confidence=Confidence.LIKELY if default else Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary=f"shared memory (/dev/shm) is {size(shm.size_bytes)}, NCCL may need {size(need)} "
        f"for {gpus} GPUs" + (" (64 MiB is the container default)" if default else ""),
        evidence=(
            evidence(
                "statvfs /dev/shm",
                shm.size_bytes,
                "df -h /dev/shm",
                unit="bytes",
                expected=(need, Basis.VENDOR_LIMIT),
                quote=f"{shm.type} {shm.path} {shm.options}" if shm.options else None,
                source="statvfs",
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Start the container with --shm-size=8g or --ipc=host; in Kubernetes mount an "
            "emptyDir with medium: Memory at /dev/shm.",
            disruptive=True,
        ),
    )


@probe(
    "host.shm-full",
    needs=("host",),
    limits={
        "free_percent": Limit(
            5.0, "% free", "laggard: together with less than 64 MiB free, the container default"
        )
    },
)
def shm_full(node: Node, limits: Limits) -> Statements:
    """Shared memory (/dev/shm) is full.

    Processes that died leave their files there, and nothing removes them. A new job then fails at
    its first collective, and a running one gets SIGBUS on the next page it touches.

    No fault: a small /dev/shm (that is host.shm-small), or a big one in use with room left.

    Sure: proven.

    Do: `ls -laS /dev/shm | head`, `lsof +L1 /dev/shm`; remove files that no process holds.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    shm = section.shared_memory
    if shm is None or shm.size_bytes is None or shm.free_bytes is None:
        yield Unread("host", "shared_memory", shm.path if shm else None)
        return
    roomy = shm.free_bytes >= _CONTAINER_DEFAULT_BYTES
    if (
        not shm.size_bytes
        or roomy
        or 100 * shm.free_bytes >= limits["free_percent"] * shm.size_bytes
    ):
        yield Clear(host)
        return
    yield Finding(
        id="host.shm-full",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.BREAKS if shm.free_bytes < _NCCL_SEGMENT_BYTES else JobImpact.SLOWS,
        component=host,
        summary=f"shared memory (/dev/shm): {size(shm.free_bytes)} free of {size(shm.size_bytes)}",
        evidence=(
            evidence(
                "statvfs /dev/shm",
                shm.free_bytes,
                "df -h /dev/shm; ls -laS /dev/shm | head",
                unit="bytes",
                source="statvfs",
            ),
        ),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="Find files without a living owner (ls -laS /dev/shm, lsof /dev/shm); remove them",
            disruptive=False,
        ),
    )


@probe(
    "host.disk-full",
    needs=("host",),
    limits={
        "free_percent": Limit(1.0, "% free", "laggard: together with less than 1 GiB free"),
    },
)
def disk_full(node: Node, limits: Limits) -> Statements:
    """A local file system that logs, sockets and temporary files are written to is full.

    Writers fail or retry: a checkpoint does not finish, a log call blocks, a compiler cache can't
    be written, and the rank that meets it stops while the others wait.

    No fault: a data volume that is meant to be full; only /, /tmp, /var and its log and tmp
    folders are looked at, and network file systems are never touched.

    Sure: proven.

    Do: `du -xh --max-depth=2 / | sort -h | tail`.
    """
    section, host = facts(node), node.host_component()
    known = [
        fs for fs in section.file_systems if fs.size_bytes is not None and fs.free_bytes is not None
    ]
    if not known:
        yield Unread("host", "file_systems")
        return
    full = [
        fs
        for fs in known
        if fs.free_bytes is not None
        and fs.size_bytes
        and fs.free_bytes < GIB
        and 100 * fs.free_bytes < limits["free_percent"] * fs.size_bytes
    ]
    if not full:
        yield Clear(host)
        return
    yield Finding(
        id="host.disk-full",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.BREAKS if any(not fs.free_bytes for fs in full) else JobImpact.SLOWS,
        component=host,
        summary="file system full: "
        + ", ".join(
            f"{fs.path} {size(fs.free_bytes or 0)} of {size(fs.size_bytes or 0)} free"
            for fs in full
        ),
        evidence=tuple(
            evidence(
                f"statvfs {fs.path}",
                fs.free_bytes,
                f"df -h {fs.path}",
                unit="bytes",
                source="statvfs",
            )
            for fs in full
        ),
        remedy=Remedy(
            action=Action.INSPECT_APP,
            text="Find what grew: du -xh --max-depth=2 / | sort -h | tail.",
            disruptive=False,
        ),
    )
