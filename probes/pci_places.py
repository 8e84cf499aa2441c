"""Where a PCIe link is judged: the link, the GPU on it, and what it is expected to run at."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from probes.finding import Basis, Component, Confidence, JobImpact, Severity
from probes.gap import GapReason
from probes.gpu_facts import called, smi
from probes.pci_links import (
    Link,
    bandwidth_gbps,
    gpu_of,
    is_off_bus,
    link_words,
    links,
    not_by_pcie,
    nvml_speeds,
    nvml_widths,
    port_rate_gbps,
    sharers_words,
)
from probes.registry import NotApplicable, Statement, Unread
from probes.snapshot.gpu import Gpu
from probes.view import Node


class Place(msgspec.Struct, frozen=True):
    """A link of sysfs, a GPU of NVML, or both where it is the same."""

    component: Component
    link: Link | None = None
    gpu: Gpu | None = None
    words: str = ""
    shared: str = ""  # who else uses a switch's uplink

    @property
    def widths(self) -> tuple[int, ...]:
        """Lanes in use by reading, from sysfs, else from NVML."""
        return (self.link.widths if self.link else ()) or nvml_widths(self.gpu)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed in use by reading, from sysfs, else from NVML."""
        return (self.link.speeds if self.link else ()) or nvml_speeds(self.gpu)

    def unread(self, field: str, nvml_field: str, reason: GapReason | None = None) -> Unread:
        """The reading is missing: of sysfs where the link is seen there."""
        if self.link is not None:
            return Unread("pci", field, self.link.lower.address, reason)
        return Unread("nvml", nvml_field, self.gpu.key if self.gpu else None, reason)

    def recheck(self) -> str:
        """The command that shows what NVML says of width, generation and load."""
        arguments = (
            "--query-gpu=pcie.link.width.current,pcie.link.width.max,pcie.link.gen.current,"
            "pcie.link.gen.max,utilization.gpu --format=csv"
        )
        return smi(self.gpu, arguments) if self.gpu else ""


class Expected(msgspec.Struct, frozen=True):
    """What a link should run at, on what ground, in words, and how sure that is."""

    value: float
    basis: Basis
    words: str
    confidence: Confidence


def places(node: Node) -> tuple[Place, ...]:
    """Every link of sysfs, then the live GPUs without one (container, WSL)."""
    return node.memo("pci places", lambda n: tuple(_places(n)))


def _places(node: Node) -> Iterator[Place]:
    for link in links(node):
        yield Place(
            component=node.pci_component(link.lower),
            link=link,
            gpu=gpu_of(node, link),
            words=link_words(node, link),
            shared=sharers_words(node, link),
        )
    for gpu in node.live_gpus:
        if gpu.pci not in node.pci_by_address:
            yield Place(component=node.gpu_component(gpu), gpu=gpu, words=f"{called(gpu)}: link")


def nothing_to_judge(node: Node) -> Statement | None:
    """Said when neither sysfs nor NVML could be read."""
    if node.snapshot.pci is None and node.snapshot.nvml is None:
        return Unread("pci", "devices")
    return None


def excused(place: Place) -> Statement | None:
    """Why a place is not judged at all: the part, or that it no longer answers."""
    if place.gpu is not None and (why := not_by_pcie(place.gpu)):
        return NotApplicable(why)
    if place.link is not None and is_off_bus(place.link.lower):
        return place.unread("current_link_width_lanes", "", GapReason.ABSENT)
    return None


class Cost(msgspec.Struct, frozen=True):
    """How much a worse link matters."""

    severity: Severity
    job_impact: JobImpact


def cost_of(node: Node, place: Place) -> Cost:
    """Info only for an adapter whose ports are slower than even this link; else it slows."""
    link = place.link
    if link is not None and not link.is_uplink and link.lower.is_nic:
        rate = port_rate_gbps(node, link.lower)
        left = bandwidth_gbps(min(link.speeds, default=None), min(link.widths, default=None))
        if rate is not None and left is not None and left >= rate:
            return Cost(Severity.INFO, JobImpact.NONE)
    return Cost(Severity.WARNING, JobImpact.SLOWS)


def basis_of(own: float | None, limit: float) -> Basis:
    """Whose maximum is the smaller one: the device's, or the slot's."""
    return Basis.DEVICE_MAX if own is not None and own <= limit else Basis.SLOT_MAX
