"""Snapshots on disk: writing, reading, and the errors a person sees when one can't be read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING

import msgspec

from agent.errors import LaggardError
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

_LIMIT_BYTES = 256 << 20
_SCHEMA = re.compile(r"laggard\.snapshot/(\d+)(?:\.\d+)?\Z")


class _Head(msgspec.Struct):
    schema: str


def encode_snapshot(snapshot: NodeSnapshot) -> bytes:
    """Indented JSON with sorted keys, ending in a newline."""
    data = msgspec.json.Encoder(order="sorted").encode(snapshot)
    return msgspec.json.format(data, indent=1) + b"\n"


def snapshot_digest(snapshot: NodeSnapshot) -> str:
    """sha256 over the canonical form: equal for a live run and the replay of its file."""
    data = msgspec.json.Encoder(order="sorted").encode(snapshot)
    return "sha256:" + hashlib.sha256(data).hexdigest()


def decode_snapshot(data: bytes, name: str) -> NodeSnapshot:
    """Read a snapshot of this major version; fields of a newer minor version are ignored.

    Raises LaggardError with the JSON path of what is wrong.
    """
    if data[:2] == b"\x1f\x8b":
        data = _gunzip(data, name)
    expected = (
        f"expected JSON with schema {SNAPSHOT_SCHEMA}, as `laggard snapshot record` writes it"
    )
    if not data.strip():
        raise LaggardError(f"{name} is empty", expected)
    if data[:1] in b"/#@":
        expected += "; what it writes with --raw is for a parser's test, record without"
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LaggardError(
            f"{name} is no snapshot: {error}",
            expected,
        ) from None
    match = _SCHEMA.match(head.schema)
    if not match or f"laggard.snapshot/{match[1]}" != SNAPSHOT_SCHEMA:
        raise LaggardError(
            f"{name} has schema {head.schema!r}; this laggard reads {SNAPSHOT_SCHEMA}",
            "use the laggard version that wrote it, or record it again",
        )
    try:
        return msgspec.json.decode(data, type=NodeSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LaggardError(
            f"{name} is a malformed snapshot: {error}",
            "the path behind `$` names the field; correct it or record the snapshot again",
        ) from None


def _gunzip(data: bytes, name: str) -> bytes:
    import zlib

    try:
        unpacker = zlib.decompressobj(wbits=31)
        out = unpacker.decompress(data, _LIMIT_BYTES)
        if unpacker.unconsumed_tail:
            raise LaggardError(f"{name} unpacks to more than {_LIMIT_BYTES >> 20} MiB")
        if not unpacker.eof:
            raise LaggardError(f"{name} is cut short: the gzip stream does not end")
    except zlib.error as error:
        raise LaggardError(f"{name} can't be unpacked: {error}") from None
    return out


def read_snapshot(path: str) -> NodeSnapshot:
    """Read a snapshot file, ``-`` for standard input."""
    return decode_snapshot(read_input(path), path)


def read_input(path: str) -> bytes:
    """The bytes of a file or of standard input, bounded."""
    if path == "-":
        import sys

        data = sys.stdin.buffer.read(_LIMIT_BYTES + 1)
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(_LIMIT_BYTES + 1)
        except OSError as error:
            raise LaggardError(f"reading {path}: {error.strerror}") from None
    if len(data) > _LIMIT_BYTES:
        raise LaggardError(f"{path} is larger than {_LIMIT_BYTES >> 20} MiB")
    return data


def write_output(path: str, data: bytes) -> None:
    """Write a file whole or not at all (temporary file, then rename); ``-`` is stdout."""
    if path == "-":
        import sys

        sys.stdout.buffer.write(data)
        return
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout, a FIFO: no renaming
        _refuse(lambda: _write(path, data), path)
        return
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")

    def write() -> None:
        try:
            _write(temporary, data)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(temporary)

    _refuse(write, path)


def compress(data: bytes) -> bytes:
    """Gzip without a time stamp, so that equal snapshots give equal files."""
    import gzip

    return gzip.compress(data, mtime=0)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _refuse(write: Callable[[], object], path: str) -> None:
    try:
        write()
    except OSError as error:
        raise LaggardError(f"writing {path}: {error.strerror}") from None
