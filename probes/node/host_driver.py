"""The driver around the GPUs: versions that don't match, devices refused, peer memory."""

from __future__ import annotations

import re

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
from probes.gap import GapReason
from probes.gpu_facts import not_for_vgpu
from probes.host_facts import NO_GPU, evidence, facts, gpu_count, rdma_ports
from probes.registry import Clear, NotApplicable, Statements, Unread, probe
from probes.view import Node

# nvml.h
_LIBRARY_NOT_FOUND = 12
_LIB_RM_VERSION_MISMATCH = 18

_CONTROL = "/dev/nvidiactl"  # NVML and CUDA open it first
_UVM = "/dev/nvidia-uvm"  # CUDA opens it, NVML does not
_REFUSALS = ("EPERM", "EACCES")

_PEER_MODULES = frozenset({"nvidia_peermem", "nv_peer_mem"})


@probe("host.driver-version-mismatch", needs=("host",))
def driver_version_mismatch(node: Node) -> Statements:
    """The driver in the kernel and its library on disk are of different versions.

    The packages were upgraded without a reboot. Programs that run keep what they have loaded; every
    new one fails to initialise ("Driver/library version mismatch", CUDA error 803), so a job that
    starts or restarts here dies at once.

    No fault: another library somewhere on disk while NVML works with the driver: they fit, by
    proof. In a container the library comes from the host; an image that brings its own is wrong
    there, and that is this finding too.

    Sure: proven when NVML says so; likely when only the versions on disk say so.

    Do: drain the node, then reboot it, or unload all nvidia modules and load them again.
    """
    section, host = facts(node), node.host_component()
    driver, nvml = section.driver, node.snapshot.nvml
    refused = nvml is not None and nvml.init_error_code == _LIB_RM_VERSION_MISMATCH
    if nvml is not None and not nvml.init_error:
        yield Clear(host) if nvml.gpus or driver.module_version else NO_GPU
        return
    module, libraries = driver.module_version, driver.library_versions
    if not refused:
        if module is None:
            loaded = any(entry.name == "nvidia" for entry in section.modules or ())
            yield (
                Unread("host", "module_version")
                if loaded
                else NotApplicable("no NVIDIA kernel module is loaded")
            )
            return
        if not libraries:
            yield NotApplicable("no libnvidia-ml with a version in its name is on the usual paths")
            return
        if module in libraries:
            yield Clear(host)
            return
    library = "/".join(libraries) or (nvml.nvml_version if nvml else None)
    proofs = [
        evidence("/proc/driver/nvidia/version", module, "head -1 /proc/driver/nvidia/version"),
        *(
            evidence(
                path,
                version,
                f"readlink -f {path.rsplit('/', 1)[0]}/libnvidia-ml.so.1",
                expected=(module, Basis.VENDOR_LIMIT) if module and module != version else None,
                source="file",
            )
            for path, version in zip(driver.library_paths, libraries, strict=False)
        ),
    ]
    if refused and nvml is not None:
        proofs.insert(
            0,
            Evidence(
                source="nvml",
                locator="nvmlInit_v2",
                observed=nvml.init_error,
                quote=nvml.init_detail[:300] if nvml.init_detail else None,
                recheck="nvidia-smi",
            ),
        )
    yield Finding(
        id="host.driver-version-mismatch",
        severity=Severity.CRITICAL,
        confidence=Confidence.PROVEN if refused else Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary=f"kernel module is {module or 'of another version'}, "
        + (
            "NVML says its library is of another version (the one on disk is of the same)"
            if module in libraries
            else f"library on disk is {library or 'of another version'}"
        )
        + ": new processes can't use the GPUs",
        evidence=tuple(proofs),
        explains=("nvml.init-failed", "kernel.nvrm", "host.fabric-manager"),
        remedy=Remedy(
            action=Action.REBOOT,
            text="Drain the node, then reboot it, or unload all nvidia modules and load them "
            "again. What runs now may end first.",
            disruptive=True,
        ),
    )


@probe("host.device-access", needs=("host",))
def device_access(node: Node) -> Statements:
    """This container or user may not open the GPU's device files, although they are there.

    A container loses them when systemd reloads its units (`systemctl daemon-reload`, an unattended
    upgrade) and the devices were not declared to the runtime. Processes that have the GPUs open
    keep them and go on; every new one, this check too, sees no GPU ("Failed to initialize NVML:
    Unknown Error"). It is the container, not the GPU: no reboot is needed.

    No fault: some of the GPUs refused while the control device is allowed: then only part of the
    GPUs belongs to this container. (/dev/nvidia-uvm refused alone is a fault: NVML works without
    it, CUDA does not.) A container that was never given the driver's library only watches: info.

    Sure: proven: the kernel was asked with access(2), which consults the device cgroup and opens
    nothing. EPERM is the cgroup, EACCES the file's owner and mode.

    Do: don't reboot. Check the host from the host. When the job has ended, restart the container
    with its devices declared (CDI, or --device for each). For EACCES: the group of the files.
    """
    section, host = facts(node), node.host_component()
    nodes, nvml = section.driver.devices, node.snapshot.nvml
    if nodes is None:
        yield Unread("host", "devices")
        return
    gpus = gpu_count(node)
    by_path = {entry.path: entry for entry in nodes}
    control = by_path.get(_CONTROL)
    if control is None:
        # the driver's helper makes the files at first use, so their absence proves nothing
        yield NotApplicable(f"there is no {_CONTROL} here") if gpus else NO_GPU
        return
    refused = [entry for entry in nodes if entry.access_error in _REFUSALS]
    works = nvml is not None and not nvml.init_error
    main = by_path.get(_UVM, control) if works else control
    if main.access_error not in (None, *_REFUSALS):
        yield Unread("host", "devices", main.path, GapReason.NOT_COLLECTED)
        return
    if main not in refused or (works and control in refused):
        names = ", ".join(entry.path for entry in refused)
        yield Clear(host, f"not granted here: {names}" if names else None)
        return
    by_cgroup = main.access_error == "EPERM"
    watcher = nvml is None or nvml.init_error_code == _LIBRARY_NOT_FOUND
    who = "the device cgroup of the caller" if by_cgroup else "the mode of the file"
    seen = f"{gpus} GPUs are on this machine" if gpus else "the GPUs can't be counted here"
    yield Finding(
        id="host.device-access",
        severity=Severity.INFO if watcher else Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary=f"{who} refuses {main.path} ({main.access_error}), {seen}: "
        + ("container, not GPU" if by_cgroup else "permission, not GPU"),
        evidence=tuple(
            evidence(
                f"access {entry.path}",
                entry.access_error,
                f"test -r {entry.path} -a -w {entry.path}; echo $?; ls -l {entry.path}",
                source="access(2)",
            )
            for entry in sorted(refused, key=lambda entry: entry is not main)
        ),
        explains=("nvml.init-failed",),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Do not reboot: processes that hold the GPUs go on. Check the host from the host; "
            "when the job has ended, restart the container with its devices declared (CDI or "
            "--device): systemctl daemon-reload drops undeclared ones."
            if by_cgroup
            else f"ls -l {main.path}; add the user to its group, or run as one who may open it.",
            disruptive=False,
        ),
    )


@probe("host.persistence", needs=("host", "nvml"))
def persistence(node: Node) -> Statements:
    """The driver lets go of idle GPUs (persistence mode is off).

    When the last process closes a GPU the driver deinitialises it; the next one waits seconds for
    it to come up again, nvidia-smi too, and settings such as power limits are forgotten.

    No fault: only start-up latency, so it is info. A running nvidia-persistenced does the same as
    the mode; in containers and vGPU guests the host decides.

    Sure: proven.

    Do: `systemctl enable --now nvidia-persistenced`.
    """
    section, host = facts(node), node.host_component()
    if not node.live_gpus:
        yield NO_GPU
        return
    known = [
        gpu
        for gpu in node.live_gpus
        if gpu.persistence_mode is not None and not_for_vgpu(gpu) is None
    ]
    if not known and all(not_for_vgpu(gpu) for gpu in node.live_gpus):
        yield NotApplicable("vGPU guest: the host keeps the GPU up")
        return
    if not known:
        yield Unread("nvml", "persistence_mode")
        return
    off = [gpu for gpu in known if not gpu.persistence_mode]
    if not off:
        yield Clear(host)
        return
    if any(s.name == "nvidia-persistenced" and s.running for s in section.driver.services):
        yield Clear(host, "nvidia-persistenced is running, which keeps the GPUs up")
        return
    if node.snapshot.container:
        yield Clear(host, "persistence mode is off: start-up latency only, and the host decides")
        return
    yield Finding(
        id="host.persistence",
        severity=Severity.INFO,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary=f"persistence mode is off on {len(off)} of {len(known)} GPUs: the first call "
        "after a pause waits for them",
        evidence=(
            Evidence(
                source="nvml",
                locator="nvmlDeviceGetPersistenceMode",
                observed="off",
                recheck="nvidia-smi --query-gpu=index,persistence_mode --format=csv",
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="systemctl enable --now nvidia-persistenced",
            disruptive=False,
        ),
    )


@probe("host.peermem-missing", needs=("host",))
def peermem_missing(node: Node) -> Statements:
    """Neither dma-buf nor peer memory: the network adapter can't reach GPU memory.

    Without GPUDirect RDMA every byte between nodes is copied through host memory: NCCL says "GPU
    Direct RDMA Disabled", bandwidth drops, and the CPU's memory bus fills.

    No fault: nvidia_peermem not loaded where dma-buf replaces it (Linux 5.12 or newer with the open
    kernel module). Machines without a GPU, or without an active RDMA port. An active port that only
    does RoCE may be there for something else: info.

    Sure: likely: what is loaded is proven, whether jobs here use the port is not.

    Do: `modprobe nvidia_peermem`, after the RDMA drivers; or install the open kernel module. Then
    look for "GPU Direct RDMA Enabled" in the NCCL log.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    if node.snapshot.nics is None:
        yield Unread("nics", "ports")
        return
    ports = rdma_ports(node)
    if not ports:
        yield NotApplicable("no RDMA port is active")
        return
    modules = section.modules
    if modules is None:
        yield Unread("host", "modules")
        return
    loaded = [entry.name for entry in modules if entry.name in _PEER_MODULES]
    if loaded or section.driver.peer_memory_clients:
        yield Clear(host)
        return
    if not any(entry.name == "nvidia" for entry in modules):
        yield NotApplicable("no NVIDIA kernel module is loaded")
        return
    kernel, flavor = node.snapshot.kernel_release, section.driver.module_flavor
    recent = _at_least(kernel, 5, 12)
    if recent is None or flavor is None:
        yield Unread("host", "module_flavor" if flavor is None else "kernel_release")
        return
    if recent and flavor == "open":
        yield Clear(host, "nvidia_peermem is not loaded: dma-buf replaces it (open module)")
        return
    infiniband = [port for port in ports if port.link_layer == "InfiniBand"]
    why = f"kernel {kernel}" if not recent else f"{flavor} module"
    yield Finding(
        id="host.peermem-missing",
        severity=Severity.WARNING if infiniband else Severity.INFO,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS if infiniband else JobImpact.NONE,
        component=host,
        summary=f"no GPUDirect RDMA: nvidia_peermem is not loaded and dma-buf is not to be had "
        f"({why}), {len(ports)} RDMA ports are active",
        evidence=(
            evidence(
                "/proc/modules", "nvidia_peermem absent", "lsmod | grep -e peermem -e peer_mem"
            ),
            evidence(
                "/proc/driver/nvidia/version",
                flavor,
                "head -1 /proc/driver/nvidia/version; uname -r",
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text='modprobe nvidia_peermem (after the RDMA drivers), then look for "GPU Direct RDMA '
            'Enabled" in the NCCL log; or install the open kernel module.',
            disruptive=False,
        ),
    )


def _at_least(release: str | None, major: int, minor: int) -> bool | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", release or "", re.ASCII)
    return (int(match[1]), int(match[2])) >= (major, minor) if match else None
