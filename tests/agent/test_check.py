"""`laggard check` as it is called: what it prints, what it keeps, what it ends with."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent import config, manifest
from agent.cli import run
from agent.evaluate import evaluate
from agent.exitcode import EXIT_CODES, exit_code
from agent.report import FORMATS
from agent.snapshot_file import encode_snapshot
from probes.finding import Severity
from probes.gap import Gap, GapReason
from probes.registry import discover
from probes.result import Health, Outcome, Report
from probes.snapshot.gpu import GpuLimits, NvmlSection
from probes.snapshot.node import NodeSnapshot
from tests.support.nodes import gpu, node

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's configuration or state."""
    for name in list(os.environ):
        if name.startswith("LAGGARD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setattr(config, "SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setattr(manifest, "SITE_MANIFEST", str(tmp_path / "manifest.toml"))


def keep(path: Path, snapshot: NodeSnapshot) -> str:
    path.write_bytes(encode_snapshot(snapshot))
    return str(path)


def capped() -> NodeSnapshot:
    """One of four GPUs has a lowered power limit: a warning of power.limit-low."""
    limits = [GpuLimits(power_limit_default_mw=700_000, power_limit_enforced_mw=mw)
              for mw in (700_000, 350_000, 700_000, 700_000)]  # fmt: skip
    gpus = tuple(gpu(i, limits=limits[i]) for i in range(4))
    return node(nvml=NvmlSection(driver_version="570.124.06", device_count=4, gpus=gpus), gaps=())


CAPPED_ID = "power.limit-low"


def report_of(capsys: Capture, *argv: str) -> tuple[int, Report]:
    code = run(["check", "--format", "json", *argv])
    return code, msgspec.json.decode(capsys.readouterr().out, type=Report)


@pytest.mark.parametrize("style", EXIT_CODES)
def test_exit_codes_by_health(style: str) -> None:
    healths = (Health.OK, Health.WARNING, Health.CRITICAL, Health.UNKNOWN)
    expected = {"nagios": (0, 1, 2, 3), "npd": (0, 0, 1, 2), "zero": (0, 0, 0, 0)}[style]
    assert tuple(exit_code(health, style) for health in healths) == expected


# --- from a file ---


def test_a_recorded_node_is_judged_as_it_was(tmp_path: Path, capsys: Capture) -> None:
    path = keep(tmp_path / "n.json", capped())
    code, report = report_of(capsys, "--from", path, "--only", CAPPED_ID)
    alone = evaluate(capped(), [probe for probe in discover() if probe.id == CAPPED_ID])
    assert report.findings == alone.findings != ()
    assert (code, report.health) == (1, Health.WARNING)
    assert report.verdicts[0].code == CAPPED_ID
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("style", "code"), [("nagios", 1), ("npd", 0), ("zero", 0)])
def test_the_style_of_the_exit_code(style: str, code: int, tmp_path: Path, capsys: Capture) -> None:
    path = keep(tmp_path / "n.json", capped())
    assert run(["check", "--from", path, "--only", CAPPED_ID, "--exit-codes", style]) == code


def test_zero_is_no_excuse_for_wrong_use(capsys: Capture) -> None:
    assert run(["check", "--exit-codes", "zero", "--only", "nonsense"]) == 3
    assert run(["check", "--exit-codes", "zero", "--from", "/nonexistent"]) == 3


@pytest.mark.parametrize("option", ["--only", "--skip", "--require", "--accept-unknown"])
def test_an_unknown_id_is_wrong_use_with_the_nearest_name(option: str, capsys: Capture) -> None:
    assert run(["check", option, "power.limt-low"]) == 3
    assert capsys.readouterr().err.splitlines() == [
        f"laggard: {option} power.limt-low: there is no finding called so",
        "  did you mean power.limit-low?",
    ]


def test_only_and_skip_select_by_id_and_glob(tmp_path: Path, capsys: Capture) -> None:
    path = keep(tmp_path / "n.json", node())
    argv = ("--from", path, "--only", "power.*", "--only", "nic.*", "--skip", CAPPED_ID)
    _, report = report_of(capsys, *argv)
    asked = {r.id for r in report.results if r.outcome is not Outcome.NOTSELECTED}
    ids = {probe.id for probe in discover()}
    assert asked == {id for id in ids if id.startswith(("power.", "nic."))} - {CAPPED_ID}
    assert {r.id for r in report.results} == ids


def test_severity_and_thresholds_of_the_configuration_count(
    tmp_path: Path, capsys: Capture
) -> None:
    path = keep(tmp_path / "n.json", capped())
    rules = tmp_path / "rules.toml"
    rules.write_text(f'[probes."{CAPPED_ID}"]\nseverity = "critical"\n')
    code, report = report_of(capsys, "--from", path, "--only", CAPPED_ID, "--config", str(rules))
    assert (code, [f.severity for f in report.findings]) == (2, [Severity.CRITICAL])
    rules.write_text(f'[probes."{CAPPED_ID}x"]\nseverity = "critical"\n')
    assert run(["check", "--from", path, "--config", str(rules)]) == 3
    assert f'{rules}: probes."{CAPPED_ID}x".severity: there is no' in capsys.readouterr().err


def test_a_manifest_given_for_a_recording_is_what_it_is_compared_with(
    tmp_path: Path, capsys: Capture
) -> None:
    path = keep(tmp_path / "n.json", capped())
    expected = tmp_path / "m.toml"
    expected.write_text("gpu_power_limit_w = 350.0\n")
    _, without = report_of(capsys, "--from", path, "--only", CAPPED_ID)
    _, with_it = report_of(capsys, "--from", path, "--only", CAPPED_ID, "--manifest", str(expected))
    assert without.findings != with_it.findings


def hidden() -> NodeSnapshot:
    gap = Gap(source="nics", reason=GapReason.DENIED, allow="run as root")
    return node(nics=None, gaps=(gap,))


@pytest.mark.parametrize(
    ("argv", "code"),
    [([], 3), (["--accept-unknown", "nic.*"], 0), (["--exit-codes", "npd"], 2)],
)
def test_what_is_hidden_is_not_healthy_unless_accepted(
    argv: list[str], code: int, tmp_path: Path, capsys: Capture
) -> None:
    path = keep(tmp_path / "n.json", hidden())
    got, report = report_of(capsys, "--from", path, "--only", "nic.*", *argv)
    assert got == code
    expected = "node.fit" if "--accept-unknown" in argv else "node.cannot-tell"
    assert report.verdicts[0].code == expected


def test_a_source_that_can_not_be_read_is_named_once(tmp_path: Path, capsys: Capture) -> None:
    hidden = Gap(source="kernel", reason=GapReason.DENIED, detail="/dev/kmsg: no")
    blind = msgspec.structs.replace(capped(), kernel=None, gaps=(hidden,))
    path = keep(tmp_path / "n.json", blind)
    code, report = report_of(capsys, "--from", path, "--only", "kernel.*", "--only", "xid.*")
    missing = {text for result in report.results for text in result.missing}
    assert (code, missing) == (3, {"kernel: denied (/dev/kmsg: no)"})


def test_require_counts_what_is_absent(tmp_path: Path, capsys: Capture) -> None:
    path = keep(
        tmp_path / "n.json", node(nics=None, gaps=(Gap(source="nics", reason=GapReason.ABSENT),))
    )
    assert report_of(capsys, "--from", path, "--only", "nic.*")[0] == 0
    assert report_of(capsys, "--from", path, "--only", "nic.*", "--require", "nic.*")[0] == 3


@pytest.mark.parametrize("format", FORMATS)
def test_a_locale_without_the_signs_of_a_report(format: str, tmp_path: Path) -> None:
    path = keep(tmp_path / "n.json", msgspec.structs.replace(capped(), host="knoten-ä1…"))
    done = subprocess.run(
        [sys.executable, "-m", "agent._launch", "check", "--from", path, "--only", CAPPED_ID,
         "--format", format],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"")
    if format == "json":
        assert "knoten-ä1…" in done.stdout.decode()
    else:
        assert done.stdout.isascii() and done.stdout.endswith(b"\n")


def test_quiet_says_nothing_of_a_fit_node(tmp_path: Path, capsys: Capture) -> None:
    fit = keep(tmp_path / "fit.json", node())
    bad = keep(tmp_path / "bad.json", capped())
    assert (
        run(["check", "--quiet", "--from", fit, "--only", CAPPED_ID, "--accept-unknown", "*"]) == 0
    )
    assert capsys.readouterr() == ("", "")
    assert run(["check", "--quiet", "--from", bad, "--only", CAPPED_ID]) == 1
    assert CAPPED_ID in capsys.readouterr().out


@pytest.mark.parametrize("format", ["text", "json", "prometheus", "nagios", "line"])
def test_output_writes_a_whole_file_and_nothing_else(
    format: str, tmp_path: Path, capsys: Capture
) -> None:
    path = keep(tmp_path / "n.json", capped())
    out = tmp_path / "out"
    argv = ["check", "--from", path, "--only", CAPPED_ID, "--format", format]
    assert run([*argv, "--output", str(out), "--color", "always"]) == 1
    assert capsys.readouterr().out == ""
    written = out.read_text()
    assert "\x1b" not in written
    assert run(argv) == 1
    assert capsys.readouterr().out == written
    assert [file.name for file in tmp_path.iterdir() if "tmp" in file.name] == []


def test_output_is_written_also_when_quiet(tmp_path: Path) -> None:
    path = keep(tmp_path / "n.json", node())
    out = tmp_path / "laggard.prom"
    argv = ["check", "--quiet", "--from", path, "--only", CAPPED_ID, "--format", "prometheus"]
    assert run([*argv, "--accept-unknown", "*", "--output", str(out)]) == 0
    assert 'laggard_health{state="ok"} 1' in out.read_text()


def test_an_output_that_can_not_be_written_is_3(tmp_path: Path, capsys: Capture) -> None:
    path = keep(tmp_path / "n.json", node())
    assert run(["check", "--from", path, "--output", str(tmp_path / "no" / "out")]) == 3
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("other", [["--from", "x"], ["--no-state"]])
def test_on_change_needs_a_last_run(other: list[str], capsys: Capture) -> None:
    assert run(["check", "--on-change", *other]) == 3
    assert "compares with this node's last run" in capsys.readouterr().err


# --- live, on whatever machine this is ---


FAST = ("--sample", "0")


def test_a_live_run_keeps_what_the_next_one_needs(tmp_path: Path, capsys: Capture) -> None:
    code, report = report_of(capsys, *FAST)
    assert code == exit_code(report.health)
    assert report.host == os.uname().nodename
    assert len(report.verdicts) >= 1
    assert sorted(os.listdir(tmp_path / "state")) == ["baseline.json", "check.lock"]


def test_no_state_keeps_nothing(tmp_path: Path, capsys: Capture) -> None:
    report_of(capsys, *FAST, "--no-state")
    assert not (tmp_path / "state").exists()


def test_a_state_that_can_not_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file" / "x"))
    code = run(["check", *FAST, "--format", "json"])
    captured, hint = capsys.readouterr(), "(--no-state: not tried)"
    assert code == exit_code(msgspec.json.decode(captured.out, type=Report).health)
    assert captured.err.splitlines() == [
        f"laggard: {tmp_path}/file/x: Not a directory; nothing is kept from run to run {hint}"
    ]


def test_on_change_tells_once(capsys: Capture) -> None:
    first = run(["check", *FAST, "--on-change", "--quiet"])
    capsys.readouterr()
    assert run(["check", *FAST, "--on-change", "--quiet"]) == first
    assert capsys.readouterr().out == ""
    run(["check", *FAST, "--on-change", "--format", "json"])
    assert capsys.readouterr().out == ""


def test_a_splay_is_bounded_and_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = keep(tmp_path / "n.json", node())
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for _ in range(20):
        run(["check", "--from", path, "--only", "nic.*", "--quiet", "--splay", "60"])
    assert len(waited) == 20
    assert all(0 <= seconds < 60 for seconds in waited)
    assert len(set(waited)) > 1


def test_a_mistake_is_told_before_any_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited"))
    assert run(["check", "--splay", "3600", "--only", "nonsense"]) == 3


HOLD = (
    "import sys; from pathlib import Path; from agent.lock import one_at_a_time\n"
    "with one_at_a_time(Path(sys.argv[1]), float(sys.argv[2])):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


@contextlib.contextmanager
def another_run(tmp_path: Path, deadline_s: float) -> Iterator[int]:
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "state"), str(deadline_s)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        time.sleep(0.05)
        yield child.pid
        child.kill()


@pytest.mark.parametrize(
    ("argv", "deadline_s", "code", "out", "err"),
    [
        ([], 20, 0, "", "laggard: another run is at work: pid {pid} ("),
        (["--quiet"], 20, 0, "", ""),
        ([], 0.01, 3, "", "laggard: another run is at work: pid {pid} ("),
        (["--quiet"], 0.01, 3, "", "laggard: another run is at work: pid {pid} ("),
        (["--exit-codes", "npd"], 0.01, 2, "", "laggard: another run is at work: pid {pid} ("),
        (["--exit-codes", "zero"], 0.01, 0, "", "laggard: another run is at work: pid {pid} ("),
        (["--format", "nagios"], 20, 0, "LAGGARD OK - another run is at work: pid {pid} (", ""),
        (["--format", "nagios"], 0.01, 3, "LAGGARD UNKNOWN - another run is at work: pid {pid} (", ""),
        (["--format", "line"], 0.01, 3, "unknown another run is at work: pid {pid}, since ", ""),
    ],
)  # fmt: skip
def test_a_run_that_finds_another_one_at_work_stands_back(
    argv: list[str], deadline_s: float, code: int, out: str, err: str,
    tmp_path: Path, capsys: Capture,
) -> None:  # fmt: skip
    with another_run(tmp_path, deadline_s) as pid:
        assert run(["check", *argv]) == code
    captured = capsys.readouterr()
    for text, expected in ((captured.out, out), (captured.err, err)):
        assert text.startswith(expected.format(pid=pid))
        assert bool(text) is bool(expected)
        if code == 3 and text and "line" not in argv:
            assert "it should have ended long ago" in text
        if text:
            assert re.search(r", since \d{4}-\d\d-\d\dT\S+Z \(\d+ s\)", text)
        if "line" in argv:
            assert len(text.rstrip().encode()) <= 80


def test_the_whole_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    environment = os.environ | {"STATE_DIRECTORY": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "-m", "agent._launch", "check", *FAST, "--format", "json"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[report["health"]]
    assert report["schema"] == "laggard.report/1"
    assert done.stderr == ""


def test_a_state_directory_that_hangs_ends_the_run_all_the_same(tmp_path: Path) -> None:
    """A FIFO in the place of the baseline stands for a read that never returns."""
    state = tmp_path / "state"
    state.mkdir()
    os.mkfifo(state / "baseline.json")
    program = (
        "import sys; from agent.cli import check; check._LAST_RESORT_S = 0.2\n"
        "from agent.cli import run; sys.exit(run(sys.argv[1:]))\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "check", "--sample", "0", "--deadline", "1.5"],
        env=os.environ | {"STATE_DIRECTORY": str(state)}, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == -14  # SIGALRM
    assert time.monotonic() - began < 10
