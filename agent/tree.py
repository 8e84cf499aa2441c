"""File trees that a host is read from: a directory on disk, or one text file per machine.

Paths are absolute, as on the machine (``/sys/bus/pci/devices``). Symbolic links are resolved inside
the tree, also absolute ones, so that a copied or mounted root never leads out of itself.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable
from typing import Protocol

import msgspec

READ_LIMIT_BYTES = 4 << 20
_MAX_LINKS = 40  # as the kernel's MAXSYMLINKS


class FileStat(msgspec.Struct, frozen=True):
    """The parts of stat(2) that collectors use."""

    mode: int
    uid: int
    size: int
    device: int  # st_rdev: major and minor of a device node
    mtime_ns: int


class Tree(Protocol):
    """Read access to one tree of files. Every method raises OSError as the system call would."""

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        """At most ``limit`` bytes of a file."""

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted."""

    def readlink(self, path: str) -> str:
        """The target of a symbolic link, as written."""

    def stat(self, path: str) -> FileStat:
        """Facts of the file behind all links."""

    def realpath(self, path: str) -> str:
        """The path with every link resolved, still as seen from inside the tree."""


def resolve(path: str, readlink: Callable[[str], str | None]) -> str:
    """Resolve every link of ``path``; ``readlink`` gives None for what is no link.

    Raises OSError(ELOOP) after 40 links.
    """
    done = ""
    todo = [part for part in path.split("/") if part]
    links = 0
    while todo:
        part = todo.pop(0)
        if part == ".":
            continue
        if part == "..":
            done = posixpath.dirname(done) if done.strip("/") else ""
            done = "" if done == "/" else done
            continue
        target = readlink(f"{done}/{part}")
        if target is None:
            done = f"{done}/{part}"
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if target.startswith("/"):
            done = ""
        todo[:0] = [name for name in target.split("/") if name]
    return done or "/"


class DiskTree:
    """A directory on disk; ``/`` is the machine itself."""

    def __init__(self, root: str = "/") -> None:
        self.root = root.rstrip("/")

    def _at(self, path: str) -> str:
        if not self.root:
            return path
        return self.root + self.realpath(path)

    def realpath(self, path: str) -> str:
        """See Tree."""
        if not self.root:
            return os.path.realpath(path)
        return resolve(path, self._link)

    def _link(self, path: str) -> str | None:
        try:
            return os.readlink(self.root + path)
        except OSError:
            return None

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        """See Tree. Never blocks on a FIFO or a device that has nothing to say."""
        handle = os.open(self._at(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            parts: list[bytes] = []
            left = limit
            while left > 0 and (part := os.read(handle, min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        finally:
            os.close(handle)

    def listdir(self, path: str) -> list[str]:
        """See Tree."""
        return sorted(os.listdir(self._at(path)))

    def readlink(self, path: str) -> str:
        """See Tree."""
        if not self.root:
            return os.readlink(path)
        parent, name = posixpath.split(path)
        return os.readlink(posixpath.join(self._at(parent or "/"), name))

    def stat(self, path: str) -> FileStat:
        """See Tree."""
        found = os.stat(self._at(path))
        return FileStat(
            mode=found.st_mode,
            uid=found.st_uid,
            size=found.st_size,
            device=found.st_rdev,
            mtime_ns=found.st_mtime_ns,
        )


class Link(msgspec.Struct, frozen=True):
    """A symbolic link of a text tree."""

    target: str


class Refusal(msgspec.Struct, frozen=True):
    """A path of a text tree that answers with an error."""

    errno: int


Entry = bytes | Link | Refusal


class TextTree(msgspec.Struct):
    """A tree held in memory, from the text form (see ``agent.fstree``).

    ``epochs[0]`` is the tree; each later one holds only what has changed by the next reading, and
    ``epoch`` says which one is being read.
    """

    epochs: list[dict[str, Entry]] = msgspec.field(default_factory=lambda: [{}])
    epoch: int = 0
    _children: list[dict[str, set[str]]] = msgspec.field(default_factory=list)

    def _lookup(self, path: str) -> Entry | None:
        for entries in reversed(self.epochs[: self.epoch + 1]):
            if path in entries:
                return entries[path]
        return None

    def _names(self, path: str) -> set[str] | None:
        """The names under a directory, None when nothing has that prefix."""
        if len(self._children) != len(self.epochs):
            self._children = [_children(entries) for entries in self.epochs]
        found: set[str] | None = None
        for children in self._children[: self.epoch + 1]:
            if path in children:
                found = (found or set()) | children[path]
        return found

    def _link(self, path: str) -> str | None:
        entry = self._lookup(path)
        return entry.target if isinstance(entry, Link) else None

    def realpath(self, path: str) -> str:
        """See Tree."""
        return resolve(path, self._link)

    def read_bytes(self, path: str, limit: int = READ_LIMIT_BYTES) -> bytes:
        """See Tree."""
        at = self.realpath(path)
        entry = self._lookup(at)
        if isinstance(entry, bytes):
            return entry[:limit]
        if isinstance(entry, Refusal):
            raise OSError(entry.errno, os.strerror(entry.errno), path)
        code = errno.EISDIR if self._names(at) is not None else errno.ENOENT
        raise OSError(code, os.strerror(code), path)

    def listdir(self, path: str) -> list[str]:
        """See Tree."""
        at = self.realpath(path)
        entry = self._lookup(at)
        if isinstance(entry, Refusal):
            raise OSError(entry.errno, os.strerror(entry.errno), path)
        names = self._names(at)
        if names is None:
            code = errno.ENOENT if entry is None else errno.ENOTDIR
            raise OSError(code, os.strerror(code), path)
        return sorted(name for name in names if name)

    def readlink(self, path: str) -> str:
        """See Tree."""
        parent, name = posixpath.split(path)
        entry = self._lookup(posixpath.join(self.realpath(parent or "/"), name))
        if isinstance(entry, Link):
            return entry.target
        code = errno.ENOENT if entry is None else errno.EINVAL
        raise OSError(code, os.strerror(code), path)

    def stat(self, path: str) -> FileStat:
        """See Tree; a text tree knows only whether it is a file or a directory, and the size."""
        at = self.realpath(path)
        entry = self._lookup(at)
        if isinstance(entry, bytes):
            return FileStat(stat.S_IFREG | 0o444, 0, len(entry), 0, 0)
        if isinstance(entry, Refusal):
            raise OSError(entry.errno, os.strerror(entry.errno), path)
        if self._names(at) is not None:
            return FileStat(stat.S_IFDIR | 0o555, 0, 0, 0, 0)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _children(entries: dict[str, Entry]) -> dict[str, set[str]]:
    children: dict[str, set[str]] = {}
    for path, entry in entries.items():
        if isinstance(entry, Refusal) and entry.errno == errno.ENOENT:
            continue  # asked for and not there: nothing that a directory would list
        at = path
        while at not in ("/", ""):
            parent, name = posixpath.split(at)
            names = children.setdefault(parent, set())
            if name in names:
                break
            names.add(name)
            at = parent
    return children
