"""Kernel log lines of this boot that bear on GPUs, links, memory and hung tasks."""

from __future__ import annotations

from probes.record import Record


class KernelEvent(Record, frozen=True, kw_only=True):
    """A line, or several equal ones folded (``count``).

    ``kind`` is one of: xid, sxid, nvrm, aer, pcie-link, pcie-bandwidth, hung-task, lockup,
    rcu-stall, oom, mce, segfault, driver-load, gpu-reset.
    """

    kind: str
    line: str  # verbatim, escapes stripped, at most 300 characters
    locator: str  # kmsg sequence number, journal cursor, or file:line
    at_s: float | None = None  # seconds since boot, of the first
    last_at_s: float | None = None
    at_ns: int | None = None  # wall clock of the first, where the source has one
    count: int = 1
    pci: str | None = None
    code: int | None = None  # Xid or SXid number
    pid: int | None = None
    process: str | None = None


class KernelSection(Record, frozen=True, kw_only=True):
    """The events of this boot, oldest first."""

    source: str  # kmsg | journal | the file's path
    first_at_s: float | None = None  # the oldest line still there: later than 0 means a wrapped log
    lines_read: int = 0
    events: tuple[KernelEvent, ...] = ()
    dropped_events: int = 0
