"""The own baseline: which counters of a snapshot are kept for the next run, and when they hold."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from probes.record import Record
from probes.snapshot.baseline import Baseline, CounterSet
from probes.snapshot.gpu import Gpu
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice

# GpuReading's cumulative counters. Traffic is left out: it wraps, and its growth is no news.
GPU_COUNTERS = (
    "violation_power_ns",
    "violation_thermal_ns",
    "violation_sync_boost_ns",
    "violation_board_limit_ns",
    "violation_low_utilization_ns",
    "violation_reliability_ns",
    "reason_sw_thermal_ns",
    "reason_hw_thermal_ns",
    "reason_hw_power_brake_ns",
    "total_energy_mj",
    "pcie_replay_count",
    "pcie_l0_to_recovery_count",
    "pcie_correctable_error_count",
    "pcie_fatal_error_count",
    "pcie_nonfatal_error_count",
    "ecc_volatile_correctable",
    "ecc_volatile_uncorrectable",
    "ecc_aggregate_correctable",
    "ecc_aggregate_uncorrectable",
    "ecc_volatile_sram_uncorrectable",
    "ecc_volatile_dram_uncorrectable",
)
_AER = ("aer_correctable", "aer_nonfatal", "aer_fatal")


def baseline_of(snapshot: NodeSnapshot) -> Baseline | None:
    """What the next run compares with; None without a boot id, which alone makes it valid.

    A component's counters are those of its last reading. Names: a GPU's are the fields of
    ``GpuReading``, ``nvlink3.replay`` for its links, ``row_remap.correctable_rows`` and such for
    what stands on the GPU; a PCI device's ``aer_correctable.TOTAL_ERR_COR``; a port's the
    kernel's own. The kernel log's ``seen_ms`` is the uptime up to which it was read.
    """
    if snapshot.boot_id is None:
        return None
    return Baseline(
        at_ns=snapshot.taken_at_ns,
        boot_id=snapshot.boot_id,
        driver_version=snapshot.nvml.driver_version if snapshot.nvml else None,
        sets=tuple(counters for counters in _sets(snapshot) if counters.counters),
    )


def usable(baseline: Baseline | None, snapshot: NodeSnapshot) -> Baseline | None:
    """The part of a baseline that this snapshot may be compared with.

    Nothing of another boot or from the future; no GPU counters of another driver; no set in which
    a counter is lower now, because it was reset (driver reload, GPU reset, hot-plug).
    """
    if (
        baseline is None
        or baseline.boot_id != snapshot.boot_id
        or baseline.at_ns >= snapshot.taken_at_ns
    ):
        return None
    driver = snapshot.nvml.driver_version if snapshot.nvml else None
    now = {(counters.kind, counters.key): counters.counters for counters in _sets(snapshot)}
    return msgspec.structs.replace(
        baseline,
        sets=tuple(
            last
            for last in baseline.sets
            if not (last.kind == "gpu" and baseline.driver_version != driver)
            and not _was_reset(last.counters, now.get((last.kind, last.key), {}))
        ),
    )


def _was_reset(last: dict[str, int], now: dict[str, int]) -> bool:
    return any(now.get(name, value) < value for name, value in last.items())


def _sets(snapshot: NodeSnapshot) -> Iterator[CounterSet]:
    for gpu in snapshot.nvml.gpus if snapshot.nvml else ():
        if gpu.uuid:  # an index or an address can be another board's after a reset
            yield CounterSet(kind="gpu", key=gpu.uuid, counters=_gpu_counters(gpu))
    for device in snapshot.pci.devices if snapshot.pci else ():
        yield CounterSet(kind="pci", key=device.address, counters=_pci_counters(device))
    for port in snapshot.nics.ports if snapshot.nics else ():
        if port.readings:
            counters = dict(port.readings[-1].counters)
            yield CounterSet(kind="port", key=port.key, counters=counters)
    if snapshot.kernel is not None and snapshot.uptime_s is not None:
        seen_ms = int(snapshot.uptime_s * 1000)
        yield CounterSet(kind="kernel", key="log", counters={"seen_ms": seen_ms})


def _gpu_counters(gpu: Gpu) -> dict[str, int]:
    found: dict[str, int] = {}
    if gpu.readings:
        last = gpu.readings[-1]
        for name in GPU_COUNTERS:
            if (value := getattr(last, name)) is not None:
                found[name] = value
        for link, errors in zip(gpu.nvlinks or (), last.nvlink_errors or (), strict=False):
            found.update(_integers(f"nvlink{link.link}", errors))
    for name in ("row_remap", "retired_pages", "sram_ecc"):
        found.update(_integers(name, getattr(gpu, name)))
    return found


def _integers(prefix: str, record: Record | None) -> dict[str, int]:
    if record is None:
        return {}
    return {
        f"{prefix}.{name}": value
        for name, value in msgspec.structs.asdict(record).items()
        if type(value) is int and not name.startswith("banks_")  # histograms go both ways
    }


def _pci_counters(device: PciDevice) -> dict[str, int]:
    if not device.readings:
        return {}
    last = device.readings[-1]
    return {
        f"{kind}.{name}": value
        for kind in _AER
        for name, value in (getattr(last, kind) or {}).items()
    }
