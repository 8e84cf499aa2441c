"""Which finding causes which: findings folded by root cause."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from probes.finding import Component, Finding
from probes.view import Node


class Cause(msgspec.Struct, frozen=True):
    """Findings of one id that nothing else explains, the worst first, and what they cause."""

    findings: tuple[Finding, ...]
    symptoms: tuple[Finding, ...]

    @property
    def worst(self) -> Finding:
        """The finding that the verdict is about."""
        return self.findings[0]


def causes_of(node: Node, findings: Iterable[Finding]) -> tuple[Cause, ...]:
    """The findings by root cause, the worst cause first."""
    ranked = sorted(findings, key=rank)
    effects = {
        id(cause): [
            effect
            for effect in ranked
            if effect is not cause and effect.id in cause.explains and reaches(node, cause, effect)
        ]
        for cause in ranked
    }
    explained = {id(effect) for cause in ranked for effect in effects[id(cause)]}
    # where causes run in a circle, the worst of them begins it
    roots: list[Finding] = []
    symptoms: dict[int, list[Finding]] = {}
    seen: set[int] = set()
    for finding in sorted(ranked, key=lambda finding: id(finding) in explained):
        if id(finding) in seen:
            continue
        seen.add(id(finding))
        roots.append(finding)
        below = symptoms.setdefault(id(finding), [])
        todo = list(effects[id(finding)])
        while todo:
            effect = todo.pop(0)
            if id(effect) not in seen:
                seen.add(id(effect))
                below.append(effect)
                todo += effects[id(effect)]
    groups: dict[str, list[Finding]] = {}
    for root in sorted(roots, key=rank):
        groups.setdefault(root.id, []).append(root)
    causes = [
        Cause(
            findings=tuple(members),
            symptoms=tuple(effect for member in members for effect in symptoms[id(member)]),
        )
        for members in groups.values()
    ]
    # a mild cause of something grave comes before a mild one of nothing
    causes.sort(key=lambda cause: min(map(rank, (*cause.findings, *cause.symptoms)))[:2])
    return tuple(causes)


def rank(finding: Finding) -> tuple[int, int, int, int, str, str]:
    """A sort key: the worst first."""
    return (
        -finding.severity.rank,
        -finding.job_impact.rank,
        -finding.confidence.rank,
        -len(finding.explains),
        finding.id,
        finding.component.label(),
    )


def reaches(node: Node, cause: Finding, effect: Finding) -> bool:
    """Whether the two speak of one part, of the whole node, or of a device below a bridge."""
    one, two = cause.component, effect.component
    if "host" in (one.type, two.type) or key_of(one) == key_of(two):
        return True
    if two.type == "nvlink" and one.pci and one.pci != two.pci:
        far = _far_end(node, two)  # a link that is off does not tell, it ends in some NVSwitch
        return far == one.pci or (far is None and (one.device or "").startswith("nvidia-nvswitch"))
    if is_nameless_gpu(two):  # one of those that the bus has and NVML does not name
        return any(device.address == one.pci for device in node.unlisted_gpus)
    if one.pci and two.pci:
        return any(device.address == one.pci for device in node.pci_chain(two.pci)) or (
            one.pci == two.pci
        )
    return bool(one.gpu_uuid and one.gpu_uuid == two.gpu_uuid) or bool(
        one.device and one.device == two.device
    )


def _far_end(node: Node, nvlink: Component) -> str | None:
    """The address at the other end of an NVLink: a switch, or a GPU."""
    for gpu in node.gpus:
        if gpu.pci is not None and gpu.pci == nvlink.pci:
            return next((at.remote_pci for at in gpu.nvlinks or () if at.link == nvlink.link), None)
    return None


def is_nameless_gpu(component: Component) -> bool:
    """Whether NVML gave an index only, and the bus could not tell which GPU that is."""
    return component.type == "gpu" and not component.pci and not component.gpu_uuid


def key_of(component: Component) -> tuple[object, ...]:
    """What makes two components the same part, however many identifiers each carries."""
    part = component.pci or component.gpu_uuid or component.device or component.index
    return (part or component.type, component.link, component.port, component.pid, component.rank)
