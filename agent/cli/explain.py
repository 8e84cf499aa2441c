"""``laggard explain ID``: what a probe sees, why it matters, what is no fault, what to do."""

from __future__ import annotations

import click

from agent.cli import options


@click.command()
@click.argument("id", required=False, type=options.FindingId())
def explain(id: str | None) -> int:
    """Print the documentation of a finding id, or list all ids.

    ID may be a glob (`pcie.*`).
    """
    import fnmatch

    from agent.config import nearest
    from agent.errors import LaggardError
    from probes.registry import discover

    probes = discover()
    if id is None:
        for item in probes:
            click.echo(f"{item.id:<34} {item.title}")
        return 0
    chosen = [item for item in probes if fnmatch.fnmatchcase(item.id, id)]
    if not chosen:
        ids = [item.id for item in probes]
        hint = nearest(id, ids, most=3) or "`laggard explain` lists all ids"
        raise LaggardError(f"there is no finding called {id!r}", hint)
    for position, item in enumerate(chosen):
        if position:
            click.echo()
        click.echo(f"{item.id}\n{'=' * len(item.id)}\n")
        click.echo(item.doc)
        if item.limits:
            click.echo("\nThresholds (change them in the configuration):")
            for name, limit in item.limits.items():
                click.echo(f"  {name} = {limit.default:g} {limit.unit}  ({limit.source})")
        if item.needs:
            click.echo(f"\nReads: {', '.join(item.needs)}")
    return 0
