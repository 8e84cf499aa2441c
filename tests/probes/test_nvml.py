"""The management library: start and latency."""

from __future__ import annotations

import pytest

from probes.finding import Action, FaultClass, JobImpact, Severity
from probes.result import Health, Outcome
from probes.snapshot.gpu import CallTiming, NvmlSection
from probes.snapshot.pci import PciDevice, PciSection
from tests.support.gpus import DRIVER, HOST, PCI, eight, findings, h100, node, run

INIT = "nvml.init-failed"
SLOW = "nvml.slow-call"


def pci(driver="nvidia", count=8):
    return PciSection(
        devices=tuple(
            PciDevice(address=address, vendor_id=0x10DE, class_code=0x030200, driver=driver)
            for address in PCI[:count]
        )
    )


def failed(code, name, detail=None, **fields):
    section = NvmlSection(init_error=name, init_error_code=code, init_detail=detail)
    return node(nvml=section, **{"pci": pci(), **fields})


@pytest.mark.parametrize(
    ("snapshot", "start", "severity", "impact", "fault_class", "action"),
    [
        (
            failed(9, "NVML_ERROR_DRIVER_NOT_LOADED"),
            "The NVIDIA driver is not loaded, 8 NVIDIA GPUs on the PCI bus",
            Severity.CRITICAL,
            JobImpact.BREAKS,
            FaultClass.SOFTWARE,
            Action.REBOOT,
        ),
        (
            failed(12, "NVML_ERROR_LIBRARY_NOT_FOUND"),
            "libnvidia-ml.so.1 is not installed, 8 NVIDIA GPUs on the PCI bus",
            Severity.WARNING,
            JobImpact.BREAKS,
            FaultClass.CONFIGURATION,
            Action.RECONFIGURE,
        ),
        (
            failed(18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "NVML library version: 580.95"),
            "Driver library and kernel module have different versions",
            Severity.CRITICAL,
            JobImpact.NONE,
            FaultClass.CONFIGURATION,
            Action.REBOOT,
        ),
        (
            failed(999, "NVML_ERROR_UNKNOWN", container="docker"),
            "This docker container may not use its GPU devices (any more): NVML_ERROR_UNKNOWN; it",
            Severity.WARNING,
            JobImpact.NONE,
            FaultClass.CONFIGURATION,
            Action.RECONFIGURE,
        ),
        (
            failed(4, "NVML_ERROR_NO_PERMISSION"),
            "This user may not open the NVIDIA device files",
            Severity.WARNING,
            JobImpact.NONE,
            FaultClass.CONFIGURATION,
            Action.RECONFIGURE,
        ),
        (
            failed(999, "NVML_ERROR_UNKNOWN"),
            "NVML does not start: NVML_ERROR_UNKNOWN",
            Severity.CRITICAL,
            JobImpact.BREAKS,
            FaultClass.CANNOT_TELL,
            Action.DRAIN,
        ),
        (
            failed(None, "hung", "no answer within 10 s, child in state D"),
            "The NVIDIA driver hangs: nvmlInit did not return",
            Severity.CRITICAL,
            JobImpact.BREAKS,
            FaultClass.CANNOT_TELL,
            Action.REBOOT,
        ),
    ],
)
def test_init_failures(snapshot, start, severity, impact, fault_class, action):
    (finding,) = findings(snapshot)
    assert finding.id == INIT
    assert finding.summary.startswith(start)
    assert (finding.severity, finding.job_impact, finding.fault_class) == (
        severity,
        impact,
        fault_class,
    )
    assert (finding.component.type, finding.component.host) == ("host", HOST)
    assert finding.remedy is not None
    assert finding.remedy.action is action
    assert finding.evidence[0].observed == snapshot.nvml.init_error
    assert finding.evidence[0].quote == snapshot.nvml.init_detail


@pytest.mark.parametrize("code", [9, 12])
def test_a_machine_without_nvidia_gpus_needs_no_driver(code):
    snapshot = failed(code, "NVML_ERROR", pci=PciSection())
    assert run(INIT, snapshot).outcome is Outcome.NOTAPPLICABLE


def test_gpus_passed_through_to_virtual_machines_need_no_driver():
    snapshot = failed(9, "NVML_ERROR_DRIVER_NOT_LOADED", pci=pci(driver="vfio-pci"))
    assert run(INIT, snapshot).outcome is Outcome.NOTAPPLICABLE


def test_without_a_look_at_pci_a_missing_driver_is_not_clear():
    snapshot = failed(9, "NVML_ERROR_DRIVER_NOT_LOADED", pci=None)
    assert run(INIT, snapshot).outcome is Outcome.UNKNOWN


def test_a_container_without_the_library_can_not_tell():
    snapshot = failed(12, "NVML_ERROR_LIBRARY_NOT_FOUND", container="podman")
    assert run(INIT, snapshot).outcome is Outcome.UNKNOWN


def test_a_start_is_clear():
    assert run(INIT, eight()).outcome is Outcome.PASS


def slow_call(milliseconds, call="nvmlDeviceGetPowerUsage", **fields):
    timing = CallTiming(call=call, duration_ms=milliseconds, returned=True)
    return h100(1, slow_calls=(timing,), **fields)


def test_a_slow_call_is_evidence():
    (finding,) = findings(eight({1: slow_call(1500.0)}, busy=False))
    assert finding.summary == (
        "GPU 0000:43:00.0 answers slowly: nvmlDeviceGetPowerUsage took 1.5 s"
    )
    assert (finding.id, finding.severity) == (SLOW, Severity.INFO)
    (finding,) = findings(eight({1: slow_call(6100.0)}, busy=False))
    assert (finding.severity, finding.fault_class) == (Severity.WARNING, FaultClass.CANNOT_TELL)


def test_slow_init_without_persistence_is_no_fault():
    gpus = tuple(h100(i, persistence_mode=False) for i in range(8))
    section = NvmlSection(driver_version=DRIVER, init_ms=24_000.0, device_count=8, gpus=gpus)
    snapshot = node(nvml=section)
    assert findings(snapshot) == []
    assert run(SLOW, snapshot).notes == (
        f"{HOST}: nvmlInit took 24.0 s: the driver loads its state without persistence mode",
    )


def test_a_slow_first_call_on_a_gpu_is_no_fault():
    gpu = slow_call(9000.0, call="nvmlDeviceGetHandleByIndex_v2", persistence_mode=False)
    assert findings(eight({1: gpu}, busy=False)) == []


def test_a_call_that_did_not_return_is_left_to_the_hung_gpu():
    timing = CallTiming(call="nvmlDeviceGetPowerUsage", duration_ms=10_000.0, returned=False)
    assert findings(eight({1: h100(1, slow_calls=(timing,))}, busy=False), SLOW) == []


def test_health_of_a_failed_start():
    from agent.evaluate import evaluate
    from tests.support.gpus import GPU_PROBES

    snapshot = failed(18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert evaluate(snapshot, GPU_PROBES).health is Health.CRITICAL
