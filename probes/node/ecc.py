"""GPU memory errors as ECC counts them: now, their rate, their history, the SRAM threshold."""

from __future__ import annotations

from probes.finding import Action, Basis, Confidence, FaultClass, JobImpact, Remedy, Severity
from probes.gap import GapReason
from probes.gpu_facts import (
    REPLACE,
    RESET_LATER,
    gpu_finding,
    missing,
    no_ecc,
    not_for_vgpu,
    shown,
    smi,
)
from probes.registry import Clear, Limit, Limits, Statements, Unread, probe
from probes.snapshot.gpu import Gpu, GpuReading
from probes.view import Node, delta, last_reading


@probe("memory.ecc-uncorrectable", needs=("nvml",))
def ecc_uncorrectable(node: Node) -> Statements:
    """Uncorrectable memory errors since the driver loaded.

    Data was lost: the process that used it died (or should have), and the page is closed off. A
    count that still grows kills the next process, too.

    No fault: the lifetime (aggregate) count of an old board, whose rows were remapped long ago.
    Volatile counts start again when the driver loads.

    Sure: proven. Critical when it grew during the sample or since the last run; a warning when it
    stands still, because the driver contained it and a reset is due.

    Do: drain, then reset the GPU so that the bad row is remapped; read the Xid lines (48, 63, 64,
    94, 95) for what the driver did.
    """
    for gpu in node.live_gpus:
        newest = last_reading(gpu)
        count = newest.ecc_volatile_uncorrectable if newest else None
        if count is None:
            yield missing(gpu, "ecc_volatile_uncorrectable", no_ecc(gpu))
        elif count == 0 or newest is None:
            yield Clear(node.gpu_component(gpu))
        else:
            moved = _growth(node, gpu, "ecc_volatile_uncorrectable")
            growing = moved is not None and moved[0] > 0
            where = _where(newest)
            yield gpu_finding(
                node,
                gpu,
                "memory.ecc-uncorrectable",
                f"has {count} uncorrectable memory errors since the driver loaded{where}"
                + (
                    f", {moved[0]} of them in the last {moved[1] / 1e9:.0f} s"
                    if growing and moved
                    else ", not growing now"
                    if moved is not None
                    else ""
                ),
                severity=Severity.CRITICAL if growing else Severity.WARNING,
                impact=JobImpact.BREAKS if growing else JobImpact.NONE,
                evidence=(
                    shown(
                        "nvmlDeviceGetTotalEccErrors(UNCORRECTED, VOLATILE)",
                        count,
                        smi(gpu, "-q -d ECC"),
                        expected=(0, Basis.VENDOR_LIMIT),
                    ),
                ),
                remedy=Remedy(
                    action=Action.DRAIN,
                    text="Drain the node, then reset the GPU; see Xid 48, 63, 64, 94, 95 in the "
                    "kernel log. If it comes back, have the board replaced.",
                    disruptive=True,
                )
                if growing
                else RESET_LATER,
                explains=("memory.row-remap-pending", "memory.ecc-aggregate"),
            )


def _where(reading: GpuReading) -> str:
    parts = [
        f"{count} in {name}"
        for name, count in (
            ("SRAM", reading.ecc_volatile_sram_uncorrectable),
            ("DRAM", reading.ecc_volatile_dram_uncorrectable),
        )
        if count
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _growth(node: Node, gpu: Gpu, counter: str) -> tuple[int, int] | None:
    """What a counter grew by over the sample and since the last run, whichever saw growth."""
    sample = delta(gpu.readings, lambda reading: getattr(reading, counter))
    if sample is not None and sample[0] > 0:
        return sample
    newest = last_reading(gpu)
    since = node.since_last_run("gpu", gpu.uuid, counter, getattr(newest, counter, None))
    return since if since is not None else sample


@probe(
    "memory.ecc-correctable-rate",
    needs=("nvml",),
    limits={
        "per_second": Limit(
            10.0,
            "errors/s",
            "laggard: far above the background of healthy boards; NVIDIA/NVSentinel#1748 has a "
            "bad one with 17657/s that no tool reported",
        )
    },
)
def ecc_correctable_rate(node: Node, limits: Limits) -> Statements:
    """Corrected memory errors come at a high rate.

    Each one is repaired, but thousands per second cost bandwidth, keep the driver busy (calls
    into it become slow) and announce an uncorrectable one.

    No fault: totals, however large; single errors. Only a rate counts: over the sample, or since
    the last run on this node. Xid 92 is the driver's own word for a high rate.

    Sure: likely. Without a second reading there is no rate, and nothing is said.

    Do: plan the board's replacement; let the job end, reset the GPU, watch the rate.
    """
    for gpu in node.live_gpus:
        newest = last_reading(gpu)
        count = newest.ecc_volatile_correctable if newest else None
        if count is None:
            yield missing(gpu, "ecc_volatile_correctable", no_ecc(gpu))
            continue
        if (moved := _growth(node, gpu, "ecc_volatile_correctable")) is None:
            yield Unread("nvml", "readings", gpu.key, reason=GapReason.NOT_COLLECTED)
            continue
        rate = moved[0] / (moved[1] / 1e9)
        if rate < limits["per_second"]:
            note = f"{count} corrected errors since the driver loaded, {rate:.2g}/s now"
            yield Clear(node.gpu_component(gpu), note if count else None)
            continue
        yield gpu_finding(
            node,
            gpu,
            "memory.ecc-correctable-rate",
            f"corrects {rate:.0f} memory errors per second (limit {limits['per_second']:g})",
            severity=Severity.WARNING,
            impact=JobImpact.SLOWS,
            evidence=(
                shown(
                    "nvmlDeviceGetTotalEccErrors(CORRECTED, VOLATILE)",
                    round(rate, 1),
                    smi(gpu, "-q -d ECC"),
                    unit="errors/s",
                ),
            ),
            remedy=Remedy(
                action=Action.REPLACE,
                text="Let the job end, reset the GPU, watch the rate; plan the board's "
                "replacement.",
                disruptive=True,
            ),
            confidence=Confidence.LIKELY,
            explains=("nvml.slow-call",),
        )


@probe("memory.ecc-aggregate", needs=("nvml",))
def ecc_aggregate(node: Node) -> Statements:
    """The board has had uncorrectable memory errors in its life.

    History, kept on the board itself and never reset. It tells nothing about today: the rows
    were remapped or the pages retired long ago.

    No fault at all, so only info. Others fail such a board for ever.

    Sure: proven as history.

    Do: nothing. Look at the volatile count, at the remapping state and at the spare rows.
    """
    for gpu in node.live_gpus:
        newest = last_reading(gpu)
        count = newest.ecc_aggregate_uncorrectable if newest else None
        if count is None:
            yield missing(gpu, "ecc_aggregate_uncorrectable", no_ecc(gpu))
        elif count == 0:
            yield Clear(node.gpu_component(gpu))
        else:
            yield gpu_finding(
                node,
                gpu,
                "memory.ecc-aggregate",
                f"has had {count} uncorrectable memory errors in its life (history)",
                severity=Severity.INFO,
                impact=JobImpact.NONE,
                evidence=(
                    shown(
                        "nvmlDeviceGetTotalEccErrors(UNCORRECTED, AGGREGATE)",
                        count,
                        smi(gpu, "-q -d ECC"),
                    ),
                ),
                remedy=Remedy(action=Action.NONE, text="Nothing: it is history.", disruptive=False),
            )


@probe("memory.sram-threshold", needs=("nvml",))
def sram_threshold(node: Node) -> Statements:
    """The driver says that SRAM errors passed the threshold for replacement.

    Caches and register files can't be remapped. The flag is NVIDIA's own criterion for the field
    diagnostic and the return of the board.

    No fault: some SRAM errors below the threshold; only the flag counts. It needs root to read.

    Sure: proven, the driver's own verdict. A job may run, at a higher risk of dying.

    Do: drain at the next gap, run the field diagnostic, have the board replaced.
    """
    for gpu in node.live_gpus:
        exceeded = gpu.sram_ecc.threshold_exceeded if gpu.sram_ecc else None
        if exceeded is None:
            yield missing(gpu, "sram_ecc", no_ecc(gpu))
        elif not exceeded:
            yield Clear(node.gpu_component(gpu))
        else:
            yield gpu_finding(
                node,
                gpu,
                "memory.sram-threshold",
                "has passed the driver's SRAM error threshold",
                severity=Severity.WARNING,
                impact=JobImpact.NONE,
                evidence=(
                    shown(
                        "nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded",
                        True,
                        smi(gpu, "-q -d ECC"),
                        expected=(False, Basis.VENDOR_LIMIT),
                    ),
                ),
                remedy=REPLACE,
            )


@probe("memory.ecc-mode-pending", needs=("nvml",))
def ecc_mode_pending(node: Node) -> Statements:
    """ECC will be switched on or off at the next reset.

    Somebody changed the mode and the GPU was not reset since. With ECC off wrong results go
    unnoticed; with ECC on (GDDR parts) memory is smaller and slower.

    No fault: parts without ECC; a mode that equals the pending one.

    Sure: proven. Only info, because it is a setting.

    Do: reset the GPU at a convenient time, or set the mode back.
    """
    for gpu in node.live_gpus:
        if gpu.ecc_mode is None or gpu.ecc_mode_pending is None:
            field = "ecc_mode" if gpu.ecc_mode is None else "ecc_mode_pending"
            yield missing(gpu, field, not_for_vgpu(gpu))
        elif gpu.ecc_mode == gpu.ecc_mode_pending:
            yield Clear(node.gpu_component(gpu))
        else:
            now, then = ("on", "off") if gpu.ecc_mode else ("off", "on")
            yield gpu_finding(
                node,
                gpu,
                "memory.ecc-mode-pending",
                f"has ECC {now} and will have it {then} after the next reset",
                severity=Severity.INFO,
                impact=JobImpact.NONE,
                evidence=(
                    shown(
                        "nvmlDeviceGetEccMode",
                        f"current {now}, pending {then}",
                        smi(gpu, "--query-gpu=ecc.mode.current,ecc.mode.pending --format=csv"),
                    ),
                ),
                remedy=Remedy(
                    action=Action.RESET_GPU,
                    text="Reset the GPU at a convenient time, or set the mode back "
                    "(`nvidia-smi -e`).",
                    disruptive=True,
                ),
                fault_class=FaultClass.CONFIGURATION,
            )
