"""The command that says whether a node is fit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from agent.cli import options
from agent.exitcode import EXIT_CODES, exit_code
from agent.report import FORMATS

if TYPE_CHECKING:
    from agent.change import Change
    from agent.config import Config
    from agent.lock import Holder
    from agent.state import State
    from probes.result import Report
    from probes.snapshot.node import NodeSnapshot

_LAST_RESORT_S = 5.0  # past the deadline


@click.command()
@options.sample
@options.deadline
@options.root
@click.option(
    "--from",
    "source",
    metavar="FILE",
    allow_from_autoenv=False,
    help="Judge a recorded snapshot instead of this node; - is standard input.",
)
@click.option(
    "--manifest",
    metavar="FILE",
    help="What this node is meant to have (default: /etc/laggard/manifest.toml if any).",
)
@click.option(
    "--only",
    multiple=True,
    type=options.FindingId(),
    metavar="ID",
    help="Judge by these rules; globs work.",
)
@click.option(
    "--skip",
    multiple=True,
    type=options.FindingId(),
    metavar="ID",
    help="Leave these rules out; globs work.",
)
@click.option(
    "--require",
    multiple=True,
    type=options.FindingId(),
    metavar="ID",
    help="When this rule can't judge, whatever the reason, the health is unknown.",
)
@click.option(
    "--accept-unknown",
    multiple=True,
    type=options.FindingId(),
    metavar="ID",
    help="When this rule can't judge, the health is left alone.",
)
@click.option("--format", type=click.Choice(list(FORMATS)), default="text", show_default=True)
@click.option("--output", metavar="FILE", help="Write the report there, whole or not at all.")
@click.option(
    "--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True
)
@click.option("-v", "--verbose", count=True, help="Show every note, and what is not supported.")
@click.option("--quiet", is_flag=True, help="Say nothing unless it is worse than ok.")
@click.option(
    "--on-change",
    is_flag=True,
    help="Say only what is new and what has cleared since the last run. Formats other "
    "than text are printed whole, or not at all.",
)
@click.option(
    "--exit-codes",
    type=click.Choice(list(EXIT_CODES)),
    default="nagios",
    show_default=True,
    help="For ok, warning, critical, unknown: nagios 0 1 2 3, npd 0 0 1 2, zero 0 0 0 0.",
)
@click.option(
    "--splay",
    type=options.Seconds(0, 86400),
    default=0.0,
    metavar="SECONDS",
    help="Wait a random part of this time first, so that a fleet does not start at once.",
)
@click.option(
    "--no-state",
    is_flag=True,
    help="Use and keep nothing between runs: own baseline, known faults, lock.",
)
@options.config
def check(config: Config, splay: float, **given: Any) -> int:  # fmt: skip
    """Is this node fit? Reads it twice, judges, and says so with proof.

    Exit code 0 ok, 1 warning, 2 critical, 3 can't tell, wrong usage or a crash. A run that finds
    another one at work says whose it is and ends with 0, or 3 when that one is long overdue.
    """
    began = time.monotonic()
    for problem in config.problems:
        _warn(problem)
    run = _Check(config, given)
    spent_s = time.monotonic() - began
    if splay:
        time.sleep(splay * int.from_bytes(os.urandom(4), "big") / (1 << 32))
    return run.recorded() if given["source"] else run.live(spent_s)


class _Check:
    """One call of the command: everything that can be wrong with it is said before it reads."""

    def __init__(self, config: Config, given: dict[str, Any]) -> None:
        from agent.errors import LaggardError
        from agent.manifest import read_manifest, site_manifest
        from agent.selection import policy_of, select
        from probes.registry import discover

        self.given = given
        if given["on_change"] and (given["source"] or given["no_state"]):
            raise LaggardError(
                "--on-change compares with this node's last run", "leave out --from and --no-state"
            )
        probes = discover()
        self.probes, self.not_selected = select(probes, given["only"], given["skip"])
        self.policy = policy_of(config, probes, given["require"], given["accept_unknown"])
        self.manifest = read_manifest(given["manifest"]) if given["manifest"] else None
        if self.manifest is None and not given["source"]:
            self.manifest = site_manifest()

    def recorded(self) -> int:
        """Judge a file: what was compared with when it was recorded stands in it."""
        from agent.snapshot_file import read_snapshot
        from agent.state import State

        report = self._judge(read_snapshot(self.given["source"]), State(None))
        return self._say(report, None)

    def live(self, spent_s: float) -> int:
        """Read this node, judge, keep what the next run needs, say."""
        from agent.baseline import keep_baseline, with_baseline
        from agent.change import change_since, keep_last_run, read_last_run
        from agent.host import LiveHost
        from agent.lock import LockedError
        from agent.run import RunOptions, collect_node
        from agent.state import State, state_directory
        from probes.finding import Severity

        deadline_s = self.given["deadline"]
        options = RunOptions(sample_s=self.given["sample"], deadline_s=deadline_s, spent_s=spent_s)
        state = State(None if self.given["no_state"] else state_directory())
        change: Change | None = None
        try:
            with _last_resort(deadline_s + _LAST_RESORT_S), _locked(state, deadline_s):
                snapshot = collect_node(LiveHost(self.given["root"]), options)
                report = self._judge(with_baseline(snapshot, state), state)
                keep_baseline(snapshot, state)
                if self.given["on_change"]:
                    least = Severity.WARNING if self.given["quiet"] else Severity.INFO
                    change = change_since(read_last_run(state), report, least)
                    keep_last_run(state, change.kept)
        except LockedError as locked:
            return self._stand_back(locked.holder)
        for problem in state.problems:
            _warn(problem)
        return self._say(report, change)

    def _judge(self, snapshot: NodeSnapshot, state: State) -> Report:
        import msgspec

        from agent.ack import read_acks
        from agent.build_report import build_report
        from agent.evaluate import evaluate

        if self.manifest is not None:
            snapshot = msgspec.structs.replace(snapshot, manifest=self.manifest)
        evaluation = evaluate(snapshot, self.probes, self.policy, self.not_selected)
        verbose = bool(self.given["verbose"])
        return build_report(snapshot, evaluation, acks=read_acks(state), verbose=verbose)

    def _say(self, report: Report, change: Change | None) -> int:
        from agent.change import change_lines
        from agent.report import RenderOptions, render
        from agent.report.terminal import options_for
        from agent.snapshot_file import write_output
        from probes.result import Health

        format, verbose = self.given["format"], self.given["verbose"]
        if change is not None and not change.anything:
            text = ""
        elif change is not None and format == "text":
            text = "".join(line + "\n" for line in change_lines(change, report.host))
        elif self.given["output"]:
            text = render(report, format, RenderOptions(verbose=verbose))
        else:
            shown = options_for(sys.stdout, color=self.given["color"], verbose=verbose)
            text = render(report, format, shown)
        if self.given["output"]:
            if text:
                write_output(self.given["output"], text.encode())
        elif not (self.given["quiet"] and report.health is Health.OK and change is None):
            if format in ("json", "prometheus"):  # read by programs, as UTF-8 in any locale
                write_output("-", text.encode())
            else:
                sys.stdout.write(text)
        return exit_code(report.health, self.given["exit_codes"])

    def _stand_back(self, holder: Holder | None) -> int:
        """Another run is at work: say so where the caller looks for it."""
        from agent.report.words import cut, one_line
        from probes.result import Health

        health = Health.UNKNOWN if holder is not None and holder.is_overdue() else Health.OK
        if self.given["quiet"] and health is Health.OK:
            return exit_code(health, self.given["exit_codes"])
        short = self.given["format"] == "line"
        who = (holder.brief() if short else holder.describe()) if holder else "it has no name yet"
        said = f"another run is at work: {who}"
        if health is Health.UNKNOWN and not short:
            said += "; it should have ended long ago"
        if self.given["format"] == "nagios":
            click.echo(one_line(f"LAGGARD {health.value.upper()} - {said}").replace("|", "/"))
        elif short:
            click.echo(cut(one_line(f"{health.value} {said}"), 80))
        else:
            _warn(said)
        return exit_code(health, self.given["exit_codes"])


@contextlib.contextmanager
def _locked(state: State, deadline_s: float) -> Iterator[None]:
    """Hold the lock; without a state directory that can be written there is none."""
    from agent.lock import one_at_a_time

    with contextlib.ExitStack() as stack:
        if state.directory is not None:
            try:
                stack.enter_context(one_at_a_time(state.directory, deadline_s))
            except OSError as error:
                state.forget(f"{error.filename}: {error.strerror}")
        yield


@contextlib.contextmanager
def _last_resort(seconds: float) -> Iterator[None]:
    """Let the kernel end this process if its own files hang (a state directory on a dead mount).

    The default action of SIGALRM also ends a read that waits for a file server; no code of ours
    would run there.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _warn(text: str) -> None:
    click.echo(f"laggard: {text}", err=True)
