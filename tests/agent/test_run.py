"""One run: the order, the two readings, the deadline whatever hangs."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from agent.errors import LaggardError
from agent.fstree import parse_fstree
from agent.host import FixtureHost, Host, LiveHost
from agent.isolate import Read, Reader
from agent.recording import RecordingHost
from agent.run import FILES, RunOptions, collect_node
from probes.gap import Gap, GapReason
from probes.snapshot.nic import NicPort, NicSection, PortReading
from probes.snapshot.pci import PciDevice, PciReading, PciSection

TREE = """\
/proc/sys/kernel/hostname = n44
/proc/sys/kernel/random/boot_id = 0b1c
/proc/sys/kernel/osrelease = 5.15.0-113-generic
/proc/uptime = 5000.50 9000.00
/@time_ns = 1767225600000000000
/@euid = 1000
/speed = 32
@1
/speed = 16
"""


def speeds() -> Reader:
    """A device whose speed is in a file."""

    def reading(host: Host) -> PciReading:
        speed = float(host.read_text("/speed"))
        return PciReading(at_ns=host.monotonic_ns(), current_link_speed_gts=speed)

    def first(host: Host) -> Read:
        return PciSection(devices=(PciDevice(address="a", readings=(reading(host),)),)), ()

    def second(host: Host, section: PciSection) -> Read:
        (device,) = section.devices
        readings = (*device.readings, reading(host))
        return PciSection(devices=(PciDevice(address="a", readings=readings),)), ()

    return Reader(name="pci", source="pci", record=PciSection, load=lambda: (first, second))


def ports(first: Callable[[Host], Read]) -> Reader:
    return Reader(name="nics", source="nics", record=NicSection, load=lambda: (first, None))


def read_of(snapshot: Any) -> list[tuple[int, float]]:
    (device,) = snapshot.pci.devices
    return [(reading.at_ns, reading.current_link_speed_gts) for reading in device.readings]


def test_a_copy_of_a_machine_is_read_twice_at_the_sample_time() -> None:
    found = collect_node(FixtureHost(parse_fstree(TREE)), RunOptions(sample_s=3), (speeds(),))
    assert read_of(found) == [(1_000_000_000_000, 32.0), (1_003_000_000_000, 16.0)]
    assert (found.host, found.boot_id, found.kernel_release, found.uptime_s, found.privileged) == (
        "n44", "0b1c", "5.15.0-113-generic", 5000.5, False,
    )  # fmt: skip
    assert (found.taken_at_ns, found.sample_s) == (1_767_225_600_000_000_000, 3)
    assert found.nvml is None
    assert found.gaps == (
        Gap(source="nvml", reason=GapReason.NOT_COLLECTED,
            detail="files were read, and no driver stands behind them"),
    )  # fmt: skip


def test_sample_zero_reads_once() -> None:
    found = collect_node(FixtureHost(parse_fstree(TREE)), RunOptions(sample_s=0), (speeds(),))
    assert read_of(found) == [(1_000_000_000_000, 32.0)]


def test_a_raw_recording_holds_both_readings_and_replays() -> None:
    recording = RecordingHost(FixtureHost(parse_fstree(TREE)))
    first = collect_node(recording, RunOptions(sample_s=3), (speeds(),))
    again = collect_node(FixtureHost(recording.tree), RunOptions(sample_s=3), (speeds(),))
    assert read_of(again) == read_of(first)


def test_the_sections_come_kernel_log_first() -> None:
    assert [reader.name for reader in FILES] == ["kernel", "pci", "nics", "processes", "host_facts"]
    for reader in FILES:
        assert callable(reader.load()[0])


@pytest.mark.parametrize(("sample_s", "deadline_s"), [(20, 20), (16, 20), (1, 1)])
def test_a_sample_that_leaves_no_time_to_read_is_refused(
    sample_s: float, deadline_s: float
) -> None:
    with pytest.raises(LaggardError, match="don't fit into") as error:
        RunOptions(sample_s=sample_s, deadline_s=deadline_s)
    raised = float(error.value.hint.split()[-3])
    assert RunOptions(sample_s=sample_s, deadline_s=raised)


def hang(path: str) -> Callable[[Host], Read]:
    def first(host: Host) -> Read:
        host.exists(path)
        time.sleep(120)
        return None, ()

    return first


def seen(host: Host) -> Read:
    port = NicPort(device="eth0", readings=(PortReading(at_ns=1),))
    return NicSection(ports=(port,)), ()


def section(name: str, record: type, first: Callable[[Host], Read]) -> Reader:
    return Reader(name=name, source=name, record=record, load=lambda: (first, None))


def test_whatever_hangs_the_run_ends_in_time_and_the_rest_is_read() -> None:
    from probes.snapshot.kernel import KernelSection
    from probes.snapshot.process import ProcessSection

    files = (
        section("kernel", KernelSection, hang("/dev/kmsg")),
        section("pci", PciSection, hang("/sys/bus/pci/devices/0000:17:00.0/config")),
        section("processes", ProcessSection, hang("/proc/7/wchan")),
        ports(seen),
    )
    began = time.monotonic()
    found = collect_node(LiveHost(), RunOptions(sample_s=0.5, deadline_s=4), files)
    assert time.monotonic() - began < 4.5
    assert found.nics is not None and found.nics.ports[0].device == "eth0"
    timeouts = {gap.source: gap.detail for gap in found.gaps if gap.reason is GapReason.TIMEOUT}
    assert {source: (detail or "").split(": ")[0] for source, detail in timeouts.items()} == {
        "kernel": "/dev/kmsg",
        "pci": "/sys/bus/pci/devices/0000:17:00.0/config",
        "processes": "/proc/7/wchan",
    }


def test_one_hang_costs_its_own_deadline_once() -> None:
    files = (section("pci", PciSection, hang("/sick")), ports(seen))
    began = time.monotonic()
    found = collect_node(LiveHost(), RunOptions(sample_s=0, deadline_s=3), files)
    assert time.monotonic() - began < 2.5
    assert [gap.detail for gap in found.gaps if gap.source == "pci"] == [
        "/sick: did not return within 0.9 s"
    ]
    assert found.nics is not None
