"""Options that several commands share, and where their defaults come from."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import click

from agent.config import Config, Setting, load_config
from agent.errors import LaggardError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ENV_PREFIX = "LAGGARD"


class Seconds(click.FloatRange):
    """A length of time; NaN, which no bound refuses, is none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return found


def _root(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    """Refuse a place without a machine: nothing found there is no sign of health."""
    path = value or "/"
    if not any(os.path.isdir(os.path.join(path, name)) for name in ("proc", "sys")):
        raise LaggardError(
            f"--root {value}: neither proc nor sys stands there",
            "name the directory that the host's / is mounted on, with its /proc and /sys",
        )
    return path


sample = click.option(
    "--sample",
    type=Seconds(0, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between the two readings of each counter; 0 reads once and knows no rates.",
)
deadline = click.option(
    "--deadline",
    type=Seconds(1, 3600),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="The run ends by then with what it has.",
)
root = click.option(
    "--root",
    default="/",
    show_default=True,
    metavar="DIR",
    callback=_root,
    help="Where the host's /proc, /sys, /dev, /etc, /var/log stand.",
)


class FindingId(click.types.StringParamType):
    """A finding's id or a glob, which is looked up later; the shell completes it."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """See click."""
        from click.shell_completion import CompletionItem

        from probes.registry import discover

        return [
            CompletionItem(probe.id, help=probe.title)
            for probe in discover()
            if probe.id.startswith(incomplete)
        ]


def _load(ctx: click.Context, _param: click.Parameter, explicit: str | None) -> Config:
    """Read the files before any other option asks for its default."""
    if ctx.resilient_parsing:  # shell completion
        return Config()
    options = configurable(ctx.command)
    found = load_config(explicit, options)
    ctx.default_map = {
        name_of(name): _typed(ctx, options[name], setting) for name, setting in found.check.items()
    }
    return found


def _typed(ctx: click.Context, option: click.Option, setting: Setting) -> Any:
    """The value as the option takes it. Raises LaggardError that names the file and the key."""
    value = setting.value
    if option.multiple and not isinstance(value, list):
        value = [value]
    try:
        option.type_cast_value(ctx, value)
    except click.BadParameter as error:
        raise LaggardError(f"{setting.origin} = {setting.value!r}: {error.message}") from None
    return value


config = click.option(
    "--config",
    envvar=f"{ENV_PREFIX}_CONFIG",
    is_eager=True,
    callback=_load,
    metavar="FILE",
    help="One more configuration file, which wins over the usual ones.",
)


def name_of(option: str) -> str:
    """The parameter's name: ``exit-codes`` is ``exit_codes``."""
    return option.replace("-", "_")


def configurable(command: click.Command) -> dict[str, click.Option]:
    """The options that a file may set, by their long name without dashes."""
    return {
        max(option.opts, key=len).lstrip("-"): option
        for option in command.params
        if isinstance(option, click.Option) and option.name not in ("config", "source", "help")
    }


def plain(value: Any) -> Any:
    """A parameter's value as a file would say it."""
    return list(value) if isinstance(value, tuple) else value
