"""GPUs that are there and can't be used: not listed by NVML, without a driver."""

from __future__ import annotations

from collections.abc import Iterator

from probes.finding import (
    Action,
    Basis,
    Component,
    Confidence,
    Evidence,
    Expectation,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.pci_links import is_unknown, pci_gpus, sysfs
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.pci import PciDevice
from probes.view import Node

_HIDDEN = (GpuState.NO_PERMISSION,)
# Drivers that hand a GPU to a guest or to another program on purpose.
_PASSTHROUGH = ("vfio-pci", "pci-stub", "xen-pciback", "nvgrace_gpu_vfio_pci", "nvidia-vgpu-vfio")


@probe("gpu.missing", needs=("pci",))
def missing(node: Node) -> Statements:
    """A GPU is on the PCI bus with the NVIDIA driver bound, and NVML does not list it.

    A job that counts on it fails at start, or runs with one rank less. NVML leaves a GPU out when
    the driver could not bring it up (power, memory, a failed reset), or gives no handle for it
    and then not even its address: the PCI bus tells which one it is. A GPU that left the bus is
    noticed by the last run of this boot, or by the manifest's gpu_count where NVML says nothing
    (else manifest.gpu-count does).

    No fault: a GPU bound to vfio-pci or to nothing; GPUs that a container or its device
    permissions hide from this process; virtual functions; GPUs that NVML sees without a PCI
    device (container, WSL). A GPU drained with `nvidia-smi drain` is left out by NVML on purpose.

    Sure: likely; proven when NVML itself says that it has a GPU it cannot open.

    Do: kernel log for the address (NVRM: RmInitAdapter failed, Xid), `nvidia-smi drain -q`; drain,
    reset or power-cycle; replace when it stays away.
    """
    yield from _unlisted(node)
    yield from _count(node)


def _unlisted(node: Node) -> Iterator[Statement]:
    nvml = node.snapshot.nvml
    listed = {gpu.pci for gpu in node.gpus}  # also where the bus tells the address
    bound = [device for device in pci_gpus(node) if device.driver == "nvidia"]
    for gpu in node.gpus:
        if gpu.pci is not None and gpu.pci not in node.pci_by_address:
            yield NotApplicable(f"NVML sees {gpu.pci} without a PCI device (container, WSL)")
    for device in pci_gpus(node):
        if device.driver in _PASSTHROUGH:
            yield NotApplicable(f"{device.address} is handed to {device.driver} on purpose")
        elif device.driver is None and is_unknown(node, "driver", device.address):
            yield Unread("pci", "driver", device.address)
    if nvml is None or nvml.init_error is not None:
        for device in bound:
            yield Unread("nvml", "gpus", device.address)
        return
    nameless = [gpu for gpu in node.gpus if gpu.pci is None]
    hidden = sum(gpu.state in _HIDDEN for gpu in nameless)
    unlisted = [device for device in bound if device.address not in listed]
    for device in bound:
        component = node.pci_component(device)
        if device.address in listed:
            yield Clear(component)
        elif node.snapshot.container is not None:
            yield Clear(component, "not granted to this container")
        elif hidden >= len(unlisted):
            yield Clear(component, "hidden from this user by device permissions")
        else:
            failed = [gpu for gpu in nameless if gpu.state not in _HIDDEN]
            yield _missing_finding(node, device, failed, len(bound))


def _missing_finding(node: Node, device: PciDevice, failed: list[Gpu], bound: int) -> Finding:
    listed = sum(gpu.pci is not None for gpu in node.gpus)
    answers = sorted({gpu.state_detail or gpu.state.value for gpu in failed})
    said = ", ".join(answers) or None
    why = f"; NVML has {len(failed)} without an address: {said}" if said else ""
    return Finding(
        id=missing.id,
        severity=Severity.CRITICAL,
        confidence=Confidence.PROVEN if said else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS,
        component=node.pci_component(device),
        summary=f"GPU {device.address} is on the PCI bus with the nvidia driver, NVML lists "
        f"{listed} of {bound}, not this one{why}"[:200],
        evidence=(
            sysfs(device, "driver", "nvidia"),
            Evidence(
                source="nvml",
                locator="nvmlDeviceGetCount_v2",
                observed=listed,
                unit="GPUs with an address",
                quote=said,
                recheck="nvidia-smi -L; nvidia-smi drain -q",
            ),
        ),
        explains=("gpu.lost", "gpu.not-usable", "manifest.gpu-count"),
        remedy=Remedy(
            action=Action.DRAIN,
            text=f"Drain the node; `journalctl -k | grep -i -e NVRM -e {device.address}` says why "
            "the driver does not have it. Reset the GPU or power-cycle; replace it when it stays "
            "away.",
            disruptive=True,
        ),
    )


def _count(node: Node) -> Iterator[Statement]:
    """The manifest's number where NVML says nothing, else the GPUs of the last run."""
    nvml, manifest = node.snapshot.nvml, node.snapshot.manifest
    if node.snapshot.container is not None:
        return  # it may have been given some of the node's GPUs only
    if nvml is not None and nvml.init_error is None:
        yield from _since_last_run(node)
    elif manifest is not None and manifest.gpu_count is not None:
        on_bus, wanted = len(pci_gpus(node)), manifest.gpu_count
        if on_bus >= wanted:
            yield Clear(node.host_component(), f"all {wanted} are on the bus")
        else:
            yield _host_finding(
                node.host_component(),
                f"{on_bus} GPUs are on the PCI bus, the manifest expects {wanted}",
                _counted(on_bus, wanted, Basis.MANIFEST),
                Confidence.PROVEN,
            )


def _since_last_run(node: Node) -> Iterator[Statement]:
    last = node.snapshot.baseline
    now = {gpu.uuid for gpu in node.gpus}
    # a GPU that NVML lists without a name is another rule's
    if last is None or last.boot_id != node.snapshot.boot_id or None in now:
        return
    gone = [known.key for known in last.sets if known.kind == "gpu" and known.key not in now]
    passed_on = sum(device.driver != "nvidia" for device in pci_gpus(node))
    if len(gone) > passed_on:
        yield _host_finding(
            node.host_component(),
            f"NVML lists {len(now)} GPUs; the last run of this boot also saw {gone[0]}",
            _counted(len(now), len(now) + len(gone), Basis.OWN_BASELINE),
            Confidence.LIKELY,
        )


def _counted(observed: int, expected: int, basis: Basis) -> Evidence:
    return Evidence(
        source="nvml" if basis is Basis.OWN_BASELINE else "sysfs",
        locator="nvmlDeviceGetCount_v2" if basis is Basis.OWN_BASELINE else "/sys/bus/pci/devices",
        observed=observed,
        unit="GPUs",
        expected=Expectation(value=expected, basis=basis),
        recheck="lspci -d 10de: | grep -c -i -e '3D controller' -e VGA; nvidia-smi -L",
    )


def _host_finding(
    host: Component, summary: str, proof: Evidence, confidence: Confidence
) -> Finding:
    return Finding(
        id=missing.id,
        severity=Severity.CRITICAL,
        confidence=confidence,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS,
        component=host,
        summary=summary,
        evidence=(proof,),
        remedy=Remedy(
            action=Action.DRAIN,
            text="Drain the node and power-cycle it; if a GPU is still not on the bus, check power "
            "and seating of the slot that lspci leaves out. Or correct the manifest.",
            disruptive=True,
        ),
    )


@probe("gpu.no-driver", needs=("pci",))
def no_driver(node: Node) -> Statements:
    """NVIDIA GPUs are on the PCI bus and no NVIDIA driver is bound to them.

    No job can use them: the module is not loaded or was not built for this kernel (an upgrade of
    the kernel without a rebuild), or another driver (nouveau) took the GPU.

    No fault: GPUs handed to guests or other programs (vfio-pci, pci-stub); virtual functions.
    Inside a container the host's driver can't be judged.

    Proven: the kernel names the bound driver of each device. Critical when no GPU has the driver
    (then the host is named: it is its packages), a warning when some have it and some have not.

    Do: `modprobe nvidia; dmesg | tail`, `dkms status`, and the nouveau blacklist.
    """
    gpus = pci_gpus(node)
    if not gpus:
        yield NotApplicable("no NVIDIA GPU on the PCI bus")
        return
    if node.snapshot.container is not None:
        yield NotApplicable("inside a container the host's driver can't be judged")
        return
    served = any(device.driver == "nvidia" for device in gpus)
    bare = [device for device in gpus if device.driver in (None, "nouveau")]
    if len(bare) == len(gpus) > 1 and not any(
        is_unknown(node, "driver", device.address) for device in gpus
    ):
        yield _no_driver_finding(bare, node.host_component(), served)
        return
    for device in gpus:
        component = node.pci_component(device)
        if device.driver is None and is_unknown(node, "driver", device.address):
            yield Unread("pci", "driver", device.address)
        elif device.driver in _PASSTHROUGH:
            yield NotApplicable(f"{device.address} is handed to {device.driver} on purpose")
        elif device.driver is None or device.driver == "nouveau":
            yield _no_driver_finding([device], component, served)
        else:
            yield Clear(component)


def _no_driver_finding(bare: list[PciDevice], component: Component, served: bool) -> Finding:
    drivers = sorted({device.driver for device in bare if device.driver})
    has = f"the {drivers[0]} driver" if drivers else "no driver"
    who = f"GPU {bare[0].address} has" if len(bare) == 1 else f"all {len(bare)} GPUs have"
    return Finding(
        id=no_driver.id,
        severity=Severity.WARNING if served else Severity.CRITICAL,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.BREAKS,
        component=component,
        summary=f"{who} {has} bound, a job needs nvidia",
        evidence=tuple(
            Evidence(
                source="sysfs",
                locator=f"/sys/bus/pci/devices/{device.address}/driver",
                observed=device.driver or "none",
                recheck=f"lspci -k -s {device.address}",
            )
            for device in bare
        ),
        explains=("nvml.init-failed", "gpu.missing", "manifest.gpu-count"),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="modprobe nvidia and read what dmesg says; `dkms status` after a kernel upgrade; "
            "blacklist nouveau where it took the GPU.",
            disruptive=False,
        ),
    )
