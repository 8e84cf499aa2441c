"""The Xid reasoner: classes, epochs, primaries and by-products, and every tempting alarm."""

import pytest
from msgspec.structs import replace

from agent.evaluate import evaluate
from probes.finding import Action, FaultClass
from probes.gap import Gap, GapReason
from probes.snapshot.gpu import Gpu, GpuReading, GpuState, RowRemap
from probes.snapshot.pci import PciSection
from probes.xid_catalog import XIDS, XidClass
from probes.xid_catalog import xid as catalog
from tests.support.kernel_logs import ADDRESSES, PROBES, chain, gpus, judged, node, notes, said, xid

GPU = "0000:3b:00.0"
OFF_BUS_LOG = """\
[402110.221908] pcieport 0000:3a:00.0: AER: Multiple Uncorrected (Non-Fatal) error received: 0000:3b:00.0
[402110.221940] nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
[402110.221951] nvidia 0000:3b:00.0:   device [10de:20b2] error status/mask=00004000/00000000
[402110.221960] nvidia 0000:3b:00.0:    [14] CmpltTO                (First)
[402111.004120] NVRM: GPU at PCI:0000:3b:00: GPU-00000009-c28a-b849-d89b-6517ee75c267
[402111.004140] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[402111.004151] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.
[402111.004990] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
[402133.118204] NVRM: Xid (PCI:0000:88:00): 43, pid=88120, name=python, Ch 00000010
"""
LOST = Gpu(index=2, state=GpuState.LOST, pci=GPU)


def gpu(**fields: object) -> Gpu:
    return Gpu(index=2, state=GpuState.OK, pci=GPU, readings=(GpuReading(at_ns=1),), **fields)  # type: ignore[arg-type]


# --- one fault, one finding ---


def test_a_fall_from_the_bus_is_one_critical_finding_with_all_its_lines() -> None:
    found = judged(OFF_BUS_LOG, nvml=gpus(LOST), pci=chain(GPU, "0000:3a:00.0"))
    (finding,) = found.findings
    assert finding.id == "xid.off-bus"
    assert finding.summary == (
        "GPU 0000:3b:00.0: Xid 79 (GPU has fallen off the bus) at "
        "402111 s; driver asks for a node reboot (154: 0x2)"
    )
    assert finding.remedy is not None
    assert finding.remedy.action is Action.REBOOT
    assert [(e.observed, e.quote) for e in finding.evidence][:2] == [
        (
            "Xid 79",
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        ),
        (
            "Xid 154",
            "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        ),
    ]
    assert "aer CmpltTO" in [e.observed for e in finding.evidence]
    assert {"gpu.lost", "gpu.off-bus", "gpu.missing", "kernel.aer"} <= set(finding.explains)
    assert finding.evidence[0].recheck == "dmesg -T | grep -iE 'Xid' | grep -i 0000:3b:00"


def test_xid_43_of_a_process_is_a_note_and_no_fault() -> None:
    assert notes(OFF_BUS_LOG, "xid.app", nvml=gpus(LOST)) == [
        "0000:88:00.0: Xid 43: process 88120 faulted; not a node fault"
    ]


def test_off_the_bus_without_an_xid_on_one_line_and_on_three() -> None:
    one = "[10.5] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n"
    three = (
        "[10.5] NVRM: The NVIDIA GPU 0000:3b:00.0\n"
        "[10.5] NVRM: (PCI ID: 10de:2330) installed in this system has\n"
        "[10.5] NVRM: fallen off the bus and is not responding to commands.\n"
    )
    for log in (one, three):
        (finding,) = judged(log).findings
        assert (finding.id, finding.component.pci) == ("xid.off-bus", GPU)
        assert finding.summary == (
            "GPU 0000:3b:00.0: GPU has fallen off the bus (NVRM line without an Xid) at 10 s; "
            "class: reboot the node"
        )


def test_a_gpu_of_the_log_alone_carries_the_uuid_of_its_map_line() -> None:
    (finding,) = judged(OFF_BUS_LOG).findings
    assert finding.component.gpu_uuid == "GPU-00000009-c28a-b849-d89b-6517ee75c267"


def test_79_and_74_on_one_gpu_are_one_fault() -> None:  # rule 9
    log = xid(
        100, 74, "NVLink: fatal error detected on link 3(0x100, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
    ) + xid(103, 79)
    assert said(log) == [("critical", "xid.off-bus", GPU)]


def test_links_of_peers_that_fall_with_a_gpu_are_not_theirs() -> None:
    link = "NVLink: fatal error detected on link 3(0x100, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
    log = xid(100, 79) + xid(101, 74, link, bus="88") + xid(104, 45, "pid=1, name=python", bus="89")
    assert said(log, nvml=gpus(LOST)) == [("critical", "xid.off-bus", GPU)]
    assert notes(log, "xid.app", nvml=gpus(LOST)) == [
        "0000:88:00.0: Xid 74: its NVLink peer 0000:3b:00.0 fell off the bus then",
        "0000:89:00.0: Xid 45: process 1 by-product of Xid 79 on 0000:3b:00.0",
    ]


def test_48_with_63_and_45_is_one_memory_error_that_drains_first() -> None:
    log = (
        xid(
            100,
            48,
            "pid=7, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 3, subpartition 1.",
        )
        + xid(100.5, 63, "Row Remapper: New row marked for remapping, reset gpu to activate.")
        + xid(101, 45, "pid=7, name=python, Ch 00000010")
        + xid(101, 154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")
    )
    (finding,) = judged(log).findings
    assert (finding.severity.value, finding.id) == ("warning", "xid.memory-error")
    assert finding.summary == (
        "GPU 0000:3b:00.0: Xid 48 GPU_ECC_DBE (uncorrectable ECC error) at 100 s; DRAM; driver asks "
        "for drain and reset (154: 0x4)"
    )
    assert finding.remedy is not None
    assert finding.remedy.text.startswith("Let the job end")


def test_uncontained_and_escaped_errors_are_critical_whatever_follows() -> None:
    for code in (95, 140):
        log = xid(100, code, "Uncontained: LTC TAG (0x7). RST: Yes, D-RST: No") + xid(101, 94)
        assert said(log) == [("critical", "xid.memory-error", GPU)]


def test_an_nvlink5_reset_brings_its_48_with_it() -> None:
    log = (
        xid(100, 144, "SAW_MVB Fatal XC0 i0 Link 05 (0x00000040 0x00000002 0x0 0x0 0x0)")
        + xid(100.1, 48, "DBE")
        + xid(100.2, 45, "pid=7, name=python")
    )
    (finding,) = judged(log).findings
    assert (finding.id, finding.component.type, finding.component.link) == (
        "xid.nvlink",
        "nvlink",
        5,
    )
    assert finding.summary == (
        "GPU 0000:3b:00.0: Xid 144 NVLINK_SAW (NVLink 5 error, unit SAW), link 5 at 100 s; status "
        "0x2 (sub-code 2 before R575, 64 since); class: NVLink error, by its registers"
    )


def test_a_memory_detail_alone_is_a_possible_warning() -> None:
    (finding,) = judged(xid(100, 171)).findings
    assert (finding.severity.value, finding.confidence.value) == ("warning", "possible")


# --- classes, pinned where other tools contradict the catalog ---


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (13, ("info", "xid.app")), (31, ("info", "xid.app")), (39, ("info", "xid.app")),
        (68, ("info", "xid.app")), (69, ("info", "xid.app")), (80, ("info", "xid.app")),
        (137, ("info", "xid.app")), (78, ("info", "xid.app")), (168, ("info", "xid.app")),
        (46, ("critical", "xid.reset-required")), (62, ("critical", "xid.reset-required")),
        (109, ("critical", "xid.reset-required")), (110, ("critical", "xid.reset-required")),
        (143, ("critical", "xid.reset-required")), (158, ("critical", "xid.reset-required")),
        (169, ("critical", "xid.reset-required")), (173, ("critical", "xid.reset-required")),
        (48, ("critical", "xid.memory-error")), (95, ("critical", "xid.memory-error")),
        (140, ("critical", "xid.memory-error")),
        (94, ("info", "xid.contained-memory-error")),
        (63, ("info", "xid.row-remap")), (64, ("critical", "xid.row-remap")),
        (156, ("info", "xid.row-remap")), (157, ("warning", "xid.row-remap")),
        (160, ("info", "xid.row-remap")), (161, ("warning", "xid.row-remap")),
        (79, ("critical", "xid.off-bus")), (167, ("critical", "xid.off-bus")),
        (54, ("critical", "xid.hardware")), (142, ("warning", "xid.hardware")),
        (151, ("critical", "xid.reboot-required")),
        (119, ("warning", "xid.gsp")), (120, ("warning", "xid.gsp")),
        (74, ("warning", "xid.nvlink")), (136, ("critical", "xid.nvlink")),
        (155, ("critical", "xid.nvlink")), (150, ("critical", "xid.nvlink")),
        (149, ("warning", "xid.nvlink")),
        (65, ("info", "xid.unknown")), (175, ("info", "xid.unknown")), (176, ("info", "xid.unknown")),
        (999, ("info", "xid.unknown")), (4000, ("info", "xid.unknown")),
    ],
)  # fmt: skip
def test_the_class_of_a_code_alone(code: int, expected: tuple[str, str]) -> None:
    assert said(xid(100, code)) == [(*expected, GPU if expected[1] != "xid.app" else None)]


@pytest.mark.parametrize(
    "code",
    [
        37,
        38,
        43,
        44,
        45,
        66,
        67,
        92,
        93,
        106,
        107,
        121,
        141,
        147,
        152,
        153,
        162,
        163,
        164,
        165,
        174,
    ],
)
def test_codes_that_ask_for_nothing(code: int) -> None:
    found = judged(xid(100, code), nvml=gpus())
    assert found.findings == ()
    assert found.health.value == "ok"


def test_the_catalog_is_whole() -> None:
    assert len(XIDS) == 111
    ours = {"xid.app", "xid.unknown", "xid.off-bus", "xid.memory-error", "xid.contained-memory-error",
            "xid.row-remap", "xid.nvlink", "xid.gsp", "xid.reset-required", "xid.reboot-required",
            "xid.hardware", "xid.recovery-action"}  # fmt: skip
    assert {entry.probe for entry in XIDS.values()} <= ours
    assert catalog(112).kind is XidClass.UNKNOWN
    assert (catalog(85).name, catalog(135).name, catalog(105).name, catalog(98).name) == (
        "CE9_ERROR", "CE19_ERROR", "NVJPG7_ERROR", "NVDEC7_ERROR",
    )  # fmt: skip


@pytest.mark.parametrize("code", sorted(XIDS))
def test_no_code_breaks_the_reasoner(code: int) -> None:
    found = judged(xid(100, code) * 3, nvml=gpus())
    assert [r for r in found.results if r.error] == []
    assert all(len(f.summary) <= 200 for f in found.findings)


# --- traps of node-checks B.6, by number ---


def test_trap_14_an_application_never_degrades_the_node() -> None:
    log = "".join(
        xid(100 + 60 * n, code, f"pid={n + 1}, name=python")
        for n, code in enumerate((13, 31, 43, 45, 68, 69))
    )
    found = judged(log, nvml=gpus())
    assert found.health.value == "ok"
    assert {finding.id for finding in found.findings} == {"xid.app"}
    assert all(finding.component.type == "host" for finding in found.findings)
    assert [f.summary for f in found.findings if "Xid 31" in f.summary] == [
        (
            "Xid 31 FIFO_ERROR_MMU_ERR_FLT (MMU fault: the process used an illegal address) at 160 s on "
            "0000:3b:00.0: process 2 (python); inspect the application"
        )
    ]


def test_trap_14_a_storm_of_45_is_one_note() -> None:
    log = "".join(xid(100 + n / 100, 45, f"pid={n}, name=python") for n in range(1, 673))
    assert said(log, nvml=gpus()) == []
    assert notes(log, "xid.app", nvml=gpus()) == [
        "0000:3b:00.0: Xid 45 (672 lines): process 1, 2, 3 +397 was ended or killed; not a node fault"
    ]


def test_trap_15_xid_63_is_a_repair() -> None:
    log = xid(100, 63, "Row Remapper: New row marked for remapping, reset gpu to activate.")
    (finding,) = judged(log, nvml=gpus()).findings
    assert finding.severity.value == "info"
    assert finding.remedy is not None
    assert finding.remedy.action is Action.RESET_GPU
    done = gpus(gpu(row_remap=RowRemap(pending=False, failure_occurred=False)))
    assert said(log, nvml=done) == []
    assert notes(log, "xid.row-remap", nvml=done) == [
        (
            "0000:3b:00.0: Xid 63 INFOROM_DRAM_RETIREMENT_EVENT (memory row marked for remapping): NVML "
            "has no remap pending and none failed: repaired"
        )
    ]


def test_trap_16_xid_94_kills_one_process_only() -> None:
    log = xid(100, 94, "pid=7, name=python, Contained: SM (0x1). RST: No, D-RST: No") + xid(
        101, 43, "pid=7, name=python"
    )
    found = judged(log, nvml=gpus())
    assert [(f.severity.value, f.id) for f in found.findings] == [
        ("info", "xid.contained-memory-error")
    ]
    assert found.health.value == "ok"
    assert found.findings[0].remedy is not None
    assert found.findings[0].remedy.action is Action.INSPECT_APP


def test_trap_16_unless_the_driver_asks_for_more() -> None:
    drain = xid(101, 154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")
    reset = xid(101, 154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert said(xid(100, 94) + drain) == [("warning", "xid.contained-memory-error", GPU)]
    assert said(xid(100, 94) + reset) == [("critical", "xid.contained-memory-error", GPU)]


def test_trap_16_a_48_that_was_contained_when_the_driver_asks_for_nothing() -> None:
    log = xid(402_000, 48, "DBE in DRAM") + xid(402_000.5, 94, "pid=7, name=python, Contained: SM")
    live = gpus(gpu(recovery_action=0), driver="580.65.06")
    assert said(log, nvml=live) == [("info", "xid.contained-memory-error", GPU)]
    assert said(log, nvml=gpus(driver="550.127.05")) == [("critical", "xid.memory-error", GPU)]


def test_trap_17_the_last_154_counts_and_zero_clears() -> None:
    up = xid(100, 154, "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)")
    down = xid(200, 154, "GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (PF FLR)")
    none = xid(300, 154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert said(up) == [("warning", "xid.recovery-action", GPU)]
    assert said(up + down) == [("critical", "xid.recovery-action", GPU)]
    assert said(up + down + none) == []
    assert said(xid(100, 62) + up + none) == []
    assert said(none + xid(400, 62)) == [("critical", "xid.reset-required", GPU)]


def test_trap_17_field_230_outranks_the_line() -> None:
    up = xid(100, 154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
    live = gpus(gpu(recovery_action=0), driver="580.65.06")
    assert said(up, nvml=live) == []
    assert said(xid(99, 62) + up, nvml=live) == []
    assert notes(xid(99, 62) + up, "xid.reset-required", nvml=live) == [
        (
            "0000:3b:00.0: Xid 62 PMU_HALT_ERROR (power management controller halted): the driver asks "
            "for no action now (field 230): cured since"
        )
    ]
    # a code that the driver never announces with 154 is not cleared by it
    assert said(xid(99, 46), nvml=live) == [("critical", "xid.reset-required", GPU)]
    # and the driver's action turns a reset into a reboot
    asks = gpus(gpu(recovery_action=2), driver="580.65.06")
    (finding,) = judged(xid(99, 62), nvml=asks).findings
    assert finding.id == "xid.reboot-required"
    assert finding.summary.endswith("driver asks for a node reboot (field 230: 2)")
    assert finding.evidence[1].locator == "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"


def test_trap_17_an_unknown_action_is_shown_raw() -> None:
    log = xid(100, 154, "GPU recovery action changed from 0x0 (None) to 0x1f (Something New)")
    (finding,) = judged(log).findings
    assert (finding.severity.value, finding.confidence.value) == ("warning", "possible")
    assert "recovery action 0x1f (unknown)" in finding.summary


def test_trap_18_what_is_older_than_a_driver_load_or_reset_is_cured() -> None:
    load = "[200.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024\n"
    for code in (48, 62, 64, 74, 79, 95, 109, 119):
        log = xid(100, code) + load
        assert said(log, nvml=gpus()) == [], code
        assert notes(log, "xid.app", nvml=gpus()) == [
            f"0000:3b:00.0: Xid {code}: before the last reset or driver load: cured by it"
        ]


def test_trap_18_a_gpu_that_answers_again_is_information() -> None:
    found = judged(xid(100, 79), nvml=gpus())
    assert [(f.severity.value, f.id) for f in found.findings] == [("info", "xid.off-bus")]
    assert found.health.value == "ok"


def test_trap_18_a_reset_without_a_line_is_seen_in_the_volatile_counter() -> None:
    reset = Gpu(
        index=2,
        state=GpuState.OK,
        pci=GPU,
        readings=(GpuReading(at_ns=1, ecc_volatile_uncorrectable=0),),
    )
    held = Gpu(
        index=2,
        state=GpuState.OK,
        pci=GPU,
        readings=(GpuReading(at_ns=1, ecc_volatile_uncorrectable=1),),
    )
    assert said(xid(100, 48), nvml=gpus(reset)) == []
    assert said(xid(402_000, 48), nvml=gpus(held)) == [("critical", "xid.memory-error", GPU)]


def test_trap_18_a_day_later_a_gpu_that_works_is_a_warning_only() -> None:
    (finding,) = judged(xid(100, 109), nvml=gpus()).findings
    assert (finding.severity.value, finding.confidence.value) == ("warning", "possible")
    assert said(xid(402_000, 109), nvml=gpus()) == [("critical", "xid.reset-required", GPU)]


def test_trap_19_a_gsp_timeout_once_after_a_driver_load() -> None:
    load = "[100.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024\n"
    once = xid(
        160,
        119,
        "pid=9, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU2 GSP!",
    )
    assert said(load + once, nvml=gpus()) == [("info", "xid.gsp", GPU)]
    assert judged(load + once, nvml=gpus()).health.value == "ok"
    assert said(once, nvml=gpus()) == [("warning", "xid.gsp", GPU)]
    assert said(load + once * 4) == [("critical", "xid.gsp", GPU)]
    hung = gpus(Gpu(index=2, state=GpuState.HUNG, pci=GPU))
    assert said(load + once, nvml=hung) == [("critical", "xid.gsp", GPU)]
    assert judged(once * 4).findings[0].fault_class is FaultClass.SOFTWARE


def test_trap_28_a_vgpu_start_failure_is_software() -> None:
    assert said(xid(100, 78), nvml=gpus()) == [("info", "xid.app", None)]


def test_trap_43_driver_chatter_is_nothing() -> None:
    log = "[1.0] NVRM: nvAssertOkFailedNoLog: Assertion failed: Nothing to do [NV_WARN_NOTHING_TO_DO] (0x00000003)\n"
    assert said(log, nvml=gpus()) == []


def test_trap_45_xid_999_is_unknown_and_shown() -> None:
    (finding,) = judged(xid(100, 999, "event data"), nvml=gpus()).findings
    assert finding.summary == (
        "GPU 0000:3b:00.0: unknown Xid 999 at 100 s; no catalog entry, judged as nothing"
    )
    assert finding.evidence[0].quote == "NVRM: Xid (PCI:0000:3b:00): 999, event data"


def test_trap_48_power_smoothing_wear_is_a_note() -> None:
    log = xid(100, 164) + xid(101, 165)
    assert said(log, nvml=gpus()) == []
    assert notes(log, "xid.app", nvml=gpus()) == [
        "0000:3b:00.0: Xid 164: power smoothing wear: little lifetime left; no fault by itself",
        "0000:3b:00.0: Xid 165: power smoothing wear: lifetime used up; no fault by itself",
    ]


# --- patterns and repeats ---


def faults(code: int, pids: range, bus: str = "3b", where: str = "") -> str:
    return "".join(
        xid(1000 * pid, code, f"pid={pid}, name=python, {where}", bus=bus) for pid in pids
    )


def test_one_gpu_that_several_processes_fault_on() -> None:
    assert said(faults(31, range(1, 4)), nvml=gpus())[0] == (
        "warning", "xid.repeats-on-one-gpu", GPU,
    )  # fmt: skip
    (finding, _) = judged(faults(31, range(1, 4)), nvml=gpus()).findings
    assert (
        finding.summary
        == "GPU 0000:3b:00.0: Xid 31 from 3 processes, limit 3; none on its 7 siblings"
    )
    assert finding.confidence.value == "possible"


def test_two_processes_or_other_gpus_or_a_single_gpu_accuse_no_gpu() -> None:
    for log in (
        faults(31, range(1, 3)),
        faults(31, range(1, 4)) + faults(31, range(5, 6), bus="88"),
        "".join(xid(100 + n, 31, "pid=7, name=python") for n in range(50)),
    ):
        assert [item[1] for item in said(log, nvml=gpus())] == ["xid.app"]
    assert [item[1] for item in said(faults(31, range(1, 4)))] == ["xid.app"]


def test_exceptions_count_by_tpc() -> None:
    same = faults(
        13,
        range(1, 4),
        where="Graphics SM Warp Exception on (GPC 4, TPC 2, SM 1): Out Of Range Address",
    )
    moving = "".join(
        faults(13, range(n, n + 1), where=f"Graphics Exception on (GPC {n}, TPC 2)")
        for n in (1, 2, 3)
    )
    assert said(same, nvml=gpus())[0][1] == "xid.repeats-on-one-gpu"
    assert [item[1] for item in said(moving, nvml=gpus())] == ["xid.app"]
    assert [item[1] for item in said(faults(13, range(1, 4)), nvml=gpus())] == ["xid.app"]


def test_a_second_64_after_a_reset_is_hardware() -> None:  # rule 7
    reset = xid(200, 154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    (finding,) = judged(xid(100, 64) + reset + xid(300, 64)).findings
    assert (finding.severity.value, finding.id) == ("critical", "xid.hardware")
    assert finding.remedy is not None
    assert finding.remedy.action is Action.REPLACE
    assert said(xid(100, 64) + reset) == []


# --- NVLink decoding ---


@pytest.mark.parametrize(
    ("registers", "expected"),
    [
        ("0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", []),  # bit 0: ignore
        ("0x40800000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", []),  # bits 23, 30: ignore
        ("0x100002, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", []),  # bits 1, 20: secondary
        ("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", ["info"]),  # parity, once
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", ["critical"]),  # bit 16: seat
        ("0x4000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", ["warning"]),  # not in the catalog
    ],
)
def test_xid_74_by_its_first_register(registers: str, expected: list[str]) -> None:
    log = xid(
        100,
        74,
        f"pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14({registers})",
    )
    assert [item[0] for item in said(log)] == expected


def test_repeated_parity_errors_on_one_link_ask_for_a_reset() -> None:
    line = "NVLink: fatal error detected on link 2(0x20, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
    assert [item[0] for item in said("".join(xid(100 + n, 74, line) for n in range(3)))] == [
        "critical"
    ]


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (144, "SAW_MVB Nonfatal XC0 i0 Link 01 (0x0 0x00000004)", []),
        (144, "SAW_MVB Fatal XC0 i0 Link 01 (0x0 0x00000010)", ["critical"]),
        (145, "RLW_REMAP Nonfatal XC0 i0 Link 05 (0x0 0x00000004)", ["info"]),
        (145, "RLW_REMAP Fatal XC0 i0 Link 05 (0x0 0x00000040)", ["critical"]),
        (145, "RLW_RXPIPE Nonfatal XC0 i0 Link 05 (0x0 0x00000001)", ["info"]),
        (145, "RLW_OTHER Nonfatal XC0 i0 Link 05 (0x0 0x00000001)", []),
        (146, "TLW_RX Fatal XC0 i0 Link 05 (0x0 0x00000004)", ["critical"]),
        (146, "TLW_RX Nonfatal XC0 i0 Link 05 (0x0 0x00000001)", []),
        (148, "NVLPW_CTRL Nonfatal XC0 i0 Link 05 (0x0 0x80000000)", ["info"]),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0)", ["critical"]),  # signal
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x00f505c6 0x0)", ["info"]),  # intended
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x020505c6 0x0)", ["warning"]),  # peer
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x026505c6 0x0)", []),  # no fault
        (149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 08 (0x0 0x1)", ["info"]),
        (149, "NETIR_MFDE Fatal XC0 i0 Link 08 (0x0 0x5)", ["critical"]),
        (149, "NETIR_MFDE Nonfatal XC0 i0 Link 08 (0x0 0x3)", []),
        (150, "MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x0 0x0)", ["critical"]),
    ],
)  # fmt: skip
def test_nvlink5_units(code: int, text: str, expected: list[str]) -> None:
    assert [item[0] for item in said(xid(100, code, text))] == expected


def test_the_sub_code_moved_with_driver_575() -> None:
    text = "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x0)"
    old = judged(xid(402_100, 149, text), nvml=gpus(driver="570.86.15")).findings[0]
    new = judged(xid(402_100, 149, text), nvml=gpus(driver="575.57.08")).findings[0]
    assert "(sub-code 14)" in old.summary
    assert "(sub-code 70)" in new.summary
    assert "link down, reason 000100: signal integrity" in new.summary


# --- floods, other GPUs, nothing to read ---


def test_a_flood_of_one_xid_is_one_finding() -> None:
    line = "pid=4711, name=python, Uncontained: LTC TAG (0x7). RST: Yes, D-RST: No"
    log = "".join(xid(1000 + n / 1000, 95, line) for n in range(20_000))
    (finding,) = judged(log).findings
    assert " 20000 times from 1000 s" in finding.summary


def test_two_faulty_gpus_are_two_findings_and_the_others_are_clear() -> None:
    found = judged(xid(402_000, 79) + xid(402_000, 62, bus="b2"), nvml=gpus(LOST))
    assert {(f.id, f.component.pci) for f in found.findings} == {
        ("xid.off-bus", GPU), ("xid.reset-required", "0000:b2:00.0"),
    }  # fmt: skip
    result = next(r for r in found.results if r.id == "xid.off-bus")
    assert result.judged == len(ADDRESSES)


def test_machines_without_gpus_and_logs_without_permission() -> None:
    none = judged("[1.0] usb 1-1: new device\n", pci=PciSection())
    assert {r.outcome.value for r in none.results if r.id.startswith("xid.")} == {"notapplicable"}
    denied = (Gap(source="kernel", reason=GapReason.DENIED, detail="/dev/kmsg: refused"),)
    blind = replace(node("", nvml=gpus()), kernel=None, gaps=denied)
    found = evaluate(blind, PROBES)
    assert {r.outcome.value for r in found.results} == {"unknown"}
    assert found.health.value == "unknown"
