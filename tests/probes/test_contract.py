"""What every probe owes: an explanation, an id, valid needs, and no exception, ever."""

from __future__ import annotations

import re
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.evaluate import evaluate
from probes.finding import Finding
from probes.registry import Clear, NotApplicable, Probe, Unread, discover
from probes.result import Outcome
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.view import Node
from tests.support.gpus import GPU_PROBES, eight, gpu_counters, h100, last_run, node, rtx4090

PROBES = discover()
SECTIONS = {"nvml", "pci", "kernel", "nics", "processes", "host"}
EMPTY = NodeSnapshot(schema=SNAPSHOT_SCHEMA, tool_version="0.0", host="empty-node", taken_at_ns=1)


def each(probes: typing.Iterable[Probe]) -> Any:
    return pytest.mark.parametrize("item", probes, ids=lambda item: item.id)


@each(PROBES)
def test_a_probe_explains_itself(item: Probe) -> None:
    paragraphs = item.doc.split("\n\n")
    assert len(paragraphs) >= 3
    assert len(item.title) <= 100
    assert "!" not in item.doc


@each(PROBES)
def test_a_probe_has_a_stable_id_and_valid_needs(item: Probe) -> None:
    assert re.fullmatch(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*", item.id)
    assert set(item.needs) <= SECTIONS


@each(PROBES)
def test_a_threshold_names_its_source(item: Probe) -> None:
    for limit in item.limits.values():
        assert limit.source
        assert limit.unit


@each(PROBES)
def test_without_any_section_nothing_is_judged_and_nothing_fails(item: Probe) -> None:
    evaluation = evaluate(EMPTY, [item])
    (result,) = evaluation.results
    assert (result.error, result.judged, evaluation.findings) == (None, 0, ())
    assert result.outcome is not Outcome.PASS


@each(PROBES)
def test_asked_directly_without_any_section_a_probe_does_not_fail(item: Probe) -> None:
    limits = {name: limit.default for name, limit in item.limits.items()}
    said = list(item.check(Node(EMPTY), limits)) if item.needs == ("nvml",) else []
    assert not any(isinstance(statement, Finding | Clear) for statement in said)


NODES = (
    eight(),
    eight(busy=False),
    node([rtx4090(), rtx4090(1, busy=True)]),
    eight(
        {
            2: h100(2, busy=True, mig_mode=True, nvlinks=None, row_remap=None),
            5: Gpu(index=5, state=GpuState.LOST),
        },
        baseline=last_run(*(gpu_counters(h100(i), reason_hw_thermal_ns=0) for i in range(8))),
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> NodeSnapshot:
    """A healthy node in which fields of GPUs, readings, limits and links are gone."""
    base = draw(st.sampled_from(NODES))
    assert base.nvml is not None
    gpus = tuple(_mutate_gpu(draw, gpu) if draw(st.booleans()) else gpu for gpu in base.nvml.gpus)
    section = msgspec.structs.replace(base.nvml, gpus=gpus)
    return msgspec.structs.replace(base, nvml=section)


def _optional(record: type[msgspec.Struct]) -> list[str]:
    hints = typing.get_type_hints(record)
    return [name for name, hint in hints.items() if type(None) in typing.get_args(hint)]


FIELDS = {record: _optional(record) for record in (Gpu, type(h100().limits))}
READING_FIELDS = _optional(type(h100().readings[0]))
NUMBERS = st.one_of(st.none(), st.integers(0, 2**63 - 1), st.sampled_from([0, 1, 2, 255, 999]))
COUNTS = [name for name in READING_FIELDS if name != "nvlink_errors"]


def _mutate_gpu(draw: st.DrawFn, gpu: Gpu) -> Gpu:
    gone = draw(st.sets(st.sampled_from(FIELDS[Gpu]), max_size=8))
    lost_limits = draw(st.sets(st.sampled_from(FIELDS[type(gpu.limits)]), max_size=8))
    readings = tuple(
        msgspec.structs.replace(
            reading,
            **{
                **dict.fromkeys(draw(st.sets(st.sampled_from(READING_FIELDS), max_size=8))),
                **draw(st.dictionaries(st.sampled_from(COUNTS), NUMBERS, max_size=4)),
            },
        )
        for reading in gpu.readings[: draw(st.integers(0, 2))]
    )
    links = gpu.nvlinks and tuple(
        msgspec.structs.replace(link, state=draw(st.sampled_from([None, 0, 1, 2, 9])))
        if link.link < 3
        else link
        for link in gpu.nvlinks
    )
    return msgspec.structs.replace(
        gpu,
        **{
            "limits": msgspec.structs.replace(gpu.limits, **dict.fromkeys(lost_limits)),
            "readings": readings,
            "nvlinks": links,
            **dict.fromkeys(gone),
        },
    )


@settings(max_examples=150, deadline=None)
@given(snapshot=mutated())
def test_missing_and_odd_readings_never_break_a_probe(snapshot: NodeSnapshot) -> None:
    view = Node(snapshot)
    for item in PROBES:
        if item.needs != ("nvml",):
            continue
        limits = {name: limit.default for name, limit in item.limits.items()}
        said = list(item.check(view, limits))
        assert said, item.id
        for statement in said:
            assert isinstance(statement, Finding | Clear | Unread | NotApplicable), item.id
            if isinstance(statement, Finding):
                assert statement.id == item.id
                assert len(statement.summary) <= 200, statement.summary
                assert "\n" not in statement.summary
                assert all(evidence.recheck for evidence in statement.evidence)
                assert all(len(evidence.quote or "") <= 300 for evidence in statement.evidence)


def test_a_gpu_without_readings_is_never_clear() -> None:
    """Nothing was read of the moving values, so no probe of those values may pass."""
    snapshot = eight({i: h100(i, samples=0) for i in range(8)})
    moving = [
        item
        for item in GPU_PROBES
        if (item.family in {"clocks", "thermal"} and item.id != "clocks.application-clocks")
        or item.id.startswith(("memory.ecc-u", "memory.ecc-c", "memory.ecc-a"))
        or item.id == "nvlink.errors"
    ]  # fmt: skip
    assert len(moving) > 12
    for result in evaluate(snapshot, moving).results:
        assert (result.judged, result.outcome) == (0, Outcome.UNKNOWN), result.id


def test_a_gpu_of_which_nothing_is_known_is_never_clear() -> None:
    bare = node([Gpu(index=0, state=GpuState.OK, pci="0000:1b:00.0")])
    # these judge that the GPU answers, which it does
    answered = {
        "gpu.lost",
        "gpu.hung",
        "gpu.not-usable",
        "gpu.no-permission",
        "nvml.init-failed",
        "nvml.slow-call",
    }
    for result in evaluate(bare, GPU_PROBES).results:
        assert (result.judged > 0) == (result.id in answered), result.id


def test_without_gpus_the_gpu_probes_judge_nothing() -> None:
    section = NvmlSection(init_error="hung")
    for result in evaluate(node(nvml=section), GPU_PROBES).results:
        assert (result.judged > 0) == (result.id == "nvml.init-failed"), result.id
