"""The NVML collector: a real child that loads the double, asked as ``laggard check`` asks it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from agent.collect.nvml import NvmlCollector
from agent.fstree import format_fstree, parse_fstree
from agent.host import FixtureHost, Host, LiveHost
from agent.nvml_channel import LiveNvmlChannel
from agent.recording import RecordingHost
from probes.gap import Gap, GapReason
from probes.snapshot.gpu import (
    Fabric,
    Gpu,
    GpuLimits,
    GpuReading,
    GpuState,
    MigInstance,
    NvLink,
    NvLinkErrors,
    NvmlSection,
    RetiredPages,
    RowRemap,
    SramEcc,
)
from tests.support import nvml_double
from tests.support.nvml_double import Double

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@dataclass
class Collected:
    """Two readings (or one, when the first found no GPU), and what they cost."""

    section: NvmlSection | None
    gaps: tuple[Gap, ...]
    again: tuple[Gap, ...] = ()
    seconds: float = 0.0
    calls: list[tuple[str, str]] = field(default_factory=list)  # (gpu0, PowerUsage)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        assert self.section is not None
        return self.section.gpus

    @property
    def states(self) -> list[str]:
        return [gpu.state.value for gpu in self.gpus]

    @property
    def reading_counts(self) -> list[int]:
        return [len(gpu.readings) for gpu in self.gpus]

    def asked(self, gpu: str) -> Counter[str]:
        return Counter(name for who, name in self.calls if who == gpu)


Between = Callable[[NvmlCollector], None]
Collect = Callable[..., Collected]


@pytest.fixture
def collect(nvml: Double, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Collect:
    """``collect("h100x8")``, or lines that override a scenario: ``collect("h100x8", "driver = 1")``."""

    def run(
        scenario: str,
        text: str = "",
        *,
        deadline_s: float = 5.0,
        until_s: float = 20.0,
        between: Between | None = None,
        host: Host | None = None,
    ) -> Collected:
        path: str | Path = scenario
        if text:
            path = tmp_path / f"case{len(list(tmp_path.iterdir()))}.scn"
            path.write_text(f"include = {nvml_double.scenario_path(scenario)}\n{text}\n")
        log = tmp_path / f"calls{len(list(tmp_path.iterdir()))}"
        for name, value in nvml.environ(path, log).items():
            monkeypatch.setenv(name, value)
        host = host or LiveHost()
        began = time.monotonic()
        until_ns = host.monotonic_ns() + int(until_s * 1e9)
        with NvmlCollector(host, until_ns=until_ns, call_deadline_s=deadline_s) as collector:
            section, gaps = collector.first()
            found = Collected(section, gaps)
            if section is not None and section.gpus:
                if between is not None:
                    between(collector)
                found.section, found.again = collector.second(section)
        found.seconds = time.monotonic() - began
        found.calls = [(line.split()[0], line.split()[1]) for line in nvml_double.calls(log)]
        return found

    return run


def gap_of(gaps: tuple[Gap, ...], field_name: str | None, device: str) -> Gap:
    """The gap that explains a missing field."""
    return next(gap for gap in gaps if gap.covers("nvml", field_name, device))


def without_times(gpu: Gpu) -> Gpu:
    readings = tuple(msgspec.structs.replace(reading, at_ns=0) for reading in gpu.readings)
    return msgspec.structs.replace(gpu, readings=readings, slow_calls=())


# --- what a healthy GPU gives ---


def test_every_field_of_a_healthy_gpu(collect: Collect) -> None:
    still = "field.197-198 = 5\nfield.138-141 = 7\nTotalEnergyConsumption = 4107300111"
    found = collect("h100x8_busy", still)
    section = found.section
    assert section is not None
    assert (section.driver_version, section.cuda_driver_version) == ("550.163.01", "12.4")
    assert (section.nvml_version, section.device_count) == ("12.550.163.01", 8)
    assert section.init_error is None and section.init_detail is None
    assert section.init_ms is not None and section.library_path is not None
    assert section.library_path.endswith("libnvidia-ml.so.1")
    gpu = without_times(found.gpus[1])
    reading = GpuReading(
        at_ns=0, pstate=0, sm_clock_mhz=1980, mem_clock_mhz=2619, graphics_clock_mhz=1980,
        clocks_event_reasons=0, violation_power_ns=182003117000, violation_thermal_ns=0,
        violation_sync_boost_ns=0, violation_board_limit_ns=0, violation_low_utilization_ns=0,
        violation_reliability_ns=0, power_mw=557800, total_energy_mj=4107300111,
        temperature_c=54, memory_temperature_c=70, utilization_gpu_percent=99,
        utilization_memory_percent=54, pcie_link_generation=5, pcie_link_width_lanes=16,
        pcie_replay_count=9, pcie_l0_to_recovery_count=12, pcie_correctable_error_count=0,
        pcie_fatal_error_count=0, pcie_nonfatal_error_count=0, memory_used_bytes=74208 * MIB,
        ecc_volatile_correctable=0, ecc_volatile_uncorrectable=0, ecc_aggregate_correctable=0,
        ecc_aggregate_uncorrectable=0, ecc_volatile_sram_uncorrectable=0,
        ecc_volatile_dram_uncorrectable=0, nvlink_tx_kib=7, nvlink_rx_kib=7,
        nvlink_errors=(
            NvLinkErrors(replay=0, recovery=0, crc_flit=0, crc_data=0, ecc_data=0),
        ) * 18,
    )  # fmt: skip
    assert gpu.nvlinks is not None
    assert gpu.nvlinks[4] == NvLink(
        link=4, state=1, version=6, speed_mbps=26562, remote_pci="0000:06:00.0", remote_type=2
    )
    assert gpu == Gpu(
        index=1, state=GpuState.OK, uuid="GPU-5a1c0de0-1111-4222-8333-000000000001",
        pci="0000:43:00.0", name="NVIDIA H100 80GB HBM3", architecture=9,
        cuda_compute_capability="9.0", serial="1650000000001",
        board_part_number="692-2G520-0200-000", minor_number=1, module_id=4,
        vbios_version="96.00.89.00.01", inforom_image_version="G520.0200.00.05",
        gsp_firmware_version="550.163.01", virtualization_mode=0, mig_mode=False,
        mig_mode_pending=False, persistence_mode=True, compute_mode=0, display_active=False,
        memory_total_bytes=81559 * MIB, memory_reserved_bytes=551 * MIB, ecc_mode=True,
        ecc_mode_pending=True,
        limits=GpuLimits(
            sm_clock_max_mhz=1980, mem_clock_max_mhz=2619, graphics_clock_max_mhz=1980,
            sm_clock_customer_boost_max_mhz=1980, sm_application_clock_mhz=1980,
            mem_application_clock_mhz=2619, sm_default_application_clock_mhz=1980,
            mem_default_application_clock_mhz=2619, power_limit_mw=700000,
            power_limit_enforced_mw=700000, power_limit_default_mw=700000,
            power_limit_min_mw=200000, power_limit_max_mw=700000, temperature_shutdown_c=93,
            temperature_slowdown_c=87, temperature_gpu_max_c=85, temperature_mem_max_c=95,
            tlimit_shutdown_c=-8, tlimit_slowdown_c=-2, tlimit_mem_max_c=0, tlimit_gpu_max_c=0,
            supported_clocks_event_reasons=0x1FF, pcie_max_link_generation=5,
            pcie_gpu_max_link_generation=5, pcie_max_link_width_lanes=16,
        ),
        row_remap=RowRemap(
            correctable_rows=0, uncorrectable_rows=0, pending=False, failure_occurred=False,
            banks_max=2560, banks_high=0, banks_partial=0, banks_low=0, banks_none=0,
        ),
        sram_ecc=SramEcc(
            volatile_uncorrectable_parity=0, volatile_uncorrectable_sec_ded=0,
            volatile_correctable=0, aggregate_uncorrectable_parity=0,
            aggregate_uncorrectable_sec_ded=0, aggregate_correctable=0, threshold_exceeded=False,
        ),
        fabric=Fabric(state=3, status=0, health_mask=0, clique_id=0, cluster_uuid="0" * 32),
        nvlinks=gpu.nvlinks, c2c_enabled=False, c2c_link_count=0, confidential_compute=False,
        processes=gpu.processes, readings=(reading, reading),
    )  # fmt: skip
    assert gpu.processes is not None
    (process,) = gpu.processes
    assert (process.pid, process.kind, process.used_memory_bytes) == (41001, "compute", 74200 * MIB)


OPTIONAL = {"state_detail", "state_call", "retired_pages"}  # no gap where they are None


def unexplained(gpu: Gpu, gaps: tuple[Gap, ...]) -> list[str]:
    """Numbers that are missing although no gap says why."""
    records: list[msgspec.Struct] = [gpu, gpu.limits, *gpu.readings]
    if gpu.row_remap is not None:
        records.append(gpu.row_remap)
    return [
        name
        for record in records
        for name in record.__struct_fields__
        if getattr(record, name) is None
        and name not in OPTIONAL
        and not any(gap.covers("nvml", name, gpu.key) for gap in gaps)
    ]


@pytest.mark.parametrize(
    "scenario",
    [
        "h100x8_busy",
        "h100_mig",
        "vgpu_guest",
        "gb200x4",
        "v100x8",
        "a100x8_busy",
        "l40s",
        "rtx4090_idle",
    ],
)
def test_a_gap_explains_each_missing_number(collect: Collect, scenario: str) -> None:
    found = collect(scenario)
    for gpu in found.gpus:
        assert unexplained(gpu, found.gaps) == []


def test_gaps_of_eight_healthy_gpus_fold_into_a_few(collect: Collect) -> None:
    found = collect("h100x8")
    assert {gap.reason for gap in found.gaps} == {GapReason.UNSUPPORTED}
    assert len(found.gaps) <= 4
    assert all(len(gap.devices) == 8 for gap in found.gaps)


def test_the_second_reading_is_later_and_moves(collect: Collect) -> None:
    found = collect("h100x8_busy", "TotalEnergyConsumption = ^1000+5/call", between=lambda _: None)
    for gpu in found.gpus:
        first, second = gpu.readings
        assert second.at_ns > first.at_ns
        assert second.total_energy_mj is not None and first.total_energy_mj is not None
        assert second.total_energy_mj > first.total_energy_mj


# --- frugality ---


def test_calls_are_few_and_none_samples(collect: Collect) -> None:
    found = collect("h100x8_busy")
    asked = found.asked("gpu0")
    assert not [name for name in asked if name.startswith(("PcieThroughput", "Samples", "Gpm"))]
    assert sum(asked.values()) <= 450  # single fields counted; two readings, 18 links
    assert asked["FieldValues"] <= 6
    assert asked["ComputeRunningProcesses"] == 2  # the size, then the list; once a run
    assert [name for who, name in found.calls if who == "system"].count("Count") == 1


def test_nothing_is_written_through_nvml(collect: Collect) -> None:
    found = collect("h100x8_busy")
    assert not [name for _, name in found.calls if re.search(r"Set|Reset|Clear", name)]


# --- GPUs that are lost, refused, hung or slow ---


class NoProcess(FixtureHost):
    """A machine that starts no more processes."""

    def open_nvml(self) -> LiveNvmlChannel:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_without_a_process_to_ask_with_the_driver_is_hidden_not_absent() -> None:
    with NvmlCollector(NoProcess(parse_fstree("")), until_ns=2_000_000_000_000) as collector:
        section, gaps = collector.first()
    assert section is None
    (gap,) = gaps
    assert gap.reason.hides_something
    assert gap.detail == (
        "starting the process that asks the driver: Resource temporarily unavailable"
    )


def test_a_gpu_that_gives_no_handle(collect: Collect) -> None:
    found = collect("gpu_lost")
    assert found.states == ["ok"] * 4 + ["lost"] + ["ok"] * 3
    gpu = found.gpus[4]
    assert (gpu.state_detail, gpu.state_call) == (
        "NVML_ERROR_GPU_IS_LOST",
        "nvmlDeviceGetHandleByIndex",
    )
    assert found.reading_counts == [2] * 4 + [0] + [2] * 3


def test_a_gpu_lost_on_the_way_keeps_who_it_is_and_no_half_reading(collect: Collect) -> None:
    found = collect("gpu_lost_midway")
    gpu = found.gpus[4]
    assert (gpu.state, gpu.state_detail) == (GpuState.LOST, "NVML_ERROR_GPU_IS_LOST")
    assert gpu.state_call is not None and gpu.state_call.startswith("nvmlDeviceGet")
    assert (gpu.pci, gpu.readings) == ("0000:9d:00.0", ())
    assert found.reading_counts == [2] * 4 + [0] + [2] * 3


def test_a_gpu_lost_in_its_reading_has_none(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 0]\nPowerUsage = !GPU_IS_LOST")
    gpu = found.gpus[0]
    assert (gpu.state, gpu.state_call, gpu.readings) == (
        GpuState.LOST,
        "nvmlDeviceGetPowerUsage",
        (),
    )
    assert gpu.limits.sm_clock_max_mhz == 1980


def test_a_gpu_lost_between_the_readings_keeps_the_first(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 0]\nPowerUsage = ?1: 70000 : !GPU_IS_LOST")
    gpu = found.gpus[0]
    assert (gpu.state, len(gpu.readings)) == (GpuState.LOST, 1)
    assert gpu.readings[0].power_mw == 70000
    assert found.reading_counts == [1, 2]


def test_a_field_value_that_says_lost(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 1]\nfield.74 = !GPU_IS_LOST")
    assert found.states == ["ok", "lost"]
    assert found.gpus[1].state_call == "nvmlDeviceGetFieldValues"


def test_a_gpu_that_wants_a_reset_in_one_call(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 1]\nUtilizationRates = !RESET_REQUIRED")
    gpu = found.gpus[1]
    assert (gpu.state, gpu.state_detail, gpu.state_call) == (
        GpuState.RESET_REQUIRED,
        "NVML_ERROR_RESET_REQUIRED",
        "nvmlDeviceGetUtilizationRates",
    )
    assert gpu.readings[0].power_mw is not None
    assert found.states == ["ok", "reset-required"]


@pytest.mark.parametrize("scenario", ["gpu_hung", "gpu_hung_hard"])
def test_a_hung_gpu_costs_one_deadline_and_is_not_asked_again(
    collect: Collect, scenario: str
) -> None:
    found = collect(scenario, deadline_s=0.7)
    assert found.states == ["ok"] * 6 + ["hung", "ok"]
    gpu = found.gpus[6]
    assert gpu.pci == "0000:d1:00.0"
    assert gpu.state_call is not None and gpu.state_call in (gpu.state_detail or "")
    assert re.search(r"did not return within 0\.[5-8]\d* s; .* state [DRS]", gpu.state_detail or "")
    (slow,) = gpu.slow_calls
    assert not slow.returned and 400 <= slow.duration_ms <= 1500
    assert gap_of(found.gaps, None, gpu.key).reason is GapReason.TIMEOUT
    assert found.reading_counts == [2] * 6 + [0, 2]
    assert 0.6 <= found.seconds < 0.7 + 2.5
    assert found.calls[-1][0] == "gpu7"
    handles = [name for who, name in found.calls if who == "gpu6" and name.startswith("Handle")]
    assert len(handles) <= 1
    # the readings after the change of processes are whole
    assert {gap.reason for gap in found.again} == {GapReason.UNSUPPORTED}
    assert all(r.nvlink_errors is not None for r in found.gpus[0].readings)


def test_two_hung_gpus_cost_two_deadlines(collect: Collect) -> None:
    hang = "[gpu 2,5]\nPersistenceMode = ~hang"
    found = collect("h100x8", hang, deadline_s=0.5)
    assert found.states == ["ok", "ok", "hung", "ok", "ok", "hung", "ok", "ok"]
    assert {found.gpus[i].state_call for i in (2, 5)} == {"nvmlDeviceGetPersistenceMode"}
    assert found.reading_counts == [2, 2, 0, 2, 2, 0, 2, 2]
    assert 1.0 <= found.seconds < 4.0


def test_a_gpu_that_hangs_in_the_second_reading_keeps_the_first(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 0]\nPowerUsage = ?1: 70000 : ~hang", deadline_s=0.5)
    assert found.states == ["hung", "ok"]
    assert found.reading_counts == [1, 2]
    assert found.gpus[1].readings[1].nvlink_errors is not None


def test_the_counters_of_nvlink_5_survive_a_change_of_processes(collect: Collect) -> None:
    hang = "gpus = 3\n[gpu 1]\nPowerUsage = ~hang"
    found = collect("gb200x4", hang, deadline_s=0.5)
    assert found.states == ["ok", "hung", "ok"]
    for gpu in (found.gpus[0], found.gpus[2]):
        errors = [reading.nvlink_errors for reading in gpu.readings]
        assert [e[0].symbol_errors for e in errors if e] == [11, 11]


def test_all_gpus_hung_end_within_the_deadline(collect: Collect) -> None:
    found = collect("h100x8", "* = ~hang", deadline_s=0.6, until_s=2.5)
    assert found.seconds < 3.5
    assert set(found.states) <= {"hung", "unknown"} and found.states[0] == "hung"
    not_asked = [gpu for gpu in found.gpus if gpu.state is GpuState.UNKNOWN]
    assert all("not asked" in (gpu.state_detail or "") for gpu in not_asked)
    assert {gap_of(found.gaps, None, gpu.key).reason for gpu in found.gpus} == {GapReason.TIMEOUT}


def test_a_slow_call_is_timed(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 1]\nPowerUsage = ~120ms 70000")
    assert found.states == ["ok", "ok"]
    assert found.gpus[0].slow_calls == ()
    timings = found.gpus[1].slow_calls
    assert [(t.call, t.returned) for t in timings] == [("nvmlDeviceGetPowerUsage", True)] * 2
    assert all(120 <= t.duration_ms < 1000 for t in timings)


def test_a_gpu_that_is_slow_in_every_call_keeps_what_it_said(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 0]\n* = ~60ms ok", deadline_s=1.0)
    gpu = found.gpus[0]
    assert gpu.state in (GpuState.OK, GpuState.UNKNOWN)
    assert gpu.uuid is not None
    assert gpu.slow_calls and all(timing.returned for timing in gpu.slow_calls)
    gap = gap_of(found.gaps, None, gpu.key)
    assert gap.reason is GapReason.TIMEOUT and "slowly" in (gap.detail or "")
    assert found.reading_counts[1] == 2


def test_gpus_that_a_container_may_not_use(collect: Collect) -> None:
    found = collect("no_permission")
    assert found.states == ["ok"] * 4 + ["no-permission"] * 4
    assert found.gpus[5].state_detail == "NVML_ERROR_NO_PERMISSION"
    gap = gap_of(found.gaps, None, "index 5")
    assert gap.reason is GapReason.DENIED and gap.allow is not None
    assert gap.devices == ("index 4", "index 5", "index 6", "index 7")


# --- init ---


def test_init_that_hangs(collect: Collect) -> None:
    found = collect("init_hung", deadline_s=0.5, until_s=1.0)
    assert found.section is not None
    assert (found.section.init_error, found.section.gpus) == ("hung", ())
    assert "nvmlInit did not return" in (found.section.init_detail or "")
    assert found.gaps[0].reason is GapReason.TIMEOUT
    assert found.seconds < 2.0


@pytest.mark.parametrize(
    ("scenario", "name", "code"),
    [
        ("driver_not_loaded", "NVML_ERROR_DRIVER_NOT_LOADED", 9),
        ("version_mismatch", "NVML_ERROR_LIB_RM_VERSION_MISMATCH", 18),
        ("init_unknown", "NVML_ERROR_UNKNOWN", 999),
        ("init_no_permission", "NVML_ERROR_NO_PERMISSION", 4),
    ],
)
def test_init_that_fails(collect: Collect, scenario: str, name: str, code: int) -> None:
    found = collect(scenario)
    assert found.section is not None
    assert (found.section.init_error, found.section.init_error_code) == (name, code)
    assert found.section.gpus == ()
    assert found.section.nvml_version == "12.550.163.01"  # answers without a driver


@pytest.mark.parametrize("how", ["code", "missing"])
def test_no_library(
    collect: Collect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    if how == "code":
        found = collect("init_library_not_found")
    else:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        host = LiveHost()
        until_ns = host.monotonic_ns() + int(10e9)
        with NvmlCollector(host, until_ns=until_ns) as collector:
            found = Collected(*collector.first())
    assert found.section is None
    (gap,) = found.gaps
    assert (gap.reason, gap.fields, gap.devices) == (GapReason.ABSENT, (), ())
    assert "libnvidia-ml.so.1" in (gap.detail or "") and "utility" in (gap.allow or "")


# --- drivers ---


def test_driver_470(collect: Collect) -> None:
    """Throttle names of the reasons, the process list's second version, page retirement."""
    found = collect(
        "page_retirement", "ClocksEventReasons = 0x4\nComputeRunningProcesses = 71:1GiB"
    )
    gpu = found.gpus[5]
    assert found.states == ["ok"] * 8
    assert gpu.readings[0].clocks_event_reasons == 4
    assert gpu.limits.supported_clocks_event_reasons is not None
    assert [(p.pid, p.used_memory_bytes) for p in gpu.processes or ()] == [(71, 1 << 30)]
    assert gpu.memory_total_bytes is not None and gpu.memory_reserved_bytes is None
    assert gpu.retired_pages == RetiredPages(multiple_single_bit=1, double_bit=2, pending=True)
    assert gpu.row_remap is None
    assert gap_of(found.gaps, "row_remap", gpu.key).reason is GapReason.UNSUPPORTED
    assert gap_of(found.gaps, "reason_hw_thermal_ns", gpu.key).reason is GapReason.UNSUPPORTED
    assert gpu.nvlinks is not None and len(gpu.nvlinks) == 6


@pytest.mark.parametrize(
    ("driver", "known"),
    [
        ("535.261.03", False),
        ("550.163.01", False),
        ("575.57.08", True),  # 251-253
        ("580.65.06", True),
        ("580.82.07", True),  # 269-271
        ("595.80", True),
    ],
)
def test_field_ids_follow_the_driver(collect: Collect, driver: str, known: bool) -> None:
    """The double answers each id as its driver does: the other ids mean something else there."""
    text = f"driver = {driver}\nfield.sw_thermal = 11\nfield.hw_thermal = 12\n"
    found = collect("h100x8", text + "field.hw_power_brake = 13\ngpus = 1")
    reading = found.gpus[0].readings[0]
    counters = (
        reading.reason_sw_thermal_ns,
        reading.reason_hw_thermal_ns,
        reading.reason_hw_power_brake_ns,
    )
    assert counters == ((11, 12, 13) if known else (None, None, None))
    asked = [name for name in found.asked("gpu0") if "thermal" in name or "brake" in name]
    assert bool(asked) == known


@pytest.mark.parametrize(
    ("driver", "version"), [("535.54.03", "_v2"), ("535.86.10", "_v2"), ("535.261.03", "_v3")]
)
def test_process_list_of_the_535_drivers(collect: Collect, driver: str, version: str) -> None:
    """Early 535 changed the third version's layout without its name: pids would be garbage."""
    hidden = {"_v2": "_v3", "_v3": "_v2"}[version]
    text = f"driver = {driver}\nhide = nvmlDeviceGetComputeRunningProcesses{hidden}\ngpus = 1\n"
    found = collect("h100x8", text + "ComputeRunningProcesses = 71:1GiB")
    assert [p.pid for p in found.gpus[0].processes or ()] == [71]


def test_what_driver_590_deprecated(collect: Collect) -> None:
    text = "driver = 595.80\ngpus = 2\nApplicationsClock = !26\nDefaultApplicationsClock = !26"
    found = collect("h100x8", text)
    gpu = found.gpus[0]
    assert gpu.limits.sm_application_clock_mhz is None
    gap = gap_of(found.gaps, "sm_application_clock_mhz", gpu.key)
    assert (gap.reason, gap.detail) == (GapReason.UNSUPPORTED, "NVML_ERROR_DEPRECATED")
    assert gpu.readings[0].clocks_event_reasons is not None
    assert gpu.readings[0].margin_temperature_c == 58
    assert gpu.recovery_action == 0


def test_recovery_before_field_230(collect: Collect) -> None:
    text = "driver = 560.35.03\ngpus = 3\nfield.226-227 = 0\n[gpu 1]\nfield.226 = 1\n[gpu 2]\n"
    found = collect("h100x8", text + "field.226-227 = 1")
    assert [gpu.recovery_action for gpu in found.gpus] == [0, 1, 4]


# --- parts ---


def test_mig(collect: Collect) -> None:
    found = collect("h100_mig")
    gpu = found.gpus[0]
    assert gpu.mig_mode is True
    assert gpu.mig_instances == (
        MigInstance(
            uuid="MIG-1f0e5a40-1111-5222-8333-000000000000",
            gpu_instance_id=1,
            compute_instance_id=0,
            memory_total_bytes=40448 * MIB,
        ),
        MigInstance(
            uuid="MIG-1f0e5a40-1111-5222-8333-000000000001",
            gpu_instance_id=2,
            compute_instance_id=0,
            memory_total_bytes=40448 * MIB,
        ),
    )
    for name in ("utilization_gpu_percent", "row_remap"):
        assert gap_of(found.gaps, name, gpu.key).reason is GapReason.UNSUPPORTED
    assert gpu.readings[0].power_mw == 244100
    assert found.gpus[1].mig_instances == ()


def test_a_vgpu_guest(collect: Collect) -> None:
    found = collect("vgpu_guest")
    gpu = found.gpus[0]
    assert (gpu.state, gpu.virtualization_mode) == (GpuState.OK, 2)
    assert gpu.readings[0].power_mw is None
    assert gpu.limits.supported_clocks_event_reasons is None
    for name in ("power_mw", "supported_clocks_event_reasons", "nvlinks", "temperature_c"):
        assert gap_of(found.gaps, name, gpu.key).reason is GapReason.UNSUPPORTED
    assert {gap.reason for gap in found.gaps} == {GapReason.UNSUPPORTED}
    assert len(found.gaps) <= 5


def test_nvlink_5(collect: Collect) -> None:
    found = collect("gb200x4")
    gpu = found.gpus[0]
    assert gpu.nvlinks is not None and len(gpu.nvlinks) == 18
    assert (gpu.nvlinks[0].version, gpu.nvlinks[0].speed_mbps) == (7, 53125)
    errors = gpu.readings[0].nvlink_errors
    assert errors is not None
    assert errors[17] == NvLinkErrors(
        malformed_packets=0, buffer_overrun=0, rx_errors=0, local_link_integrity=0,
        link_recovery_successful=0, link_recovery_failed=0, effective_errors=0, symbol_errors=11,
        effective_ber=15e-255, symbol_ber=7e-12,
    )  # fmt: skip
    assert (gpu.c2c_enabled, gpu.c2c_link_count) == (True, 14)
    assert not [name for name in found.asked("gpu0") if name.startswith("NvLinkErrorCounter")]


def test_a_link_that_cannot_be_read_hides_no_other(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 2\n[gpu 0]\nNvLinkState.5 = !UNKNOWN\nfield.165.5 = !UNKNOWN")
    links = found.gpus[0].nvlinks
    assert links is not None
    assert [link.state for link in links] == [1] * 5 + [None] + [1] * 12
    gap = gap_of(found.gaps, "nvlinks", found.gpus[0].key)
    assert (gap.reason, gap.devices) == (GapReason.MALFORMED, (found.gpus[0].key,))


# --- what else goes wrong ---


def kill_child(collector: NvmlCollector) -> None:
    channel = collector._channel
    assert isinstance(channel, LiveNvmlChannel)
    channel._process.send_signal(signal.SIGKILL)


def test_a_child_killed_between_the_readings(collect: Collect) -> None:
    found = collect("h100x8", "gpus = 3", between=kill_child)
    assert found.states == ["unknown", "ok", "ok"]
    assert found.reading_counts == [1, 2, 2]
    assert "signal 9" in (found.gpus[0].state_detail or "")
    gap = gap_of(found.again, None, found.gpus[0].key)
    assert gap.reason is GapReason.MALFORMED


def test_a_child_killed_in_a_call(collect: Collect) -> None:
    """As the kernel does when memory runs out: the next GPUs go on."""

    def kill_soon() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for pid in children_of(os.getpid()):
                with contextlib.suppress(OSError):
                    if (
                        b"nvml_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
                        and Path(f"/proc/{pid}/wchan").exists()
                        and asleep_since(pid, 0.3)
                    ):
                        os.kill(pid, signal.SIGKILL)
                        return
            time.sleep(0.05)

    killer = threading.Thread(target=kill_soon)
    killer.start()
    found = collect("h100x8", "gpus = 3\n[gpu 1]\nPersistenceMode = ~hang", deadline_s=8.0)
    killer.join()
    assert found.states == ["ok", "unknown", "ok"]
    assert found.gpus[1].state_call == "nvmlDeviceGetPersistenceMode"
    assert "signal 9" in (found.gpus[1].state_detail or "")
    assert found.reading_counts == [2, 0, 2]
    assert found.seconds < 7


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [
        int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()
    ]


def asleep_since(pid: int, seconds: float) -> bool:
    """Whether the process used no CPU for a while."""

    def used() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]

    before = used()
    time.sleep(seconds)
    return used() == before


PARENT = """
import sys, time
from agent.collect.nvml import NvmlCollector
from agent.host import LiveHost
host = LiveHost()
collector = NvmlCollector(host, until_ns=host.monotonic_ns() + int(60e9), call_deadline_s=50.0)
print("ready", flush=True)
print(collector.first()[0].device_count, flush=True)
print("pynvml" in sys.modules, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("scenario", ["h100x8", "gpu_hung_hard"])
def test_the_child_dies_with_its_parent(nvml: Double, scenario: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=ROOT,
        env=os.environ | nvml.environ(scenario),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        if scenario == "h100x8":
            assert [parent.stdout.readline() for _ in range(2)] == ["8\n", "False\n"]
        deadline = time.monotonic() + 10
        while not (children := children_of(parent.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        (child,) = children
        parent.kill()
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_another_pynvml_on_the_path_is_not_loaded(nvml: Double, tmp_path: Path) -> None:
    """Neither by PYTHONPATH nor by the current folder, for the parent nor for the child."""
    sprung = tmp_path / "sprung"
    (tmp_path / "pynvml.py").write_text(f"open({str(sprung)!r}, 'w')\nraise SystemExit(3)\n")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n" + PARENT],
        cwd=tmp_path,
        env=os.environ | nvml.environ("h100x8") | {"PYTHONPATH": str(tmp_path)},
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["ready", "8", "False"], done.stderr
    assert not sprung.exists()


def test_an_index_that_became_another_gpu(collect: Collect) -> None:
    """The GPU asked again in a fresh process is another one: nothing of it is mixed in."""
    text = "gpus = 2\n[gpu 0]\nUUID = ?2: GPU-aaaa : GPU-bbbb"
    found = collect("h100x8", text)
    gpu = found.gpus[0]
    assert (gpu.uuid, len(gpu.readings), gpu.state) == ("GPU-aaaa", 1, GpuState.OK)
    gap = gap_of(found.again, "readings", gpu.key)
    assert "GPU-aaaa" in (gap.detail or "") and "GPU-bbbb" in (gap.detail or "")
    assert found.reading_counts == [1, 2]


def test_a_fresh_process_that_lists_the_gpus_otherwise(
    collect: Collect, nvml: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that fell off moves the indices of those behind it."""
    other = tmp_path / "other.scn"
    h100 = nvml_double.scenario_path("h100x8")
    other.write_text(f"include = {h100}\ngpus = 1\nUUID = GPU-other\npci = 0000:ff:00.0\n")

    def swap(collector: NvmlCollector) -> None:
        kill_child(collector)
        monkeypatch.setenv("LAGGARD_NVML_DOUBLE_SCENARIO", str(other))

    found = collect("h100x8", "gpus = 3", between=swap)
    assert found.states[0] == "unknown"
    assert [gpu.pci for gpu in found.gpus] == ["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"]
    assert all(not (gpu.uuid or "").endswith("other") for gpu in found.gpus)
    assert found.reading_counts == [1, 1, 1]


@pytest.mark.parametrize("text", ["", "gpus = 3\n[gpu 1]\nPowerUsage = ~hang"])
def test_a_recording_replays_to_equal_sections(collect: Collect, text: str) -> None:
    recording = RecordingHost(LiveHost())
    live = collect("h100x8_busy", text, deadline_s=0.8, host=recording)
    host = FixtureHost(parse_fstree(format_fstree(recording.tree)))
    until_ns = host.monotonic_ns() + int(20e9)
    with NvmlCollector(host, until_ns=until_ns, call_deadline_s=3.0) as collector:
        section, gaps = collector.first()
        assert section is not None
        section, again = collector.second(section)
    assert (section, gaps, again) == (live.section, live.gaps, live.again)


def test_a_recording_of_a_child_that_died(collect: Collect) -> None:
    recording = RecordingHost(LiveHost())
    live = collect("h100x8", "gpus = 2", host=recording, between=kill_recorded_child)
    host = FixtureHost(parse_fstree(format_fstree(recording.tree)))
    with NvmlCollector(host, until_ns=host.monotonic_ns() + int(20e9)) as collector:
        section, gaps = collector.first()
        assert section is not None
        section, again = collector.second(section)
    assert live.states == ["unknown", "ok"]
    assert (section, gaps, again) == (live.section, live.gaps, live.again)


def kill_recorded_child(collector: NvmlCollector) -> None:
    inner = collector._channel._inner  # type: ignore[union-attr]
    assert isinstance(inner, LiveNvmlChannel)
    inner._process.send_signal(signal.SIGKILL)
