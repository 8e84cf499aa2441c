"""Network ports: link, rate, lanes, subnet manager, firmware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from probes.finding import (
    Action,
    Basis,
    Component,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.port_view import (
    cable_advice,
    component,
    each_port,
    evidence,
    expected_rate,
    has_link,
    is_switched_off,
    last_counter,
    ports,
    siblings,
    state_of,
    was_in_use,
)
from probes.registry import (
    Clear,
    NotApplicable,
    Statement,
    Statements,
    Unread,
    probe,
)
from probes.snapshot.nic import NicPort
from probes.stats import median_high
from probes.view import Node


@probe("nic.port-down", needs=("nics",))
def port_down(node: Node) -> Statements:
    """A network port that should be up has no link.

    NCCL uses only the ports that are ACTIVE when a job starts. A port that is down costs its share
    of the bandwidth from then on, on every node that talks to this one; on a rail-wired fabric the
    GPUs of that rail can't reach their peers, and a job that loses the port while running aborts.

    A port without a link is no fault by itself: it may be unused, not wired, or switched off. It
    counts only when something says that it should be up: the manifest, more than half of the same
    ports of the same board (function and port number alike, so that unwired second ports are not
    held against anyone), or data that it has carried since its driver came up. A switched-off
    port (InfiniBand: phys_state Disabled; Ethernet: the interface is down) and a virtual function
    count only when the manifest names them. An Ethernet port's phys_state is not looked at: it
    reads Disabled whenever there is no carrier.

    Sure when the manifest names the port, likely with siblings, possible on past traffic alone
    (somebody may have moved the cable). What to do: check the switch port and the cable; on
    InfiniBand `ibstat DEVICE`, on Ethernet `ip link show` and `ethtool`.
    """
    yield from each_port(node, _judge_link)


def _judge_link(node: Node, port: NicPort) -> Statement:
    who = component(node, port)
    link = has_link(port)
    if link is None:
        return Unread("nics", "state", port.key)
    if link:
        return Clear(who)
    wanted = expected_rate(node, port) is not None
    off = is_switched_off(port)
    if not wanted and port.is_virtual_function:
        return Clear(who, "a virtual function without a link: its user decides")
    if not wanted and off:
        return Clear(who, "switched off by an administrator")
    peers = siblings(node, port)
    up = sum(1 for other in peers if has_link(other))
    by_peers = up >= 2 and 2 * up > len(peers)
    used = was_in_use(port)
    if not (wanted or by_peers or used):
        if off is None:
            return Unread("nics", "admin_up", port.key)
        return Clear(who, "no link and never had one since its driver came up: an unused port")
    state = state_of(port) or "down"
    if port.phys_state and port.link_layer != "Ethernet":
        state += f" ({port.phys_state})"
    reasons = [
        text
        for holds, text in (
            (wanted, "the manifest names it"),
            (by_peers, f"{up} of {len(peers)} equal ports have a link"),
            (used, "it was in use before"),
        )
        if holds
    ]
    proofs = [_link_evidence(port, wanted=wanted, by_peers=by_peers)]
    proofs += [
        evidence(port, name, value)
        for name in ("link_downed", "carrier_down_count", "port_rcv_packets", "rx_packets")
        if (value := last_counter(port, name))
    ]
    must_not_start = port.port is not None and (wanted or (by_peers and used))
    return Finding(
        id=port_down.id,
        severity=Severity.CRITICAL if must_not_start else Severity.WARNING,
        confidence=Confidence.PROVEN
        if wanted
        else Confidence.LIKELY
        if by_peers
        else Confidence.POSSIBLE,
        fault_class=FaultClass.HARDWARE if used and not off else FaultClass.CONFIGURATION,
        job_impact=JobImpact.BREAKS if must_not_start else JobImpact.SLOWS,
        component=who,
        summary=f"Port {port.key} has no link: {state}; {', '.join(reasons)}",
        evidence=tuple(proofs),
        remedy=Remedy(
            action=Action.RECONFIGURE if off else Action.RESEAT,
            text="The port is switched off here: find out why, then bring it up."
            if off
            else cable_advice(port),
            disruptive=False,
        ),
    )


def _link_evidence(port: NicPort, *, wanted: bool, by_peers: bool) -> Evidence:
    basis = Basis.MANIFEST if wanted else Basis.PEER_MEDIAN if by_peers else Basis.OWN_BASELINE
    if port.port is None:
        return evidence(port, "operstate", state_of(port) or "down", expected=("up", basis))
    return evidence(port, "state", state_of(port) or "DOWN", expected=("ACTIVE", basis))


@probe("nic.init-state", needs=("nics",))
def init_state(node: Node) -> Statements:
    """An InfiniBand port has a link, but no subnet manager has made it active.

    In state INIT or ARMED the cable is good and the port waits for the subnet manager to give it
    an address and routes. Until then nothing but management packets pass, and NCCL leaves the port
    out or fails to connect.

    A port passes through INIT and ARMED for some seconds after its link came up, so a port that
    has moved on by the second reading is no fault; nor is a virtual function, which waits for its
    physical function's policy. Sure: it is the port's own state. What to do: see that a subnet
    manager runs and sees this node (`sminfo`, `ibstat`, the manager's log for this port's GUID).
    """
    yield from each_port(node, _judge_manager)


def _judge_manager(node: Node, port: NicPort) -> Statement | None:
    if port.link_layer != "InfiniBand":
        return None
    who = component(node, port)
    states = [reading.state for reading in port.readings if reading.state]
    if not states and port.state:
        states = [port.state]
    if not states:
        return Unread("nics", "state", port.key)
    waiting = [state for state in states if state in ("INIT", "ARMED")]
    if not waiting:
        return Clear(who)
    if len(waiting) < len(states) or states[0] != states[-1]:
        return Clear(who, f"on its way: {' -> '.join(states)}")
    if port.is_virtual_function:
        return Clear(who, "a virtual function waits for its physical function's policy")
    return Finding(
        id=init_state.id,
        severity=Severity.CRITICAL,
        confidence=Confidence.PROVEN if len(states) > 1 else Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.BREAKS,
        component=who,
        summary=f"Port {port.key} has a link but stays in {states[-1]}, expected ACTIVE: "
        "no subnet manager has configured it",
        evidence=(evidence(port, "state", states[-1], expected=("ACTIVE", Basis.VENDOR_LIMIT)),),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Check that the subnet manager runs and reaches this port: `sminfo`, `ibstat "
            f"{port.device}`.",
            disruptive=False,
        ),
    )


@probe("nic.rate-low", needs=("nics",))
def rate_low(node: Node) -> Statements:
    """A port runs at a lower rate than the same ports of the same board on this node.

    A collective goes at the pace of its slowest rail: one port at half rate halves the bandwidth
    between nodes for every rank, and nothing is logged.

    sysfs shows the rate that was agreed with the other end, not what the adapter could do, so the
    expectation comes from the siblings. A card faster than its switch is no fault. Where two or
    more equal ports share the lower rate they may be wired to another, slower network (storage),
    so that is only worth knowing; so is one of a pair. A port without a link has no rate.

    What to do: compare the cable, transceiver and switch port with those of a good rail; set
    nic_rates_gbps in the manifest when the difference is intended.
    """
    yield from each_port(
        node,
        lambda node, port: _below_siblings(
            node,
            port,
            id=rate_low.id,
            what="runs at",
            value=lambda item: item.rate_gbps,
            fact="rate" if port.port is not None else "speed",
            unit="Gbit/s",
            field="rate_gbps",
            explains=(),
        ),
    )


@probe("nic.width-low", needs=("nics",))
def width_low(node: Node) -> Statements:
    """An InfiniBand port trained on fewer lanes than its siblings.

    A port normally bundles four lanes ("4X"). When one lane's signal is bad the link comes up on
    fewer ("2X", "1X") and the rate falls with it, while everything still works.

    Two lanes or one are the design of some cards (HDR100, split cables), so only siblings of the
    same board decide. Likely when one port differs from all others. What to do: reseat or swap
    the cable of this port; the lane's error counters (`mlxlink -d DEVICE -c`) say which end.
    """
    yield from each_port(
        node,
        lambda node, port: (
            None
            if port.link_layer != "InfiniBand"
            else _below_siblings(
                node,
                port,
                id=width_low.id,
                what="trained on",
                value=lambda item: item.width_lanes,
                fact="rate",
                unit="lanes",
                field="width_lanes",
                explains=(rate_low.id,),
            )
        ),
    )


def _below_siblings(
    node: Node,
    port: NicPort,
    *,
    id: str,
    what: str,
    value: Callable[[NicPort], float | None],
    fact: str,
    unit: str,
    field: str,
    explains: tuple[str, ...],
) -> Statement | None:
    if not has_link(port):
        return None
    mine = value(port)
    peers = [
        theirs
        for other in siblings(node, port)
        if has_link(other) and (theirs := value(other)) is not None
    ]
    if not peers:
        return NotApplicable(f"{port.key}: no equal port with a link to compare with")
    if mine is None:
        return Unread("nics", field, port.key)
    who = component(node, port)
    expected = median_high(peers)
    if mine >= expected:
        return Clear(who)
    alone = len(peers) > 1 and not any(theirs <= mine for theirs in peers)
    others = f"{sum(theirs >= expected for theirs in peers)} of {len(peers)} equal ports"
    return Finding(
        id=id,
        severity=Severity.WARNING if alone else Severity.INFO,
        confidence=Confidence.LIKELY if alone else Confidence.POSSIBLE,
        fault_class=FaultClass.HARDWARE if explains and alone else FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS if alone else JobImpact.NONE,
        component=who,
        summary=f"Port {port.key} {what} {mine:g} {unit}, {others} have {expected:g} {unit}"
        + ("" if alone else "; it is not the only one, so it may be meant so")
        if len(peers) > 1
        else f"Port {port.key} {what} {mine:g} {unit}, its one equal port has {expected:g} {unit}",
        evidence=(
            evidence(
                port,
                fact,
                mine,
                unit=unit,
                expected=(expected, Basis.PEER_MEDIAN),
                quote=port.rate_text,
            ),
        ),
        explains=explains,
        remedy=Remedy(
            action=Action.RESEAT if alone else Action.NONE,
            text=cable_advice(port)
            if alone
            else "Set nic_rates_gbps in the manifest to what is intended.",
            disruptive=alone,
        ),
    )


@probe("nic.firmware-differs", needs=("nics",))
def firmware_differs(node: Node) -> Statements:
    """Adapters of the same board run different firmware.

    Mixed firmware on the rails of one node has caused uneven congestion control and adapters that
    miss a feature the others use. It may be intended (a canary), so it is only worth knowing.

    Compared by board id, all ports of one adapter counting once. What to do: `flint -d DEVICE q`
    on the odd one, and bring it to the version of the others at the next maintenance.
    """
    boards: dict[str, dict[str, NicPort]] = {}
    for port in ports(node):
        if port.board_id and not port.is_virtual_function:
            boards.setdefault(port.board_id, {}).setdefault(port.device, port)
    for board, devices in boards.items():
        if len(devices) < 2:
            continue
        counts = Counter(port.firmware_version for port in devices.values())
        usual, most = counts.most_common(1)[0]
        for port in devices.values():
            version = port.firmware_version
            if version is None:
                yield Unread("nics", "firmware_version", port.device)
                continue
            who = Component(type="nic", host=node.host, pci=port.pci, device=port.device)
            if version == usual or 2 * most <= len(devices):
                mixed = len(counts) > 1 and 2 * most <= len(devices)
                yield Clear(who, "no firmware version has a majority" if mixed else None)
                continue
            yield Finding(
                id=firmware_differs.id,
                severity=Severity.INFO,
                confidence=Confidence.PROVEN,
                fault_class=FaultClass.CONFIGURATION,
                job_impact=JobImpact.NONE,
                component=who,
                summary=f"Adapter {port.device} runs firmware {version}, {most} of {len(devices)} "
                f"of board {board} run {usual}",
                evidence=(
                    evidence(
                        port,
                        "fw_ver",
                        version,
                        expected=(str(usual), Basis.PEER_MEDIAN),
                    ),
                ),
                remedy=Remedy(
                    action=Action.RECONFIGURE,
                    text="Bring it to the version of the others at the next maintenance.",
                    disruptive=True,
                ),
            )
