"""The process that calls NVML: its lines, its choice of fields, what it imports."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import nvml_child
from agent.nvml_channel import binding_folder
from tests.support.nvml_double import Double

ROOT = Path(__file__).resolve().parents[2]
JSON = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def basic(value: Any) -> Any:
    """What a line keeps of a value: characters beyond 16 bits become the replacement character."""
    if isinstance(value, str):
        return "".join(character if ord(character) < 0xFFFE else "\ufffd" for character in value)
    if isinstance(value, dict):
        return {basic(key): basic(inner) for key, inner in value.items()}
    return [basic(inner) for inner in value] if isinstance(value, list) else value


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_values_are_written_as_json(value: Any) -> None:
    text = nvml_child.text_of(value)
    assert "\n" not in text
    assert json.loads(text) == basic(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "1"),
        ((1, 2), "[1,2]"),
        (float("nan"), "[-1]"),
        (float("-inf"), "[-1]"),
        (object(), "[-1]"),
        ('H100 "80GB"\n', '"\\u0048\\u0031\\u0030\\u0030\\u0020\\u0022\\u0038\\u0030\\u0047\\u0042\\u0022\\u000a"'),
    ],
)  # fmt: skip
def test_values_that_json_does_not_have(value: object, text: str) -> None:
    assert nvml_child.text_of(value) == text


@pytest.mark.parametrize(
    ("driver", "fields"),
    [
        ("", ()),
        ("rel/gpu", ()),
        ("470.256.02", ()),
        ("570.148.08", ()),
        ("575.57.08", (251, 252, 253)),
        ("580", (251, 252, 253)),
        ("580.65.06", (251, 252, 253)),
        ("580.82.07", (269, 270, 271)),
        ("590.48.01", (269, 270, 271)),
    ],
)
def test_event_reason_counters_by_driver(driver: str, fields: tuple[int, ...]) -> None:
    assert nvml_child.event_reason_fields(driver) == fields


class Value(ctypes.Union):
    _fields_ = [
        ("dVal", ctypes.c_double), ("uiVal", ctypes.c_uint), ("ulVal", ctypes.c_ulong),
        ("ullVal", ctypes.c_ulonglong), ("sllVal", ctypes.c_longlong), ("siVal", ctypes.c_int),
        ("usVal", ctypes.c_ushort),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (0, b"\0\0\0\0\0\0\xf8\x3f", 1.5),
        (1, b"\xf8\xff\xff\xff\1\1\1\1", 0xFFFFFFF8),
        (2, b"\1\0\0\0\1\0\0\0", 0x100000001),
        (3, b"\1\0\0\0\1\0\0\0", 0x100000001),
        (4, b"\xff" * 8, -1),
        (5, b"\xf8\xff\xff\xff\1\1\1\1", -8),  # the T.Limit thresholds lie below zero
        (6, b"\3\0\1\1\1\1\1\1", 3),
        (7, b"\0" * 8, [-1]),  # a type that no header has yet
    ],
)
def test_a_field_value_is_read_by_its_type(kind: int, raw: bytes, value: object) -> None:
    field = SimpleNamespace(nvmlReturn=0, valueType=kind, value=Value.from_buffer_copy(raw))
    assert nvml_child.field_value(field) == value


def test_a_refused_field_is_its_code() -> None:
    assert nvml_child.field_value(SimpleNamespace(nvmlReturn=3)) == [3]


def child(
    double: Double, scenario: str, requests: str, *options: str, note: int | None = None
) -> subprocess.CompletedProcess[str]:
    folder = binding_folder()
    assert folder is not None
    if note is None:
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), nvml_child.NOTE_BYTES)
            return child(double, scenario, requests, *options, note=file.fileno())
    return subprocess.run(
        [sys.executable, *options, "-I", "-S", nvml_child.__file__, str(folder), str(note)],
        env=os.environ | double.environ(scenario),
        input=requests,
        capture_output=True,
        pass_fds=(note,),
        text=True,
        timeout=60,
        check=True,
    )


def test_every_request_ends_with_a_dot(nvml: Double) -> None:
    lines = child(nvml, "h100x8", "init 1\nsample 1 18 9 1\nsample 8 0 0 1\nquit\n").stdout.split(
        "\n"
    )
    assert [line for line in lines if line[:1] != "="] == [".", ".", ".", ""]
    groups = [json.loads(line[1:]) for line in lines if line.startswith("=")]
    assert [(group["group"], group["gpu"]) for group in groups] == [
        ("init", None), ("handle", 1), ("reading", 1), ("handle", 8),
    ]  # fmt: skip
    assert groups[3]["values"] == {"Handle": [2]}  # NVML_ERROR_INVALID_ARGUMENT


def test_the_note_holds_the_last_call_begun_and_when(nvml: Double) -> None:
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), nvml_child.NOTE_BYTES)
        began_ns = time.monotonic_ns()
        child(nvml, "h100x8", "init 1\n", note=file.fileno())
        at_ns, name = os.pread(file.fileno(), nvml_child.NOTE_BYTES, 0).split()
    assert name == b"nvmlSystemGetConfComputeState"
    assert began_ns < int(at_ns) < time.monotonic_ns()


def test_the_end_of_the_input_ends_it(nvml: Double) -> None:
    assert child(nvml, "h100x8", "").stdout == ""


def test_it_imports_little(nvml: Double) -> None:
    """What the binding drags in and does not use costs more than all calls on eight GPUs."""
    said = child(nvml, "h100x8", "quit\n", "-X", "importtime").stderr
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert "pynvml" in imported
    assert not imported & {
        "json", "typing", "subprocess", "shutil", "tempfile", "dataclasses", "site",
        "collections.abc", "signal", "select", "socket", "msgspec",
    }  # fmt: skip


def test_the_stand_in_finds_libraries_all_the_same() -> None:
    """A binding that does call ctypes.util.find_library gets the real one's answer."""
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'agent')!r})\n"
        "import nvml_child\n"
        f"nvml_child.load_binding({str(binding_folder())!r})\n"
        "stand_in = sys.modules['ctypes.util'].find_library\n"
        "found = stand_in('c')\n"
        "import ctypes.util\n"
        "assert ctypes.util.find_library is not stand_in\n"
        "print(found == ctypes.util.find_library('c'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "True\n"


def test_the_parent_imports_no_binding() -> None:
    program = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import agent.collect.nvml, agent.nvml_channel, agent.nvml_child\n"
        "print('pynvml' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
