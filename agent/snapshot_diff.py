"""What changed between two snapshots of a node, and what got worse. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from probes.snapshot.node import NodeSnapshot

# What identifies a member of each list; without one, members are compared by position.
_KEYS: dict[str, tuple[str, ...]] = {
    "gpus": ("uuid", "pci", "index"),
    "devices": ("address",),
    "ports": ("device", "port"),
    "nvlinks": ("link",),
    "mig_instances": ("uuid",),
}

# Readings that move on a healthy node say nothing by having moved.
_VOLATILE = frozenset(
    {
        "at_ns",
        "taken_at_ns",
        "uptime_s",
        "schema",
        "tool_version",
        "sample_s",
        "gaps",
        "baseline",
        "manifest",
        "processes",
        "kernel",
        "slow_calls",
        "init_ms",
        "pstate",
        "sm_clock_mhz",
        "mem_clock_mhz",
        "graphics_clock_mhz",
        "clocks_event_reasons",
        "power_mw",
        "total_energy_mj",
        "temperature_c",
        "memory_temperature_c",
        "margin_temperature_c",
        "fan_speed_percent",
        "utilization_gpu_percent",
        "utilization_memory_percent",
        "memory_used_bytes",
        "pcie_tx_bytes",
        "pcie_rx_bytes",
        "nvlink_tx_kib",
        "nvlink_rx_kib",
        "host_facts",
    }
)

_LOWER_IS_WORSE = (
    "width_lanes",
    "speed_gts",
    "generation",
    "rate_gbps",
    "speed_mbps",
    "enforced_mw",
    "power_limit_mw",
    "banks_max",
    "banks_high",
    "device_count",
    "memory_total_bytes",
)
_HIGHER_IS_WORSE = (
    "error",
    "ecc_",
    "aer_",
    "replay",
    "recovery",
    "_rows",
    "banks_none",
    "banks_low",
    "violation_",
    "reason_",
    "crc",
    "link_downed",
    "double_bit",
    "discards",
)
_TRUE_IS_WORSE = ("pending", "failure_occurred", "threshold_exceeded", "config_all_ones")


class Change(msgspec.Struct, frozen=True):
    """One fact that differs; ``worse`` is None when neither value is better by itself."""

    path: str
    before: object
    after: object
    worse: bool | None


def diff_snapshots(before: NodeSnapshot, after: NodeSnapshot) -> tuple[Change, ...]:
    """Facts that differ, worse ones first. Counters count as changed only within one boot."""
    same_boot = before.boot_id is not None and before.boot_id == after.boot_id
    old = dict(_flatten(_view(before), ""))
    new = dict(_flatten(_view(after), ""))
    changes = []
    for path in sorted(old.keys() | new.keys()):
        one, two = old.get(path), new.get(path)
        if one == two:
            continue
        worse = _worse(path, one, two)
        if not same_boot and _is_counter(path):
            continue
        changes.append(Change(path, one, two, worse))
    return tuple(sorted(changes, key=lambda change: (change.worse is not True, change.path)))


def _view(snapshot: NodeSnapshot) -> Any:
    """The snapshot as plain data, each device with its last reading only."""
    return msgspec.to_builtins(snapshot)


def _flatten(value: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in _VOLATILE:
                continue
            if key == "readings":
                if item:
                    yield from _flatten(item[-1], path)
                continue
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        name = path.rpartition(".")[2]
        for position, item in enumerate(value):
            yield from _flatten(item, f"{path}[{_identity(name, item, position)}]")
    else:
        yield path, value


def _identity(name: str, item: Any, position: int) -> str:
    if isinstance(item, dict) and name in _KEYS:
        keys = _KEYS[name]
        if name == "ports":
            return "/".join(str(item[key]) for key in keys if key in item)
        for key in keys:
            if key in item:
                return str(item[key])
    return str(position)


def _is_counter(path: str) -> bool:
    leaf = path.rpartition(".")[2]
    return path.startswith(("nvml", "pci", "nics")) and (
        "counters." in path
        or "aer_" in path
        or "nvlink_errors" in path
        or leaf.startswith(("violation_", "reason_", "ecc_volatile"))
        or leaf.endswith("_count")
    )


def _worse(path: str, before: object, after: object) -> bool | None:
    leaf = path.rpartition(".")[2]
    if leaf in _TRUE_IS_WORSE:
        return bool(after) and not before
    if leaf == "state":
        return None if before in (None, after) else True if before in _GOOD_STATES else None
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return True if after is None and leaf in ("uuid", "address", "device") else None
    if any(word in leaf for word in _LOWER_IS_WORSE):
        return after < before
    if any(word in path for word in _HIGHER_IS_WORSE):
        return after > before
    return None


_GOOD_STATES = ("ok", "ACTIVE", "up", 1)
