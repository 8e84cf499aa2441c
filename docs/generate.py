"""Writes what is generated: docs/findings.md, JSON Schemas, the man page, completion.

``python docs/generate.py`` writes; a test holds the files to what ``generated()`` gives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from click.shell_completion import get_completion_class

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agent.cli import main  # noqa: E402
from agent.schema import SCHEMAS, schema_of  # noqa: E402
from probes.registry import Probe, discover  # noqa: E402


def generated() -> dict[str, str]:
    """Every generated file by its path from the root."""
    files = {"docs/findings.md": findings_page(discover()), "docs/man/laggard.1": man_page()}
    for name in SCHEMAS:
        schema = msgspec.json.Encoder(order="sorted").encode(schema_of(name))
        files[f"docs/schema/{name}.json"] = msgspec.json.format(schema, indent=2).decode() + "\n"
    for shell in ("bash", "zsh", "fish"):
        files[f"docs/completion/laggard.{shell}"] = completion(shell)
    return files


def findings_page(probes: tuple[Probe, ...]) -> str:
    """All ids with their documentation, by family."""
    out = [
        "# Findings",
        "",
        "Generated from the probes' docstrings (`python docs/generate.py`); `laggard explain ID` "
        "prints the same. Ids are stable and never reused.",
    ]
    families = sorted({probe.family for probe in probes})
    for family in families:
        members = [probe for probe in probes if probe.family == family]
        out += ["", f"## {family}", "", "| id | what it sees |", "| --- | --- |"]
        out += [f"| [`{p.id}`](#{_anchor(p.id)}) | {p.title} |" for p in members]
        for probe in members:
            body = probe.doc.split("\n", 1)[1].strip() if "\n" in probe.doc else ""
            out += ["", f"### {probe.id}", "", f"**{probe.title}.**", "", body]
            if probe.limits:
                out += ["", "| threshold | default | where it comes from |", "| --- | --- | --- |"]
                out += [
                    f"| `{name}` | {limit.default:g} {limit.unit} | {limit.source} |"
                    for name, limit in probe.limits.items()
                ]
            out += ["", f"Reads: {', '.join(probe.needs)}."]
    return "\n".join(out) + "\n"


def _anchor(text: str) -> str:
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def man_page() -> str:
    """laggard(1): one page with every command and option."""
    out = [
        '.TH LAGGARD 1 "" "laggard" "User Commands"',
        ".SH NAME",
        r"laggard \- find the slow GPU, the hung rank and the bad link, with proof",
        ".SH SYNOPSIS",
        ".B laggard",
        r".RI [ COMMAND ] \ [ OPTION ...]",
        ".SH DESCRIPTION",
        "GPU fleet diagnostics for the person on call: read-only, from outside the job, without a "
        "daemon, and as far as it can without root. What could not be read is said, and never "
        "counted as healthy.",
        ".SH COMMANDS",
    ]
    context = click.Context(main, info_name="laggard")
    for name, command in _commands(context, "laggard"):
        out += [f".SS {_troff(name)}", *_paragraphs(command.help or "")]
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record and not getattr(parameter, "hidden", False):
                out += [".TP", f".B {_troff(record[0])}", _troff(record[1] or "")]
    out += [
        ".SH EXIT STATUS",
        "0 ok, 1 warning, 2 critical, 3 can't tell, usage error or crash. "
        r"\fB\-\-exit\-codes\fR changes the mapping.",
        ".SH FILES",
        ".TP",
        ".I /etc/laggard/config.toml",
        "configuration of the machine; then the user's, then LAGGARD_CONFIG, then the environment.",
        ".TP",
        ".I /var/lib/laggard",
        "own baseline, acknowledged findings and the lock, for root; "
        r"\fI~/.local/state/laggard\fR for others.",
        ".SH ENVIRONMENT",
        r"\fBLAGGARD_CONFIG\fR, \fBSTATE_DIRECTORY\fR, \fBXDG_STATE_HOME\fR, \fBNO_COLOR\fR.",
    ]
    return "\n".join(out) + "\n"


def _commands(context: click.Context, prefix: str) -> Iterator[tuple[str, click.Command]]:
    group = context.command
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if command.hidden:
            continue
        yield f"{prefix} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(click.Context(command, info_name=name), f"{prefix} {name}")


def _paragraphs(text: str) -> Iterator[str]:
    for position, paragraph in enumerate(re.split(r"\n\s*\n", text.replace("\b", "").strip())):
        if position:
            yield ".PP"
        yield _troff(" ".join(paragraph.split()))


def _troff(text: str) -> str:
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return r"\&" + text if text[:1] in ".'" else text


def completion(shell: str) -> str:
    """The script that the shell sources."""
    found = get_completion_class(shell)
    assert found is not None
    return found(main, {}, "laggard", "_LAGGARD_COMPLETE").source().rstrip() + "\n"


if __name__ == "__main__":
    for path, text in generated().items():
        target = ROOT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or target.read_text() != text:
            target.write_text(text)
            sys.stdout.write(f"wrote {path}\n")
