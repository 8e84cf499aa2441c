"""NVSwitch fabric registration and health mask."""

from __future__ import annotations

import pytest

from probes.finding import Confidence, FaultClass, JobImpact, Severity
from probes.gap import GapReason
from probes.result import Outcome
from probes.snapshot.gpu import Fabric
from tests.support.gpus import HOST, PCI, eight, findings, found, gaps, h100, node, run

STATE = "fabric.state"
HEALTH = "fabric.health"
IN_PROGRESS = Fabric(state=2, status=0)
NOT_STARTED = Fabric(state=1, status=0)
HEALTHY_MASK = 0x51AA


def test_one_gpu_outside_the_fabric():
    (finding,) = findings(eight({1: h100(1, fabric=IN_PROGRESS)}, busy=False))
    assert finding.summary == (
        "GPU 0000:43:00.0 fabric registration in progress, 7 others have joined"
    )
    assert (finding.id, finding.severity, finding.fault_class) == (
        STATE,
        Severity.CRITICAL,
        FaultClass.HARDWARE,
    )


def test_registration_that_ended_with_an_error():
    (finding,) = findings(eight({1: h100(1, fabric=Fabric(state=3, status=999))}, busy=False))
    assert finding.summary == (
        "GPU 0000:43:00.0 fabric registration completed with status 999, 7 others have joined"
    )
    assert finding.confidence is Confidence.PROVEN


@pytest.mark.parametrize(
    ("fabric", "uptime_s", "severity", "end"),
    [
        (IN_PROGRESS, 86_400.0, Severity.CRITICAL, "CUDA does not start"),
        (IN_PROGRESS, 90.0, Severity.WARNING, "CUDA does not start (up for 90 s only)"),
        (NOT_STARTED, 90.0, Severity.CRITICAL, "CUDA does not start"),
    ],
)
def test_nobody_has_joined_names_the_host(fabric, uptime_s, severity, end):
    snapshot = node((h100(i, fabric=fabric) for i in range(8)), uptime_s=uptime_s)
    (finding,) = findings(snapshot)
    assert (finding.component.type, finding.component.host) == ("host", HOST)
    assert (finding.severity, finding.fault_class) == (severity, FaultClass.SOFTWARE)
    assert finding.summary.endswith(end)
    assert len(finding.evidence) == 8


def test_not_started_without_a_switch_is_no_fault():
    bare = {"remote_type": 0, "remote_pci": PCI[1]}
    cards = node(
        h100(i, fabric=NOT_STARTED, links=dict.fromkeys(range(18), bare)) for i in range(2)
    )
    assert run(STATE, cards).outcome is Outcome.NOTAPPLICABLE
    assert run(STATE, node([h100(0, fabric=NOT_STARTED, nvlinks=())])).outcome is (
        Outcome.NOTAPPLICABLE
    )


def test_not_started_on_a_grace_board_is_managed_elsewhere():
    boards = node(h100(i, fabric=NOT_STARTED, c2c_enabled=True) for i in range(4))
    assert run(STATE, boards).outcome is Outcome.NOTAPPLICABLE


def test_not_supported_is_no_fault():
    cards = node(h100(i, fabric=Fabric(state=0, status=0)) for i in range(2))
    for probe_id in (STATE, HEALTH):
        assert run(probe_id, cards).outcome is Outcome.NOTAPPLICABLE


def test_an_unknown_state_is_shown_raw():
    (finding,) = findings(eight({1: h100(1, fabric=Fabric(state=7))}, busy=False))
    assert "in unknown state 7" in finding.summary
    assert (finding.severity, finding.confidence) == (Severity.WARNING, Confidence.POSSIBLE)


def test_a_fabric_that_could_not_be_read_is_never_clear():
    snapshot = eight({1: h100(1, fabric=None)}, gaps=gaps("fabric", reason=GapReason.TIMEOUT))
    for probe_id in (STATE, HEALTH):
        assert run(probe_id, snapshot).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("mask", "text", "severity", "impact"),
    [
        (0x51A9, "degraded bandwidth", Severity.WARNING, JobImpact.SLOWS),
        (0x51A6, "route recovery", Severity.WARNING, JobImpact.SLOWS),
        (0x519A, "route unhealthy", Severity.CRITICAL, JobImpact.BREAKS),
        (0x516A, "access timeout recovery", Severity.WARNING, JobImpact.SLOWS),
        (0x55AA, "configuration: insufficient NVLinks", Severity.CRITICAL, JobImpact.BREAKS),
        (0x5CAA, "configuration: unknown code 12", Severity.CRITICAL, JobImpact.BREAKS),
        (
            0x5199,
            "degraded bandwidth, route unhealthy",
            Severity.CRITICAL,
            JobImpact.BREAKS,
        ),
    ],
)
def test_the_mask_is_two_bit_fields(mask, text, severity, impact):
    bad = h100(4, fabric=Fabric(state=3, status=0, health_mask=mask, health_summary=2))
    (finding,) = findings(eight({4: bad}, busy=False))
    assert finding.summary == (
        f"GPU 0000:9d:00.0 fabric health: {text} (mask 0x{mask:x}, summary 2)"
    )
    assert (finding.id, finding.severity, finding.job_impact) == (HEALTH, severity, impact)


@pytest.mark.parametrize(
    ("summary", "text", "severity"),
    [(2, "unhealthy", Severity.CRITICAL), (3, "limited capacity", Severity.WARNING)],
)
def test_the_summary_alone(summary, text, severity):
    bad = h100(4, fabric=Fabric(state=3, status=0, health_mask=0, health_summary=summary))
    (finding,) = findings(eight({4: bad}, busy=False))
    assert f"fabric health: {text} (" in finding.summary
    assert finding.severity is severity


def test_a_mask_that_is_not_zero_is_healthy():
    fine = Fabric(state=3, status=0, health_mask=HEALTHY_MASK, health_summary=1)
    snapshot = node(h100(i, fabric=fine) for i in range(8))
    assert findings(snapshot) == []
    assert run(HEALTH, snapshot).notes[0] == (
        "0000:1b:00.0: health mask 0x51aa: 2 in a two-bit field means good"
    )


def test_mig_is_not_judged():
    slices = node([h100(0, mig_mode=True, fabric=IN_PROGRESS)])
    assert run(STATE, slices).outcome is Outcome.NOTAPPLICABLE
    assert found(slices, STATE) == []
