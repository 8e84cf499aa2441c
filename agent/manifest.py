"""The operator's manifest: a TOML file that says what this node is meant to have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from agent.config import nearest, read_toml, toml_value
from agent.errors import LaggardError
from probes.snapshot.manifest import Manifest
from probes.snapshot.node import NodeSnapshot

SITE_MANIFEST = "/etc/laggard/manifest.toml"
T = TypeVar("T")


def read_manifest(path: str) -> Manifest:
    """Read a manifest. Raises LaggardError with file and key."""
    data = read_toml(path)
    known = Manifest.__struct_fields__
    for key in data:
        if key not in known:
            raise LaggardError(f"{path}: {key}: no such key in a manifest", nearest(key, known))
    try:
        return msgspec.convert(data, Manifest)
    except msgspec.ValidationError as error:
        raise LaggardError(f"{path}: {error}") from None


def site_manifest() -> Manifest | None:
    """The manifest of this machine, when it has one."""
    return read_manifest(SITE_MANIFEST) if os.path.exists(SITE_MANIFEST) else None


def manifest_of(snapshot: NodeSnapshot) -> Manifest:
    """What a good node has, as the expectation for it and for its equals.

    A value on which its GPUs don't agree is left out. PCIe is what the GPU and its slot can do
    together, never what an idle link happens to run at.
    """
    gpus = snapshot.nvml.gpus if snapshot.nvml else ()
    nvlinks = [len([link for link in gpu.nvlinks or () if link.state]) for gpu in gpus]
    limit_mw = _common([gpu.limits.power_limit_enforced_mw for gpu in gpus])
    return Manifest(
        gpu_count=len(gpus) or None,
        gpu_name=_common([gpu.name for gpu in gpus]),
        driver_version=snapshot.nvml.driver_version if snapshot.nvml else None,
        vbios_version=_common([gpu.vbios_version for gpu in gpus]),
        gpu_power_limit_w=None if limit_mw is None else limit_mw / 1000,
        gpu_pcie_generation=_common([gpu.limits.pcie_max_link_generation for gpu in gpus]),
        gpu_pcie_width_lanes=_common([gpu.limits.pcie_max_link_width_lanes for gpu in gpus]),
        nvlink_count=_common(nvlinks) or None,
        nic_rates_gbps={
            port.key: port.rate_gbps
            for port in (snapshot.nics.ports if snapshot.nics else ())
            if port.rate_gbps and (port.state or "").upper() in ("ACTIVE", "UP")
        },
    )


def _common(values: Sequence[T | None]) -> T | None:
    return values[0] if values and all(value == values[0] for value in values) else None


def format_manifest(manifest: Manifest) -> str:
    """The manifest as TOML that ``read_manifest`` reads back."""
    plain = {key: value for key, value in msgspec.to_builtins(manifest).items() if value}
    rates = plain.pop("nic_rates_gbps", {})
    lines = [f"{key} = {toml_value(value)}" for key, value in plain.items()]
    if rates:
        lines += ["", "[nic_rates_gbps]"]
        lines += [
            f"{toml_value(key)} = {toml_value(value)}" for key, value in sorted(rates.items())
        ]
    return "".join(line + "\n" for line in lines)
