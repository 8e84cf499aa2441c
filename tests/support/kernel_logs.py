"""Nodes whose kernel log is a text, for the rules about kernel lines."""

from agent.evaluate import Evaluation, evaluate
from agent.parse.kernel_log import TimeReference, parse_kernel_log
from probes.registry import discover
from probes.snapshot.gpu import Gpu, GpuReading, GpuState, NvmlSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciDevice, PciSection

TAKEN_NS = 1_773_591_600_000_000_000  # 2026-03-15T16:20:00Z
UPTIME_S = 402_200.0
REFERENCE = TimeReference(taken_at_ns=TAKEN_NS, uptime_s=UPTIME_S)
ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in ("1a", "1c", "3b", "3d", "88", "89", "b2", "b4"))
PROBES = tuple(p for p in discover() if p.family in ("xid", "sxid", "kernel"))


def gpus(*changed: Gpu, driver: str = "550.127.05") -> NvmlSection:
    """Eight GPUs that answer; ``changed`` replaces those with the same address."""
    by_address = {gpu.pci: gpu for gpu in changed}
    return NvmlSection(
        driver_version=driver,
        device_count=8,
        gpus=tuple(
            by_address.get(
                pci,
                Gpu(
                    index=index,
                    state=GpuState.OK,
                    pci=pci,
                    uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000",
                    readings=(GpuReading(at_ns=1),),
                ),
            )
            for index, pci in enumerate(ADDRESSES)
        ),
    )


def node(log: str, **sections: object) -> NodeSnapshot:
    """A node with this kernel log."""
    return NodeSnapshot(
        schema=SNAPSHOT_SCHEMA,
        tool_version="0",
        host="n44",
        taken_at_ns=TAKEN_NS,
        uptime_s=UPTIME_S,
        kernel=parse_kernel_log(log, "kmsg", REFERENCE, only_this_boot=True),
        **sections,  # type: ignore[arg-type]
    )


def judged(log: str, **sections: object) -> Evaluation:
    """What the rules about kernel lines say of it."""
    return evaluate(node(log, **sections), PROBES)


def said(log: str, **sections: object) -> list[tuple[str, str, str | None]]:
    """Severity, id and the address accused, worst first."""
    return [
        (finding.severity.value, finding.id, finding.component.pci)
        for finding in judged(log, **sections).findings
    ]


def notes(log: str, id: str, **sections: object) -> list[str]:
    """The notes of one probe."""
    found = [r for r in judged(log, **sections).results if r.id == id]
    assert found, id
    assert found[0].error is None, found[0].error
    return list(found[0].notes)


def xid(
    at_s: float, code: int, text: str = "pid='<unknown>', name=<unknown>", bus: str = "3b"
) -> str:
    """One Xid line as dmesg prints it."""
    return f"[{at_s:.6f}] NVRM: Xid (PCI:0000:{bus}:00): {code}, {text}\n"


def chain(*addresses: str) -> PciSection:
    """A GPU and the bridges above it, GPU first."""
    parents = (*addresses[1:], None)
    return PciSection(
        devices=tuple(
            PciDevice(
                address=address,
                parent=parent,
                vendor_id=0x10DE if index == 0 else 0x8086,
                class_code=0x030200 if index == 0 else 0x060400,
                driver="nvidia" if index == 0 else "pcieport",
            )
            for index, (address, parent) in enumerate(zip(addresses, parents, strict=True))
        )
    )
