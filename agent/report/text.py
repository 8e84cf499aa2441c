"""The page for a person: the answer first, then findings with proof, then what was not seen.

``layout`` turns a report into rows; a row is printed plainly into a pipe, or by rich with wrapping
and colour on a terminal. Rich is imported only then.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import msgspec

from agent.report import RenderOptions
from agent.report.words import (
    CLASS_WORDS,
    HEALTH_TITLES,
    JOB_WORDS,
    alarming,
    counts,
    in_order,
    job_sentence,
    name,
    one_line,
)
from probes.finding import Evidence, Finding, JobImpact, Severity
from probes.gap import Gap, GapReason
from probes.result import Health, Outcome, Report

_LABEL_WIDTH = 10
_SEVERITY_STYLES = {
    Severity.CRITICAL: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold cyan",
}
_HEALTH_STYLES = {
    Health.OK: "bold green",
    Health.UNKNOWN: "bold magenta",
    Health.WARNING: "bold yellow",
    Health.CRITICAL: "bold red",
}


class Row(msgspec.Struct, frozen=True):
    """One line: an indented label in its column, and text that may wrap under itself.

    ``whole`` text is never wrapped: a command in two pieces can't be copied.
    """

    text: str = ""
    label: str = ""
    indent: int = 0
    style: str = ""
    label_style: str = "bold"
    whole: bool = False


def render(report: Report, options: RenderOptions) -> str:
    """The page, as plain text or for a terminal."""
    rows = list(layout(report, verbose=options.verbose))
    return _rich(rows, options) if options.rich else "".join(_plain(row) + "\n" for row in rows)


def layout(report: Report, *, verbose: int) -> Iterator[Row]:
    """Rows of the page, in reading order."""
    title = HEALTH_TITLES[report.health]
    yield Row(
        f"{title}: {report.host}; {job_sentence(report)}.", style=_HEALTH_STYLES[report.health]
    )
    lead = report.verdicts[0]
    yield Row(lead.summary)
    if lead.next_step:
        yield Row(lead.next_step, label="next")
    for other in report.verdicts[1:]:
        yield Row(other.summary, label="also")

    shown = [finding for finding in in_order(report) if finding.severity is not Severity.INFO]
    infos = [finding for finding in report.findings if finding.severity is Severity.INFO]
    ids = frozenset(finding.id for finding in report.findings)
    quiet = {item.fingerprint: item for item in report.acknowledged}
    if shown:
        yield Row()
        head = counts(alarming(report)) or "none that counts"
        known = f", {len(quiet)} acknowledged" if quiet else ""
        yield Row(f"FINDINGS ({head}{known})", style="bold")
    for finding in shown:
        yield from _finding(finding, report.host, ids, verbose)
        if ack := quiet.get(finding.fingerprint):
            yield Row(f"until {ack.until}: {ack.reason}", label="known", indent=2)
    if infos:
        yield Row()
        yield Row("WORTH KNOWING (no alarm)", style="bold")
        for finding in infos:
            if verbose:
                yield from _finding(finding, report.host, ids, verbose)
            else:
                yield Row(finding.summary, label=finding.id, indent=2, label_style="cyan")

    yield from _ruled_out(report)
    yield from _checked(report, verbose)
    yield from _gaps(report)


def _finding(finding: Finding, host: str, others: frozenset[str], verbose: int) -> Iterator[Row]:
    style = _SEVERITY_STYLES[finding.severity]
    yield Row()
    where = name(finding.component, host)
    yield Row(f"{finding.severity.value.upper()}  {finding.id}  {where}", style=style)
    yield Row(finding.summary, indent=2)
    said = [finding.confidence.value, CLASS_WORDS[finding.fault_class]]
    if finding.job_impact is not JobImpact.NONE:
        said.append(JOB_WORDS[finding.job_impact])
    yield Row("; ".join(said), label="how sure", indent=2)
    following = (*finding.evidence[1:], None)
    for evidence, after in zip(finding.evidence, following, strict=True):
        yield from _evidence(evidence)
        # one command that shows several of the facts stands once, behind the last of them
        if evidence.recheck and (after is None or after.recheck != evidence.recheck):
            yield Row(evidence.recheck, label="recheck", indent=2, style="cyan", whole=True)
    if finding.explains and (seen := [id for id in finding.explains if id in others]):
        yield Row(", ".join(seen), label="explains", indent=2)
    if finding.remedy:
        mark = " (disruptive)" if finding.remedy.disruptive else ""
        yield Row(f"{finding.remedy.text}{mark}", label="next", indent=2)
    if verbose:
        yield Row(f"laggard explain {finding.id}", label="more", indent=2)
        yield Row(finding.fingerprint, label="fingerprint", indent=2)


def _evidence(evidence: Evidence) -> Iterator[Row]:
    parts = [f"{evidence.source} {evidence.locator}"]
    if evidence.observed is not None:
        value = f"{evidence.observed}{f' {evidence.unit}' if evidence.unit else ''}"
        parts.append(f"= {value}")
    if evidence.expected:
        unit = f" {evidence.unit}" if evidence.unit else ""
        basis = evidence.expected.basis.value
        parts.append(f"(expected {evidence.expected.value}{unit}: {basis})")
    yield Row(" ".join(parts), label="proof", indent=2)
    if evidence.quote and evidence.quote != evidence.observed:
        yield Row(f'"{evidence.quote}"', label="", indent=2)


def _ruled_out(report: Report) -> Iterator[Row]:
    infos = [finding for finding in report.findings if finding.severity is Severity.INFO]
    notes = tuple(f"{finding.id} on {finding.component.label()}" for finding in infos)
    items = [
        item
        for verdict in report.verdicts
        for item in verdict.ruled_out
        if not item.what.startswith(notes)  # they have a section of their own
    ]
    if items:
        yield Row()
        yield Row("NOT A FAULT", style="bold")
        for item in items:
            yield Row(f"{item.what}: {item.why}", indent=2)


def _checked(report: Report, verbose: int) -> Iterator[Row]:
    families: dict[str, list[tuple[str, Outcome, int]]] = {}
    for result in report.results:
        families.setdefault(result.id.split(".", 1)[0], []).append(
            (result.id.split(".", 1)[1], result.outcome, result.judged)
        )
    yield Row()
    yield Row("CHECKED", style="bold")
    skipped: list[str] = []
    for family, items in families.items():
        outcomes = [outcome for _, outcome, _ in items]
        if all(o in (Outcome.NOTAPPLICABLE, Outcome.NOTSELECTED) for o in outcomes):
            if Outcome.NOTAPPLICABLE in outcomes:
                skipped.append(family)
            continue
        words = []
        for outcome, text in (
            (Outcome.PASS, "passed"),
            (Outcome.FAIL, "failed"),
            (Outcome.UNKNOWN, "could not be judged"),
            (Outcome.ERROR, "broke (a bug in laggard)"),
        ):
            ids = [rule for rule, found, _ in items if found is outcome]
            if not ids:
                continue
            listed = outcome is not Outcome.PASS or verbose
            words.append(f"{len(ids)} {text}" + (f" ({', '.join(ids)})" if listed else ""))
        components = max(judged for _, _, judged in items)
        yield Row(f"{components} judged; {', '.join(words)}", label=family, indent=2)
    if skipped:
        yield Row(", ".join(skipped), label="not here", indent=2)
    left_out = sum(result.outcome is Outcome.NOTSELECTED for result in report.results)
    if left_out:
        yield Row(f"{left_out} of {len(report.results)} rules", label="not asked", indent=2)
    if verbose:
        for result in report.results:
            for note in result.notes:
                yield Row(note, label=result.id, indent=4, label_style="")
    for result in report.results:
        if result.error:
            yield Row(result.error, label=result.id, indent=2)


def _gaps(report: Report) -> Iterator[Row]:
    hidden = [gap for gap in report.gaps if gap.reason is not GapReason.UNSUPPORTED]
    unsupported = [gap for gap in report.gaps if gap.reason is GapReason.UNSUPPORTED]
    yield Row()
    if not hidden and not unsupported:
        yield Row("WHAT I COULD NOT SEE: nothing that I looked for.", style="bold")
        return
    yield Row("WHAT I COULD NOT SEE, AND HOW TO LET ME", style="bold")
    for gap in (*hidden, *unsupported):
        yield Row(_gap_text(gap), label=gap.source, indent=2)


def _gap_text(gap: Gap) -> str:
    what = ", ".join(gap.fields)
    where = f" of {', '.join(gap.devices)}" if gap.devices else ""
    text = f"{what or 'everything'}{where}: {gap.reason.value}"
    if gap.detail:
        text += f" ({gap.detail})"
    return f"{text}; {gap.allow}" if gap.allow else text


def _plain(row: Row) -> str:
    label = f"{row.label:<{_LABEL_WIDTH}} " if row.label or row.text.startswith('"') else ""
    return f"{' ' * row.indent}{label}{one_line(row.text)}".rstrip()


def _rich(rows: list[Row], options: RenderOptions) -> str:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=True,
        color_system="standard" if options.color else None,
        no_color=not options.color,
        width=options.width or 10_000,
        highlight=False,
        soft_wrap=options.width is None,
    )
    for row in rows:
        labelled = bool(row.label) or row.text.startswith('"')
        label, text = f"{row.label:<{_LABEL_WIDTH}} ", one_line(row.text)
        column = labelled and len(row.label) <= _LABEL_WIDTH
        if options.width is None or row.whole:
            line = Text(" " * row.indent)
            if labelled:
                line.append(label, style=row.label_style)
            console.print(line.append(text, style=row.style), soft_wrap=True)
        elif column:
            grid = Table.grid(padding=(0, 1))
            grid.add_column(min_width=min(_LABEL_WIDTH, options.width // 3), overflow="fold")
            grid.add_column(overflow="fold")
            grid.add_row(Text(row.label, style=row.label_style), Text(text, style=row.style))
            console.print(Padding(grid, (0, 0, 0, row.indent)))
        else:
            line = Text(overflow="fold")
            if labelled:  # too long for its column
                line.append(label, style=row.label_style)
            line.append(text, style=row.style)
            console.print(Padding(line, (0, 0, 0, row.indent)))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))
