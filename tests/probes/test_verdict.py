from typing import Any

from probes.all_clear import SUMMARY_LIMIT
from probes.finding import (
    Action,
    Component,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import Gap, GapReason
from probes.result import Outcome, ProbeResult, RuledOut, Verdict
from probes.snapshot.gpu import GpuState, NvmlSection
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciSection
from probes.verdict import node_verdicts
from probes.view import Node
from tests.support.nodes import ADDRESSES, gpu, node


def on(index: int) -> Component:
    return Node(node()).gpu_component(gpu(index))


HOST = Component(type="host", host="n44")
BRIDGE = Component(type="link", host="n44", pci="0000:15:01.0")


def finding(id: str, component: Component, **changes: Any) -> Finding:
    fields: dict[str, Any] = {
        "severity": Severity.WARNING,
        "confidence": Confidence.LIKELY,
        "fault_class": FaultClass.HARDWARE,
        "job_impact": JobImpact.SLOWS,
        "summary": f"{component.label()} {id} 8, expected 16",
        "evidence": (Evidence(source="nvml", locator=id, recheck=f"show {id}"),),
        "remedy": Remedy(action=Action.RESEAT, text=f"Mend {id}.", disruptive=True),
    }
    return Finding(id=id, component=component, **(fields | changes))


def verdicts(
    *findings: Finding,
    snapshot: NodeSnapshot | None = None,
    results: tuple[ProbeResult, ...] = (),
    hidden: bool = False,
) -> tuple[Verdict, ...]:
    return node_verdicts(Node(snapshot or node()), findings, results, hidden=hidden)


PASSED = ProbeResult(id="power.limit-low", outcome=Outcome.PASS, judged=4)


# --- fit ---


def test_a_fit_node_says_what_was_judged() -> None:
    (found,) = verdicts(results=(PASSED,))
    assert (found.kind, found.code, found.fault_class) == ("node", "node.fit", FaultClass.NO_FAULT)
    assert found.summary == (
        "Nothing wrong found: 1 rule passed on 4 of 4 GPUs (NVIDIA H100 80GB HBM3), "
        "1 network port, 812 kernel log lines"
    )
    assert (found.culprits, found.victims, found.confidence) == ((), (), Confidence.PROVEN)
    assert [(item.source, item.observed, item.unit) for item in found.evidence] == [
        ("nvml", 4, "GPUs"), ("sysfs", 4, "NVIDIA GPUs"), ("kernel log", 0, "events"),
    ]  # fmt: skip


def test_a_machine_without_gpu_says_so() -> None:
    bare = node(nvml=None, pci=PciSection(), nics=None, kernel=None)
    (found,) = verdicts(snapshot=bare, results=(PASSED,))
    assert found.code == "node.fit"
    assert found.summary == (
        "Nothing wrong found: no NVIDIA GPU here; host judged only; 1 rule passed"
    )
    (found,) = verdicts(finding("host.memory", HOST), snapshot=bare)
    assert found.summary == "n44 host.memory 8, expected 16; no NVIDIA GPU here; host judged only"


def test_without_pci_and_driver_nothing_is_said_of_gpus_being_absent() -> None:
    (found,) = verdicts(snapshot=node(nvml=None, pci=None, nics=None, kernel=None))
    assert "no GPU seen, and PCI could not be read" in found.summary


def test_where_nvml_is_silent_a_gpu_may_be_there_all_the_same() -> None:
    gap = Gap(source="nvml", reason=GapReason.TIMEOUT, detail="nvmlInit did not return")
    bare = node(nvml=None, pci=PciSection(), nics=None, kernel=None, gaps=(gap,))
    (found,) = verdicts(snapshot=bare, results=(PASSED,), hidden=True)
    assert "no GPU seen, and NVML could not be read" in found.summary
    assert "host judged only" not in found.summary


def test_rules_that_could_not_judge_are_told_also_when_it_does_not_count() -> None:
    blind = ProbeResult(id="nvlink.errors", outcome=Outcome.UNKNOWN, missing=("x: not-collected",))
    (found,) = verdicts(results=(PASSED, blind))
    assert found.code == "node.fit" and found.confidence is Confidence.LIKELY
    assert found.summary.endswith("; 1 rule could not judge")


def test_info_leaves_a_node_fit() -> None:
    (found,) = verdicts(finding("power.limit-low", on(0), severity=Severity.INFO))
    assert found.code == "node.fit"


# --- can't tell ---


def test_what_stayed_hidden_is_named_and_how_to_allow_it() -> None:
    gap = Gap(
        source="kernel", reason=GapReason.DENIED, detail="/dev/kmsg: Operation not permitted",
        allow="run as root, or add CAP_SYSLOG",
    )  # fmt: skip
    blind = ProbeResult(
        id="xid.any", outcome=Outcome.UNKNOWN, missing=("kernel: denied (/dev/kmsg: no)",)
    )
    (found,) = verdicts(
        snapshot=node(gaps=(gap,), kernel=None), results=(PASSED, blind), hidden=True
    )
    assert (found.code, found.fault_class) == ("node.cannot-tell", FaultClass.CANNOT_TELL)
    assert found.culprits == ()
    assert found.summary == (
        "Nothing wrong seen, but 1 rule could not judge (xid.any); kernel: denied; "
        "1 rule passed on 4 of 4 GPUs (NVIDIA H100 80GB HBM3), 1 network port"
    )
    assert found.next_step == "To settle it: run as root, or add CAP_SYSLOG."
    assert found.evidence == (
        Evidence(
            source="kernel", locator="everything", observed="denied",
            quote="/dev/kmsg: Operation not permitted", recheck="laggard doctor",
        ),
    )  # fmt: skip


def test_what_nobody_asked_for_is_no_reason_unless_it_was_required() -> None:
    denied = ProbeResult(id="xid.any", outcome=Outcome.UNKNOWN, missing=("kernel: denied",))
    rate = ProbeResult(id="nic.errors", outcome=Outcome.UNKNOWN, missing=("x: not-collected",))
    (found,) = verdicts(results=(rate, denied), hidden=True)
    assert "1 rule could not judge (xid.any); kernel: denied" in found.summary
    (found,) = verdicts(results=(rate,), hidden=True)
    assert "1 rule could not judge (nic.errors); x: not-collected" in found.summary


def test_a_rule_that_broke_is_our_bug() -> None:
    broken = ProbeResult(id="xid.any", outcome=Outcome.ERROR, error="Traceback ...")
    (found,) = verdicts(results=(broken,), hidden=True)
    assert "xid.any broke, a bug in laggard" in found.summary
    assert found.next_step.startswith("`laggard doctor`")


# --- something is wrong ---


def test_the_worst_cause_answers_and_the_others_follow() -> None:
    mild = finding("pcie.width-trained-down", on(1))
    grave = finding(
        "xid.off-bus", on(0), severity=Severity.CRITICAL, job_impact=JobImpact.BREAKS,
        confidence=Confidence.PROVEN,
    )  # fmt: skip
    first, second = verdicts(mild, grave)
    assert (first.code, first.culprits) == ("xid.off-bus", (on(0),))
    assert first.summary == (
        "0000:17:00.0 xid.off-bus 8, expected 16; nothing found on the other 2 of 4 GPUs; "
        "also pcie.width-trained-down"
    )
    assert (first.confidence, first.fault_class) == (Confidence.PROVEN, FaultClass.HARDWARE)
    assert first.next_step == "Mend xid.off-bus."
    assert (second.code, second.culprits) == ("pcie.width-trained-down", (on(1),))
    assert second.summary == "0000:3b:00.0 pcie.width-trained-down 8, expected 16"


def test_the_others_answer_only_as_far_as_they_do() -> None:
    gpus = (gpu(0, state=GpuState.LOST), gpu(1, state=GpuState.HUNG), gpu(2), gpu(3))
    snapshot = node(nvml=NvmlSection(gpus=gpus))
    (found,) = verdicts(finding("gpu.lost", on(0)), snapshot=snapshot)
    assert "the other 2 of 4 GPUs answer" in found.summary


def test_a_symptom_stands_under_its_cause_and_accuses_nobody() -> None:
    cause = finding("xid.off-bus", on(0), explains=("gpu.lost", "nvml.hung"))
    lost = finding("gpu.lost", on(0), severity=Severity.CRITICAL)
    hung = finding("nvml.hung", HOST)
    (found,) = verdicts(lost, hung, cause)
    assert (found.code, found.culprits, found.victims) == ("xid.off-bus", (on(0),), ())
    assert [item.locator for item in found.evidence] == ["xid.off-bus", "gpu.lost", "nvml.hung"]
    assert found.ruled_out == (
        RuledOut(
            what="gpu.lost on 0000:17:00.0 as a fault of its own", why="xid.off-bus causes it"
        ),
        RuledOut(what="nvml.hung on n44 as a fault of its own", why="xid.off-bus causes it"),
    )


def test_what_another_part_explains_does_not_excuse_this_one() -> None:
    cause = finding("xid.off-bus", on(0), explains=("gpu.lost",))
    other = finding("gpu.lost", on(1))
    assert [v.code for v in verdicts(cause, other)] == ["xid.off-bus", "gpu.lost"]


def test_gpus_below_a_slow_bridge_are_victims_never_culprits() -> None:
    cause = finding("pcie.upstream-bottleneck", BRIDGE, explains=("pcie.slow",))
    below = [finding("pcie.slow", on(i)) for i in (0, 1)]
    apart = finding("pcie.slow", on(2))
    first, second = verdicts(*below, apart, cause)
    assert (first.code, first.culprits) == ("pcie.upstream-bottleneck", (BRIDGE,))
    assert first.victims == (on(0), on(1))
    assert (second.code, second.culprits) == ("pcie.slow", (on(2),))


def test_a_host_cause_reaches_every_part() -> None:
    cause = finding("driver.mismatch", HOST, explains=("gpu.missing",))
    (found,) = verdicts(finding("gpu.missing", on(3)), cause)
    assert (found.code, found.victims) == ("driver.mismatch", (on(3),))


def test_a_link_of_a_gpu_is_reached_by_its_gpu() -> None:
    link = Component(type="nvlink", host="n44", pci=ADDRESSES[0], link=3)
    cause = finding("xid.nvlink", on(0), explains=("nvlink.down",))
    (found,) = verdicts(finding("nvlink.down", link), cause)
    assert (found.culprits, found.victims) == ((on(0),), (link,))


def test_a_victim_of_one_cause_that_is_a_culprit_of_another_is_no_victim() -> None:
    cause = finding("pcie.upstream-bottleneck", BRIDGE, explains=("pcie.slow",))
    both = (finding("pcie.slow", on(0)), finding("power.limit-low", on(0)))
    first, second = verdicts(*both, cause)
    assert (first.victims, second.culprits) == ((), (on(0),))


def test_causes_in_a_circle_begin_with_the_worst() -> None:
    one = finding("a.one", on(0), explains=("b.two",))
    two = finding("b.two", on(0), explains=("a.one",), severity=Severity.CRITICAL)
    (found,) = verdicts(one, two)
    assert found.code == "b.two"


def test_a_mild_cause_of_something_grave_answers_first() -> None:
    grave = finding("gpu.lost", on(0), severity=Severity.CRITICAL)
    cause = finding("z.cause", on(0), explains=("gpu.lost",))
    other = finding("a.other", on(1), job_impact=JobImpact.BREAKS)
    assert [v.code for v in verdicts(grave, cause, other)] == ["z.cause", "a.other"]


def test_the_same_fault_on_many_parts_is_one_verdict_with_all_of_them() -> None:
    (found,) = verdicts(*(finding("power.limit-low", on(i)) for i in range(3)))
    assert found.culprits == tuple(on(i) for i in range(3))
    assert found.summary == (
        "0000:17:00.0 power.limit-low 8, expected 16; the same on 2 more: 0000:3b:00.0, "
        "0000:88:00.0; nothing found on the other 1 of 4 GPUs"
    )


def test_what_all_gpus_have_alike_is_the_hosts() -> None:
    (found,) = verdicts(*(finding("power.limit-low", on(i)) for i in range(4)))
    assert found.culprits == (HOST,)
    assert found.victims == tuple(on(i) for i in range(4))


def test_one_part_with_two_findings_of_an_id_is_one_culprit() -> None:
    (found,) = verdicts(finding("xid.app", on(0)), finding("xid.app", on(0), summary="again"))
    assert found.culprits == (on(0),)


def test_load_accuses_nobody() -> None:
    (found,) = verdicts(finding("host.busy", HOST, fault_class=FaultClass.LOAD))
    assert (found.fault_class, found.culprits) == (FaultClass.LOAD, ())


def test_a_long_summary_is_cut_at_the_limit() -> None:
    (found,) = verdicts(finding("a.b", on(0), summary="x" * 400))
    assert len(found.summary) == SUMMARY_LIMIT and found.summary.endswith("…")


def test_without_a_remedy_the_explanation_is_the_next_step() -> None:
    (found,) = verdicts(finding("a.b", on(0), remedy=None))
    assert found.next_step == "Read `laggard explain a.b`."


def test_tempting_alarms_that_were_not_raised_are_ruled_out_folded() -> None:
    idle = "idle: Gen1 at rest is power saving"
    results = (
        ProbeResult(
            id="pcie.generation-low",
            outcome=Outcome.PASS,
            judged=4,
            notes=(
                *(f"{address}: {idle}" for address in ADDRESSES),
                "vGPU guest: no link to judge",
            ),
        ),
        ProbeResult(id="nic.errors", outcome=Outcome.PASS, judged=1, notes=("mlx5_0/1: old",)),
        ProbeResult(id="mig.any", outcome=Outcome.NOTAPPLICABLE, notes=(f"{ADDRESSES[0]}: no",)),
    )
    (found,) = verdicts(results=results)
    assert found.ruled_out == (
        RuledOut(what="pcie.generation-low on 0000:17:00.0 and 3 more", why=idle),
        RuledOut(what="nic.errors on mlx5_0/1", why="old"),
    )


def test_only_the_first_verdict_lists_what_is_no_fault() -> None:
    results = (ProbeResult(id="a.b", outcome=Outcome.PASS, notes=(f"{ADDRESSES[0]}: fine",)),)
    first, second = verdicts(finding("c.d", on(0)), finding("e.f", on(1)), results=results)
    assert (len(first.ruled_out), len(second.ruled_out)) == (1, 0)
