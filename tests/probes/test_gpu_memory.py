"""ECC, row remapping, page retirement."""

from __future__ import annotations

import msgspec
import pytest

from probes.finding import Action, Confidence, JobImpact, Severity
from probes.gap import GapReason
from probes.result import Outcome
from probes.snapshot.gpu import RetiredPages, RowRemap, SramEcc
from tests.support.gpus import (
    PCI,
    eight,
    findings,
    found,
    gaps,
    gpu_counters,
    h100,
    last_run,
    node,
    rtx4090,
    run,
)

UNCORRECTABLE = "memory.ecc-uncorrectable"
RATE = "memory.ecc-correctable-rate"


def remapped(index=0, **fields):
    healthy = h100(index).row_remap or RowRemap()
    return h100(index, row_remap=msgspec.structs.replace(healthy, **fields))


def v100(index=0, **fields):
    older = {"architecture": 5, "name": "Tesla V100-SXM2-16GB", "row_remap": None, "sram_ecc": None}
    return h100(index, **{**older, "retired_pages": RetiredPages(
        multiple_single_bit=0, double_bit=0, pending=False), **fields})  # fmt: skip


def test_uncorrectable_errors_that_stand_still():
    bad = h100(7, reading={"ecc_volatile_uncorrectable": 2, "ecc_volatile_dram_uncorrectable": 2})
    (finding,) = findings(eight({7: bad}, busy=False))
    assert finding.summary == (
        "GPU 0000:df:00.0 has 2 uncorrectable memory errors since the driver loaded (2 in DRAM), "
        "not growing now"
    )
    assert (finding.id, finding.severity, finding.job_impact) == (
        UNCORRECTABLE,
        Severity.WARNING,
        JobImpact.NONE,
    )


def test_uncorrectable_errors_that_grow():
    bad = h100(7, readings=[{"ecc_volatile_uncorrectable": 2}, {"ecc_volatile_uncorrectable": 5}])
    (finding,) = findings(eight({7: bad}, busy=False))
    assert finding.summary == (
        "GPU 0000:df:00.0 has 5 uncorrectable memory errors since the driver loaded, 3 of them in "
        "the last 2 s"
    )
    assert (finding.severity, finding.job_impact) == (Severity.CRITICAL, JobImpact.BREAKS)


def test_uncorrectable_errors_that_grew_since_the_last_run():
    bad = h100(7, samples=1, reading={"ecc_volatile_uncorrectable": 5})
    snapshot = eight(
        {7: bad},
        busy=False,
        baseline=last_run(gpu_counters(bad, ecc_volatile_uncorrectable=4)),
    )
    (finding,) = findings(snapshot)
    assert finding.severity is Severity.CRITICAL
    assert finding.summary.endswith("1 of them in the last 300 s")


def test_corrected_errors_by_rate():
    bad = h100(
        1, readings=[{"ecc_volatile_correctable": 100}, {"ecc_volatile_correctable": 35_414}]
    )
    (finding,) = findings(eight({1: bad}, busy=False))
    assert finding.summary == (
        "GPU 0000:43:00.0 corrects 17657 memory errors per second (limit 10)"
    )
    assert (finding.id, finding.severity) == (RATE, Severity.WARNING)


def test_corrected_totals_without_a_second_reading_give_no_rate():
    old = h100(1, samples=1, reading={"ecc_volatile_correctable": 20_000_000})
    result = run(RATE, node([old]))
    assert (result.outcome, result.missing) == (
        Outcome.UNKNOWN,
        ("readings of 0000:43:00.0: not-collected",),
    )


def test_aggregate_is_history():
    old = h100(0, reading={"ecc_aggregate_uncorrectable": 1})
    (finding,) = findings(eight({0: old}, busy=False))
    assert (finding.id, finding.severity) == ("memory.ecc-aggregate", Severity.INFO)


def test_sram_threshold():
    worn = h100(1, sram_ecc=SramEcc(threshold_exceeded=True, aggregate_uncorrectable_parity=7))
    (finding,) = findings(eight({1: worn}, busy=False))
    assert finding.summary == "GPU 0000:43:00.0 has passed the driver's SRAM error threshold"
    assert finding.remedy is not None
    assert finding.remedy.action is Action.REPLACE


def test_sram_errors_below_the_threshold_are_no_fault():
    fine = h100(1, sram_ecc=SramEcc(threshold_exceeded=False, aggregate_uncorrectable_parity=3))
    assert findings(eight({1: fine}, busy=False)) == []


def test_sram_needs_root():
    hidden = [h100(i, sram_ecc=None) for i in range(2)]
    snapshot = node(hidden, gaps=gaps("sram_ecc", reason=GapReason.DENIED))
    assert run("memory.sram-threshold", snapshot).outcome is Outcome.UNKNOWN


def test_remap_pending_lets_the_job_go_on():
    (finding,) = findings(eight({3: remapped(3, pending=True, uncorrectable_rows=1)}, busy=False))
    assert (finding.id, finding.severity, finding.job_impact) == (
        "memory.row-remap-pending",
        Severity.WARNING,
        JobImpact.NONE,
    )
    assert finding.remedy is not None
    assert finding.remedy.action is Action.RESET_GPU
    assert finding.summary == (
        "GPU 0000:61:00.0 has a row remapping pending: a job may go on, reset it at a convenient "
        "time"
    )


def test_remap_failure_is_critical_and_explains_the_spares():
    worn = remapped(6, failure_occurred=True, uncorrectable_rows=8, banks_none=1)
    failure, spares = findings(eight({6: worn}, busy=False))
    assert (failure.id, failure.severity) == ("memory.row-remap-failure", Severity.CRITICAL)
    assert failure.explains == (spares.id,) == ("memory.row-remap-spares",)
    assert spares.summary == (
        "GPU 0000:d1:00.0 has 1 memory banks without a spare row, 8 rows remapped"
    )


def test_remapped_512_rows_in_all():
    (finding,) = findings(eight({6: remapped(6, uncorrectable_rows=512)}, busy=False))
    assert finding.summary == "GPU 0000:d1:00.0 has remapped 512 rows of 512"


def test_a_histogram_that_could_not_be_read_is_never_clear():
    part = remapped(6, banks_none=None)
    snapshot = eight({6: part}, gaps=gaps("banks_none", reason=GapReason.TIMEOUT))
    result = run("memory.row-remap-spares", snapshot)
    assert (result.outcome, result.judged) == (Outcome.UNKNOWN, 7)


@pytest.mark.parametrize(
    ("pages", "text", "action"),
    [
        (
            RetiredPages(multiple_single_bit=1, double_bit=2, pending=True),
            "has 3 retired memory pages (2 by double-bit errors), one more pending",
            Action.RESET_GPU,
        ),
        (
            RetiredPages(multiple_single_bit=50, double_bit=13, pending=False),
            "has 63 retired memory pages (13 by double-bit errors), limit 63",
            Action.REPLACE,
        ),
        (
            RetiredPages(multiple_single_bit=0, double_bit=16, pending=False),
            "has 16 retired memory pages (16 by double-bit errors), limit 63",
            Action.REPLACE,
        ),
    ],
)
def test_page_retirement(pages, text, action):
    (finding,) = findings(node([v100(5, retired_pages=pages), v100(6)]))
    assert finding.summary == f"GPU {PCI[5]} {text}"
    assert finding.remedy is not None
    assert finding.remedy.action is action


def test_some_retired_pages_are_no_fault():
    some = RetiredPages(multiple_single_bit=4, double_bit=1, pending=False)
    assert findings(node([v100(0, retired_pages=some)])) == []


def test_older_parts_have_no_row_remapping_and_newer_no_page_retirement():
    assert run("memory.row-remap-pending", node([v100()])).outcome is Outcome.NOTAPPLICABLE
    assert run("memory.page-retirement", node([h100()])).outcome is Outcome.NOTAPPLICABLE


def test_ecc_mode_waits_for_a_reset():
    (finding,) = findings(eight({0: h100(0, ecc_mode_pending=False)}, busy=False))
    assert (finding.id, finding.severity) == ("memory.ecc-mode-pending", Severity.INFO)
    assert finding.summary == (
        "GPU 0000:1b:00.0 has ECC on and will have it off after the next reset"
    )


def test_one_gpu_that_could_not_be_read_hides_no_other():
    blind = h100(0, reading={"ecc_volatile_uncorrectable": None})
    bad = h100(1, reading={"ecc_volatile_uncorrectable": 1})
    snapshot = node([blind, bad], gaps=gaps("ecc_volatile_uncorrectable", reason=GapReason.TIMEOUT))
    assert found(snapshot, UNCORRECTABLE) == [(UNCORRECTABLE, PCI[1])]
    assert run(UNCORRECTABLE, node([blind, h100(1)], gaps=snapshot.gaps)).outcome is Outcome.UNKNOWN


def test_consumer_parts_without_ecc_are_not_judged():
    for probe_id in (UNCORRECTABLE, RATE, "memory.ecc-aggregate", "memory.row-remap-failure"):
        assert run(probe_id, node([rtx4090()])).outcome is Outcome.NOTAPPLICABLE


def test_what_a_rate_explains_stays_possible():
    bad = h100(1, readings=[{}, {"ecc_volatile_correctable": 40}])
    (finding,) = findings(eight({1: bad}, busy=False))
    assert finding.confidence is Confidence.LIKELY
    assert finding.explains == ("nvml.slow-call",)
