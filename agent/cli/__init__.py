"""The command line: a group that imports a command only when it is called, and exit codes.

Importing this module imports click and nothing heavy; a test keeps it so.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

import click

from agent import __version__
from agent.errors import LaggardError

EXIT_UNKNOWN = 3
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# name -> (module with an object of the command's name, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "check": (
        "agent.cli.check",
        "Is this node fit? Clocks, power, heat, PCIe, memory, links, host.",
    ),
    "ack": ("agent.cli.ack", "A known fault stays listed and no longer alarms, until a date."),
    "config": ("agent.cli.config", "What the configuration says, and which file says it."),
    "snapshot": ("agent.cli.snapshot", "Record, show, diff and redact what a run reads."),
    "explain": ("agent.cli.explain", "What a finding means, why it matters, what to do."),
    "doctor": ("agent.cli.doctor", "What can laggard read here, and how to let it read the rest?"),
    "schema": ("agent.cli.schema", "The JSON Schema of a report or a snapshot."),
}

# What a person is in when they call, and the command for it.
SITUATIONS = """\
A node is suspect          laggard check
From cron                  laggard check --quiet --on-change --splay 60
A job hangs right now      laggard check, on each of its nodes: a lost GPU, a process stuck in the
                           driver, a port that is down; then, for each rank's process,
                           py-spy dump --nonblocking --pid PID
A replica is slow          laggard snapshot record -o HOST.json, under load, on the slow node and on
                           a good one; then laggard snapshot diff good.json slow.json
A ticket came with files   laggard check --from FILE, for what `laggard snapshot record` wrote

laggard --help lists the commands, laggard doctor says what can be read here."""


class LazyGroup(click.Group):
    """Imports a subcommand's module when it is asked for; help is listed without importing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command when there is none of that name."""
        if not ctx.resilient_parsing and args[0] not in COMMANDS and args[0][:1] != "-":
            from agent.config import nearest

            raise LaggardError(f"there is no command {args[0]!r}", nearest(args[0], COMMANDS))
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command object, from its module."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101 - our own table
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "LAGGARD"},
)
@click.version_option(__version__, prog_name="laggard")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Find the slow GPU, the hung rank and the bad link, with proof."""
    if ctx.invoked_subcommand is None:
        click.echo(SITUATIONS)


def run(argv: Sequence[str]) -> int:
    """Run the command line; the one place that maps failures to exit codes.

    A command returns its exit code. Usage errors, our own errors, Ctrl-C and crashes are 3
    (Nagios: unknown); a closed pipe is quiet.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale that lacks a sign is no reason to fail
            stream.reconfigure(errors="replace")
    try:
        code = main.main(args=list(argv), prog_name="laggard", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_UNKNOWN
    except LaggardError as error:
        click.echo(f"laggard: {error.message}", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        return EXIT_UNKNOWN
    except (KeyboardInterrupt, click.Abort):
        click.echo("laggard: interrupted", err=True)
        return EXIT_UNKNOWN
    except (BrokenPipeError, SystemExit):
        # The reader has gone, and click says so with its own exit: keep the last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNKNOWN
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            click.echo(f"laggard: writing standard output: {error.strerror}", err=True)
            return EXIT_UNKNOWN
        import traceback

        traceback.print_exc()
        click.echo("laggard: this is a bug in laggard; please report the lines above", err=True)
        return EXIT_UNKNOWN
    return code if isinstance(code, int) else 0


def _open_closed_streams() -> None:
    """Let a caller close our streams (``>&-``): what is said there goes nowhere.

    The descriptors are taken as well, lest a file that we open gets the number of one.
    """
    names = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    if not names:
        return
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    for name in names:
        setattr(sys, name, os.fdopen(os.dup(handle), "r" if name == "stdin" else "w"))
    os.close(handle)
