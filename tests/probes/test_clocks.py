"""Clocks that are low without a reason, memory clocks, application clocks."""

from __future__ import annotations

import msgspec

from probes.finding import Basis, Confidence, FaultClass, Severity
from probes.gap import GapReason
from probes.result import Outcome
from tests.support.gpus import PCI, eight, findings, found, gaps, h100, node, rtx4090, run

LOW = "clocks.low-without-reason"
MEMORY = "clocks.memory-low"


def test_low_sm_clock_under_load_without_a_reason():
    locked = h100(3, busy=True, reading={"sm_clock_mhz": 1200, "power_mw": 341_000})
    (finding,) = findings(eight({3: locked}))
    assert finding.id == LOW
    assert finding.summary == (
        "GPU 0000:61:00.0 runs SM 1200 MHz under load without a reason; 7 loaded siblings run "
        "1980 MHz"
    )
    assert (finding.confidence, finding.fault_class) == (
        Confidence.LIKELY,
        FaultClass.CONFIGURATION,
    )
    clock, mask = finding.evidence
    assert clock.expected is not None
    assert (clock.observed, clock.expected.value, clock.expected.basis) == (
        1200,
        1980,
        Basis.PEER_MEDIAN,
    )
    assert mask.observed == "0x0"


def test_all_siblings_locked_low_show_against_the_customer_boost_clock():
    snapshot = node(h100(i, busy=True, reading={"sm_clock_mhz": 1410}) for i in range(8))
    found_here = findings(snapshot)
    assert [f.id for f in found_here] == [LOW] * 8
    assert {f.confidence for f in found_here} == {Confidence.POSSIBLE}
    assert found_here[0].summary.endswith("the part's maximum is 1980 MHz")
    assert found_here[0].evidence[0].expected is not None
    assert found_here[0].evidence[0].expected.basis is Basis.DEVICE_MAX


def test_stuck_in_a_resting_p_state_under_load():
    stuck = rtx4090(busy=True)
    stuck = msgspec.structs.replace(
        stuck,
        readings=tuple(
            msgspec.structs.replace(r, pstate=8, sm_clock_mhz=210, mem_clock_mhz=405)
            for r in stuck.readings
        ),
    )
    sm, memory = findings(node([stuck]))
    assert (sm.id, sm.confidence) == (LOW, Confidence.LIKELY)
    assert "in resting P-state P8; the part's maximum is 3105 MHz" in sm.summary
    assert sm.explains == (memory.id,) == (MEMORY,)


def test_low_clocks_at_rest_and_geforce_below_its_nominal_maximum_are_no_fault():
    assert findings(node([h100(0)])) == []
    assert findings(node([rtx4090()])) == []
    assert findings(node([rtx4090(busy=True)])) == []


def test_low_clocks_that_the_driver_times_as_little_work_are_no_fault():
    light = h100(
        3, busy=True, reading={"sm_clock_mhz": 1200},
        readings=[{}, {"violation_low_utilization_ns": 1_500_000_000}],
    )  # fmt: skip
    assert findings(eight({3: light})) == []


def test_low_clocks_with_a_reason_are_left_to_that_reason():
    held = h100(3, busy=True, reading={"sm_clock_mhz": 1200, "clocks_event_reasons": 0x2})
    assert findings(eight({3: held}), LOW) == []


def test_a_siblings_lower_power_limit_is_no_measure():
    limit = {"power_limit_enforced_mw": 500_000, "power_limit_mw": 500_000}
    own = h100(3, busy=True, limits=limit, reading={"sm_clock_mhz": 1755})
    assert LOW not in [f.id for f in findings(eight({3: own}))]


def test_load_that_could_not_be_read_is_never_clear():
    blind = h100(3, busy=True, reading={"utilization_gpu_percent": None})
    snapshot = eight({3: blind}, gaps=gaps("utilization_gpu_percent", reason=GapReason.TIMEOUT))
    for probe_id in (LOW, MEMORY):
        result = run(probe_id, snapshot)
        assert (result.outcome, result.judged) == (Outcome.UNKNOWN, 7)


def test_memory_clock_below_siblings():
    slow = h100(1, busy=True, reading={"mem_clock_mhz": 1593})
    (finding,) = findings(eight({1: slow}))
    assert finding.summary == (
        "GPU 0000:43:00.0 memory clock 1593 MHz under load in P0, the part runs 2619"
    )
    assert finding.id == MEMORY


def test_geforce_memory_in_p2_is_below_its_maximum_by_design():
    result = run(MEMORY, node([rtx4090(busy=True)]))
    assert result.outcome is Outcome.PASS
    assert result.notes == ("0000:1b:00.0: P2 under CUDA: memory below its maximum by design",)


def test_geforce_siblings_are_the_measure_in_p2():
    odd = rtx4090(1, busy=True)
    odd = msgspec.structs.replace(
        odd, readings=tuple(msgspec.structs.replace(r, mem_clock_mhz=5001) for r in odd.readings)
    )
    snapshot = node([rtx4090(0, busy=True), odd, rtx4090(2, busy=True)])
    assert found(snapshot) == [(MEMORY, PCI[1])]


def test_application_clocks_below_the_default_are_info():
    held = h100(
        4,
        busy=True,
        limits={"sm_application_clock_mhz": 1410, "mem_application_clock_mhz": 1593},
        reading={"sm_clock_mhz": 1410, "clocks_event_reasons": 0x2},
    )
    (finding,) = findings(eight({4: held}))
    assert finding.id == "clocks.application-clocks"
    assert finding.severity is Severity.INFO
    assert finding.summary == (
        "GPU 0000:9d:00.0 application clocks set low: SM 1410 MHz, default 1980, memory 1593 MHz, "
        "default 2619"
    )


def test_drivers_without_application_clocks_are_not_judged():
    newer = [
        h100(i, limits={"sm_application_clock_mhz": None, "mem_application_clock_mhz": None})
        for i in range(2)
    ]
    snapshot = node(newer, gaps=gaps("sm_application_clock_mhz", reason=GapReason.UNSUPPORTED))
    assert run("clocks.application-clocks", snapshot).outcome is Outcome.NOTAPPLICABLE
