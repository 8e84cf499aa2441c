from typing import Any

import msgspec

from agent.change import LastRun, Seen, change_lines, change_since
from probes.finding import Severity
from probes.result import Acknowledged, Health, Outcome, ProbeResult, Report
from tests.support.reports import CAP, NARROW, OFF_BUS, faulty, healthy


def after(report: Report) -> LastRun:
    return change_since(None, report).kept


def lines(last: LastRun | None, report: Report) -> list[str]:
    change = change_since(last, report)
    return list(change_lines(change, "n44")) if change.anything else []


def judged(**outcomes: Outcome) -> tuple[ProbeResult, ...]:
    names = {"off_bus": OFF_BUS.id, "narrow": NARROW.id, "cap": CAP.id}
    given = dict.fromkeys(names, Outcome.PASS) | outcomes
    return tuple(ProbeResult(id=names[name], outcome=outcome) for name, outcome in given.items())


LOUD: dict[str, Any] = {"acknowledged": ()}


def test_a_first_run_tells_what_is_wrong_and_nothing_when_nothing_is() -> None:
    assert lines(None, healthy()) == []
    assert lines(None, faulty(**LOUD)) == [
        "n44: critical (first run)",
        "new      critical  xid.off-bus  GPU 0000:3b:00.0 has fallen off the bus (Xid 79)",
        "new      warning  pcie.width-trained-down  GPU 0000:88:00.0 link is x8, slot supports x16",
        "new      info  power.limit-low  GPU 0000:89:00.0 is capped at 350 W, default 400 W",
    ]
    assert lines(None, healthy(health=Health.UNKNOWN)) == ["n44: unknown (first run)"]


def test_the_same_again_is_silent() -> None:
    assert lines(after(faulty(**LOUD)), faulty(**LOUD)) == []


def test_what_has_cleared_is_told() -> None:
    now = faulty(findings=(OFF_BUS,), results=judged(off_bus=Outcome.FAIL), **LOUD)
    assert lines(after(faulty(**LOUD)), now) == [
        "n44: still critical",
        "cleared  warning  pcie.width-trained-down  was: GPU 0000:88:00.0 link is x8, slot supports x16",
        "cleared  info  power.limit-low  was: GPU 0000:89:00.0 is capped at 350 W, default 400 W",
    ]


def test_what_can_not_be_judged_now_has_not_cleared_and_is_not_new_later() -> None:
    blind = healthy(health=Health.UNKNOWN, results=judged(off_bus=Outcome.UNKNOWN))
    first = after(faulty(findings=(OFF_BUS,), **LOUD))
    assert lines(first, blind) == [
        "n44: critical -> unknown",
        f"unknown  critical  xid.off-bus  can't be judged now, was: {OFF_BUS.summary}",
    ]
    second = change_since(first, blind).kept
    assert lines(second, faulty(findings=(OFF_BUS,), **LOUD)) == ["n44: unknown -> critical"]
    assert lines(second, healthy(results=judged())) == [
        "n44: unknown -> ok",
        "cleared  critical  xid.off-bus  was: GPU 0000:3b:00.0 has fallen off the bus (Xid 79)",
    ]


def test_a_rule_that_was_not_asked_has_not_cleared() -> None:
    part = healthy(results=judged(off_bus=Outcome.NOTSELECTED))
    change = change_since(after(faulty(findings=(OFF_BUS,), **LOUD)), part)
    assert (change.cleared, [seen.id for seen in change.unseen]) == ((), ["xid.off-bus"])


def test_a_finding_that_got_worse_is_told() -> None:
    worse = msgspec.structs.replace(NARROW, severity=Severity.CRITICAL)
    before = after(faulty(findings=(NARROW,), health=Health.WARNING, **LOUD))
    assert lines(before, faulty(findings=(worse,), **LOUD)) == [
        "n44: warning -> critical",
        "worse    critical  pcie.width-trained-down  GPU 0000:88:00.0 link is x8, slot supports x16",
    ]


def test_a_known_fault_is_silent_and_new_when_the_day_has_passed() -> None:
    known = {
        "health": Health.OK,
        "findings": (NARROW,),
        "acknowledged": (
            Acknowledged(
                fingerprint=NARROW.fingerprint, id=NARROW.id, until="2026-02-01", reason="r"
            ),
        ),
    }
    first = after(faulty(**known))
    assert lines(None, faulty(**known)) == []
    assert lines(first, faulty(**known)) == []
    assert lines(first, faulty(**(known | LOUD | {"health": Health.WARNING}))) == [
        "n44: ok -> warning",
        "new      warning  pcie.width-trained-down  GPU 0000:88:00.0 link is x8, slot supports x16",
    ]
    # and acknowledging one is no clearing
    assert change_since(after(faulty(findings=(NARROW,), **LOUD)), faulty(**known)).cleared == ()


def test_what_is_only_worth_knowing_is_kept_and_not_told_when_quiet() -> None:
    info = faulty(findings=(CAP,), health=Health.OK, **LOUD)
    first = change_since(None, info, Severity.WARNING)
    assert not first.anything
    assert [seen.id for seen in first.kept.findings] == [CAP.id]
    assert not change_since(first.kept, healthy(results=judged()), Severity.WARNING).anything
    assert change_since(first.kept, healthy(results=judged())).anything


def test_what_is_kept_reads_back() -> None:
    kept = after(faulty())
    assert msgspec.json.decode(msgspec.json.encode(kept), type=LastRun) == kept
    assert kept.findings[1] == Seen(
        fingerprint=NARROW.fingerprint,
        id=NARROW.id,
        severity=Severity.WARNING,
        component="0000:88:00.0",
        summary=NARROW.summary,
        quiet=True,
    )
