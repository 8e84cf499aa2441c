"""/proc/PID/cgroup and limit files of control groups. Source: cgroups(7), cgroup-v2.rst."""

from __future__ import annotations

# memory.limit_in_bytes of a group without limit: PAGE_COUNTER_MAX, rounded down to a page
_V1_UNLIMITED = 1 << 62
_MOST_MICROSECONDS = 1 << 53


def parse_proc_cgroup(text: str) -> dict[str, str]:
    """The group's path by controller; ``""`` is the unified hierarchy (version 2).

    ::

        4:memory:/docker/4f1d
        1:cpu,cpuacct:/docker/4f1d
        0::/system.slice/cron.service
    """
    found: dict[str, str] = {}
    for line in text.split("\n"):
        parts = line.split(":", 2)
        if len(parts) == 3 and parts[2].startswith("/"):
            for controller in parts[1].split(","):
                found.setdefault(controller, parts[2])
    return found


def parse_cpu_max(text: str) -> float | None:
    """CPUs' worth of time from ``cpu.max``; None is no limit. Raises ValueError.

    ::

        400000 100000
    """
    quota, _, period = text.strip().partition(" ")
    if quota == "max":
        return None
    return quota_cpus(quota, period)


def quota_cpus(quota: str, period: str) -> float | None:
    """The same from version 1's two files; a quota of -1 is no limit. Raises ValueError."""
    microseconds, each = int(quota), int(period)
    if microseconds < 0:
        return None
    if each <= 0 or max(microseconds, each) > _MOST_MICROSECONDS:
        raise ValueError(f"cpu quota {quota[:40]!r} per {period[:40]!r}")
    return microseconds / each


def parse_memory_max(text: str) -> int | None:
    """Bytes from ``memory.max`` or ``memory.limit_in_bytes``; None is no limit. ValueError else.

    ::

        68719476736
    """
    if text.strip() == "max":
        return None
    limit = int(text)
    if limit < 0:
        raise ValueError(f"memory limit {limit}")
    return None if limit >= _V1_UNLIMITED else limit
