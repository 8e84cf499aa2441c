"""Kernel logs in any of the forms people have them: kmsg, dmesg, journal, syslog.

Sources: Documentation/ABI/testing/dev-kmsg, dmesg(1), journalctl(1), systemd.journal-fields(7).
"""

from __future__ import annotations

import calendar
import datetime
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from agent.parse.kernel_message import (
    WORDS,
    add_line,
    awaits_more,
    is_complete,
    parse_kernel_message,
)
from agent.parse.lazy_pattern import Pattern
from probes.kernel_fold import KernelFold
from probes.snapshot.kernel import KernelEvent, KernelSection

_ANSI = Pattern(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = Pattern(r"[\x00-\x08\x0b-\x1f\x7f]")
_KMSG_ESCAPE = Pattern(r"\\x([0-9a-f]{2})")

_MONTHS = {name: n for n, name in enumerate(calendar.month_abbr) if name}
_MONTH = "(" + "|".join(_MONTHS) + ")"
_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?"

_KMSG = Pattern(r"(\d{1,3}),(\d{1,19}),(\d{1,19}),[^;\n]*;(.*)", re.ASCII)
# `dmesg -r`, `dmesg -x`; then seconds since boot, perhaps the step since the last line (`-d`)
_LEVEL = Pattern(r"<\d{1,3}>|[a-z]+ *:[a-z]+ *: ", re.ASCII)
_SECONDS = Pattern(
    r"\[ *(\d{1,10})\.(\d{1,9})(?: *<[ +]*[\d.]{1,20}>)?\](?:\[ *[TC]\d+\])? ?", re.ASCII
)
_STEP = Pattern(r"\[ *(?:[<+] *\d{1,10}\.\d{1,9}>?)\] ?", re.ASCII)  # `dmesg -e`, no time
_DMESG_T = Pattern(
    rf"\[(?:[A-Z][a-z]{{2}} )?{_MONTH} +(\d{{1,2}}) {_CLOCK} (\d{{4}})\] ?", re.ASCII
)
_ISO = Pattern(
    rf"(?:[A-Z][a-z]{{2}} )?(\d{{4}})-(\d\d)-(\d\d)[T ]{_CLOCK}"
    r" ?(Z|[A-Z]{3,5}|[+-]\d\d:?\d\d)? +",
    re.ASCII,
)
_SYSLOG = Pattern(rf"(?:<\d{{1,3}}>)?{_MONTH} +(\d{{1,2}}) {_CLOCK} +", re.ASCII)
_UNIX = Pattern(r"(\d{9,10})\.(\d{6}) +", re.ASCII)
_TAG = Pattern(r"([^\s:]+) ([^\s:\[\]]+)(?:\[(\d{1,10})\])?: ?", re.ASCII)

_BANNER = "Linux version "
_JOURNAL_NOTE = Pattern(r"-- (?:Boot [0-9a-f]+|Reboot) --", re.ASCII)
# journalctl -o json gives what is not valid UTF-8 as numbers, which no word would find
_JOURNAL_BYTES = ('"MESSAGE":[', '"MESSAGE" : [')
_KERNEL_FACILITY_PRIORITIES = 8  # kmsg: priority = facility * 8 + level; facility 0 is the kernel


class TimeReference(msgspec.Struct, frozen=True):
    """What turns one clock into the other, and names the year and zone that a line leaves out."""

    taken_at_ns: int | None = None
    uptime_s: float | None = None
    zone: datetime.tzinfo = datetime.timezone.utc

    @property
    def boot_ns(self) -> int | None:
        """Unix time of the boot, up to clock steps since."""
        if self.taken_at_ns is None or self.uptime_s is None:
            return None
        return self.taken_at_ns - int(self.uptime_s * 1e9)


class LogLine(NamedTuple):
    """One message. ``tag`` is the program that wrote it, ``kernel`` for the kernel's own."""

    text: str
    locator: str
    tag: str = "kernel"
    at_s: float | None = None
    at_ns: int | None = None
    starts_boot: bool = False


def parse_log_line(line: str, number: int, reference: TimeReference) -> LogLine | None:
    """One line of any of the forms; None for what carries no message.

    ::

        6,1843,402111004140,-;NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python, Ch 00000010
        [402111.004140] NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python, Ch 00000010
        kern  :err   : [402111.004140] NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python
        [Sun Mar 15 16:20:00 2026] NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python
        2026-03-15T16:20:00,004140+00:00 NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python
        2026-03-15T16:20:00+0000 n07 kernel: NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python
        Mar 15 16:20:00 n07 kernel: [402111.004140] NVRM: Xid (PCI:0000:9a:00): 43, pid=4711
        [402111.004140] n07 kernel: NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python
        1773591600.004140 n07 kernel: NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python
        {"_TRANSPORT":"kernel","__MONOTONIC_TIMESTAMP":"402111004140","MESSAGE":"NVRM: Xid (..."}

    A line without any of the headers is taken as a message of the kernel without a time.
    """
    if "\x1b" in line:
        line = _ANSI.sub("", line)
    line = line.rstrip("\r\n")
    if line.startswith("{") and '"MESSAGE"' in line:
        return _journal_json(line, number)
    if match := _KMSG.match(line):
        return _kmsg(match)
    where = f"line {number}"
    if _JOURNAL_NOTE.match(line):
        return LogLine("", where, starts_boot=True)
    if line.startswith("-- ") or not line.strip():
        return None
    text = line
    at_s: float | None = None
    at_ns: int | None = None
    needs_tag = strict = False  # a header that a program's name follows, perhaps or for certain
    if match := _LEVEL.match(text):
        text = text[match.end() :]
    if match := _SECONDS.match(text):
        at_s = float(f"{match[1]}.{match[2]}")
    elif match := _DMESG_T.match(text):
        month, day, *clock, year = match.groups()
        at_ns = _unix_ns((year, _MONTHS[month], day), tuple(clock), reference.zone)
    elif match := _ISO.match(text):
        year, month, day, *clock, zone = match.groups()
        at_ns = _unix_ns((year, month, day), tuple(clock), _zone(zone) or reference.zone)
        needs_tag = "," not in match[0]  # dmesg writes a decimal comma, journal and syslog none
    elif match := _SYSLOG.match(text):
        month, day, *clock = match.groups()
        at_ns = _in_last_year(_MONTHS[month], day, tuple(clock), reference)
        needs_tag = strict = True
    elif match := _UNIX.match(text):
        at_ns = int(match[1]) * 10**9 + int(match[2]) * 1000
        needs_tag = strict = True
    else:
        match = _STEP.match(text)
    text = text[match.end() :] if match else text
    tag = "kernel"
    found = _TAG.match(text)
    if found and (needs_tag or found[2] == "kernel" or (match and found[3])):
        tag = found[2]
        text = text[found.end() :]
        if tag == "kernel" and (seconds := _SECONDS.match(text)):
            at_s = float(f"{seconds[1]}.{seconds[2]}")
            text = text[seconds.end() :]
    elif text.startswith("kernel: "):
        text = text[8:]
    elif strict:
        tag = ""
    text = clean(text)
    starts = tag == "kernel" and text.startswith(_BANNER)
    return LogLine(text, where, tag, at_s, at_ns, starts)


def clean(text: str) -> str:
    """Without escape sequences and control characters."""
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text if text.isprintable() else _CONTROL.sub("", text)


def _kmsg(match: re.Match[str]) -> LogLine:
    priority, sequence, usec, text = match.groups()
    if "\\x" in text:
        text = _KMSG_ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    text = clean(text)
    # anybody with write access can put a line into the buffer: that is not the kernel's word
    tag = "kernel" if int(priority) < _KERNEL_FACILITY_PRIORITIES else "user"
    starts = tag == "kernel" and text.startswith(_BANNER)
    return LogLine(text, f"seq {sequence}", tag, int(usec) / 1e6, None, starts)


class _JournalEntry(msgspec.Struct):
    message: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
    transport: str | None = msgspec.field(name="_TRANSPORT", default=None)
    identifier: str | None = msgspec.field(name="SYSLOG_IDENTIFIER", default=None)
    realtime: str | None = msgspec.field(name="__REALTIME_TIMESTAMP", default=None)
    monotonic: str | None = msgspec.field(name="__MONOTONIC_TIMESTAMP", default=None)
    source_monotonic: str | None = msgspec.field(name="_SOURCE_MONOTONIC_TIMESTAMP", default=None)


def _journal_json(line: str, number: int) -> LogLine | None:
    try:
        entry = msgspec.json.decode(line, type=_JournalEntry)
    except msgspec.MsgspecError:
        return None
    text = entry.message
    if isinstance(text, list):
        text = bytes(byte & 0xFF for byte in text).decode("utf-8", "replace")
    if not text:
        return None
    tag = "kernel" if entry.transport == "kernel" else entry.identifier or "kernel"
    text = clean(text.partition("\n")[0])
    usec = _number(entry.source_monotonic) or _number(entry.monotonic)
    realtime = _number(entry.realtime)
    return LogLine(
        text,
        f"line {number}",
        tag,
        usec / 1e6 if usec is not None else None,
        realtime * 1000 if realtime is not None else None,
        tag == "kernel" and text.startswith(_BANNER),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


def _unix_ns(
    date: tuple[str | int, ...], clock: tuple[str | None, ...], zone: datetime.tzinfo
) -> int | None:
    """``date`` is year, month, day; ``clock`` hour, minute, second, fraction."""
    year, month, day = map(int, date)
    hour, minute, second = (int(part or 0) for part in clock[:3])
    try:
        moment = datetime.datetime(year, month, day, hour, minute, min(second, 59), tzinfo=zone)
        seconds = calendar.timegm(moment.utctimetuple())
    except (ValueError, OverflowError):
        return None
    return seconds * 10**9 + int((clock[3] or "0").ljust(9, "0")[:9])


def _in_last_year(
    month: int, day: str, clock: tuple[str | None, ...], reference: TimeReference
) -> int | None:
    """Syslog leaves out the year: the latest one that is not in the future."""
    if reference.taken_at_ns is None:
        return None
    slack_ns = 24 * 3600 * 10**9
    newest = datetime.datetime.fromtimestamp(reference.taken_at_ns / 1e9, reference.zone).year
    for year in (newest + 1, newest, newest - 1):
        at_ns = _unix_ns((year, month, day), clock, reference.zone)
        if at_ns is not None and at_ns <= reference.taken_at_ns + slack_ns:
            return at_ns
    return None


def _zone(text: str | None) -> datetime.tzinfo | None:
    """``+0200``, ``+02:00``, ``Z``, ``UTC``; another zone's name says nothing by itself."""
    if text in ("Z", "UTC", "GMT"):
        return datetime.timezone.utc
    if not text or text[0] not in "+-":
        return None
    minutes = int(text[1:3]) * 60 + int(text[-2:])
    if minutes >= 24 * 60:
        return None
    return datetime.timezone(datetime.timedelta(minutes=minutes if text[0] == "+" else -minutes))


def parse_log_lines(lines: Iterable[str], reference: TimeReference) -> Iterator[LogLine]:
    """Every message of a log, the kernel's and (in a journal or syslog) other programs'."""
    for number, line in enumerate(lines, 1):
        if found := parse_log_line(line, number, reference):
            yield found


def parse_kernel_log(
    text: str,
    source: str,
    reference: TimeReference = TimeReference(),
    *,
    only_this_boot: bool = False,
) -> KernelSection:
    """The events of the last boot in the log; lines that repeat are folded.

    Most lines bear on nothing here, so one search decides whether a line is looked at closer. In a
    log of several boots each start (the kernel's banner, the journal's boot marker) forgets what
    came before, and with a known uptime lines from before the boot are left out, unless
    ``only_this_boot`` says that the source holds no others (kmsg, ``journalctl -b``).
    """
    reader = _Reader(reference, only_this_boot)
    at, number = 0, 1
    for start in _lines_that_matter(text):
        number += text.count("\n", at, start)
        at = start
        end = text.find("\n", start)
        line = parse_log_line(text[start : end if end >= 0 else None], number, reference)
        if line is not None:
            reader.take(line, start)
    return reader.section(text, source)


def _lines_that_matter(text: str) -> list[int]:
    """Where the lines begin that have one of the words, and the first ones (for their time)."""
    starts = {0}
    second = text.find("\n") + 1
    starts.add(second)  # the first line of a file that was cut may be half of one
    for word in (*WORDS, *_JOURNAL_BYTES):
        at = text.find(word)
        while at >= 0:
            starts.add(text.rfind("\n", 0, at) + 1)
            end = text.find("\n", at)
            at = text.find(word, end) if end >= 0 else -1
    return sorted(starts)


class _Reader:
    """One pass over a log."""

    def __init__(self, reference: TimeReference, only_this_boot: bool) -> None:
        self.reference = reference
        self.only_this_boot = only_this_boot
        self._begin(0, None)

    def _begin(self, start: int, first: LogLine | None) -> None:
        self.start = start
        self.first = first
        self.fold = KernelFold()
        self.held: tuple[KernelEvent, LogLine] | None = None

    def take(self, line: LogLine, start: int) -> None:
        """One line that may matter, and where it begins."""
        if line.starts_boot:
            self._begin(start, line)
            return
        if self.first is None or (self.first.at_s is None and line.at_s is not None):
            self.first = line
        if line.tag != "kernel":
            return
        if not self.only_this_boot and _before_boot(line, self.reference):
            return
        if self.held is not None:
            longer = add_line(self.held[0], line.text)
            if longer is not None:
                self.held = (longer, self.held[1])
                return
            self._release()
        event = parse_kernel_message(line.text)
        if event is None:
            return
        if awaits_more(event):
            self.held = (event, line)
        else:
            self._add(event, line)

    def _release(self) -> None:
        if self.held is not None and is_complete(self.held[0]):
            self._add(*self.held)
        self.held = None

    def _add(self, event: KernelEvent, line: LogLine) -> None:
        at_ns = line.at_ns
        if at_ns is None and line.at_s is not None and self.reference.boot_ns is not None:
            at_ns = self.reference.boot_ns + int(line.at_s * 1e9)
        self.fold.add(event, line.locator, line.at_s, at_ns)

    def section(self, text: str, source: str) -> KernelSection:
        """What was read; kmsg's dictionary lines, which begin with a space, are part of others."""
        self._release()
        first = self.first
        whole = first is not None and (first.starts_boot or first.locator == "seq 0")
        return KernelSection(
            source=source,
            first_at_s=first.at_s if first else None,
            truncated=not whole if first else None,
            lines_read=(
                text.count("\n", self.start)
                - text.count("\n ", self.start)
                + (0 if text.endswith("\n") or not text else 1)
            ),
            events=self.fold.events(),
            dropped_events=self.fold.dropped,
        )


def _before_boot(line: LogLine, reference: TimeReference) -> bool:
    """Whether the line is of an earlier boot; a minute of slack for a clock that was set since."""
    if line.at_s is not None:
        return reference.uptime_s is not None and line.at_s > reference.uptime_s + 60
    boot_ns = reference.boot_ns
    return boot_ns is not None and line.at_ns is not None and line.at_ns < boot_ns - 60 * 10**9
