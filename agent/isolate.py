"""Runs what reads files in a forked child that the parent can abandon.

A read in /proc or /sys of a sick device, or of a dead mount, may never return, and a thread in the
kernel cannot be abandoned: a process can. One child, forked before any thread exists and without
exec (the modules it imports never weigh on the parent), does one reading after the other as it is
asked, and stays for the second ones. The path that it begins to read stands in memory that both
share, so that the parent can name what hung. Then the child is killed, never waited for without
bound, and a fresh fork does what remains.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from agent.host import Host
from agent.noting import Note, NotingHost
from probes.gap import Gap, GapReason

Read = tuple[Any, tuple[Gap, ...]]
First = Callable[[Host], Read]
Second = Callable[[Host, Any], Read]

_LENGTH_BYTES = 8
_END_WAIT_S = 0.5  # for a child that was told to end
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Reader(msgspec.Struct, frozen=True):
    """One section: ``record`` is its type, ``load`` gives the functions that read it.

    ``load`` imports them, and is called only where they run. ``source`` is what gaps call it.
    """

    name: str
    source: str
    record: type
    load: Callable[[], tuple[First, Second | None]]


class Readings(Protocol):
    """Takes the readings of sections; both methods say in gaps what went wrong."""

    def first(self, reader: Reader, seconds: float) -> Read:
        """The section, or None; back within ``seconds`` where a child reads."""

    def second(self, reader: Reader, section: Any, seconds: float) -> Read:
        """The section with one more reading, or as it was."""

    def close(self) -> None:
        """End the child, if there is one."""


class InProcess:
    """Reads without a child: for recordings and copies, which cannot hang."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def first(self, reader: Reader, seconds: float) -> Read:
        """See Readings."""
        return _perform(self.host, reader, None)

    def second(self, reader: Reader, section: Any, seconds: float) -> Read:
        """See Readings."""
        return _perform(self.host, reader, section)

    def close(self) -> None:
        """See Readings."""


class _Ask(msgspec.Struct, array_like=True):
    name: str
    again: bool


class _Reply(msgspec.Struct, array_like=True):
    section: msgspec.Raw  # decoded by the reader's record type; nil for none
    gaps: tuple[Gap, ...]


class Isolated:
    """Reads in a forked child; ``readers`` are all that it may be asked for."""

    def __init__(self, host: Host, readers: tuple[Reader, ...]) -> None:
        self._host = host
        self._readers = {reader.name: reader for reader in readers}
        self._sections: dict[str, Any] = {}  # what a fresh fork starts with
        self._note = Note()
        self._child: _Child | None = None

    def first(self, reader: Reader, seconds: float) -> Read:
        """See Readings."""
        section, gaps = self._ask(reader, None, seconds)
        self._sections[reader.name] = section
        return section, gaps

    def second(self, reader: Reader, section: Any, seconds: float) -> Read:
        """See Readings."""
        return self._ask(reader, section, seconds)

    def close(self) -> None:
        """See Readings."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _ask(self, reader: Reader, section: Any, seconds: float) -> Read:
        until = time.monotonic() + seconds
        if self._child is None:
            self._note.begin("")
            self._child = _fork(self._host, self._readers, self._sections, self._note)
        child = self._child
        ask = _Ask(reader.name, section is not None)
        fields = () if section is None else ("readings",)
        try:
            _send(child.asks, msgspec.msgpack.encode(ask))
            data = _receive(child.replies, until)
        except TimeoutError:
            self._child = None
            return section, (self._hung(reader, fields, seconds, child.abandon()),)
        except (EOFError, BrokenPipeError):
            self._child = None
            return section, (self._died(reader, fields, child.abandon()),)
        reply = msgspec.msgpack.decode(data, type=_Reply)
        read = msgspec.msgpack.decode(reply.section, type=reader.record | None)
        return section if read is None else read, reply.gaps

    def _hung(
        self, reader: Reader, fields: tuple[str, ...], seconds: float, status: int | None
    ) -> Gap:
        path = self._note.last()
        what = f"{path}: " if path else ""
        left = "" if status is not None else "; the process that reads it could not even be killed"
        return Gap(
            source=reader.source,
            reason=GapReason.TIMEOUT,
            fields=fields,
            detail=f"{what}did not return within {seconds:.3g} s{left}",
            allow="find out what hangs there; a larger --deadline helps where it is only slow",
        )

    def _died(self, reader: Reader, fields: tuple[str, ...], status: int | None) -> Gap:
        code = None if status is None else os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code is not None and code < 0 else "ended early"
        path = self._note.last()
        return Gap(
            source=reader.source,
            reason=GapReason.MALFORMED,
            fields=fields,
            detail=f"the process that reads {path or reader.name} {how}",
        )


# --- the parent's side ---


class _Child:
    """A forked reader, seen from the parent."""

    def __init__(self, pid: int, asks: int, replies: int) -> None:
        self.pid, self.asks, self.replies = pid, asks, replies

    def end(self) -> None:
        """Let it end by itself, which it does when nobody can ask any more."""
        os.close(self.asks)
        with contextlib.suppress(EOFError, TimeoutError):
            _receive(self.replies, time.monotonic() + _END_WAIT_S)
        os.close(self.replies)
        if self._reap() is None:
            self._kill()
            self._reap()

    def abandon(self) -> int | None:
        """Kill it and what it started; the wait status, None when it can't be killed."""
        os.close(self.asks)
        os.close(self.replies)
        self._kill()
        return self._reap()

    def _kill(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            # a program that it ran (journalctl) has a session of its own
            path = f"/proc/{self.pid}/task/{self.pid}/children"
            with open(path, encoding="ascii") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> int | None:
        """Wait a little: a process stuck in the kernel is left to init."""
        until = time.monotonic() + _END_WAIT_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return status
            if time.monotonic() > until:
                return None
            time.sleep(0.001)


def _send(handle: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    while view:
        view = view[os.write(handle, view) :]


def _receive(handle: int, until: float | None = None) -> bytes:
    """One message. Raises EOFError, or TimeoutError at the monotonic time ``until``."""
    size = int.from_bytes(_read_exactly(handle, _LENGTH_BYTES, until), "little")
    return _read_exactly(handle, size, until)


def _read_exactly(handle: int, size: int, until: float | None) -> bytes:
    parts: list[bytes] = []
    if until is not None:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
    while size:
        if until is not None and not poller.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(handle, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# --- the child's side ---


def _fork(host: Host, readers: dict[str, Reader], sections: dict[str, Any], note: Note) -> _Child:
    asks_read, asks_write = os.pipe()
    replies_read, replies_write = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child_main(
            parent, NotingHost(host, note), readers, dict(sections), (asks_read, replies_write)
        )
    os.close(asks_read)
    os.close(replies_write)
    return _Child(pid, asks_write, replies_read)


def _child_main(
    parent: int,
    host: Host,
    readers: dict[str, Reader],
    sections: dict[str, Any],
    pipes: tuple[int, int],
) -> NoReturn:
    asks, replies = pipes
    try:
        _die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
        _close_others(asks, replies)
        while True:
            ask = msgspec.msgpack.decode(_receive(asks), type=_Ask)
            reader = readers[ask.name]
            section, gaps = _perform(host, reader, sections[ask.name] if ask.again else None)
            sections[ask.name] = section
            _send(replies, _encode(reader, section, gaps))
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _close_others(*kept: int) -> None:
    """A lock or a pipe of the parent's must not live on in a child that hangs."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))


def _die_with(parent: int) -> None:
    """Be killed when the parent ends, however it ends, also while a read hangs."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(0)


def _perform(host: Host, reader: Reader, section: Any) -> Read:
    """One reading; a reader that raises has a bug, which is said and hides no other section."""
    try:
        first, second = reader.load()
        if section is None:
            return first(host)
        return second(host, section) if second else (section, ())
    except Exception as error:
        return section, (bug(reader.source, error, again=section is not None),)


def _encode(reader: Reader, section: Any, gaps: tuple[Gap, ...]) -> bytes:
    try:
        return _pack(section, gaps)
    except Exception as error:
        return _pack(None, (bug(reader.source, error),))


def _pack(section: Any, gaps: tuple[Gap, ...]) -> bytes:
    raw = msgspec.Raw(msgspec.msgpack.encode(section))
    return msgspec.msgpack.encode(_Reply(raw, gaps))


def bug(source: str, error: Exception, *, again: bool = False) -> Gap:
    """The gap that a reader of ours leaves when it raises."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return Gap(
        source=source,
        reason=GapReason.MALFORMED,
        fields=("readings",) if again else (),
        detail=f"a bug in laggard's reader: {type(error).__name__}: {error}{where}",
        allow="please report it",
    )
