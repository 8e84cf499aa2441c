"""Readings that look like a fault of a GPU and are none, by their number in the list of traps."""

from __future__ import annotations

import msgspec

from agent.evaluate import evaluate
from probes.finding import Severity
from probes.gap import GapReason
from probes.result import Health, Outcome
from probes.snapshot.gpu import Fabric, Gpu, GpuState, NvLinkErrors, NvmlSection
from probes.snapshot.manifest import Manifest
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice, PciSection
from tests.support.gpus import (
    GPU_PROBES,
    PCI,
    eight,
    findings,
    gaps,
    h100,
    node,
    rtx4090,
    run,
)


def clean(snapshot: NodeSnapshot) -> bool:
    """No finding at all, and health is ok."""
    result = evaluate(snapshot, GPU_PROBES)
    assert result.findings == ()
    return result.health is Health.OK


def bus(driver: str = "nvidia") -> PciSection:
    return PciSection(
        devices=tuple(
            PciDevice(address=address, vendor_id=0x10DE, class_code=0x030200, driver=driver)
            for address in PCI
        )
    )


def test_trap_05_idle_reason() -> None:
    assert clean(eight(busy=False))
    capped_at_rest = {"clocks_event_reasons": 0x5}
    assert clean(node(h100(i, reading=capped_at_rest) for i in range(8)))


def test_trap_06_power_cap_at_full_load_everywhere() -> None:
    reading = {"clocks_event_reasons": 0x4, "sm_clock_mhz": 1755, "power_mw": 698_000}
    moving = [{"violation_power_ns": 0}, {"violation_power_ns": 1_990_000_000}]
    assert clean(node(h100(i, busy=True, reading=reading, readings=moving) for i in range(8)))


def test_trap_07_application_clocks_set_by_an_operator() -> None:
    reading = {"clocks_event_reasons": 0x2, "sm_clock_mhz": 1410}
    limits = {"sm_application_clock_mhz": 1410}
    snapshot = node(h100(i, busy=True, reading=reading, limits=limits) for i in range(8))
    assert {(f.id, f.severity) for f in findings(snapshot)} == {
        ("clocks.application-clocks", Severity.INFO)
    }
    assert evaluate(snapshot, GPU_PROBES).health is Health.OK


def test_trap_08_lone_hardware_slowdown_bit() -> None:
    changing = [{"clocks_event_reasons": 0x8}, {"clocks_event_reasons": 0x0}]
    snapshot = eight({3: h100(3, busy=True, readings=changing)})
    assert clean(snapshot)
    assert run("clocks.hw-slowdown", snapshot).notes == (
        "0000:61:00.0: lone hardware slowdown bit: a change of clock shows it",
    )


def test_trap_09_single_ticks_of_the_violation_counters() -> None:
    ticks = {
        "violation_thermal_ns": 3_000,
        "violation_power_ns": 182_003_117_000 + 900_000,
        "reason_hw_thermal_ns": 1,
        "reason_sw_thermal_ns": 999,
        "reason_hw_power_brake_ns": 50_000,
        "violation_reliability_ns": 7,
        "violation_board_limit_ns": 7,
        "violation_sync_boost_ns": 7,
    }
    assert clean(eight({4: h100(4, busy=True, readings=[{}, ticks])}))


def test_trap_09_large_counters_since_the_driver_loaded() -> None:
    old = {"violation_power_ns": 2 * 10**14, "violation_thermal_ns": 10**16}
    assert clean(eight({4: h100(4, busy=True, reading=old)}))


def test_trap_10_aggregate_uncorrectable_errors() -> None:
    old = h100(0, reading={"ecc_aggregate_uncorrectable": 3})
    snapshot = eight({0: old}, busy=False)
    assert [f.severity for f in findings(snapshot)] == [Severity.INFO]
    assert evaluate(snapshot, GPU_PROBES).health is Health.OK


def test_trap_11_corrected_errors_in_total() -> None:
    assert clean(eight({1: h100(1, reading={"ecc_volatile_correctable": 50_000_001})}, busy=False))


def test_trap_12_remap_pending_is_a_warning_at_most() -> None:
    gpu = h100(3, busy=True)
    assert gpu.row_remap is not None
    pending = msgspec.structs.replace(
        gpu, row_remap=msgspec.structs.replace(gpu.row_remap, pending=True, uncorrectable_rows=1)
    )
    (finding,) = findings(eight({3: pending}))
    assert (finding.severity, finding.job_impact.value) == (Severity.WARNING, "none")
    assert finding.remedy is not None
    assert finding.remedy.action.value == "reset-gpu"


def test_trap_13_rows_remapped_in_the_past() -> None:
    gpu = h100(0)
    assert gpu.row_remap is not None
    repaired = msgspec.structs.replace(gpu.row_remap, uncorrectable_rows=3, banks_high=2)
    snapshot = eight({0: msgspec.structs.replace(gpu, row_remap=repaired)}, busy=False)
    assert clean(snapshot)
    assert run("memory.row-remap-spares", snapshot).notes == (
        "0000:1b:00.0: 3 rows remapped after uncorrectable errors, repaired",
    )


def test_trap_20_fewer_than_18_nvlinks_by_design() -> None:
    off = {"state": 0, "speed_mbps": 0, "remote_pci": None, "remote_type": 255}
    links = dict.fromkeys(range(12, 18), off)
    assert clean(node(h100(i, name="NVIDIA H100 NVL", links=links) for i in range(4)))
    cards = node(h100(i, name="NVIDIA A100-PCIE-40GB", nvlinks=(), fabric=Fabric(state=0))
                 for i in range(4))  # fmt: skip
    assert clean(cards)


def test_trap_21_nvlinks_at_rest() -> None:
    asleep = {link: {"state": 2, "speed_mbps": 0, "version": 7} for link in range(18)}
    off = {link: {"state": 0, "speed_mbps": 0, "version": 7} for link in range(18)}
    assert clean(eight({7: h100(7, links=asleep)}, busy=False))
    assert clean(eight({7: h100(7, links=off)}))


def test_trap_22_nvlink_counters_since_boot_and_replays() -> None:
    still = NvLinkErrors(replay=12, recovery=1, crc_flit=60_231, crc_data=4, ecc_data=0)
    counted = {"nvlink_errors": (still,) * 18}
    assert clean(eight({2: h100(2, busy=True, reading=counted)}))
    replays = [
        {"nvlink_errors": (NvLinkErrors(replay=n),) * 18, "nvlink_tx_kib": n} for n in (12, 400)
    ]
    assert clean(eight({2: h100(2, busy=True, readings=replays)}))


def test_trap_23_fabric_not_supported_or_not_started() -> None:
    bare = {link: {"remote_type": 0} for link in range(18)}
    for fabric, extra in (
        (Fabric(state=0), {}),
        (Fabric(state=1), {"links": bare}),
        (Fabric(state=1), {"c2c_enabled": True}),
        (Fabric(state=1), {"nvlinks": ()}),
    ):
        assert clean(node(h100(i, fabric=fabric, **extra) for i in range(2)))


def test_trap_24_fabric_health_mask_that_is_not_zero() -> None:
    fine = Fabric(state=3, status=0, health_mask=0x51AA, health_summary=1)
    assert clean(node(h100(i, fabric=fine) for i in range(8)))


def test_trap_25_no_ecc_on_consumer_cards() -> None:
    assert clean(node([rtx4090()]))


def test_trap_26_power_and_temperature_that_a_part_does_not_have() -> None:
    bare = dict.fromkeys(("temperature_c", "power_mw", "memory_temperature_c", "fan_speed_percent"))
    fields = ("temperature_c", "power_mw", "temperature_slowdown_c")
    snapshot = node(
        (h100(i, reading=bare) for i in range(2)), gaps=gaps(*fields, reason=GapReason.UNSUPPORTED)
    )
    assert clean(snapshot)
    assert run("thermal.near-limit", snapshot).outcome is Outcome.NOTAPPLICABLE


def test_trap_27_what_mig_hides() -> None:
    hidden = {"utilization_gpu_percent": None, "utilization_memory_percent": None}
    gpu = h100(
        0, reading={**hidden, "clocks_event_reasons": 0x0, "sm_clock_mhz": 1980},
        mig_mode=True, mig_mode_pending=True, row_remap=None, nvlinks=None, processes=None,
    )  # fmt: skip
    snapshot = node([gpu])
    assert clean(snapshot)
    for probe_id in (
        "memory.row-remap-pending",
        "memory.row-remap-failure",
        "memory.row-remap-spares",
        "nvlink.down",
        "clocks.low-without-reason",
        "clocks.memory-low",
        "fabric.state",
        "gpu.mig",
    ):
        assert run(probe_id, snapshot).outcome is Outcome.NOTAPPLICABLE, probe_id


def test_trap_28_vgpu_guest() -> None:
    empty = {name: None for name in h100(0).readings[0].__struct_fields__ if name != "at_ns"}
    gpu = h100(
        0,
        reading={**empty, "utilization_gpu_percent": 87, "sm_clock_mhz": 1980},
        limits=dict.fromkeys(h100(0).limits.__struct_fields__),
        virtualization_mode=2,
        ecc_mode=None,
        ecc_mode_pending=None,
        row_remap=None,
        sram_ecc=None,
        recovery_action=None,
        fabric=None,
        nvlinks=None,
        vbios_version=None,
        confidential_compute=None,
    )
    snapshot = node([gpu])
    assert clean(snapshot)
    judged = {"gpu.lost", "gpu.hung", "gpu.not-usable", "gpu.no-permission", "gpu.mig",
              "gpu.compute-mode", "nvml.init-failed", "nvml.slow-call"}  # fmt: skip
    for item in GPU_PROBES:
        expected = Outcome.PASS if item.id in judged else Outcome.NOTAPPLICABLE
        assert run(item.id, snapshot).outcome is expected, item.id


def test_trap_29_gpus_of_virtual_machines() -> None:
    section = NvmlSection(init_error="NVML_ERROR_DRIVER_NOT_LOADED", init_error_code=9)
    assert clean(node(nvml=section, pci=bus("vfio-pci")))


def test_trap_30_fewer_gpus_in_a_container() -> None:
    inside = node(
        (h100(i) for i in range(4)), pci=bus(), container="docker", manifest=Manifest(gpu_count=8)
    )
    assert clean(inside)
    hidden = [Gpu(index=i, state=GpuState.NO_PERMISSION, pci=PCI[i]) for i in range(4, 8)]
    assert clean(node([*(h100(i) for i in range(4)), *hidden], manifest=Manifest(gpu_count=8)))


def test_trap_31_persistence_off_costs_time_at_start_only() -> None:
    gpus = tuple(h100(i, persistence_mode=False) for i in range(8))
    section = NvmlSection(device_count=8, gpus=gpus, init_ms=31_000.0, driver_version="580.95.05")
    assert clean(node(nvml=section))


def test_trap_32_a_gpu_with_a_corrupted_inforom_version_works() -> None:
    assert clean(eight({2: h100(2, inforom_image_version=None)}, busy=False))


def test_trap_33_lost_and_hung_are_different() -> None:
    lost = Gpu(index=2, state=GpuState.LOST, pci=PCI[2])
    hung = Gpu(index=3, state=GpuState.HUNG, pci=PCI[3])
    snapshot = eight({2: lost, 3: hung})
    assert [(f.id, f.component.pci) for f in findings(snapshot)] == [
        ("gpu.hung", PCI[3]),
        ("gpu.lost", PCI[2]),
    ]


def test_trap_34_slow_first_call() -> None:
    from probes.snapshot.gpu import CallTiming

    first = CallTiming(call="nvmlDeviceGetHandleByIndex_v2", duration_ms=18_000.0, returned=True)
    assert clean(eight({0: h100(0, slow_calls=(first,), persistence_mode=False)}, busy=False))


def test_trap_46_siblings_differ_by_some_percent() -> None:
    slower = h100(6, busy=True, reading={"sm_clock_mhz": 1815, "temperature_c": 66})
    snapshot = eight({6: slower})
    assert clean(snapshot)
    assert run("clocks.low-without-reason", snapshot).notes == (
        "0000:d1:00.0: 8 % below its siblings: within what equal boards differ by",
    )


def test_trap_47_a_mig_slice_is_not_compared_with_whole_gpus() -> None:
    sliced = h100(0, busy=True, mig_mode=True, mig_mode_pending=True, nvlinks=None, row_remap=None,
                  reading={"sm_clock_mhz": 1410, "utilization_gpu_percent": None})  # fmt: skip
    assert [f.id for f in findings(eight({0: sliced}))] == ["gpu.mig"]
