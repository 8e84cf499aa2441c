"""What the caller may use: resource limits, capabilities, control group."""

from __future__ import annotations

from collections.abc import Iterable

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.cgroup import parse_cpu_max, parse_memory_max, parse_proc_cgroup, quota_cpus
from agent.parse.keyvalue import parse_keyvalue
from agent.parse.limits import parse_limits
from probes.snapshot.host import CallerLimits, Cgroup, CgroupLevel, CgroupReading

_CAP_IPC_LOCK = 1 << 14  # linux/capability.h
_ROOT = "/sys/fs/cgroup"


def read_limits(host: Host, gaps: Gaps) -> CallerLimits | None:
    """The limits that laggard itself runs under."""
    try:
        limits = parse_limits(host.read_text("/proc/self/limits"))
    except OSError as error:
        gaps.add_error(error, "limits", path="/proc/self/limits")
        return None
    return CallerLimits(
        memlock_bytes=limits.get("Max locked memory"),
        nofile=limits.get("Max open files"),
        can_exceed_memlock=_has_ipc_lock(host),
    )


def _has_ipc_lock(host: Host) -> bool | None:
    try:
        lines = host.read_text("/proc/self/status").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("CapEff:"):
            try:
                return bool(int(line.split()[1], 16) & _CAP_IPC_LOCK)
            except (IndexError, ValueError):
                return None
    return None


def read_cgroup(host: Host, gaps: Gaps) -> Cgroup | None:
    """The caller's group with every visible ancestor that has a CPU quota or a memory limit.

    Version 1 keeps CPU and memory in trees of their own; a path that is not there (a container
    sees the host's path and its own mount) is read at the mount itself.
    """
    try:
        paths = parse_proc_cgroup(host.read_text("/proc/self/cgroup"))
    except OSError as error:
        gaps.add_error(error, "cgroup", path="/proc/self/cgroup")
        return None
    if not paths:
        return None
    version = 2 if host.exists(f"{_ROOT}/cgroup.controllers") else 1
    if version == 2:
        own = paths.get("", "/")
        directories = _upwards(host, _ROOT, own)
        levels = [_level_v2(host, directory) for directory in directories]
        cpuset = _first(host, (f"{directory}/cpuset.cpus.effective" for directory in directories))
    else:
        own = paths.get("memory") or paths.get("cpu") or "/"
        levels = [
            *(_cpu_level_v1(host, at) for at in _upwards(host, f"{_ROOT}/cpu", paths.get("cpu"))),
            *(
                _memory_level_v1(host, at)
                for at in _upwards(host, f"{_ROOT}/memory", paths.get("memory"))
            ),
        ]
        cpuset = _first(
            host,
            (
                f"{at}/{name}"
                for at in _upwards(host, f"{_ROOT}/cpuset", paths.get("cpuset"))
                for name in ("cpuset.effective_cpus", "cpuset.cpus")
            ),
        )
    return Cgroup(
        version=version,
        cgroup_path=own,
        levels=tuple(
            level
            for level in levels
            if level.cpu_quota is not None or level.memory_max_bytes is not None
        ),
        cpuset=cpuset,
    )


def _upwards(host: Host, root: str, path: str | None) -> list[str]:
    """The group's directory and its ancestors up to the mount, those that can be seen."""
    if path is None:
        return []
    parts = [part for part in path.split("/") if part and part != ".."]
    candidates = [f"{root}/{'/'.join(parts[:n])}" for n in range(len(parts), 0, -1)] + [root]
    return [directory for directory in candidates if host.exists(directory)]


def _read(host: Host, path: str) -> str | None:
    try:
        return host.read_text(path)
    except OSError:
        return None


def _first(host: Host, paths: Iterable[str]) -> str | None:
    for path in paths:
        if text := _read(host, path):
            return text.strip()
    return None


def _cpus(quota: str | None, period: str | None) -> float | None:
    if quota is None:
        return None
    try:
        return parse_cpu_max(quota) if period is None else quota_cpus(quota, period)
    except ValueError:
        return None


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_memory_max(text)
    except ValueError:
        return None


def _level_v2(host: Host, at: str) -> CgroupLevel:
    return CgroupLevel(
        cgroup_path=at,
        cpu_quota=_cpus(_read(host, f"{at}/cpu.max"), None),
        memory_max_bytes=_bytes(_read(host, f"{at}/memory.max")),
    )


def _cpu_level_v1(host: Host, at: str) -> CgroupLevel:
    quota, period = (_read(host, f"{at}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return CgroupLevel(cgroup_path=at, cpu_quota=_cpus(quota, period) if period else None)


def _memory_level_v1(host: Host, at: str) -> CgroupLevel:
    return CgroupLevel(
        cgroup_path=at, memory_max_bytes=_bytes(_read(host, f"{at}/memory.limit_in_bytes"))
    )


def read_cgroup_counters(
    host: Host, cgroup: Cgroup | None, gaps: Gaps
) -> tuple[CgroupReading, ...]:
    """The counters of every level that limits something."""
    found = []
    for level in cgroup.levels if cgroup else ():
        cpu: dict[str, int] = {}
        memory: dict[str, int] = {}
        events: dict[str, int] = {}
        current: str | None = None
        try:
            if level.cpu_quota is not None:
                cpu = parse_keyvalue(host.read_text(f"{level.cgroup_path}/cpu.stat"))
            if level.memory_max_bytes is not None:
                usage = (
                    "memory.current" if cgroup and cgroup.version == 2 else "memory.usage_in_bytes"
                )
                current = host.read_text(f"{level.cgroup_path}/{usage}")
                memory = parse_keyvalue(host.read_text(f"{level.cgroup_path}/memory.stat"))
                events = parse_keyvalue(
                    _read(host, f"{level.cgroup_path}/memory.events")
                    or _read(host, f"{level.cgroup_path}/memory.oom_control")
                    or ""
                )
        except OSError as error:
            gaps.add_error(error, "cgroups", device=level.cgroup_path)
        throttled_ns = cpu.get("throttled_time")  # version 1
        found.append(
            CgroupReading(
                cgroup_path=level.cgroup_path,
                periods=cpu.get("nr_periods"),
                throttled_periods=cpu.get("nr_throttled"),
                throttled_us=cpu.get("throttled_usec")
                if throttled_ns is None
                else throttled_ns // 1000,
                memory_current_bytes=_bytes(current),
                memory_inactive_file_bytes=memory.get(
                    "total_inactive_file", memory.get("inactive_file")
                ),
                oom_kills=events.get("oom_kill"),
            )
        )
    return tuple(found)
