"""Fabric manager: the service without which NVSwitch GPUs can't work together."""

from __future__ import annotations

from collections.abc import Sequence

from probes.finding import (
    Action,
    Basis,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.host_facts import NO_GPU, evidence, facts, gpu_count
from probes.registry import Clear, NotApplicable, Statements, Unread, probe
from probes.snapshot.gpu import Gpu
from probes.snapshot.host import Service
from probes.view import Node

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_NOT_SUPPORTED = 0
_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_NAME = "nvidia-fabricmanager"


def _rack_scale(gpu: Gpu) -> bool:
    """Whether the GPU's NVLink switches stand in other trays, with their own fabric manager.

    Such GPUs carry the UUID of a cluster; inside one HGX board it is all zeros.
    """
    uuid = gpu.fabric.cluster_uuid if gpu.fabric else None
    return bool(gpu.c2c_enabled) or bool(uuid and uuid.strip("0-"))


def _leads_to_switch(gpu: Gpu) -> bool:
    return any(link.remote_type == _REMOTE_SWITCH for link in gpu.nvlinks or ())


@probe("host.fabric-manager", needs=("host",))
def fabric_manager(node: Node) -> Statements:
    """The fabric manager of an NVSwitch node does not run, or is of another version.

    It programs the NVSwitches. Until it has, CUDA does not initialise at all on such a machine
    (error 802, system not yet initialized). It refuses to start with a driver of another version,
    which is what an upgrade of one of the two packages leads to.

    No fault: machines without NVSwitch (one GPU, PCIe cards, bridges); racks whose switches stand
    in trays of their own (GB200: no local fabric manager); guests whose host runs it; fabric state
    "not supported", or "not started" where no NVLink leads to a switch.

    Sure: proven when all processes are seen or the GPUs say that they wait. If every GPU says
    "completed" it did run: then its absence is a warning, because it may end running jobs when it
    goes, and nobody watches the switches.

    Do: `systemctl status nvidia-fabricmanager`, `journalctl -u nvidia-fabricmanager -b`; install
    the version of the driver, then start it.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    pci = node.snapshot.pci
    switches = [d for d in pci.devices if d.is_nvswitch and d.driver != "vfio-pci"] if pci else []
    states = [
        gpu.fabric.state
        for gpu in node.live_gpus
        if gpu.fabric and gpu.fabric.state not in (None, _NOT_SUPPORTED)
    ]
    if not switches:
        if any(_rack_scale(gpu) for gpu in node.live_gpus):
            yield NotApplicable(
                "the NVLink switches of this rack have a fabric manager of their own"
            )
            return
        if node.snapshot.virtualization:
            yield NotApplicable("a guest without NVSwitch: the host runs the fabric manager")
            return
        if not (_COMPLETED in states or any(_leads_to_switch(gpu) for gpu in node.live_gpus)):
            yield NotApplicable("nothing says that there is an NVSwitch here")
            return
    service = next((entry for entry in section.driver.services if entry.name == _NAME), None)
    refused = sum(bool(gpu.fabric and gpu.fabric.status) for gpu in node.live_gpus)
    registered = bool(states) and not refused and all(state == _COMPLETED for state in states)
    driver = section.driver.module_version
    running = service.running if service else None
    version = service.version if service else None
    differs = version is not None and driver is not None and version != driver
    if running and not differs:
        yield Clear(host)
        return
    if running is None:
        if registered:
            yield Clear(host, "the service can't be seen from here; every GPU is registered")
        else:
            yield Unread("host", "services")
        return
    at_risk = registered or running
    if running:
        summary = f"fabric manager {version} is installed for driver {driver}: it won't start again"
    else:
        summary = (
            f"fabric manager does not run, {_hardware(len(switches), states, registered, refused)}"
        )
        if differs:
            summary += f"; installed is {version}, the driver is {driver}"
    yield Finding(
        id="host.fabric-manager",
        severity=Severity.WARNING if at_risk else Severity.CRITICAL,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION if differs else FaultClass.SOFTWARE,
        job_impact=JobImpact.NONE if at_risk else JobImpact.BREAKS,
        component=host,
        summary=summary,
        evidence=_proofs(service, version, driver, states),
        explains=("fabric.state", "nvml.init-failed"),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text=f"Install fabric manager {driver} (the driver's version), then restart it."
            if differs
            else "journalctl -u nvidia-fabricmanager -b says why; then systemctl start it.",
            disruptive=True,
        ),
    )


def _hardware(switches: int, states: Sequence[int | None], registered: bool, refused: int) -> str:
    if registered:
        return "the GPUs are still registered from before"
    if states:
        waiting = sum(state != _COMPLETED for state in states)
        if refused and not waiting:
            return f"{refused} of {len(states)} GPUs could not register with it"
        return f"{waiting} of {len(states)} GPUs wait for it"
    return f"{switches} NVSwitches are here"


def _proofs(
    service: Service | None, version: str | None, driver: str | None, states: Sequence[int | None]
) -> tuple[Evidence, ...]:
    proofs = []
    if service is not None:
        proofs.append(
            evidence(
                service.seen_in or "/proc/*/comm",
                "running" if service.running else "not running",
                "systemctl status nvidia-fabricmanager; pgrep -a nv-fabricmanage",
            )
        )
    if version is not None and driver is not None:
        proofs.append(
            evidence(
                "nv-fabricmanager --version",
                version,
                "nv-fabricmanager --version; head -1 /proc/driver/nvidia/version",
                expected=(driver, Basis.VENDOR_LIMIT),
                source="program",
            )
        )
    if states:
        proofs.append(
            Evidence(
                source="nvml",
                locator="nvmlDeviceGetGpuFabricInfoV state",
                observed=", ".join(str(state) for state in states),
                recheck="nvidia-smi -q | grep -A 4 Fabric",
            )
        )
    return tuple(proofs)
