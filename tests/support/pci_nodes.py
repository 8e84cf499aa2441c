"""Snapshots around PCI: the trees of tests/fixtures/nodes, and devices and GPUs built by hand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agent.collect import pci
from agent.evaluate import evaluate
from agent.fstree import parse_fstree
from agent.host import FixtureHost
from agent.tree import Entry
from probes.finding import Finding
from probes.gap import Gap
from probes.registry import Probe
from probes.result import ProbeResult
from probes.snapshot.gpu import Gpu, GpuLimits, GpuReading, GpuState, NvmlSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciDevice, PciReading, PciSection

FIXTURES = Path(__file__).parent.parent / "fixtures" / "nodes"
SECOND = 1_000_000_000


def tree(name: str, changes: Mapping[str, Entry] | None = None) -> FixtureHost:
    """A machine of tests/fixtures/nodes, some entries changed."""
    path = FIXTURES / f"{name}.fstree"
    text_tree = parse_fstree(path.read_text(), path.name)
    text_tree.epochs[0].update(changes or {})
    return FixtureHost(text_tree)


def read(name: str, readings: int = 2) -> tuple[PciSection, tuple[Gap, ...]]:
    """What the collector says of a machine of tests/fixtures/nodes."""
    host = tree(name)
    section, gaps = pci.collect(host)
    assert section is not None
    for _ in range(readings - 1):
        host.sleep(2.0)
        section, _more = pci.resample(host, section)
    return section, gaps


def device(address: str, parent: str | None = None, **changes: Any) -> PciDevice:
    """An H100 at Gen5 x16; ``speed``, ``width``, ``max_speed``, ``max_width`` and lists of these."""
    speeds = changes.pop("speed", 32.0)
    widths = changes.pop("width", 16)
    readings = max(len(item) if isinstance(item, list) else 2 for item in (speeds, widths))
    fields: dict[str, Any] = {
        "address": address,
        "parent": parent,
        "class_code": 0x030200,
        "vendor_id": 0x10DE,
        "device_id": 0x2330,
        "driver": "nvidia",
        "max_link_speed_gts": changes.pop("max_speed", 32.0),
        "max_link_width_lanes": changes.pop("max_width", 16),
        "readings": tuple(
            PciReading(
                at_ns=index * 2 * SECOND,
                current_link_speed_gts=speeds[index] if isinstance(speeds, list) else speeds,
                current_link_width_lanes=widths[index] if isinstance(widths, list) else widths,
                config_all_ones=False,
                link_status_all_ones=False,
            )
            for index in range(readings)
        ),
    }
    return PciDevice(**(fields | changes))


def bridge(address: str, parent: str | None = None, **changes: Any) -> PciDevice:
    fields = {
        "class_code": 0x060400,
        "vendor_id": 0x1000,
        "device_id": 0xC030,
        "driver": "pcieport",
    }
    return device(address, parent, **(fields | changes))


def nic(address: str, parent: str | None = None, **changes: Any) -> PciDevice:
    fields = {
        "class_code": 0x020700,
        "vendor_id": 0x15B3,
        "device_id": 0x1021,
        "driver": "mlx5_core",
    }
    return device(address, parent, **(fields | changes))


def with_aer(device: PciDevice, **kinds: tuple[int, ...]) -> PciDevice:
    """The device with AER totals by reading: ``aer_fatal=(0, 1)``; the others are zero."""
    totals = {"aer_correctable": "COR", "aer_nonfatal": "NONFATAL", "aer_fatal": "FATAL"}
    readings = tuple(
        replace(
            reading,
            **{
                field: {f"TOTAL_ERR_{name}": kinds[field][index] if field in kinds else 0}
                for field, name in totals.items()
            },
        )
        for index, reading in enumerate(device.readings)
    )
    return replace(device, readings=readings)


BUSY = {"utilization_gpu_percent": 98, "pstate": 0, "clocks_event_reasons": 0}
IDLE = {"utilization_gpu_percent": 0, "pstate": 8, "clocks_event_reasons": 1}


def gpu(address: str | None, index: int = 0, **changes: Any) -> Gpu:
    """A busy H100 at Gen5 x16; ``load``, ``generation``, ``width``, ``replays`` and limits."""
    load = changes.pop("load", BUSY)
    generations, width = changes.pop("generation", 5), changes.pop("width", 16)
    replays = changes.pop("replays", (0, 0))
    limits = {
        "pcie_max_link_generation": 5,
        "pcie_gpu_max_link_generation": 5,
        "pcie_max_link_width_lanes": 16,
    } | changes.pop("limits", {})
    fields: dict[str, Any] = {
        "index": index,
        "state": GpuState.OK,
        "pci": address,
        "uuid": f"GPU-0000000{index}-0000-0000-0000-000000000000",
        "name": "NVIDIA H100 80GB HBM3",
        "memory_total_bytes": 80 << 30,
        "limits": GpuLimits(**limits),
        "readings": tuple(
            GpuReading(
                at_ns=at * 2 * SECOND,
                pcie_link_generation=generations[at]
                if isinstance(generations, list)
                else generations,
                pcie_link_width_lanes=width,
                pcie_replay_count=replays[at],
                **load,
            )
            for at in range(len(replays))
        ),
    }
    return Gpu(**(fields | changes))


def snapshot(
    devices: tuple[PciDevice, ...] | PciSection | None = (),
    gpus: tuple[Gpu, ...] | None = (),
    **changes: Any,
) -> NodeSnapshot:
    section = PciSection(devices=devices) if isinstance(devices, tuple) else devices
    fields: dict[str, Any] = {
        "schema": SNAPSHOT_SCHEMA,
        "tool_version": "0",
        "host": "n07",
        "taken_at_ns": 1_767_225_600 * SECOND,
        "boot_id": "b1",
        "pci": section,
        "nvml": None if gpus is None else NvmlSection(gpus=gpus, driver_version="570.1"),
    }
    return NodeSnapshot(**(fields | changes))


def judge(item: Probe, node: NodeSnapshot) -> tuple[ProbeResult, tuple[Finding, ...]]:
    """The probe's result and findings; its own errors are shown."""
    evaluation = evaluate(node, (item,))
    (result,) = evaluation.results
    assert result.error is None, result.error
    return result, evaluation.findings


def summaries(item: Probe, node: NodeSnapshot) -> list[str]:
    return [finding.summary for finding in judge(item, node)[1]]


def notes(item: Probe, node: NodeSnapshot) -> tuple[str, ...]:
    """The ledger of a probe that found nothing."""
    result, findings = judge(item, node)
    assert findings == ()
    return result.notes
