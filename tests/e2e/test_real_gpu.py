"""On a machine with a GPU and its driver: run with ``-m gpu``."""

import shutil
import subprocess

import pytest

from agent.evaluate import evaluate
from agent.host import LiveHost
from agent.run import RunOptions, collect_node
from probes.registry import discover
from probes.result import Outcome
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.node import NodeSnapshot

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def snapshot() -> NodeSnapshot:
    return collect_node(LiveHost(), RunOptions(sample_s=1.0))


@pytest.fixture(scope="module")
def gpus(snapshot: NodeSnapshot) -> tuple[Gpu, ...]:
    assert snapshot.nvml is not None
    assert snapshot.nvml.init_error is None
    return snapshot.nvml.gpus


def test_every_gpu_says_who_it_is_and_answers_twice(gpus: tuple[Gpu, ...]) -> None:
    assert gpus
    for gpu in gpus:
        assert gpu.state is GpuState.OK, gpu.state_detail
        assert gpu.uuid and gpu.pci and gpu.name
        assert len(gpu.readings) == 2
        assert all(reading.sm_clock_mhz for reading in gpu.readings)


def test_no_probe_breaks_on_it(snapshot: NodeSnapshot) -> None:
    results = evaluate(snapshot, discover()).results
    assert [(r.id, r.error) for r in results if r.outcome is Outcome.ERROR] == []


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="nvidia-smi is not here")
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("uuid", lambda gpu: gpu.uuid),
        ("driver_version", None),
        ("vbios_version", lambda gpu: gpu.vbios_version),
        ("clocks.max.sm", lambda gpu: gpu.limits.sm_clock_max_mhz),
        ("pcie.link.gen.max", lambda gpu: gpu.limits.pcie_max_link_generation),
        ("pcie.link.width.max", lambda gpu: gpu.limits.pcie_max_link_width_lanes),
        ("memory.total", lambda gpu: gpu.memory_total_bytes and gpu.memory_total_bytes >> 20),
    ],
)
def test_agrees_with_nvidia_smi(
    snapshot: NodeSnapshot, gpus: tuple[Gpu, ...], query: str, field
) -> None:
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = [field(gpu) if field else snapshot.nvml.driver_version for gpu in gpus]
    theirs = done.stdout.split("\n")[: len(gpus)]
    assert [str(value) for value in ours if value is not None] == [
        text.strip() for text, value in zip(theirs, ours, strict=True) if value is not None
    ]
