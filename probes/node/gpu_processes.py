"""GPUs and the processes on them: memory held by nobody, zombies, CPU affinity."""

from __future__ import annotations

from collections.abc import Iterable

from probes.cpulist import parse_cpulist
from probes.finding import (
    Action,
    Basis,
    Confidence,
    Evidence,
    Expectation,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.process_view import component, killed, name_of, processes, stuck_threads
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
from probes.snapshot.gpu import Gpu
from probes.snapshot.process import Process
from probes.view import Node, busy_throughout

_GIB = 1 << 30
_VIRTUALIZED = {2: "a vGPU", 3: "a vGPU host", 4: "a shared graphics host"}
_SMALL_FIRST_RESERVE = 0.02  # of the memory, where NVML's used includes what the driver reserves


@probe(
    "gpu.ghost-memory",
    needs=("nvml",),
    limits={
        "ghost_gib": Limit(
            1.0,
            "GiB",
            "own choice: above one CUDA context (0.3 to 0.6 GiB) that is coming or going",
        )
    },
)
def ghost_memory(node: Node, limits: Limits) -> Statements:
    """GPU memory is in use, but no live process accounts for it.

    A process that was killed while the driver could not free its memory, or one whose threads are
    stuck, leaves its memory allocated. The next job on that GPU runs out of memory, although
    nvidia-smi shows nobody there.

    What NVML counts as used, less what its list of processes accounts for, at the reading where it
    is smallest. On driver R510 and newer, used does not contain what the driver reserves; where it
    does, 2 % of the memory are allowed for it. It is no fault when processes are only out of sight:
    in another PID namespace (a container sees none of the others), or of another user for whoever
    is not root; then laggard says that it could not see. Not judged: MIG, vGPU, confidential
    computing (the list is empty by design), and parts whose GPU memory the kernel uses as ordinary
    memory (Grace). 100 % utilisation without a process on its own is no fault of the GPU either.

    Likely when a stuck or killed process holds the GPU's device file or nobody does; possible when
    living processes hold it that NVML does not list. What to do: end the holders that are named,
    starting with the one whose parent is gone; when nobody is left, reset the GPU.
    """
    for gpu in node.live_gpus:
        yield _judge_memory(node, gpu, limits["ghost_gib"])


def _judge_memory(node: Node, gpu: Gpu, limit_gib: float) -> Statement:
    if why := _memory_is_not_by_process(gpu):
        return NotApplicable(f"{gpu.key}: {why}")
    who = node.gpu_component(gpu)
    used = [
        reading.memory_used_bytes
        for reading in gpu.readings
        if reading.memory_used_bytes is not None
    ]
    if not used:
        return Unread("nvml", "memory_used_bytes", gpu.key)
    if gpu.processes is None:
        return Unread("nvml", "processes", gpu.key)
    held = min(used)
    if gpu.memory_reserved_bytes is None:
        held -= int(_SMALL_FIRST_RESERVE * (gpu.memory_total_bytes or 0))
    by_pid: dict[int, int] = {}  # one that computes and draws is listed twice, with the same size
    for process in gpu.processes:
        size = process.used_memory_bytes or 0
        by_pid[process.pid] = max(size, by_pid.get(process.pid, 0))
    ghost = held - sum(by_pid.values())
    if ghost < limit_gib * _GIB:
        busy = busy_throughout(gpu) and not gpu.processes
        return Clear(who, "busy, but NVML names no process: one out of sight" if busy else None)
    if any(process.used_memory_bytes is None for process in gpu.processes):
        return Unread("nvml", "processes", gpu.key)
    section = node.snapshot.processes
    if section is None or section.host_pid_namespace is None:
        return Unread("processes", "nvidia_devices", None)
    if section.host_pid_namespace is False:
        return NotApplicable(
            f"{gpu.key}: {_gib(ghost)} in use by processes outside this container's PID namespace"
        )
    if section.unreadable:
        return Unread("processes", "nvidia_devices", None)
    holders = [process for process in _holders(node, gpu) if process.pid not in by_pid]
    dead = [process for process in holders if _cannot_end(process)]
    named = dead or holders
    return Finding(
        id=ghost_memory.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY if dead or not holders else Confidence.POSSIBLE,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.BREAKS,
        component=who,
        summary=_ghost_summary(gpu, ghost, named, dead=bool(dead)),
        evidence=(
            Evidence(
                source="nvml",
                locator="nvmlDeviceGetMemoryInfo, nvmlDeviceGetComputeRunningProcesses",
                observed=round(ghost / _GIB, 2),
                unit="GiB without a process",
                expected=Expectation(value=limit_gib, basis=Basis.VENDOR_LIMIT),
                recheck=f"nvidia-smi -i {gpu.pci or gpu.index} --query-gpu=memory.used,"
                "memory.reserved --format=csv; nvidia-smi --query-compute-apps=pid,used_memory,"
                "gpu_bus_id --format=csv",
            ),
            *(_holder_evidence(process, gpu) for process in named[:8]),
        ),
        remedy=Remedy(
            action=Action.INSPECT_APP if named else Action.RESET_GPU,
            text=f"End {', '.join(name_of(process) for process in named[:4])}; a reset needs every "
            "holder gone."
            if named
            else f"Nobody holds the GPU: `nvidia-smi --gpu-reset -i {gpu.pci or gpu.index}` "
            "while no job is on it.",
            disruptive=True,
        ),
    )


def _memory_is_not_by_process(gpu: Gpu) -> str | None:
    if gpu.mig_mode:
        return "MIG mode: memory belongs to the instances"
    if gpu.virtualization_mode in _VIRTUALIZED:
        return f"{_VIRTUALIZED[gpu.virtualization_mode]}: memory is not listed by process"
    if gpu.confidential_compute:
        return "confidential computing: NVML lists no processes"
    if gpu.c2c_enabled:
        return "the kernel uses this GPU's memory as ordinary memory (C2C)"
    return None


def _holders(node: Node, gpu: Gpu) -> list[Process]:
    if gpu.minor_number is None:
        return []
    path = f"/dev/nvidia{gpu.minor_number}"
    return [process for process in processes(node) if path in (process.nvidia_devices or ())]


def _cannot_end(process: Process) -> bool:
    zombie = bool(process.readings) and process.readings[-1].state == "Z"
    return zombie or killed(process) or bool(stuck_threads(process))


def _ghost_summary(gpu: Gpu, ghost: int, named: list[Process], *, dead: bool) -> str:
    text = f"GPU {gpu.key}: {_gib(ghost)} in use that no process in NVML's list accounts for; "
    if not named:
        return text + "nobody holds its device file"
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    kind = "held by" if dead else "its device file is open in"
    return f"{text}{kind} {name_of(named[0])}{more}"[:200]


def _holder_evidence(process: Process, gpu: Gpu) -> Evidence:
    state = process.readings[-1].state if process.readings else None
    facts = [f"state {state}", f"parent {process.ppid}", f"uid {process.uid}"]
    if killed(process):
        facts.append("SIGKILL pending")
    if process.container:
        facts.append(f"container {process.container}")
    return Evidence(
        source="procfs",
        locator=f"/proc/{process.pid}/fd",
        observed=f"/dev/nvidia{gpu.minor_number} is open in {name_of(process)}",
        quote=", ".join(facts),
        recheck=f"ls -l /proc/{process.pid}/fd | grep nvidia; grep -E 'State|PPid|Pnd' "
        f"/proc/{process.pid}/status",
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


@probe("process.zombie-holder", needs=("processes",))
def zombie_holder(node: Node) -> Statements:
    """A process has ended, and its GPU memory or device files have not.

    Normally a zombie holds nothing: memory and files are given back before it becomes one. When
    its main thread has ended while other threads are stuck in the driver, files and GPU memory
    stay, and so they do when NVML still counts memory for it.

    A zombie whose parent has not collected it yet holds no GPU resources and is no fault: such
    children of notebooks and launchers are common, they cost a table entry. Sure when NVML counts
    memory for it, likely when its remaining threads hold the device file. What to do: see what its
    threads wait for (process.stuck-in-driver); ending the parent helps only with plain zombies.
    """
    section = node.snapshot.processes
    if section is None:
        return
    counted = {
        process.pid: process.used_memory_bytes or 0
        for gpu in node.gpus
        for process in gpu.processes or ()
    }
    plain = section.zombies
    for process in processes(node):
        if not process.readings or process.readings[-1].state != "Z":
            continue
        size = counted.get(process.pid, 0) if section.host_pid_namespace else 0
        if not size and process.nvidia_devices is None:
            plain -= 1
            yield Unread("processes", "nvidia_devices", process.key)
            continue
        if not size and not process.nvidia_devices:
            continue
        plain -= 1
        holds = f"{_gib(size)} of GPU memory" if size else ", ".join(process.nvidia_devices or ())
        yield Finding(
            id=zombie_holder.id,
            severity=Severity.WARNING,
            confidence=Confidence.PROVEN if size else Confidence.LIKELY,
            fault_class=FaultClass.SOFTWARE,
            job_impact=JobImpact.BREAKS,
            component=component(node, process),
            summary=f"Zombie {name_of(process)} still holds {holds}, expected nothing"[:200],
            evidence=(
                Evidence(
                    source="procfs",
                    locator=f"/proc/{process.pid}/stat",
                    observed=f"Z, {process.threads} threads, parent {process.ppid}",
                    recheck=f"grep -E 'State|Threads|PPid' /proc/{process.pid}/status; "
                    f"ls /proc/{process.pid}/task",
                ),
            ),
            explains=("gpu.ghost-memory",),
            remedy=Remedy(
                action=Action.INSPECT_APP,
                text=f"See what its threads wait for: `cat /proc/{process.pid}/task/*/wchan`. If "
                "they never return, only a reboot frees the GPU.",
                disruptive=False,
            ),
        )
    if plain > 0:
        yield Clear(node.host_component(), f"{plain} zombies hold no GPU: their parents' business")
    elif not section.zombies:
        yield Clear(node.host_component())


@probe("process.numa-affinity", needs=("nvml", "processes", "pci"))
def numa_affinity(node: Node) -> Statements:
    """A GPU's process may run only on CPUs of the other socket.

    Every kernel launch and every host-to-device copy then crosses the link between the sockets:
    copies slow down, launches take longer, and the rank comes late to each collective by a little.

    The process's allowed CPUs are compared with the CPUs that the firmware names as local to the
    GPU. A process that may run on both sides is not judged (the scheduler decides), nor one that
    drives several GPUs and is close to at least one of them. Where the firmware names no NUMA node
    for the GPU (many virtual machines) there is nothing to compare. Likely, because the firmware's
    word is taken; what it costs depends on the load. What to do: bind the rank to the GPU's CPUs
    (`nvidia-smi topo -m` shows them), or correct the container's cpuset.
    """
    section = node.snapshot.processes
    if section is None:
        return
    for gpu in node.live_gpus:
        device = node.pci_by_address.get(gpu.pci or "")
        if gpu.processes is None:
            yield Unread("nvml", "processes", gpu.key)
        elif not gpu.processes:
            yield NotApplicable(f"{gpu.key}: no process on it")
        elif device is None or device.numa_node is None or not device.local_cpulist:
            yield NotApplicable(f"{gpu.key}: the firmware names no NUMA node for it")
        elif section.host_pid_namespace is None:
            yield Unread("processes", "host_pid_namespace", None)
        elif section.host_pid_namespace is False:
            yield NotApplicable("NVML's pids are the host's, this /proc is a container's")
        else:
            yield _judge_affinity(node, gpu, device.local_cpulist, device.numa_node)


def _judge_affinity(node: Node, gpu: Gpu, local: str, numa_node: int) -> Statement:
    by_pid = {process.pid: process for process in processes(node)}
    here = [by_pid[process.pid] for process in gpu.processes or () if process.pid in by_pid]
    known = [process for process in here if process.cpus_allowed_list]
    if not known:
        return Unread("processes", "cpus_allowed_list", str((gpu.processes or ())[0].pid))
    who = node.gpu_component(gpu)
    far = [
        process
        for process in known
        if not _overlaps(process.cpus_allowed_list or "", local)
        and not _near_another(node, gpu, process)
    ]
    if not far:
        return Clear(who)
    worst = far[0]
    more = f" and {len(far) - 1} more" if len(far) > 1 else ""
    return Finding(
        id=numa_affinity.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=who,
        summary=f"GPU {gpu.key} is local to CPUs {local} (NUMA node {numa_node}); its "
        f"{name_of(worst)}{more} may run only on CPUs {worst.cpus_allowed_list}"[:200],
        evidence=tuple(
            Evidence(
                source="procfs",
                locator=f"/proc/{process.pid}/status",
                observed=process.cpus_allowed_list,
                unit="CPUs allowed",
                expected=Expectation(value=local, basis=Basis.DEVICE_MAX),
                recheck=f"grep Cpus_allowed_list /proc/{process.pid}/status; "
                f"cat /sys/bus/pci/devices/{gpu.pci}/local_cpulist",
            )
            for process in far[:8]
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text=f"Start the rank bound to CPUs {local} (numactl, the launcher's binding, or the "
            "container's cpuset).",
            disruptive=True,
        ),
    )


def _near_another(node: Node, gpu: Gpu, process: Process) -> bool:
    """Whether it also drives a GPU that it is close to."""
    others: Iterable[Gpu] = (other for other in node.live_gpus if other is not gpu)
    for other in others:
        device = node.pci_by_address.get(other.pci or "")
        if device is None or not device.local_cpulist:
            continue
        if any(entry.pid == process.pid for entry in other.processes or ()) and _overlaps(
            process.cpus_allowed_list or "", device.local_cpulist
        ):
            return True
    return False


def _overlaps(left: str, right: str) -> bool:
    """Whether two CPU lists share one; a list that makes no sense is taken as sharing."""
    try:
        return not set(parse_cpulist(left)).isdisjoint(parse_cpulist(right))
    except ValueError:
        return True
