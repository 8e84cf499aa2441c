"""``laggard ack``: a known fault stays listed and no longer alarms."""

from __future__ import annotations

from datetime import date

import click

from agent.cli import options


@click.command()
@click.argument("id", required=False, type=options.FindingId())
@click.argument("component", required=False)
@click.option("--until", metavar="DATE", help="Last day on which it is quiet (2027-01-31, UTC).")
@click.option("--reason", metavar="TEXT", help="Why it may wait, for whoever reads it next.")
@click.option("--list", "listing", is_flag=True, help="List what is known on this node.")
@click.option("--remove", is_flag=True, help="Let it alarm again.")
def ack(
    *,
    id: str | None,
    component: str | None,
    until: str | None,
    reason: str | None,
    listing: bool,
    remove: bool,
) -> int:
    """Say that a fault of this node is known.

    It stays in every report and counts neither in the health nor in the exit code, until the date
    passes. ID is a finding's (`pcie.slot-limited`). COMPONENT is the part as the report calls it (a
    PCI address, a GPU's UUID, mlx5_0/1); without it the finding is known on every part.
    """
    import os
    import time

    from agent.ack import Ack, component_name, day_of, keep_acks, read_acks
    from agent.errors import LaggardError
    from agent.selection import expand
    from agent.state import State, state_directory
    from probes.registry import discover

    state = State(state_directory())
    acks = read_acks(state)
    if state.problems:
        raise LaggardError(state.problems[0])
    today = day_of(time.time_ns())
    if listing:
        for item in acks:
            what = f"{item.id} {item.component}" if item.component else item.id
            how_long = f"until {item.until}" if item.holds(today) else f"expired on {item.until}"
            by = f" ({item.added_by}, {item.added_at})" if item.added_by else f" ({item.added_at})"
            click.echo(f"{what}  {how_long}: {item.reason}{by}")
        return 0
    if id is None:
        raise click.UsageError("Missing argument 'ID' (or --list).")
    if component is not None and not (component := component_name(component)):
        raise click.UsageError("COMPONENT is empty: leave it out to mean every part.")
    others = tuple(item for item in acks if (item.id, item.component) != (id, component))
    if remove:
        if len(others) == len(acks):
            raise LaggardError(f"{id} {component or ''}".rstrip() + " is not acknowledged",
                               "`laggard ack --list` lists what is")  # fmt: skip
        done = keep_acks(state, others)
    else:
        if not until or not (reason and reason.strip()):
            raise click.UsageError("--until and --reason are needed: nothing is quiet for ever.")
        if expand((id,), [probe.id for probe in discover()], "ack") != {id}:
            raise LaggardError(f"{id}: one finding at a time, without globs")
        last = _date(until)
        if last < today:
            raise click.UsageError(f"--until {until}: that day has passed.")
        new = Ack(
            id=id,
            component=component,
            until=last.isoformat(),
            reason=reason,
            added_at=today.isoformat(),
            added_by=os.environ.get("SUDO_USER") or os.environ.get("USER"),
        )
        done = keep_acks(state, (*others, new))
    if not done:
        raise LaggardError(state.problems[-1])
    what = f"{id} on {component or 'every part'}"
    click.echo(f"{what} alarms again" if remove else f"{what} is quiet through {last} (UTC)")
    return 0


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"--until {text}: a date like 2027-01-31 is needed.") from None
