"""The only door to the machine: files, programs, clocks, NVML.

``LiveHost`` is the machine (``root`` re-roots its files for a container that mounts the host),
``FixtureHost`` a copied or written tree, ``RecordingHost`` wraps either and keeps every answer.
"""

from __future__ import annotations

import errno
import os
import posixpath
import subprocess
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent.tree import READ_LIMIT_BYTES, DiskTree, FileStat, TextTree, Tree

if TYPE_CHECKING:
    from agent.nvml_channel import NvmlChannel

_KMSG_RECORD_BYTES = 8192  # printk's longest record is below this (PRINTKRB_RECORD_MAX 1024 + dict)


class CommandResult(msgspec.Struct, frozen=True):
    """What a program printed; ``returncode`` is negative for a signal."""

    returncode: int
    stdout: bytes
    stderr: bytes


class Host(Protocol):
    """What collectors may ask. File methods raise OSError; paths are as on the machine."""

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        """At most ``limit`` bytes of a file."""

    def read_text(self, path: str, limit: int = READ_LIMIT_BYTES) -> str:
        """The same as text, undecodable bytes replaced, one final newline removed."""

    def read_kmsg(self, limit: int = 16 << 20) -> bytes:
        """The kernel's ring buffer, one record a line with its continuation lines."""

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted."""

    def readlink(self, path: str) -> str:
        """The target of a symbolic link, as written."""

    def realpath(self, path: str) -> str:
        """The path with every link resolved."""

    def stat(self, path: str) -> FileStat:
        """Facts of the file behind all links."""

    def exists(self, path: str) -> bool:
        """Whether the path can be reached; a path that is refused counts as there."""

    def access(self, path: str) -> None:
        """Raise OSError if reading and writing the path would be refused (access(2), no open)."""

    def disk_bytes(self, path: str) -> tuple[int, int]:
        """Size and free bytes of the file system that holds ``path`` (statvfs)."""

    def adjtimex(self) -> tuple[int, int, int]:
        """Clock state, status bits and estimated error in microseconds (adjtimex(2), read only)."""

    def run(self, argv: tuple[str, ...], timeout_s: float) -> CommandResult:
        """Run a program. Raises FileNotFoundError, PermissionError or TimeoutError."""

    def open_nvml(self) -> NvmlChannel:
        """A process that talks to NVML. Raises FileNotFoundError when there can be none."""

    def euid(self) -> int:
        """The effective user id that the readings were taken with."""

    def monotonic_ns(self) -> int:
        """The clock that readings carry."""

    def time_ns(self) -> int:
        """Unix time."""

    def sleep(self, seconds: float) -> None:
        """Wait between two readings."""


class _TreeHost:
    """File methods over a tree."""

    tree: Tree

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        return self.tree.read_bytes(path, limit)

    def read_text(self, path: str, limit: int = READ_LIMIT_BYTES) -> str:
        return self.read_bytes(path, limit).decode("utf-8", "replace").removesuffix("\n")

    def listdir(self, path: str) -> list[str]:
        return self.tree.listdir(path)

    def readlink(self, path: str) -> str:
        return self.tree.readlink(path)

    def realpath(self, path: str) -> str:
        return self.tree.realpath(path)

    def stat(self, path: str) -> FileStat:
        return self.tree.stat(path)

    def exists(self, path: str) -> bool:
        try:
            self.tree.stat(path)
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENODEV)
        return True


class LiveHost(_TreeHost):
    """This machine."""

    def __init__(self, root: str = "/") -> None:
        self.tree = DiskTree(root)
        self.root = root.rstrip("/") or "/"

    def read_kmsg(self, limit: int = 16 << 20) -> bytes:
        """See Host. /dev/kmsg gives one record a read and EAGAIN at its end."""
        path = (self.root.rstrip("/")) + "/dev/kmsg"
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        parts: list[bytes] = []
        size = 0
        try:
            while size < limit:
                try:
                    part = os.read(handle, _KMSG_RECORD_BYTES)
                except BlockingIOError:
                    break
                except OSError as error:
                    if (
                        error.errno == errno.EPIPE
                    ):  # the record was overwritten: go on with the next
                        continue
                    raise
                if not part:
                    break
                parts.append(part)
                size += len(part)
        finally:
            os.close(handle)
        return b"".join(parts)

    def access(self, path: str) -> None:
        """See Host."""
        from agent.access import check_access

        check_access((self.root.rstrip("/")) + self.tree.realpath(path))

    def disk_bytes(self, path: str) -> tuple[int, int]:
        """See Host."""
        found = os.statvfs(self.tree.root + path if isinstance(self.tree, DiskTree) else path)
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail

    def adjtimex(self) -> tuple[int, int, int]:
        """See Host."""
        from agent.adjtimex import read_adjtimex

        return read_adjtimex()

    def run(self, argv: tuple[str, ...], timeout_s: float) -> CommandResult:
        """See Host. A program that does not end in time is left behind, never waited for."""
        if self.root != "/":
            argv = _under(self.root, argv)
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        ) as child:
            try:
                out, err = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()
                child.returncode = -9  # keeps Popen.__exit__ from waiting for an unkillable child
                raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s") from None
        return CommandResult(child.returncode, out, err)

    def open_nvml(self) -> NvmlChannel:
        """See Host."""
        from agent.nvml_channel import LiveNvmlChannel

        return LiveNvmlChannel()

    def euid(self) -> int:
        """See Host."""
        return os.geteuid()

    def monotonic_ns(self) -> int:
        """See Host."""
        return time.monotonic_ns()

    def time_ns(self) -> int:
        """See Host."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """See Host."""
        time.sleep(seconds)


def _under(root: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    """What to run for a machine whose files stand under ``root``.

    The journal is read where that machine keeps it. Its own programs are not started: nobody
    vouches for them here, and this machine's of the same name would speak for another.
    """
    if argv[0] == "journalctl":
        return (argv[0], f"--root={root}", *argv[1:])
    raise FileNotFoundError(errno.ENOENT, "not run, since --root is another machine's", argv[0])


def run_path(argv: tuple[str, ...]) -> str:
    """Where a recorded program's output stands in a text tree."""
    import urllib.parse

    return "/@run/" + urllib.parse.quote(" ".join(argv), safe="")


def statvfs_path(path: str) -> str:
    """Where the size of the file system at ``path`` stands in a text tree; ``@`` is the root's."""
    return "/@statvfs" + (posixpath.normpath(path) if path != "/" else "/@")


class FixtureHost(_TreeHost):
    """A machine that is not here: a copied root directory, or the text form of ``agent.fstree``.

    Time stands still but for ``sleep``, which moves both clocks and, in a text tree, on to the next
    reading. Special files stand under ``/@``: ``/@run/ARGV`` (exit code line, then the output),
    ``/@statvfs/PATH`` (size and free bytes; ``/@statvfs/@`` for the root), ``/@access/PATH``
    (anything, or a refusal), ``/@adjtimex``, ``/@euid``, ``/@time_ns``, ``/@nvml``
    (see ``agent.nvml_channel``).
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._now_ns = 1_000_000_000_000
        self._nvml_opened = 0
        self._time_ns = self._number("/@time_ns", 1_767_225_600_000_000_000)  # 2026-01-01T00:00:00Z

    def _number(self, path: str, default: int) -> int:
        try:
            return int(self.read_text(path))
        except (OSError, ValueError):
            return default

    def read_kmsg(self, limit: int = 16 << 20) -> bytes:
        """See Host."""
        return self.read_bytes("/dev/kmsg", limit)

    def access(self, path: str) -> None:
        """See Host."""
        self.read_bytes("/@access" + posixpath.normpath(path))

    def disk_bytes(self, path: str) -> tuple[int, int]:
        """See Host."""
        size, free = self.read_text(statvfs_path(path)).split()
        return int(size), int(free)

    def adjtimex(self) -> tuple[int, int, int]:
        """See Host."""
        state, status, error_us = self.read_text("/@adjtimex").split()
        return int(state), int(status), int(error_us)

    def run(self, argv: tuple[str, ...], timeout_s: float) -> CommandResult:
        """See Host."""
        try:
            code, _, out = self.read_bytes(run_path(argv)).partition(b"\n")
        except OSError as error:
            if error.errno == errno.ETIMEDOUT:
                raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s") from None
            raise
        return CommandResult(int(code), out, b"")

    def open_nvml(self) -> NvmlChannel:
        """See Host; the recorded answers stand at ``/@nvml``."""
        from agent.nvml_channel import ReplayedNvmlChannel

        text = self.read_text("/@nvml", limit=64 << 20)
        self._nvml_opened += 1
        return ReplayedNvmlChannel(text, self._nvml_opened - 1)

    def euid(self) -> int:
        """See Host."""
        return self._number("/@euid", 0)

    def monotonic_ns(self) -> int:
        """See Host."""
        return self._now_ns

    def time_ns(self) -> int:
        """See Host."""
        return self._time_ns

    def sleep(self, seconds: float) -> None:
        """See Host."""
        self._now_ns += int(seconds * 1e9)
        self._time_ns += int(seconds * 1e9)
        if isinstance(self.tree, TextTree):
            self.tree.epoch = min(self.tree.epoch + 1, len(self.tree.epochs) - 1)
