"""Memory, swap, I/O, shared memory and disks: each alarm, and the tempting one that is wrong."""

from __future__ import annotations

import pytest

from probes.finding import Confidence, FaultClass, JobImpact, Severity
from probes.result import Outcome
from probes.snapshot.host import DriverFacts, FileSystem, Pressure
from probes.snapshot.pci import PciSection
from tests.support.hosts import (
    GIB,
    driver,
    finding,
    gpus_on_bus,
    judge,
    node,
    notes,
    nvml,
    reading,
    readings,
    section,
)

MIB = 1 << 20
FULL = Pressure(some_avg10_percent=50.0, full_avg10_percent=30.0, full_avg60_percent=25.0)


def shm(size: int, free: int | None = None, gpus: int = 8):  # type: ignore[no-untyped-def]
    mount = FileSystem(
        path="/dev/shm",
        type="tmpfs",
        options="rw,size=65536k",
        size_bytes=size,
        free_bytes=size if free is None else free,
    )
    return node(
        section(shared_memory=mount, driver=driver(gpu_addresses=())),
        nvml=nvml(gpus),
        pci=gpus_on_bus(gpus),
    )


def test_little_free_memory_is_no_pressure() -> None:
    snapshot = node(section(readings=readings({"memory_available_bytes": 100 * GIB})))
    assert notes(snapshot, "host.memory-pressure") == ()


def test_memory_pressure() -> None:
    first = {"memory_pressure": FULL, "memory_available_bytes": 10 * GIB}
    found = finding(node(section(readings=readings(first))), "host.memory-pressure")
    assert found.summary == (
        "all tasks stalled on memory 25% of the last minute, 10 GiB of 1000 GiB memory available"
    )
    assert (found.severity, found.fault_class) == (Severity.WARNING, FaultClass.SOFTWARE)
    assert [proof.locator for proof in found.evidence] == ["/proc/pressure/memory", "/proc/meminfo"]


def test_without_psi_the_available_memory_still_counts() -> None:
    first = {"memory_pressure": None, "memory_available_bytes": 900 * GIB}
    assert notes(node(section(readings=readings(first))), "host.memory-pressure") == ()


def test_swap_that_is_used_and_stands_still() -> None:
    snapshot = node(section(readings=readings({"swap_free_bytes": 2 * GIB, "pages_swapped_in": 9})))
    assert notes(snapshot, "host.swap-active") == ("6 GiB of swap used, and it stands still",)


def test_swap_written_and_not_read_back_is_no_stall() -> None:
    snapshot = node(section(readings=readings({}, pages_swapped_out=10**6)))
    assert notes(snapshot, "host.swap-active") == ()


def test_swapping_in() -> None:
    found = finding(node(section(readings=readings({}, pages_swapped_in=8000))), "host.swap-active")
    assert found.summary == "4000 pages a second are read back from swap"
    assert found.job_impact is JobImpact.SLOWS


def test_swap_needs_two_readings_and_a_swap_space() -> None:
    once = judge(node(section(readings=(reading(),))), "host.swap-active")
    assert once.results[0].outcome is Outcome.UNKNOWN
    assert notes(node(section(swap_total_bytes=0)), "host.swap-active", Outcome.NOTAPPLICABLE) == (
        "no swap space",
    )


@pytest.mark.parametrize(("ten", "sixty", "alarm"), [(50, 45, True), (95, 10, False)])
def test_io_pressure_has_to_last(ten: float, sixty: float, alarm: bool) -> None:
    pressure = Pressure(full_avg10_percent=float(ten), full_avg60_percent=float(sixty))
    evaluation = judge(
        node(section(readings=readings({"io_pressure": pressure}))), "host.io-pressure"
    )
    assert bool(evaluation.findings) is alarm


def test_the_containers_default_shared_memory() -> None:
    found = finding(shm(64 * MIB), "host.shm-small")
    assert found.summary == (
        "shared memory (/dev/shm) is 64 MiB, NCCL may need 294 MiB for 8 GPUs (64 MiB is the "
        "container default)"
    )
    assert (found.severity, found.confidence, found.fault_class) == (
        Severity.WARNING,
        Confidence.LIKELY,
        FaultClass.CONFIGURATION,
    )
    assert found.evidence[0].quote == "tmpfs /dev/shm rw,size=65536k"


def test_a_somewhat_small_shared_memory_is_info() -> None:
    found = finding(shm(128 * MIB), "host.shm-small")
    assert (found.severity, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)


def test_shared_memory_that_is_no_fault() -> None:
    assert notes(shm(8 * GIB), "host.shm-small") == ()
    assert notes(shm(0), "host.shm-small") == ("the tmpfs has no size limit",)
    assert notes(shm(64 * MIB, gpus=1), "host.shm-small", Outcome.NOTAPPLICABLE) == (
        "one GPU: NCCL opens no shared memory between GPUs",
    )


def test_a_full_shared_memory() -> None:
    found = finding(shm(8 * GIB, free=5 * MIB), "host.shm-full")
    assert found.summary == "shared memory (/dev/shm): 5 MiB free of 8 GiB"
    assert (found.severity, found.job_impact) == (Severity.WARNING, JobImpact.BREAKS)
    # small and empty is host.shm-small's; big and used, with room left, is fine
    assert notes(shm(64 * MIB), "host.shm-full") == ()
    assert notes(shm(500 * GIB, free=GIB), "host.shm-full") == ()


def test_a_full_disk() -> None:
    root = FileSystem(path="/", type="ext4", size_bytes=900 * GIB, free_bytes=0)
    var = FileSystem(path="/var", type="xfs", size_bytes=900 * GIB, free_bytes=2 * GIB)
    found = finding(node(section(file_systems=(root, var))), "host.disk-full")
    assert found.summary == "file system full: / 0 B of 900 GiB free"
    assert found.job_impact is JobImpact.BREAKS
    assert notes(node(section(file_systems=(var,))), "host.disk-full") == ()


def test_without_gpu_shared_memory_is_nobodys_business() -> None:
    host = section(
        shared_memory=FileSystem(path="/dev/shm", size_bytes=64 * MIB, free_bytes=0),
        driver=DriverFacts(),
        modules=(),
    )
    snapshot = node(host, nvml=None, pci=PciSection())
    for id in ("host.shm-small", "host.shm-full"):
        assert notes(snapshot, id, Outcome.NOTAPPLICABLE) == ("no NVIDIA GPU on this machine",)
