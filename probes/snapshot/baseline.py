"""Last counters of this node, kept between runs, so that cron sees differences."""

from probes.record import Record


class CounterSet(Record, frozen=True, kw_only=True):
    """Cumulative counters of one component as the last run saw them.

    ``kind`` is gpu, pci, port or kernel; ``key`` the GPU's UUID, the PCI address, ``device/port``.
    """

    kind: str
    key: str
    counters: dict[str, int]


class Baseline(Record, frozen=True, kw_only=True):
    """Valid only for the same boot and driver; ``at_ns`` is Unix time."""

    at_ns: int
    boot_id: str
    driver_version: str | None = None
    sets: tuple[CounterSet, ...] = ()
