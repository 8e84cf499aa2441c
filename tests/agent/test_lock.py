"""The lock against a real second process."""

import contextlib
import os
import pwd
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agent.host import LiveHost
from agent.isolate import Isolated, Reader
from agent.lock import FILE, Holder, LockedError, one_at_a_time
from probes.snapshot.pci import PciSection

HOLD = (
    "import sys, time; from pathlib import Path; from agent.lock import one_at_a_time\n"
    "with one_at_a_time(Path(sys.argv[1]), float(sys.argv[2])):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


@contextlib.contextmanager
def held_elsewhere(directory: Path, deadline_s: float) -> Iterator[int]:
    argv = [sys.executable, "-c", HOLD, str(directory), str(deadline_s)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        yield child.pid
        child.kill()


def test_a_second_run_is_told_who_is_at_work_and_since_when(tmp_path: Path) -> None:
    with (
        held_elsewhere(tmp_path, 20) as pid,
        pytest.raises(LockedError) as locked,
        one_at_a_time(tmp_path, 20),
    ):
        pass
    holder = locked.value.holder
    assert holder is not None and holder.pid == pid
    assert not holder.is_overdue()


def test_the_holder_is_described_by_command_and_user(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, 20) as pid:
        with pytest.raises(LockedError) as locked, one_at_a_time(tmp_path, 20):
            pass
        assert locked.value.holder is not None
        said = locked.value.holder.describe()
    assert said.startswith(f"pid {pid} ({sys.executable} -c import sys")
    user = pwd.getpwuid(os.getuid()).pw_name
    assert re.search(rf"; user {user}; (sleeping|running)\), since 2", said)
    assert "\n" not in said


def test_a_holder_past_two_deadlines_is_overdue(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, 0.01):
        time.sleep(0.03)
        with pytest.raises(LockedError) as locked, one_at_a_time(tmp_path, 20):
            pass
    assert locked.value.holder is not None and locked.value.holder.is_overdue()


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, 20):
        pass
    assert (tmp_path / FILE).read_bytes()  # it could not clean up
    with one_at_a_time(tmp_path, 20):
        found = msgspec.json.decode((tmp_path / FILE).read_bytes(), type=Holder)
        assert found.pid == os.getpid()
    assert (tmp_path / FILE).read_bytes() == b""


def test_a_hung_child_of_an_ended_run_does_not_hold_it(tmp_path: Path) -> None:
    def hang(host: object) -> tuple[None, tuple[()]]:
        (tmp_path / "ready").write_text("")
        time.sleep(60)
        return None, ()

    item = Reader(name="pci", source="pci", record=PciSection, load=lambda: (hang, None))
    parent = os.fork()
    if parent == 0:
        with one_at_a_time(tmp_path, 20):
            Isolated(LiveHost(), (item,)).first(item, 60)
        os._exit(0)
    until = time.monotonic() + 10
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    with one_at_a_time(tmp_path, 20):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}'])
def test_a_holder_that_has_not_said_who_it_is(content: bytes, tmp_path: Path) -> None:
    with held_elsewhere(tmp_path, 20):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(LockedError) as locked, one_at_a_time(tmp_path, 20):
            pass
    assert locked.value.holder is None


def test_a_holder_that_can_not_be_seen_is_said_so() -> None:
    holder = Holder(2**30, time.monotonic_ns(), "2026-01-01T00:00:00Z", 20)
    assert holder.describe() == (
        "pid 1073741824 (not visible from here), since 2026-01-01T00:00:00Z (0 s)"
    )


def test_a_place_that_can_not_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError), one_at_a_time(tmp_path / "file" / "x", 20):
        pass
