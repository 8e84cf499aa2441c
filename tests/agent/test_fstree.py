import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import LaggardError
from agent.fstree import format_fstree, parse_fstree
from agent.host import FixtureHost, LiveHost, run_path
from agent.tree import DiskTree, Link, Refusal, TextTree

SAMPLE = """\
# a machine
/sys/bus/pci/devices/0000:17:00.0 -> ../../../devices/pci0000:16/0000:16:01.0/0000:17:00.0
/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/vendor = 0x10de
/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/config !EACCES
/sys/class/infiniband/
/proc/meminfo:
|MemTotal:       528000000 kB
|MemFree:        100000000 kB
/etc/empty =
/absolute -> /proc
/sys/vpd =base64 gjIA
@1
/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/vendor = 0xffff
"""


def test_reads_what_the_docstring_promises() -> None:
    host = FixtureHost(parse_fstree(SAMPLE))
    device = "/sys/bus/pci/devices/0000:17:00.0"
    assert host.read_text(f"{device}/vendor") == "0x10de"
    assert host.realpath(device) == "/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0"
    assert host.listdir(device) == ["config", "vendor"]
    assert host.listdir("/sys/class/infiniband") == []
    assert host.read_text("/absolute/meminfo").splitlines()[1] == "MemFree:        100000000 kB"
    assert host.read_bytes("/etc/empty") == b"\n"
    assert host.read_bytes("/sys/vpd") == b"\x82\x32\x00"
    assert host.exists(f"{device}/config")
    assert not host.exists("/sys/nothing")
    with pytest.raises(PermissionError):
        host.read_bytes(f"{device}/config")
    with pytest.raises(FileNotFoundError):
        host.listdir("/sys/nothing")
    with pytest.raises(IsADirectoryError):
        host.read_bytes(device)
    with pytest.raises(NotADirectoryError):
        host.listdir("/etc/empty")


def test_sleep_moves_to_the_second_reading_and_both_clocks() -> None:
    host = FixtureHost(parse_fstree(SAMPLE))
    before = host.monotonic_ns(), host.time_ns()
    host.sleep(1.5)
    assert host.read_text("/sys/bus/pci/devices/0000:17:00.0/vendor") == "0xffff"
    assert host.read_text("/etc/empty") == ""
    assert (host.monotonic_ns() - before[0], host.time_ns() - before[1]) == (1_500_000_000,) * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("relative = 1", "fixture:1: a line begins with an absolute path, '|', '@' or '#'"),
        ("/a = 1\n/b", "fixture:2: expected one of ' = ', ' -> ', ' !', a final ':' or '/'"),
        ("/a !EWHAT", "fixture:1: 'EWHAT' is no errno name"),
        ("@2", "fixture:1: expected @1, got '@2'"),
        ("/a =base64 ?", "fixture:1: bad base64"),
    ],
)
def test_names_the_line_that_it_cant_read(text: str, message: str) -> None:
    with pytest.raises(LaggardError) as caught:
        parse_fstree(text)
    assert caught.value.message.startswith(message)


def test_link_loops_end() -> None:
    tree = TextTree([{"/a": Link("/b"), "/b": Link("a")}])
    with pytest.raises(OSError) as caught:
        tree.read_bytes("/a/file")
    assert caught.value.errno == errno.ELOOP


names = st.text(
    st.characters(codec="ascii", categories=("L", "N"), include_characters=".:-_"), min_size=1
)
paths = st.lists(names.filter(lambda n: n not in (".", "..")), min_size=1, max_size=3).map(
    lambda parts: "/" + "/".join(parts)
)
entries = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(str.encode),
    st.sampled_from([Refusal(errno.EACCES), Refusal(errno.EIO)]),
    names.map(lambda name: Link(f"../{name}")),
)


@given(st.lists(st.dictionaries(paths, entries, max_size=5), min_size=1, max_size=3))
@settings(deadline=None, max_examples=200)
def test_what_is_written_reads_back(epochs: list[dict[str, bytes | Refusal | Link]]) -> None:
    tree = TextTree([dict(each) for each in epochs])
    assert parse_fstree(format_fstree(tree)).epochs == tree.epochs


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=200)
def test_any_text_reads_or_says_why_not(text: str) -> None:
    try:
        parse_fstree(text)
    except LaggardError as error:
        assert error.message.startswith("fixture:")


def test_a_copied_root_never_leads_out_of_itself(tmp_path) -> None:
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "value").write_text("inside\n")
    (tmp_path / "way").symlink_to("/sys")
    (tmp_path / "up").symlink_to("../../../../sys/value")
    tree = DiskTree(str(tmp_path))
    assert tree.read_bytes("/way/value") == b"inside\n"
    assert tree.read_bytes("/up") == b"inside\n"
    assert tree.realpath("/way/value") == "/sys/value"
    assert tree.readlink("/way") == "/sys"


def test_a_fifo_does_not_block(tmp_path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    assert DiskTree(str(tmp_path)).read_bytes("/fifo") == b""


def test_programs_and_special_files() -> None:
    argv = ("journalctl", "-k", "-b", "0")
    host = FixtureHost(
        parse_fstree(
            f"{run_path(argv)}:\n|0\n|line one\n|line two\n"
            f"{run_path(('slow',))} !ETIMEDOUT\n"
            "/@statvfs/dev/shm = 67108864 1024\n/@adjtimex = 5 64 16000000\n/@euid = 1000\n"
        )
    )
    assert host.run(argv, 1).stdout == b"line one\nline two\n"
    with pytest.raises(TimeoutError):
        host.run(("slow",), 1)
    with pytest.raises(FileNotFoundError):
        host.run(("missing",), 1)
    assert host.disk_bytes("/dev/shm") == (67108864, 1024)
    assert host.adjtimex() == (5, 64, 16000000)
    assert host.euid() == 1000


def test_programs_speak_for_the_machine_under_root_or_not_at_all(tmp_path, monkeypatch) -> None:
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    argv = ("journalctl", "-k")
    assert LiveHost().run(argv, 20).stdout == b"-k\n"
    assert LiveHost("/host/").run(argv, 20).stdout == b"--root=/host -k\n"
    with pytest.raises(FileNotFoundError):
        LiveHost("/host").run(("/bin/true",), 20)
