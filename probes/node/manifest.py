"""What the operator expects of this node's GPUs against what is there."""

from __future__ import annotations

from collections.abc import Callable

from probes.finding import (
    Action,
    Basis,
    Component,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Scalar,
    Severity,
)
from probes.gpu_facts import called, missing, no_nvlink, not_for_vgpu, shown, smi
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.snapshot.gpu import Gpu
from probes.view import Node

_NOTHING_SET = "the manifest does not say (no manifest, or no such key in it)"


def _unexpected(
    id: str,
    component: Component,
    summary: str,
    evidence: Evidence,
    *,
    severity: Severity = Severity.WARNING,
    impact: JobImpact = JobImpact.NONE,
    confidence: Confidence = Confidence.PROVEN,
    fault_class: FaultClass = FaultClass.CONFIGURATION,
    text: str,
) -> Finding:
    return Finding(
        id=id,
        severity=severity,
        confidence=confidence,
        fault_class=fault_class,
        job_impact=impact,
        component=component,
        summary=summary[:200],
        evidence=(evidence,),
        remedy=Remedy(action=Action.RECONFIGURE, text=text, disruptive=False),
    )


def _expected(node: Node, key: str) -> Scalar | None:
    manifest = node.snapshot.manifest
    value: Scalar | None = getattr(manifest, key) if manifest is not None else None
    return value


@probe("manifest.gpu-count", needs=("nvml",))
def gpu_count(node: Node) -> Statements:
    """The node has fewer GPUs that work than the manifest expects.

    A job that asks for all of them does not start, or starts smaller than planned.

    No fault: a container that was given some of the node's GPUs; GPUs hidden from this user. More
    GPUs than expected are told as info.

    Sure: proven on the host. The other probes say what became of the missing one (gpu.lost,
    gpu.hung, the PCI probes).

    Do: find the missing GPU; if the node was changed on purpose, change the manifest.
    """
    expected = _expected(node, "gpu_count")
    nvml = node.snapshot.nvml
    if not isinstance(expected, int):
        yield NotApplicable(_NOTHING_SET)
        return
    if nvml is None or nvml.init_error is not None:
        yield Unread("nvml", "gpus")
        return
    working = len(node.live_gpus)
    listed = max(nvml.device_count or 0, len(node.gpus))
    hidden = sum(1 for gpu in node.gpus if gpu.state.value == "no-permission")
    if working < expected <= working + hidden:
        yield NotApplicable(f"{working} of {expected} GPUs are for this user or container")
    elif working < expected <= _on_the_bus(node) and listed == working and node.snapshot.container:
        yield NotApplicable(f"this container was given {working} of {expected} GPUs")
    elif working == expected:
        yield Clear(node.host_component())
    else:
        fewer = working < expected
        yield _unexpected(
            "manifest.gpu-count",
            node.host_component(),
            f"{working} GPUs work here, the manifest expects {expected}"
            + (f" ({listed} are listed)" if listed != working else ""),
            shown(
                "nvmlDeviceGetCount_v2",
                working,
                "nvidia-smi -L",
                unit="GPUs",
                expected=(expected, Basis.MANIFEST),
            ),
            severity=Severity.CRITICAL if fewer else Severity.INFO,
            impact=JobImpact.BREAKS if fewer else JobImpact.NONE,
            fault_class=FaultClass.HARDWARE if fewer else FaultClass.CONFIGURATION,
            confidence=Confidence.LIKELY if fewer else Confidence.PROVEN,
            text="Find the missing GPU (lspci, kernel log); else change the manifest."
            if fewer
            else "Change the manifest.",
        )


def _on_the_bus(node: Node) -> int:
    """GPUs in PCI; a container sees those of the host there."""
    pci = node.snapshot.pci
    return sum(1 for device in pci.devices if device.is_nvidia_gpu) if pci else 0


@probe("manifest.gpu-name", needs=("nvml",))
def gpu_name(node: Node) -> Statements:
    """A GPU is of another model than the manifest expects.

    A mix of models runs at the pace of the slowest.

    No fault: letter case aside, the manifest's text may be a part of the model's name.

    Sure: proven.

    Do: check what was built in; if it was meant, change the manifest.
    """

    def judge(gpu: Gpu, expected: Scalar) -> Statement:
        if gpu.name is None:
            return Unread("nvml", "name", gpu.key)
        if str(expected).lower() in gpu.name.lower():
            return Clear(node.gpu_component(gpu))
        return _unexpected(
            "manifest.gpu-name",
            node.gpu_component(gpu),
            f"{called(gpu)} is a {gpu.name}, the manifest expects {expected}",
            shown(
                "nvmlDeviceGetName", gpu.name, "nvidia-smi -L", expected=(expected, Basis.MANIFEST)
            ),
            text="Check what was built in; if it was meant, change the manifest.",
        )

    yield from _each(node, "gpu_name", judge)


@probe("manifest.power-limit", needs=("nvml",))
def power_limit(node: Node) -> Statements:
    """The power limit in force is not the one that the manifest expects.

    A lower one slows the GPU under load and every rank with it; a higher one can trip the rack.

    No fault: a difference below one watt.

    Sure: proven.

    Do: `nvidia-smi -pl` (as root) sets it; a limit that comes back down is set from outside.
    """

    def judge(gpu: Gpu, expected: Scalar) -> Statement:
        limit_mw = gpu.limits.power_limit_enforced_mw
        if limit_mw is None:
            return missing(gpu, "power_limit_enforced_mw", not_for_vgpu(gpu))
        if abs(limit_mw / 1000 - float(expected)) < 1:
            return Clear(node.gpu_component(gpu))
        lower = limit_mw / 1000 < float(expected)
        return _unexpected(
            "manifest.power-limit",
            node.gpu_component(gpu),
            f"{called(gpu)} power limit {limit_mw / 1000:.0f} W, the manifest expects "
            f"{expected:g} W",
            shown(
                "nvmlDeviceGetEnforcedPowerLimit",
                limit_mw,
                smi(gpu, "-q -d POWER"),
                unit="mW",
                expected=(round(float(expected) * 1000), Basis.MANIFEST),
            ),
            impact=JobImpact.SLOWS if lower else JobImpact.NONE,
            text=f"`nvidia-smi -pl {expected:g} -i {gpu.pci or gpu.index}` (as root).",
        )

    yield from _each(node, "gpu_power_limit_w", judge)


@probe("manifest.vbios-version", needs=("nvml",))
def vbios_version(node: Node) -> Statements:
    """A GPU's VBIOS is not the one that the manifest expects.

    It can bring other power and clock tables, or bugs that the fleet has left behind.

    No fault: nothing is broken; letter case aside.

    Sure: proven.

    Do: update the firmware at the next maintenance, or change the manifest.
    """

    def judge(gpu: Gpu, expected: Scalar) -> Statement:
        if gpu.vbios_version is None:
            return missing(gpu, "vbios_version", not_for_vgpu(gpu))
        if gpu.vbios_version.lower() == str(expected).lower():
            return Clear(node.gpu_component(gpu))
        return _unexpected(
            "manifest.vbios-version",
            node.gpu_component(gpu),
            f"{called(gpu)} VBIOS {gpu.vbios_version}, the manifest expects {expected}",
            shown(
                "nvmlDeviceGetVbiosVersion",
                gpu.vbios_version,
                smi(gpu, "--query-gpu=vbios_version --format=csv"),
                expected=(expected, Basis.MANIFEST),
            ),
            text="Update the firmware at the next maintenance, or change the manifest.",
        )

    yield from _each(node, "vbios_version", judge)


@probe("manifest.nvlink-count", needs=("nvml",))
def nvlink_count(node: Node) -> Statements:
    """A GPU has fewer NVLinks on than the manifest expects.

    Traffic between GPUs has fewer links, and the collective waits for the slowest pair.

    No fault: links asleep count as on; MIG has NVLink off.

    Sure: proven. nvlink.down says which link, where siblings have it.

    Do: as for nvlink.down.
    """

    def judge(gpu: Gpu, expected: Scalar) -> Statement:
        if gpu.nvlinks is None or no_nvlink(gpu):
            return missing(gpu, "nvlinks", no_nvlink(gpu))
        on = sum(1 for link in gpu.nvlinks if link.state in (1, 2))
        unknown = sum(1 for link in gpu.nvlinks if link.state is None)
        if on >= int(expected):
            return Clear(node.gpu_component(gpu))
        if on + unknown >= int(expected):
            return Unread("nvml", "nvlinks", gpu.key)
        return _unexpected(
            "manifest.nvlink-count",
            node.gpu_component(gpu),
            f"{called(gpu)} has {on} NVLinks on, the manifest expects {expected}",
            shown(
                "NVML_FI_DEV_NVLINK_GET_STATE",
                on,
                smi(gpu, "nvlink -s"),
                unit="links on",
                expected=(expected, Basis.MANIFEST),
            ),
            impact=JobImpact.SLOWS,
            fault_class=FaultClass.HARDWARE,
            text="Read the Xid and SXid lines of the link, reset GPUs and fabric manager, reseat.",
        )

    yield from _each(node, "nvlink_count", judge)


@probe("manifest.driver-version", needs=("nvml",))
def driver_version(node: Node) -> Statements:
    """The driver is not the version that the manifest expects.

    Another driver can mean other NCCL behaviour, other defects, and a job that fails on this
    node alone.

    No fault: the manifest may name the beginning of the version only (580 or 580.95).

    Sure: proven.

    Do: install the expected driver, or change the manifest.
    """
    expected = _expected(node, "driver_version")
    nvml = node.snapshot.nvml
    found = nvml.driver_version if nvml is not None else None
    if expected is None:
        yield NotApplicable(_NOTHING_SET)
    elif found is None:
        yield Unread("nvml", "driver_version")
    elif f"{found}.".startswith(f"{expected}."):
        yield Clear(node.host_component())
    else:
        yield _unexpected(
            "manifest.driver-version",
            node.host_component(),
            f"Driver {found}, the manifest expects {expected}",
            shown(
                "nvmlSystemGetDriverVersion",
                found,
                "cat /proc/driver/nvidia/version",
                expected=(expected, Basis.MANIFEST),
            ),
            text="Install the expected driver, or change the manifest.",
        )


def _each(node: Node, key: str, judge: Callable[[Gpu, Scalar], Statement]) -> Statements:
    """What ``judge`` says of each live GPU, when the manifest has the key."""
    expected = _expected(node, key)
    if expected is None:
        yield NotApplicable(_NOTHING_SET)
        return
    for gpu in node.live_gpus:
        yield judge(gpu, expected)
