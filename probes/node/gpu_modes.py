"""Modes that somebody set on a GPU: MIG, compute mode, confidential computing."""

from __future__ import annotations

from probes.finding import (
    Action,
    FaultClass,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gpu_facts import gpu_finding, is_mig, missing, not_for_vgpu, shown, smi
from probes.registry import Clear, NotApplicable, Statements, probe
from probes.view import Node

_COMPUTE_EXCLUSIVE_THREAD, _COMPUTE_PROHIBITED = 1, 2  # nvmlComputeMode_t


@probe("gpu.mig", needs=("nvml",))
def mig(node: Node) -> Statements:
    """MIG is on, or changes with the next reset.

    A GPU cut into MIG slices gives each process a part of the GPU. NVLink is off, and utilisation,
    row remapping and processes of the whole GPU are not to be had, so they are not judged.

    No fault: it is a mode. It is told as info when siblings of the same model differ, or when a
    change waits for a reset: a job that expects whole GPUs then does not find them.

    Sure: proven, a setting.

    Do: nothing if it was meant; else `nvidia-smi -mig 0` and a reset once the GPU is free.
    """
    same_model: dict[str | None, set[bool | None]] = {}
    for gpu in node.live_gpus:
        same_model.setdefault(gpu.name, set()).add(gpu.mig_mode)
    for gpu in node.live_gpus:
        waits = gpu.mig_mode_pending not in (None, gpu.mig_mode)
        differs = is_mig(gpu) and False in same_model[gpu.name]
        if gpu.mig_mode is None:
            yield missing(gpu, "mig_mode", not_for_vgpu(gpu))
        elif waits or differs:
            now, then = ("on", "off") if gpu.mig_mode else ("off", "on")
            yield gpu_finding(
                node,
                gpu,
                "gpu.mig",
                f"has MIG {now}"
                + (", siblings of its model have it off" if differs else "")
                + (f", and {then} after the next reset" if waits else ""),
                severity=Severity.INFO,
                impact=JobImpact.NONE,
                fault_class=FaultClass.CONFIGURATION,
                evidence=(
                    shown(
                        "nvmlDeviceGetMigMode",
                        f"current {gpu.mig_mode}, pending {gpu.mig_mode_pending}",
                        smi(gpu, "--query-gpu=mig.mode.current,mig.mode.pending --format=csv"),
                    ),
                ),
                remedy=Remedy(
                    action=Action.NONE,
                    text="Nothing if it was meant; else `nvidia-smi -mig 0` and a GPU reset.",
                    disruptive=True,
                ),
            )
        elif gpu.mig_mode:
            yield NotApplicable("MIG on: load, row remapping, NVLink and fabric are not judged")
        else:
            yield Clear(node.gpu_component(gpu))


@probe("gpu.compute-mode", needs=("nvml",))
def compute_mode(node: Node) -> Statements:
    """Compute mode forbids CUDA contexts on the GPU.

    In mode "prohibited" no CUDA program can use the GPU: a job that gets it fails at once.

    No fault: exclusive modes. They let one process at a time in, which some schedulers want.

    Sure: proven, a setting.

    Do: `nvidia-smi -c 0` (as root) sets the default mode.
    """
    for gpu in node.live_gpus:
        if gpu.compute_mode is None:
            yield missing(gpu, "compute_mode", not_for_vgpu(gpu))
        elif gpu.compute_mode != _COMPUTE_PROHIBITED:
            exclusive = gpu.compute_mode > _COMPUTE_EXCLUSIVE_THREAD
            note = "exclusive: one process at a time" if exclusive else None
            yield Clear(node.gpu_component(gpu), note)
        else:
            yield gpu_finding(
                node,
                gpu,
                "gpu.compute-mode",
                "is in compute mode prohibited: no CUDA program can use it",
                severity=Severity.CRITICAL,
                impact=JobImpact.BREAKS,
                fault_class=FaultClass.CONFIGURATION,
                evidence=(
                    shown(
                        "nvmlDeviceGetComputeMode",
                        "prohibited",
                        smi(gpu, "--query-gpu=compute_mode --format=csv"),
                    ),
                ),
                remedy=Remedy(
                    action=Action.RECONFIGURE,
                    text="`nvidia-smi -c 0` (as root), if nobody wants it so.",
                    disruptive=False,
                ),
            )


@probe("gpu.confidential-compute", needs=("nvml",))
def confidential_compute(node: Node) -> Statements:
    """Confidential computing is on: copies between host and GPU are encrypted.

    Each copy goes through an encrypted bounce buffer, so host-to-device rates are a fraction of
    what the PCIe link offers. Kernels and GPU memory run at full speed.

    No fault: it is a mode. Know it before you compare copy rates with other nodes.

    Sure: proven, the driver's own state. Only info.

    Do: nothing.
    """
    for gpu in node.live_gpus:
        if gpu.confidential_compute is None:
            yield missing(gpu, "confidential_compute", not_for_vgpu(gpu))
        elif not gpu.confidential_compute:
            yield Clear(node.gpu_component(gpu))
        else:
            yield gpu_finding(
                node,
                gpu,
                "gpu.confidential-compute",
                "runs in confidential computing mode: PCIe copies are slower by design",
                severity=Severity.INFO,
                impact=JobImpact.NONE,
                fault_class=FaultClass.CONFIGURATION,
                evidence=(
                    shown("nvmlSystemGetConfComputeState", "on", "nvidia-smi conf-compute -q"),
                ),
                remedy=Remedy(action=Action.NONE, text="Nothing: it is a mode.", disruptive=False),
            )
