"""Power limits: lowered, or different from the siblings'."""

from __future__ import annotations

from probes.finding import Action, Basis, FaultClass, JobImpact, Remedy, Severity
from probes.gpu_facts import gpu_finding, missing, not_for_vgpu, shown, smi
from probes.registry import Clear, Limit, Limits, Statement, Statements, Unread, probe
from probes.snapshot.gpu import Gpu
from probes.view import Node, median_of


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

    No fault: the same lower limit on all GPUs of the node is somebody's decision, and a board of
    the same model with a lower default is another variant; both are told as info. Where the
    manifest names a limit, manifest.power-limit judges it.

    Sure: proven, the driver says so itself. Whether it costs speed now, clocks.sw-power-cap says.

    Do: ask who lowered it; `nvidia-smi -pl` restores it when the limit was set on the host. A
    limit in force below the one asked for comes from outside: look there.
    """
    for gpu in node.live_gpus:
        yield _limit(node, limits["below_percent"], gpu)


def _limit(node: Node, percent: float, gpu: Gpu) -> Statement:
    own = gpu.limits
    enforced, default, asked = (
        own.power_limit_enforced_mw,
        own.power_limit_default_mw,
        own.power_limit_mw,
    )
    if enforced is None:
        return missing(gpu, "power_limit_enforced_mw", not_for_vgpu(gpu))
    manifest = node.snapshot.manifest
    if manifest is not None and manifest.gpu_power_limit_w is not None:
        return Clear(node.gpu_component(gpu), "the manifest says which limit is expected")
    theirs = [s.limits for s in node.siblings(gpu)]
    peers = median_of(limits.power_limit_enforced_mw for limits in theirs)
    if default is None and peers is None:
        return Unread("nvml", "power_limit_default_mw", gpu.key)
    keep = 1 - percent / 100
    below_default = default is not None and enforced < keep * default
    below_peers = peers is not None and enforced < keep * peers
    from_outside = asked is not None and enforced < keep * asked
    if not (below_default or below_peers or from_outside):
        return Clear(node.gpu_component(gpu))
    # one model is sold with several power limits: then the board is another one, nobody set it
    usual = median_of(limits.power_limit_default_mw for limits in theirs)
    variant = default is not None and usual is not None and default < keep * usual
    lowered = below_peers and not (variant and not below_default)
    bounds: list[tuple[str, float | None, Basis]] = [("default", default, Basis.DEVICE_MAX)]
    if below_peers:
        bounds.insert(0, ("siblings", peers, Basis.PEER_MEDIAN))
    if from_outside:
        bounds.append(("asked for", asked, Basis.DEVICE_MAX))
    known = [(name, bound, basis) for name, bound, basis in bounds if bound is not None]
    return gpu_finding(
        node,
        gpu,
        "power.limit-low",
        ", ".join(
            [
                f"power limit {enforced / 1000:.0f} W",
                *(f"{name} {bound / 1000:.0f} W" for name, bound, _ in known),
            ]
        )
        + (": capped from outside the host" if from_outside else "")
        + (": another board variant" if variant and not below_default else ""),
        severity=Severity.WARNING if lowered or from_outside else Severity.INFO,
        impact=JobImpact.SLOWS,
        fault_class=FaultClass.CONFIGURATION,
        evidence=[
            shown(
                "nvmlDeviceGetEnforcedPowerLimit",
                enforced,
                smi(gpu, "-q -d POWER"),
                unit="mW",
                expected=(round(bound), basis),
            )
            for _, bound, basis in known
            if bound > enforced
        ],
        explains=("clocks.sw-power-cap",),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="A cap from outside the host: read the baseboard controller's power policy."
            if from_outside
            else f"Ask who lowered it; `nvidia-smi -pl {(default or peers or 0) / 1000:.0f} "
            f"-i {gpu.pci or gpu.index}` (as root) restores it."
            if lowered or below_default
            else "Know it when you compare GPUs; jobs run at the pace of the slowest.",
            disruptive=False,
        ),
    )
