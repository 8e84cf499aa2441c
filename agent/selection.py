"""Which rules judge, and what the operator decided about them."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable

from agent.config import Config, check_ids, nearest
from agent.errors import LaggardError
from agent.evaluate import Policy
from probes.registry import Probe


def expand(patterns: Iterable[str], ids: Collection[str], option: str) -> frozenset[str]:
    """The ids that globs stand for. Raises LaggardError for one that stands for none."""
    found: set[str] = set()
    for pattern in patterns:
        matching = fnmatch.filter(ids, pattern)
        if not matching:
            raise LaggardError(
                f"{option} {pattern}: there is no finding called so",
                nearest(pattern, ids) or "`laggard explain` lists all ids",
            )
        found.update(matching)
    return frozenset(found)


def select(
    probes: tuple[Probe, ...], only: Iterable[str], skip: Iterable[str]
) -> tuple[tuple[Probe, ...], tuple[str, ...]]:
    """The rules to run, and the ids of the others."""
    ids = [probe.id for probe in probes]
    chosen = expand(only, ids, "--only") or frozenset(ids)
    chosen -= expand(skip, ids, "--skip")
    return (
        tuple(probe for probe in probes if probe.id in chosen),
        tuple(id for id in ids if id not in chosen),
    )


def policy_of(
    config: Config, probes: tuple[Probe, ...], require: Iterable[str], accept: Iterable[str]
) -> Policy:
    """Severities and thresholds of the configuration, and which missing readings count."""
    by_id = {probe.id: probe for probe in probes}
    check_ids(config, by_id)
    return Policy(
        limits={
            id: {name: setting.value for name, setting in limits.items()}
            for id, limits in config.limits.items()
        },
        severities={id: setting.value for id, setting in config.severities.items()},
        require=expand(require, by_id, "--require"),
        accept_unknown=expand(accept, by_id, "--accept-unknown"),
    )
