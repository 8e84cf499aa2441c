"""The driver's management library itself: does it start, and how fast does it answer."""

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
from probes.gpu_facts import gpu_finding, shown, smi
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
from probes.snapshot.gpu import CallTiming, NvmlSection
from probes.view import Node

# nvmlReturn_t
_NO_PERMISSION = 4
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_LIB_RM_VERSION_MISMATCH = 18
_UNKNOWN = 999
_HUNG = "hung"
_RECHECK = "nvidia-smi; echo exit status $?"


@probe("nvml.init-failed", needs=("nvml",))
def init_failed(node: Node) -> Statements:
    """The driver's management library does not start, so no GPU could be read.

    The driver is not loaded, its parts have different versions after an upgrade, a container has
    lost its devices, or the driver hangs. What it means for a job depends on which.

    No fault of a GPU: this says nothing about the hardware. A machine without NVIDIA GPUs has no
    driver, and GPUs bound to vfio-pci belong to a virtual machine. "Unknown error" inside a
    container means the container, not the GPU: a job that holds its devices already goes on.

    Sure: proven that it fails. The cause is the driver's own error code, quoted.

    Do: as the remedy says. Version mismatch: reboot (or reload the modules) once the jobs have
    ended. Container: check from the host, restart the container when its job has ended.
    """
    nvml = node.snapshot.nvml
    if nvml is None:
        return
    yield Clear(node.host_component()) if nvml.init_error is None else _init(node, nvml)


def _init(node: Node, nvml: NvmlSection) -> Statement:
    code, name = nvml.init_error_code, nvml.init_error or ""
    gpus = (
        [device for device in node.snapshot.pci.devices if device.is_nvidia_gpu]
        if node.snapshot.pci is not None
        else None
    )
    container = node.snapshot.container
    if code in (_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND):
        if gpus is not None and not gpus:
            return NotApplicable("no NVIDIA GPU on this machine")
        if gpus and all(device.driver == "vfio-pci" for device in gpus):
            return NotApplicable("all NVIDIA GPUs are bound to vfio-pci for virtual machines")
        if gpus is None:
            return Unread("pci", "devices")
        if container and code == _LIBRARY_NOT_FOUND:
            # the container has no driver library: nothing can be said from in here
            return Unread("nvml", "library_path", reason=GapReason.DENIED)
    here = f"{len(gpus)} NVIDIA GPUs on the PCI bus" if gpus else "NVML does not start"
    if name == _HUNG:
        return _failed(
            node,
            nvml,
            "The NVIDIA driver hangs: nvmlInit did not return",
            severity=Severity.CRITICAL,
            impact=JobImpact.BREAKS,
            fault_class=FaultClass.CANNOT_TELL,
            remedy=Remedy(
                action=Action.REBOOT,
                text="Start nothing here. Read the kernel log (Xid 119, 120, 79, hung tasks), "
                "drain and reboot.",
                disruptive=True,
            ),
        )
    if code == _LIB_RM_VERSION_MISMATCH:
        return _failed(
            node,
            nvml,
            "Driver library and kernel module have different versions: no new process can use a "
            "GPU, running jobs go on",
            severity=Severity.CRITICAL,
            impact=JobImpact.NONE,
            fault_class=FaultClass.CONFIGURATION,
            recheck="cat /proc/driver/nvidia/version; nvidia-smi",
            remedy=Remedy(
                action=Action.REBOOT,
                text="Let running jobs end, then reboot (or unload and load the nvidia modules); "
                "pin the driver packages against unattended upgrades.",
                disruptive=True,
            ),
        )
    if container and code in (_UNKNOWN, _NO_PERMISSION):
        return _failed(
            node,
            nvml,
            f"This {container} container may not use its GPU devices (any more): {name}; it is "
            "the container, not a GPU",
            severity=Severity.WARNING,
            impact=JobImpact.NONE,
            fault_class=FaultClass.CONFIGURATION,
            confidence=Confidence.LIKELY,
            recheck="nvidia-smi on the host; ls -l /dev/nvidia* and `head -c0 /dev/nvidiactl` "
            "in the container",
            remedy=Remedy(
                action=Action.RECONFIGURE,
                text="Check from the host. A job that holds its devices goes on: let it end, then "
                "restart the container with its devices declared (CDI or --device); systemd's "
                "daemon-reload takes them away otherwise.",
                disruptive=True,
            ),
        )
    if code == _NO_PERMISSION or (code == _UNKNOWN and _is_refused(node)):
        return _failed(
            node,
            nvml,
            "This user may not open the NVIDIA device files, so no GPU could be read",
            severity=Severity.WARNING,
            impact=JobImpact.NONE,
            fault_class=FaultClass.CONFIGURATION,
            confidence=Confidence.LIKELY,
            recheck="ls -l /dev/nvidia*",
            remedy=Remedy(
                action=Action.RECONFIGURE,
                text="Run as root, or give this user access to /dev/nvidia*.",
                disruptive=False,
            ),
        )
    if code == _DRIVER_NOT_LOADED:
        return _failed(
            node,
            nvml,
            f"The NVIDIA driver is not loaded, {here}",
            severity=Severity.CRITICAL,
            impact=JobImpact.BREAKS,
            fault_class=FaultClass.SOFTWARE,
            recheck="lsmod | grep nvidia; modprobe -n -v nvidia",
            remedy=Remedy(
                action=Action.REBOOT,
                text="See why the module is not there (`dmesg | grep -i nvrm`, `dkms status`), "
                "load it or reboot.",
                disruptive=True,
            ),
        )
    if code == _LIBRARY_NOT_FOUND:
        return _failed(
            node,
            nvml,
            f"libnvidia-ml.so.1 is not installed, {here}",
            severity=Severity.WARNING,
            impact=JobImpact.BREAKS,
            fault_class=FaultClass.CONFIGURATION,
            recheck="ldconfig -p | grep libnvidia-ml",
            remedy=Remedy(
                action=Action.RECONFIGURE,
                text="Install the driver's user-space packages in the version of the module.",
                disruptive=False,
            ),
        )
    return _failed(
        node,
        nvml,
        f"NVML does not start: {name}",
        severity=Severity.CRITICAL,
        impact=JobImpact.BREAKS,
        fault_class=FaultClass.CANNOT_TELL,
        confidence=Confidence.POSSIBLE,
        remedy=Remedy(
            action=Action.DRAIN,
            text="Read the NVRM lines in the kernel log; drain and reboot if they tell nothing.",
            disruptive=True,
        ),
    )


def _is_refused(node: Node) -> bool:
    """Whether the kernel refuses this process the control device: NVML then says "unknown"."""
    driver = node.snapshot.host_facts.driver if node.snapshot.host_facts else None
    return driver is not None and any(
        device.path == "/dev/nvidiactl" and device.access_error in ("EPERM", "EACCES")
        for device in driver.devices or ()
    )


def _failed(
    node: Node,
    nvml: NvmlSection,
    summary: str,
    *,
    severity: Severity,
    impact: JobImpact,
    fault_class: FaultClass,
    remedy: Remedy,
    confidence: Confidence = Confidence.PROVEN,
    recheck: str = _RECHECK,
) -> Finding:
    return Finding(
        id="nvml.init-failed",
        severity=severity,
        confidence=confidence,
        fault_class=fault_class,
        job_impact=impact,
        component=node.host_component(),
        summary=summary[:200],
        evidence=(
            shown(
                "nvmlInit_v2",
                nvml.init_error,
                recheck,
                quote=nvml.init_detail,
            ),
        ),
        remedy=remedy,
    )


@probe(
    "nvml.slow-call",
    needs=("nvml",),
    limits={
        "slow_ms": Limit(
            1000.0, "ms", "calls take micro- to milliseconds (nvitop, MangoHud measurements)"
        ),
        "stalled_ms": Limit(
            5000.0,
            "ms",
            "a GSP that does not answer costs 6 s a call (open-gpu-kernel-modules#446)",
        ),
    },
)
def slow_call(node: Node, limits: Limits) -> Statements:
    """The driver takes seconds to answer questions about a GPU.

    The driver holds one lock for all of them, so a slow GPU slows every process that asks,
    including CUDA programs that start or allocate memory. Seconds per call often come before a
    hang: its own processor (GSP) times out, or it corrects memory errors all the time.

    No fault: a slow first call (initialization, GPU handle) without persistence mode.

    Sure: that it was slow is proven, why is not. Info from one second, a warning from five.

    Do: read the kernel log for Xid 119 and 120, look at the corrected error rate, check again.
    """
    nvml = node.snapshot.nvml
    came = nvml is not None and nvml.init_error != _HUNG
    if nvml is not None and came and (nvml.init_ms or 0) >= limits["slow_ms"]:
        persistent = node.live_gpus and all(gpu.persistence_mode for gpu in node.live_gpus)
        note = f"nvmlInit took {(nvml.init_ms or 0) / 1000:.1f} s"
        yield Clear(
            node.host_component(),
            note if persistent else f"{note}: the driver loads its state without persistence mode",
        )
    for gpu in node.live_gpus:
        slow = [
            call
            for call in gpu.slow_calls
            if call.returned and call.duration_ms >= limits["slow_ms"]
        ]
        later = [call for call in slow if not _is_first(call)]
        if not later:
            first = "slow first call: the driver loads the GPU's state" if slow else None
            yield Clear(node.gpu_component(gpu), first)
            continue
        worst = max(later, key=lambda call: call.duration_ms)
        stalled = worst.duration_ms >= limits["stalled_ms"]
        yield gpu_finding(
            node,
            gpu,
            "nvml.slow-call",
            f"answers slowly: {worst.call} took {worst.duration_ms / 1000:.1f} s"
            + (f" ({len(later)} slow calls)" if len(later) > 1 else ""),
            severity=Severity.WARNING if stalled else Severity.INFO,
            impact=JobImpact.SLOWS if stalled else JobImpact.NONE,
            confidence=Confidence.POSSIBLE,
            fault_class=FaultClass.CANNOT_TELL,
            evidence=tuple(
                shown(call.call, round(call.duration_ms), f"time {smi(gpu, '-q')}", unit="ms")
                for call in later[:5]
            ),
            remedy=Remedy(
                action=Action.NONE,
                text="Read the kernel log for Xid 119 and 120, look at the corrected error rate, "
                "check again; drain if it gets worse.",
                disruptive=False,
            ),
        )


def _is_first(call: CallTiming) -> bool:
    """The handle call is where the driver initializes a GPU that nobody uses."""
    return "Handle" in call.call
