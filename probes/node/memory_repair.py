"""How GPU memory was repaired: rows remapped (Ampere and newer), pages retired (older)."""

from __future__ import annotations

from collections.abc import Callable

from probes.finding import Basis, Component, JobImpact, Severity
from probes.gpu_facts import REPLACE, RESET_LATER, gpu_finding, is_mig, missing, no_ecc, shown, smi
from probes.registry import (
    Clear,
    Limit,
    Limits,
    NotApplicable,
    Statement,
    Statements,
    Unread,
    probe,
)
from probes.snapshot.gpu import Gpu
from probes.view import Node

# NVML_DEVICE_ARCH_TURING; rows are remapped from Ampere (7) on, pages retired before.
_LAST_PAGE_RETIREMENT_ARCHITECTURE = 6


def _each_remap(node: Node, judge: Callable[[Node, Gpu, Component], Statement]) -> Statements:
    """The statement for each GPU that has row remapping."""
    for gpu in node.live_gpus:
        if gpu.row_remap is not None:
            yield judge(node, gpu, node.gpu_component(gpu))
        elif is_mig(gpu):
            yield NotApplicable("MIG: row remapping is not reported while instances exist")
        elif (
            gpu.architecture is not None and gpu.architecture <= _LAST_PAGE_RETIREMENT_ARCHITECTURE
        ):
            yield NotApplicable("pages are retired on this part, rows are not remapped")
        else:
            yield missing(gpu, "row_remap", no_ecc(gpu))


@probe("memory.row-remap-pending", needs=("nvml",))
def row_remap_pending(node: Node) -> Statements:
    """A bad memory row waits to be remapped at the next reset.

    The driver has already closed the page off, so new work is safe. The spare row takes over when
    the GPU is reset.

    No fault for the running job: it may go on, and new work is allowed. Never a cause of slowness,
    never a reason to replace the board.

    Sure: proven, the driver's own flag. A warning, so that the reset is not forgotten.

    Do: reset the GPU or reboot at a convenient time.
    """
    yield from _each_remap(node, _pending)


def _pending(node: Node, gpu: Gpu, component: Component) -> Statement:
    pending = gpu.row_remap.pending if gpu.row_remap else None
    if pending is None:
        return Unread("nvml", "row_remap", gpu.key)
    if not pending:
        return Clear(component)
    return gpu_finding(
        node,
        gpu,
        "memory.row-remap-pending",
        "has a row remapping pending: a job may go on, reset it at a convenient time",
        severity=Severity.WARNING,
        impact=JobImpact.NONE,
        evidence=(
            shown(
                "nvmlDeviceGetRemappedRows.isPending",
                True,
                smi(gpu, "-q -d ROW_REMAPPER"),
                expected=(False, Basis.VENDOR_LIMIT),
            ),
        ),
        remedy=RESET_LATER,
    )


@probe("memory.row-remap-failure", needs=("nvml",))
def row_remap_failure(node: Node) -> Statements:
    """A bad memory row could not be remapped.

    The bank has no spare row left, or the remapping could not be recorded. The bad row stays in
    use, and the next process that touches it dies.

    No fault: rows remapped in the past, pending remappings.

    Sure: proven, the driver's own flag, and its criterion for the return of the board.

    Do: start no job here; drain, run the field diagnostic, have the board replaced.
    """
    yield from _each_remap(node, _failure)


def _failure(node: Node, gpu: Gpu, component: Component) -> Statement:
    failed = gpu.row_remap.failure_occurred if gpu.row_remap else None
    if failed is None:
        return Unread("nvml", "row_remap", gpu.key)
    if not failed:
        return Clear(component)
    return gpu_finding(
        node,
        gpu,
        "memory.row-remap-failure",
        "failed to remap a bad memory row",
        severity=Severity.CRITICAL,
        impact=JobImpact.BREAKS,
        evidence=(
            shown(
                "nvmlDeviceGetRemappedRows.failureOccurred",
                True,
                smi(gpu, "-q -d ROW_REMAPPER"),
                expected=(False, Basis.VENDOR_LIMIT),
            ),
        ),
        remedy=REPLACE,
        explains=("memory.row-remap-spares",),
    )


@probe(
    "memory.row-remap-spares",
    needs=("nvml",),
    limits={
        "uncorrectable_rows": Limit(
            512.0,
            "rows",
            "NVIDIA GPU memory error management: 512 remappings in all, 8 in one bank",
        )
    },
)
def row_remap_spares(node: Node, limits: Limits) -> Statements:
    """A memory bank has no spare row left, or the board has used up its remappings.

    The next bad row in that bank can't be repaired: then a job dies and the board has to go.

    No fault: rows remapped in the past while every bank has spares; correctable remappings.

    Sure: proven. Nothing is slower for it, so a warning.

    Do: plan the board's replacement.
    """
    yield from _each_remap(node, lambda node, gpu, component: _spares(node, limits, gpu, component))


def _spares(node: Node, limits: Limits, gpu: Gpu, component: Component) -> Statement:
    remap = gpu.row_remap
    if remap is None or (remap.banks_none is None and remap.uncorrectable_rows is None):
        return Unread("nvml", "row_remap", gpu.key)
    rows = remap.uncorrectable_rows or 0
    most = limits["uncorrectable_rows"]
    if not remap.banks_none and rows < most:
        if remap.banks_none is None:
            return Unread("nvml", "banks_none", gpu.key)
        note = f"{rows} rows remapped after uncorrectable errors, repaired" if rows else None
        return Clear(component, note)
    evidence = []
    if remap.banks_none:
        evidence.append(
            shown(
                "nvmlDeviceGetRowRemapperHistogram.none",
                remap.banks_none,
                smi(gpu, "-q -d ROW_REMAPPER"),
                unit="banks",
                expected=(0, Basis.VENDOR_LIMIT),
            )
        )
    if rows >= most:
        evidence.append(
            shown(
                "nvmlDeviceGetRemappedRows.uncRows",
                rows,
                smi(gpu, "-q -d ROW_REMAPPER"),
                unit="rows",
                expected=(round(most) - 1, Basis.VENDOR_LIMIT),
            )
        )
    return gpu_finding(
        node,
        gpu,
        "memory.row-remap-spares",
        f"has {remap.banks_none} memory banks without a spare row, {rows} rows remapped"
        if remap.banks_none
        else f"has remapped {rows} rows of {most:.0f}",
        severity=Severity.WARNING,
        impact=JobImpact.NONE,
        evidence=tuple(evidence),
        remedy=REPLACE,
    )


@probe(
    "memory.page-retirement",
    needs=("nvml",),
    limits={
        "pages": Limit(63.0, "pages", "NVIDIA/DCGM hardware limits: 63 retired pages"),
        "double_bit_pages": Limit(
            15.0, "pages", "NVIDIA/DCGM hardware limits: more than 15 by double-bit errors"
        ),
    },
)
def page_retirement(node: Node, limits: Limits) -> Statements:
    """Memory pages are retired or wait for it (parts older than Ampere).

    A page with errors is taken out of use; a pending one needs a driver reload or reboot first.
    There is room for some 64 pages, then the board has to go.

    No fault: some retired pages. Ampere and newer parts remap rows and answer "N/A" here.

    Sure: proven, the driver's own list.

    Do: reboot at a convenient time when pages are pending; have the board replaced at the limit.
    """
    for gpu in node.live_gpus:
        pages = gpu.retired_pages
        if pages is None:
            newer = (gpu.architecture or 0) > _LAST_PAGE_RETIREMENT_ARCHITECTURE
            if newer or gpu.row_remap is not None:
                yield NotApplicable("rows are remapped on this part, pages are not retired")
            else:
                yield missing(gpu, "retired_pages", no_ecc(gpu))
            continue
        single, double = pages.multiple_single_bit or 0, pages.double_bit or 0
        if pages.multiple_single_bit is None and pages.double_bit is None:
            yield Unread("nvml", "retired_pages", gpu.key)
            continue
        full = single + double >= limits["pages"] or double > limits["double_bit_pages"]
        if not full and not pages.pending:
            note = f"{single + double} pages retired, room for more" if single + double else None
            yield Clear(node.gpu_component(gpu), note)
            continue
        yield gpu_finding(
            node,
            gpu,
            "memory.page-retirement",
            f"has {single + double} retired memory pages ({double} by double-bit errors)"
            + (", one more pending" if pages.pending else "")
            + (f", limit {limits['pages']:.0f}" if full else ""),
            severity=Severity.WARNING,
            impact=JobImpact.NONE,
            evidence=(
                shown(
                    "nvmlDeviceGetRetiredPages",
                    single + double,
                    smi(gpu, "-q -d PAGE_RETIREMENT"),
                    unit="pages",
                    expected=(round(limits["pages"]), Basis.VENDOR_LIMIT) if full else None,
                ),
            ),
            remedy=REPLACE if full else RESET_LATER,
        )
