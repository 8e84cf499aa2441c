"""NVSwitch fabric: registration and health of each GPU.

Source: nvml.h nvmlGpuFabricInfoV_t, NVML_GPU_FABRIC_STATE_*, NVML_GPU_FABRIC_HEALTH_MASK_*.
"""

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
from probes.gpu_facts import gpu_finding, is_mig, missing, not_for_vgpu, shown, smi
from probes.registry import Clear, NotApplicable, Statement, Statements, probe
from probes.snapshot.gpu import Fabric, Gpu
from probes.view import Node

_NOT_SUPPORTED, _NOT_STARTED, _IN_PROGRESS, _COMPLETED = 0, 1, 2, 3
_STATES = {1: "not started", 2: "in progress", 3: "completed"}
_REMOTE_SWITCH = 2
_RECHECK = "-q"

# name -> (shift, severity, impact): two bits each, 0 not supported, 1 true (bad), 2 false (good)
_FLAGS = {
    "degraded bandwidth": (0, Severity.WARNING, JobImpact.SLOWS),
    "route recovery": (2, Severity.WARNING, JobImpact.SLOWS),
    "route unhealthy": (4, Severity.CRITICAL, JobImpact.BREAKS),
    "access timeout recovery": (6, Severity.WARNING, JobImpact.SLOWS),
}
# four bits at 8: 0 not supported, 1 none
_CONFIG = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid GPU state",
}
_FABRIC_MANAGER = Remedy(
    action=Action.DRAIN,
    text="Start no CUDA job here. Check `systemctl status nvidia-fabricmanager`, its version "
    "against the driver's, and its log; restart it on a drained node.",
    disruptive=True,
)


@probe("fabric.state", needs=("nvml",))
def fabric_state(node: Node) -> Statements:
    """A GPU has not joined the NVSwitch fabric.

    On boards with NVSwitches CUDA refuses to start on such a GPU (error 802, system not yet
    initialized), or the job runs without NVLink.

    No fault: "not supported" on cards without NVSwitch; "not started" where nothing says that
    there is a fabric (no NVLink leads to a switch, no sibling has joined), and on Grace boards,
    whose fabric is managed elsewhere.

    Sure: likely; proven with a status code of the failed registration. When no GPU has joined,
    the fabric manager is the suspect and the host is named; one GPU alone is the suspect itself.

    Do: check the fabric manager's state, version and log; restart it on a drained node.
    """
    waiting: list[tuple[Gpu, Fabric]] = []
    joined = 0
    for gpu in node.live_gpus:
        fabric = gpu.fabric
        component = node.gpu_component(gpu)
        if fabric is None or fabric.state is None:
            yield missing(gpu, "fabric", not_for_vgpu(gpu))
        elif is_mig(gpu):
            yield NotApplicable("MIG: NVLink and fabric are off between slices")
        elif fabric.state == _NOT_SUPPORTED:
            yield NotApplicable("no NVSwitch fabric on this part")
        elif fabric.state == _COMPLETED and not fabric.status:
            joined += 1
            yield Clear(component)
        else:
            waiting.append((gpu, fabric))
    alone: list[tuple[Gpu, Fabric]] = []
    for gpu, fabric in waiting:
        if fabric.state == _COMPLETED:
            yield _outside(node, gpu, fabric, joined)
        elif fabric.state == _NOT_STARTED and gpu.c2c_enabled and not joined:
            yield NotApplicable("Grace board: its fabric is managed elsewhere")
        elif joined or _leads_to_switch(gpu):
            alone.append((gpu, fabric))
        else:
            yield NotApplicable(f"fabric {_state(fabric)}, and nothing says that there is one")
    if joined or len(alone) == 1:
        for gpu, fabric in alone:
            yield _outside(node, gpu, fabric, joined)
    elif alone:
        yield _nobody_joined(node, alone)
        for gpu, _ in alone:
            yield Clear(node.gpu_component(gpu), "no GPU has joined the fabric: see the host")


def _state(fabric: Fabric) -> str:
    return _STATES.get(fabric.state or 0, f"in unknown state {fabric.state}")


def _leads_to_switch(gpu: Gpu) -> bool:
    return any(link.remote_type == _REMOTE_SWITCH for link in gpu.nvlinks or ())


def _outside(node: Node, gpu: Gpu, fabric: Fabric, joined: int) -> Finding:
    failed = fabric.state == _COMPLETED
    known = fabric.state in _STATES
    return gpu_finding(
        node,
        gpu,
        "fabric.state",
        f"fabric registration {_state(fabric)}"
        + (f" with status {fabric.status}" if fabric.status else "")
        + (f", {joined} others have joined" if joined else ", its NVLinks lead to a switch"),
        severity=Severity.CRITICAL if known else Severity.WARNING,
        impact=JobImpact.BREAKS,
        confidence=(Confidence.PROVEN if failed else Confidence.LIKELY)
        if known
        else Confidence.POSSIBLE,
        evidence=(
            shown(
                "nvmlDeviceGetGpuFabricInfoV",
                f"state {fabric.state}, status {fabric.status or 0}",
                smi(gpu, _RECHECK),
                expected=("state 3, status 0", Basis.PEER_MEDIAN if joined else Basis.DEVICE_MAX),
            ),
        ),
        explains=("nvlink.remote-missing",),
        remedy=_FABRIC_MANAGER,
    )


def _nobody_joined(node: Node, waiting: list[tuple[Gpu, Fabric]]) -> Finding:
    fabric = waiting[0][1]
    uptime_s = node.snapshot.uptime_s
    booting = fabric.state == _IN_PROGRESS and uptime_s is not None and uptime_s < 600
    return Finding(
        id="fabric.state",
        severity=Severity.WARNING if booting else Severity.CRITICAL,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.SOFTWARE,
        job_impact=JobImpact.BREAKS,
        component=node.host_component(),
        summary=f"Fabric registration {_state(fabric)} on all {len(waiting)} GPUs, whose NVLinks "
        "lead to switches: CUDA does not start"
        + (f" (up for {uptime_s:.0f} s only)" if booting else ""),
        evidence=tuple(
            shown(
                f"nvmlDeviceGetGpuFabricInfoV of {gpu.key}",
                f"state {fabric.state}, status {fabric.status or 0}",
                smi(gpu, _RECHECK),
                expected=("state 3, status 0", Basis.DEVICE_MAX),
            )
            for gpu, fabric in waiting
        ),
        explains=("nvlink.remote-missing",),
        remedy=_FABRIC_MANAGER,
    )


@probe("fabric.health", needs=("nvml",))
def fabric_health(node: Node) -> Statements:
    """The fabric reports trouble on the GPU's paths.

    Bandwidth is degraded, a route is being recovered or is unhealthy, or the configuration is
    wrong. Collectives over NVLink slow down or fail.

    No fault: a mask that is not zero. It consists of two-bit fields where 1 means bad, 2 means
    good and 0 not supported; a healthy GPU shows mostly twos. "Not supported" everywhere is what
    many healthy boards answer.

    Sure: proven, the fabric's own verdict. Unknown codes are shown raw and not judged.

    Do: check the links (nvlink.*), the switch's SXid lines, then the fabric manager's log.
    """
    for gpu in node.live_gpus:
        fabric = gpu.fabric
        if fabric is None or (fabric.health_mask is None and fabric.health_summary is None):
            no_fabric = fabric is not None and fabric.state == _NOT_SUPPORTED
            why = "no NVSwitch fabric on this part" if no_fabric else not_for_vgpu(gpu)
            yield missing(gpu, "fabric" if fabric is None else "health_mask", why)
        elif fabric.state == _NOT_SUPPORTED or not (fabric.health_mask or fabric.health_summary):
            yield NotApplicable("the fabric reports no health on this part")
        else:
            yield _health(node, gpu, fabric)


def _health(node: Node, gpu: Gpu, fabric: Fabric) -> Statement:
    mask = fabric.health_mask or 0
    bad = {
        name: (severity, impact)
        for name, (shift, severity, impact) in _FLAGS.items()
        if mask >> shift & 0x3 == 1
    }
    config = mask >> 8 & 0xF
    if config >= 2:
        name = f"configuration: {_CONFIG.get(config, f'unknown code {config}')}"
        bad[name] = (Severity.CRITICAL, JobImpact.BREAKS)
    if not bad and fabric.health_summary == 2:
        bad["unhealthy"] = (Severity.CRITICAL, JobImpact.BREAKS)
    elif not bad and fabric.health_summary == 3:
        bad["limited capacity"] = (Severity.WARNING, JobImpact.SLOWS)
    if not bad:
        note = f"health mask 0x{mask:x}: 2 in a two-bit field means good" if mask else None
        return Clear(node.gpu_component(gpu), note)
    return gpu_finding(
        node,
        gpu,
        "fabric.health",
        f"fabric health: {', '.join(bad)} (mask 0x{mask:x}, summary {fabric.health_summary})",
        severity=max((s for s, _ in bad.values()), key=lambda s: s.rank),
        impact=max((i for _, i in bad.values()), key=lambda i: i.rank),
        fault_class=FaultClass.CONFIGURATION
        if config >= 2 and len(bad) == 1
        else FaultClass.HARDWARE,
        evidence=(
            shown(
                "nvmlDeviceGetGpuFabricInfoV.healthMask",
                f"0x{mask:x}",
                smi(gpu, _RECHECK),
                expected=("no two-bit field at 1", Basis.VENDOR_LIMIT),
            ),
        ),
        remedy=Remedy(
            action=Action.DRAIN,
            text="Drain; check NVLinks and SXid lines, then the fabric manager's log; reset GPUs "
            "and switches together.",
            disruptive=True,
        ),
    )
