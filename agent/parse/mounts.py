"""/proc/PID/mounts. Source: proc(5), fstab(5) (octal escapes)."""

from __future__ import annotations

import re

import msgspec

_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    """One mounted file system."""

    path: str
    type: str
    options: str


def parse_mounts(text: str) -> tuple[Mount, ...]:
    r"""Every mount in order; of two on one path the later one is seen.

    ::

        tmpfs /dev/shm tmpfs rw,nosuid,nodev,size=65536k 0 0
        /dev/sda1 /data\040one ext4 rw,relatime 0 0
    """
    found = []
    for line in text.split("\n"):
        fields = line.split(" ")
        if len(fields) >= 4 and fields[1].startswith("/"):
            path = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[1])
            found.append(Mount(path, fields[2], fields[3]))
    return tuple(found)
