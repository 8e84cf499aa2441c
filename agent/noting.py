"""A Host that notes what it is about to read where another process can see it."""

from __future__ import annotations

import mmap

from agent.host import CommandResult, Host
from agent.nvml_channel import NvmlChannel
from agent.tree import READ_LIMIT_BYTES, FileStat

_BYTES = 4096
_LENGTH_BYTES = 2


class Note:
    """A text in memory that stays shared with children forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES)

    def begin(self, path: str) -> None:
        """Write it."""
        data = path.encode("utf-8", "replace")[: _BYTES - _LENGTH_BYTES]
        self._memory[: _LENGTH_BYTES + len(data)] = (
            len(data).to_bytes(_LENGTH_BYTES, "little") + data
        )

    def last(self) -> str:
        """What was written last; empty when nothing was."""
        size = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        return self._memory[_LENGTH_BYTES : _LENGTH_BYTES + size].decode("utf-8", "replace")


class NotingHost:
    """Notes the path of each read before it begins, then asks the host inside."""

    def __init__(self, inner: Host, note: Note) -> None:
        self.inner = inner
        self._note = note

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        """See Host."""
        self._note.begin(path)
        return self.inner.read_bytes(path, limit)

    def read_text(self, path: str, limit: int = READ_LIMIT_BYTES) -> str:
        """See Host."""
        self._note.begin(path)
        return self.inner.read_text(path, limit)

    def read_kmsg(self, limit: int = 16 << 20) -> bytes:
        """See Host."""
        self._note.begin("/dev/kmsg")
        return self.inner.read_kmsg(limit)

    def listdir(self, path: str) -> list[str]:
        """See Host."""
        self._note.begin(path)
        return self.inner.listdir(path)

    def readlink(self, path: str) -> str:
        """See Host."""
        self._note.begin(path)
        return self.inner.readlink(path)

    def realpath(self, path: str) -> str:
        """See Host."""
        self._note.begin(path)
        return self.inner.realpath(path)

    def stat(self, path: str) -> FileStat:
        """See Host."""
        self._note.begin(path)
        return self.inner.stat(path)

    def exists(self, path: str) -> bool:
        """See Host."""
        self._note.begin(path)
        return self.inner.exists(path)

    def access(self, path: str) -> None:
        """See Host."""
        self._note.begin(path)
        self.inner.access(path)

    def disk_bytes(self, path: str) -> tuple[int, int]:
        """See Host."""
        self._note.begin(path)
        return self.inner.disk_bytes(path)

    def adjtimex(self) -> tuple[int, int, int]:
        """See Host."""
        self._note.begin("adjtimex()")
        return self.inner.adjtimex()

    def run(self, argv: tuple[str, ...], timeout_s: float) -> CommandResult:
        """See Host."""
        self._note.begin(" ".join(argv))
        return self.inner.run(argv, timeout_s)

    def open_nvml(self) -> NvmlChannel:
        """See Host."""
        return self.inner.open_nvml()

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
        """See Host."""
        self.inner.sleep(seconds)
