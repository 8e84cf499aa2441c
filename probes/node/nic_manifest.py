"""Network ports against the operator's manifest."""

from __future__ import annotations

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
from probes.port_view import cable_advice, component, evidence, expected_rate, has_link, ports
from probes.registry import Clear, NotApplicable, Statements, Unread, probe
from probes.view import Node


@probe("manifest.nic-rate", needs=("nics",))
def manifest_rate(node: Node) -> Statements:
    """A port runs below the rate that the manifest expects of it.

    The manifest's nic_rates_gbps says what this node's ports should run at; a collective goes
    at the pace of the slowest. Proven: rate and expectation are both exact. A port without a
    link is left to nic.port-down.

    What to do: compare cable, transceiver and switch port with a good one, or correct the
    manifest.
    """
    for port in ports(node):
        wanted = expected_rate(node, port)
        if wanted is None or not has_link(port):
            continue
        who = component(node, port)
        if port.rate_gbps is None:
            yield Unread("nics", "rate_gbps", port.key)
        elif port.rate_gbps >= wanted:
            yield Clear(who)
        else:
            yield Finding(
                id=manifest_rate.id,
                severity=Severity.WARNING,
                confidence=Confidence.PROVEN,
                fault_class=FaultClass.CONFIGURATION,
                job_impact=JobImpact.SLOWS,
                component=who,
                summary=f"Port {port.key} runs at {port.rate_gbps:g} Gbit/s, "
                f"the manifest expects {wanted:g} Gbit/s",
                evidence=(
                    evidence(
                        port,
                        "rate" if port.port is not None else "speed",
                        port.rate_gbps,
                        unit="Gbit/s",
                        expected=(wanted, Basis.MANIFEST),
                        quote=port.rate_text,
                    ),
                ),
                explains=("nic.rate-low",),
                remedy=Remedy(action=Action.RESEAT, text=cable_advice(port), disruptive=True),
            )


@probe("manifest.nic-missing", needs=("nics",))
def manifest_missing(node: Node) -> Statements:
    """A network port that the manifest expects is not there.

    The adapter did not enumerate, its driver did not bind, or it was renamed; jobs that name it
    (NCCL_IB_HCA) fail or use fewer rails. Inside a container a missing interface proves
    nothing, because the host's interfaces are not visible there.

    What to do: `lspci | grep -i -e mellanox -e ethernet`, and the kernel log for the adapter's
    driver.
    """
    manifest = node.snapshot.manifest
    if manifest is None or not manifest.nic_rates_gbps:
        yield NotApplicable("the manifest expects no port")
        return
    there = {name for port in ports(node) for name in (port.key, port.device, *port.netdevs)}
    for name, rate in manifest.nic_rates_gbps.items():
        device, _, number = name.partition("/")
        who = Component(
            type="nic",
            host=node.host,
            device=device,
            port=int(number) if number.isdecimal() else None,
        )
        if name in there:
            yield Clear(who)
        elif node.snapshot.container:
            yield NotApplicable(f"{name}: the host's interfaces are not visible in a container")
        else:
            yield Finding(
                id=manifest_missing.id,
                severity=Severity.CRITICAL,
                confidence=Confidence.PROVEN,
                fault_class=FaultClass.CANNOT_TELL,
                job_impact=JobImpact.BREAKS,
                component=who,
                summary=f"Port {name} is not there, the manifest expects it at {rate:g} Gbit/s",
                evidence=(
                    Evidence(
                        source="sysfs",
                        locator="/sys/class/infiniband, /sys/class/net",
                        observed=", ".join(sorted(port.key for port in ports(node))) or "no ports",
                        recheck="ls /sys/class/infiniband /sys/class/net; rdma link",
                    ),
                ),
                remedy=Remedy(
                    action=Action.REBOOT,
                    text="Look for the adapter in `lspci` and for its driver in the kernel log; "
                    "if it is gone from the bus, a power cycle or a reseat follows.",
                    disruptive=True,
                ),
            )
