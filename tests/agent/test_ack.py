from datetime import date
from pathlib import Path

import pytest

from agent.ack import Ack, acknowledged, day_of, names_of, read_acks
from agent.build_report import build_report
from agent.cli import run
from agent.evaluate import Evaluation
from agent.state import State
from probes.finding import Component, JobImpact
from probes.gap import Gap, GapReason
from probes.registry import discover
from probes.result import Acknowledged, Health
from tests.support.nodes import node
from tests.support.reports import CAP, NARROW, OFF_BUS

ID = NARROW.id
FINDINGS = (OFF_BUS, NARROW, CAP)


def ack(**changes: str | None) -> Ack:
    fields: dict[str, str | None] = {
        "id": ID, "component": "0000:88:00.0", "until": "2026-01-31", "reason": "ordered",
        "added_at": "2026-01-01",
    }  # fmt: skip
    return Ack(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "day", "quiet"),
    [
        ({}, date(2026, 1, 1), True),
        ({}, date(2026, 1, 31), True),  # that day still
        ({}, date(2026, 2, 1), False),
        ({"component": None}, date(2026, 1, 1), True),
        ({"component": "0000:17:00.0"}, date(2026, 1, 1), False),
        ({"id": "xid.off-bus", "component": "gpu-ed3baabb-0000-0000-0000-000000000000"},
         date(2026, 1, 1), True),
        ({"id": "xid.any", "component": None}, date(2026, 1, 1), False),
    ],
)  # fmt: skip
def test_it_holds_for_its_finding_part_and_days(
    changes: dict[str, str | None], day: date, quiet: bool
) -> None:
    assert bool(acknowledged(FINDINGS, (ack(**changes),), day)) is quiet


def test_a_part_has_many_names() -> None:
    port = Component(type="nic", host="N44", device="mlx5_0", port=1, pci="0000:1A:00.0")
    assert names_of(port) == {"mlx5_0/1", "mlx5_0", "n44", "0000:1a:00.0"}
    link = Component(type="nvlink", pci="0000:17:00.0", link=3)
    assert names_of(link) == {"0000:17:00.0 link 3", "0000:17:00.0"}


def test_a_known_fault_stays_listed_and_counts_for_nothing() -> None:
    evaluation = Evaluation(results=(), findings=FINDINGS, health=Health.CRITICAL)
    acks = (ack(), ack(id=OFF_BUS.id, component=None, reason="RMA 4711"))
    report = build_report(node(), evaluation, acks=acks)
    assert report.findings == FINDINGS
    assert (report.health, report.job_impact) == (Health.OK, JobImpact.NONE)
    assert [verdict.code for verdict in report.verdicts] == ["node.fit"]
    assert report.acknowledged == (
        Acknowledged(fingerprint=OFF_BUS.fingerprint, id=OFF_BUS.id, until="2026-01-31",
                     reason="RMA 4711"),
        Acknowledged(fingerprint=NARROW.fingerprint, id=ID, until="2026-01-31", reason="ordered"),
    )  # fmt: skip
    assert report.taken_at == "2026-01-01T00:00:00Z"


def test_one_known_fault_leaves_the_others_alarming() -> None:
    evaluation = Evaluation(results=(), findings=FINDINGS, health=Health.CRITICAL)
    report = build_report(node(), evaluation, acks=(ack(id=OFF_BUS.id, component=None),))
    assert (report.health, report.job_impact) == (Health.WARNING, JobImpact.SLOWS)
    assert report.verdicts[0].code == ID


def test_a_known_fault_does_not_hide_that_something_could_not_be_read() -> None:
    evaluation = Evaluation(results=(), findings=(NARROW,), health=Health.WARNING, hidden=True)
    report = build_report(node(), evaluation, acks=(ack(),))
    assert (report.health, report.verdicts[0].code) == (Health.UNKNOWN, "node.cannot-tell")


def test_unsupported_gaps_are_shown_on_request_only() -> None:
    gaps = tuple(
        Gap(source="nvml", reason=reason) for reason in (GapReason.UNSUPPORTED, GapReason.DENIED)
    )
    evaluation = Evaluation(results=(), findings=(), health=Health.OK)
    short = build_report(node(gaps=gaps), evaluation)
    long = build_report(node(gaps=gaps), evaluation, verbose=True)
    assert [gap.reason for gap in short.gaps] == [GapReason.DENIED]
    assert len(long.gaps) == 2


# --- the command ---


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("USER", "ann")
    monkeypatch.delenv("SUDO_USER", raising=False)
    return State(tmp_path)


def known_id() -> str:
    return discover()[0].id


def test_add_list_replace_and_remove(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    id = known_id()
    assert run(["ack", id, "0000:AB:00.0", "--until", "2100-01-31", "--reason", "riser"]) == 0
    assert run(["ack", id, "--until", "2100-02-28", "--reason", "all of them"]) == 0
    assert run(["ack", id, "0000:ab:00.0", "--until", "2100-03-31", "--reason", "later"]) == 0
    today = read_acks(state)[0].added_at
    assert capsys.readouterr().out.splitlines() == [
        f"{id} on 0000:ab:00.0 is quiet through 2100-01-31 (UTC)",
        f"{id} on every part is quiet through 2100-02-28 (UTC)",
        f"{id} on 0000:ab:00.0 is quiet through 2100-03-31 (UTC)",
    ]
    assert run(["ack", "--list"]) == 0
    assert capsys.readouterr().out == (
        f"{id}  until 2100-02-28: all of them (ann, {today})\n"
        f"{id} 0000:ab:00.0  until 2100-03-31: later (ann, {today})\n"
    )
    assert run(["ack", "--remove", id, "00000000:AB:00.0"]) == 0
    assert capsys.readouterr().out == f"{id} on 0000:ab:00.0 alarms again\n"
    assert [item.component for item in read_acks(state)] == [None]
    assert run(["ack", "--remove", id, "0000:ab:00.0"]) == 3
    assert "is not acknowledged" in capsys.readouterr().err


def test_an_expired_one_is_listed_as_such(state: State, capsys: pytest.CaptureFixture[str]) -> None:
    state.write("acks.json", (ack(),))
    assert run(["ack", "--list"]) == 0
    assert capsys.readouterr().out == (
        f"{ID} 0000:88:00.0  expired on 2026-01-31: ordered (2026-01-01)\n"
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["ack"], "Missing argument 'ID'"),
        (
            ["ack", "no.such", "--until", "2100-01-01", "--reason", "r"],
            "there is no finding called so",
        ),
        (["ack", "*", "--until", "2100-01-01", "--reason", "r"], "one finding at a time"),
        (["ack", "{id}", "--until", "soon", "--reason", "r"], "a date like 2027-01-31 is needed"),
        (["ack", "{id}", "--until", "2020-01-01", "--reason", "r"], "that day has passed"),
        (["ack", "{id}", "--until", "2100-01-01"], "--until and --reason are needed"),
        (
            ["ack", "{id}", "--until", "2100-01-01", "--reason", " "],
            "--until and --reason are needed",
        ),
        (["ack", "{id}", "", "--until", "2100-01-01", "--reason", "r"], "COMPONENT is empty"),
        (["ack", "{id}", "--reason", "r"], "--until and --reason are needed"),
    ],
)
def test_wrong_use_is_3(
    argv: list[str], said: str, state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([part.format(id=known_id()) for part in argv]) == 3
    assert said in capsys.readouterr().err
    assert read_acks(state) == ()


def test_it_is_an_error_when_it_can_not_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "file" / "x"))
    assert run(["ack", known_id(), "--until", "2100-01-01", "--reason", "r"]) == 3
    assert "Not a directory" in capsys.readouterr().err


def test_a_corrupt_list_is_never_overwritten_by_a_new_entry(
    state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    assert state.directory is not None
    path = state.directory / "acks.json"
    path.write_text("{")
    assert run(["ack", known_id(), "--until", "2100-01-01", "--reason", "r"]) == 3
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == "{"


def test_a_day_is_utc() -> None:
    assert day_of(1_767_225_599_000_000_000) == date(2025, 12, 31)
