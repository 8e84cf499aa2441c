"""GPUs that can't be used, and the driver's own verdict."""

from __future__ import annotations

import pytest

from probes.finding import Action, Confidence, FaultClass, JobImpact, Severity
from probes.gap import GapReason
from probes.result import Outcome
from probes.snapshot.gpu import CallTiming, Gpu, GpuState
from tests.support.gpus import PCI, eight, findings, found, gaps, h100, node, run


def broken(index, state, **fields):
    """A GPU that NVML lists and can't read."""
    return Gpu(
        **{
            "index": index,
            "state": state,
            "pci": PCI[index],
            "state_call": "nvmlDeviceGetHandleByIndex_v2",
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("action", "text", "severity", "impact", "todo"),
    [
        (1, "reset the GPU", Severity.CRITICAL, JobImpact.BREAKS, Action.RESET_GPU),
        (2, "reboot the node", Severity.CRITICAL, JobImpact.BREAKS, Action.REBOOT),
        (3, "drain peer-to-peer work", Severity.CRITICAL, JobImpact.NONE, Action.DRAIN),
        (4, "drain and reset", Severity.WARNING, JobImpact.NONE, Action.RESET_GPU),
        (5, "recover the IMEX domain", Severity.CRITICAL, JobImpact.BREAKS, Action.RECONFIGURE),
        (6, "reset the bus", Severity.CRITICAL, JobImpact.BREAKS, Action.RESET_GPU),
        (7, "reboot the system", Severity.CRITICAL, JobImpact.BREAKS, Action.REBOOT),
        (42, "unknown action 42", Severity.CRITICAL, JobImpact.BREAKS, Action.DRAIN),
    ],
)
def test_the_drivers_recovery_action(action, text, severity, impact, todo):
    (finding,) = findings(eight({2: h100(2, recovery_action=action)}, busy=False))
    assert finding.id == "gpu.recovery-action"
    assert finding.summary == (
        f"GPU 0000:52:00.0 needs recovery, says the driver: {text} (action {action})"
    )
    assert (finding.severity, finding.job_impact) == (severity, impact)
    assert finding.remedy is not None
    assert finding.remedy.action is todo
    assert finding.confidence is (Confidence.POSSIBLE if action == 42 else Confidence.PROVEN)


def test_drivers_without_the_field_are_not_judged():
    snapshot = node(
        [h100(0, recovery_action=None)], gaps=gaps("recovery_action", reason=GapReason.UNSUPPORTED)
    )
    assert run("gpu.recovery-action", snapshot).outcome is Outcome.NOTAPPLICABLE


def test_a_lost_gpu_hides_no_other():
    gone = broken(4, GpuState.LOST, state_detail="NVML_ERROR_GPU_IS_LOST: GPU is lost")
    hot = h100(5, busy=True, readings=[{}, {"reason_hw_thermal_ns": 10**9}])
    snapshot = eight({4: gone, 5: hot})
    assert found(snapshot) == [("gpu.lost", PCI[4]), ("clocks.hw-thermal-slowdown", PCI[5])]
    finding = findings(snapshot)[0]
    assert finding.summary == ("GPU 0000:9d:00.0 is lost (fallen off the bus); 7 of 8 GPUs answer")
    assert finding.evidence[0].quote == "NVML_ERROR_GPU_IS_LOST: GPU is lost"


def test_readings_of_a_lost_gpu_are_no_measurements():
    ghost = h100(
        4,
        state=GpuState.LOST,
        reading={"clocks_event_reasons": 0xFFFFFFFF, "temperature_c": 255},
    )
    assert found(eight({4: ghost}, busy=False)) == [("gpu.lost", PCI[4])]


def test_a_hung_gpu_names_the_call_and_the_wait():
    stuck = broken(
        6,
        GpuState.HUNG,
        state_call="nvmlDeviceGetUtilizationRates",
        state_detail="child 4711 in state D, wchan os_acquire_rwlock_write",
        slow_calls=(
            CallTiming(call="nvmlDeviceGetUtilizationRates", duration_ms=10_000.0, returned=False),
        ),
    )
    (finding,) = findings(eight({6: stuck}))
    assert finding.summary == (
        "GPU 0000:d1:00.0 does not answer: nvmlDeviceGetUtilizationRates did not return within 10 s"
    )
    assert (finding.id, finding.severity, finding.fault_class) == (
        "gpu.hung",
        Severity.CRITICAL,
        FaultClass.CANNOT_TELL,
    )
    assert finding.evidence[0].quote == "child 4711 in state D, wchan os_acquire_rwlock_write"


@pytest.mark.parametrize(
    ("state", "text", "fault_class"),
    [
        (
            GpuState.RESET_REQUIRED,
            "needs a reset before it can be used",
            FaultClass.HARDWARE,
        ),
        (
            GpuState.INSUFFICIENT_POWER,
            "lacks power: its auxiliary cables are not connected properly",
            FaultClass.CONFIGURATION,
        ),
        (GpuState.IRQ_ISSUE, "has an interrupt problem, says the kernel", FaultClass.SOFTWARE),
        (GpuState.NOT_READY, "is not ready", FaultClass.SOFTWARE),
        (GpuState.NOT_FOUND, "is listed, but the driver can't find it", FaultClass.HARDWARE),
        (GpuState.UNKNOWN, "can't be used", FaultClass.CANNOT_TELL),
    ],
)
def test_not_usable(state, text, fault_class):
    (finding,) = findings(eight({3: broken(3, state, state_detail="code 999")}, busy=False))
    assert finding.id == "gpu.not-usable"
    assert finding.summary == f"GPU 0000:61:00.0 {text} (code 999)"
    assert (finding.severity, finding.fault_class) == (Severity.CRITICAL, fault_class)
    assert finding.evidence[0].quote == "nvmlDeviceGetHandleByIndex_v2: code 999"


def test_a_gpu_that_nobody_asked_is_unread_and_not_broken():
    skipped = broken(
        3,
        GpuState.UNKNOWN,
        state_call=None,
        state_detail="not asked: no time was left within the deadline",
    )
    snapshot = eight({3: skipped}, gaps=gaps(reason=GapReason.TIMEOUT, device=PCI[3]))
    assert findings(snapshot) == []
    assert run("gpu.not-usable", snapshot).outcome is Outcome.UNKNOWN


def test_an_index_without_an_address_is_said_to_be_one():
    nameless = Gpu(index=3, state=GpuState.LOST)
    (finding,) = findings(eight({3: nameless}, busy=False))
    assert finding.summary.startswith("GPU 3 (NVML index) is lost")
    assert finding.component.index == 3


def test_hidden_gpus_are_not_judged():
    odd = {i: broken(i, GpuState.NO_PERMISSION) for i in range(4, 8)}
    snapshot = eight(odd)
    assert findings(snapshot) == []
    result = run("gpu.no-permission", snapshot)
    assert result.judged == 4
    assert "GPU 0000:9d:00.0 is hidden from this user or container: not judged" in result.notes


def test_all_hidden_is_not_applicable():
    snapshot = node(broken(i, GpuState.NO_PERMISSION) for i in range(8))
    for probe_id in ("gpu.no-permission", "gpu.lost", "gpu.hung", "gpu.not-usable"):
        assert run(probe_id, snapshot).outcome is Outcome.NOTAPPLICABLE


def test_mig_says_what_is_not_judged():
    result = run("gpu.mig", node([h100(0, mig_mode=True, mig_mode_pending=True)]))
    assert result.outcome is Outcome.NOTAPPLICABLE
    assert result.notes == ("MIG on: load, row remapping, NVLink and fabric are not judged",)


def test_mig_on_one_gpu_of_several_and_a_pending_change_are_info():
    (mixed,) = findings(node([h100(0, mig_mode=True, mig_mode_pending=True), h100(1)]), "gpu.mig")
    assert mixed.summary == "GPU 0000:1b:00.0 has MIG on, siblings of its model have it off"
    (waits,) = findings(node([h100(0, mig_mode_pending=True)]), "gpu.mig")
    assert waits.summary == "GPU 0000:1b:00.0 has MIG off, and on after the next reset"
    assert {mixed.severity, waits.severity} == {Severity.INFO}


def test_compute_mode():
    (finding,) = findings(eight({1: h100(1, compute_mode=2)}, busy=False))
    assert (finding.id, finding.severity) == ("gpu.compute-mode", Severity.CRITICAL)
    assert findings(eight({1: h100(1, compute_mode=3)}, busy=False)) == []


def test_confidential_computing_is_info():
    (finding,) = findings(node([h100(0, confidential_compute=True)]))
    assert (finding.id, finding.severity) == ("gpu.confidential-compute", Severity.INFO)


def test_firmware_that_differs():
    (finding,) = findings(
        eight({5: h100(5, vbios_version="96.00.61.00.01")}, busy=False), "gpu.versions-differ"
    )
    assert finding.summary == ("GPU 0000:c3:00.0 VBIOS 96.00.61.00.01, siblings 96.00.89.00.01")
    assert (finding.severity, finding.confidence) == (Severity.INFO, Confidence.POSSIBLE)


def test_boards_of_another_part_number_are_not_compared():
    other = h100(5, vbios_version="96.00.61.00.01", board_part_number="692-2G520-0300-000")
    snapshot = eight({5: other}, busy=False)
    assert findings(snapshot) == []
    assert "no sibling of the same part to compare firmware with" in (
        run("gpu.versions-differ", snapshot).notes
    )
