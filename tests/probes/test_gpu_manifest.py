"""What the operator expects of the GPUs."""

from __future__ import annotations

import pytest

from probes.finding import Basis, Severity
from probes.result import Outcome
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.manifest import Manifest
from probes.snapshot.pci import PciDevice, PciSection
from tests.support.gpus import DRIVER, HOST, PCI, eight, findings, h100, node, run

GOOD = Manifest(
    gpu_count=8,
    gpu_name="H100 80GB HBM3",
    driver_version="580.95",
    vbios_version="96.00.89.00.01",
    gpu_power_limit_w=700,
    nvlink_count=18,
)
IDS = (
    "manifest.gpu-count",
    "manifest.gpu-name",
    "manifest.driver-version",
    "manifest.vbios-version",
    "manifest.power-limit",
    "manifest.nvlink-count",
)


@pytest.mark.parametrize("probe_id", IDS)
def test_a_node_that_is_as_expected(probe_id):
    assert run(probe_id, eight(manifest=GOOD)).outcome is Outcome.PASS


@pytest.mark.parametrize("probe_id", IDS)
@pytest.mark.parametrize("manifest", [None, Manifest()])
def test_what_is_not_expected_is_not_judged(probe_id, manifest):
    assert run(probe_id, eight(manifest=manifest)).outcome is Outcome.NOTAPPLICABLE


@pytest.mark.parametrize(
    ("manifest", "summary", "value"),
    [
        (
            Manifest(gpu_name="H200"),
            "GPU 0000:1b:00.0 is a NVIDIA H100 80GB HBM3, the manifest expects H200",
            "H200",
        ),
        (
            Manifest(vbios_version="96.00.A0.00.01"),
            "GPU 0000:1b:00.0 VBIOS 96.00.89.00.01, the manifest expects 96.00.A0.00.01",
            "96.00.A0.00.01",
        ),
        (
            Manifest(gpu_power_limit_w=650.0),
            "GPU 0000:1b:00.0 power limit 700 W, the manifest expects 650 W",
            650_000,
        ),
        (
            Manifest(nvlink_count=24),
            "GPU 0000:1b:00.0 has 18 NVLinks on, the manifest expects 24",
            24,
        ),
    ],
)
def test_each_gpu_is_compared(manifest, summary, value):
    found_here = findings(eight(manifest=manifest, busy=False))
    assert len(found_here) == 8
    first = next(f for f in found_here if f.component.pci == PCI[0])
    assert first.summary == summary
    assert first.severity is Severity.WARNING
    assert first.evidence[0].expected is not None
    assert (first.evidence[0].expected.value, first.evidence[0].expected.basis) == (
        value,
        Basis.MANIFEST,
    )


def test_another_driver():
    (finding,) = findings(eight(manifest=Manifest(driver_version="570")))
    assert finding.summary == f"Driver {DRIVER}, the manifest expects 570"
    assert finding.component.host == HOST
    (finding,) = findings(eight(manifest=Manifest(driver_version="580.9")))
    assert finding.id == "manifest.driver-version"


def test_fewer_gpus():
    (finding,) = findings(node((h100(i) for i in range(7)), manifest=GOOD))
    assert finding.summary == "7 GPUs work here, the manifest expects 8"
    assert (finding.id, finding.severity) == ("manifest.gpu-count", Severity.CRITICAL)


def test_more_gpus_are_info():
    (finding,) = findings(eight(manifest=Manifest(gpu_count=4)))
    assert finding.severity is Severity.INFO


def test_a_lost_gpu_does_not_count():
    gone = Gpu(index=7, state=GpuState.LOST, pci=PCI[7])
    summaries = [f.summary for f in findings(eight({7: gone}, manifest=GOOD), IDS[0])]
    assert summaries == ["7 GPUs work here, the manifest expects 8 (8 are listed)"]


def test_hidden_gpus_are_no_missing_ones():
    hidden = {i: Gpu(index=i, state=GpuState.NO_PERMISSION, pci=PCI[i]) for i in range(4, 8)}
    assert run(IDS[0], eight(hidden, manifest=GOOD)).outcome is Outcome.NOTAPPLICABLE


def test_a_container_with_some_of_the_gpus():
    bus = PciSection(
        devices=tuple(
            PciDevice(address=address, vendor_id=0x10DE, class_code=0x030200) for address in PCI
        )
    )
    gpus = [h100(i) for i in range(4)]
    inside = node(gpus, manifest=GOOD, pci=bus, container="docker")
    assert run(IDS[0], inside).outcome is Outcome.NOTAPPLICABLE
    host = node(gpus, manifest=GOOD, pci=bus)
    assert run(IDS[0], host).outcome is Outcome.FAIL


def test_without_nvml_nothing_is_counted():
    section = NvmlSection(init_error="NVML_ERROR_UNKNOWN", init_error_code=999)
    assert run(IDS[0], node(nvml=section, manifest=GOOD)).outcome is Outcome.UNKNOWN
