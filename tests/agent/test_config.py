import os
from pathlib import Path

import pytest

from agent import config
from agent.cli import run
from agent.config import Config, check_ids, load_config, read_toml
from agent.errors import LaggardError
from probes.finding import Severity
from probes.registry import discover

OPTIONS = ("deadline", "exit-codes", "sample", "skip")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """site.toml, the user's and nothing else of this machine."""
    monkeypatch.setattr(config, "SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    for name in list(os.environ):
        if name.startswith("LAGGARD_"):
            monkeypatch.delenv(name)
    (tmp_path / "xdg" / "laggard").mkdir(parents=True)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, tuple[str, str]]:
    """name -> (value, origin) of `config show --origin`."""
    assert run(["config", "show", "--origin", *argv]) == 0
    found = {}
    for line in capsys.readouterr().out.splitlines():
        if " = " in line:
            setting, _, origin = line.partition("  # ")
            name, _, value = setting.strip().partition(" = ")
            found[name] = (value.strip(), origin.strip())
    return found


def test_each_later_place_wins_and_is_named(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys)["deadline"] == ("20.0", "default")
    site = write(places / "site.toml", "[check]\ndeadline = 30\nsample = 3\n")
    assert shown(capsys)["deadline"] == ("30.0", f"{site}: check.deadline")
    user = write(places / "xdg/laggard/config.toml", "[check]\ndeadline = 31\n")
    found = shown(capsys)
    assert found["deadline"] == ("31.0", f"{user}: check.deadline")
    assert found["sample"] == ("3.0", f"{site}: check.sample")  # the lower one shines through
    extra = write(places / "extra.toml", "[check]\ndeadline = 32\n")
    monkeypatch.setenv("LAGGARD_CONFIG", extra)
    assert shown(capsys)["deadline"] == ("32.0", f"{extra}: check.deadline")
    more = write(places / "more.toml", "[check]\ndeadline = 33\n")
    assert shown(capsys, "--config", more)["deadline"] == ("33.0", f"{more}: check.deadline")
    monkeypatch.setenv("LAGGARD_CHECK_DEADLINE", "34")
    assert shown(capsys)["deadline"] == ("34.0", "environment: LAGGARD_CHECK_DEADLINE")


def test_a_flag_wins_over_everything(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(places / "site.toml", '[check]\nskip = ["nonsense.*"]\n')
    monkeypatch.setenv("LAGGARD_CHECK_FORMAT", "json")
    assert run(["check", "--from", "/nonexistent"]) == 3
    assert "--skip nonsense.*: there is no finding called so" in capsys.readouterr().err
    assert run(["check", "--from", "/nonexistent", "--skip", "nic.*"]) == 3
    assert "reading /nonexistent" in capsys.readouterr().err


def test_nothing_is_read_from_the_current_directory(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (places / "laggard").mkdir()
    for name in ("config.toml", "laggard.toml", ".laggard.toml", "laggard/config.toml"):
        write(places / name, "[check]\ndeadline = 99\n")
    monkeypatch.chdir(places)
    monkeypatch.setenv("XDG_CONFIG_HOME", ".")  # relative: to be ignored
    monkeypatch.setenv("HOME", str(places / "home"))
    assert shown(capsys)["deadline"] == ("20.0", "default")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[chekc]\na = 1\n", "chekc: no such section", "did you mean check?"),
        ("[check]\ndedline = 1\n", "check.dedline: no such option of `laggard check`",
         "did you mean deadline?"),
        ("check = 3\n", "check is to be a table, not 3", ""),
        ('[probes."power.limit-low"]\nseverty = "info"\n',
         'probes."power.limit-low".severty: no such setting of a finding', "did you mean severity?"),
        ('[probes."power.limit-low"]\nseverity = "loud"\n',
         "probes.\"power.limit-low\".severity = 'loud': not a severity",
         "info, warning or critical"),
        ('[probes."power.limit-low"]\nlimits.watts = "5"\n',
         "probes.\"power.limit-low\".limits.watts = '5': not a number", ""),
        ('[probes."power.limit-low"]\nlimits.watts = true\n',
         'probes."power.limit-low".limits.watts = True: not a number', ""),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_file_key_and_the_nearest_name(
    text: str, message: str, hint: str, places: Path
) -> None:
    path = write(places / "site.toml", text)
    with pytest.raises(LaggardError) as error:
        load_config(None, OPTIONS)
    assert (error.value.message, error.value.hint) == (f"{path}: {message}", hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[check]\ndeadline = "soon"\n', "check.deadline = 'soon': 'soon' is not a valid float range."),
        ('[check]\nexit-codes = "loud"\n', "check.exit-codes = 'loud': 'loud' is not one of"),
        ("[check]\nsample = -1\n", "check.sample = -1: -1.0 is not in the range"),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_with_file_and_key(
    text: str, message: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(places / "site.toml", text)
    assert run(["check"]) == 3
    assert f"laggard: {path}: {message}" in capsys.readouterr().err


def test_ids_and_thresholds_that_no_probe_has_are_refused(places: Path) -> None:
    probes = {probe.id: probe for probe in discover()}
    some = next(probe for probe in probes.values() if probe.limits)
    name = next(iter(some.limits))
    path = write(
        places / "site.toml",
        f'[probes."{some.id}"]\nseverity = "info"\nlimits.{name} = 7\n',
    )
    good = load_config(None, OPTIONS)
    check_ids(good, probes)
    assert good.limits[some.id][name].value == 7.0
    assert good.severities[some.id].value is Severity.INFO
    for text, message in (
        (f'[probes."{some.id}x"]\nseverity = "info"\n', f"there is no finding called '{some.id}x'"),
        (f'[probes."{some.id}"]\nlimits.{name}x = 7\n',
         f"there is no threshold of {some.id} called '{name}x'"),
    ):  # fmt: skip
        write(places / "site.toml", text)
        with pytest.raises(LaggardError) as error:
            check_ids(load_config(None, OPTIONS), probes)
        assert error.value.message.startswith(f"{path}: probes.")
        assert message in error.value.message
        assert f"did you mean {some.id if 'finding' in message else name}" in error.value.hint


def test_later_files_add_to_what_earlier_ones_say_of_a_finding(places: Path) -> None:
    write(places / "site.toml", '[probes."a.b"]\nseverity = "info"\nlimits.x = 1\nlimits.y = 1\n')
    user = write(places / "xdg/laggard/config.toml", '[probes."a.b"]\nlimits.y = 2\n')
    found = load_config(None, OPTIONS)
    assert {name: limit.value for name, limit in found.limits["a.b"].items()} == {
        "x": 1.0,
        "y": 2.0,
    }
    assert found.limits["a.b"]["y"].origin == f'{user}: probes."a.b".limits.y'
    assert found.severities["a.b"].value is Severity.INFO


def test_a_named_file_must_be_there_a_usual_one_need_not(places: Path) -> None:
    assert load_config(None, OPTIONS) == Config()
    with pytest.raises(LaggardError, match=r"reading /nonexistent: No such file or directory"):
        load_config("/nonexistent", OPTIONS)


def test_a_usual_file_that_can_not_be_read_is_left_out_and_told(places: Path) -> None:
    (places / "site.toml").mkdir()
    found = load_config(None, OPTIONS)
    assert found.problems == [f"{places / 'site.toml'}: Is a directory; it is left out"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_does_not_steer_this_run(places: Path) -> None:
    path = write(places / "xdg/laggard/config.toml", "[check]\ndeadline = 31\n")
    os.chown(path, 12345, 12345)
    found = load_config(None, OPTIONS)
    assert found.check == {}
    assert found.problems == [
        f"{path}: it belongs to user id 12345, who could set what this run does; it is left out"
    ]


@pytest.mark.parametrize("data", [b"a = ", b"\xff", b"a = 1\na = 2\n"])
def test_what_is_no_toml_is_told_with_its_name(data: bytes, places: Path) -> None:
    path = places / "x.toml"
    path.write_bytes(data)
    with pytest.raises(LaggardError, match="is no TOML"):
        read_toml(str(path))
