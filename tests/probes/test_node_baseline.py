import msgspec
import pytest

from probes.node_baseline import GPU_COUNTERS, baseline_of, usable
from probes.snapshot.baseline import Baseline, CounterSet
from probes.snapshot.gpu import GpuReading, NvmlSection
from probes.snapshot.nic import NicPort, NicSection, PortReading
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciSection
from probes.view import Node
from tests.support.nodes import counting, gpu, node, pci_gpu

HOUR_NS = 3_600_000_000_000


def later(snapshot: NodeSnapshot, **changes: object) -> NodeSnapshot:
    at_ns = snapshot.taken_at_ns + HOUR_NS
    return msgspec.structs.replace(snapshot, **({"taken_at_ns": at_ns} | changes))


def test_every_kind_of_counter_is_kept_under_its_name() -> None:
    assert baseline_of(counting()) == Baseline(
        at_ns=1_767_225_600_000_000_000,
        boot_id="b1",
        driver_version="570.124.06",
        sets=(
            CounterSet(
                kind="gpu",
                key="GPU-00000000-0000-0000-0000-000000000000",
                counters={
                    "violation_thermal_ns": 118_000,
                    "pcie_replay_count": 9,
                    "nvlink3.replay": 1,
                    "nvlink3.crc_flit": 3,
                    "row_remap.correctable_rows": 1,
                },
            ),
            CounterSet(
                kind="pci",
                key="0000:17:00.0",
                counters={"aer_correctable.TOTAL_ERR_COR": 7, "aer_correctable.RxErr": 7},
            ),
            CounterSet(kind="port", key="mlx5_0/1", counters={"link_downed": 2}),
            CounterSet(kind="kernel", key="log", counters={"seen_ms": 5_000_500}),
        ),
    )


def test_the_counters_are_integer_fields_of_a_reading() -> None:
    types = {field.name: field.type for field in msgspec.structs.fields(GpuReading)}
    assert {types[name] for name in GPU_COUNTERS} == {int | None}


def test_without_a_boot_id_nothing_is_kept() -> None:
    assert baseline_of(counting(boot_id=None)) is None


def test_the_next_run_sees_what_a_counter_grew_by() -> None:
    before = counting()
    now = later(before, nvml=NvmlSection(
        driver_version="570.124.06", gpus=(gpu(0, reading={"pcie_replay_count": 39}),)))  # fmt: skip
    view = Node(msgspec.structs.replace(now, baseline=usable(baseline_of(before), now)))
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    assert view.since_last_run("gpu", uuid, "pcie_replay_count", 39) == (30, HOUR_NS)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, ["gpu", "pci", "port", "kernel"]),
        ({"boot_id": "b2"}, None),
        ({"boot_id": None}, None),
        ({"taken_at_ns": 5}, None),  # the clock was set back
        ({"nvml": NvmlSection(driver_version="575.51.03")}, ["pci", "port", "kernel"]),
        ({"nvml": None}, ["pci", "port", "kernel"]),
        (
            {"nvml": NvmlSection(driver_version="570.124.06",
                                 gpus=(gpu(0, reading={"pcie_replay_count": 8}),))},
            ["pci", "port", "kernel"],
        ),
        (
            {"pci": PciSection(devices=(pci_gpu(0, aer_correctable={"TOTAL_ERR_COR": 0}),))},
            ["gpu", "port", "kernel"],
        ),
        (
            {"nics": NicSection(ports=(NicPort(device="mlx5_0", port=1,
                     readings=(PortReading(at_ns=1, counters={"link_downed": 1}),)),))},
            ["gpu", "pci", "kernel"],
        ),
        # a part that is not there now is kept: nothing is said of it
        ({"pci": PciSection(), "nics": None}, ["gpu", "pci", "port", "kernel"]),
    ],
    ids="same boot no-boot clock driver no-driver gpu-reset pci-reset port-reset absent".split(),
)  # fmt: skip
def test_only_what_still_counts_is_compared_with(
    changes: dict[str, object], kept: list[str] | None
) -> None:
    before = counting()
    found = usable(baseline_of(before), later(before, **changes))
    assert (None if found is None else [s.kind for s in found.sets]) == kept


def test_no_baseline_is_no_baseline() -> None:
    assert usable(None, node()) is None
