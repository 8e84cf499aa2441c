"""``laggard config``: what holds, and who said so."""

from __future__ import annotations

import click
from click.core import ParameterSource

from agent.cli import options


@click.group()
def config() -> None:
    """Look at the configuration."""


@config.command()
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@click.option(
    "--config",
    "explicit",
    metavar="FILE",
    envvar="LAGGARD_CONFIG",
    help="One more configuration file, as for `laggard check`.",
)
def show(origin: bool, explicit: str | None) -> int:  # fmt: skip
    """Print what `laggard check` would go by, as TOML.

    Files, the later one wins: /etc/laggard/config.toml, $XDG_CONFIG_HOME/laggard/config.toml
    (~/.config), $LAGGARD_CONFIG; then LAGGARD_CHECK_* of the environment, then flags.
    """
    from agent.cli import main
    from agent.cli.check import check
    from agent.config import Config, check_ids, toml_value
    from probes.registry import discover

    parent = click.Context(main, info_name="laggard", auto_envvar_prefix=options.ENV_PREFIX)
    context = check.make_context("check", ["--config", explicit] if explicit else [], parent=parent)
    found = context.params["config"]
    assert isinstance(found, Config)  # noqa: S101 - made by the option's callback
    check_ids(found, {probe.id: probe for probe in discover()})
    for problem in found.problems:
        click.echo(f"laggard: {problem}", err=True)

    lines = [("[check]", "")]
    for name in options.configurable(check):
        parameter = options.name_of(name)
        source = context.get_parameter_source(parameter)
        if source is ParameterSource.DEFAULT_MAP:
            where = found.check[name].origin
        elif source is ParameterSource.ENVIRONMENT:
            where = f"environment: {context.auto_envvar_prefix}_{parameter.upper()}"
        else:
            where = "default"
        value = context.params[parameter]
        if value is None:
            lines.append((f"# {name} is not set", where))
        else:
            lines.append((f"{name} = {toml_value(options.plain(value))}", where))
    for id in sorted({*found.severities, *found.limits}):
        lines.append(("", ""))
        lines.append((f"[probes.{toml_value(id)}]", ""))
        if severity := found.severities.get(id):
            lines.append((f"severity = {toml_value(severity.value.value)}", severity.origin))
        lines += [
            (f"limits.{name} = {toml_value(limit.value)}", limit.origin)
            for name, limit in sorted(found.limits.get(id, {}).items())
        ]
    for text, where in lines:
        click.echo(f"{text:<40}  # {where}" if origin and where else text)
    return 0
