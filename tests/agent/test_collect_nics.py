"""Ports from a tree of /sys."""

from __future__ import annotations

from agent.collect import nics
from agent.fstree import parse_fstree
from agent.host import FixtureHost
from probes.gap import Gap, GapReason
from probes.snapshot.nic import NicPort, NicSection, PortReading

IB = """
/sys/class/infiniband/mlx5_0 -> ../../devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/device -> ../../../0000:1a:00.0
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/fw_ver = 28.41.1000
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/board_id = MT_0000000838
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/state = 4: ACTIVE
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/phys_state = 5: LinkUp
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/rate = 400 Gb/sec (4X NDR)
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/link_layer = InfiniBand
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/counters/link_downed = 0
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/counters/symbol_error = 3
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/counters/port_rcv_packets = 100
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/hw_counters/packet_seq_err = 1
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/hw_counters/np_cnp_sent = 9
/sys/devices/pci0000:16/0000:1a:00.0/net/ib0/type = 32
/sys/devices/pci0000:16/0000:1a:00.0/vendor = 0x15b3
/sys/devices/pci0000:16/0000:1a:00.0/device = 0x1021
/sys/devices/pci0000:16/0000:1a:00.0/subsystem_vendor = 0x15b3
/sys/devices/pci0000:16/0000:1a:00.0/subsystem_device = 0x0041
/sys/devices/pci0000:16/0000:1a:00.0/driver -> ../../../bus/pci/drivers/mlx5_core
/sys/class/net/ib0 -> ../../devices/pci0000:16/0000:1a:00.0/net/ib0
/sys/devices/pci0000:16/0000:1a:00.0/net/ib0/device -> ../../../0000:1a:00.0
"""
LATER = """
@1
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/counters/symbol_error = 8
/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1/state = 1: DOWN
"""
START_NS = 1_000_000_000_000


def host(text: str) -> FixtureHost:
    return FixtureHost(parse_fstree(text))


def test_infiniband_port_with_two_readings() -> None:
    machine = host(IB + LATER)
    section, gaps = nics.collect(machine)
    assert section is not None
    machine.sleep(2)
    section, more = nics.resample(machine, section)
    assert (*gaps, *more) == ()
    assert section == NicSection(
        ports=(
            NicPort(
                device="mlx5_0",
                port=1,
                pci="0000:1a:00.0",
                driver="mlx5_core",
                pci_id="15b3:1021 15b3:0041",
                netdevs=("ib0",),
                link_layer="InfiniBand",
                state="ACTIVE",
                phys_state="LinkUp",
                rate_gbps=400.0,
                rate_text="400 Gb/sec (4X NDR)",
                width_lanes=4,
                firmware_version="28.41.1000",
                board_id="MT_0000000838",
                readings=(
                    PortReading(
                        at_ns=START_NS,
                        state="ACTIVE",
                        counters={
                            "port_rcv_packets": 100,
                            "link_downed": 0,
                            "symbol_error": 3,
                            "packet_seq_err": 1,
                        },
                    ),
                    PortReading(
                        at_ns=START_NS + 2_000_000_000,
                        state="DOWN",
                        counters={
                            "port_rcv_packets": 100,
                            "link_downed": 0,
                            "symbol_error": 8,
                            "packet_seq_err": 1,
                        },
                    ),
                ),
            ),
        )
    )


def net(name: str, path: str, **files: str) -> str:
    lines = [f"/sys/class/net/{name} -> ../../devices/{path}/net/{name}"]
    lines.append(f"/sys/devices/{path}/net/{name}/device -> ../..")
    values = {"type": "1", "operstate": "up", "flags": "0x1003", "carrier": "1", **files}
    lines += [f"/sys/devices/{path}/net/{name}/{file} = {text}" for file, text in values.items()]
    return "\n".join(lines) + "\n"


ROCE = "pci0000:30/0000:3b:00.0"
ROCE_DEVICE = f"""
/sys/class/infiniband/mlx5_1 -> ../../devices/{ROCE}/infiniband/mlx5_1
/sys/devices/{ROCE}/infiniband/mlx5_1/device -> ../../../0000:3b:00.0
/sys/devices/{ROCE}/infiniband/mlx5_1/ports/1/state = 1: DOWN
/sys/devices/{ROCE}/infiniband/mlx5_1/ports/1/phys_state = 3: Disabled
/sys/devices/{ROCE}/infiniband/mlx5_1/ports/1/rate = 40 Gb/sec (4X QDR)
/sys/devices/{ROCE}/infiniband/mlx5_1/ports/1/link_layer = Ethernet
/sys/devices/{ROCE}/infiniband/mlx5_1/ports/1/counters/port_rcv_packets = 7
/sys/devices/{ROCE}/infiniband/mlx5_1/ports/1/counters/symbol_error = 0
"""


def test_roce_port_takes_link_and_flaps_from_its_interface() -> None:
    tree = (
        ROCE_DEVICE
        + net("ens1np0", ROCE, carrier="0", operstate="down", carrier_changes="5")
        + net("ens1npf0vf0", ROCE, phys_port_name="pf0vf0")
        + f"/sys/devices/{ROCE}/net/ens1np0/statistics/rx_crc_errors = 4\n"
    )
    section, gaps = nics.collect(host(tree))
    assert section is not None
    (port,) = section.ports
    assert gaps == ()
    assert (port.netdevs, port.admin_up, port.carrier) == (("ens1np0",), True, False)
    assert (port.state, port.phys_state) == ("DOWN", "Disabled")
    assert port.readings[0].counters == {
        "port_rcv_packets": 7,
        "carrier_changes": 5,
        "rx_crc_errors": 4,
    }


def test_roce_port_in_a_container_has_no_interface() -> None:
    section, gaps = nics.collect(host(ROCE_DEVICE))
    assert section is not None
    assert section.ports[0].admin_up is None
    assert gaps == (
        Gap(
            source="nics",
            reason=GapReason.ABSENT,
            fields=("admin_up", "carrier"),
            devices=("mlx5_1/1",),
            detail="/sys/class/infiniband/mlx5_1/device/net: no interface in this network "
            "namespace",
            allow="run in the host's network namespace",
        ),
    )


def test_physical_interfaces_only() -> None:
    """No loopback, bridge, veth, BMC over USB or wireless card; virtio counts."""
    pci = "pci0000:00/0000:00:19.0"
    usb = "pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.0"
    wlan = "pci0000:00/0000:00:1c.0"
    tree = (
        net("eth0", pci, speed="25000")
        + net("eth1", "pci0000:00/0000:00:03.0/virtio2", speed="-1")
        + net("enx0", usb)
        + net("wlp2s0", wlan)
        + f"/sys/devices/{wlan}/net/wlp2s0/phy80211/name = phy0\n"
        + "/sys/class/net/lo -> ../../devices/virtual/net/lo\n"
        + "/sys/devices/virtual/net/lo/type = 772\n"
        + "/sys/class/net/docker0 -> ../../devices/virtual/net/docker0\n"
        + "/sys/devices/virtual/net/docker0/type = 1\n"
    )
    section, gaps = nics.collect(host(tree))
    assert section is not None
    assert [(p.device, p.pci, p.rate_gbps) for p in section.ports] == [
        ("eth0", "0000:00:19.0", 25.0),
        ("eth1", "0000:00:03.0", None),
    ]
    assert gaps == ()


def test_restricted_function_is_asked_once_only() -> None:
    """Each refused read writes a line to the kernel log: the directory is left alone."""
    ports = "/sys/devices/pci0000:16/0000:1a:00.0/infiniband/mlx5_0/ports/1"
    tree = IB.replace(f"{ports}/counters/port_rcv_packets = 100", "")
    tree += f"{ports}/counters/port_rcv_packets !EINVAL\n{ports}/counters/port_xmit_packets !EIO\n"
    section, gaps = nics.collect(host(tree))
    assert section is not None
    assert section.ports[0].readings[0].counters == {"packet_seq_err": 1}
    assert [(gap.reason, gap.fields, gap.devices) for gap in gaps] == [
        (GapReason.UNSUPPORTED, ("counters",), ("mlx5_0/1",))
    ]


def test_no_performance_management() -> None:
    tree = IB.replace("port_rcv_packets = 100", "port_rcv_packets = N/A (no PMA)")
    _, gaps = nics.collect(host(tree))
    assert [gap.reason for gap in gaps] == [GapReason.UNSUPPORTED]


def test_one_bad_device_hides_no_other() -> None:
    broken = "/sys/class/infiniband/mlx5_9/ports !EIO\n"
    unread = "/sys/class/infiniband/mlx5_8/ports/1/state !EACCES\n"
    odd = "/sys/class/infiniband/mlx5_8/ports/1/rate = many\n"
    section, gaps = nics.collect(host(IB + broken + unread + odd))
    assert section is not None
    assert [port.key for port in section.ports] == ["mlx5_0/1", "mlx5_8/1"]
    assert {(gap.reason, gap.fields, gap.devices) for gap in gaps} == {
        (GapReason.MALFORMED, ("port",), ("mlx5_9",)),
        (GapReason.DENIED, ("state",), ("mlx5_8/1",)),
        (GapReason.ABSENT, ("phys_state",), ("mlx5_8/1",)),
        (GapReason.MALFORMED, ("rate_gbps",), ("mlx5_8/1",)),
    }


def test_soft_roce_is_left_to_its_interface() -> None:
    tree = "/sys/class/infiniband/rxe0 -> ../../devices/virtual/infiniband/rxe0\n"
    tree += "/sys/devices/virtual/infiniband/rxe0/ports/1/state = 4: ACTIVE\n"
    assert nics.collect(host(tree)) == (NicSection(), ())


def test_sub_and_virtual_functions() -> None:
    parent = "/sys/devices/pci0000:16/0000:1a:00.0"
    tree = f"""
/sys/class/infiniband/mlx5_4 -> {parent}/mlx5_core.sf.2/infiniband/mlx5_4
{parent}/mlx5_core.sf.2/infiniband/mlx5_4/device -> ../../../mlx5_core.sf.2
{parent}/mlx5_core.sf.2/infiniband/mlx5_4/ports/1/state = 1: DOWN
/sys/class/infiniband/mlx5_5 -> /sys/devices/pci0000:16/0000:1a:00.2/infiniband/mlx5_5
/sys/devices/pci0000:16/0000:1a:00.2/infiniband/mlx5_5/device -> ../../../0000:1a:00.2
/sys/devices/pci0000:16/0000:1a:00.2/infiniband/mlx5_5/ports/1/state = 1: DOWN
/sys/devices/pci0000:16/0000:1a:00.2/physfn -> ../0000:1a:00.0
{parent}/vendor = 0x15b3
"""
    section, _ = nics.collect(host(tree))
    assert section is not None
    assert [(p.key, p.pci, p.is_virtual_function) for p in section.ports] == [
        ("mlx5_4/1", None, True),
        ("mlx5_5/1", "0000:1a:00.2", True),
    ]


def test_two_ports_of_one_function() -> None:
    base = "/sys/class/infiniband/mlx4_0"
    tree = ""
    for number, name in ((1, "ens2"), (2, "ens2d1")):
        tree += f"{base}/ports/{number}/state = 4: ACTIVE\n"
        tree += f"{base}/ports/{number}/phys_state = 5: LinkUp\n"
        tree += f"{base}/ports/{number}/rate = 40 Gb/sec (4X QDR)\n"
        tree += f"{base}/ports/{number}/link_layer = Ethernet\n"
        tree += f"{base}/device/net/{name}/x = 1\n"
        tree += f"/sys/class/net/{name}/dev_port = {number - 1}\n"
    section, _ = nics.collect(host(tree))
    assert section is not None
    assert [(port.key, port.netdevs) for port in section.ports] == [
        ("mlx4_0/1", ("ens2",)),
        ("mlx4_0/2", ("ens2d1",)),
    ]


def test_reading_ends_with_its_budget() -> None:
    class Slow(FixtureHost):
        def read_bytes(self, path: str, limit: int = 4096) -> bytes:
            if "counters" in path:
                self.sleep(3)
            return super().read_bytes(path, limit)

    section, gaps = nics.collect(Slow(parse_fstree(IB)))
    assert section is not None
    assert section.ports[0].state == "ACTIVE"
    assert [(gap.reason, gap.devices) for gap in gaps] == [(GapReason.TIMEOUT, ("mlx5_0/1",))]


def test_no_sys_at_all() -> None:
    section, gaps = nics.collect(host("/etc/hostname = n07\n"))
    assert section is None
    assert [gap.reason for gap in gaps] == [GapReason.ABSENT]
