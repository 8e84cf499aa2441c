"""What the GPU probes share: names, re-check commands, load, and what a low clock costs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from probes.finding import (
    Action,
    Basis,
    Confidence,
    Evidence,
    Expectation,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Scalar,
    Severity,
)
from probes.registry import NotApplicable, Unread
from probes.snapshot.gpu import Gpu
from probes.stats import median
from probes.view import REASON_GPU_IDLE, Node

# Below this share of kernel time a driver may lower clocks because little runs.
LOADED_PERCENT = 50
VGPU_GUEST = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU


RESET_LATER = Remedy(
    action=Action.RESET_GPU,
    text="Let the job end, then reset the GPU (`nvidia-smi --gpu-reset`) or reboot.",
    disruptive=True,
)
REPLACE = Remedy(
    action=Action.REPLACE,
    text="Drain the node, run NVIDIA's field diagnostic, have the board replaced.",
    disruptive=True,
)


def called(gpu: Gpu) -> str:
    """The GPU in a line of text, by its address, never by a bare index."""
    if gpu.pci or gpu.uuid:
        return f"GPU {gpu.pci or gpu.uuid}"
    return f"GPU {gpu.index} (NVML index)"


def smi(gpu: Gpu, arguments: str) -> str:
    """The nvidia-smi command that shows the same fact."""
    return f"nvidia-smi {arguments} -i {gpu.pci or gpu.uuid or gpu.index}"


def shown(
    locator: str,
    observed: Scalar | None,
    recheck: str,
    *,
    unit: str | None = None,
    expected: tuple[Scalar | None, Basis] | None = None,
    quote: str | None = None,
) -> Evidence:
    """One NVML reading as evidence; an expectation without a value is left out."""
    return Evidence(
        source="nvml",
        locator=locator,
        observed=observed,
        unit=unit,
        expected=(
            Expectation(value=expected[0], basis=expected[1])
            if expected is not None and expected[0] is not None
            else None
        ),
        quote=quote[:300] if quote else None,
        recheck=recheck,
    )


def gpu_finding(
    node: Node,
    gpu: Gpu,
    id: str,
    summary: str,
    *,
    severity: Severity,
    impact: JobImpact,
    evidence: Iterable[Evidence],
    remedy: Remedy,
    confidence: Confidence = Confidence.PROVEN,
    fault_class: FaultClass = FaultClass.HARDWARE,
    explains: tuple[str, ...] = (),
) -> Finding:
    """A finding about one GPU; the summary continues its name."""
    return Finding(
        id=id,
        severity=severity,
        confidence=confidence,
        fault_class=fault_class,
        job_impact=impact,
        component=node.gpu_component(gpu),
        summary=f"{called(gpu)} {summary}",
        evidence=(*evidence, *_how_named(node, gpu)),
        explains=explains,
        remedy=remedy,
    )


def _how_named(node: Node, gpu: Gpu) -> Iterable[Evidence]:
    """How the address of a GPU is known for which NVML has an index only."""
    if gpu.pci in node.pci_by_address and node.is_named_by_bus(gpu):
        yield Evidence(
            source="sysfs",
            locator="/sys/bus/pci/devices",
            observed=f"{gpu.pci} is the only GPU that NVML does not name",
            recheck="lspci -D -d 10de:; nvidia-smi --query-gpu=index,pci.bus_id --format=csv",
        )


def not_for_vgpu(gpu: Gpu) -> str | None:
    """Why a board-level reading does not apply, where the GPU is a vGPU guest's slice."""
    if gpu.virtualization_mode == VGPU_GUEST:
        return "vGPU guest: the host owns clocks, power, memory repair and links"
    return None


def no_ecc(gpu: Gpu) -> str | None:
    """Why ECC counters mean nothing on this GPU."""
    return "ECC is off or not on this part" if gpu.ecc_mode is False else not_for_vgpu(gpu)


def is_mig(gpu: Gpu) -> bool:
    """MIG is on: the parent's utilisation, row remapping and NVLink are not to be had."""
    return gpu.mig_mode is True


def no_nvlink(gpu: Gpu) -> str | None:
    """Why the GPU's NVLinks are not judged."""
    return "MIG: NVLink is off between slices" if is_mig(gpu) else not_for_vgpu(gpu)


def missing(gpu: Gpu, field: str, why: str | None) -> NotApplicable | Unread:
    """A reading that is not there: not applicable where ``why`` says so, else unread."""
    return NotApplicable(why) if why else Unread("nvml", field, gpu.key)


class Clocks(msgspec.Struct, frozen=True):
    """Load and SM clock of one GPU over its readings, and of the siblings loaded like it.

    ``ever`` and ``always`` are the event-reason bits of any and of all readings.
    """

    loaded: bool | None
    ever: int | None
    always: int
    masks: int
    sm_mhz: float | None
    max_mhz: int | None
    limit_mw: int | None
    peers: int = 0
    peers_mhz: float | None = None

    @property
    def below_peers_percent(self) -> float | None:
        """How far the SM clock is under the siblings' median."""
        return below_percent(self.sm_mhz, self.peers_mhz)

    @property
    def below_max_percent(self) -> float | None:
        """How far the SM clock is under the part's maximum."""
        return below_percent(self.sm_mhz, self.max_mhz)


def below_percent(value: float | None, of: float | None) -> float | None:
    """How far ``value`` is under ``of``, in percent; negative when above."""
    if value is None or not of:
        return None
    return 100.0 * (of - value) / of


def clocks_of(node: Node, gpu: Gpu) -> Clocks:
    """The clock facts of a live GPU, computed once per snapshot."""
    return node.memo("gpu clocks", _all_clocks)[id(gpu)]


def is_loaded(gpu: Gpu) -> bool | None:
    """True when kernels ran most of the time in every reading; None when that is unknown."""
    answer: bool | None = True if gpu.readings else None
    for reading in gpu.readings:
        mask = reading.clocks_event_reasons
        if mask is not None and mask & REASON_GPU_IDLE:
            return False
        if reading.utilization_gpu_percent is None:
            answer = None
        elif reading.utilization_gpu_percent < LOADED_PERCENT:
            return False
    return answer


def _all_clocks(node: Node) -> dict[int, Clocks]:
    alone = {id(gpu): _own_clocks(gpu) for gpu in node.live_gpus}
    out = {}
    for gpu in node.live_gpus:
        own = alone[id(gpu)]
        # Only siblings under the same power limit are a fair measure.
        peers = [
            peer.sm_mhz
            for sibling in node.siblings(gpu)
            if (peer := alone[id(sibling)]).loaded
            and peer.sm_mhz is not None
            and (own.limit_mw is None or peer.limit_mw is None or own.limit_mw == peer.limit_mw)
        ]
        out[id(gpu)] = (
            msgspec.structs.replace(own, peers=len(peers), peers_mhz=median(peers))
            if peers
            else own
        )
    return out


def _own_clocks(gpu: Gpu) -> Clocks:
    masks = [r.clocks_event_reasons for r in gpu.readings if r.clocks_event_reasons is not None]
    ever, always = 0, -1
    for mask in masks:
        ever |= mask
        always &= mask
    clocks = [r.sm_clock_mhz for r in gpu.readings if r.sm_clock_mhz is not None]
    return Clocks(
        loaded=is_loaded(gpu),
        ever=ever if masks else None,
        always=always if masks else 0,
        masks=len(masks),
        sm_mhz=median(clocks) if clocks else None,
        max_mhz=gpu.limits.sm_clock_max_mhz,
        limit_mw=gpu.limits.power_limit_enforced_mw,
    )
