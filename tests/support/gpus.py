"""Healthy GPU snapshots, built by hand, with overrides.

``node(h100(i, busy=True) for i in range(8))`` is a healthy training node. Overrides go by record:
``h100(3, limits={...}, reading={...}, readings=[{...}, {...}], ecc_mode=False)``; ``reading``
changes every reading, ``readings`` one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.evaluate import Policy, evaluate
from probes.finding import Finding
from probes.gap import Gap
from probes.registry import Probe, discover
from probes.result import ProbeResult
from probes.snapshot.baseline import Baseline, CounterSet
from probes.snapshot.gpu import (
    Fabric,
    Gpu,
    GpuLimits,
    GpuReading,
    GpuState,
    NvLink,
    NvLinkErrors,
    NvmlSection,
    RowRemap,
    SramEcc,
)
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot

HOST = "gpu-node-07"
BOOT_ID = "0e0f1a2b-0000-4000-8000-00000000c0de"
DRIVER = "580.95.05"
TAKEN_AT_NS = 1_767_225_600_000_000_000
SAMPLE_NS = 2_000_000_000
START_NS = 50_000_000_000_000

PROBES: Mapping[str, Probe] = {item.id: item for item in discover()}
PCI = tuple(f"0000:{bus:02x}:00.0" for bus in (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF))

_H100_LIMITS = GpuLimits(
    sm_clock_max_mhz=1980,
    mem_clock_max_mhz=2619,
    graphics_clock_max_mhz=1980,
    sm_clock_customer_boost_max_mhz=1980,
    sm_application_clock_mhz=1980,
    mem_application_clock_mhz=2619,
    sm_default_application_clock_mhz=1980,
    mem_default_application_clock_mhz=2619,
    power_limit_mw=700_000,
    power_limit_enforced_mw=700_000,
    power_limit_default_mw=700_000,
    power_limit_min_mw=200_000,
    power_limit_max_mw=700_000,
    temperature_shutdown_c=93,
    temperature_slowdown_c=87,
    temperature_gpu_max_c=85,
    temperature_mem_max_c=95,
    tlimit_shutdown_c=-8,
    tlimit_slowdown_c=-2,
    tlimit_mem_max_c=0,
    tlimit_gpu_max_c=0,
    supported_clocks_event_reasons=0x1FF,
    pcie_max_link_generation=5,
    pcie_gpu_max_link_generation=5,
    pcie_max_link_width_lanes=16,
)


def reading(at: int = 0, *, busy: bool = False, **fields: Any) -> GpuReading:
    """One reading of a healthy H100; ``at`` counts samples."""
    base = GpuReading(
        at_ns=START_NS + at * SAMPLE_NS,
        pstate=0,
        sm_clock_mhz=1980 if busy else 345,
        mem_clock_mhz=2619,
        graphics_clock_mhz=1980 if busy else 345,
        clocks_event_reasons=0x0 if busy else 0x1,
        violation_power_ns=182_003_117_000,
        violation_thermal_ns=0,
        violation_sync_boost_ns=0,
        violation_board_limit_ns=0,
        violation_low_utilization_ns=0,
        violation_reliability_ns=0,
        reason_sw_thermal_ns=0,
        reason_hw_thermal_ns=0,
        reason_hw_power_brake_ns=0,
        power_mw=560_000 if busy else 70_000,
        temperature_c=58 if busy else 29,
        memory_temperature_c=74 if busy else 36,
        margin_temperature_c=27 if busy else 56,
        utilization_gpu_percent=99 if busy else 0,
        utilization_memory_percent=54 if busy else 0,
        pcie_link_generation=5,
        pcie_link_width_lanes=16,
        ecc_volatile_correctable=0,
        ecc_volatile_uncorrectable=0,
        ecc_aggregate_correctable=0,
        ecc_aggregate_uncorrectable=0,
        ecc_volatile_sram_uncorrectable=0,
        ecc_volatile_dram_uncorrectable=0,
        nvlink_errors=tuple(
            NvLinkErrors(replay=0, recovery=0, crc_flit=0, crc_data=0, ecc_data=0)
            for _ in range(18)
        ),
        nvlink_tx_kib=738_000_000_000 + at * 324_000_000,
        nvlink_rx_kib=936_000_000_000 + at * 396_000_000,
    )
    return msgspec.structs.replace(base, **fields)


def h100(
    index: int = 0,
    *,
    busy: bool = False,
    samples: int = 2,
    limits: Mapping[str, Any] | None = None,
    reading: Mapping[str, Any] | None = None,
    readings: Sequence[Mapping[str, Any]] | None = None,
    links: Mapping[int, Mapping[str, Any]] | None = None,
    **fields: Any,
) -> Gpu:
    """A healthy H100 SXM behind NVSwitches."""
    each = readings if readings is not None else [{}] * samples
    base = Gpu(
        index=index,
        state=GpuState.OK,
        uuid=f"GPU-5a1c0de0-1111-4222-8333-00000000000{index}",
        pci=PCI[index],
        name="NVIDIA H100 80GB HBM3",
        architecture=9,
        board_part_number="692-2G520-0200-000",
        vbios_version="96.00.89.00.01",
        inforom_image_version="G520.0200.00.05",
        gsp_firmware_version=DRIVER,
        virtualization_mode=0,
        mig_mode=False,
        mig_mode_pending=False,
        persistence_mode=True,
        compute_mode=0,
        display_active=False,
        memory_total_bytes=81559 << 20,
        ecc_mode=True,
        ecc_mode_pending=True,
        limits=msgspec.structs.replace(_H100_LIMITS, **(limits or {})),
        row_remap=RowRemap(
            correctable_rows=0,
            uncorrectable_rows=0,
            pending=False,
            failure_occurred=False,
            banks_max=2560,
            banks_high=0,
            banks_partial=0,
            banks_low=0,
            banks_none=0,
        ),
        sram_ecc=SramEcc(threshold_exceeded=False),
        recovery_action=0,
        fabric=Fabric(state=3, status=0, health_mask=0, health_summary=0),
        nvlinks=tuple(
            msgspec.structs.replace(
                NvLink(
                    link=link,
                    state=1,
                    version=6,
                    speed_mbps=26562,
                    remote_pci=f"0000:0{5 + link // 5}:00.0",
                    remote_type=2,
                ),
                **(links or {}).get(link, {}),
            )
            for link in range(18)
        ),
        c2c_enabled=False,
        confidential_compute=False,
        processes=(),
        readings=tuple(
            _reading(at, busy=busy, **{**(reading or {}), **extra}) for at, extra in enumerate(each)
        ),
    )
    return msgspec.structs.replace(base, **fields)


_reading = reading


def rtx4090(index: int = 0, *, busy: bool = False, **fields: Any) -> Gpu:
    """A healthy GeForce: no ECC, no remapping, no NVLink, P2 under CUDA, P8 and gen 1 at rest."""
    now = {
        "pstate": 2 if busy else 8,
        "sm_clock_mhz": 2745 if busy else 210,
        "mem_clock_mhz": 10251 if busy else 405,
        "clocks_event_reasons": 0x0 if busy else 0x1,
        "power_mw": 380_000 if busy else 18_000,
        "temperature_c": 66 if busy else 38,
        "utilization_gpu_percent": 99 if busy else 2,
        "pcie_link_generation": 4 if busy else 1,
        "memory_temperature_c": None,
        "margin_temperature_c": None,
        "ecc_volatile_correctable": None,
        "ecc_volatile_uncorrectable": None,
        "ecc_aggregate_correctable": None,
        "ecc_aggregate_uncorrectable": None,
        "nvlink_errors": None,
        "nvlink_tx_kib": None,
        "nvlink_rx_kib": None,
    }
    base = h100(
        index,
        busy=busy,
        reading=now,
        limits={
            "sm_clock_max_mhz": 3105,
            "mem_clock_max_mhz": 10501,
            "sm_clock_customer_boost_max_mhz": None,
            "sm_application_clock_mhz": None,
            "mem_application_clock_mhz": None,
            "power_limit_mw": 450_000,
            "power_limit_enforced_mw": 450_000,
            "power_limit_default_mw": 450_000,
            "temperature_slowdown_c": 96,
            "temperature_mem_max_c": None,
            "tlimit_slowdown_c": None,
        },
        name="NVIDIA GeForce RTX 4090",
        architecture=8,
        board_part_number=None,
        ecc_mode=False,
        ecc_mode_pending=False,
        row_remap=None,
        sram_ecc=None,
        recovery_action=None,
        fabric=None,
        nvlinks=(),
        persistence_mode=False,
        display_active=True,
        mig_mode=None,
        mig_mode_pending=None,
    )
    return msgspec.structs.replace(base, **fields)


def node(gpus: Iterable[Gpu] = (), *, nvml: Any = ..., **fields: Any) -> NodeSnapshot:
    """A node that holds these GPUs; ``nvml=None`` leaves the section out."""
    members = tuple(gpus)
    if nvml is ...:
        nvml = NvmlSection(
            driver_version=DRIVER,
            nvml_version=f"13.{DRIVER}",
            init_ms=12.0,
            device_count=len(members),
            gpus=members,
        )
    base = NodeSnapshot(
        schema=SNAPSHOT_SCHEMA,
        tool_version="0.0",
        host=HOST,
        taken_at_ns=TAKEN_AT_NS,
        boot_id=BOOT_ID,
        uptime_s=86_400.0,
        sample_s=2.0,
        nvml=nvml,
    )
    return msgspec.structs.replace(base, **fields)


def eight(
    odd: Mapping[int, Gpu] | None = None, *, busy: bool = True, **fields: Any
) -> NodeSnapshot:
    """Eight healthy H100, some of them replaced by ``odd``."""
    replaced = odd or {}
    return node((replaced.get(i, h100(i, busy=busy)) for i in range(8)), **fields)


def last_run(*sets: CounterSet, seconds_ago: float = 300.0, **fields: Any) -> Baseline:
    """The counters that the last run left behind."""
    base = Baseline(
        at_ns=TAKEN_AT_NS - round(seconds_ago * 1e9),
        boot_id=BOOT_ID,
        driver_version=DRIVER,
        sets=sets,
    )
    return msgspec.structs.replace(base, **fields)


def gpu_counters(gpu: Gpu, **counters: int) -> CounterSet:
    """What the last run saw of one GPU."""
    return CounterSet(kind="gpu", key=gpu.uuid or "", counters=counters)


def gaps(*fields: str, reason: Any, device: str | None = None) -> tuple[Gap, ...]:
    """A gap of the NVML section."""
    return (Gap(source="nvml", reason=reason, fields=fields, devices=(device,) if device else ()),)


def run(probe_id: str, snapshot: NodeSnapshot) -> ProbeResult:
    """The result of one probe."""
    return evaluate(snapshot, [PROBES[probe_id]]).results[0]


def findings(snapshot: NodeSnapshot, *probe_ids: str, **limits: float) -> list[Finding]:
    """What the named probes (or the ones of these files) find."""
    chosen = [PROBES[id] for id in probe_ids] if probe_ids else list(GPU_PROBES)
    policy = Policy(limits=dict.fromkeys(probe_ids, limits))
    return list(evaluate(snapshot, chosen, policy).findings)


def found(snapshot: NodeSnapshot, *probe_ids: str) -> list[tuple[str, str]]:
    """``(id, component label)`` of what is found, worst first."""
    return [(item.id, item.component.label()) for item in findings(snapshot, *probe_ids)]


GPU_PROBES = tuple(
    item
    for item in PROBES.values()
    if (
        item.needs == ("nvml",)
        and item.family in {"clocks", "power", "thermal", "memory", "nvlink", "fabric", "nvml"}
    )
    or item.id
    in {
        "gpu.recovery-action",
        "gpu.lost",
        "gpu.hung",
        "gpu.not-usable",
        "gpu.no-permission",
        "gpu.versions-differ",
        "gpu.mig",
        "gpu.compute-mode",
        "gpu.confidential-compute",
        "manifest.gpu-count",
        "manifest.gpu-name",
        "manifest.power-limit",
        "manifest.driver-version",
        "manifest.vbios-version",
        "manifest.nvlink-count",
    }
)
