import errno
from pathlib import Path

import pytest

from agent.fstree import format_fstree, parse_fstree
from agent.host import FixtureHost, Host, LiveHost
from agent.recording import RecordingHost

TREE = """\
/sys/bus/pci/devices/0000:17:00.0 -> ../../../devices/pci0000:16/0000:17:00.0
/sys/devices/pci0000:16/0000:17:00.0/vendor = 0x10de
/sys/devices/pci0000:16/0000:17:00.0/secret !EACCES
/sys/devices/pci0000:16/0000:17:00.0/never_read = 1
/proc/1/stat = 1 (init) S
/@statvfs/dev/shm = 1000 10
/@access/dev/nvidiactl !EPERM
/@adjtimex = 0 0 5
/@euid = 1000
@1
/proc/1/stat = 1 (init) D
"""
DEVICE = "/sys/bus/pci/devices/0000:17:00.0"


def ask(host: Host) -> list[object]:
    """A bit of everything that collectors do; errors are answers too."""

    def said(question: object) -> object:
        assert callable(question)
        try:
            return question()
        except OSError as error:
            return errno.errorcode[error.errno or 0]

    return [
        said(question)
        for question in (
            lambda: host.listdir("/sys/bus/pci/devices"),
            lambda: host.realpath(DEVICE),
            lambda: host.readlink(DEVICE),
            lambda: host.read_text(f"{DEVICE}/vendor"),
            lambda: host.read_text(f"{DEVICE}/secret"),
            lambda: host.read_text(f"{DEVICE}/none"),
            lambda: host.listdir(DEVICE),
            lambda: host.listdir("/nowhere"),
            lambda: host.exists(f"{DEVICE}/vendor"),
            lambda: host.exists("/nowhere"),
            lambda: host.read_text("/proc/1/stat"),
            lambda: host.disk_bytes("/dev/shm"),
            lambda: host.access("/dev/nvidiactl"),
            host.adjtimex,
            host.euid,
            lambda: host.sleep(2.0),
            lambda: host.read_text("/proc/1/stat"),
        )
    ]


def test_a_replay_of_a_recording_answers_alike() -> None:
    recording = RecordingHost(FixtureHost(parse_fstree(TREE)))
    answers = ask(recording)
    replay = FixtureHost(parse_fstree(format_fstree(recording.tree)))
    assert ask(replay) == answers
    assert answers[3:7] == ["0x10de", "EACCES", "ENOENT", ["never_read", "secret", "vendor"]]


def test_a_name_that_was_listed_and_not_read_says_so() -> None:
    recording = RecordingHost(FixtureHost(parse_fstree(TREE)))
    recording.listdir(DEVICE)
    replay = FixtureHost(recording.tree)
    with pytest.raises(OSError) as caught:
        replay.read_text(f"{DEVICE}/never_read")
    assert caught.value.errno == errno.ENODATA


def test_a_live_machine_replays(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text("Linux\n")
    (tmp_path / "proc" / "self").symlink_to("/proc/1")
    (tmp_path / "proc" / "1").mkdir()
    (tmp_path / "proc" / "1" / "comm").write_bytes(b"odd \xff\n")
    recording = RecordingHost(LiveHost(str(tmp_path)))
    assert recording.read_text("/proc/self/comm") == "odd �"
    replay = FixtureHost(parse_fstree(format_fstree(recording.tree)))
    assert replay.read_bytes("/proc/self/comm") == b"odd \xff\n"


def test_a_program_replays() -> None:
    recording = RecordingHost(LiveHost())
    assert recording.run(("echo", "out"), 5).stdout == b"out\n"
    replay = FixtureHost(parse_fstree(format_fstree(recording.tree)))
    assert replay.run(("echo", "out"), 5).stdout == b"out\n"
