"""``laggard doctor``: what can be read here, how to allow the rest, is the install sound."""

from __future__ import annotations

import click

from agent.cli import options


@click.command()
@options.root
def doctor(root: str) -> int:
    """Say what laggard can read here, how to let it read the rest, and what shadows its modules.

    Exit code 0 when everything that exists here can be read and the installation is sound, 1 when
    not.
    """
    from agent.doctor import examine

    sound = True
    for item in examine(root):
        sound = sound and item.ok
        click.echo(f"{'ok  ' if item.ok else 'LOOK'}  {item.what}: {item.found}")
        if item.advice:
            click.echo(f"      {item.advice}")
    return 0 if sound else 1
