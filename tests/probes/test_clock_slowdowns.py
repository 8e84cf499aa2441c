"""Thermal slowdown, power brake, hardware slowdown: duty cycle, cost, and what is no fault."""

from __future__ import annotations

import pytest

from probes.finding import Basis, Confidence, FaultClass, Severity
from probes.gap import GapReason
from probes.result import Outcome
from tests.support.gpus import (
    HOST,
    PCI,
    eight,
    findings,
    found,
    gaps,
    gpu_counters,
    h100,
    last_run,
    node,
    run,
)

HW = "clocks.hw-thermal-slowdown"
SW = "clocks.sw-thermal-slowdown"
BRAKE = "clocks.hw-power-brake"
UMBRELLA = "clocks.hw-slowdown"


def test_hardware_thermal_slowdown_as_share_of_time_with_its_cost():
    hot = h100(
        5,
        busy=True,
        reading={"clocks_event_reasons": 0x48, "sm_clock_mhz": 1410, "temperature_c": 88},
        readings=[{"reason_hw_thermal_ns": 2_200_000_000}, {"reason_hw_thermal_ns": 3_400_000_000}],
    )
    (finding,) = findings(eight({5: hot}), HW)
    assert finding.summary == (
        "GPU 0000:c3:00.0 under hardware thermal slowdown 60 % of 2.0 s: SM 1410 MHz of 1980, "
        "7 loaded siblings 1980"
    )
    assert (finding.severity, finding.confidence) == (Severity.WARNING, Confidence.PROVEN)
    assert finding.fault_class is FaultClass.HARDWARE
    assert finding.component.pci == PCI[5]
    duty, mask, clock, heat, memory = finding.evidence
    assert (duty.locator, duty.observed, duty.unit) == (
        "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
        60.0,
        "% of the sample",
    )
    assert mask.observed == "0x48"
    assert clock.expected is not None
    assert (clock.observed, clock.expected.value, clock.expected.basis) == (
        1410,
        1980,
        Basis.PEER_MEDIAN,
    )
    assert heat.expected is not None
    assert (heat.observed, heat.expected.value, heat.expected.basis) == (
        88,
        87,
        Basis.VENDOR_LIMIT,
    )
    assert memory.locator == "NVML_FI_DEV_MEMORY_TEMP"
    assert all(evidence.recheck for evidence in finding.evidence)


def test_one_slowed_gpu_is_the_only_one_named():
    hot = h100(
        5, busy=True, reading={"clocks_event_reasons": 0x48, "sm_clock_mhz": 1410},
        readings=[{}, {"reason_hw_thermal_ns": 10**9}],
    )  # fmt: skip
    assert found(eight({5: hot})) == [(HW, PCI[5])]


def test_without_siblings_the_maximum_is_the_measure():
    hot = h100(
        0, busy=True, reading={"clocks_event_reasons": 0x48, "sm_clock_mhz": 990},
        readings=[{}, {"reason_hw_thermal_ns": 2 * 10**9}],
    )  # fmt: skip
    (finding,) = findings(node([hot]), HW)
    assert finding.summary == (
        "GPU 0000:1b:00.0 under hardware thermal slowdown 100 % of 2.0 s: SM 990 MHz of 1980"
    )


def test_one_reading_says_active_now_and_no_more():
    hot = h100(3, busy=True, samples=1, reading={"clocks_event_reasons": 0x40})
    (finding,) = findings(eight({3: hot}), HW)
    assert finding.confidence is Confidence.POSSIBLE
    assert "now (for how long is unknown)" in finding.summary


def test_bits_in_both_readings_count_where_the_counter_stands_still_at_zero():
    hot = h100(3, busy=True, reading={"clocks_event_reasons": 0x40, "sm_clock_mhz": 1200})
    (finding,) = findings(eight({3: hot}), HW)
    assert finding.confidence is Confidence.LIKELY
    assert "in both readings" in finding.summary


def test_a_series_of_readings_without_counters_gives_a_share():
    masks = [0x0] * 9 + [0x40] * 21
    hot = h100(
        6,
        busy=True,
        readings=[
            {
                "clocks_event_reasons": mask,
                "sm_clock_mhz": 1410 if mask else 1980,
                "reason_hw_thermal_ns": None,
                "violation_thermal_ns": None,
            }
            for mask in masks
        ],
    )
    (finding,) = findings(eight({6: hot}), HW)
    assert finding.summary == (
        "GPU 0000:d1:00.0 under hardware thermal slowdown in 21 of 30 readings: SM 1410 MHz of 1980, "
        "7 loaded siblings 1980"
    )
    assert finding.confidence is Confidence.PROVEN


def test_slowed_since_the_last_run_though_not_now():
    cool = h100(6, busy=False, reading={"reason_hw_thermal_ns": 100 * 10**9})
    snapshot = eight(
        {6: cool},
        busy=False,
        baseline=last_run(gpu_counters(cool, reason_hw_thermal_ns=40 * 10**9), seconds_ago=300),
    )
    (finding,) = findings(snapshot, HW)
    assert finding.summary == (
        "GPU 0000:d1:00.0 under hardware thermal slowdown 20 % of the last 5 min: not loaded now"
    )
    assert finding.confidence is Confidence.LIKELY


@pytest.mark.parametrize(
    "stale",
    [
        {"boot_id": "another-boot"},
        {"driver_version": "570.1"},
        {"seconds_ago": 3 * 86400.0},
    ],
)
def test_a_last_run_of_another_boot_driver_or_day_says_nothing(stale):
    cool = h100(6, reading={"reason_hw_thermal_ns": 10**15})
    baseline = last_run(gpu_counters(cool, reason_hw_thermal_ns=0), **stale)
    assert findings(eight({6: cool}, busy=False, baseline=baseline), HW) == []


def test_a_counter_that_went_backwards_was_reset():
    cool = h100(6, reading={"reason_hw_thermal_ns": 10**9})
    baseline = last_run(gpu_counters(cool, reason_hw_thermal_ns=10**12))
    assert findings(eight({6: cool}, busy=False, baseline=baseline), HW) == []


def test_an_older_driver_times_both_kinds_of_heat_in_one_counter():
    older = {"reason_sw_thermal_ns": None, "reason_hw_thermal_ns": None}
    hot = h100(
        2,
        busy=True,
        reading={**older, "sm_clock_mhz": 1620},
        readings=[{"violation_thermal_ns": 0}, {"violation_thermal_ns": 700_000_000}],
    )
    (finding,) = findings(eight({2: hot}))
    assert finding.id == SW
    assert "under thermal slowdown 35 % of 2.0 s" in finding.summary
    hw_bit = h100(
        2,
        busy=True,
        reading={**older, "sm_clock_mhz": 1620},
        readings=[
            {"violation_thermal_ns": 0, "clocks_event_reasons": 0x48},
            {"violation_thermal_ns": 700_000_000},
        ],
    )
    (finding,) = findings(eight({2: hw_bit}))
    assert finding.id == HW
    assert "under hardware thermal slowdown 35 % of 2.0 s" in finding.summary


def test_software_thermal_slowdown():
    warm = h100(
        2,
        busy=True,
        reading={"clocks_event_reasons": 0x20, "sm_clock_mhz": 1620},
        readings=[{}, {"reason_sw_thermal_ns": 700_000_000}],
    )
    (finding,) = findings(eight({2: warm}))
    assert (finding.id, finding.confidence) == (SW, Confidence.PROVEN)


def test_a_hot_gpu_that_is_not_slowed_is_clear_and_says_so():
    warm = h100(5, busy=True, reading={"temperature_c": 70})
    assert findings(eight({5: warm})) == []
    result = run("thermal.near-limit", eight({5: warm}))
    assert result.outcome is Outcome.PASS
    assert result.notes == ("0000:c3:00.0: warmer than its siblings, but not slowed",)


def test_power_brake_on_one_gpu():
    braked = h100(
        3,
        busy=True,
        reading={
            "clocks_event_reasons": 0x88,
            "sm_clock_mhz": 990,
            "reason_hw_power_brake_ns": None,
        },
    )
    (finding,) = findings(eight({3: braked}))
    assert (finding.id, finding.component.pci) == (BRAKE, PCI[3])
    assert finding.summary == (
        "GPU 0000:61:00.0 under power brake in both readings: SM 990 MHz of 1980, "
        "7 loaded siblings 1980"
    )


def test_power_brake_on_many_gpus_is_the_chassis():
    odd = {
        i: h100(
            i, busy=True, reading={"clocks_event_reasons": 0x88, "sm_clock_mhz": 990},
            readings=[{}, {"reason_hw_power_brake_ns": 500_000_000}],
        )
        for i in range(4)
    }  # fmt: skip
    (finding,) = findings(eight(odd))
    assert (finding.id, finding.component.type, finding.component.host) == (BRAKE, "host", HOST)
    assert finding.summary == (
        "4 of 8 GPUs under power brake at once (up to 25 % of 2.0 s): SM 990 MHz of 1980, "
        "7 loaded siblings 1980: chassis power, not the GPUs"
    )
    assert len(finding.evidence) == 4
    assert run(BRAKE, eight(odd)).judged == 9  # the host and each GPU


def test_a_brief_brake_is_no_fault():
    braked = h100(3, busy=True, readings=[{}, {"reason_hw_power_brake_ns": 40_000_000}])
    assert findings(eight({3: braked})) == []
    assert run(BRAKE, eight({3: braked})).notes == (
        "0000:61:00.0: power brake 2 % of 2.0 s: too little to matter",
    )


def test_hardware_slowdown_without_a_reason_in_all_readings():
    slowed = h100(1, busy=True, reading={"clocks_event_reasons": 0x8, "sm_clock_mhz": 990})
    (finding,) = findings(eight({1: slowed}))
    assert (finding.id, finding.confidence) == (UMBRELLA, Confidence.LIKELY)
    assert "under hardware slowdown in 2 of 2 readings: SM 990 MHz of 1980" in finding.summary


def test_hardware_slowdown_in_a_long_series():
    def series(count):
        masks = [0x8] * count + [0x0] * (20 - count)
        return h100(1, busy=True, readings=[{"clocks_event_reasons": mask} for mask in masks])

    assert findings(eight({1: series(2)})) == []
    (finding,) = findings(eight({1: series(12)}))
    assert "under hardware slowdown in 12 of 20 readings" in finding.summary


def test_one_reading_with_hardware_slowdown_counts_only_with_a_halved_clock():
    once = {"clocks_event_reasons": 0x8}
    fast = h100(1, busy=True, samples=1, reading=once)
    assert findings(eight({1: fast})) == []
    halved = h100(1, busy=True, samples=1, reading={**once, "sm_clock_mhz": 990})
    (finding,) = findings(eight({1: halved}))
    assert (finding.id, finding.confidence) == (UMBRELLA, Confidence.POSSIBLE)


def test_hardware_slowdown_at_rest_is_no_fault():
    resting = h100(1, busy=False, reading={"clocks_event_reasons": 0x9})
    assert findings(eight({1: resting}, busy=False)) == []


@pytest.mark.parametrize("probe_id", [HW, SW, BRAKE, UMBRELLA])
def test_a_mask_that_could_not_be_read_is_never_clear(probe_id):
    blind = h100(
        4,
        busy=True,
        reading=dict.fromkeys(
            (
                "clocks_event_reasons",
                "reason_hw_thermal_ns",
                "reason_sw_thermal_ns",
                "reason_hw_power_brake_ns",
                "violation_thermal_ns",
            )
        ),
    )
    snapshot = eight(
        {4: blind}, gaps=gaps("clocks_event_reasons", reason=GapReason.DENIED, device=PCI[4])
    )
    result = run(probe_id, snapshot)
    assert (result.outcome, result.judged) == (Outcome.UNKNOWN, 7)


def test_a_bit_outside_the_supported_mask_is_not_applicable():
    gpu = h100(
        0,
        busy=True,
        limits={"supported_clocks_event_reasons": 0x1F},
        reading={"reason_hw_thermal_ns": None},
    )
    result = run(HW, node([gpu]))
    assert result.outcome is Outcome.NOTAPPLICABLE
    assert result.notes == ("NVIDIA H100 80GB HBM3 does not report hardware thermal slowdown",)
