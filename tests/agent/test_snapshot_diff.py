import msgspec

from agent.snapshot_diff import Change, diff_snapshots
from probes.snapshot.gpu import Gpu, GpuLimits, GpuReading, GpuState, NvmlSection
from probes.snapshot.nic import NicPort, NicSection, PortReading
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciDevice, PciReading, PciSection


def gpu(uuid: str, **reading: int) -> Gpu:
    return Gpu(
        index=0, state=GpuState.OK, uuid=uuid, limits=GpuLimits(power_limit_enforced_mw=700000),
        readings=(GpuReading(at_ns=1, sm_clock_mhz=1980, **reading),),
    )  # fmt: skip


def node(*gpus: Gpu, boot: str = "b", width: int = 16, down: int = 0) -> NodeSnapshot:
    return NodeSnapshot(
        schema=SNAPSHOT_SCHEMA, tool_version="1", host="n", taken_at_ns=5, boot_id=boot,
        nvml=NvmlSection(driver_version="550", gpus=gpus),
        pci=PciSection(
            devices=(
                PciDevice(
                    address="0000:17:00.0",
                    readings=(PciReading(at_ns=3, current_link_width_lanes=width),),
                ),
            )
        ),
        nics=NicSection(
            ports=(
                NicPort(
                    device="mlx5_0", port=1,
                    readings=(PortReading(at_ns=1, counters={"link_downed": down}),),
                ),
            )
        ),
    )  # fmt: skip


def test_a_node_at_rest_shows_no_difference() -> None:
    before = node(gpu("GPU-a", temperature_c=40))
    after = node(gpu("GPU-a", temperature_c=80))
    assert diff_snapshots(before, after) == ()


def test_worse_comes_first_and_members_are_joined_by_name() -> None:
    before = node(gpu("GPU-a", pcie_replay_count=1), gpu("GPU-b"))
    moved = msgspec.structs.replace(gpu("GPU-b"), vbios_version="96")
    after = node(moved, gpu("GPU-a", pcie_replay_count=9), width=8, down=2)
    assert diff_snapshots(before, after) == (
        Change("nics.ports[mlx5_0/1].counters.link_downed", 0, 2, True),
        Change("nvml.gpus[GPU-a].pcie_replay_count", 1, 9, True),
        Change("pci.devices[0000:17:00.0].current_link_width_lanes", 16, 8, True),
        Change("nvml.gpus[GPU-b].vbios_version", None, "96", None),
    )


def test_counters_of_another_boot_are_not_compared() -> None:
    before = node(gpu("GPU-a", pcie_replay_count=9), boot="one", down=5)
    after = node(gpu("GPU-a", pcie_replay_count=1), boot="two", down=0)
    assert [change.path for change in diff_snapshots(before, after)] == ["boot_id"]


def test_a_gpu_that_is_gone_is_worse() -> None:
    changes = diff_snapshots(node(gpu("GPU-a"), gpu("GPU-b")), node(gpu("GPU-a")))
    assert Change("nvml.gpus[GPU-b].uuid", "GPU-b", None, True) in changes


def test_a_gpu_that_is_lost_is_worse_and_a_repair_is_not() -> None:
    lost = msgspec.structs.replace(gpu("GPU-a"), state=GpuState.LOST)
    assert Change("nvml.gpus[GPU-a].state", "ok", "lost", True) in diff_snapshots(
        node(gpu("GPU-a")), node(lost)
    )
    assert diff_snapshots(node(gpu("GPU-a"), width=8), node(gpu("GPU-a"))) == (
        Change("pci.devices[0000:17:00.0].current_link_width_lanes", 8, 16, False),
    )
