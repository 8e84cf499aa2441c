"""Network ports: error counters, flapping links, retransmissions. Growth, never totals."""

from __future__ import annotations

from probes.finding import (
    Action,
    Basis,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import GapReason
from probes.port_view import (
    Growth,
    cable_advice,
    component,
    each_port,
    growth_evidence,
    growths,
    has_link,
    last_counter,
)
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
from probes.snapshot.nic import NicPort
from probes.view import Node

_LINK_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "rx_crc_errors",
    "rx_frame_errors",
)
_RECOVERIES = "link_error_recovery"
_DOWNS = ("link_downed", "carrier_down_count", "carrier_changes")
# Widths of the InfiniBand counters that stop at their ceiling (PORT_PMA_ATTR in
# drivers/infiniband/core/sysfs.c)
_CEILINGS = {
    "symbol_error": 0xFFFF,
    "link_error_recovery": 0xFF,
    "link_downed": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "local_link_integrity_errors": 0xF,
    "excessive_buffer_overrun_errors": 0xF,
}


def _at_ceiling(port: NicPort, *names: str) -> str | None:
    """A note on counters that can't grow any more, so that silence is not taken for health."""
    full = [
        name for name in names if name in _CEILINGS and last_counter(port, name) == _CEILINGS[name]
    ]
    if not full:
        return None
    return f"{', '.join(full)}: at the ceiling, further growth can't be seen (perfquery -R clears)"


def _nothing_to_compare(node: Node, port: NicPort, *names: str) -> Statement:
    """Why no growth can be had: refused, read once only, or the adapter has no such counter."""
    if any(gap.covers("nics", "counters", port.key) for gap in node.snapshot.gaps):
        return Unread("nics", "counters", port.key)
    if port.readings and all(last_counter(port, name) is None for name in names):
        return NotApplicable(f"{port.key}: the adapter has no such counters")
    return Unread("nics", "counters", port.key, GapReason.NOT_COLLECTED)


@probe(
    "nic.link-errors",
    needs=("nics",),
    limits={
        "errors_per_hour": Limit(
            120, "errors/h", "bit error rate of 1e-12 that InfiniBand allows; NVSentinel's limit"
        ),
        "recoveries_per_hour": Limit(300, "recoveries/h", "NVSentinel: 5 a minute"),
        "errors_min": Limit(10, "errors", "own choice: fewer are noise in a sample of seconds"),
    },
)
def link_errors(node: Node, limits: Limits) -> Statements:
    """A port counts link errors or link recoveries at a rate that a good cable does not reach.

    Each error costs a packet that is sent again, each recovery stops the link for milliseconds;
    the ranks on that rail arrive late in every collective while the port still reads ACTIVE.

    Only growth counts, in the sample or since the last run, never the totals: those collect every
    reboot, cable swap and restart of the other end since the driver came up. A few errors in a
    short sample are noise. InfiniBand's error counters stop at a ceiling; one that stands there
    can't grow and is said so.

    The limits: symbol and receive errors at the bit error rate that InfiniBand allows, recoveries
    as NVSentinel has them. Likely the cable, the transceiver or the port at either end; the
    counters count what arrives here, so look at the sender's side too.
    """
    yield from each_port(node, lambda node, port: _judge_errors(node, port, limits))


def _judge_errors(node: Node, port: NicPort, limits: Limits) -> Statement | None:
    if not has_link(port):
        return None
    names = (*_LINK_ERRORS, _RECOVERIES)
    grown = growths(node, port, *names)
    if not grown:
        return _nothing_to_compare(node, port, *names)
    bad: dict[str, Growth] = {}
    for growth in grown:
        if growth.count >= _allowed(growth, limits):
            bad.setdefault(growth.counter, growth)
    if not bad:
        return Clear(component(node, port), _at_ceiling(port, *names))
    worst = max(bad.values(), key=lambda growth: growth.count / _allowed(growth, limits))
    return Finding(
        id=link_errors.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=component(node, port),
        summary=f"Port {port.key}: {worst.counter} grew by {worst.count} {worst.window}, "
        f"{_allowed(worst, limits):.0f} would be too many",
        evidence=tuple(
            growth_evidence(
                port,
                growth,
                limit=_allowed(growth, limits),
                basis=Basis.VENDOR_LIMIT,
                unit="errors",
            )
            for growth in bad.values()
        ),
        explains=(retransmissions.id,),
        remedy=Remedy(action=Action.RESEAT, text=cable_advice(port), disruptive=True),
    )


def _allowed(growth: Growth, limits: Limits) -> float:
    """The growth from which on it is too much, over this window."""
    rate = "recoveries_per_hour" if growth.counter == _RECOVERIES else "errors_per_hour"
    return max(limits["errors_min"], limits[rate] * growth.seconds / 3600)


@probe(
    "nic.flapping",
    needs=("nics",),
    limits={
        "flaps": Limit(3, "link losses", "healthagent: 3 in 3 h; gpud: 3 in 12 h"),
        "window_h": Limit(12, "h", "gpud's window; over a longer time proportionally more"),
    },
)
def flapping(node: Node, limits: Limits) -> Statements:
    """A port loses its link again and again.

    Each loss takes seconds to come back. InfiniBand and RoCE connections survive that only within
    their retry time; after it NCCL reports error 12 (retry exceeded) and the job ends. Short of
    that, every rank waits.

    The count since the driver came up means nothing: it holds every reboot of the switch and every
    cable swap. What counts is growth: a loss within the sample, or several since the last run. One
    loss between two runs is a cable swap or a restart of the other end as well as a flap, so it is
    only noted. The note clears itself with the next quiet run.

    Likely a bad cable or transceiver, or a port of the switch. What to do: the switch's log says
    which side went first; swap the cable; see whether the flaps follow it.
    """
    yield from each_port(node, lambda node, port: _judge_flaps(node, port, limits))


def _judge_flaps(node: Node, port: NicPort, limits: Limits) -> Statement:
    who = component(node, port)
    grown = [_as_losses(growth) for growth in growths(node, port, *_counters_of_losses(port))]
    if not grown:
        return _nothing_to_compare(node, port, *_DOWNS)
    worst: Growth | None = None
    for growth in grown:
        allowed = limits["flaps"] * max(1, growth.seconds / 3600 / limits["window_h"])
        live = growth.in_sample
        if growth.count >= (1 if live else allowed) and (worst is None or live):
            worst = growth
    if worst is None:
        once = next((growth for growth in grown if growth.count), None)
        note = _at_ceiling(port, "link_downed")
        if once:
            note = (
                f"lost its link {once.count} x {once.window}: a cable swap or a restart of "
                "the other end looks the same"
            )
        return Clear(who, note)
    live = worst.in_sample
    return Finding(
        id=flapping.id,
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN if worst.count > 1 else Confidence.LIKELY,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.BREAKS if live else JobImpact.SLOWS,
        component=who,
        summary=f"Port {port.key} lost its link {worst.count} x {worst.window}, expected 0",
        evidence=(
            growth_evidence(port, worst, limit=0, basis=Basis.OWN_BASELINE, unit="link losses"),
        ),
        explains=(link_errors.id, retransmissions.id),
        remedy=Remedy(action=Action.RESEAT, text=cable_advice(port), disruptive=True),
    )


def _counters_of_losses(port: NicPort) -> tuple[str, ...]:
    """The best counter of link losses that the port has; older kernels only count changes."""
    return next(((name,) for name in _DOWNS if last_counter(port, name) is not None), ())


def _as_losses(growth: Growth) -> Growth:
    if growth.counter != "carrier_changes":
        return growth
    return Growth(growth.counter, growth.count // 2, growth.seconds, growth.in_sample)


@probe(
    "nic.retransmissions",
    needs=("nics",),
    limits={
        "timeouts_per_hour": Limit(
            30, "timeouts/h", "own choice: one costs seconds (NCCL_IB_TIMEOUT 20 is 4.3 s)"
        ),
        "timeouts_min": Limit(3, "timeouts", "own choice: a peer that ended leaves one or two"),
        "lost_fraction": Limit(
            1e-4, "of packets", "own choice: sending again from the lost packet on costs ~1 %"
        ),
        "lost_min": Limit(100, "packets", "own choice: below it the fraction is noise"),
    },
)
def retransmissions(node: Node, limits: Limits) -> Statements:
    """RDMA packets are lost on the way and have to be sent again.

    local_ack_timeout_err counts sends that no answer came back for within the timeout; NCCL's
    default makes each of them seconds long, and the whole collective waits. packet_seq_err counts
    gaps that the receiver reported, after which everything from the gap on is sent again.

    The loss is somewhere on the path (switch buffers, flow control not configured for RoCE, a bad
    cable elsewhere), not necessarily at this port, so it is possible rather than likely and blames
    nobody. out_of_sequence alone is no loss: adaptive routing delivers packets out of order by
    design. Totals mean nothing; a job that was killed leaves a few timeouts behind.

    What to do: compare with the other nodes; look for pause frames and drops at the switch ports;
    on RoCE check that PFC/ECN are set alike at both ends.
    """
    yield from each_port(node, lambda node, port: _judge_loss(node, port, limits))


def _judge_loss(node: Node, port: NicPort, limits: Limits) -> Statement | None:
    if port.port is None or not has_link(port):
        return None
    who = component(node, port)
    names = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence")
    grown = growths(node, port, *names)
    if not grown:
        return _nothing_to_compare(node, port, *names)
    sent = {growth.in_sample: growth.count for growth in growths(node, port, "port_xmit_packets")}
    bad: list[tuple[Growth, float]] = []
    reordered = False
    for growth in grown:
        if growth.counter == "local_ack_timeout_err":
            allowed = max(
                limits["timeouts_min"], limits["timeouts_per_hour"] * growth.seconds / 3600
            )
        elif growth.counter == "packet_seq_err" and sent.get(growth.in_sample):
            allowed = max(limits["lost_min"], limits["lost_fraction"] * sent[growth.in_sample])
        else:
            reordered = reordered or growth.count > 0
            continue
        if growth.count >= allowed:
            bad.append((growth, allowed))
    if not bad:
        return Clear(
            who, "packets out of order without loss: adaptive routing" if reordered else None
        )
    worst, most = max(bad, key=lambda item: item[0].count / item[1])
    proofs: tuple[Evidence, ...] = tuple(
        growth_evidence(port, growth, limit=allowed, basis=Basis.VENDOR_LIMIT, unit="events")
        for growth, allowed in bad
    )
    return Finding(
        id=retransmissions.id,
        severity=Severity.WARNING,
        confidence=Confidence.POSSIBLE,
        fault_class=FaultClass.CANNOT_TELL,
        job_impact=JobImpact.SLOWS,
        component=who,
        summary=f"Port {port.key}: {worst.counter} grew by {worst.count} {worst.window}, "
        f"{most:.0f} would be too many: "
        "packets get lost on the path",
        evidence=proofs,
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Compare with other nodes on the same switches; look for drops, pause frames and "
            "errors at the switch ports; on RoCE see that PFC and ECN are set alike at both ends.",
            disruptive=False,
        ),
    )
