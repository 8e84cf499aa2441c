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

_EXPLAINED_BY_SILENCE = (
    "gpu.missing",
    "gpu.lost",
    "gpu.hung",
    "gpu.not-usable",
    "manifest.gpu-count",
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
    When a switch above it is silent too, that switch is named.

    Do: drain the node and power-cycle it (a reboot may not bring it back). If it falls off again:
    power cables, seating, heat; then replace the board.
    """
    gpus = pci_gpus(node)
    if not gpus:
        yield NotApplicable("no NVIDIA GPU on the PCI bus")
        return
    answering = sum(off_bus_above(node, device) is None for device in gpus)
    others = f"{answering} other GPUs answer" if answering != 1 else "1 other GPU answers"
    for device in gpus:
        yield _judge(node, device, off_bus.id, f"; {others}")


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
    for device in devices:
        yield _judge(node, device, device_off_bus.id, "")


def _judge(node: Node, device: PciDevice, id: str, others: str) -> Statement:
    silent = off_bus_above(node, device)
    newest = device.readings[-1] if device.readings else None
    if silent is not None:
        return _finding(node, device, silent, id, others)
    if newest is None or (newest.config_all_ones, newest.link_status_all_ones) == (None, None):
        return Unread("pci", "config_all_ones", device.address)
    asleep = device.power_state == "D3cold"
    return Clear(node.pci_component(device), "switched off (D3cold)" if asleep else None)


def _finding(node: Node, device: PciDevice, silent: PciDevice, id: str, others: str) -> Finding:
    newest = device.readings[-1] if device.readings else None
    by_config = newest is not None and bool(newest.config_all_ones)
    what = "its configuration space reads as ones" if by_config else "its link status reads as ones"
    if silent is not device:
        what += f", and so does {device_words(node, silent)} above it"
    name = "config" if by_config else "current_link_width"
    return Finding(
        id=id,
        severity=Severity.CRITICAL,
        confidence=Confidence.PROVEN if by_config else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS,
        component=node.pci_component(device),
        summary=f"{device_words(node, device)} has fallen off the bus: {what}{others}",
        evidence=(
            Evidence(
                source="sysfs",
                locator=f"/sys/bus/pci/devices/{device.address}/{name}",
                observed="all ones (no answer)",
                recheck=f"lspci -s {device.address} (rev ff), "
                f"xxd -l 16 /sys/bus/pci/devices/{device.address}/config",
            ),
        ),
        explains=_EXPLAINED_BY_SILENCE,
        remedy=Remedy(
            action=Action.DRAIN,
            text="Drain the node and power-cycle it. If the device falls off again, check its "
            "power cables and seating, then have the board replaced.",
            disruptive=True,
        ),
    )
