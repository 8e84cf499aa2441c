"""``laggard schema``: the JSON Schema of a report or a snapshot."""

from __future__ import annotations

import click

from agent.schema import SCHEMAS, schema_of


@click.command()
@click.argument("name", type=click.Choice(list(SCHEMAS)))
def schema(name: str) -> int:
    """Print the JSON Schema of what `--format json` or `snapshot record` writes."""
    import msgspec

    data = msgspec.json.Encoder(order="sorted").encode(schema_of(name))
    click.echo(msgspec.json.format(data, indent=2).decode())
    return 0
