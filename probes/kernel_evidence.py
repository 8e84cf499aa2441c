"""Kernel log lines as evidence, and how long ago they were."""

from __future__ import annotations

from probes.finding import Evidence
from probes.snapshot.kernel import KernelEvent
from probes.view import Node

_GREP = {
    "xid": "Xid",
    "sxid": "SXid",
    "nvrm": "NVRM",
    "aer": "AER|PCIe Bus Error",
    "dpc": "DPC:",
    "pcie-link": "Link (Up|Down)|retrain|not present",
    "pcie-bandwidth": "available PCIe bandwidth",
    "hung-task": "blocked for more than",
    "lockup": "lockup",
    "rcu-stall": "rcu.*stall",
    "oom": "oom-kill|Killed process",
    "mce": "Hardware Error|EDAC|Memory failure",
    "segfault": "segfault|general protection",
    "nic": "mlx5_core",
    "nfs": "nfs: server",
}


def evidence(node: Node, event: KernelEvent) -> Evidence:
    """The line, verbatim, and how to see it again."""
    section = node.snapshot.kernel
    source = section.source if section else "kmsg"
    pattern = _GREP.get(event.kind, event.kind)
    if source.startswith("/"):
        recheck = f"grep -iE '{pattern}' {source}"
    elif source == "journal":
        recheck = f"journalctl -k -b | grep -iE '{pattern}'"
    else:
        recheck = f"dmesg -T | grep -iE '{pattern}'"
    if event.kind in ("xid", "nvrm", "aer", "pcie-bandwidth") and event.pci:
        recheck += f" | grep -i {event.pci.rpartition('.')[0]}"
    code = {"xid": f"Xid {event.code}", "sxid": f"SXid {event.code}"}.get(event.kind, event.kind)
    if event.what and event.kind != "nvrm":
        code = f"{code} {event.what}"
    return Evidence(
        source=source if not source.startswith("/") else "file",
        locator=f"{source} {event.locator}" if source.startswith("/") else event.locator,
        observed=code,
        unit=f"{event.count} times" if event.count > 1 else None,
        at_ns=event.at_ns,
        quote=event.line,
        recheck=recheck,
    )


def times(count: int, event: KernelEvent) -> str:
    """`` 3 times from 402111 s``: seconds since boot, as dmesg prints them."""
    often = f" {count} times" if count > 1 else ""
    if event.at_s is None:
        return often
    return f"{often} {'from' if count > 1 else 'at'} {event.at_s:.0f} s"


def age_s(node: Node, event: KernelEvent) -> float | None:
    """Seconds from the last of the folded lines to the snapshot; None when no clock tells."""
    uptime, taken = node.snapshot.uptime_s, node.snapshot.taken_at_ns
    if event.last_at_ns is not None:
        return (taken - event.last_at_ns) / 1e9
    if event.last_at_s is not None and uptime is not None:
        return uptime - event.last_at_s
    return None


def is_recent(node: Node, event: KernelEvent, limit_s: float) -> bool:
    """Whether the last of the lines is no older than the limit; unknown counts as recent."""
    age = age_s(node, event)
    return age is None or age <= limit_s


def events_of(node: Node, *kinds: str) -> list[KernelEvent]:
    """The events of some kinds, oldest first."""
    section = node.snapshot.kernel
    return [event for event in section.events if event.kind in kinds] if section else []
