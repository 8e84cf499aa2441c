"""Power limits: lowered, or different from the siblings'."""

from __future__ import annotations

import statistics

from probes.finding import (
    Action,
    Basis,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gpu_facts import called, is_mig, missing, not_for_vgpu, shown, smi
from probes.registry import (
    Clear,
    Limit,
    Limits,
    Statement,
    Statements,
    Unread,
    probe,
)
from probes.snapshot.gpu import Gpu
from probes.view import Node


@probe(
    "power.limit-low",
    needs=("nvml",),
    limits={
        "below_percent": Limit(
            1.0, "% below", "laggard: limits are set in whole watts; less is rounding"
        )
    },
)
def limit_low(node: Node, limits: Limits) -> Statements:
    """The power limit in force is below the board's default, or below its siblings'.

    Under load the GPU meets that limit earlier and clocks lower; with siblings at a higher limit
    every rank waits for it. The limit in force is the lower of what was asked for and of caps from
    outside (baseboard controller, rack manager).

    No fault: the same lower limit on all GPUs of the node is somebody's decision; it is told as
    info. A limit equal to the manifest's is expected.

    Sure: proven, the driver says so itself. Whether it costs speed now, clocks.sw-power-cap says.

    Do: ask who lowered it; `nvidia-smi -pl` restores it when the limit was set on the host. A
    limit in force below the one asked for comes from outside: look there.
    """
    for gpu in node.live_gpus:
        yield _limit(node, limits["below_percent"], gpu)


def _limit(node: Node, percent: float, gpu: Gpu) -> Statement:
    own = gpu.limits
    enforced, default = own.power_limit_enforced_mw, own.power_limit_default_mw
    if enforced is None:
        return missing(gpu, "power_limit_enforced_mw", not_for_vgpu(gpu))
    theirs = [
        limit
        for sibling in node.siblings(gpu)
        if (limit := sibling.limits.power_limit_enforced_mw) is not None
    ]
    peers = statistics.median(theirs) if theirs else None
    manifest = node.snapshot.manifest
    if manifest is not None and manifest.gpu_power_limit_w is not None:
        # the manifest's own probe compares with what is expected
        return Clear(node.gpu_component(gpu), "the manifest says which limit is expected")
    if default is None and peers is None:
        return Unread("nvml", "power_limit_default_mw", gpu.key)
    keep = 1 - percent / 100
    asked = own.power_limit_mw
    below_default = default is not None and enforced < keep * default
    below_peers = peers is not None and enforced < keep * peers
    from_outside = asked is not None and enforced < keep * asked
    if not (below_default or below_peers or from_outside):
        return Clear(
            node.gpu_component(gpu), "MIG: the limit is the board's" if is_mig(gpu) else None
        )
    parts = [f"{called(gpu)} power limit {enforced / 1000:.0f} W"]
    if below_peers and peers is not None:
        parts.append(f"siblings {peers / 1000:.0f} W")
    if default is not None:
        parts.append(f"default {default / 1000:.0f} W")
    if from_outside and asked is not None:
        parts.append(f"asked for {asked / 1000:.0f} W: capped from outside the host")
    recheck = smi(gpu, "-q -d POWER")
    expectations = (
        ((round(peers), Basis.PEER_MEDIAN),) if below_peers and peers is not None else ()
    ) + (((default, Basis.DEVICE_MAX),) if below_default and default is not None else ())
    return Finding(
        id="power.limit-low",
        severity=Severity.WARNING if below_peers or from_outside else Severity.INFO,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=node.gpu_component(gpu),
        summary=", ".join(parts),
        evidence=tuple(
            shown(
                "nvmlDeviceGetEnforcedPowerLimit", enforced, recheck, unit="mW", expected=expected
            )
            for expected in expectations or ((asked, Basis.DEVICE_MAX),)
        ),
        explains=("clocks.sw-power-cap",),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="A cap from outside the host: read the baseboard controller's power policy."
            if from_outside
            else f"Ask who lowered it; `nvidia-smi -pl {(default or peers or 0) / 1000:.0f} "
            f"-i {gpu.pci or gpu.index}` (as root) restores it.",
            disruptive=False,
        ),
    )
