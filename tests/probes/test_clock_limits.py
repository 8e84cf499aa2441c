"""Power cap, sync boost, board and reliability limits, unknown reasons."""

from __future__ import annotations

import pytest

from probes.finding import Basis, Confidence, FaultClass, Severity
from probes.gap import GapReason
from probes.result import Outcome
from probes.snapshot.manifest import Manifest
from tests.support.gpus import PCI, eight, findings, found, gaps, h100, node, run

CAP = "clocks.sw-power-cap"
CAPPED = {"clocks_event_reasons": 0x4, "sm_clock_mhz": 1755, "power_mw": 697_000}
MOVING = [{"violation_power_ns": 0}, {"violation_power_ns": 1_800_000_000}]


def capped(index, **changes):
    reading = {**CAPPED, **changes.pop("reading", {})}
    return h100(index, busy=True, reading=reading, readings=MOVING, **changes)


def test_power_cap_at_full_load_everywhere_is_the_design_point():
    clocks = (1755, 1740, 1770, 1755, 1785, 1740, 1755, 1770)
    snapshot = node(capped(i, reading={"sm_clock_mhz": clock}) for i, clock in enumerate(clocks))
    assert findings(snapshot) == []
    assert run(CAP, snapshot).notes[0] == (
        "0000:1b:00.0: power cap at full load is the design point"
    )


def test_capped_by_a_limit_that_was_lowered_on_one_gpu():
    limit = {"power_limit_mw": 500_000, "power_limit_enforced_mw": 500_000}
    odd = capped(2, limits=limit, reading={"power_mw": 498_600, "sm_clock_mhz": 1545})
    assert found(eight({2: odd})) == [(CAP, PCI[2]), ("power.limit-low", PCI[2])]
    finding = next(f for f in findings(eight({2: odd})) if f.id == CAP)
    assert finding.summary == (
        "GPU 0000:52:00.0 under software power cap 90 % of 2.0 s: SM 1545 MHz of 1980; "
        "limit 500 W, expected 700 W"
    )
    assert (finding.severity, finding.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)
    assert finding.evidence[-1].expected is not None
    assert finding.evidence[-1].expected.value == 700_000


def test_the_same_lowered_limit_on_every_gpu_is_info():
    limit = {"power_limit_mw": 500_000, "power_limit_enforced_mw": 500_000}
    snapshot = node(capped(i, limits=limit, reading={"power_mw": 498_000}) for i in range(8))
    assert {f.severity for f in findings(snapshot)} == {Severity.INFO}
    assert {f.id for f in findings(snapshot)} == {CAP, "power.limit-low"}


def test_capped_far_below_the_limit_by_something_that_nvml_does_not_show():
    odd = capped(2, reading={"power_mw": 240_000, "sm_clock_mhz": 900})
    (finding,) = findings(eight({2: odd}), CAP)
    assert finding.summary.endswith("; draws 240 W of 700 W")
    assert finding.confidence is Confidence.PROVEN


def test_bursts_up_to_the_limit_with_lulls_between_are_no_hidden_cap():
    half = [{"violation_power_ns": 0}, {"violation_power_ns": 1_100_000_000}]
    bursts = h100(
        2, busy=True, readings=half,
        reading={**CAPPED, "power_mw": 460_000, "sm_clock_mhz": 1755},
    )  # fmt: skip
    assert findings(eight({2: bursts})) == []


def test_a_grace_module_shares_its_power():
    odd = capped(2, c2c_enabled=True, reading={"power_mw": 500_000})
    assert findings(eight({2: odd}), CAP) == []


def test_a_limit_that_the_manifest_expects_is_no_lowered_one():
    limit = {"power_limit_mw": 500_000, "power_limit_enforced_mw": 500_000}
    gpus = (capped(i, limits=limit, reading={"power_mw": 498_000}) for i in range(8))
    assert findings(node(gpus, manifest=Manifest(gpu_power_limit_w=500))) == []


def test_far_slower_than_siblings_at_the_same_power_is_possible_only():
    gpus = [capped(i) for i in range(7)] + [capped(7, reading={"sm_clock_mhz": 1410})]
    (finding,) = findings(node(gpus))
    assert (finding.id, finding.component.pci) == (CAP, PCI[7])
    assert finding.confidence is Confidence.POSSIBLE
    assert finding.summary.endswith("; 7 siblings run 1755 MHz at the same 697 W")


def test_capped_while_siblings_draw_less_is_more_work():
    assert findings(eight({7: capped(7, reading={"sm_clock_mhz": 1410})})) == []


def test_power_cap_bit_at_rest():
    starting = h100(6, reading={"clocks_event_reasons": 0x5}, readings=MOVING)
    assert findings(eight({6: starting})) == []
    assert run(CAP, eight({6: starting})).notes[-1] == (
        "0000:d1:00.0: power cap bit at rest: nothing is slowed"
    )


@pytest.mark.parametrize(
    ("probe_id", "bit", "counter"),
    [
        ("clocks.board-limit", 0x200, "violation_board_limit_ns"),
        ("clocks.reliability", 0x400, "violation_reliability_ns"),
    ],
)
def test_a_limit_with_a_lower_clock_than_siblings(probe_id, bit, counter):
    held = h100(
        1,
        busy=True,
        reading={"clocks_event_reasons": bit, "sm_clock_mhz": 1410},
        readings=[{counter: 0}, {counter: 1_800_000_000}],
    )
    (finding,) = findings(eight({1: held}))
    assert (finding.id, finding.severity) == (probe_id, Severity.WARNING)
    assert "90 % of 2.0 s: SM 1410 MHz of 1980, 7 loaded siblings 1980" in finding.summary


@pytest.mark.parametrize(
    ("bit", "counter"),
    [(0x200, "violation_board_limit_ns"), (0x400, "violation_reliability_ns")],
)
def test_a_limit_at_full_clock_is_where_every_part_ends_up(bit, counter):
    held = h100(
        1,
        busy=True,
        reading={"clocks_event_reasons": bit},
        readings=[{counter: 0}, {counter: 1_990_000_000}],
    )
    assert findings(eight({1: held})) == []


def test_sync_boost_is_judged_by_the_maximum_because_it_lowers_the_whole_group():
    moving = [{"violation_sync_boost_ns": 0}, {"violation_sync_boost_ns": 2_000_000_000}]
    reading = {"clocks_event_reasons": 0x10, "sm_clock_mhz": 1500}
    slow = node(h100(i, busy=True, reading=reading, readings=moving) for i in range(4))
    assert [f.id for f in findings(slow)] == ["clocks.sync-boost"] * 4
    reading = {"clocks_event_reasons": 0x10, "sm_clock_mhz": 1965}
    fast = node(h100(i, busy=True, reading=reading, readings=moving) for i in range(4))
    assert findings(fast) == []


def test_unknown_reason_bits_are_shown_raw():
    newer = h100(6, busy=True, reading={"clocks_event_reasons": 0x4000})
    (finding,) = findings(eight({6: newer}))
    assert finding.summary == (
        "GPU 0000:d1:00.0 has clock reason bits unknown to laggard: 0x4000 (all 0x4000)"
    )
    assert (finding.severity, finding.fault_class) == (Severity.INFO, FaultClass.CANNOT_TELL)


def test_unknown_reason_bits_with_a_low_clock_are_a_warning():
    newer = h100(6, busy=True, reading={"clocks_event_reasons": 0x4000, "sm_clock_mhz": 1400})
    (finding,) = findings(eight({6: newer}))
    assert finding.severity is Severity.WARNING
    assert finding.summary.endswith("; SM 1400 MHz, siblings 1980")
    assert finding.evidence[-1].expected is not None
    assert finding.evidence[-1].expected.basis is Basis.PEER_MEDIAN


def test_without_the_mask_unknown_reasons_can_not_be_judged():
    blind = h100(6, busy=True, reading={"clocks_event_reasons": None})
    snapshot = eight({6: blind}, gaps=gaps("clocks_event_reasons", reason=GapReason.TIMEOUT))
    assert run("clocks.unknown-reason", snapshot).outcome is Outcome.UNKNOWN
