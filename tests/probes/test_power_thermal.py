"""Power limits and temperatures."""

from __future__ import annotations

import pytest

from probes.finding import Basis, Confidence, Severity
from probes.gap import GapReason
from probes.result import Outcome
from probes.snapshot.manifest import Manifest
from tests.support.gpus import PCI, eight, findings, found, gaps, h100, node, run

LIMIT = "power.limit-low"
NEAR = "thermal.near-limit"
OUTLIER = "thermal.peer-outlier"


def lowered(index, enforced_mw, asked_mw=None, **fields):
    limits = {"power_limit_enforced_mw": enforced_mw, "power_limit_mw": asked_mw or enforced_mw}
    return h100(index, limits=limits, **fields)


def test_one_gpu_below_default_and_siblings():
    (finding,) = findings(eight({2: lowered(2, 500_000)}, busy=False))
    assert finding.summary == ("GPU 0000:52:00.0 power limit 500 W, siblings 700 W, default 700 W")
    assert (finding.id, finding.severity, finding.confidence) == (
        LIMIT,
        Severity.WARNING,
        Confidence.PROVEN,
    )
    assert [e.expected.basis for e in finding.evidence if e.expected] == [
        Basis.PEER_MEDIAN,
        Basis.DEVICE_MAX,
    ]
    assert finding.explains == ("clocks.sw-power-cap",)


def test_all_gpus_equally_lowered_is_somebodys_decision():
    snapshot = node(lowered(i, 500_000) for i in range(8))
    assert {(f.id, f.severity) for f in findings(snapshot)} == {(LIMIT, Severity.INFO)}


def test_a_cap_from_outside_the_host():
    snapshot = node(lowered(i, 400_000, asked_mw=700_000) for i in range(8))
    finding = findings(snapshot)[0]
    assert finding.severity is Severity.WARNING
    assert finding.summary == (
        "GPU 0000:1b:00.0 power limit 400 W, default 700 W, asked for 700 W: capped from outside "
        "the host"
    )


def test_a_limit_that_the_manifest_expects_is_left_to_the_manifest():
    snapshot = node(
        (lowered(i, 500_000) for i in range(8)), manifest=Manifest(gpu_power_limit_w=500)
    )
    assert findings(snapshot) == []


def test_another_board_variant_is_info():
    variant = h100(
        2,
        limits={
            "power_limit_enforced_mw": 500_000,
            "power_limit_mw": 500_000,
            "power_limit_default_mw": 500_000,
        },
    )
    (finding,) = findings(eight({2: variant}, busy=False))
    assert finding.severity is Severity.INFO
    assert finding.summary == (
        "GPU 0000:52:00.0 power limit 500 W, siblings 700 W, default 500 W: another board variant"
    )


def test_a_raised_limit_is_clear():
    assert findings(eight({2: lowered(2, 750_000)}, busy=False)) == []


def test_a_limit_that_could_not_be_read_is_never_clear():
    snapshot = eight(
        {2: lowered(2, None)}, gaps=gaps("power_limit_enforced_mw", reason=GapReason.TIMEOUT)
    )
    assert run(LIMIT, snapshot).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("temperature", "severity", "text"),
    [
        (85, Severity.INFO, "at 85 C, 2 C below its slowdown temperature 87 C, not slowed"),
        (88, Severity.WARNING, "at 88 C, 1 C beyond its slowdown temperature 87 C, not slowed"),
    ],
)
def test_near_the_parts_own_slowdown_temperature(temperature, severity, text):
    gpus = (h100(i, busy=True, reading={"temperature_c": temperature}) for i in range(8))
    finding = findings(node(gpus))[0]
    assert (finding.id, finding.severity) == (NEAR, severity)
    assert finding.summary == f"GPU 0000:1b:00.0 {text}"


def test_the_margin_serves_where_absolute_thresholds_are_gone():
    fields = {"temperature_slowdown_c": None, "temperature_mem_max_c": None}
    hot = h100(
        1, busy=True, limits=fields, reading={"temperature_c": 86, "margin_temperature_c": -1}
    )
    gpus = [h100(0, busy=True, limits=fields), hot, h100(2, busy=True, limits=fields)]
    (finding,) = findings(node(gpus), NEAR)
    assert finding.summary == (
        "GPU 0000:43:00.0 at 86 C, 1 C below its slowdown point (margin -1, slowdown at -2), "
        "not slowed"
    )


def test_a_margin_of_zero_at_any_temperature_is_no_margin():
    fields = {"temperature_slowdown_c": None, "temperature_mem_max_c": None}
    gpus = [
        h100(i, limits=fields, reading={"temperature_c": 30 + i, "margin_temperature_c": 0})
        for i in range(4)
    ]
    assert findings(node(gpus), NEAR) == []


def test_hot_memory():
    hot = h100(4, busy=True, reading={"memory_temperature_c": 95})
    (finding,) = findings(eight({4: hot}))
    assert finding.summary == (
        "GPU 0000:9d:00.0 at 58 C, exactly at its memory maximum (95 of 95 C), not slowed"
    )


def test_a_part_that_tells_no_limits_is_not_judged_by_fixed_degrees():
    none = {
        "temperature_slowdown_c": None,
        "temperature_mem_max_c": None,
        "tlimit_slowdown_c": None,
    }
    gpu = h100(0, busy=True, limits=none, reading={"temperature_c": 99})
    snapshot = node([gpu], gaps=gaps("temperature_slowdown_c", reason=GapReason.UNSUPPORTED))
    assert run(NEAR, snapshot).outcome is Outcome.NOTAPPLICABLE


def test_far_hotter_than_siblings_at_equal_power_is_info():
    warm = h100(6, busy=True, reading={"temperature_c": 80})
    (finding,) = findings(eight({6: warm}))
    assert (finding.id, finding.severity, finding.confidence) == (
        OUTLIER,
        Severity.INFO,
        Confidence.POSSIBLE,
    )
    assert finding.summary == (
        "GPU 0000:d1:00.0 at 80 C is 22 C hotter than 7 siblings at the same 560 W"
    )


def test_hotter_because_it_draws_more_is_no_outlier():
    warm = h100(6, busy=True, reading={"temperature_c": 80, "power_mw": 690_000})
    assert findings(eight({6: warm})) == []


def test_a_slowed_hot_gpu_names_heat_as_the_explained():
    hot = h100(
        5, busy=True, reading={"temperature_c": 88, "sm_clock_mhz": 1215},
        readings=[{}, {"reason_hw_thermal_ns": 10**9}],
    )  # fmt: skip
    assert found(eight({5: hot})) == [
        ("clocks.hw-thermal-slowdown", PCI[5]),
        (NEAR, PCI[5]),
        (OUTLIER, PCI[5]),
    ]
    slowdown = findings(eight({5: hot}))[0]
    assert {NEAR, OUTLIER} <= set(slowdown.explains)
