"""Settings that send traffic between devices up to the processor: ACS redirection, the IOMMU."""

from __future__ import annotations

from probes.finding import (
    Action,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.pci_links import (
    gpu_at,
    is_unknown,
    not_by_pcie,
    ports_between,
    sysfs,
    unknown_chains,
)
from probes.registry import Clear, NotApplicable, Statements, Unread, probe
from probes.snapshot.pci import PciDevice
from probes.view import Node

# ACS control register (include/uapi/linux/pci_regs.h)
_REQUEST_REDIRECT = 0x04
_COMPLETION_REDIRECT = 0x08
_DIRECT_TRANSLATED = 0x40
_TRANSLATING = ("DMA", "DMA-FQ")


@probe("pcie.acs-redirect", needs=("pci",))
def acs_redirect(node: Node) -> Statements:
    """Access control on a PCIe switch sends traffic between two of its devices up to the root.

    With ACS request redirection a copy from GPU to GPU, or from GPU to network adapter
    (GPUDirect RDMA), does not turn around in the switch: it goes to the processor and back, which
    costs half the rate or more, and with some translations it hangs. NCCL reports neither.

    No fault: source validation alone; redirection in a virtual machine or on a host that hands
    GPUs to guests (vfio-pci), which need it for isolation; ports with one device only. Traffic
    that takes NVLink is not affected.

    Sure: likely: the register is exact, whether traffic crosses this switch depends on the job.
    Root only: other users may not read this part of the configuration space.

    Do: on bare metal switch ACS off in the firmware's setup, or clear the bits at boot (setpci on
    each port). It needs no IOMMU group isolation then.
    """
    if (why := _shielded(node)) is not None:
        yield NotApplicable(why)
        return
    yield from unknown_chains(node)
    between = ports_between(node.pci_by_address)
    if not between:
        yield NotApplicable("no PCIe switch with a GPU and another device on it")
    redirected: dict[str, list[PciDevice]] = {}
    for port in between:
        control = port.acs_control
        if control is None:
            yield Unread("pci", "acs_control", port.address)
        elif not control & (_REQUEST_REDIRECT | _COMPLETION_REDIRECT):
            note = f"ACS control 0x{control:02x} redirects nothing" if control else None
            yield Clear(node.pci_component(port), note)
        else:
            redirected.setdefault(port.parent or port.address, []).append(port)
    for switch, ports in redirected.items():
        yield _acs_finding(node, switch, ports)


def _shielded(node: Node) -> str | None:
    """Why isolation is wanted here."""
    if node.snapshot.virtualization is not None:
        return f"virtual machine ({node.snapshot.virtualization}): its hypervisor isolates devices"
    if any(
        device.driver == "vfio-pci" and (device.is_nvidia_gpu or device.is_nic)
        for device in node.pci_by_address.values()
    ):
        return "this host hands devices to guests (vfio-pci), which need the isolation"
    return None


def _acs_finding(node: Node, switch: str, ports: list[PciDevice]) -> Finding:
    direct = all((port.acs_control or 0) & _DIRECT_TRANSLATED for port in ports)
    names = ", ".join(port.address for port in ports[:2]) + (", …" if len(ports) > 2 else "")
    component = node.pci_component(node.pci_by_address.get(switch, ports[0]))
    return Finding(
        id=acs_redirect.id,
        severity=Severity.INFO if direct else Severity.WARNING,
        confidence=Confidence.POSSIBLE if direct else Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE if direct else JobImpact.SLOWS,
        component=component,
        summary=f"Switch {switch}: ACS redirects traffic between its devices to the root "
        f"on {len(ports)} port{'s' if len(ports) > 1 else ''} ({names})"
        + ("; translated requests go direct" if direct else ""),
        evidence=tuple(
            Evidence(
                source="sysfs",
                locator=f"/sys/bus/pci/devices/{port.address}/config (ACS control register)",
                observed=f"0x{port.acs_control or 0:04x}",
                recheck=f"sudo lspci -s {port.address} -vvv | grep ACSCtl",
            )
            for port in ports
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="On bare metal switch ACS off in the firmware's setup, or clear the redirect "
            "bits of these ports at boot (setpci -s PORT ECAP_ACS+6.w=0000); not where guests use "
            "the devices.",
            disruptive=True,
        ),
    )


@probe("pcie.iommu", needs=("pci",))
def iommu(node: Node) -> Statements:
    """The IOMMU translates the addresses of GPUs' and adapters' transfers.

    With translation each PCIe peer-to-peer transfer goes through the processor's IOMMU, and misses
    of its cache cost rate. Passthrough (iommu=pt) keeps the IOMMU for what needs it.

    No fault: an IOMMU that is off, or on in passthrough (group type identity); virtual machines;
    hosts that hand devices to guests; GPUs with C2C, whose platform wants it on.

    Info only: the mode is certain, what it costs depends on the traffic.

    Do: boot bare-metal hosts with iommu=pt (and intel_iommu=on or amd_iommu=on as before).
    """
    if (why := _shielded(node)) is not None:
        yield NotApplicable(why)
        return
    translated: list[PciDevice] = []
    for device in node.pci_by_address.values():
        if not device.is_nvidia_gpu or device.is_virtual_function:
            continue
        gpu = gpu_at(node, device.address)
        if gpu is not None and (by_design := not_by_pcie(gpu)):
            yield NotApplicable(by_design)
        elif device.iommu_group is None and is_unknown(node, "iommu_group", device.address):
            yield Unread("pci", "iommu_group", device.address)
        elif device.iommu_group is not None and device.iommu_group_type is None:
            yield Unread("pci", "iommu_group_type", device.address)
        elif device.iommu_group_type in _TRANSLATING:
            translated.append(device)
        else:
            yield Clear(node.pci_component(device))
    if translated:
        yield _iommu_finding(node, translated)


def _iommu_finding(node: Node, devices: list[PciDevice]) -> Finding:
    first = devices[0]
    count = f"{len(devices)} GPU{'s' if len(devices) > 1 else ''}"
    return Finding(
        id=iommu.id,
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=node.host_component(),
        summary=f"The IOMMU translates the transfers of {count} "
        f"(group type {first.iommu_group_type}, passthrough is identity)",
        evidence=(sysfs(first, "iommu_group/type", first.iommu_group_type),),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="On bare metal boot with iommu=pt where peer-to-peer copies are slow.",
            disruptive=True,
        ),
    )
