import json
import re
import shutil
import subprocess
import sys

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.report import FORMATS, RenderOptions, render
from agent.report.terminal import options_for
from agent.schema import schema_of
from probes.finding import Component, FaultClass
from probes.result import Health, Outcome, ProbeResult, Report, worst
from tests.support.reports import OFF_BUS, faulty, healthy, verdict

PAGE = """\
NOT FIT: n44; a job can't go on here.
GPU 0000:3b:00.0 has fallen off the bus (Xid 79); 7 other GPUs answer
next       Drain n44 and power-cycle it.

FINDINGS (1 critical, 1 acknowledged)

CRITICAL  xid.off-bus  GPU 0000:3b:00.0 (NVML index 0)
  GPU 0000:3b:00.0 has fallen off the bus (Xid 79)
  how sure   proven; hardware; a job can't go on here
  proof      kmsg /dev/kmsg seq 812
             "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
  recheck    dmesg | grep 'Xid.*3b:00'
  next       drain n44 and power-cycle it (disruptive)

WARNING  pcie.width-trained-down  GPU 0000:88:00.0
  GPU 0000:88:00.0 link is x8, slot supports x16
  how sure   likely; hardware; a job may go on, but slower
  proof      sysfs /sys/bus/pci/devices/0000:88:00.0/current_link_width = 8 lanes (expected 16 lanes: slot-max)
  known      until 2026-02-01: riser ordered

WORTH KNOWING (no alarm)
  power.limit-low GPU 0000:89:00.0 is capped at 350 W, default 400 W

NOT A FAULT
  Xid 43 on 0000:88:00.0: process 88120 faulted

CHECKED
  pcie       8 judged; 1 failed (width-trained-down), 1 could not be judged (acs-redirect)
  power      7 judged; 1 passed
  xid        8 judged; 1 failed (off-bus)
  not here   nvlink

WHAT I COULD NOT SEE, AND HOW TO LET ME
  pci        acs_control: denied (config: only 64 bytes); run as root
"""


def test_page_in_a_pipe() -> None:
    assert render(faulty(), "text") == PAGE


def test_healthy_page() -> None:
    assert render(healthy(), "text") == (
        "FIT: n44; a job may go on.\n"
        "nothing wrong on 8 GPUs\n"
        "\n"
        "CHECKED\n"
        "  power      8 judged; 1 passed\n"
        "\n"
        "WHAT I COULD NOT SEE: nothing that I looked for.\n"
    )


def test_a_page_says_how_much_was_not_asked() -> None:
    results = (*healthy().results, ProbeResult(id="xid.app", outcome=Outcome.NOTSELECTED))
    assert "  not asked  1 of 2 rules\n" in render(healthy(results=results), "text")


def test_a_command_that_shows_two_facts_stands_once() -> None:
    first = msgspec.structs.replace(OFF_BUS.evidence[0], quote=None)
    second = msgspec.structs.replace(first, locator="/dev/kmsg seq 813")
    third = msgspec.structs.replace(first, recheck="lspci")
    finding = msgspec.structs.replace(OFF_BUS, evidence=(first, second, third))
    lines = render(faulty(findings=(finding,)), "text").splitlines()
    labels = [line.split()[0] for line in lines if line.startswith(("  proof", "  recheck"))]
    assert labels == ["proof", "proof", "recheck", "proof", "recheck"]


def test_what_a_finding_explains_is_shown_when_it_is_there() -> None:
    found = faulty().findings
    lost = msgspec.structs.replace(OFF_BUS, id="gpu.lost", explains=())
    lines = render(faulty(findings=(*found, lost)), "text").splitlines()
    assert [line for line in lines if line.startswith("  explains")] == ["  explains   gpu.lost"]


def test_a_cause_that_is_not_known_is_said_in_words() -> None:
    hung = msgspec.structs.replace(OFF_BUS, fault_class=FaultClass.CANNOT_TELL)
    page = render(faulty(findings=(hung,)), "text")
    assert "  how sure   proven; cause unknown; a job can't go on here\n" in page


def test_a_quote_that_is_the_reading_itself_is_not_repeated() -> None:
    evidence = msgspec.structs.replace(OFF_BUS.evidence[0], observed="LOST", quote="LOST")
    page = render(
        faulty(findings=(msgspec.structs.replace(OFF_BUS, evidence=(evidence,)),)), "text"
    )
    assert page.count("LOST") == 1


def test_a_command_can_be_copied_from_a_terminal() -> None:
    command = "nvidia-smi --query-gpu=pcie.link.width.current,pcie.link.width.max --format=csv"
    evidence = (msgspec.structs.replace(OFF_BUS.evidence[0], recheck=command),)
    found = msgspec.structs.replace(OFF_BUS, evidence=evidence)
    page = render(faulty(findings=(found,)), "text", RenderOptions(width=40))
    assert f"  recheck    {command}\n" in page


def test_a_label_longer_than_its_column_is_never_broken() -> None:
    page = render(faulty(), "text", RenderOptions(width=40))
    (label,) = [line for line in page.splitlines() if "power.limit-low" in line]
    assert label == "  power.limit-low GPU 0000:89:00.0 is"


def test_unknown_is_never_fit() -> None:
    page = render(healthy(health=Health.UNKNOWN), "text")
    assert page.startswith("CAN'T TELL: n44; nothing seen that stops a job.\n")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_wraps_and_loses_nothing(width: int) -> None:
    page = render(faulty(), "text", RenderOptions(width=width))
    assert max(len(line) for line in page.splitlines()) <= width
    squeezed = re.sub(r"\s", "", page)
    assert squeezed == re.sub(r"\s", "", PAGE)


def test_colour_in_a_pipe_changes_no_text_and_wraps_nothing() -> None:
    page = render(faulty(), "text", RenderOptions(color=True))
    assert "\x1b[1;31m" in page
    assert re.sub(r"\x1b\[[0-9;]*m", "", page) == PAGE


def test_text_from_the_machine_steers_no_terminal() -> None:
    evil = msgspec.structs.replace(OFF_BUS, summary="\x1b[2Jgone\r\n[bold]x[/bold]")
    for options in (RenderOptions(), RenderOptions(width=60), RenderOptions(color=True, width=60)):
        page = render(faulty(findings=(evil,)), "text", options)
        assert "\x1b[2J" not in page
        assert "\r" not in page
        assert "[bold]x[/bold]" in page


def test_json_round_trips_and_names_everything_that_the_contract_names() -> None:
    text = render(faulty(), "json")
    assert msgspec.json.decode(text, type=Report) == faulty()
    data = json.loads(text)
    assert data["schema"] == "laggard.report/1"
    assert list(data) == sorted(data)
    assert set(data["verdicts"][0]) == {
        "kind", "class", "code", "culprits", "summary", "confidence", "evidence", "ruled_out",
        "victims", "next_step",
    }  # fmt: skip
    assert data["findings"][0]["class"] == "hardware"
    assert "null" not in text
    empty = json.loads(render(healthy(), "json"))
    assert empty["findings"] == empty["gaps"] == empty["verdicts"][0]["culprits"] == []
    assert schema_of("report")["$id"] == "laggard.report/1"


def test_nagios_is_one_short_line_with_perfdata() -> None:
    assert render(faulty(), "nagios") == (
        "LAGGARD CRITICAL - GPU 0000:3b:00.0 has fallen off the bus (Xid 79) "
        "| critical=1;;0;0 warning=0;0;;0 passed=1;;;0 unknown=1;;;0\n"
    )
    assert render(healthy(), "nagios").startswith(
        "LAGGARD OK - nothing wrong on 8 GPUs | critical=0"
    )
    long = msgspec.structs.replace(OFF_BUS, summary="é|" * 2000)
    line = render(faulty(findings=(long,)), "nagios")
    assert len(line.encode()) <= 1024
    assert line.count("|") == 1
    assert line.count("\n") == 1


def test_a_cause_stands_before_what_it_causes() -> None:
    cause = msgspec.structs.replace(OFF_BUS, id="power.limit-low", summary="limit low", explains=())
    effect = msgspec.structs.replace(OFF_BUS, id="clocks.sw-power-cap", summary="capped")
    report = faulty(
        findings=(effect, cause), verdicts=(verdict(code="power.limit-low"),), acknowledged=()
    )
    assert render(report, "line") == "critical power.limit-low 0000:3b:00.0 (+1)\n"
    assert render(report, "nagios").startswith("LAGGARD CRITICAL - limit low; capped |")
    page = render(report, "text")
    assert page.index("CRITICAL  power.limit-low") < page.index("CRITICAL  clocks.sw-power-cap")


def test_line_is_at_most_80_bytes() -> None:
    assert render(faulty(), "line") == "critical xid.off-bus 0000:3b:00.0\n"
    assert render(healthy(), "line") == "ok n44 fit\n"
    second = msgspec.structs.replace(
        OFF_BUS, component=Component(type="host", host="n"), fingerprint="x"
    )
    assert render(faulty(findings=(OFF_BUS, second)), "line") == (
        "critical xid.off-bus 0000:3b:00.0 (+1)\n"
    )
    cant = healthy(health=Health.UNKNOWN, verdicts=(verdict(summary="é" * 300),))
    assert len(render(cant, "line").rstrip("\n").encode()) <= 80


def test_prometheus_reads_back() -> None:
    text = render(faulty(), "prometheus")
    assert text.endswith("\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {family.type for family in families.values()} == {"gauge"}
    health = {s.labels["state"]: s.value for s in families["laggard_health"].samples}
    assert health == {"ok": 0, "unknown": 0, "warning": 0, "critical": 1}
    findings = {s.labels["id"]: s.labels for s in families["laggard_finding"].samples}
    assert findings["pcie.width-trained-down"]["acknowledged"] == "true"
    assert findings["xid.off-bus"]["component"] == "0000:3b:00.0"
    by_severity = {s.labels["severity"]: s.value for s in families["laggard_findings"].samples}
    assert by_severity == {"critical": 1, "warning": 0, "info": 1}
    assert all(sample.timestamp is None for f in families.values() for sample in f.samples)


def test_prometheus_never_repeats_a_series() -> None:
    twins = tuple(
        msgspec.structs.replace(
            OFF_BUS, component=Component(type="host", host="n44", pid=pid), fingerprint=""
        )
        for pid in (1, 2)
    )
    text = render(faulty(findings=twins), "prometheus")
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert "pid" not in text


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("report", [faulty(), healthy()], ids=["faulty", "healthy"])
def test_promtool_accepts_it(report: Report) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=render(report, "prometheus"), capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("report", [faulty(), healthy()], ids=["faulty", "healthy"])
def test_every_format_ends_in_one_newline(format: str, report: Report) -> None:
    text = render(report, format)
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_rich_is_not_imported_for_a_pipe() -> None:
    program = (
        "import sys; from tests.support.reports import faulty; from agent.report import *;"
        "[render(faulty(), f) for f in FORMATS]; print('rich' in sys.modules);"
        "render(faulty(), 'text', RenderOptions(width=80)); print('rich' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


class Stream:
    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "choice", "environment", "color", "wrapped"),
    [
        (True, "auto", {"TERM": "xterm"}, True, True),
        (True, "auto", {"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        (True, "auto", {"TERM": "xterm", "NO_COLOR": ""}, True, True),
        (True, "never", {"TERM": "xterm"}, False, True),
        (True, "auto", {"TERM": "dumb"}, False, False),
        (False, "auto", {"TERM": "xterm"}, False, False),
        (False, "always", {"TERM": "xterm"}, True, False),
        (False, "auto", {"FORCE_COLOR": "1"}, True, False),
        (True, "always", {"TERM": "xterm", "NO_COLOR": "1"}, True, True),
    ],
)
def test_what_a_stream_can_show(
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    choice: str,
    environment: dict[str, str],
    color: bool,
    wrapped: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = options_for(Stream(terminal), color=choice)  # type: ignore[arg-type]
    assert (options.color, options.width is not None) == (color, wrapped)


def test_unknown_outranks_ok() -> None:
    assert worst() is Health.OK
    assert worst(Health.OK, Health.UNKNOWN) is Health.UNKNOWN
    assert worst(Health.UNKNOWN, Health.WARNING) is Health.WARNING
