"""What the Xid lines of one boot amount to: epochs, incidents, by-products, application faults.

The rules: a driver load or a reset ends an epoch, and what is older is cured. Within an epoch the
lines of one GPU that stand within ten seconds of each other are one incident with one primary.
By-products (43, 45, and an application's fault on the same GPU) join an incident that is near in
time. What is left are applications, events without consequence, and unknown codes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from probes.finding import Component
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.kernel import KernelEvent
from probes.view import Node
from probes.xid_catalog import BY_PRODUCTS, Xid, XidClass, xid
from probes.xid_decode import Decoded, Reading, decode_74, decode_nvlink5, driver_branch

WINDOW_S = 10.0  # how near in time a by-product stands to its cause
OFF_BUS_WITHOUT_XID = 0  # the code that stands for the driver's line without an Xid

_ASKING = frozenset(
    {
        XidClass.RESET,
        XidClass.REBOOT,
        XidClass.RESTART_VM,
        XidClass.LINK,
        XidClass.REPAIR,
        XidClass.CONTAINED,
        XidClass.HARDWARE,
        XidClass.SYMPATHETIC,
    }
)
_OFF_BUS = Xid("", "GPU has fallen off the bus", XidClass.REBOOT, "-", "xid.off-bus", 565)


class Line(msgspec.Struct, frozen=True):
    """One folded Xid event, its catalog entry and what its registers say."""

    position: int  # in the log: later lines have higher ones, whatever clocks they carry
    event: KernelEvent
    entry: Xid
    decoded: Reading | None = None

    @property
    def code(self) -> int:
        """The Xid number; 0 for "fallen off the bus" without one."""
        return self.event.code if self.event.code is not None else OFF_BUS_WITHOUT_XID

    @property
    def at(self) -> float:
        """Seconds of the first, on whichever clock the log has."""
        return when(self.event)

    @property
    def last_at(self) -> float:
        """Seconds of the last."""
        event = self.event
        if event.last_at_s is not None:
            return event.last_at_s
        return event.last_at_ns / 1e9 if event.last_at_ns is not None else self.at


def when(event: KernelEvent) -> float:
    """Seconds since boot, else Unix time; 0 for a log without times (then all is near)."""
    if event.at_s is not None:
        return event.at_s
    return event.at_ns / 1e9 if event.at_ns is not None else 0.0


class Incident(msgspec.Struct):
    """One fault of one GPU: the primary line and all that belongs to it."""

    pci: str | None
    primary: Line
    lines: list[Line]
    by_products: list[Line] = msgspec.field(default_factory=list)  # also on other GPUs
    earlier: list[Line] = msgspec.field(default_factory=list)  # the same code, before a reset

    @property
    def count(self) -> int:
        """How often the primary's code was logged."""
        code = self.primary.code
        return sum(line.event.count for line in self.lines if line.code == code)

    def has(self, *codes: int) -> bool:
        """Whether one of the codes belongs to it."""
        return any(line.code in codes for line in self.lines)

    def near(self, line: Line) -> bool:
        """Whether a line stands within the window of any of its own."""
        return any(_near(own, line) for own in self.lines)


class Story(msgspec.Struct):
    """All Xid lines of this boot, sorted out; every line is in exactly one place."""

    components: dict[str | None, Component]
    gpus: dict[str, Gpu]
    incidents: list[Incident] = msgspec.field(default_factory=list)
    applications: list[Line] = msgspec.field(default_factory=list)
    innocent: list[tuple[Line, str]] = msgspec.field(default_factory=list)  # and why
    unknown: list[Line] = msgspec.field(default_factory=list)
    actions: dict[str | None, Line] = msgspec.field(
        default_factory=dict
    )  # last Xid 154 of this epoch
    driver_loads: list[KernelEvent] = msgspec.field(default_factory=list)

    def action(self, pci: str | None) -> int | None:
        """The driver's recovery action now: NVML's field 230, else the last Xid 154."""
        gpu = self.gpus.get(pci or "")
        if gpu is not None and gpu.recovery_action is not None:
            return gpu.recovery_action
        line = self.actions.get(pci)
        return line.event.recovery_to if line else None

    def answers(self, pci: str | None) -> bool | None:
        """Whether NVML works with the GPU now; None when NVML was not asked or lists it not."""
        gpu = self.gpus.get(pci or "")
        if gpu is None:
            return None
        return gpu.state is GpuState.OK and bool(gpu.readings)


def story(node: Node) -> Story:
    """The story of this node, told once."""
    return node.memo("xid-story", _tell)


def _tell(node: Node) -> Story:
    events = node.snapshot.kernel.events if node.snapshot.kernel else ()
    nvml = node.snapshot.nvml
    branch = driver_branch(nvml.driver_version if nvml else _loaded_version(events))
    told = Story(_components(node, events), {gpu.pci: gpu for gpu in node.gpus if gpu.pci})
    told.driver_loads = [event for event in events if event.kind == "driver-load"]
    starts = _epochs(events)
    asking: dict[str | None, list[Line]] = {}
    cured: dict[str | None, list[Line]] = {}
    others: list[Line] = []
    for position, event in enumerate(events):
        line = _line(position, event, branch)
        if line is None:
            continue
        current = position >= max(starts.get(None, -1), starts.get(event.pci, -1))
        if line.entry.kind is XidClass.ACTION:
            if current:
                told.actions[event.pci] = line
            else:
                told.innocent.append((line, "before a reset or a cleared action: done with"))
        elif line.entry.kind not in _ASKING:
            others.append(line)
        elif current:
            asking.setdefault(event.pci, []).append(line)
        else:
            cured.setdefault(event.pci, []).append(line)
            told.innocent.append((line, "before the last reset or driver load: cured by it"))
    for pci, lines in asking.items():
        told.incidents.extend(_incidents(pci, lines, cured.get(pci, ())))
    _join_links(told)
    for line in others:
        _place(told, line)
    return told


def _loaded_version(events: Iterable[KernelEvent]) -> str | None:
    versions = [event.versions[0] for event in events if event.kind == "driver-load"]
    return versions[-1] if versions else None


def _components(node: Node, events: Iterable[KernelEvent]) -> dict[str | None, Component]:
    """Every GPU: from NVML, from the bus, and from the log alone."""
    found: dict[str | None, Component] = {}
    for gpu in node.gpus:
        found[gpu.pci] = node.gpu_component(gpu)
    for device in node.pci_by_address.values():
        if device.is_nvidia_gpu:
            found.setdefault(device.address, node.pci_component(device))
    uuids = {event.pci: event.gpu_uuid for event in events if event.kind == "gpu-map"}
    for event in events:
        if event.kind == "xid" or (event.kind == "nvrm" and event.pci):
            uuid = uuids.get(event.pci)
            component = Component(type="gpu", host=node.host, pci=event.pci, gpu_uuid=uuid)
            found.setdefault(event.pci, component)
    return found


def _epochs(events: Iterable[KernelEvent]) -> dict[str | None, int]:
    """By GPU, and for all of them under None: where in the log the current epoch begins."""
    starts: dict[str | None, int] = {}
    for position, event in enumerate(events):
        if event.kind == "driver-load":
            starts[None] = position
        elif event.pci is not None and (event.kind == "gpu-reset" or event.recovery_to == 0):
            starts[event.pci] = position
    return starts


def _line(position: int, event: KernelEvent, branch: int | None) -> Line | None:
    if event.kind == "nvrm" and event.what == "off-bus":
        return Line(position, event, _OFF_BUS)
    if event.kind != "xid" or event.code is None:
        return None
    decoded = None
    if event.code == 74:
        decoded = decode_74(event)
    elif 144 <= event.code <= 150:
        decoded = decode_nvlink5(event, branch)
    return Line(position, event, xid(event.code), decoded)


def _near(a: Line, b: Line) -> bool:
    return a.at - WINDOW_S <= b.last_at and b.at - WINDOW_S <= a.last_at


def _priority(line: Line) -> tuple[int, int]:
    """What is the cause among lines that stand together; among equals the earliest."""
    code, probe = line.code, line.entry.probe
    if probe == "xid.off-bus":
        order = 0 if code else 1  # the Xid is the better line to quote
    elif code in (95, 140):
        order = 2
    elif code in (144, 145) and line.decoded and line.decoded.verdict is Decoded.RESET:
        order = 3  # brings a 48 with it
    elif code == 48:
        order = 4
    elif code == 64:
        order = 5
    elif line.entry.kind in (XidClass.HARDWARE, XidClass.RESTART_VM):
        order = 6
    elif line.entry.kind in (XidClass.RESET, XidClass.LINK):
        order = 7
    elif line.entry.kind is XidClass.CONTAINED:
        order = 8
    elif line.entry.kind is XidClass.SYMPATHETIC:
        order = 9
    else:
        order = 11 if code in (63, 160) else 10
    return order, line.position


def _incidents(pci: str | None, lines: list[Line], cured: Iterable[Line]) -> Iterable[Incident]:
    """Groups of one GPU's lines near in time, those of one kind as one incident.

    Once a GPU is off the bus all that follows on it is that.
    """
    groups: list[list[Line]] = []
    for line in sorted(lines, key=lambda item: (item.at, item.position)):
        lost = groups and any(item.entry.probe == "xid.off-bus" for item in groups[-1])
        if groups and (lost or any(_near(item, line) for item in groups[-1])):
            groups[-1].append(line)
        else:
            groups.append([line])
    merged: dict[str, list[Line]] = {}
    for group in groups:
        merged.setdefault(min(group, key=_priority).entry.probe, []).extend(group)
    for group in merged.values():
        primary = min(group, key=_priority)
        earlier = [line for line in cured if line.code == primary.code]
        yield Incident(pci, primary, group, earlier=earlier)


def _join_links(told: Story) -> None:
    """A GPU that falls off the bus takes its NVLinks down: its peers' link errors are that."""
    lost = [item for item in told.incidents if item.primary.entry.probe == "xid.off-bus"]
    for incident in list(told.incidents):
        if incident.primary.entry.probe != "xid.nvlink":
            continue
        cause = next((item for item in lost if item.near(incident.primary)), None)
        if cause is not None:
            cause.by_products.extend(incident.lines)
            told.incidents.remove(incident)
            told.innocent.extend(
                (line, f"its NVLink peer {cause.pci} fell off the bus then")
                for line in incident.lines
            )


def _place(told: Story, line: Line) -> None:
    kind = line.entry.kind
    if kind is XidClass.UNKNOWN:
        told.unknown.append(line)
        return
    near = [item for item in told.incidents if item.near(line)]
    near.sort(key=lambda item: item.pci != line.event.pci)
    if near and (line.code in BY_PRODUCTS or near[0].pci == line.event.pci):
        near[0].by_products.append(line)
        why = f"by-product of Xid {near[0].primary.code or 'off the bus'} on {near[0].pci}"
        told.innocent.append((line, why))
    elif line.code in BY_PRODUCTS:
        what = "faulted" if line.code == 43 else "was ended or killed"
        told.innocent.append((line, f"{what}; not a node fault"))
    elif kind is XidClass.INFO:
        told.innocent.append((line, f"{line.entry.meaning}; no fault by itself"))
    else:
        told.applications.append(line)
