"""Host sections and nodes for the tests of the host probes."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from agent.evaluate import Evaluation, Policy, evaluate
from probes.finding import Finding
from probes.registry import Probe
from probes.result import Outcome
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.host import (
    CallerLimits,
    Cgroup,
    Clock,
    CpuFacts,
    CpuPolicy,
    CpuReading,
    DeviceNode,
    DriverFacts,
    FileSystem,
    HostReading,
    HostSection,
    KernelModule,
    Pressure,
    ResourceLimit,
    Service,
)
from probes.snapshot.nic import NicPort, NicSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciDevice, PciSection

GIB = 1 << 30
SECOND = 1_000_000_000
DRIVER = "570.86.15"
CPUS = tuple(range(8))

PROBES: dict[str, Probe] = {
    value.id: value
    for topic in ("clock", "cpu", "driver", "fabric", "limits", "load", "memory", "storage")
    for value in vars(importlib.import_module(f"probes.node.host_{topic}")).values()
    if isinstance(value, Probe)
}


def calm() -> Pressure:
    return Pressure(
        some_avg10_percent=0.5,
        some_avg60_percent=0.2,
        some_total_us=1000,
        full_avg10_percent=0.0,
        full_avg60_percent=0.0,
        full_total_us=0,
    )


def reading(at_s: float = 0.0, **changes: Any) -> HostReading:
    values: dict[str, Any] = {
        "at_ns": int((1000 + at_s) * SECOND),
        "cpu": CpuReading(mhz=(2600,) * 8, busy_ticks=(0,) * 8, total_ticks=(0,) * 8),
        "load_1m": 1.0,
        "load_5m": 1.0,
        "cpu_pressure": calm(),
        "memory_pressure": calm(),
        "io_pressure": calm(),
        "memory_available_bytes": 900 * GIB,
        "swap_free_bytes": 8 * GIB,
        "pages_swapped_in": 0,
        "pages_swapped_out": 0,
    }
    return HostReading(**{**values, **changes})


def readings(first: dict[str, Any] | None = None, **second: Any) -> tuple[HostReading, HostReading]:
    """Two readings two seconds apart; the second differs from the first as told."""
    before = reading(**(first or {}))
    return before, msgspec.structs.replace(before, at_ns=before.at_ns + 2 * SECOND, **second)


def busy(mhz: int, cpus: int = 8, percent: int = 100) -> CpuReading:
    """The second reading of a node whose first ``cpus`` CPUs were busy at ``mhz``."""
    return CpuReading(
        mhz=(mhz,) * cpus + (800,) * (8 - cpus),
        busy_ticks=(2 * percent,) * cpus + (0,) * (8 - cpus),
        total_ticks=(200,) * 8,
    )


def idle_then(mhz: int, cpus: int = 8, percent: int = 100) -> tuple[HostReading, HostReading]:
    at_rest = CpuReading(mhz=(800,) * 8, busy_ticks=(0,) * 8, total_ticks=(0,) * 8)
    return readings({"cpu": at_rest}, cpu=busy(mhz, cpus, percent))


def policy(**changes: Any) -> CpuPolicy:
    values: dict[str, Any] = {
        "cpus": CPUS,
        "driver": "intel_pstate",
        "governor": "performance",
        "min_mhz": 800,
        "max_mhz": 3800,
        "hardware_max_mhz": 3800,
        "base_mhz": 2000,
    }
    return CpuPolicy(**{**values, **changes})


def devices(**errors: str) -> tuple[DeviceNode, ...]:
    names = ("nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl")
    return tuple(
        DeviceNode(path=f"/dev/{name}", access_error=errors.get(name.replace("-", "_")))
        for name in names
    )


def fabric_manager(**changes: Any) -> Service:
    values: dict[str, Any] = {
        "name": "nvidia-fabricmanager",
        "running": True,
        "pid": 2211,
        "seen_in": "/proc/2211/comm",
        "installed": True,
        "version": DRIVER,
    }
    return Service(**{**values, **changes})


def driver(**changes: Any) -> DriverFacts:
    values: dict[str, Any] = {
        "module_version": DRIVER,
        "module_flavor": "open",
        "library_paths": (f"/usr/lib64/libnvidia-ml.so.{DRIVER}",),
        "library_versions": (DRIVER,),
        "gpu_addresses": ("0000:17:00.0", "0000:3b:00.0"),
        "devices": devices(),
        "services": (fabric_manager(),),
    }
    return DriverFacts(**{**values, **changes})


def section(**changes: Any) -> HostSection:
    """A healthy bare-metal node with 8 CPUs; two readings."""
    values: dict[str, Any] = {
        "cpu_count": 8,
        "cpu": CpuFacts(online=CPUS, sockets=2, policies=(policy(),)),
        "memory_total_bytes": 1000 * GIB,
        "swap_total_bytes": 8 * GIB,
        "shared_memory": FileSystem(
            path="/dev/shm",
            type="tmpfs",
            options="rw,nosuid,nodev",
            size_bytes=500 * GIB,
            free_bytes=499 * GIB,
        ),
        "file_systems": (
            FileSystem(path="/", type="ext4", size_bytes=900 * GIB, free_bytes=400 * GIB),
        ),
        "limits": CallerLimits(
            memlock_bytes=ResourceLimit(),
            nofile=ResourceLimit(soft=1024, hard=524288),
            can_exceed_memlock=False,
        ),
        "cgroup": Cgroup(version=2, cgroup_path="/system.slice/cron.service"),
        "clock": Clock(
            synchronized=True,
            status_bits=8193,
            clocksource="tsc",
            available_clocksources=("tsc", "hpet", "acpi_pm"),
        ),
        "modules": (KernelModule(name="nvidia", version=DRIVER),),
        "driver": driver(),
        "readings": readings(),
    }
    return HostSection(**{**values, **changes})


def gpu(index: int = 0, **changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "index": index,
        "state": GpuState.OK,
        "uuid": f"GPU-00000000-0000-4000-8000-{index:012d}",
        "pci": f"0000:{0x17 + index:02x}:00.0",
        "name": "Invented H100",
        "persistence_mode": True,
    }
    return Gpu(**{**values, **changes})


def nvml(gpus: int = 2, **changes: Any) -> NvmlSection:
    values: dict[str, Any] = {
        "driver_version": DRIVER,
        "device_count": gpus,
        "gpus": tuple(gpu(index) for index in range(gpus)),
    }
    return NvmlSection(**{**values, **changes})


def nvml_failed(name: str, code: int, detail: str = "") -> NvmlSection:
    return NvmlSection(init_error=name, init_error_code=code, init_detail=detail or name)


def gpus_on_bus(count: int = 2, driver_name: str = "nvidia", switches: int = 0) -> PciSection:
    return PciSection(
        devices=(
            *(
                PciDevice(
                    address=f"0000:{0x17 + index:02x}:00.0",
                    vendor_id=0x10DE,
                    class_code=0x030200,
                    driver=driver_name,
                )
                for index in range(count)
            ),
            *(
                PciDevice(
                    address=f"0000:{0x80 + index:02x}:00.0", vendor_id=0x10DE, class_code=0x068000
                )
                for index in range(switches)
            ),
        )
    )


def rdma(link_layer: str = "InfiniBand", state: str = "ACTIVE") -> NicSection:
    return NicSection(ports=(NicPort(device="mlx5_0", port=1, link_layer=link_layer, state=state),))


def node(host: HostSection | None = None, **changes: Any) -> NodeSnapshot:
    """A node with two GPUs that NVML and PCI agree on."""
    values: dict[str, Any] = {
        "schema": SNAPSHOT_SCHEMA,
        "tool_version": "0",
        "host": "gpu-a07",
        "taken_at_ns": 1_767_225_600 * SECOND,
        "kernel_release": "6.8.0-52-generic",
        "nvml": nvml(),
        "pci": gpus_on_bus(),
        "nics": NicSection(),
        "host_facts": host if host is not None else section(),
    }
    return NodeSnapshot(**{**values, **changes})


def judge(snapshot: NodeSnapshot, id: str, policy: Policy | None = None) -> Evaluation:
    return evaluate(snapshot, [PROBES[id]], policy or Policy())


def finding(snapshot: NodeSnapshot, id: str) -> Finding:
    """The probe's one finding."""
    found = judge(snapshot, id).findings
    assert len(found) == 1, found
    return found[0]


def notes(snapshot: NodeSnapshot, id: str, outcome: Outcome = Outcome.PASS) -> tuple[str, ...]:
    """What the probe notes where it finds nothing, without the host's name."""
    evaluation = judge(snapshot, id)
    assert evaluation.findings == ()
    (result,) = evaluation.results
    assert result.outcome is outcome, result
    return tuple(note.removeprefix("host: ").removeprefix("gpu-a07: ") for note in result.notes)
