"""Replays, AER counters, ACS and the IOMMU."""

from typing import Any

import pytest

from probes.finding import Component, Confidence, FaultClass, JobImpact, Severity
from probes.gap import Gap, GapReason
from probes.node.pcie_errors import (
    aer_correctable_rate,
    aer_uncorrectable,
    allowed_per_minute,
    replay_growth,
)
from probes.node.pcie_isolation import acs_redirect, iommu
from probes.result import Outcome
from probes.snapshot.baseline import Baseline, CounterSet
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice
from tests.support.pci_nodes import (
    SECOND,
    bridge,
    device,
    gpu,
    judge,
    nic,
    notes,
    read,
    snapshot,
    summaries,
    with_aer,
)

GPU = "0000:17:00.0"
ROOT = "0000:16:01.0"
NOW_NS = 1_767_225_600 * SECOND


def baseline(kind: str, key: str, minutes: int = 60, **counters: int) -> Baseline:
    """What the last run saw, an hour ago."""
    return Baseline(
        at_ns=NOW_NS - minutes * 60 * SECOND,
        boot_id="b1",
        driver_version="570.1",
        sets=(CounterSet(kind=kind, key=key, counters=counters),),
    )


@pytest.mark.parametrize(
    ("speed", "width", "allowed"), [(8.0, 16, 8), (16.0, 16, 16), (32.0, 16, 31), (2.5, 1, 1)]
)
def test_the_allowance_is_the_one_that_the_vendor_uses(
    speed: float, width: int, allowed: int
) -> None:
    assert allowed_per_minute(speed, width, 1e-12) == allowed


# --- replays ---


def replaying(*replays: int, **changes: Any) -> NodeSnapshot:
    return snapshot((), (gpu(GPU, replays=replays, **changes.pop("gpu", {})),), **changes)


def test_replays_that_grow_in_the_sample() -> None:
    (finding,) = judge(replay_growth, replaying(9, 209))[1]
    assert finding.summary == (
        f"GPU {GPU}: 200 PCIe replays in 2.0 s, a healthy link makes up to 31 a minute"
    )
    assert (finding.severity, finding.confidence, finding.fault_class) == (
        Severity.WARNING, Confidence.LIKELY, FaultClass.HARDWARE,
    )  # fmt: skip


def test_a_total_of_replays_is_no_fault() -> None:
    assert notes(replay_growth, replaying(900, 900)) == (
        f"{GPU}: 900 replays so far, none in this sample",
    )


def test_one_replay_in_two_seconds_is_not_thirty_a_minute() -> None:
    assert notes(replay_growth, replaying(9, 11)) == (
        f"{GPU}: 2 replays in 2.0 s: within what a healthy link makes",
    )


def test_a_degraded_link_keeps_the_allowance_of_its_maximum() -> None:
    node = replaying(0, 20, gpu={"generation": 1, "width": 1})
    assert summaries(replay_growth, node) == []


def test_replays_since_the_last_run() -> None:
    key = "GPU-00000000-0000-0000-0000-000000000000"
    last = baseline("gpu", key, pcie_replay_count=100)
    assert summaries(replay_growth, replaying(3100, baseline=last)) == [
        (
            f"GPU {GPU}: 3000 PCIe replays in the 60 min since the last run, "
            "a healthy link makes up to 31 a minute"
        )
    ]
    assert summaries(replay_growth, replaying(1100, baseline=last)) == []
    assert summaries(replay_growth, replaying(50, baseline=last)) == []  # the counter was reset


def test_one_reading_without_an_earlier_run_says_nothing() -> None:
    result, findings = judge(replay_growth, replaying(9))
    assert findings == ()
    assert result.outcome is Outcome.UNKNOWN
    assert judge(replay_growth, replaying(0))[0].outcome is Outcome.PASS


# --- AER ---


def link(lower: dict[str, Any], upper: dict[str, Any] | None = None) -> tuple[PciDevice, ...]:
    return (with_aer(bridge(ROOT), **(upper or {})), with_aer(device(GPU, ROOT), **lower))


def test_corrected_errors_may_be_counted_at_the_other_end() -> None:
    node = snapshot(link({}, {"aer_correctable": (10, 400)}), ())
    (finding,) = judge(aer_correctable_rate, node)[1]
    assert finding.summary == (
        f"GPU {GPU}: link to root port {ROOT}: 390 corrected errors in 2.0 s seen by {ROOT}, "
        "a healthy link makes up to 31 a minute"
    )
    assert finding.component == Component(type="gpu", host="n07", pci=GPU)
    assert finding.evidence[0].quote == "TOTAL_ERR_COR 400"


def test_corrected_errors_since_boot_are_no_fault() -> None:
    node = snapshot(link({"aer_correctable": (2848, 2848)}), ())
    assert notes(aer_correctable_rate, node) == (
        f"{GPU}: 2848 corrected errors at {GPU} so far, none in this sample",
    )


def test_corrected_errors_since_the_last_run() -> None:
    last = baseline("pci", GPU, **{"aer_correctable.TOTAL_ERR_COR": 0})
    node = snapshot(link({"aer_correctable": (9000, 9000)}), (), baseline=last)
    assert len(summaries(aer_correctable_rate, node)) == 1


def test_one_reading_of_corrected_errors() -> None:
    section, gaps = read("pci-copied", readings=1)
    result, findings = judge(aer_correctable_rate, snapshot(section, None, gaps=gaps))
    assert findings == ()
    assert result.missing == ("aer_correctable of 0000:31:00.0: not-collected",)


@pytest.mark.parametrize(
    ("kind", "severity", "impact", "word"),
    [
        ("aer_fatal", Severity.CRITICAL, JobImpact.BREAKS, "fatal"),
        ("aer_nonfatal", Severity.WARNING, JobImpact.SLOWS, "non-fatal"),
    ],
)
def test_uncorrectable_errors_that_grow(
    kind: str, severity: Severity, impact: JobImpact, word: str
) -> None:
    (finding,) = judge(aer_uncorrectable, snapshot(link({kind: (1, 3)}), ()))[1]
    assert finding.summary == f"GPU {GPU}: 2 uncorrectable {word} PCIe errors in 2.0 s"
    assert (finding.severity, finding.job_impact, finding.confidence) == (
        severity, impact, Confidence.PROVEN,
    )  # fmt: skip


def test_uncorrectable_errors_since_boot() -> None:
    assert notes(aer_uncorrectable, snapshot(link({"aer_nonfatal": (4, 4)}), ())) == (
        f"{GPU}: 4 non-fatal since boot, not known to grow",
    )
    (finding,) = judge(aer_uncorrectable, snapshot(link({"aer_fatal": (1, 1)}), ()))[1]
    assert (finding.severity, finding.job_impact) == (Severity.INFO, JobImpact.NONE)


def test_no_error_reporting_in_the_kernel_is_not_healthy() -> None:
    gap = Gap(source="pci", reason=GapReason.UNSUPPORTED, fields=("aer_correctable", "aer_fatal"))
    node = snapshot((bridge(ROOT), device(GPU, ROOT)), (), gaps=(gap,))
    for item in (aer_correctable_rate, aer_uncorrectable):
        assert judge(item, node)[0].outcome is Outcome.NOTAPPLICABLE


# --- isolation ---


def test_acs_redirection_on_bare_metal() -> None:
    section, gaps = read("pci-acs-redirect")
    node = snapshot(section, (), gaps=gaps)
    first, second = judge(acs_redirect, node)[1]
    assert first.summary == (
        "Switch 0000:16:00.0: ACS redirects traffic between its devices to the root "
        "on 3 ports (0000:17:00.0, 0000:17:01.0, …)"
    )
    assert second.component == Component(type="link", host="n07", pci="0000:98:00.0")
    assert (first.severity, first.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)
    assert [item.observed for item in first.evidence] == ["0x001d"] * 3
    assert summaries(iommu, node) == [
        (
            "The IOMMU translates the transfers of 4 GPUs "
            "(group type DMA-FQ, passthrough is identity)"
        )
    ]


def test_trap_39_a_virtual_machine_needs_acs() -> None:
    section, gaps = read("pci-acs-redirect")
    node = snapshot(section, (), gaps=gaps, virtualization="kvm")
    for item in (acs_redirect, iommu):
        result, findings = judge(item, node)
        assert (result.outcome, findings) == (Outcome.NOTAPPLICABLE, ())


def test_trap_39_so_does_a_host_of_virtual_machines() -> None:
    node = snapshot(switch(0x1D, driver="vfio-pci"), ())
    assert judge(acs_redirect, node)[0].outcome is Outcome.NOTAPPLICABLE


def switch(control: int | None, **changes: Any) -> tuple[PciDevice, ...]:
    return (
        bridge("0000:15:01.0"),
        bridge("0000:16:00.0", "0000:15:01.0"),
        bridge("0000:17:00.0", "0000:16:00.0", acs_control=control),
        bridge("0000:17:01.0", "0000:16:00.0", acs_control=control),
        device("0000:18:00.0", "0000:17:00.0", **changes),
        nic("0000:19:00.0", "0000:17:01.0"),
    )


def test_source_validation_alone_redirects_nothing() -> None:
    assert notes(acs_redirect, snapshot(switch(0x01), ())) == (
        "0000:17:00.0: ACS control 0x01 redirects nothing",
        "0000:17:01.0: ACS control 0x01 redirects nothing",
    )


def test_direct_translated_requests_do_not_go_up() -> None:
    (finding,) = judge(acs_redirect, snapshot(switch(0x5D), ()))[1]
    assert (finding.severity, finding.confidence) == (Severity.INFO, Confidence.POSSIBLE)


def test_without_root_access_control_is_unknown() -> None:
    gap = Gap(source="pci", reason=GapReason.DENIED, fields=("acs_control",))
    result, findings = judge(acs_redirect, snapshot(switch(None), (), gaps=(gap,)))
    assert (result.outcome, findings) == (Outcome.UNKNOWN, ())


def test_one_gpu_below_a_root_port_has_nobody_to_talk_to() -> None:
    node = snapshot((bridge(ROOT, acs_control=0x1D), device(GPU, ROOT)), ())
    assert judge(acs_redirect, node)[0].outcome is Outcome.NOTAPPLICABLE


def test_an_iommu_in_passthrough_is_right() -> None:
    section, gaps = read("pci-hgx-h100")
    assert summaries(iommu, snapshot(section, (), gaps=gaps)) == []
    assert judge(iommu, snapshot(section, (), gaps=gaps))[0].judged == 8
