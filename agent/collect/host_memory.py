"""Memory, swap, pressure, load, and the local file systems a stall can come from."""

from __future__ import annotations

import errno

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.keyvalue import parse_keyvalue
from agent.parse.loadavg import parse_loadavg
from agent.parse.mounts import Mount, parse_mounts
from agent.parse.psi import parse_psi
from probes.gap import GapReason
from probes.snapshot.host import FileSystem, Pressure

SHM = "/dev/shm"  # noqa: S108 - looked at, not used
# statvfs on these never leaves the machine; a dead NFS or FUSE mount would hang the caller
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs", "f2fs"})
_WRITTEN_TO = ("/", "/tmp", "/var", "/var/log", "/var/tmp")  # noqa: S108 - looked at, not used

_PSI_ALLOW = "boot with psi=1 (CONFIG_PSI_DEFAULT_DISABLED kernels, as RHEL 8 and 9)"


def read_meminfo(host: Host, gaps: Gaps) -> dict[str, int]:
    """Bytes by /proc/meminfo's names."""
    try:
        return parse_keyvalue(host.read_text("/proc/meminfo"))
    except OSError as error:
        gaps.add_error(
            error,
            "memory_total_bytes",
            "memory_available_bytes",
            "swap_total_bytes",
            "swap_free_bytes",
            path="/proc/meminfo",
        )
        return {}


def read_vmstat(host: Host, gaps: Gaps) -> dict[str, int]:
    """Counters by /proc/vmstat's names."""
    try:
        return parse_keyvalue(host.read_text("/proc/vmstat"))
    except OSError as error:
        gaps.add_error(error, "pages_swapped_in", "pages_swapped_out", path="/proc/vmstat")
        return {}


def read_pressure(host: Host, resource: str, gaps: Gaps) -> Pressure | None:
    """One of cpu, memory, io; None with a gap when the kernel keeps no pressure."""
    path = f"/proc/pressure/{resource}"
    try:
        return parse_psi(host.read_text(path))
    except (OSError, ValueError) as error:
        off = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EOPNOTSUPP)
        gaps.add_error(error, f"{resource}_pressure", path=path, allow=_PSI_ALLOW if off else None)
        return None


def read_load(host: Host, gaps: Gaps) -> tuple[float, float] | tuple[None, None]:
    """Load over one and five minutes."""
    try:
        return parse_loadavg(host.read_text("/proc/loadavg"))
    except (OSError, ValueError) as error:
        gaps.add_error(error, "load_1m", "load_5m", path="/proc/loadavg")
        return None, None


def read_file_systems(host: Host, gaps: Gaps) -> tuple[FileSystem | None, tuple[FileSystem, ...]]:
    """Shared memory, and the local file systems that logs and checkpoints are written to."""
    try:
        mounts = {mount.path: mount for mount in parse_mounts(host.read_text("/proc/self/mounts"))}
    except OSError as error:
        gaps.add_error(error, "type", "options", path="/proc/self/mounts")
        mounts = {}
    shm = None
    if host.exists(SHM):
        shm = _file_system(host, SHM, mounts.get(SHM), gaps, "shared_memory")
    else:
        gaps.add(GapReason.ABSENT, "shared_memory", detail=f"{SHM} does not exist")
    others = (
        _file_system(host, path, mounts[path], gaps, "file_systems")
        for path in _WRITTEN_TO
        if path in mounts and mounts[path].type in _LOCAL
    )
    return shm, tuple(found for found in others if found)


def _file_system(
    host: Host, path: str, mount: Mount | None, gaps: Gaps, field: str
) -> FileSystem | None:
    try:
        size, free = host.disk_bytes(path)
    except (OSError, ValueError) as error:
        gaps.add_error(error, field, path=f"statvfs {path}", device=path)
        return None
    return FileSystem(
        path=path,
        type=mount.type if mount else None,
        options=mount.options if mount else None,
        size_bytes=size,
        free_bytes=free,
    )
