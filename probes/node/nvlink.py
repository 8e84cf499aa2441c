"""NVLink: links that are down, slow, or lead nowhere, against siblings and the GPU's own links.

Source: nvml.h NVML_FI_DEV_NVLINK_GET_STATE (0 off, 1 on, 2 sleep), _GET_SPEED,
nvmlIntNvLinkDeviceType_t (0 GPU, 2 switch, 255 unknown).
"""

from __future__ import annotations

from collections.abc import Iterator

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
from probes.gpu_facts import (
    called,
    clocks_of,
    gpu_finding,
    missing,
    no_nvlink,
    shown,
    smi,
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
from probes.snapshot.gpu import Gpu, NvLink
from probes.stats import median
from probes.view import Node

OFF, ON, SLEEP = 0, 1, 2
_REMOTE_SWITCH = 2
_REMOTE_UNKNOWN = 255
# NVML_NVLINK_VERSION_5_0: from there on a link may be off while nothing is sent.
_VERSION_RESTS = 7

CHECK_LINK = Remedy(
    action=Action.DRAIN,
    text="Drain the node, read the Xid (74, 144-150) and SXid lines of this link in the kernel "
    "log, reset GPUs and fabric manager; if it stays, reseat the board or bridge.",
    disruptive=True,
)


def each_linked(node: Node) -> Iterator[tuple[Gpu, tuple[NvLink, ...]] | Statement]:
    """Live GPUs with their NVLinks; a statement where there are none to judge."""
    for gpu in node.live_gpus:
        if (why := no_nvlink(gpu)) is not None or gpu.nvlinks is None:
            yield missing(gpu, "nvlinks", why)
        elif not gpu.nvlinks and not any(sibling.nvlinks for sibling in node.siblings(gpu)):
            yield NotApplicable("no NVLink on this part")
        else:
            yield gpu, gpu.nvlinks


def _is_up(link: NvLink) -> bool:
    """Sleep is a power state, not a fault."""
    return link.state in (ON, SLEEP)


def _up_counts(node: Node) -> dict[int, frozenset[int]]:
    """The numbers of the links that are on or asleep, by GPU."""
    return {
        id(gpu): frozenset(link.link for link in gpu.nvlinks or () if _is_up(link))
        for gpu in node.live_gpus
    }


@probe("nvlink.down", needs=("nvml",))
def link_down(node: Node) -> Statements:
    """An NVLink is off that the GPU's siblings have on.

    Traffic between GPUs moves to fewer links, or NCCL leaves NVLink altogether. On a board with
    NVSwitches a missing link can also keep the GPU out of the fabric, and CUDA does not start.

    No fault: links that are off on every GPU of this model (an H100 NVL wires 12 of 18, cards
    without a bridge none); links asleep; NVLink 5 links that are off on an idle GPU as on its idle
    siblings; MIG. No model table is used: the siblings' same link, or the manifest, decide.

    Sure: likely; proven with three or more siblings that agree. A pair of cards can't show which
    links should be on.

    Do: read the Xid and SXid lines of this link, reset GPUs and fabric manager, then reseat.
    """
    up = node.memo("nvlinks up", _up_counts)
    for item in each_linked(node):
        if not isinstance(item, tuple):
            yield item
            continue
        gpu, links = item
        if links and all(link.state is None for link in links):
            yield Unread("nvml", "nvlinks", gpu.key)
            continue
        here = up[id(gpu)]
        unknown = {link.link for link in links if link.state is None}
        siblings = [s for s in node.siblings(gpu) if s.nvlinks and _comparable(node, gpu, links, s)]
        wired = {number for s in siblings for number in up[id(s)]}
        down = sorted(
            number
            for number in wired - here - unknown
            if 2 * sum(number in up[id(s)] for s in siblings) > len(siblings)
        )
        if down:
            yield from _down(node, gpu, links, down, siblings)
        elif unknown:
            yield Unread("nvml", "nvlinks", gpu.key)
        elif len(here) == len(links):
            yield Clear(node.gpu_component(gpu))
        elif siblings:
            note = f"{len(here)} of {len(links)} NVLinks on, as on its siblings: so it is wired"
            yield Clear(node.gpu_component(gpu), note)
        elif node.siblings(gpu):
            yield Clear(node.gpu_component(gpu), "NVLinks of an idle GPU may be off")
        else:
            yield NotApplicable(
                f"{len(here)} of {len(links)} NVLinks on, and no sibling to say how many should be"
            )


def _comparable(node: Node, gpu: Gpu, links: tuple[NvLink, ...], sibling: Gpu) -> bool:
    """An idle GPU whose links may rest is compared with idle siblings only."""
    rests = any(
        (link.version or 0) >= _VERSION_RESTS for link in (*links, *(sibling.nvlinks or ()))
    )
    if not rests or clocks_of(node, gpu).loaded is not False:
        return True
    return clocks_of(node, sibling).loaded is False


def _down(
    node: Node, gpu: Gpu, links: tuple[NvLink, ...], down: list[int], siblings: list[Gpu]
) -> Iterator[Statement]:
    up = node.memo("nvlinks up", _up_counts)
    switched = any(link.remote_type == _REMOTE_SWITCH for s in siblings for link in s.nvlinks or ())
    confidence = Confidence.PROVEN if len(siblings) >= 3 else Confidence.LIKELY
    if not up[id(gpu)] and len(down) > 1:
        usual = round(median(len(up[id(s)]) for s in siblings))
        yield gpu_finding(
            node,
            gpu,
            "nvlink.down",
            f"has no NVLink on, {len(siblings)} siblings have {usual}"
            + ("" if switched else " (is its bridge missing?)"),
            # without a switch the card may simply have no bridge
            severity=Severity.CRITICAL if switched else Severity.WARNING,
            impact=JobImpact.BREAKS if switched else JobImpact.SLOWS,
            confidence=confidence if switched else Confidence.POSSIBLE,
            fault_class=FaultClass.HARDWARE if switched else FaultClass.CONFIGURATION,
            evidence=(
                shown(
                    "NVML_FI_DEV_NVLINK_GET_STATE",
                    0,
                    smi(gpu, "nvlink -s"),
                    unit="links on",
                    expected=(usual, Basis.PEER_MEDIAN),
                ),
            ),
            explains=("nvlink.remote-missing", "fabric.state"),
            remedy=CHECK_LINK,
        )
        return
    known = {link.link: link for link in links}
    for number in down:
        link = known.get(number)
        on = sum(number in up[id(s)] for s in siblings)
        yield Finding(
            id="nvlink.down",
            severity=Severity.WARNING,
            confidence=confidence,
            fault_class=FaultClass.HARDWARE,
            job_impact=JobImpact.SLOWS,
            component=node.nvlink_component(gpu, link or NvLink(link=number)),
            summary=f"{called(gpu)} NVLink {number} is {'off' if link else 'absent'}, "
            f"{on} of {len(siblings)} siblings have it on ({len(up[id(gpu)])} links on here)"
            + _other_end(node, gpu, switched),
            evidence=(
                shown(
                    f"NVML_FI_DEV_NVLINK_GET_STATE(link {number})",
                    "off" if link else "absent",
                    smi(gpu, "nvlink -s"),
                    expected=("on", Basis.PEER_MEDIAN),
                ),
            ),
            explains=("nvlink.remote-missing", "nvlink.errors", "nvlink.speed"),
            remedy=CHECK_LINK,
        )


def _other_end(node: Node, gpu: Gpu, switched: bool) -> str:
    """Between two GPUs a link is off at both ends: name the GPU that lacks one, too."""
    if switched:
        return ""
    up = node.memo("nvlinks up", _up_counts)
    most = max((len(up[id(s)]) for s in node.siblings(gpu)), default=0)
    short = [s for s in node.siblings(gpu) if len(up[id(s)]) < most]
    return f"; {called(short[0])} lacks a link, too" if len(short) == 1 else ""


@probe(
    "nvlink.speed",
    needs=("nvml",),
    limits={
        "below_percent": Limit(
            5.0, "% below", "laggard: link speeds come in steps of 20 % and more"
        )
    },
)
def link_speed(node: Node, limits: Limits) -> Statements:
    """An NVLink runs slower than the GPU's other links and its siblings'.

    A collective runs at the pace of its slowest link, so one slow link slows all ranks.

    No fault: speed 0 on a link that is off or asleep; the speed that all links have (each
    generation has its own).

    Sure: likely. The measure is the usual speed of this model's links on this node.

    Do: reset the GPUs (links train again); if it stays, reseat or replace the board.
    """
    usual = node.memo("nvlink speeds", _usual_speeds)
    for item in each_linked(node):
        if not isinstance(item, tuple):
            yield item
            continue
        gpu, links = item
        active = [link for link in links if link.state == ON]
        speeds = [(link, link.speed_mbps) for link in active if link.speed_mbps]
        if not active:
            yield NotApplicable("no NVLink on")
            continue
        if not speeds:
            yield Unread("nvml", "nvlinks", gpu.key)
            continue
        expected = usual[gpu.name]
        slow = [
            (link, speed)
            for link, speed in speeds
            if 100 * (expected - speed) >= limits["below_percent"] * expected
        ]
        if not slow:
            yield Clear(node.gpu_component(gpu))
        for link, speed in slow:
            yield Finding(
                id="nvlink.speed",
                severity=Severity.WARNING,
                confidence=Confidence.LIKELY,
                fault_class=FaultClass.HARDWARE,
                job_impact=JobImpact.SLOWS,
                component=node.nvlink_component(gpu, link),
                summary=f"{called(gpu)} NVLink {link.link} runs at {speed} MB/s, the others at "
                f"{expected:.0f}",
                evidence=(
                    shown(
                        f"NVML_FI_DEV_NVLINK_GET_SPEED(link {link.link})",
                        speed,
                        smi(gpu, "nvlink -s"),
                        unit="MB/s",
                        expected=(round(expected), Basis.PEER_MEDIAN),
                    ),
                ),
                remedy=CHECK_LINK,
            )


def _usual_speeds(node: Node) -> dict[str | None, float]:
    """The median speed of the active links, by model."""
    speeds: dict[str | None, list[int]] = {}
    for gpu in node.live_gpus:
        known = [li.speed_mbps for li in gpu.nvlinks or () if li.state == ON and li.speed_mbps]
        if known:
            speeds.setdefault(gpu.name, []).extend(known)
    return {name: median(known) for name, known in speeds.items()}


@probe("nvlink.remote-missing", needs=("nvml",))
def remote_missing(node: Node) -> Statements:
    """An active NVLink has nobody at its far end.

    The link trained, but the driver does not know what it leads to: the fabric is not set up on
    it, and no traffic goes there.

    No fault: a part or driver that names no far end on any link; links that are off or asleep.

    Sure: likely. Other links of this node's GPUs must name their far end.

    Do: check the fabric manager (`systemctl status nvidia-fabricmanager`) and its log.
    """
    named = node.memo("nvlink remotes", _models_with_remotes)
    for item in each_linked(node):
        if not isinstance(item, tuple):
            yield item
            continue
        gpu, links = item
        active = [link for link in links if link.state == ON]
        if not active:
            yield NotApplicable("no NVLink on")
        elif gpu.name not in named:
            yield Unread("nvml", "nvlinks", gpu.key)
        elif not (lost := [link for link in active if not _has_remote(link)]):
            yield Clear(node.gpu_component(gpu))
        else:
            numbers = ", ".join(str(link.link) for link in lost[:8])
            yield Finding(
                id="nvlink.remote-missing",
                severity=Severity.WARNING,
                confidence=Confidence.LIKELY,
                fault_class=FaultClass.SOFTWARE,
                job_impact=JobImpact.SLOWS,
                component=node.nvlink_component(gpu, lost[0])
                if len(lost) == 1
                else node.gpu_component(gpu),
                summary=f"{called(gpu)}: {len(lost)} of {len(active)} active NVLinks have no far "
                f"end (link {numbers})",
                evidence=(
                    shown(
                        "nvmlDeviceGetNvLinkRemoteDeviceType",
                        f"unknown on link {numbers}",
                        smi(gpu, "nvlink -R"),
                        expected=("GPU or switch", Basis.PEER_MEDIAN),
                    ),
                ),
                remedy=Remedy(
                    action=Action.DRAIN,
                    text="Check the fabric manager (`systemctl status nvidia-fabricmanager`); "
                    "restart it on a drained node.",
                    disruptive=True,
                ),
            )


def _has_remote(link: NvLink) -> bool:
    return link.remote_pci is not None or link.remote_type not in (None, _REMOTE_UNKNOWN)


def _models_with_remotes(node: Node) -> frozenset[str | None]:
    return frozenset(
        gpu.name
        for gpu in node.live_gpus
        if any(_has_remote(link) for link in gpu.nvlinks or () if link.state == ON)
    )
