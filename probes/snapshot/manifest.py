"""What the operator expects of this node (an optional TOML file)."""

from probes.record import Record


class Manifest(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every key is optional; what is absent is not expected."""

    gpu_count: int | None = None
    gpu_name: str | None = None
    driver_version: str | None = None
    vbios_version: str | None = None
    gpu_power_limit_w: float | None = None
    gpu_pcie_generation: int | None = None
    gpu_pcie_width_lanes: int | None = None
    nvlink_count: int | None = None
    nic_rates_gbps: dict[str, float] = {}  # by RDMA device or interface name
