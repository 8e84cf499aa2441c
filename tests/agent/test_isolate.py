"""Real forks, real hangs: what the parent says, and that it never waits for what hangs."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.fstree import parse_fstree
from agent.host import FixtureHost, Host, LiveHost
from agent.isolate import InProcess, Isolated, Read, Reader, Readings
from probes.gap import Gap, GapReason
from probes.record import Record


class Section(Record, frozen=True, kw_only=True):
    values: tuple[str, ...] = ()
    pid: int = 0


def reader(
    first: Callable[[Host], Read],
    second: Callable[[Host, Any], Read] | None = None,
    name: str = "kernel",
) -> Reader:
    return Reader(name=name, source=name, record=Section, load=lambda: (first, second))


def of_file(path: Path | str, name: str = "kernel") -> Reader:
    """Reads a file, and reads it again."""

    def first(host: Host) -> Read:
        return Section(values=(host.read_text(str(path)),), pid=os.getpid()), ()

    def second(host: Host, section: Section) -> Read:
        values = (*section.values, host.read_text(str(path)))
        return Section(values=values, pid=os.getpid()), ()

    return reader(first, second, name)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    file = tmp_path / "state"
    file.write_text("one\n")
    return file


def children() -> set[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def await_that(condition: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_one_child_takes_all_readings_and_leaves_nothing_behind(state: Path) -> None:
    before = children()
    one, two = of_file(state), of_file(state, "pci")
    readings = Isolated(LiveHost(), (one, two))
    first, gaps = readings.first(one, 10)
    other, _ = readings.first(two, 10)
    state.write_text("two\n")
    second, _ = readings.second(one, first, 10)
    assert (first.values, gaps, second.values) == (("one",), (), ("one", "two"))
    assert first.pid == other.pid == second.pid != os.getpid()
    readings.close()
    assert children() == before


def test_what_the_child_imports_does_not_weigh_on_the_parent() -> None:
    def load() -> tuple[Callable[[Host], Read], None]:
        import pydoc_data.topics  # noqa: F401 - nobody else does

        return lambda host: (
            Section(values=tuple(m for m in sys.modules if m == "pydoc_data.topics")),
            (),
        ), None

    item = Reader(name="kernel", source="kernel", record=Section, load=load)
    readings = Isolated(LiveHost(), (item,))
    section, _ = readings.first(item, 10)
    readings.close()
    assert section.values == ("pydoc_data.topics",)
    assert "pydoc_data.topics" not in sys.modules


def test_a_read_that_hangs_costs_its_deadline_once_and_names_the_path(
    tmp_path: Path, state: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def hang(host: Host) -> Read:
        host.exists(str(fifo))
        os.open(fifo, os.O_RDONLY)  # blocks in the kernel: nobody writes
        return Section(), ()

    stuck, good = reader(hang), of_file(state, "pci")
    before = children()
    readings = Isolated(LiveHost(), (stuck, good))
    began = time.monotonic()
    section, gaps = readings.first(stuck, 0.3)
    took = time.monotonic() - began
    assert section is None
    assert gaps == (
        Gap(
            source="kernel",
            reason=GapReason.TIMEOUT,
            detail=f"{fifo}: did not return within 0.3 s",
            allow="find out what hangs there; a larger --deadline helps where it is only slow",
        ),
    )
    assert 0.3 <= took < 1.5
    after, _ = readings.first(good, 10)  # a fresh fork does what remains
    assert after.values == ("one",)
    readings.close()
    assert children() == before


def test_a_child_that_ignores_signals_is_killed_all_the_same(state: Path) -> None:
    def hang(host: Host) -> Read:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(60)

    item = reader(hang)
    before = children()
    readings = Isolated(LiveHost(), (item,))
    _, gaps = readings.first(item, 0.2)
    assert gaps[0].reason is GapReason.TIMEOUT
    assert children() == before


def test_a_program_that_the_hung_child_runs_is_killed_too(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def hang(host: Host) -> Read:
        host.run(("sh", "-c", f"echo $$ > {file}; exec sleep 60"), 60)
        return Section(), ()

    item = reader(hang)
    readings = Isolated(LiveHost(), (item,))
    _, gaps = readings.first(item, 1)
    assert gaps[0].detail is not None and gaps[0].detail.startswith("sh -c echo")
    pid = int(file.read_text())
    await_that(lambda: is_gone(pid) or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")


def test_a_hang_in_the_second_reading_keeps_the_first_and_the_other_sections(state: Path) -> None:
    def hang(host: Host, section: Section) -> Read:
        host.exists("/sick")
        time.sleep(60)
        return section, ()

    def first(host: Host) -> Read:
        return Section(values=("kept",)), ()

    stuck, good = reader(first, hang), of_file(state, "pci")
    readings = Isolated(LiveHost(), (stuck, good))
    sections = {item.name: readings.first(item, 10)[0] for item in (stuck, good)}
    state.write_text("two\n")
    kept, gaps = readings.second(stuck, sections["kernel"], 0.2)
    assert kept == Section(values=("kept",))
    assert [(gap.reason, gap.fields) for gap in gaps] == [(GapReason.TIMEOUT, ("readings",))]
    assert gaps[0].detail == "/sick: did not return within 0.2 s"
    # the first reading went down with the child, and comes again from the parent
    assert readings.second(good, sections["pci"], 10)[0].values == ("one", "two")
    readings.close()


def boom(host: Host) -> Read:
    raise KeyError("width")


@pytest.mark.parametrize("isolated", [True, False], ids=["child", "in process"])
def test_a_bug_in_a_reader_is_said_and_hides_no_other_section(isolated: bool, state: Path) -> None:
    bad, good = reader(boom), of_file("/state", "pci")
    readings: Readings
    if isolated:
        readings = Isolated(LiveHost(str(state.parent)), (bad, good))
    else:
        readings = InProcess(FixtureHost(parse_fstree("/state = one\n")))
    section, gaps = readings.first(bad, 10)
    assert section is None
    assert [(gap.source, gap.reason, gap.fields, gap.allow) for gap in gaps] == [
        ("kernel", GapReason.MALFORMED, (), "please report it")
    ]
    assert gaps[0].detail is not None
    assert gaps[0].detail.startswith(
        "a bug in laggard's reader: KeyError: 'width' at test_isolate.py:"
    )
    assert readings.first(good, 10)[0].values == ("one",)
    readings.close()


def test_a_second_reading_that_raises_keeps_the_first() -> None:
    def worse(host: Host, section: Section) -> Read:
        raise ValueError("no")

    item = reader(lambda host: (Section(values=("a",)), ()), worse)
    readings = Isolated(LiveHost(), (item,))
    section, _ = readings.first(item, 10)
    again, gaps = readings.second(item, section, 10)
    readings.close()
    assert again == section
    assert [(gap.reason, gap.fields) for gap in gaps] == [(GapReason.MALFORMED, ("readings",))]


def test_a_section_that_can_not_be_sent_is_a_gap() -> None:
    item = reader(lambda host: (Section(pid=1 << 70), ()))
    readings = Isolated(LiveHost(), (item,))
    section, gaps = readings.first(item, 10)
    readings.close()
    assert section is None
    assert gaps[0].reason is GapReason.MALFORMED


def test_a_child_that_is_killed_is_a_gap_and_the_next_section_has_a_new_one(state: Path) -> None:
    def die(host: Host) -> Read:
        host.exists("/proc/kcore")
        os.kill(os.getpid(), signal.SIGKILL)
        return Section(), ()

    bad, good = reader(die), of_file(state, "pci")
    readings = Isolated(LiveHost(), (bad, good))
    section, gaps = readings.first(bad, 10)
    assert section is None
    assert [(gap.reason, gap.detail) for gap in gaps] == [
        (GapReason.MALFORMED, "the process that reads /proc/kcore was killed by signal 9")
    ]
    assert readings.first(good, 10)[0].values == ("one",)
    readings.close()


def test_a_large_section_passes() -> None:
    item = reader(lambda host: (Section(values=("x" * 100,) * 50_000), ()))
    readings = Isolated(LiveHost(), (item,))
    assert len(readings.first(item, 30)[0].values) == 50_000
    readings.close()


def test_the_child_dies_with_its_parent_also_while_it_hangs(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def hang(host: Host) -> Read:
        file.write_text(str(os.getpid()))
        time.sleep(60)
        return Section(), ()

    item = reader(hang)
    parent = os.fork()
    if parent == 0:
        Isolated(LiveHost(), (item,)).first(item, 60)
        os._exit(0)
    await_that(lambda: file.exists() and bool(file.read_text()))
    child = int(file.read_text())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    await_that(lambda: is_gone(child) or Path(f"/proc/{child}/stat").read_text().split()[2] == "Z")


def test_the_child_keeps_no_file_of_the_parents_open(tmp_path: Path, state: Path) -> None:
    item = reader(lambda host: (Section(values=tuple(
        os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    )), ()))  # fmt: skip
    with state.open() as _held:
        readings = Isolated(LiveHost(), (item,))
        section, _ = readings.first(item, 10)
        readings.close()
    assert str(state) not in section.values
