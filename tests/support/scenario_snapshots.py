"""What the real NVML collector reads of scenarios of the double, several at a time.

A worker process puts the scenario into its environment, so that the collector's own child finds
the double where a driver's library would be, and hands back the snapshot.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.collect.nvml import NvmlCollector
from agent.host import LiveHost
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from tests.support.nvml_double import Double

WORKERS = 4
SAMPLE_S = 0.2
# A GPU that hangs costs one call deadline; one that is slow may use half of it, and the slowest
# answer of a scenario takes 1.2 s.
CALL_DEADLINE_S = 3.0
DEADLINE_S = 8.0


@dataclass(frozen=True)
class Collected:
    """One scenario as it was read, and how long that took."""

    snapshot: NodeSnapshot
    seconds: float


def collect(environ: dict[str, str]) -> tuple[bytes, float]:
    """Read twice, as ``laggard check`` does; the snapshot holds the NVML section only."""
    os.environ.update(environ)
    began = time.monotonic()
    host = LiveHost()
    until_ns = host.monotonic_ns() + int(DEADLINE_S * 1e9)
    with NvmlCollector(host, until_ns=until_ns, call_deadline_s=CALL_DEADLINE_S) as collector:
        section, gaps = collector.first()
        if section is not None and section.gpus:
            time.sleep(SAMPLE_S)
            section, more = collector.second(section)
            gaps += more
    seconds = time.monotonic() - began
    snapshot = NodeSnapshot(
        schema=SNAPSHOT_SCHEMA,
        tool_version="test",
        host="node-a",
        taken_at_ns=1_760_000_000_000_000_000,
        sample_s=SAMPLE_S,
        nvml=section,
        gaps=gaps,
    )
    return msgspec.json.encode(snapshot), seconds


class Collections:
    """Snapshots of scenarios, by name: the ones named are begun at once, others when asked for."""

    def __init__(self, double: Double, scenarios: Iterable[str], log: Path | None = None) -> None:
        self._double = double
        self._log = log
        self._pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))
        self._begun: dict[str, Future[tuple[bytes, float]]] = {}
        for name in scenarios:
            self._begin(name)

    def _begin(self, scenario: str) -> None:
        environ = self._double.environ(scenario, self._log)
        self._begun[scenario] = self._pool.submit(collect, environ)

    def __getitem__(self, scenario: str) -> Collected:
        if scenario not in self._begun:
            self._begin(scenario)
        encoded, seconds = self._begun[scenario].result(timeout=60)
        return Collected(msgspec.json.decode(encoded, type=NodeSnapshot), seconds)

    def close(self) -> None:
        """Forget what nobody waited for."""
        self._pool.shutdown(cancel_futures=True)
