"""A Host that keeps every answer, so that a run can be replayed byte for byte (``--raw``)."""

from __future__ import annotations

import contextlib
import errno
import posixpath
from collections.abc import Callable
from typing import TypeVar

import msgspec

from agent.host import CommandResult, Host, run_path, statvfs_path
from agent.nvml_channel import Abandoned, NvmlChannel
from agent.tree import READ_LIMIT_BYTES, Entry, FileStat, Link, Refusal, TextTree, resolve

T = TypeVar("T")


class RecordingHost:
    """Wraps a Host; ``tree`` is what a FixtureHost needs to give the same answers.

    A second answer that differs from the first goes into the next epoch, which begins at ``sleep``.
    """

    def __init__(self, inner: Host) -> None:
        self.inner = inner
        self.tree = TextTree([{}])
        self._put("/@euid", f"{inner.euid()}\n".encode())
        self._put("/@time_ns", f"{inner.time_ns()}\n".encode())

    def _put(self, path: str, entry: Entry) -> None:
        epochs = self.tree.epochs
        for entries in reversed(epochs):
            if path in entries:
                if entries[path] == entry:
                    return
                break
        epochs[-1][path] = entry

    def _note(self, path: str, ask: Callable[[], T], keep: Callable[[T], Entry | None]) -> T:
        try:
            answer = ask()
        except OSError as error:
            code = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
            self._put(path, Refusal(code or errno.EIO))
            raise
        if (entry := keep(answer)) is not None:
            self._put(path, entry)
        return answer

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        """See Host."""
        return self._note(
            self._place(path), lambda: self.inner.read_bytes(path, limit), lambda b: b
        )

    def read_text(self, path: str, limit: int = READ_LIMIT_BYTES) -> str:
        """See Host."""
        return self.read_bytes(path, limit).decode("utf-8", "replace").removesuffix("\n")

    def _place(self, path: str) -> str:
        """Where an answer is kept: behind all links, which are noted on the way."""
        try:
            real = self.inner.realpath(path)
        except OSError:
            return path
        if real != path:
            self._note_links(path)
        return real

    def _note_links(self, path: str) -> None:
        """Keep every link that the path leads through."""
        with contextlib.suppress(OSError):  # a loop: the read that follows says so
            resolve(path, self._noted_link)

    def _noted_link(self, path: str) -> str | None:
        try:
            target = self.inner.readlink(path)
        except OSError:
            return None
        self._put(path, Link(target))
        return target

    def read_kmsg(self, limit: int = 16 << 20) -> bytes:
        """See Host."""
        return self._note("/dev/kmsg", lambda: self.inner.read_kmsg(limit), lambda b: b)

    def listdir(self, path: str) -> list[str]:
        """See Host."""
        place = self._place(path)
        names = self._note(place, lambda: self.inner.listdir(path), lambda _: None)
        self._put(f"{place.rstrip('/')}/", b"")
        for name in names:
            child = f"{place.rstrip('/')}/{name}"
            try:
                self._put(child, Link(self.inner.readlink(child)))
            except OSError:
                self._put(f"{child}/", b"") if self._is_directory(child) else self._reserve(child)
        return names

    def _is_directory(self, path: str) -> bool:
        import stat

        try:
            return stat.S_ISDIR(self.inner.stat(path).mode)
        except OSError:
            return False

    def _reserve(self, path: str) -> None:
        """A name that was listed and never read: it exists, and its content was not asked for."""
        if not any(path in entries for entries in self.tree.epochs):
            self._put(path, Refusal(errno.ENODATA))

    def readlink(self, path: str) -> str:
        """See Host."""
        parent, _, base = path.rpartition("/")
        place = f"{self._place(parent or '/').rstrip('/')}/{base}"
        return self._note(place, lambda: self.inner.readlink(path), Link)

    def realpath(self, path: str) -> str:
        """See Host."""
        self._note_links(path)
        return self.inner.realpath(path)

    def stat(self, path: str) -> FileStat:
        """See Host."""
        import stat

        place = self._place(path)

        def keep(found: FileStat) -> Entry | None:
            if stat.S_ISDIR(found.mode):
                self._put(f"{place.rstrip('/')}/", b"")
            else:
                self._reserve(place)
            return None

        return self._note(place, lambda: self.inner.stat(path), keep)

    def exists(self, path: str) -> bool:
        """See Host."""
        with contextlib.suppress(OSError):
            self.stat(path)
        return self.inner.exists(path)

    def access(self, path: str) -> None:
        """See Host."""
        self._note(
            "/@access" + posixpath.normpath(path),
            lambda: self.inner.access(path),
            lambda _: b"\n",
        )

    def disk_bytes(self, path: str) -> tuple[int, int]:
        """See Host."""
        return self._note(
            statvfs_path(path),
            lambda: self.inner.disk_bytes(path),
            lambda found: f"{found[0]} {found[1]}\n".encode(),
        )

    def adjtimex(self) -> tuple[int, int, int]:
        """See Host."""
        return self._note(
            "/@adjtimex",
            self.inner.adjtimex,
            lambda found: (" ".join(map(str, found)) + "\n").encode(),
        )

    def run(self, argv: tuple[str, ...], timeout_s: float) -> CommandResult:
        """See Host."""
        return self._note(
            run_path(argv),
            lambda: self.inner.run(argv, timeout_s),
            lambda found: f"{found.returncode}\n".encode() + found.stdout,
        )

    def open_nvml(self) -> NvmlChannel:
        """See Host."""
        return _RecordingChannel(self.inner.open_nvml(), self._put_nvml)

    def _put_nvml(self, line: str) -> None:
        entries = self.tree.epochs[0]
        before = entries.get("/@nvml", b"")
        assert isinstance(before, bytes)  # noqa: S101 - only written here
        entries["/@nvml"] = before + line.encode() + b"\n"

    def euid(self) -> int:
        """See Host."""
        return self.inner.euid()

    def monotonic_ns(self) -> int:
        """See Host."""
        return self.inner.monotonic_ns()

    def time_ns(self) -> int:
        """See Host."""
        return self.inner.time_ns()

    def sleep(self, seconds: float) -> None:
        """See Host; what is read from here on belongs to the next epoch."""
        self.inner.sleep(seconds)
        self.tree.epochs.append({})


class _RecordingChannel:
    """Passes lines on and keeps them, in the form that ReplayedNvmlChannel reads."""

    def __init__(self, inner: NvmlChannel, keep: Callable[[str], None]) -> None:
        self._inner, self._keep = inner, keep
        self._ended = False
        keep("@")

    def send(self, line: str) -> None:
        """See NvmlChannel."""
        self._keep(f"> {line}")
        self._noting_the_end(lambda: self._inner.send(line))

    def receive(self, until_ns: int) -> str:
        """See NvmlChannel."""
        line = self._noting_the_end(lambda: self._inner.receive(until_ns))
        self._keep(f"< {line}")
        return line

    def _noting_the_end(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except EOFError:
            self._ended = True
            raise

    def abandon(self) -> Abandoned:
        """See NvmlChannel."""
        found = self._inner.abandon()
        self._keep(f"{'x' if self._ended else '!'} {msgspec.json.encode(found).decode()}")
        return found

    def close(self) -> None:
        """See NvmlChannel."""
        self._inner.close()
