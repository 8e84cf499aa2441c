"""GPUs off the bus, left out by NVML, without a driver."""

from typing import Any

import pytest

from probes.finding import Component, Confidence, FaultClass, JobImpact, Severity
from probes.gap import Gap, GapReason
from probes.node.missing_gpu import missing, no_driver
from probes.node.off_bus import device_off_bus, off_bus
from probes.result import Outcome
from probes.snapshot.baseline import Baseline, CounterSet
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.manifest import Manifest
from probes.snapshot.pci import PciDevice, PciReading
from tests.support.pci_nodes import (
    bridge,
    device,
    gpu,
    judge,
    nic,
    notes,
    read,
    snapshot,
    summaries,
)  # fmt: skip

FOUR = tuple(f"0000:{bus}:00.0" for bus in ("05", "45", "85", "c5"))


def on_bus(*addresses: str, **changes: Any) -> tuple[PciDevice, ...]:
    return tuple(device(address, **changes) for address in addresses)


def listed(*addresses: str | None, **changes: Any) -> tuple[Gpu, ...]:
    return tuple(gpu(address, index, **changes) for index, address in enumerate(addresses))


ONES = (PciReading(at_ns=0, config_all_ones=True),)


# --- off the bus ---


def test_a_gpu_that_reads_as_ones_has_fallen_off() -> None:
    section, gaps = read("pci-off-bus")
    (finding,) = judge(off_bus, snapshot(section, listed(*FOUR), gaps=gaps))[1]
    assert finding.summary == (
        "GPU 0000:45:00.0 has fallen off the bus: its configuration space reads as ones; "
        "3 other GPUs answer"
    )
    assert (finding.severity, finding.confidence, finding.fault_class, finding.job_impact) == (
        Severity.CRITICAL, Confidence.PROVEN, FaultClass.HARDWARE, JobImpact.BREAKS,
    )  # fmt: skip
    assert {"gpu.missing", "gpu.lost", "pcie.width-trained-down"} <= set(finding.explains)


def test_width_63_alone_is_likely() -> None:
    silent = device(
        FOUR[0], readings=(PciReading(at_ns=0, config_all_ones=None, link_status_all_ones=True),)
    )
    (finding,) = judge(off_bus, snapshot((silent, *on_bus(FOUR[1])), ()))[1]
    assert finding.confidence is Confidence.LIKELY
    assert finding.summary.endswith("its link status reads as ones; 1 other GPU answers")


def test_the_switch_above_is_named() -> None:
    port = bridge("0000:04:01.0", readings=(PciReading(at_ns=0, link_status_all_ones=True),))
    lost = device(FOUR[0], "0000:04:01.0", readings=ONES)
    assert summaries(off_bus, snapshot((port, lost), ())) == [
        (
            "root port 0000:04:01.0 has fallen off the bus: its link and the configuration space of "
            "GPU 0000:05:00.0 behind it read as ones; 0 other GPUs answer"
        )
    ]


def test_a_gpu_that_sleeps_reads_as_ones_too() -> None:
    asleep = device(FOUR[0], power_state="D3cold", readings=ONES)
    assert notes(off_bus, snapshot((asleep,), ())) == (f"{FOUR[0]}: switched off (D3cold)",)


def test_an_adapter_and_an_nvswitch_fall_off_too() -> None:
    switch = device("0000:d1:00.0", class_code=0x068000, device_id=0x22A3, readings=ONES)
    node = snapshot((nic("0000:1a:00.0", readings=ONES), switch), ())
    assert summaries(device_off_bus, node) == [
        "NIC 0000:1a:00.0 has fallen off the bus: its configuration space reads as ones",
        "NVSwitch 0000:d1:00.0 has fallen off the bus: its configuration space reads as ones",
    ]


def test_no_gpu() -> None:
    for item in (off_bus, device_off_bus, no_driver):
        assert judge(item, snapshot((), ()))[0].outcome is Outcome.NOTAPPLICABLE


# --- missing ---


def test_nvml_leaves_a_gpu_out() -> None:
    (finding,) = judge(missing, snapshot(on_bus(*FOUR), listed(*FOUR[:3])))[1]
    assert finding.summary == (
        "GPU 0000:c5:00.0 is on the PCI bus with the nvidia driver, NVML lists 3 of 4, not this one"
    )
    assert (finding.severity, finding.confidence) == (Severity.CRITICAL, Confidence.LIKELY)
    assert finding.component == Component(type="gpu", host="n07", pci="0000:c5:00.0")


def test_the_bus_names_the_gpu_that_nvml_cannot() -> None:
    """One by elimination, then its state is another rule's; of two it can't be told which."""
    lost = [
        Gpu(index=at, state=GpuState.LOST, state_detail="NVML_ERROR_GPU_IS_LOST") for at in (2, 3)
    ]
    assert summaries(missing, snapshot(on_bus(*FOUR), (*listed(*FOUR[:3]), lost[1]))) == []
    (finding, other) = judge(missing, snapshot(on_bus(*FOUR), (*listed(*FOUR[:2]), *lost)))[1]
    assert finding.summary == (
        "GPU 0000:85:00.0 is on the PCI bus with the nvidia driver, NVML lists 2 of 4, not this one; "
        "NVML has 2 without an address: NVML_ERROR_GPU_IS_LOST"
    )
    assert finding.confidence is Confidence.PROVEN
    assert other.component.pci == "0000:c5:00.0"


@pytest.mark.parametrize("driver", ["vfio-pci", None])
def test_trap_29_a_gpu_without_the_nvidia_driver_is_not_missing(driver: str | None) -> None:
    devices = (*on_bus(*FOUR[:3]), *on_bus(FOUR[3], driver=driver))
    assert summaries(missing, snapshot(devices, listed(*FOUR[:3]))) == []


def test_trap_29_a_virtual_function_is_not_missing() -> None:
    devices = (*on_bus(*FOUR[:3]), *on_bus(FOUR[3], is_virtual_function=True))
    assert summaries(missing, snapshot(devices, listed(*FOUR[:3]))) == []


def test_trap_29_a_gpu_that_permissions_hide_is_not_missing() -> None:
    hidden = Gpu(index=3, state=GpuState.NO_PERMISSION)
    node = snapshot(on_bus(*FOUR), (*listed(*FOUR[:3]), hidden))
    assert notes(missing, node) == ("0000:c5:00.0: hidden from this user by device permissions",)


def test_trap_30_a_container_has_fewer_gpus() -> None:
    node = snapshot(
        on_bus(*FOUR), listed(*FOUR[:1]), container="docker", manifest=Manifest(gpu_count=4)
    )
    assert notes(missing, node)[0] == "0000:45:00.0: not granted to this container"


def test_gpus_of_nvml_without_a_pci_device_are_no_finding() -> None:
    assert notes(missing, snapshot((), listed(FOUR[0]))) == (
        "NVML sees 0000:05:00.0 without a PCI device (container, WSL)",
    )


def test_when_nvml_does_not_answer_nothing_is_known() -> None:
    node = snapshot(on_bus(*FOUR), None, nvml=NvmlSection(init_error="hung"))
    result, findings = judge(missing, node)
    assert findings == ()
    assert result.outcome is Outcome.UNKNOWN


def test_the_manifest_expects_more_than_the_bus_holds() -> None:
    expects = Manifest(gpu_count=4)
    node = snapshot(on_bus(*FOUR[:3]), None, manifest=expects)
    (finding,) = judge(missing, node)[1]
    assert finding.summary == "3 GPUs are on the PCI bus, the manifest expects 4"
    assert finding.component == Component(type="host", host="n07")
    assert summaries(missing, snapshot(on_bus(*FOUR), None, manifest=expects)) == []
    # where NVML answers manifest.gpu-count says it
    assert (
        summaries(missing, snapshot(on_bus(*FOUR[:3]), listed(*FOUR[:3]), manifest=expects)) == []
    )


def last_run(*uuids: str, boot_id: str = "b1") -> Baseline:
    return Baseline(
        at_ns=1,
        boot_id=boot_id,
        driver_version="570.1",
        sets=tuple(CounterSet(kind="gpu", key=uuid, counters={}) for uuid in uuids),
    )


def test_a_gpu_of_the_last_run_is_gone() -> None:
    gpus = listed(*FOUR[:2])
    uuids = [item.uuid or "" for item in gpus]
    before = last_run(*uuids, "GPU-gone")
    assert summaries(missing, snapshot(on_bus(*FOUR[:2]), gpus, baseline=before)) == [
        "NVML lists 2 GPUs; the last run of this boot also saw GPU-gone"
    ]
    other_boot = last_run(*uuids, "GPU-gone", boot_id="b0")
    assert summaries(missing, snapshot(on_bus(*FOUR[:2]), gpus, baseline=other_boot)) == []
    passed_on = (*on_bus(*FOUR[:2]), *on_bus(FOUR[2], driver="vfio-pci"))
    assert summaries(missing, snapshot(passed_on, gpus, baseline=before)) == []


# --- driver ---


@pytest.mark.parametrize(
    ("driver", "has"), [(None, "no driver"), ("nouveau", "the nouveau driver")]
)
def test_no_nvidia_driver(driver: str | None, has: str) -> None:
    (finding,) = judge(no_driver, snapshot(on_bus(FOUR[0], driver=driver), None))[1]
    assert finding.summary == f"GPU {FOUR[0]} has {has} bound, a job needs nvidia"
    assert (finding.severity, finding.fault_class) == (
        Severity.CRITICAL, FaultClass.CONFIGURATION,
    )  # fmt: skip


def test_all_without_the_driver_is_the_host() -> None:
    (finding,) = judge(no_driver, snapshot(on_bus(*FOUR, driver=None), None))[1]
    assert finding.summary == "all 4 GPUs have no driver bound, a job needs nvidia"
    assert (finding.severity, finding.component.type) == (Severity.CRITICAL, "host")


def test_one_of_several_without_the_driver() -> None:
    devices = (*on_bus(*FOUR[:3]), *on_bus(FOUR[3], driver=None))
    (finding,) = judge(no_driver, snapshot(devices, listed(*FOUR[:3])))[1]
    assert (finding.severity, finding.component.pci) == (Severity.WARNING, FOUR[3])


def test_a_driver_that_was_not_copied_is_unknown() -> None:
    gap = Gap(source="pci", reason=GapReason.NOT_COLLECTED, fields=("driver",))
    node = snapshot(on_bus(FOUR[0], driver=None), None, gaps=(gap,))
    for item in (no_driver, missing):
        result, findings = judge(item, node)
        assert (result.outcome, findings) == (Outcome.UNKNOWN, ())


def test_passthrough_and_containers_need_no_driver_here() -> None:
    passed_on = snapshot(on_bus(*FOUR, driver="vfio-pci"), None)
    contained = snapshot(on_bus(*FOUR, driver=None), None, container="podman")
    for node in (passed_on, contained):
        result, findings = judge(no_driver, node)
        assert (result.outcome, findings) == (Outcome.NOTAPPLICABLE, ())
