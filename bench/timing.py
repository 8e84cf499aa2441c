"""Whole-process figures of a command: CPU of all its processes, wall time, the largest process.

Only the kernel's own accounting of ended and reaped children is used (getrusage, RUSAGE_CHILDREN),
measured from a fresh process each time, so that one run never sees another's peak.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

_CHILD = """
import json, os, resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
wall = time.perf_counter() - start
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1024]))
"""


@dataclass(frozen=True)
class Figures:
    """Medians over the runs."""

    code: int
    cpu_s: float
    wall_s: float
    largest_mib: float


def once(argv: list[str], env: dict[str, str] | None = None) -> Figures:
    """One run."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD, *argv],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    return Figures(*json.loads(done.stdout.splitlines()[-1]))


def in_turn(
    commands: dict[str, list[str]], *, runs: int, env: dict[str, str] | None = None
) -> dict[str, Figures]:
    """Run the commands A B C A B C …, one round first that does not count."""
    samples: dict[str, list[Figures]] = {name: [] for name in commands}  # the counted runs
    for round_number in range(runs + 1):
        for name, argv in commands.items():
            figures = once(argv, env)
            if round_number:
                samples[name].append(figures)
            if samples[name] and figures.code != samples[name][0].code:
                raise SystemExit(f"{name} ended with {figures.code} this time: not comparable")
    return {
        name: Figures(
            taken[0].code,
            statistics.median(f.cpu_s for f in taken),
            statistics.median(f.wall_s for f in taken),
            max(f.largest_mib for f in taken),
        )
        for name, taken in samples.items()
    }


def table(figures: dict[str, Figures], base: str) -> str:
    """A row a command, CPU as a ratio to ``base``."""
    rows = [f"{'command':<28} {'exit':>4} {'CPU ms':>8} {'ratio':>6} {'wall ms':>8} {'MiB':>6}"]
    for name, f in figures.items():
        ratio = f.cpu_s / figures[base].cpu_s
        rows.append(
            f"{name:<28} {f.code:>4} {f.cpu_s * 1e3:>8.1f} {ratio:>6.2f} {f.wall_s * 1e3:>8.1f} "
            f"{f.largest_mib:>6.1f}"
        )
    return "\n".join(rows)
