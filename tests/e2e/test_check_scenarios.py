"""Scenario of the NVML double -> the real collector -> all probes -> what is said of which GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from agent.evaluate import Evaluation, evaluate
from probes.finding import Finding, Severity
from probes.gap import GapReason
from probes.registry import discover
from probes.result import Health, Outcome
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice, PciSection
from probes.snapshot.process import ProcessSection
from tests.support import nvml_double
from tests.support.scenario_snapshots import CALL_DEADLINE_S, Collected, Collections

PROBES = discover()

HEALTHY = (
    "a100x8_busy",
    "gb200x4",
    "h100_mig",
    "h100_nvl",
    "h100x8",
    "h100x8_busy",
    "h100x8_odd",
    "h100x8_power_capped",
    "h200x8",
    "init_slow",
    "l40s",
    "rtx4090_idle",
    "v100x8",
    "vgpu_guest",
)


@dataclass(frozen=True)
class Expected:
    """One finding: its id, its GPU (None: the host), and what the summary must say."""

    id: str
    gpu: int | None
    severity: Severity
    says: str  # a regular expression
    link: int | None = None


W, C, INFO = Severity.WARNING, Severity.CRITICAL, Severity.INFO
FAULTS: dict[str, tuple[Expected, ...]] = {
    # clocks, power, heat
    "hw_thermal": (
        Expected("clocks.hw-thermal-slowdown", 5, W, r"(5[5-9]|6[0-5]) % of .* 1215 MHz of 1980"),
        Expected("thermal.near-limit", 5, W, r"88 C, 1 C beyond .* 87 C"),
    ),
    "sw_thermal": (Expected("clocks.sw-thermal-slowdown", 2, W, r"3\d % of .* 1620 MHz of 1980"),),
    "power_brake": (Expected("clocks.hw-power-brake", 3, W, r"both readings: SM 990 MHz of 1980"),),
    "power_brake_counter": (
        Expected("clocks.hw-power-brake", 3, W, r"2\d % of .* SM 1740 MHz of 1980"),
    ),
    "power_limit_low": (
        Expected("power.limit-low", 2, W, r"500 W, siblings 700 W, default 700 W"),
        Expected("clocks.sw-power-cap", 2, W, r"9\d % of .* 1545 MHz of 1980; limit 500 W"),
    ),
    "legacy_reason_bits": (
        Expected("clocks.reliability", 1, W, r"(8[5-9]|9\d) % .* 1410 MHz of 1980"),
        Expected("clocks.board-limit", 4, W, r"(8[5-9]|9\d) % .* 1425 MHz of 1980"),
        Expected("clocks.unknown-reason", 6, W, r"0x4000\b.* 1400 MHz, siblings 1980"),
    ),
    "clocks_low": (
        Expected("clocks.low-without-reason", 3, W, r"1200 MHz .* 7 loaded siblings run 1980"),
    ),
    # PCIe
    "pcie_gen1": (Expected("pcie.speed-trained-down", 6, W, r"Gen1 under load, .* Gen5"),),
    "pcie_x8": (Expected("pcie.width-trained-down", 4, W, r"x8, .* x16"),),
    "pcie_replays": (Expected("pcie.replay-growth", 0, W, r": \d+ PCIe replays in 0\.\d s"),),
    # memory
    "ecc_uncorrectable": (
        Expected("memory.ecc-uncorrectable", 7, W, r"2 uncorrectable .*2 in DRAM"),
    ),
    "sram_threshold": (Expected("memory.sram-threshold", 1, W, r"SRAM error threshold"),),
    "remap_pending": (
        Expected("memory.row-remap-pending", 3, W, r"pending"),
        Expected("memory.ecc-uncorrectable", 3, W, r"1 uncorrectable"),
    ),
    "remap_failed": (
        Expected("memory.row-remap-failure", 6, C, r"failed to remap"),
        Expected("memory.row-remap-spares", 6, W, r"1 memory banks? without .* 8 rows remapped"),
    ),
    "page_retirement": (
        Expected("memory.page-retirement", 5, W, r"3 retired .*2 by double-bit.* pending"),
        Expected("memory.ecc-uncorrectable", 5, W, r"2 uncorrectable"),
    ),
    # NVLink, fabric
    "nvlink_down": (Expected("nvlink.down", 2, W, r"NVLink 7 is off, 7 of 7 siblings", link=7),),
    "nvlink_crc": (
        Expected("nvlink.errors", 5, W, r"NVLink 11 .*1[45]\d\d/s CRC errors", link=11),
    ),
    "nvlink5_errors": (Expected("nvlink.errors", 1, W, r"NVLink 3 .*failed recoveries", link=3),),
    "fabric_in_progress": (Expected("fabric.state", None, C, r"in progress on all 8 GPUs"),),
    "fabric_failed": (Expected("fabric.state", 1, C, r"status 999, 7 others have joined"),),
    "fabric_degraded": (Expected("fabric.health", 4, W, r"degraded bandwidth \(mask 0x51a9"),),
    # the GPU or the driver itself
    "recovery_action_1": (Expected("gpu.recovery-action", 2, C, r"action 1"),),
    "recovery_action_2": (Expected("gpu.recovery-action", 2, C, r"reboot .*action 2"),),
    "recovery_action_4": (Expected("gpu.recovery-action", 2, W, r"drain and reset \(action 4"),),
    "gpu_lost": (Expected("gpu.lost", 4, C, r"lost .* 7 of 8 GPUs answer"),),
    "gpu_lost_midway": (Expected("gpu.lost", 4, C, r"0000:9d:00\.0 is lost .* 7 of 8"),),
    "reset_required": (Expected("gpu.not-usable", 3, C, r"reset .*NVML_ERROR_RESET_REQUIRED"),),
    "gpu_hung": (Expected("gpu.hung", 6, C, r"nvmlDeviceGet\w+ did not return within 3 s"),),
    "gpu_hung_hard": (Expected("gpu.hung", 6, C, r"did not return within 3 s"),),
    "handle_hung": (Expected("gpu.hung", 0, C, r"nvmlDeviceGetHandleByIndex did not return"),),
    "init_hung": (Expected("nvml.init-failed", None, C, r"nvmlInit did not return"),),
    "init_unknown": (Expected("nvml.init-failed", None, C, r"NVML_ERROR_UNKNOWN"),),
    "init_no_permission": (Expected("nvml.init-failed", None, W, r"may not open"),),
    "version_mismatch": (Expected("nvml.init-failed", None, C, r"different versions"),),
}
# Worth knowing, and no reason to keep a job away.
NOTES: dict[str, Expected] = {
    "slow_call": Expected("nvml.slow-call", 1, INFO, r"nvmlDeviceGetPowerUsage took 1\.\d s"),
    "vbios_differs": Expected(
        "gpu.versions-differ", 5, INFO, r"96\.00\.61\.00\.01, siblings 96\.00\.89\.00\.01"
    ),
    "h100_mig": Expected("gpu.mig", 0, INFO, r"MIG on, siblings of its model have it off"),
    "h100x8_odd": Expected("memory.ecc-aggregate", 0, INFO, r"1 uncorrectable .* \(history\)"),
}


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest, nvml: nvml_double.Double) -> Iterator[Collections]:
    """Scenarios, all begun at once when they belong to selected tests."""
    wanted = {
        item.callspec.params["scenario"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    collections = Collections(nvml, sorted(wanted))
    yield collections
    collections.close()


def judged(collected: Collected) -> Evaluation:
    return judge(collected.snapshot)


def judge(snapshot: NodeSnapshot) -> Evaluation:
    evaluation = evaluate(snapshot, PROBES)
    assert [r for r in evaluation.results if r.outcome is Outcome.ERROR] == []
    return evaluation


def gpus(collected: Collected) -> tuple[Gpu, ...]:
    assert collected.snapshot.nvml is not None
    return collected.snapshot.nvml.gpus


def loud(evaluation: Evaluation) -> list[Finding]:
    return [f for f in evaluation.findings if f.severity is not INFO]


def check(collected: Collected, found: Finding, expected: Expected) -> None:
    """Severity, numbers, proof, and a GPU with every identifier that is known."""
    assert found.severity is expected.severity, found.summary
    assert re.search(expected.says, found.summary), found.summary
    assert all(e.recheck for e in found.evidence), found.id
    if expected.gpu is not None:
        gpu = gpus(collected)[expected.gpu]
        assert (found.component.pci, found.component.gpu_uuid) == (gpu.pci, gpu.uuid)


@pytest.mark.parametrize("scenario", HEALTHY)
def test_healthy(collected: Collections, scenario: str) -> None:
    """Nothing above info, and nothing that should have been readable is missing."""
    case = collected[scenario]
    evaluation = judged(case)
    assert [(f.id, f.summary) for f in loud(evaluation)] == []
    assert [g for g in case.snapshot.gaps if g.reason.hides_something] == []
    assert evaluation.health is Health.OK
    assert all(gpu.state is GpuState.OK and len(gpu.readings) == 2 for gpu in gpus(case))


@pytest.mark.parametrize("scenario", FAULTS)
def test_fault(collected: Collections, scenario: str) -> None:
    """Exactly the findings of the scenario, on its GPU, with its numbers."""
    case = collected[scenario]
    findings = loud(judged(case))
    by_place = {(f.id, f.component.index, f.component.link): f for f in findings}
    wanted = {(e.id, e.gpu, e.link): e for e in FAULTS[scenario]}
    assert by_place.keys() == wanted.keys(), [f.summary for f in findings]
    assert len(findings) == len(wanted)
    for place, expected in wanted.items():
        check(case, by_place[place], expected)


@pytest.mark.parametrize("scenario", NOTES)
def test_worth_knowing(collected: Collections, scenario: str) -> None:
    case = collected[scenario]
    evaluation = judged(case)
    assert evaluation.health is Health.OK
    (found,) = evaluation.findings
    check(case, found, NOTES[scenario])


@pytest.mark.parametrize("scenario", ["gpu_lost", "gpu_lost_midway", "gpu_hung", "gpu_hung_hard"])
def test_one_bad_gpu_hides_no_other(collected: Collections, scenario: str) -> None:
    bad = 4 if "lost" in scenario else 6
    states = {gpu.index: (gpu.state, len(gpu.readings)) for gpu in gpus(collected[scenario])}
    assert states.pop(bad)[0] in (GpuState.LOST, GpuState.HUNG)
    assert states == {index: (GpuState.OK, 2) for index in range(8) if index != bad}


@pytest.mark.parametrize("scenario", ["gpu_hung", "gpu_hung_hard", "handle_hung"])
def test_a_hung_gpu_costs_its_deadline_once(collected: Collections, scenario: str) -> None:
    assert CALL_DEADLINE_S < collected[scenario].seconds < 2 * CALL_DEADLINE_S


def test_a_hung_call_is_described(collected: Collections) -> None:
    (gap,) = [g for g in collected["gpu_hung"].snapshot.gaps if g.reason is GapReason.TIMEOUT]
    assert gap.devices == ("0000:d1:00.0",)
    assert gap.detail and "in state D" in gap.detail


def test_gpus_of_others_are_no_fault(collected: Collections) -> None:
    """A container with four of eight GPUs: the count includes the others."""
    case = collected["no_permission"]
    evaluation = judged(case)
    assert [gpu.state for gpu in gpus(case)] == [GpuState.OK] * 4 + [GpuState.NO_PERMISSION] * 4
    assert evaluation.findings == ()
    (result,) = [r for r in evaluation.results if r.id == "gpu.no-permission"]
    assert [note for note in result.notes if "hidden from this user or container" in note] != []


def test_driver_not_loaded_matters_where_there_are_gpus(collected: Collections) -> None:
    """Without GPUs on the bus it is a machine without GPUs; unread, it is unknown."""
    snapshot = collected["driver_not_loaded"].snapshot
    (unread,) = [r for r in judge(snapshot).results if r.id == "nvml.init-failed"]
    assert unread.outcome is Outcome.UNKNOWN
    without = structs.replace(snapshot, pci=PciSection())
    assert judge(without).findings == ()
    device = PciDevice(address="0000:1b:00.0", class_code=0x030200, vendor_id=0x10DE)
    findings = judge(structs.replace(snapshot, pci=PciSection(devices=(device,)))).findings
    assert [(f.id, f.severity) for f in findings if f.id.startswith("nvml.")] == [
        ("nvml.init-failed", C)
    ]


def test_no_library_is_a_machine_without_a_driver(collected: Collections) -> None:
    case = collected["init_library_not_found"]
    assert case.snapshot.nvml is None
    assert [(gap.source, gap.reason) for gap in case.snapshot.gaps] == [("nvml", GapReason.ABSENT)]
    assert judged(case).findings == ()


def test_memory_that_nobody_holds(collected: Collections) -> None:
    processes = ProcessSection(scanned=312, host_pid_namespace=True)
    snapshot = structs.replace(collected["memory_orphan"].snapshot, processes=processes)
    (found,) = loud(judge(snapshot))
    expected = Expected("gpu.ghost-memory", 2, W, r"41\.0 GiB")
    assert (found.id, found.component.index) == (expected.id, expected.gpu)
    check(collected["memory_orphan"], found, expected)


def test_the_library_is_asked_sparingly(nvml: nvml_double.Double, tmp_path: Path) -> None:
    """No call that samples for milliseconds; process lists and identity once, not per reading."""
    log = tmp_path / "calls"
    collections = Collections(nvml, ["h100x8_busy"], log=log)
    assert collections["h100x8_busy"].snapshot.nvml is not None
    collections.close()
    asked = Counter(line.split()[1] for line in nvml_double.calls(log) if line.startswith("gpu3 "))
    assert asked["PcieThroughput.0"] == 0
    assert asked["ComputeRunningProcesses"] == 2  # pynvml asks for the size first
    assert asked["Serial"] == 1
    assert asked["PowerUsage"] == 2
    assert sum(asked.values()) < 500


RUN = "import sys; from agent.cli import run; sys.exit(run(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("scenario", "exit_code", "ids"),
    [
        ("h100x8_busy", 0, []),
        ("power_brake_counter", 1, ["clocks.hw-power-brake"]),
        ("gpu_hung_hard", 2, ["gpu.hung"]),
    ],
)
def test_the_command_ends_in_time_by_health(
    nvml: nvml_double.Double, scenario: str, exit_code: int, ids: list[str]
) -> None:
    """The whole command; rules about the machine that runs the tests are left out."""
    only = [
        part for family in ("gpu", "clocks", "pcie", "nvlink") for part in ("--only", f"{family}.*")
    ]
    options = ["--sample", "0.2", "--deadline", "10", "--no-state", "--format", "json", *only]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", RUN, "check", *options],
        env=os.environ | nvml.environ(scenario),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - began < 10
    report = json.loads(done.stdout)
    assert [f["id"] for f in report["findings"] if f["severity"] != "info"] == ids
    assert done.returncode == exit_code
