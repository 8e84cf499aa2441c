import os
from pathlib import Path

import msgspec
import pytest

from agent.baseline import FILE, keep_baseline, with_baseline
from agent.state import State, state_directory
from probes.snapshot.baseline import Baseline, CounterSet
from tests.support.nodes import counting

NODE = os.uname().nodename


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"STATE_DIRECTORY": "/run/a:/run/b", "XDG_STATE_HOME": "/x"}, "/run/a"),
        ({"XDG_STATE_HOME": "/x"}, f"/x/laggard/{NODE}"),  # root too
        ({"XDG_STATE_HOME": "x"}, None),  # relative: to be ignored
        ({"STATE_DIRECTORY": "state", "XDG_STATE_HOME": ""}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize(
    ("euid", "usual"),
    [(0, "/var/lib/laggard"), (1000, f"/home/ann/.local/state/laggard/{NODE}")],
    ids=["root", "user"],
)
def test_the_order_of_places(
    environment: dict[str, str],
    expected: str | None,
    euid: int,
    usual: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    assert str(state_directory()) == (expected or usual)


def test_the_baseline_comes_back_for_the_next_run(tmp_path: Path) -> None:
    state = State(tmp_path / "new" / "folder")
    first = counting()
    assert with_baseline(first, state) is first
    keep_baseline(first, state)
    second = counting(taken_at_ns=first.taken_at_ns + 1)
    found = with_baseline(second, state).baseline
    assert found is not None and found.at_ns == first.taken_at_ns
    assert [item.kind for item in found.sets] == ["gpu", "pci", "port", "kernel"]
    assert state.problems == []
    assert os.listdir(tmp_path / "new" / "folder") == [FILE]  # no temporary file stays


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"at_ns": "x"}', b"\xff\xfe", b'{"at_ns":1,"boot_id":"b1","sets":3}']
)  # fmt: skip
def test_a_corrupt_file_is_told_and_replaced(content: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content)
    state = State(tmp_path)
    snapshot = counting()
    assert with_baseline(snapshot, state) is snapshot
    assert len(state.problems) == 1
    assert state.problems[0].startswith(f"{tmp_path / FILE}: ")
    keep_baseline(snapshot, state)
    assert State(tmp_path).read(FILE, Baseline) is not None


def test_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    kept = Baseline(at_ns=1, boot_id="b1", sets=(CounterSet(kind="pci", key="a", counters={}),))
    data = msgspec.to_builtins(kept) | {"new": 1}
    (tmp_path / FILE).write_bytes(msgspec.json.encode(data))
    assert State(tmp_path).read(FILE, Baseline) == kept


def test_a_place_that_can_not_be_written_is_told_once_and_never_fails(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    state = State(blocked / "laggard")
    keep_baseline(counting(), state)
    keep_baseline(counting(), state)
    assert len(state.problems) == 1
    assert state.problems[0].startswith(f"{blocked / 'laggard'}: Not a directory; ")


def test_without_a_directory_nothing_is_read_or_kept() -> None:
    state = State(None)
    keep_baseline(counting(), state)
    assert with_baseline(counting(), state).baseline is None
    assert state.problems == []
