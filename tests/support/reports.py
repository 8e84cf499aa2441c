"""A report with a bit of everything, and a healthy one."""

from probes.finding import (
    Action,
    Basis,
    Component,
    Confidence,
    Evidence,
    Expectation,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import Gap, GapReason
from probes.result import (
    REPORT_SCHEMA,
    Acknowledged,
    Health,
    Outcome,
    ProbeResult,
    Report,
    RuledOut,
    Verdict,
)

GPU = Component(
    type="gpu", host="n44", gpu_uuid="GPU-ed3baabb-0000-0000-0000-000000000000",
    pci="0000:3b:00.0", index=0,
)  # fmt: skip
OFF_BUS = Finding(
    id="xid.off-bus",
    severity=Severity.CRITICAL,
    confidence=Confidence.PROVEN,
    fault_class=FaultClass.HARDWARE,
    job_impact=JobImpact.BREAKS,
    component=GPU,
    summary="GPU 0000:3b:00.0 has fallen off the bus (Xid 79)",
    evidence=(
        Evidence(
            source="kmsg",
            locator="/dev/kmsg seq 812",
            quote="NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            recheck="dmesg | grep 'Xid.*3b:00'",
        ),
    ),
    explains=("gpu.lost", "gpu.missing"),
    remedy=Remedy(action=Action.DRAIN, text="drain n44 and power-cycle it", disruptive=True),
)  # fmt: skip
NARROW = Finding(
    id="pcie.width-trained-down",
    severity=Severity.WARNING,
    confidence=Confidence.LIKELY,
    fault_class=FaultClass.HARDWARE,
    job_impact=JobImpact.SLOWS,
    component=Component(type="gpu", host="n44", pci="0000:88:00.0"),
    summary="GPU 0000:88:00.0 link is x8, slot supports x16",
    evidence=(
        Evidence(
            source="sysfs",
            locator="/sys/bus/pci/devices/0000:88:00.0/current_link_width",
            observed=8,
            unit="lanes",
            expected=Expectation(value=16, basis=Basis.SLOT_MAX),
        ),
    ),
)
CAP = Finding(
    id="power.limit-low",
    severity=Severity.INFO,
    confidence=Confidence.PROVEN,
    fault_class=FaultClass.CONFIGURATION,
    job_impact=JobImpact.NONE,
    component=Component(type="gpu", host="n44", pci="0000:89:00.0"),
    summary="GPU 0000:89:00.0 is capped at 350 W, default 400 W",
    evidence=(Evidence(source="nvml", locator="nvmlDeviceGetEnforcedPowerLimit"),),
)


def verdict(**changes: object) -> Verdict:
    fields: dict[str, object] = {
        "kind": "node",
        "fault_class": FaultClass.HARDWARE,
        "code": "xid.off-bus",
        "culprits": (GPU,),
        "summary": "GPU 0000:3b:00.0 has fallen off the bus (Xid 79); 7 other GPUs answer",
        "confidence": Confidence.PROVEN,
        "evidence": OFF_BUS.evidence,
        "ruled_out": (RuledOut(what="Xid 43 on 0000:88:00.0", why="process 88120 faulted"),),
        "victims": (),
        "next_step": "Drain n44 and power-cycle it.",
    }
    return Verdict(**(fields | changes))  # type: ignore[arg-type]


def faulty(**changes: object) -> Report:
    fields: dict[str, object] = {
        "schema": REPORT_SCHEMA,
        "tool_version": "0.1.0",
        "command": "check",
        "host": "n44",
        "taken_at": "2026-01-01T00:00:00Z",
        "taken_at_ns": 1_767_225_600_000_000_000,
        "health": Health.CRITICAL,
        "job_impact": JobImpact.BREAKS,
        "verdicts": (verdict(),),
        "findings": (OFF_BUS, NARROW, CAP),
        "acknowledged": (
            Acknowledged(
                fingerprint=NARROW.fingerprint, id=NARROW.id, until="2026-02-01", reason="riser ordered"
            ),
        ),
        "results": (
            ProbeResult(id="pcie.acs-redirect", outcome=Outcome.UNKNOWN, missing=("acs_control: denied",)),
            ProbeResult(id="pcie.width-trained-down", outcome=Outcome.FAIL, judged=8),
            ProbeResult(id="power.limit-low", outcome=Outcome.PASS, judged=7),
            ProbeResult(id="nvlink.down", outcome=Outcome.NOTAPPLICABLE, notes=("no NVLink",)),
            ProbeResult(id="xid.off-bus", outcome=Outcome.FAIL, judged=8),
        ),
        "gaps": (
            Gap(
                source="pci", reason=GapReason.DENIED, fields=("acs_control",),
                detail="config: only 64 bytes", allow="run as root",
            ),
        ),
        "snapshot_digest": "sha256:00",
    }  # fmt: skip
    return Report(**(fields | changes))  # type: ignore[arg-type]


def healthy(**changes: object) -> Report:
    fields: dict[str, object] = {
        "health": Health.OK,
        "job_impact": JobImpact.NONE,
        "verdicts": (
            verdict(
                fault_class=FaultClass.NO_FAULT, code="node.fit", culprits=(), ruled_out=(),
                summary="nothing wrong on 8 GPUs", next_step="",
            ),
        ),
        "findings": (),
        "acknowledged": (),
        "results": (ProbeResult(id="power.limit-low", outcome=Outcome.PASS, judged=8),),
        "gaps": (),
    }  # fmt: skip
    return faulty(**(fields | changes))
