"""A snapshot in lines for a person: what it holds, of what, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

from agent.report.words import one_line
from probes.gap import fold_gaps
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice


def describe(snapshot: NodeSnapshot) -> Iterator[str]:
    """One line a fact, devices by PCI address, gaps last."""
    taken = datetime.fromtimestamp(snapshot.taken_at_ns / 1e9, timezone.utc)
    when = f"{taken:%Y-%m-%d %H:%M:%S} UTC"
    yield f"{snapshot.host} at {when}, read by laggard {snapshot.tool_version}"
    place = [snapshot.virtualization, snapshot.container and f"container {snapshot.container}"]
    where = ", ".join(text for text in place if text) or "no virtualization seen"
    who = {True: "as root", False: "unprivileged", None: "privilege unknown"}[snapshot.privileged]
    release, boot = snapshot.kernel_release or "unknown", snapshot.boot_id or "unknown"
    yield f"kernel {release}, boot {boot}, {where}, {who}"
    if nvml := snapshot.nvml:
        state = nvml.init_error or f"driver {nvml.driver_version}"
        yield f"nvml: {state}, {len(nvml.gpus)} GPUs"
        for gpu in nvml.gpus:
            yield f"  {_gpu(gpu)}"
    if pci := snapshot.pci:
        yield f"pci: {_tally(_kind(device) for device in pci.devices)}"
    if nics := snapshot.nics:
        yield f"nics: {len(nics.ports)} ports"
        for port in nics.ports:
            name = port.device if port.port is None else f"{port.device}/{port.port}"
            facts = (name, port.link_layer, port.state or "?", port.rate_text)
            yield "  " + " ".join(text for text in facts if text)
    if kernel := snapshot.kernel:
        found = _tally(event.kind for event in kernel.events)
        yield f"kernel log: {kernel.lines_read} lines from {kernel.source}; {found}"
    if processes := snapshot.processes:
        yield f"processes: {processes.scanned} looked at, {len(processes.processes)} of interest"
    if snapshot.host_facts:
        yield f"host: {snapshot.host_facts.cpu_count or '?'} CPUs"
    for gap in fold_gaps(snapshot.gaps):
        fields = ", ".join(gap.fields) or "everything"
        devices = f" of {', '.join(gap.devices)}" if gap.devices else ""
        detail = f" ({gap.detail})" if gap.detail else ""
        yield one_line(f"not read: {gap.source} {fields}{devices}: {gap.reason.value}{detail}")


def _tally(kinds: Iterable[str]) -> str:
    counted = sorted(Counter(kinds).items())
    return ", ".join(f"{count} {kind}" for kind, count in counted) or "nothing that matters"


def _kind(device: PciDevice) -> str:
    if device.is_nvidia_gpu:
        return "GPU"
    if device.is_nic:
        return "NIC"
    return "NVSwitch" if device.is_nvswitch else "bridge"


def _gpu(gpu: Gpu) -> str:
    parts = [gpu.pci or f"index {gpu.index}", gpu.name or "unknown model", gpu.uuid or "no UUID"]
    if gpu.state is not GpuState.OK:
        parts.append(f"{gpu.state.value}: {gpu.state_detail or 'no detail'}")
    elif gpu.readings:
        last = gpu.readings[-1]
        for value, unit in (
            (last.sm_clock_mhz, " MHz"),
            (last.temperature_c, " °C"),
            (last.utilization_gpu_percent, " % busy"),
        ):
            if value is not None:
                parts.append(f"{value}{unit}")
        if last.pcie_link_generation is not None and last.pcie_link_width_lanes is not None:
            parts.append(f"PCIe gen{last.pcie_link_generation} x{last.pcie_link_width_lanes}")
    return one_line(", ".join(parts))
