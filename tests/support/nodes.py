"""Snapshots of small nodes for the tests of verdict, baseline and report."""

from typing import Any

from probes.snapshot.gpu import (
    Gpu,
    GpuReading,
    GpuState,
    NvLink,
    NvLinkErrors,
    NvmlSection,
    RowRemap,
)
from probes.snapshot.kernel import KernelSection
from probes.snapshot.nic import NicPort, NicSection, PortReading
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciDevice, PciReading, PciSection

ADDRESSES = ("0000:17:00.0", "0000:3b:00.0", "0000:88:00.0", "0000:b3:00.0")


def gpu(index: int, **changes: Any) -> Gpu:
    reading: dict[str, Any] = changes.pop("reading", {})
    fields: dict[str, Any] = {
        "index": index,
        "state": GpuState.OK,
        "uuid": f"GPU-{index:08x}-0000-0000-0000-000000000000",
        "pci": ADDRESSES[index],
        "name": "NVIDIA H100 80GB HBM3",
        "readings": (GpuReading(at_ns=1, **reading),),
    }
    return Gpu(**(fields | changes))


def pci_gpu(index: int, **reading: Any) -> PciDevice:
    return PciDevice(
        address=ADDRESSES[index],
        parent="0000:15:01.0" if index < 2 else None,
        class_code=0x030200,
        vendor_id=0x10DE,
        readings=(PciReading(at_ns=1, **reading),),
    )


def node(**changes: Any) -> NodeSnapshot:
    """Four healthy GPUs (two behind one bridge), a port, a kernel log."""
    fields: dict[str, Any] = {
        "schema": SNAPSHOT_SCHEMA,
        "tool_version": "0.1.0",
        "host": "n44",
        "taken_at_ns": 1_767_225_600_000_000_000,
        "boot_id": "b1",
        "uptime_s": 5000.5,
        "nvml": NvmlSection(
            driver_version="570.124.06", device_count=4, gpus=tuple(gpu(i) for i in range(4))
        ),
        "pci": PciSection(
            devices=(
                PciDevice(address="0000:15:01.0", class_code=0x060400),
                *(pci_gpu(i) for i in range(4)),
            )
        ),
        "nics": NicSection(
            ports=(
                NicPort(
                    device="mlx5_0", port=1, state="ACTIVE", rate_gbps=400.0,
                    readings=(PortReading(at_ns=1, counters={"link_downed": 2}),),
                ),
            )
        ),
        "kernel": KernelSection(source="kmsg", lines_read=812),
    }  # fmt: skip
    return NodeSnapshot(**(fields | changes))


def counting(**changes: Any) -> NodeSnapshot:
    """A node whose every kind of counter stands at something."""
    first = gpu(
        0,
        reading={
            "pcie_replay_count": 9,
            "violation_thermal_ns": 118_000,
            "nvlink_errors": (NvLinkErrors(replay=1, crc_flit=3, symbol_ber=1e-12),),
        },
        nvlinks=(NvLink(link=3, state=1),),
        row_remap=RowRemap(correctable_rows=1, pending=False, banks_max=2560),
    )
    fields: dict[str, Any] = {
        "nvml": NvmlSection(driver_version="570.124.06", gpus=(first, gpu(1, uuid=None))),
        "pci": PciSection(devices=(pci_gpu(0, aer_correctable={"TOTAL_ERR_COR": 7, "RxErr": 7}),)),
    }
    return node(**(fields | changes))
