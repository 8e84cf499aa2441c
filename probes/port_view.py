"""What the rules about network ports share: link, siblings, growth of counters, evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from probes.finding import Basis, Component, Evidence, Expectation, Scalar
from probes.registry import NotApplicable, Statement
from probes.snapshot.nic import NicPort
from probes.view import Node

_WITH_LINK = {"ACTIVE", "ACTIVE_DEFER", "INIT", "ARMED"}  # drivers/infiniband/core/sysfs.c


class Growth(msgspec.Struct, frozen=True):
    """How much a counter grew, and over what time."""

    counter: str
    count: int
    seconds: float
    in_sample: bool  # else: since the last run

    @property
    def window(self) -> str:
        """The time in words."""
        time = duration(self.seconds)
        return f"in the sample of {time}" if self.in_sample else f"in {time} since the last run"


def ports(node: Node) -> tuple[NicPort, ...]:
    """Every port of the snapshot."""
    return node.snapshot.nics.ports if node.snapshot.nics else ()


def component(node: Node, port: NicPort) -> Component:
    """The port with every identifier that is known."""
    return Component(type="nic", host=node.host, pci=port.pci, device=port.device, port=port.port)


def state_of(port: NicPort) -> str | None:
    """The state at the last reading."""
    for reading in reversed(port.readings):
        if reading.state is not None:
            return reading.state
    return port.state


def has_link(port: NicPort) -> bool | None:
    """Whether the other end is heard; None when nothing tells."""
    if port.carrier is not None:
        return port.carrier
    state = state_of(port)
    if state in (None, "unknown"):  # an interface whose driver does not tell
        return None
    return state in _WITH_LINK or state == "up"


def is_switched_off(port: NicPort) -> bool | None:
    """Whether an administrator turned the port off; None when nothing tells.

    An Ethernet port's ``phys_state`` reads Disabled whenever there is no carrier, so there only
    the interface's own flag counts.
    """
    if port.link_layer == "Ethernet":
        return None if port.admin_up is None else not port.admin_up
    return None if port.phys_state is None else port.phys_state == "Disabled"


def last_counter(port: NicPort, name: str) -> int | None:
    """A counter at the last reading that has it."""
    for reading in reversed(port.readings):
        if name in reading.counters:
            return reading.counters[name]
    return None


def was_in_use(port: NicPort) -> bool:
    """Whether it carried data or lost a link since the device was initialised."""
    names = ("port_rcv_packets", "rx_packets", "link_downed", "carrier_down_count")
    return any(last_counter(port, name) for name in names)


def siblings(node: Node, port: NicPort) -> tuple[NicPort, ...]:
    """Ports that play the same part: same board, link layer, PCI function and port number.

    The second ports of dual-port boards are compared among themselves, because it is common that
    none of them is wired. Virtual functions have no siblings.
    """
    groups = node.memo("port siblings", _groups)
    assert isinstance(groups, dict)  # noqa: S101 - what _groups returns
    return tuple(other for other in groups.get(_group(port), ()) if other is not port)


def _groups(node: Node) -> dict[tuple[object, ...], list[NicPort]]:
    found: dict[tuple[object, ...], list[NicPort]] = {}
    for port in ports(node):
        found.setdefault(_group(port), []).append(port)
    found.pop((), None)
    return found


def _group(port: NicPort) -> tuple[object, ...]:
    model = port.board_id or port.pci_id
    if model is None or port.is_virtual_function:
        return ()
    function = port.pci.rpartition(".")[2] if port.pci else None
    return model, port.link_layer, function, port.port, port.port is None


def growths(node: Node, port: NicPort, *counters: str) -> tuple[Growth, ...]:
    """How far counters grew since the last run and in the sample, the longer window first.

    A counter that went backwards was reset: that window says nothing.
    """
    found = []
    for name in counters:
        have = [
            (reading.at_ns, reading.counters[name])
            for reading in port.readings
            if name in reading.counters
        ]
        if not have:
            continue
        before = _at_last_run(node, port).get(name)
        baseline = node.snapshot.baseline
        if before is not None and baseline is not None:
            seconds = (node.snapshot.taken_at_ns - baseline.at_ns) / 1e9
            if seconds > 0 and have[-1][1] >= before:
                found.append(Growth(name, have[-1][1] - before, seconds, False))
        seconds = (have[-1][0] - have[0][0]) / 1e9
        if seconds > 0 and have[-1][1] >= have[0][1]:
            found.append(Growth(name, have[-1][1] - have[0][1], seconds, True))
    return tuple(sorted(found, key=lambda growth: -growth.seconds))


def _at_last_run(node: Node, port: NicPort) -> dict[str, int]:
    baseline = node.snapshot.baseline
    if baseline is None or baseline.boot_id != node.snapshot.boot_id:
        return {}
    for item in baseline.sets:
        if item.kind == "port" and item.key == port.key:
            return item.counters
    return {}


def path_of(port: NicPort, fact: str) -> str:
    """The sysfs file of a fact or counter of a port."""
    if fact in ("carrier", "carrier_changes", "carrier_down_count", "operstate", "speed", "flags"):
        return f"/sys/class/net/{(port.netdevs or (port.device,))[0]}/{fact}"
    if fact in ("rx_packets", "rx_crc_errors", "rx_frame_errors"):
        return f"/sys/class/net/{(port.netdevs or (port.device,))[0]}/statistics/{fact}"
    base = f"/sys/class/infiniband/{port.device}"
    if port.port is None or fact == "fw_ver":
        return f"{base}/{fact}"
    if fact in ("state", "phys_state", "rate", "link_layer"):
        return f"{base}/ports/{port.port}/{fact}"
    folder = "hw_counters" if fact in _HW_COUNTERS else "counters"
    return f"{base}/ports/{port.port}/{folder}/{fact}"


_HW_COUNTERS = {"local_ack_timeout_err", "packet_seq_err", "out_of_sequence"}


def evidence(
    port: NicPort,
    fact: str,
    observed: Scalar,
    *,
    expected: tuple[Scalar, Basis] | None = None,
    unit: str | None = None,
    quote: str | None = None,
) -> Evidence:
    """One reading of a port from sysfs, with the command that shows it again."""
    path = path_of(port, fact)
    return Evidence(
        source="sysfs",
        locator=path,
        observed=observed,
        unit=unit,
        expected=Expectation(value=expected[0], basis=expected[1]) if expected else None,
        quote=quote,
        recheck=f"cat {path}",
    )


def growth_evidence(
    port: NicPort, growth: Growth, *, limit: float, basis: Basis, unit: str
) -> Evidence:
    """A counter's growth; the recheck reads the counter twice."""
    path = path_of(port, growth.counter)
    return Evidence(
        source="sysfs",
        locator=path,
        observed=growth.count,
        unit=f"{unit} {growth.window}",
        expected=Expectation(value=limit, basis=basis),
        recheck=f"cat {path}; sleep 10; cat {path}",
    )


def duration(seconds: float) -> str:
    """A time for a person: 2.0 s, 14 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def expected_rate(node: Node, port: NicPort) -> float | None:
    """The rate in Gbit/s that the manifest expects of this port, by device or interface name."""
    manifest = node.snapshot.manifest
    rates = manifest.nic_rates_gbps if manifest else {}
    for name in (port.key, port.device, *port.netdevs):
        if name in rates:
            return rates[name]
    return None


def cable_advice(port: NicPort) -> str:
    """What to do about a link that does not come up, or not as it should."""
    see = f"ethtool -m {(port.netdevs or (port.device,))[0]}"
    if port.port is not None:
        see = f"mlxlink -d {port.device} -m -c"
    return (
        "Look at the other end: is the switch port up? Then reseat or swap the cable or "
        f"transceiver; `{see}` shows light levels and error counts."
    )


def each_port(
    node: Node, judge: Callable[[Node, NicPort], Statement | None]
) -> Iterator[Statement]:
    """One statement per port; a port that the rule does not look at gives none."""
    if not ports(node):
        yield NotApplicable("no port of a physical network adapter is visible here")
    for port in ports(node):
        statement = judge(node, port)
        if statement is not None:
            yield statement
