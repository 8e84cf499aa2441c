"""Devices that no longer answer on the PCIe bus."""

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
from probes.pci_links import device_words, off_bus_above, pci_gpus
from probes.registry import Clear, NotApplicable, Statement, Statements, Unread, probe
from probes.snapshot.pci import PciDevice
from probes.view import Node

_MAX_EVIDENCE = 8
_EXPLAINED_BY_SILENCE = (
    "gpu.missing",
    "gpu.lost",
    "gpu.hung",
    "gpu.not-usable",
    "manifest.gpu-count",
    "nvlink.down",
    "manifest.pcie-generation",
    "manifest.pcie-width",
    "pcie.aer-correctable-rate",
    "pcie.aer-uncorrectable",
    "pcie.peer-differs",
    "pcie.replay-growth",
    "pcie.speed-trained-down",
    "pcie.width-trained-down",
)


@probe("gpu.off-bus", needs=("pci",))
def off_bus(node: Node) -> Statements:
    """A GPU has fallen off the PCIe bus: every read of it gives ones.

    The device no longer answers at all (lspci: "rev ff", header type 7f; link width 63). What it
    seems to report are not readings. Every process that uses it fails or hangs, and a collective
    waits for it for ever. The kernel log usually has Xid 79 for it.

    No fault: a GPU that is switched off on purpose (power state D3cold reads alike); a virtual
    function, whose id registers read as ones by specification.

    Sure: proven when its configuration space reads as ones, likely when only its link status does.
    When a switch or port above it is silent too, that one is accused: all behind it are cut off.

    Do: drain the node and power-cycle it (a reboot may not bring it back). If it falls off again:
    power cables, seating, heat; then replace the board.
    """
    gpus = pci_gpus(node)
    if not gpus:
        yield NotApplicable("no NVIDIA GPU on the PCI bus")
        return
    answering = sum(off_bus_above(node, device) is None for device in gpus)
    others = f"{answering} other GPUs answer" if answering != 1 else "1 other GPU answers"
    yield from _judge(node, gpus, off_bus.id, f"; {others}")


@probe("pcie.off-bus", needs=("pci",))
def device_off_bus(node: Node) -> Statements:
    """A network adapter or an NVSwitch has fallen off the PCIe bus: reads of it give ones.

    Nothing that it seems to report is a reading. Without the adapter its GPUs take a longer way or
    a rail is lost; without an NVSwitch the NVLink fabric is down.

    No fault: a device switched off on purpose (D3cold), a virtual function.

    Sure: proven when its configuration space reads as ones, likely when only its link status does.

    Do: drain and power-cycle; check seating, cable and power; replace.
    """
    devices = [
        device
        for device in node.pci_by_address.values()
        if (device.is_nic or device.is_nvswitch) and not device.is_virtual_function
    ]
    if not devices:
        yield NotApplicable("no network adapter and no NVSwitch on the PCI bus")
    yield from _judge(node, devices, device_off_bus.id, "")


def _judge(node: Node, devices: list[PciDevice], id: str, others: str) -> Statements:
    cut_off: dict[str, list[PciDevice]] = {}  # by what is silent: the device or what is above it
    for device in devices:
        if (silent := off_bus_above(node, device)) is not None:
            cut_off.setdefault(silent.address, []).append(device)
        else:
            yield _answers(node, device)
    for address, behind in cut_off.items():
        yield _finding(node, node.pci_by_address[address], behind, id, others)


def _answers(node: Node, device: PciDevice) -> Statement:
    newest = device.readings[-1] if device.readings else None
    if newest is None or (newest.config_all_ones, newest.link_status_all_ones) == (None, None):
        return Unread("pci", "config_all_ones", device.address)
    asleep = device.power_state == "D3cold"
    return Clear(node.pci_component(device), "switched off (D3cold)" if asleep else None)


def _finding(
    node: Node, silent: PciDevice, behind: list[PciDevice], id: str, others: str
) -> Finding:
    device = behind[0]
    newest = device.readings[-1] if device.readings else None
    by_config = newest is not None and bool(newest.config_all_ones)
    space = "configuration space" if by_config else "link status"
    if silent is device:
        what = f"its {space} reads as ones"
    else:
        names = [device_words(node, lost) for lost in behind]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        what = f"its link and the {space} of {', '.join(names[:2])}{more} behind it read as ones"
    name = "config" if by_config else "current_link_width"
    return Finding(
        id=id,
        severity=Severity.CRITICAL,
        confidence=Confidence.PROVEN if by_config else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS,
        component=node.pci_component(silent),
        summary=f"{device_words(node, silent)} has fallen off the bus: {what}{others}",
        evidence=tuple(
            Evidence(
                source="sysfs",
                locator=f"/sys/bus/pci/devices/{lost.address}/{name}",
                observed="all ones (no answer)",
                recheck=f"lspci -s {lost.address}  # rev ff; "
                f"xxd -l 16 /sys/bus/pci/devices/{lost.address}/config",
            )
            for lost in (behind if silent is device else (*behind, silent))[:_MAX_EVIDENCE]
        ),
        explains=_EXPLAINED_BY_SILENCE
        if silent is device
        else (*_EXPLAINED_BY_SILENCE, "xid.off-bus", *({off_bus.id, "pcie.off-bus"} - {id})),
        remedy=Remedy(
            action=Action.DRAIN,
            text="Drain the node and power-cycle it. If the device falls off again, check its "
            "power cables and seating, then have the board replaced.",
            disruptive=True,
        ),
    )
