"""Where the kernel log comes from, and what is said when it can't be read."""

import pytest

from agent.collect.kernel import JOURNAL, LIMIT_BYTES, collect
from agent.fstree import parse_fstree
from agent.host import FixtureHost, LiveHost, run_path
from probes.gap import GapReason
from probes.snapshot.kernel import KernelSection

XID = "NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python, Ch 00000010"
UPTIME = "/proc/uptime = 402211.00 9000.00\n/@time_ns = 1773591700000000000\n"
NO_JOURNAL = f"{run_path(JOURNAL)} !ENOENT\n"


def host(text: str) -> FixtureHost:
    return FixtureHost(parse_fstree(UPTIME + text))


def journal(code: int, *lines: str) -> str:
    return f"{run_path(JOURNAL)}:\n|{code}\n" + "".join(f"|{line}\n" for line in lines)


def read(text: str) -> KernelSection:
    section, gaps = collect(host(text))
    assert section is not None
    assert [gap for gap in gaps if gap.reason.hides_something] == []
    return section


def test_kmsg_first() -> None:
    section = read(
        f"/dev/kmsg:\n|6,0,0,-;Linux version 6.8.0\n|3,9,402111004140,-;{XID}\n{NO_JOURNAL}"
    )
    assert (section.source, section.lines_read, section.truncated) == ("kmsg", 2, False)
    (event,) = section.events
    assert (event.locator, event.at_s, event.at_ns) == (
        "seq 9",
        402111.00414,
        1_773_591_600_004_140_000,
    )
    assert collect(host(f"/dev/kmsg:\n|6,0,0,-;Linux version 6.8.0\n{NO_JOURNAL}"))[1] == ()


def test_a_wrapped_ring_buffer_is_a_gap_that_hides_nothing_and_is_said() -> None:
    section, gaps = collect(host(f"/dev/kmsg = 3,9,402111004140,-;{XID}\n"))
    assert section is not None
    assert section.truncated
    (gap,) = gaps
    assert (gap.reason, gap.fields) == (GapReason.ABSENT, ("first_at_s",))
    assert gap.detail == "kmsg: lines of this boot from before 402111 s are gone"


def test_the_journal_when_kmsg_is_refused() -> None:
    section = read(
        "/dev/kmsg !EPERM\n"
        + journal(
            0,
            "[    0.000000] n07 kernel: Linux version 6.8.0",
            f"[402111.004140] n07 kernel: {XID}",
        )
    )
    assert (section.source, section.lines_read, section.truncated) == ("journal", 2, False)
    assert [(e.code, e.pid, e.at_s) for e in section.events] == [(43, 4711, 402111.00414)]


@pytest.mark.parametrize("path", ["/var/log/kern.log", "/var/log/messages", "/var/log/syslog"])
def test_files_as_the_last_resort_and_only_their_last_boot(path: str) -> None:
    section = read(
        f"/dev/kmsg !ENOENT\n{NO_JOURNAL}{path}:\n"
        "|Mar 10 09:00:00 n07 kernel: [99.0] NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off the bus.\n"
        "|Mar 11 00:40:00 n07 kernel: [    0.000000] Linux version 6.8.0\n"
        "|Mar 15 16:20:00 n07 python[12]: NVRM: Xid (PCI:0000:9a:00): 79, quoted by a program\n"
        f"|Mar 15 16:20:00 n07 kernel: [402111.004140] {XID}\n"
    )
    assert section.source == path
    assert [event.code for event in section.events] == [43]


def test_syslog_is_read_in_the_machines_own_zone() -> None:
    import base64

    berlin = base64.b64encode(tzif(3600)).decode()
    section = read(
        f"/dev/kmsg !ENOENT\n{NO_JOURNAL}/etc/localtime =base64 {berlin}\n"
        f"/var/log/messages = Mar 15 17:20:00 n07 kernel: {XID}\n"
    )
    assert section.events[0].at_ns == 1_773_591_600_000_000_000


def tzif(offset: int) -> bytes:
    """The smallest time zone file: one type, no transitions (RFC 8536, version 1)."""
    import struct

    header = b"TZif" + b"\0" * 16 + struct.pack(">6I", 0, 0, 0, 0, 1, 4)
    return header + struct.pack(">iBB", offset, 0, 0) + b"CET\0"


def test_nothing_to_be_had_in_a_container() -> None:
    section, gaps = collect(host(f"/dev/kmsg !ENOENT\n{NO_JOURNAL}"))
    assert section is None
    (gap,) = gaps
    assert (gap.source, gap.reason, gap.fields) == ("kernel", GapReason.ABSENT, ())
    assert gap.detail is not None
    assert gap.detail.startswith(
        "/dev/kmsg: No such file or directory; journalctl: not installed; "
    )


def test_refused_everywhere_says_how_to_allow_it() -> None:
    section, gaps = collect(
        host(
            f"/dev/kmsg !EPERM\n{journal(1)}/var/log/kern.log !EACCES\n/var/log/messages !EACCES\n"
        )
    )
    assert section is None
    (gap,) = gaps
    assert gap.reason is GapReason.DENIED
    assert gap.detail == (
        "/dev/kmsg: Operation not permitted; journalctl -k -b: no kernel messages, exit 1; "
        "/var/log/kern.log: Permission denied; /var/log/messages: Permission denied; "
        "/var/log/syslog: No such file or directory"
    )
    assert gap.allow is not None
    assert "systemd-journal" in gap.allow
    assert "dmesg_restrict" in gap.allow


def test_an_empty_journal_is_not_a_healthy_log() -> None:
    section, gaps = collect(host("/dev/kmsg !EACCES\n" + journal(0, "-- No entries --")))
    assert section is None
    assert gaps[0].reason is GapReason.DENIED


def test_a_journal_that_hangs_and_a_file_that_is_too_large() -> None:
    from agent.tree import TextTree

    tree = host(f"/dev/kmsg !ENOENT\n{run_path(JOURNAL)} !ETIMEDOUT\n").tree
    assert isinstance(tree, TextTree)
    tree.epochs[0]["/var/log/messages"] = b"x" * (LIMIT_BYTES + 1)
    section, gaps = collect(FixtureHost(tree))
    assert section is None
    assert gaps[0].reason is GapReason.TIMEOUT
    assert "/var/log/messages: larger than 16 MiB" in (gaps[0].detail or "")


def test_a_kmsg_that_is_something_else_is_left_alone() -> None:
    section, gaps = collect(host(f"/dev/kmsg = login: \n{NO_JOURNAL}"))
    assert section is None
    assert "holds no kernel messages" in (gaps[0].detail or "")


def test_this_machine_is_read_or_says_why_not() -> None:
    section, gaps = collect(LiveHost())
    assert section is not None or gaps[0].detail
