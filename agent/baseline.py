"""The own baseline's file: last counters of this node, so that a run from cron sees differences."""

from __future__ import annotations

import msgspec

from agent.state import State
from probes.node_baseline import baseline_of, usable
from probes.snapshot.baseline import Baseline
from probes.snapshot.node import NodeSnapshot

FILE = "baseline.json"


def with_baseline(snapshot: NodeSnapshot, state: State) -> NodeSnapshot:
    """The snapshot with what of the last run it may be compared with."""
    last = usable(state.read(FILE, Baseline), snapshot)
    return snapshot if last is None else msgspec.structs.replace(snapshot, baseline=last)


def keep_baseline(snapshot: NodeSnapshot, state: State) -> None:
    """Keep this run's counters for the next one."""
    if (baseline := baseline_of(snapshot)) is not None:
        state.write(FILE, baseline)
