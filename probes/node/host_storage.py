"""Shared memory and local file systems."""

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
from probes.host_facts import (
    GIB,
    MIB,
    NO_GPU,
    evidence,
    facts,
    gpu_count,
    size,
)
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, Unread, probe
from probes.view import Node

# One receive buffer of an SHM leg with default sizes: head and LL, LL128 and Simple buffers
_NCCL_SEGMENT_BYTES = 9_637_892
_CONTAINER_DEFAULT_BYTES = 64 * MIB


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
