import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from agent.cli import COMMANDS, main, run
from agent.errors import LaggardError


def test_bare_laggard_names_the_five_situations(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line[:26].rstrip() for line in lines if line[:1].isalpha()][:5]
    assert heads == [
        "A node is suspect",
        "From cron",
        "A job hangs right now",
        "A replica is slow",
        "A ticket came with files",
    ]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("argv", [["--nonsense"], ["nonsense"], ["explain", "--nonsense"]])
def test_usage_errors_are_3_not_clicks_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 3
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--sample", "--deadline", "--splay"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf", "soon"])
def test_a_time_that_is_none_is_wrong_use(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", option, value]) == 3
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["check"], ["doctor"], ["snapshot", "record", "-o", "-"]])
def test_a_root_without_a_machine_is_wrong_use_not_a_fit_node(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        assert run([*argv, "--root", str(root)]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert f"--root {root}: neither proc nor sys stands there" in said.err


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"], ["explain", "--help"]])
def test_help_is_0(argv: list[str]) -> None:
    assert run(argv) == 0


def test_every_command_of_the_table_imports_and_has_help() -> None:
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert command is not None and command.help, name


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LaggardError("reading X: no", "do Y"), "laggard: reading X: no\n  do Y\n"),
        (KeyboardInterrupt(), "laggard: interrupted\n"),
        (RuntimeError("boom"), "laggard: this is a bug in laggard"),
    ],
    ids=["ours", "ctrl-c", "crash"],
)
def test_failures_are_3(
    error: BaseException,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(main, "invoke", lambda _context: fail())
    assert run(["explain"]) == 3
    assert text in capsys.readouterr().err


def test_a_closed_pipe_is_quiet() -> None:
    program = f"{sys.executable} -m agent._launch explain | true"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("argv", ["explain", "--help", "schema snapshot"])
def test_a_reader_that_has_gone_is_quiet_and_3(argv: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "agent._launch", *argv.split()], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.parametrize("argv", ["explain", "--help", "explain gpu.lost", "schema snapshot"])
def test_a_full_disk_behind_standard_output_is_told(argv: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "agent._launch", *argv.split()],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "laggard: writing standard output: No space left on device\n"


def test_a_caller_may_close_all_streams() -> None:
    program = f"{sys.executable} -m agent._launch explain gpu.lost <&- >&- 2>&-; echo $?"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, hint in (
        (["chekc"], "did you mean check?"),
        (["explain", "pcie.widht"], "did you mean pcie.width-trained-down"),
        (["explain", "nvlink"], "did you mean nvlink.down"),
        (["check", "--only", "pcie.widht"], "did you mean pcie.width-trained-down?"),
    ):
        assert run(argv) == 3
        assert hint in capsys.readouterr().err


def test_explain_finds_globs_and_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "pcie.*"]) == 0
    assert "pcie.width-trained-down\n=======" in capsys.readouterr().out
    assert run(["explain", "pcie.width-traind-down"]) == 3
    assert "did you mean pcie.width-trained-down" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["check --only ", "check --skip ", "explain ", "ack "])
def test_the_shell_completes_finding_ids(words: str) -> None:
    line = f"laggard {words}gpu.l"
    done = subprocess.run(
        [sys.executable, "-m", "agent._launch"],
        env=os.environ
        | {
            "_LAGGARD_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        },
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("plain,gpu.lost\n", "")
