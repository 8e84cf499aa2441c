"""``laggard snapshot``: record, show, diff, redact."""

from __future__ import annotations

import click

from agent.cli import options
from agent.snapshot_file import compress, encode_snapshot, read_snapshot, write_output


@click.group()
def snapshot() -> None:
    """Record what a run reads, and work with recordings."""


@snapshot.command()
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    help="File to write, - for standard output; .gz packs.",
)
@click.option(
    "--raw", is_flag=True, help="Write every byte read instead, as a text tree for fixtures."
)
@options.sample
@options.deadline
@options.root
def record(output: str, raw: bool, sample: float, deadline: float, root: str) -> int:
    """Read this node once and keep it.

    The snapshot holds typed readings and can be judged anywhere with `laggard check --from`. With
    --raw the answer to every read is kept as well as it came, which is what a parser's test needs;
    such a run reads without the guard process, so a read that hangs hangs it.
    """
    from agent.fstree import format_fstree
    from agent.host import LiveHost
    from agent.recording import RecordingHost
    from agent.run import RunOptions, collect_node

    run_options = RunOptions(sample_s=sample, deadline_s=deadline)
    if raw:
        host = RecordingHost(LiveHost(root))
        collect_node(host, run_options)
        data = format_fstree(host.tree).encode("utf-8", "surrogateescape")
    else:
        data = encode_snapshot(collect_node(LiveHost(root), run_options))
    write_output(output, compress(data) if output.endswith(".gz") else data)
    return 0


@snapshot.command()
@click.argument("file")
@click.option("--manifest", "as_manifest", is_flag=True,
              help="Print what this node has as the manifest of a good one (TOML).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the snapshot itself.")
def show(file: str, as_manifest: bool, as_json: bool) -> int:
    """Say what a snapshot holds."""
    found = read_snapshot(file)
    if as_json:
        write_output("-", encode_snapshot(found))
    elif as_manifest:
        from agent.manifest import format_manifest, manifest_of

        click.echo(format_manifest(manifest_of(found)), nl=False)
    else:
        from agent.snapshot_text import describe

        for line in describe(found):
            click.echo(line)
    return 0


@snapshot.command()
@click.argument("before")
@click.argument("after")
def diff(before: str, after: str) -> int:
    """Say what changed from BEFORE to AFTER, what got worse first.

    Exit code 0 when nothing got worse, 1 when something did.
    """
    from agent.evaluate import evaluate
    from agent.snapshot_diff import diff_snapshots
    from probes.registry import discover

    one, two = read_snapshot(before), read_snapshot(after)
    probes = discover()
    old = {finding.fingerprint: finding for finding in evaluate(one, probes).findings}
    new = {finding.fingerprint: finding for finding in evaluate(two, probes).findings}
    appeared = [finding for key, finding in new.items() if key not in old]
    cleared = [finding for key, finding in old.items() if key not in new]
    raised = [
        finding
        for key, finding in new.items()
        if key in old and finding.severity.rank > old[key].severity.rank
    ]
    changes = diff_snapshots(one, two)
    if one.host != two.host:
        click.echo(f"two nodes: {one.host} and {two.host}")
    elif one.boot_id != two.boot_id:
        click.echo("rebooted in between: counters since boot are not compared")
    for title, findings in (
        ("NEW FINDING", appeared),
        ("WORSE FINDING", raised),
        ("CLEARED FINDING", cleared),
    ):
        for finding in findings:
            click.echo(f"{title}  {finding.severity.value}  {finding.id}  {finding.summary}")
    for change in changes:
        mark = {True: "WORSE", False: "better", None: "changed"}[change.worse]
        click.echo(f"{mark}  {change.path}: {_value(change.before)} -> {_value(change.after)}")
    if not (appeared or raised or cleared or changes):
        click.echo("no difference")
    alarming = [finding for finding in appeared if finding.severity.value != "info"]
    return 1 if alarming or raised or any(change.worse for change in changes) else 0


@snapshot.command(short_help="Replace names of people and places by pseudonyms.")
@click.argument("file")
@click.option(
    "-o", "--output", required=True, metavar="FILE", help="File to write, - for standard output."
)
def redact(file: str, output: str) -> int:
    """Replace names of hosts, users, processes, addresses, serials and UUIDs by pseudonyms.

    The same value gives the same pseudonym inside one file; the key is random and thrown away. PCI
    addresses, device names, numbers and log texts stay. Read the result before it leaves the site.
    """
    import secrets

    from agent.redact import Redactor

    found = Redactor(secrets.token_bytes(32)).snapshot(read_snapshot(file))
    data = encode_snapshot(found)
    write_output(output, compress(data) if output.endswith(".gz") else data)
    return 0


def _value(value: object) -> str:
    return "nothing" if value is None else str(value)
