from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import LaggardError
from agent.manifest import format_manifest, manifest_of, read_manifest
from probes.snapshot.gpu import GpuLimits, NvLink, NvmlSection
from probes.snapshot.manifest import Manifest
from probes.snapshot.nic import NicPort, NicSection
from tests.support.nodes import gpu, node

LIMITS = GpuLimits(
    power_limit_enforced_mw=700_000, pcie_max_link_generation=5, pcie_max_link_width_lanes=16
)


def test_a_good_node_gives_the_manifest_of_its_equals() -> None:
    links = tuple(NvLink(link=i, state=2 if i else 1) for i in range(18))
    gpus = tuple(
        gpu(i, limits=LIMITS, vbios_version="96.00.74.00.01", nvlinks=links) for i in range(4)
    )
    ports = (
        NicPort(device="mlx5_0", port=1, state="ACTIVE", rate_gbps=400.0),
        NicPort(device="eth0", state="up", rate_gbps=100.0),
        NicPort(device="mlx5_1", port=1, state="DOWN", rate_gbps=10.0),  # means nothing
    )
    snapshot = node(
        nvml=NvmlSection(driver_version="570.124.06", gpus=gpus), nics=NicSection(ports=ports)
    )
    assert format_manifest(manifest_of(snapshot)) == (
        "gpu_count = 4\n"
        'gpu_name = "NVIDIA H100 80GB HBM3"\n'
        'driver_version = "570.124.06"\n'
        'vbios_version = "96.00.74.00.01"\n'
        "gpu_power_limit_w = 700.0\n"
        "gpu_pcie_generation = 5\n"
        "gpu_pcie_width_lanes = 16\n"
        "nvlink_count = 18\n"
        "\n"
        "[nic_rates_gbps]\n"
        '"eth0" = 100.0\n'
        '"mlx5_0/1" = 400.0\n'
    )


def test_what_its_gpus_do_not_agree_on_is_not_expected() -> None:
    gpus = (gpu(0, name="NVIDIA A100"), gpu(1, name="NVIDIA L40S"))
    found = manifest_of(node(nvml=NvmlSection(gpus=gpus), nics=None))
    assert found == Manifest(gpu_count=2)


def test_a_node_without_gpu_expects_none() -> None:
    assert manifest_of(node(nvml=None, nics=None)) == Manifest()


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.floats(0.1, 1e6)),
)
def test_what_is_written_reads_back(name: str, rates: dict[str, float]) -> None:
    manifest = Manifest(gpu_count=8, gpu_name=name, nic_rates_gbps=rates)
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_text(format_manifest(manifest), encoding="utf-8")
        assert read_manifest(file.name) == manifest


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gpu_cuont = 8\n", "gpu_cuont: no such key in a manifest", "did you mean gpu_count?"),
        ('gpu_count = "8"\n', "Expected `int | null`, got `str` - at `$.gpu_count`", ""),
        ("[nic_rates_gbps]\nmlx5_0 = true\n",
         "Expected `float`, got `bool` - at `$.nic_rates_gbps[...]`", ""),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_file_and_key(
    text: str, message: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "manifest.toml"
    path.write_text(text)
    with pytest.raises(LaggardError) as error:
        read_manifest(str(path))
    assert (error.value.message, error.value.hint) == (f"{path}: {message}", hint)
