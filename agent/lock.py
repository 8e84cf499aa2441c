"""One run at a time: cron must not pile up checks on a node where something hangs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import msgspec

FILE = "check.lock"


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lock; the monotonic clock is the boot's, the same for all processes."""

    pid: int
    started_monotonic_ns: int
    started_at: str
    deadline_s: float

    def is_overdue(self) -> bool:
        """Whether it should have ended long ago: two deadlines have passed."""
        return self.age_s() > 2 * self.deadline_s

    def age_s(self) -> float:
        """Seconds since it began."""
        return (time.monotonic_ns() - self.started_monotonic_ns) / 1e9

    def describe(self) -> str:
        """By whom and since when."""
        return f"{_process(self.pid)}{self._since()}"

    def brief(self) -> str:
        """The same in few words."""
        return f"pid {self.pid}{self._since()}"

    def _since(self) -> str:
        return f", since {self.started_at} ({self.age_s():.0f} s)"


class LockedError(Exception):
    """Another run is at work; ``holder`` is None when it has not said who it is."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__("another run is at work")
        self.holder = holder


@contextlib.contextmanager
def one_at_a_time(directory: str, deadline_s: float) -> Iterator[None]:
    """Hold the lock of a state directory. Raises LockedError, and OSError without a place for it.

    The kernel drops it with the process, whatever ends that; children close what they inherit.
    """
    os.makedirs(directory, exist_ok=True)
    handle = os.open(os.path.join(directory, FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(_read(handle)) from None
        now = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
        holder = Holder(os.getpid(), time.monotonic_ns(), now, deadline_s)
        _write(handle, msgspec.json.encode(holder))
        try:
            yield
        finally:
            _write(handle, b"")  # nobody is to read it as the next holder's
    finally:
        os.close(handle)


def _write(handle: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)


def _read(handle: int) -> Holder | None:
    """The holder writes right after it took the lock: wait a little for it."""
    until = time.monotonic() + 0.2
    while not (data := os.pread(handle, 4096, 0)) and time.monotonic() < until:
        time.sleep(0.005)
    try:
        return msgspec.json.decode(data, type=Holder)
    except msgspec.DecodeError:
        return None


def _process(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        command = " ".join(" ".join(process.cmdline() or [process.name()]).split())[:200]
        return f"pid {pid} ({command}; user {process.username()}; {process.status()})"
    except psutil.Error:
        return f"pid {pid} (not visible from here)"
