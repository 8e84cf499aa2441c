"""The child's groups -> records: whatever an answer looks like, nothing raises and nothing lies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.collect.gaps import Gaps
from agent.collect.nvml_answers import Answers, Group
from agent.collect.nvml_records import gpu_fields, reading_of, section_of
from agent.nvml_child import event_reason_fields, process_list_fits
from agent.parse.nvml_codes import name_of, on_wsl, reason_of, state_of
from probes.gap import Gap, GapReason
from probes.snapshot.gpu import (
    Gpu,
    GpuLimits,
    GpuProcess,
    GpuReading,
    GpuState,
    NvLink,
    NvmlSection,
    RowRemap,
)

DEVICE = "0000:1b:00.0"
GPU = Gpu(index=0, state=GpuState.OK, pci=DEVICE)
NOT_AVAILABLE = (1 << 64) - 1


def group(name: str, **values: Any) -> Group:
    return Group(group=name, at_ns=5, values=values)


def fields(name: str, values: dict[str, Any], **options: bool) -> tuple[Gpu, list[Gap]]:
    gaps = Gaps("nvml")
    found = gpu_fields(GPU, Group(group=name, at_ns=5, values=values), gaps, **options)
    return msgspec.structs.replace(GPU, **found), list(gaps.folded())


def gap(reason: GapReason, *names: str, detail: str, allow: str | None = None) -> Gap:
    return Gap(
        source="nvml", reason=reason, fields=names, devices=(DEVICE,), detail=detail, allow=allow
    )


def test_the_sample_of_the_docstring() -> None:
    line = '{"group":"reading","gpu":0,"at_ns":5,"values":{"PowerUsage":70000,"FanSpeed":[3]}}'
    found = msgspec.json.decode(line, type=Group)
    gaps = Gaps("nvml")
    reading, static = reading_of(Answers(found.values, gaps, DEVICE), found, 0)
    assert reading == GpuReading(at_ns=5, power_mw=70000)
    assert static == {"memory_total_bytes": None, "memory_reserved_bytes": None}
    (fan,) = [g for g in gaps.folded() if "fan_speed_percent" in g.fields]
    assert (fan.reason, fan.detail) == (GapReason.UNSUPPORTED, "NVML_ERROR_NOT_SUPPORTED")


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        ([3], GapReason.UNSUPPORTED, "NVML_ERROR_NOT_SUPPORTED"),
        ([4], GapReason.DENIED, "NVML_ERROR_NO_PERMISSION"),
        ([26], GapReason.UNSUPPORTED, "NVML_ERROR_DEPRECATED"),
        ([999], GapReason.MALFORMED, "NVML_ERROR_UNKNOWN"),
        ([4711], GapReason.MALFORMED, "NVML return code 4711"),
        ([-1], GapReason.MALFORMED, "an answer that the binding could not decode"),
        (None, GapReason.ABSENT, "the driver says that it has no value"),
        (NOT_AVAILABLE, GapReason.ABSENT, "the driver says that it has no value"),
        (0xFFFFFFFF, GapReason.ABSENT, "the driver says that it has no value"),
        ("1980", GapReason.MALFORMED, "MaxClockInfo.1 answered 1980"),
        (19.8, GapReason.MALFORMED, "MaxClockInfo.1 answered 19.8"),
        ({"a": 1}, GapReason.MALFORMED, "MaxClockInfo.1 answered {'a': 1}"),
        ([], GapReason.MALFORMED, "MaxClockInfo.1 answered []"),
        (1 << 70, GapReason.MALFORMED, f"MaxClockInfo.1 answered {1 << 70}"),
        ("x" * 900, GapReason.MALFORMED, f"MaxClockInfo.1 answered {'x' * 40}..."),
    ],
)
def test_an_answer_that_is_no_number(answer: Any, reason: GapReason, detail: str) -> None:
    gpu, gaps = fields("limits", {"MaxClockInfo.1": answer})
    assert gpu.limits == GpuLimits()
    (found,) = gaps
    assert (found.reason, found.fields, found.detail) == (reason, ("sm_clock_max_mhz",), detail)
    assert (found.allow is not None) == (reason is GapReason.DENIED)


def test_unknown_errors_are_what_wsl_answers_for_unsupported() -> None:
    for path, reason in (
        ("/usr/lib/wsl/lib/libnvidia-ml.so.1", GapReason.UNSUPPORTED),
        ("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", GapReason.MALFORMED),
        (None, GapReason.MALFORMED),
    ):
        _, gaps = fields("limits", {"MaxClockInfo.1": [999]}, wsl=on_wsl(path))
        assert [g.reason for g in gaps] == [reason]


def test_negative_and_zero_are_numbers() -> None:
    gpu, gaps = fields("limits", {"field.193": -8, "field.195": 0})
    assert (gpu.limits.tlimit_shutdown_c, gpu.limits.tlimit_mem_max_c) == (-8, 0)
    assert gaps == []


def test_a_gpu_with_one_link_is_no_return_code() -> None:
    gpu, gaps = fields("links", {"states": [1], "field.164.0": 25781})
    assert gpu.nvlinks == (NvLink(link=0, state=1, speed_mbps=25781),)
    assert gaps == []


def test_links_without_a_speed_say_why() -> None:
    gpu, gaps = fields("links", {"states": [1, 0], "field.164.0": [2], "field.164.1": [2]})
    assert gpu.nvlinks == (NvLink(link=0, state=1), NvLink(link=1, state=0))
    assert gaps == [gap(GapReason.UNSUPPORTED, "nvlinks", detail="NVML_ERROR_INVALID_ARGUMENT")]


def test_field_165_tells_sleep() -> None:
    gpu, _ = fields("links", {"states": [1, 1], "field.165.0": 2, "field.165.1": [3]})
    assert [link.state for link in gpu.nvlinks or ()] == [2, 1]


def test_a_histogram_of_another_length() -> None:
    gpu, gaps = fields("memory", {"RemappedRows": [1, 2, 1, 0], "RowRemapperHistogram": [1, 2]})
    assert gpu.row_remap == RowRemap(
        correctable_rows=1, uncorrectable_rows=2, pending=True, failure_occurred=False
    )
    names = ("banks_max", "banks_high", "banks_partial", "banks_low", "banks_none")
    detail = "RowRemapperHistogram answered [1, 2]"
    assert gaps == [gap(GapReason.MALFORMED, *names, detail=detail)]


def test_processes_with_hidden_memory_and_twice() -> None:
    values = {
        "ComputeRunningProcesses": [[7, 100], [8, None], [9, NOT_AVAILABLE], "?", [1]],
        "GraphicsRunningProcesses": [[7, 100], [10, 5]],
    }
    gpu, gaps = fields("processes", values)
    assert gpu.processes == (
        GpuProcess(pid=7, kind="compute", used_memory_bytes=100),
        GpuProcess(pid=8, kind="compute"),
        GpuProcess(pid=9, kind="compute"),
        GpuProcess(pid=10, kind="graphics", used_memory_bytes=5),
    )
    assert gaps == []


def test_one_kind_of_processes_is_enough() -> None:
    gpu, _ = fields("processes", {"ComputeRunningProcesses": [], "GraphicsRunningProcesses": [3]})
    assert gpu.processes == ()


def test_recovery_actions() -> None:
    for values, action in (
        ({"field.230": 3, "field.226": 1, "field.227": 0}, 3),
        ({"field.230": [2], "field.226": 0, "field.227": 0}, 0),
        ({"field.230": [2], "field.226": 1, "field.227": 0}, 1),
        ({"field.230": [2], "field.226": 1, "field.227": 1}, 4),
        ({"field.230": [2], "field.226": [2], "field.227": [2]}, None),
    ):
        gpu, gaps = fields("identity", values)
        assert gpu.recovery_action == action
        assert any("recovery_action" in g.fields for g in gaps) == (action is None)


def test_bit_error_rates_are_unpacked() -> None:
    found = group("reading", **{"field.220.0": 0x10F, "field.222.0": 0x70C})
    reading, _ = reading_of(Answers(found.values, Gaps("nvml"), DEVICE), found, 1)
    (errors,) = reading.nvlink_errors or ()
    assert (errors.effective_ber, errors.symbol_ber) == (1e-15, 7e-12)


def test_the_older_call_stands_in_for_a_field() -> None:
    found = group("reading", **{"field.74": [3], "ViolationStatus.0": 12})
    reading, _ = reading_of(Answers(found.values, Gaps("nvml"), DEVICE), found, 0)
    assert reading.violation_power_ns == 12


def test_a_group_that_is_not_known() -> None:
    assert fields("weather", {"a": 1}) == (GPU, [])


def test_reset_required_names_the_call() -> None:
    assert group("reading", PowerUsage=[16]).wants_reset == "nvmlDeviceGetPowerUsage"
    assert group("reading", **{"field.74": [16]}).wants_reset == "nvmlDeviceGetFieldValues"
    assert group("reading", PowerUsage=16, x=[15]).wants_reset is None


def test_a_count_that_is_none() -> None:
    gaps = Gaps("nvml")
    section, _ = section_of(group("init", Init=None, Count=4_000_000), gaps)
    assert section.device_count is None
    (found,) = gaps.folded()
    assert (found.reason, found.fields) == (GapReason.MALFORMED, ("device_count",))


@pytest.mark.parametrize(
    ("driver", "ids"),
    [
        ("", ()),
        ("nonsense", ()),
        ("470.256.02", ()),
        ("570.211.01", ()),
        ("575.51", (251, 252, 253)),
        ("580.65.06", (251, 252, 253)),
        ("580", (251, 252, 253)),
        ("580.82.07", (269, 270, 271)),
        ("580.105.08", (269, 270, 271)),
        ("610.57", (269, 270, 271)),
    ],
)
def test_field_ids_by_driver(driver: str, ids: tuple[int, ...]) -> None:
    assert event_reason_fields(driver) == ids


def test_process_list_layout_by_driver() -> None:
    fits = {"535.43.02": False, "535.86.10": False, "535.98": True, "535.261.03": True}
    fits |= {"530.30.02": True, "550.163.01": True, "": True, "535": True}
    assert {driver: process_list_fits(driver) for driver in fits} == fits


def test_every_code_has_a_name_a_reason_and_a_state() -> None:
    for code in range(-1, 30):
        assert name_of(code)
        assert isinstance(reason_of(code), GapReason)
        assert isinstance(state_of(code), GpuState)


# --- any answer at all ---

KEYS = (
    "Init", "init_ms", "library", "Count", "DriverVersion", "NVMLVersion", "CudaDriverVersion",
    "ConfComputeState", "Handle", "PciInfo", "UUID", "Name", "Serial", "Architecture", "EccMode",
    "MigMode", "Mig", "Fabric", "CudaComputeCapability", "GspFirmwareVersion", "PersistenceMode",
    "field.170", "field.226", "field.227", "field.230", "MaxClockInfo.1",
    "PowerManagementLimitConstraints", "RemappedRows", "RowRemapperHistogram", "RetiredPages.0",
    "RetiredPages.1", "RetiredPagesPendingStatus", "SramEccErrorStatus", "states", "NvLinkState",
    "field.164.0", "field.165.0", "NvLinkRemotePciInfo.0", "NvLinkVersion.0",
    "ComputeRunningProcesses", "GraphicsRunningProcesses", "PowerUsage", "field.74",
    "ViolationStatus.0", "field.269", "field.251", "UtilizationRates", "MemoryInfo",
    "NvLinkErrorCounter.0.0", "field.161.0", "field.219.0", "field.220.0",
    "field.138.4294967295",
)  # fmt: skip
MEMBERS = ("state", "cluster_uuid", "health_mask", "bThresholdExceeded", "volatileCor", "UUID")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 40).map(lambda code: [code])
    | st.floats()
    | st.text(max_size=8)
    | st.just(NOT_AVAILABLE)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(MEMBERS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
GROUPS = ("handle", "identity", "limits", "memory", "links", "processes")


def round_trip(record: msgspec.Struct) -> None:
    """What was read can be kept, read again, and is of the types that the schema promises."""
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12))
def test_no_answer_raises_or_gets_into_a_record_with_another_type(values: dict[str, Any]) -> None:
    gaps = Gaps("nvml")
    section, confidential = section_of(Group(group="init", at_ns=1, values=values), gaps)
    gpu = msgspec.structs.replace(GPU, confidential_compute=confidential)
    for name in GROUPS:
        found = gpu_fields(gpu, Group(group=name, at_ns=1, values=values), gaps)
        gpu = msgspec.structs.replace(gpu, **found)
    last = Group(group="reading", at_ns=1, values=values)
    reading, static = reading_of(Answers(values, gaps, gpu.key), last, len(gpu.nvlinks or ()))
    gpu = msgspec.structs.replace(gpu, readings=(reading,), **static)
    round_trip(msgspec.structs.replace(section, gpus=(gpu,)))
    assert last.wants_reset is None or last.wants_reset.startswith("nvmlDeviceGet")
    for found_gap in gaps.folded():
        round_trip(found_gap)


def test_an_empty_section_round_trips() -> None:
    round_trip(NvmlSection())
