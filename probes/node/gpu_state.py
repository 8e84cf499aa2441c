"""GPUs that can't be used: the driver's own verdict, lost, hung, hidden, in need of a reset."""

from __future__ import annotations

from collections.abc import Callable

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
from probes.gpu_facts import called, gpu_finding, missing, not_for_vgpu, shown, smi
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.snapshot.gpu import Gpu, GpuState
from probes.view import Node

# NVML_GPU_RECOVERY_ACTION_*: name, remedy, what it means, severity
_ACTIONS = {
    1: ("reset the GPU", Action.RESET_GPU, "Drain, then `nvidia-smi --gpu-reset`."),
    2: ("reboot the node", Action.REBOOT, "Drain, then reboot."),
    3: (
        "drain peer-to-peer work",
        Action.DRAIN,
        "End all jobs that use NVLink or P2P with this GPU, then read the action again.",
    ),
    4: (
        "drain and reset",
        Action.RESET_GPU,
        "Start nothing new on it, let the job end, then `nvidia-smi --gpu-reset`.",
    ),
    5: (
        "recover the IMEX domain",
        Action.RECONFIGURE,
        "Check nvidia-imex on all nodes of the domain (`nvidia-imex-ctl -N`), restart it there.",
    ),
    6: ("reset the bus", Action.RESET_GPU, "Drain, then reset the GPU through its bus."),
    7: ("reboot the system", Action.REBOOT, "Drain, then power-cycle the whole system."),
}


@probe("gpu.recovery-action", needs=("nvml",))
def recovery_action(node: Node) -> Statements:
    """The driver itself asks for a recovery action on the GPU.

    The driver has seen an error that it can't repair alone (field 230, GPU recovery action). Until
    it is done, work on this GPU fails or must not be started. Nothing outranks this verdict.

    No fault: action 0 (none). Drivers before 570 do not have the field.

    Sure: proven. Critical for every action, except "drain and reset": there the running job may
    end first. An action that this version does not know is shown raw.

    Do: exactly what the driver asks for; see the Xid 154 line in the kernel log for the reason.
    """
    for gpu in node.gpus:
        action = gpu.recovery_action
        if action is None:
            if gpu.state is GpuState.OK:
                yield missing(gpu, "recovery_action", not_for_vgpu(gpu))
            continue
        if action == 0:
            yield Clear(node.gpu_component(gpu))
            continue
        what, todo, text = _ACTIONS.get(
            action,
            (f"unknown action {action}", Action.DRAIN, "Look it up in this driver's nvml.h."),
        )
        drains_first = action in (3, 4)
        yield gpu_finding(
            node,
            gpu,
            "gpu.recovery-action",
            f"needs recovery, says the driver: {what} (action {action})",
            severity=Severity.WARNING if action == 4 else Severity.CRITICAL,
            impact=JobImpact.NONE if drains_first else JobImpact.BREAKS,
            confidence=Confidence.PROVEN if action in _ACTIONS else Confidence.POSSIBLE,
            fault_class=FaultClass.SOFTWARE if action == 5 else FaultClass.HARDWARE,
            evidence=(
                shown(
                    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
                    action,
                    f"{smi(gpu, '-q')} | grep 'Recovery Action'",
                    expected=(0, Basis.VENDOR_LIMIT),
                ),
            ),
            explains=("memory.row-remap-pending",),
            remedy=Remedy(action=todo, text=text, disruptive=todo is not Action.RECONFIGURE),
        )


def _by_state(node: Node, judge: Callable[[Gpu], Statement | None]) -> Statements:
    """What ``judge`` says of each GPU; one that it leaves alone is clear when it works."""
    for gpu in node.gpus:
        if (said := judge(gpu)) is not None:
            yield said
        elif gpu.state is GpuState.OK:
            yield Clear(node.gpu_component(gpu))
        else:
            yield NotApplicable(f"{called(gpu)} is {gpu.state.value}: another probe says so")


def _said(gpu: Gpu) -> str:
    """``nvmlDeviceGetTemperature: NVML_ERROR_GPU_IS_LOST``."""
    return ": ".join(part for part in (gpu.state_call, gpu.state_detail) if part)


@probe("gpu.lost", needs=("nvml",))
def lost(node: Node) -> Statements:
    """The GPU has fallen off the bus.

    The driver can't reach it any more; every process that uses it fails or hangs, and a job that
    spans all GPUs of the node can't run. The other GPUs still answer.

    No fault: a GPU hidden from this container or user (gpu.no-permission), a hung call (gpu.hung).
    Readings of a lost GPU (all ones) are no measurements and are not judged.

    Sure: proven, the driver's answer (NVML_ERROR_GPU_IS_LOST).

    Do: drain, read Xid 79 in the kernel log, power-cycle the node (a warm reboot is often not
    enough). If it happens again check power cable, riser and seating, then replace the board.
    """
    answering = len(node.live_gpus)

    def judge(gpu: Gpu) -> Finding | None:
        if gpu.state is not GpuState.LOST:
            return None
        return gpu_finding(
            node,
            gpu,
            "gpu.lost",
            f"is lost (fallen off the bus); {answering} of {len(node.gpus)} GPUs answer",
            severity=Severity.CRITICAL,
            impact=JobImpact.BREAKS,
            evidence=(
                shown(
                    gpu.state_call or "nvmlDeviceGetHandleByIndex",
                    "NVML_ERROR_GPU_IS_LOST",
                    smi(gpu, "-q"),
                    quote=gpu.state_detail,
                ),
            ),
            remedy=Remedy(
                action=Action.REBOOT,
                text="Drain and power-cycle the node; if it drops again check power and seating, "
                "then have the board replaced.",
                disruptive=True,
            ),
        )

    yield from _by_state(node, judge)


@probe("gpu.hung", needs=("nvml",))
def hung(node: Node) -> Statements:
    """A driver call on the GPU did not return.

    The process that asked is stuck in the kernel, and so is every other that needs this GPU:
    jobs hang without an error, monitoring piles up. The other GPUs may still answer.

    No fault: a slow first call without persistence mode (nvml.slow-call).

    Sure: that it hangs is proven, why is not: the GPU's own processor (GSP) may have died (Xid
    119, 120), the bus may be broken, or the driver may be in a deadlock.

    Do: start nothing here, read the kernel log for Xid 119, 120, 79 and hung tasks, drain and
    reboot; after that power-cycle. Do not run more tools against the GPU: they hang, too.
    """

    def judge(gpu: Gpu) -> Finding | None:
        if gpu.state is not GpuState.HUNG:
            return None
        waited = next((call for call in gpu.slow_calls if not call.returned), None)
        call = gpu.state_call or (waited.call if waited else "an NVML call")
        return gpu_finding(
            node,
            gpu,
            "gpu.hung",
            f"does not answer: {call} did not return"
            + (f" within {waited.duration_ms / 1000:.3g} s" if waited else ""),
            severity=Severity.CRITICAL,
            impact=JobImpact.BREAKS,
            fault_class=FaultClass.CANNOT_TELL,
            evidence=(
                shown(
                    call,
                    round(waited.duration_ms) if waited else None,
                    f"timeout -s KILL 20 {smi(gpu, '-q')} &",
                    unit="ms without an answer" if waited else None,
                    quote=gpu.state_detail,
                ),
            ),
            explains=("nvml.slow-call",),
            remedy=Remedy(
                action=Action.REBOOT,
                text="Start nothing here. Read the kernel log (Xid 119, 120, 79, hung tasks), "
                "drain and reboot; run no further GPU tools, they hang, too.",
                disruptive=True,
            ),
        )

    yield from _by_state(node, judge)


# state -> severity, impact, class, action, what to do
_UNUSABLE = {
    GpuState.RESET_REQUIRED: (
        "needs a reset before it can be used",
        FaultClass.HARDWARE,
        Remedy(
            action=Action.RESET_GPU,
            text="Drain, then `nvidia-smi --gpu-reset`; reboot if that fails.",
            disruptive=True,
        ),
    ),
    GpuState.INSUFFICIENT_POWER: (
        "lacks power: its auxiliary cables are not connected properly",
        FaultClass.CONFIGURATION,
        Remedy(
            action=Action.RESEAT,
            text="Power off, check the auxiliary power cables of this board.",
            disruptive=True,
        ),
    ),
    GpuState.IRQ_ISSUE: (
        "has an interrupt problem, says the kernel",
        FaultClass.SOFTWARE,
        Remedy(
            action=Action.REBOOT,
            text="Read the NVRM lines in the kernel log, drain and reboot; check firmware settings "
            "for interrupts (MSI, IOMMU).",
            disruptive=True,
        ),
    ),
    GpuState.NOT_READY: (
        "is not ready",
        FaultClass.SOFTWARE,
        Remedy(
            action=Action.DRAIN,
            text="Wait a minute and check again; if it stays, reboot.",
            disruptive=True,
        ),
    ),
    GpuState.NOT_FOUND: (
        "is listed, but the driver can't find it",
        FaultClass.HARDWARE,
        Remedy(
            action=Action.REBOOT,
            text="Read the kernel log for this address, drain and reboot.",
            disruptive=True,
        ),
    ),
    GpuState.UNKNOWN: (
        "can't be used",
        FaultClass.CANNOT_TELL,
        Remedy(
            action=Action.DRAIN,
            text="Read the kernel log for this address; drain and reboot.",
            disruptive=True,
        ),
    ),
}


@probe("gpu.not-usable", needs=("nvml",))
def not_usable(node: Node) -> Statements:
    """The driver lists the GPU, but refuses to work with it.

    It needs a reset, lacks power, has an interrupt problem, is not ready, or the driver answers
    with an error that says no more. A job that wants all GPUs of the node can't start.

    No fault: a GPU hidden from this container or user (gpu.no-permission).

    Sure: proven, the driver's own answer; its code and text are quoted. What to do depends on it.

    Do: as the remedy says; the kernel log's NVRM lines for this address say more.
    """

    def judge(gpu: Gpu) -> Statement | None:
        if gpu.state not in _UNUSABLE:
            return None
        if gpu.state is GpuState.UNKNOWN and gpu.state_call is None:
            return Unread("nvml", "state", gpu.key)  # nobody asked it: no time was left
        what, fault_class, remedy = _UNUSABLE[gpu.state]
        detail = f" ({gpu.state_detail})" if gpu.state_detail else ""
        return gpu_finding(
            node,
            gpu,
            "gpu.not-usable",
            f"{what}{detail}"[:150],
            severity=Severity.CRITICAL,
            impact=JobImpact.BREAKS,
            confidence=Confidence.LIKELY
            if gpu.state in (GpuState.UNKNOWN, GpuState.NOT_READY)
            else Confidence.PROVEN,
            fault_class=fault_class,
            evidence=(
                shown(
                    gpu.state_call or "nvmlDeviceGetHandleByIndex",
                    gpu.state.value,
                    smi(gpu, "-q"),
                    quote=_said(gpu) or None,
                ),
            ),
            remedy=remedy,
        )

    yield from _by_state(node, judge)


@probe("gpu.no-permission", needs=("nvml",))
def no_permission(node: Node) -> Statements:
    """GPUs that are hidden from this user or container.

    NVML counts them and then answers "no permission": a device cgroup, a container with some of
    the node's GPUs, or MIG capabilities. They can't be judged from here.

    No fault: that is how GPUs are shared out. Nothing is reported but that they were not judged.

    Sure: proven, the driver's own answer.

    Do: run laggard on the host (as root) to see all GPUs.
    """

    def judge(gpu: Gpu) -> NotApplicable | None:
        if gpu.state is not GpuState.NO_PERMISSION:
            return None
        return NotApplicable(f"{called(gpu)} is hidden from this user or container: not judged")

    yield from _by_state(node, judge)
