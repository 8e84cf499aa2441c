import json
import os
import stat

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import LaggardError
from agent.schema import schema_of
from agent.snapshot_file import (
    compress,
    decode_snapshot,
    encode_snapshot,
    read_snapshot,
    snapshot_digest,
    write_output,
)
from probes.gap import Gap, GapReason
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot

SNAPSHOT = NodeSnapshot(
    schema=SNAPSHOT_SCHEMA,
    tool_version="0.1.0",
    host="n07",
    taken_at_ns=1,
    nvml=NvmlSection(
        driver_version="550.54",
        gpus=(Gpu(index=0, state=GpuState.OK, uuid="GPU-1", pci="0000:17:00.0"),),
    ),
    gaps=(Gap(source="kernel", reason=GapReason.DENIED, detail="/dev/kmsg: not permitted"),),
)


def test_round_trip_and_digest() -> None:
    data = encode_snapshot(SNAPSHOT)
    again = decode_snapshot(data, "f")
    assert again == SNAPSHOT
    assert snapshot_digest(again) == snapshot_digest(SNAPSHOT)
    assert decode_snapshot(compress(data), "f") == SNAPSHOT
    assert compress(data) == compress(data)


def test_a_newer_minor_version_reads() -> None:
    data = json.loads(encode_snapshot(SNAPSHOT))
    data["schema"] = "laggard.snapshot/1.7"
    data["brand_new_section"] = {"x": 1}
    data["nvml"]["gpus"][0]["state"] = "on-fire"
    data["nvml"]["gpus"][0]["flux_capacitor_gw"] = 1.21
    data["gaps"][0]["reason"] = "too-far-away"
    found = decode_snapshot(json.dumps(data).encode(), "f")
    assert found.nvml is not None
    assert found.nvml.gpus[0].state is GpuState.UNKNOWN
    assert found.gaps[0].reason is GapReason.NOT_COLLECTED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["nvml"]["gpus"][0].update(pci=7),
            "f is a malformed snapshot: Expected `str | null`, got `int` - at `$.nvml.gpus[0].pci`",
        ),
        (
            lambda d: d.pop("host"),
            "f is a malformed snapshot: Object missing required field `host`",
        ),
        (
            lambda d: d.update(schema="laggard.snapshot/2"),
            "f has schema 'laggard.snapshot/2'; this laggard reads laggard.snapshot/1",
        ),
        (lambda d: d.update(schema="else"), "f has schema 'else'; this laggard reads"),
        (lambda d: d.pop("schema"), "f is no snapshot: Object missing required field `schema`"),
    ],
)
def test_says_what_is_wrong_and_where(change, message: str) -> None:
    data = json.loads(encode_snapshot(SNAPSHOT))
    change(data)
    with pytest.raises(LaggardError) as caught:
        decode_snapshot(json.dumps(data).encode(), "f")
    assert caught.value.message.startswith(message)
    assert caught.value.hint


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_refused_clearly(data: bytes) -> None:
    for candidate in (data, b"\x1f\x8b" + data, compress(data)[: len(data)]):
        with pytest.raises(LaggardError):
            decode_snapshot(candidate, "f")


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        (b"", "f is empty", "as `laggard snapshot record` writes it"),
        (b" \n", "f is empty", "as `laggard snapshot record` writes it"),
        (
            b"/proc/uptime = 1 2\n",
            "f is no snapshot: ",
            "what it writes with --raw is for a parser",
        ),
    ],
)
def test_what_is_no_snapshot_at_all(data: bytes, message: str, hint: str) -> None:
    for candidate in (data, compress(data)):
        with pytest.raises(LaggardError) as caught:
            decode_snapshot(candidate, "f")
        assert caught.value.message.startswith(message)
        assert caught.value.hint and hint in caught.value.hint


def test_a_missing_file_says_what_the_system_said(tmp_path) -> None:
    with pytest.raises(LaggardError) as caught:
        read_snapshot(str(tmp_path / "none.json"))
    assert caught.value.message == f"reading {tmp_path}/none.json: No such file or directory"


def test_a_cut_gzip_is_named() -> None:
    with pytest.raises(LaggardError, match="cut short"):
        decode_snapshot(compress(encode_snapshot(SNAPSHOT))[:-20], "f")


def test_output_is_whole_or_absent(tmp_path) -> None:
    target = tmp_path / "out.prom"
    target.write_text("old")
    write_output(str(target), b"new")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.prom"]
    with pytest.raises(LaggardError, match=r"writing .*: No such file or directory"):
        write_output(str(tmp_path / "no" / "where"), b"x")


def test_output_to_a_fifo_or_device_is_not_renamed_over() -> None:
    write_output("/dev/null", b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_schema_knows_every_field() -> None:
    schema = schema_of("snapshot")
    properties = schema["$defs"]["NodeSnapshot"]["properties"]
    assert set(properties) == {field.encode_name for field in msgspec.structs.fields(NodeSnapshot)}
