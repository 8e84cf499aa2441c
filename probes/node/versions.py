"""Firmware that differs between siblings."""

from __future__ import annotations

from collections import Counter

from probes.finding import Action, Basis, Confidence, FaultClass, JobImpact, Remedy, Severity
from probes.gpu_facts import gpu_finding, missing, not_for_vgpu, shown, smi
from probes.registry import Clear, NotApplicable, Statements, probe
from probes.snapshot.gpu import Gpu
from probes.view import Node

_FIELDS = {
    "vbios_version": ("VBIOS", "nvmlDeviceGetVbiosVersion"),
    "inforom_image_version": ("InfoROM", "nvmlDeviceGetInforomImageVersion"),
    "gsp_firmware_version": ("GSP firmware", "nvmlDeviceGetGspFirmwareVersion"),
}


@probe("gpu.versions-differ", needs=("nvml",))
def versions_differ(node: Node) -> Statements:
    """VBIOS, InfoROM or GSP firmware of a GPU differs from its siblings'.

    Boards of one part number with different firmware can have different power and clock tables,
    and different bugs. It is the first thing support asks when one GPU behaves differently.

    No fault by itself: a replaced board often comes with newer firmware, and canaries are meant.
    Boards of different part numbers are not compared.

    Sure: proven that they differ; that it matters is only possible. Info.

    Do: bring the boards to one firmware at the next maintenance.
    """
    groups: dict[tuple[str | None, str | None], list[Gpu]] = {}
    for gpu in node.live_gpus:
        groups.setdefault((gpu.name, gpu.board_part_number), []).append(gpu)
    for members in groups.values():
        usual = {field: _most_common(members, field) for field in _FIELDS}
        for gpu in members:
            if gpu.vbios_version is None:
                yield missing(gpu, "vbios_version", not_for_vgpu(gpu))
                continue
            if len(members) == 1:
                yield NotApplicable("no sibling of the same part to compare firmware with")
                continue
            odd = [
                (field, mine, common)
                for field, common in usual.items()
                if (mine := getattr(gpu, field)) is not None
                and common is not None
                and mine != common
            ]
            if not odd:
                yield Clear(node.gpu_component(gpu))
                continue
            yield gpu_finding(
                node,
                gpu,
                "gpu.versions-differ",
                ", ".join(
                    f"{_FIELDS[field][0]} {mine}, siblings {common}" for field, mine, common in odd
                ),
                severity=Severity.INFO,
                impact=JobImpact.NONE,
                confidence=Confidence.POSSIBLE,
                fault_class=FaultClass.CONFIGURATION,
                evidence=tuple(
                    shown(
                        _FIELDS[field][1],
                        mine,
                        smi(gpu, "-q"),
                        expected=(common, Basis.PEER_MEDIAN),
                    )
                    for field, mine, common in odd
                ),
                remedy=Remedy(
                    action=Action.RECONFIGURE,
                    text="Bring the boards to one firmware at the next maintenance.",
                    disruptive=True,
                ),
            )


def _most_common(members: list[Gpu], field: str) -> str | None:
    """What most members have; the first in the order of GPUs when two are as common."""
    counts = Counter(value for gpu in members if (value := getattr(gpu, field)) is not None)
    return counts.most_common(1)[0][0] if counts else None
