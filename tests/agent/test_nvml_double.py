"""The NVML double itself, seen through the real pynvml in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import nvml_double
from tests.support.nvml_double import Double

PRELUDE = """
import json, sys, time
import pynvml as n
def code(call, *args):
    try:
        return call(*args)
    except n.NVMLError as error:
        return "!%d" % error.value
def say(value):
    print(json.dumps(value), flush=True)
"""


def ask(double: Double, scenario: str | Path, program: str, log: Path | None = None) -> Any:
    """Run a program with the scenario's library in place; what it said last."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program],
        env=os.environ | double.environ(scenario, log),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write(tmp_path: Path, text: str, base: str = "h100x8.scn") -> Path:
    path = tmp_path / "case.scn"
    path.write_text(f"include = {nvml_double.SCENARIOS / base}\n{text}\n")
    return path


FIRST = "n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)\n"


def test_identity_of_eight_gpus(nvml: Double) -> None:
    said = ask(
        nvml,
        "h100x8",
        """
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
say({
    "pci": [n.nvmlDeviceGetPciInfo(h).busId for h in handles],
    "uuid": n.nvmlDeviceGetUUID(handles[7]),
    "legacy": n.nvmlDeviceGetPciInfo(handles[1]).busIdLegacy,
    "device": n.nvmlDeviceGetPciInfo(handles[1]).pciDeviceId,
    "name": n.nvmlDeviceGetName(handles[0]),
    "driver": n.nvmlSystemGetDriverVersion(),
    "nvml": n.nvmlSystemGetNVMLVersion(),
    "cuda": n.nvmlSystemGetCudaDriverVersion(),
    "gsp": n.nvmlDeviceGetGspFirmwareVersion(handles[0]).decode(),
    "compute": n.nvmlDeviceGetCudaComputeCapability(handles[0]),
    "by_uuid": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(handles[5]))),
    "by_pci": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId("00000000:DF:00.0")),
    "beyond": code(n.nvmlDeviceGetHandleByIndex, 8),
})
""",
    )
    assert said == {
        "pci": [
            "00000000:1B:00.0",
            "00000000:43:00.0",
            "00000000:52:00.0",
            "00000000:61:00.0",
            "00000000:9D:00.0",
            "00000000:C3:00.0",
            "00000000:D1:00.0",
            "00000000:DF:00.0",
        ],
        "uuid": "GPU-5a1c0de0-1111-4222-8333-000000000007",
        "legacy": "0000:43:00.0",
        "device": 0x233010DE,
        "name": "NVIDIA H100 80GB HBM3",
        "driver": "550.163.01",
        "nvml": "12.550.163.01",
        "cuda": 12040,
        "gsp": "550.163.01",
        "compute": [9, 0],
        "by_uuid": 5,
        "by_pci": 7,
        "beyond": "!2",
    }


def test_every_getter_gives_the_value_of_its_key(nvml: Double) -> None:
    """Two or more values in their right places: a wrong signature would corrupt memory."""
    said = ask(
        nvml,
        "h100x8_busy",
        FIRST
        + """
def members(struct):
    return [getattr(struct, field[0]) for field in struct._fields_]
say({
    "utilization": members(n.nvmlDeviceGetUtilizationRates(h)),
    "encoder": n.nvmlDeviceGetEncoderUtilization(h),
    "ecc": n.nvmlDeviceGetEccMode(h),
    "constraints": n.nvmlDeviceGetPowerManagementLimitConstraints(h),
    "memory": members(n.nvmlDeviceGetMemoryInfo(h)),
    "memory_v2": members(n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2))[1:],
    "bar1": members(n.nvmlDeviceGetBAR1MemoryInfo(h)),
    "remapped": n.nvmlDeviceGetRemappedRows(h),
    "histogram": members(n.nvmlDeviceGetRowRemapperHistogram(h)),
    "conf_compute": members(n.nvmlSystemGetConfComputeState()),
    "gsp_mode": n.nvmlDeviceGetGspFirmwareMode(h),
    "violation": n.nvmlDeviceGetViolationStatus(h, 0).violationTime,
    "inforom": n.nvmlDeviceGetInforomImageVersion(h),
    "vbios": n.nvmlDeviceGetVbiosVersion(h),
    "part": n.nvmlDeviceGetBoardPartNumber(h),
    "virtualization": n.nvmlDeviceGetVirtualizationMode(h),
    "clocks": [n.nvmlDeviceGetClockInfo(h, t) for t in range(4)],
    "max_clocks": [n.nvmlDeviceGetMaxClockInfo(h, t) for t in range(4)],
    "thresholds": [n.nvmlDeviceGetTemperatureThreshold(h, t) for t in range(4)],
    "supported": n.nvmlDeviceGetSupportedClocksEventReasons(h),
    "c2c": n.nvmlDeviceGetC2cModeInfoV(h).isC2cEnabled,
    "link": [n.nvmlDeviceGetNvLinkVersion(h, 4), n.nvmlDeviceGetNvLinkRemoteDeviceType(h, 4),
             n.nvmlDeviceGetNvLinkRemotePciInfo(h, 4).busId],
    "detail": [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
})
""",
    )
    mib = 2**20
    assert said == {
        "utilization": [99, 54],
        "encoder": [0, 167000],
        "ecc": [1, 1],
        "constraints": [200000, 700000],
        "memory": [81559 * mib, (81559 - 551 - 74208) * mib, (551 + 74208) * mib],
        "memory_v2": [
            81559 * mib,
            551 * mib,
            (81559 - 551 - 74208) * mib,
            74208 * mib,
        ],
        "bar1": [2**37, 2**37 - mib, mib],
        "remapped": [0, 0, 0, 0],
        "histogram": [2560, 0, 0, 0, 0],
        "conf_compute": [0, 0, 0],
        "gsp_mode": [1, 1],
        "violation": 182003117000,
        "inforom": "G520.0200.00.05",
        "vbios": "96.00.89.00.01",
        "part": "692-2G520-0200-000",
        "virtualization": 0,
        "clocks": [1980, 1980, 2619, 1545],
        "max_clocks": [1980, 1980, 2619, 1545],
        "thresholds": [93, 87, 95, 85],
        "supported": 0x1FF,
        "c2c": 0,
        "link": [6, 2, "00000000:06:00.0"],
        "detail": [41000],
    }


def test_no_getter_corrupts_memory(nvml: Double) -> None:
    program = (
        FIRST
        + """
getters = [
    getattr(n, name) for name in dir(n)
    if name.startswith("nvmlDeviceGet") and getattr(n, name).__code__.co_argcount == 1
    and "HandleBy" not in name
]
for getter in getters:
    for _ in range(20):
        code(getter, h)
say(len(getters) > 80)
"""
    )
    assert ask(nvml, "h100x8_busy", program) is True


def test_field_values_have_their_types_and_scopes(nvml: Double, tmp_path: Path) -> None:
    scenario = write(
        tmp_path,
        "field.60 = double:1.5\nfield.61 = sll:-9000000000\nfield.62 = ushort:65535\n"
        "field.63 = ulong:4294967296\nfield.164.3 = uint:0\nNvLinkErrorCounter.5.2 = 77",
    )
    said = ask(
        nvml,
        scenario,
        FIRST
        + """
names = ["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"]
asked = [60, 61, 62, 63, 194, 230, 93, (164, 2), (164, 3), (163, 5), (165, 17), (165, 18), 83]
say([[v.nvmlReturn, v.valueType, getattr(v.value, names[v.valueType]), v.scopeId]
     for v in n.nvmlDeviceGetFieldValues(h, asked)][:12])
""",
    )
    assert said == [
        [0, 0, 1.5, 0],
        [0, 4, -9000000000, 0],
        [0, 6, 65535, 0],
        [0, 2, 4294967296, 0],
        [0, 5, -2, 0],
        [2, 0, 0.0, 0],  # recovery action is not known to driver 550
        [3, 0, 0.0, 0],  # known, but this board does not have it
        [0, 1, 26562, 2],
        [0, 1, 0, 3],
        [0, 3, 77, 5],
        [0, 1, 1, 17],
        [3, 0, 0.0, 18],  # no such link
    ]


@pytest.mark.parametrize(
    ("driver", "answers"),
    [
        ("550.163.01", ["!2", "!2"]),  # no such counters
        ("570.86.10", ["!3", "!2"]),  # 251 is power smoothing here
        ("575.57.08", [5, "!2"]),
        ("580.65.06", [5, "!2"]),
        ("580.82.07", [9, 5]),
        ("590.48.01", [9, 5]),
    ],
)
def test_event_reason_counters_move_with_the_driver(
    nvml: Double, tmp_path: Path, driver: str, answers: list[object]
) -> None:
    smoothing = "field.251 = 9" if answers[0] == 9 else ""
    scenario = write(tmp_path, f"driver = {driver}\nfield.sw_thermal = 5\n{smoothing}")
    program = """
say(["!%d" % v.nvmlReturn if v.nvmlReturn else v.value.ullVal
     for v in n.nvmlDeviceGetFieldValues(h, [251, 269])])
"""
    assert ask(nvml, scenario, FIRST + program) == answers


def test_versioned_structs_are_checked(nvml: Double, tmp_path: Path) -> None:
    program = (
        FIRST
        + """
def fabric(struct):
    s = struct()
    return code(lambda: n.nvmlDeviceGetGpuFabricInfoV(h, n.byref(s))) or [s.state, s.healthMask]
sram = n.c_nvmlEccSramErrorStatus_v1_t(); wrong = n.c_nvmlEccSramErrorStatus_v1_t()
wrong.version += 1
say({
    "v3": fabric(n.c_nvmlGpuFabricInfo_v3_t), "v2": fabric(n.c_nvmlGpuFabricInfo_v2_t),
    "sram": code(lambda: n.nvmlDeviceGetSramEccErrorStatus(h, n.byref(sram))),
    "sram_wrong": code(lambda: n.nvmlDeviceGetSramEccErrorStatus(h, n.byref(wrong))),
    "counters": [sram.aggregateUncParity, sram.volatileCor, sram.bThresholdExceeded],
    "memory": n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).reserved,
    "memory_wrong": code(lambda: n.nvmlDeviceGetMemoryInfo(h, 0x03000028).used),
})
"""
    )
    text = "GpuFabricInfo = 3 0 7 0x1aa 1\nSramEccErrorStatus = 2 5 0 0 0 6 0 7 0 0 0 1"
    expected = {
        "v3": "!25",
        "v2": [3, 0x1AA],
        "sram": 0,
        "sram_wrong": "!25",
        "counters": [2, 6, 1],
        "memory": 551 * 2**20,
        "memory_wrong": "!25",
    }
    assert ask(nvml, write(tmp_path, text), program) == expected
    newer = write(tmp_path, text + "\ndriver = 580.95.05")
    assert ask(nvml, newer, program) == expected | {"v3": [3, 0x1AA]}


def test_old_drivers_lack_the_newer_symbols(nvml: Double) -> None:
    program = (
        FIRST
        + """
say({
    "reasons": code(n.nvmlDeviceGetCurrentClocksEventReasons, h),
    "throttle": code(n.nvmlDeviceGetCurrentClocksThrottleReasons, h),
    "processes_v3": code(lambda: len(n.nvmlDeviceGetComputeRunningProcesses_v3(h))),
    "processes_v2": len(n.nvmlDeviceGetComputeRunningProcesses_v2(h)),
    "margin": code(n.nvmlDeviceGetMarginTemperature, h),
    "application": code(n.nvmlDeviceGetApplicationsClock, h, 1),
})
"""
    )
    assert ask(nvml, "v100x8", program) == {
        "reasons": "!13",
        "throttle": 0,
        "processes_v3": "!13",
        "processes_v2": 1,
        "margin": "!13",
        "application": 1290,
    }
    assert ask(nvml, "h200x8", program) == {
        "reasons": 0,
        "throttle": 0,
        "processes_v3": 1,
        "processes_v2": 1,
        "margin": 29,
        "application": "!26",
    }


def test_a_scenario_can_hide_one_symbol(nvml: Double, tmp_path: Path) -> None:
    scenario = write(tmp_path, "hide = nvmlDeviceGetComputeRunningProcesses_v3")
    program = "say(code(n.nvmlDeviceGetComputeRunningProcesses_v3, h))"
    assert ask(nvml, scenario, FIRST + program) == "!13"


def test_every_declared_function_is_exported_and_known_to_pynvml(nvml: Double) -> None:
    declared = nvml_double.exported_functions()
    library = nvml.library_dir("l40s") / nvml_double.SONAME
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert exported == set(declared)
    import pynvml

    source = Path(pynvml.__file__).read_text()
    unversioned = {"nvmlInit", "nvmlInit_v2", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"}
    assert [n for n in declared if f'"{n}"' not in source and n not in unversioned] == []


def test_counters_grow_with_time_or_with_each_call(nvml: Double, tmp_path: Path) -> None:
    scenario = write(
        tmp_path, "TotalEnergyConsumption = ^18000000000000000000+50000\nPowerUsage = ^100+7/call"
    )
    said = ask(
        nvml,
        scenario,
        FIRST
        + """
a, t = n.nvmlDeviceGetTotalEnergyConsumption(h), time.monotonic()
time.sleep(0.1)
b, dt = n.nvmlDeviceGetTotalEnergyConsumption(h), time.monotonic() - t
say([a >= 18 * 10**18, abs((b - a) / dt / 50000 - 1) < 0.2,
     [n.nvmlDeviceGetPowerUsage(h) for _ in range(3)]])
""",
    )
    assert said == [True, True, [100, 107, 114]]


def test_values_alternate_and_errors_come_after_some_calls(nvml: Double, tmp_path: Path) -> None:
    scenario = write(
        tmp_path,
        "ClocksEventReasons = 0x0 | 0x48\nPowerUsage = ?2: 5 : !UNKNOWN\n"
        "[gpu 1]\nClocksEventReasons = 0x4",
    )
    said = ask(
        nvml,
        scenario,
        FIRST
        + """
h1 = n.nvmlDeviceGetHandleByIndex(1)
say([[n.nvmlDeviceGetCurrentClocksEventReasons(x) for _ in range(3)] for x in (h, h1)]
    + [[code(n.nvmlDeviceGetPowerUsage, h) for _ in range(3)]])
""",
    )
    assert said == [[0, 0x48, 0], [4, 4, 4], [5, 5, "!999"]]


def test_one_gpu_is_lost_and_the_rest_answers(nvml: Double) -> None:
    program = """
n.nvmlInit()
say([code(lambda: n.nvmlDeviceGetMinorNumber(n.nvmlDeviceGetHandleByIndex(i)))
     for i in range(n.nvmlDeviceGetCount())])
"""
    assert ask(nvml, "gpu_lost", program) == [0, 1, 2, 3, "!15", 5, 6, 7]
    midway = """
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(4)
say([code(n.nvmlDeviceGetMinorNumber, h) for _ in range(30)])
"""
    said = ask(nvml, "gpu_lost_midway", midway)
    # taking the handle was the first of the 25
    assert said == [4] * 24 + ["!15"] * 6


@pytest.mark.parametrize(
    ("scenario", "code"),
    [
        ("driver_not_loaded", 9),
        ("version_mismatch", 18),
        ("init_no_permission", 4),
        ("init_library_not_found", 12),
        ("init_unknown", 999),
    ],
)
def test_init_fails(nvml: Double, scenario: str, code: int) -> None:
    program = """
say([code(n.nvmlInit), code(n.nvmlDeviceGetCount), code(n.nvmlSystemGetDriverVersion),
     n.nvmlSystemGetNVMLVersion()])
"""
    assert ask(nvml, scenario, program) == [f"!{code}", "!1", "!1", "12.550.163.01"]


def test_count_includes_gpus_without_permission(nvml: Double) -> None:
    program = """
n.nvmlInit()
say([code(lambda: n.nvmlDeviceGetMinorNumber(n.nvmlDeviceGetHandleByIndex(i)))
     for i in range(n.nvmlDeviceGetCount())])
"""
    assert ask(nvml, "no_permission", program) == [0, 1, 2, 3, "!4", "!4", "!4", "!4"]


def test_a_slow_call_takes_its_time(nvml: Double, tmp_path: Path) -> None:
    scenario = write(tmp_path, "PowerUsage = ~150ms 70000")
    program = """
t = time.monotonic(); p = n.nvmlDeviceGetPowerUsage(h)
say([p, 0.15 <= time.monotonic() - t < 1])
"""
    assert ask(nvml, scenario, FIRST + program) == [70000, True]


def test_mig_devices(nvml: Double) -> None:
    said = ask(
        nvml,
        "h100_mig",
        FIRST
        + """
h1 = n.nvmlDeviceGetHandleByIndex(1)
m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, 1)
say({
    "mode": [n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetMigMode(h1)],
    "max": n.nvmlDeviceGetMaxMigDeviceCount(h),
    "uuid": n.nvmlDeviceGetUUID(m),
    "gi": n.nvmlDeviceGetGpuInstanceId(m),
    "memory": n.nvmlDeviceGetMemoryInfo(m).total,
    "is_mig": [n.nvmlDeviceIsMigDeviceHandle(x).value for x in (h, m)],
    "parent": n.nvmlDeviceGetIndex(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m)),
    "none": code(n.nvmlDeviceGetMigDeviceHandleByIndex, h, 2),
    "utilization": code(n.nvmlDeviceGetUtilizationRates, h),
    "processes": [[p.pid, p.gpuInstanceId] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
})
""",
    )
    assert said == {
        "mode": [[1, 1], [0, 0]],
        "max": 7,
        "uuid": "MIG-1f0e5a40-1111-5222-8333-000000000001",
        "gi": 2,
        "memory": 40448 * 2**20,
        "is_mig": [0, 1],
        "parent": 0,
        "none": "!6",
        "utilization": "!3",
        "processes": [[60110, 1], [60120, 2]],
    }


def test_processes_memory_and_retired_pages(nvml: Double, tmp_path: Path) -> None:
    scenario = write(
        tmp_path, "ComputeRunningProcesses = ${NVML_TEST_PID}:1GiB 77:-", base="page_retirement.scn"
    )
    os.environ["NVML_TEST_PID"] = "4242"
    try:
        said = ask(
            nvml,
            scenario,
            FIRST
            + """
h5 = n.nvmlDeviceGetHandleByIndex(5)
say([[[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses_v2(h)],
     n.nvmlDeviceGetRetiredPages(h5, 1), n.nvmlDeviceGetRetiredPages(h, 1),
     [p["address"] for p in n.nvmlDeviceGetRetiredPages_v2(h5, 0)],
     n.nvmlDeviceGetRetiredPagesPendingStatus(h5), n.nvmlDeviceGetMemoryInfo(h).free])
""",
        )
    finally:
        del os.environ["NVML_TEST_PID"]
    assert said == [
        [[4242, 2**30], [77, None]],
        [0x27C0F, 0x31B77],
        [],
        [0x1E4A2],
        1,
        (32510 - 27004) * 2**20,
    ]


def test_calls_are_logged(nvml: Double, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    program = FIRST + "say([n.nvmlDeviceGetClockInfo(h, 1), code(n.nvmlDeviceGetNumFans, h)])"
    ask(nvml, "h100x8", program, log)
    counted = Counter(nvml_double.calls(log))
    assert counted["gpu0 ClockInfo.1 0"] == 1
    assert counted["gpu0 NumFans 3"] == 1
    assert not any(line.startswith("gpu1 ") for line in counted)


@pytest.mark.parametrize(
    ("how", "state", "ends_with"),
    [
        ("~hang", "S", signal.SIGTERM),
        ("~hang-hard", "S", signal.SIGKILL),
        ("~hang-d", "D", signal.SIGKILL),
    ],
)
def test_a_hung_call_never_returns(
    nvml: Double, tmp_path: Path, how: str, state: str, ends_with: signal.Signals
) -> None:
    log = tmp_path / "calls"
    scenario = write(tmp_path, f"PowerUsage = {how}")
    child = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + FIRST + "n.nvmlDeviceGetPowerUsage(h)"],
        env=os.environ | nvml.environ(scenario, log),
        start_new_session=True,
    )
    try:
        wait_for(lambda: "gpu0 PowerUsage -1" in nvml_double.calls(log))
        stat = Path(f"/proc/{child.pid}/stat")
        wait_for(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == state)
        child.terminate()
        if ends_with is signal.SIGKILL:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.2)
            child.kill()
        assert child.wait(5) == -ends_with
    finally:
        child.kill()


def test_init_can_hang(nvml: Double, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    child = subprocess.Popen(
        [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"],
        env=os.environ | nvml.environ("init_hung", log),
    )
    try:
        wait_for(lambda: "system Init -1" in nvml_double.calls(log))
        assert child.poll() is None
    finally:
        child.kill()
        child.wait(5)


def test_a_broken_scenario_says_so(nvml: Double, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pynvml; pynvml.nvmlInit()"],
        env=os.environ | nvml.environ(write(tmp_path, "[gpu]\nName = X")),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT
    assert "nvml double: section is neither [all] nor [gpu N]: [gpu" in done.stderr


def test_every_scenario_loads(nvml: Double) -> None:
    """Init, and the identity of each GPU, wherever init and the handles answer.

    One process forks a child per scenario before it has loaded any library; a library that was
    loaded by path answers to its soname as well.
    """
    names = sorted(path.stem for path in nvml_double.SCENARIOS.glob("*.scn"))
    assert len(names) > 40
    cases = {name: nvml.environ(name) for name in names if "hung" not in name}
    program = f"""
import ctypes, os
bad = []
for name, environ in {cases!r}.items():
    child = os.fork()
    if child == 0:
        os.environ.update(environ)
        ctypes.CDLL(environ["LD_LIBRARY_PATH"] + "/libnvidia-ml.so.1")
        handles = []
        if code(n.nvmlInit) is None:
            handles = [code(n.nvmlDeviceGetHandleByIndex, i) for i in range(n.nvmlDeviceGetCount())]
        for h in handles:
            if not isinstance(h, str):
                n.nvmlDeviceGetName(h), n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetPciInfo(h)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        bad.append(name)
say(bad)
"""
    assert ask(nvml, "h100x8", program) == []


def wait_for(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
