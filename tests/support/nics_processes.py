"""Ports, processes and nodes for the tests of both."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable

from agent.evaluate import Evaluation, evaluate
from probes.finding import Finding
from probes.registry import Probe
from probes.snapshot.baseline import Baseline, CounterSet
from probes.snapshot.gpu import Gpu, GpuProcess, GpuReading, GpuState, NvmlSection
from probes.snapshot.nic import NicPort, NicSection, PortReading
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciDevice, PciSection
from probes.snapshot.process import BlockedThread, Process, ProcessReading, ProcessSection

BOOT = "2f0c1b1e-0000-4000-8000-000000000001"
TAKEN_NS = 1_767_225_600_000_000_000
SECOND = 1_000_000_000
GIB = 1 << 30


def docstring_sample(function: object) -> str:
    """The sample after ``::`` in a parser's docstring."""
    _, _, block = (inspect.getdoc(function) or "").partition("::\n")
    return textwrap.dedent(block).strip("\n")


def node(**sections: object) -> NodeSnapshot:
    """A snapshot of the host n07 with the given fields."""
    base = {"schema": SNAPSHOT_SCHEMA, "tool_version": "0", "host": "n07", "taken_at_ns": TAKEN_NS}
    return NodeSnapshot(**{**base, "boot_id": BOOT, **sections})  # type: ignore[arg-type]


def run(probe: Probe, snapshot: NodeSnapshot, **limits: float) -> Evaluation:
    """One probe on one snapshot."""
    from agent.evaluate import Policy

    return evaluate(snapshot, [probe], Policy(limits={probe.id: limits}))


def findings(probe: Probe, snapshot: NodeSnapshot) -> tuple[Finding, ...]:
    """What it finds; a probe that raises fails the test."""
    done = run(probe, snapshot)
    assert done.results[0].error is None, done.results[0].error
    return done.findings


def notes(probe: Probe, snapshot: NodeSnapshot) -> tuple[str, ...]:
    """Why it raised no alarm, asserting that it raised none."""
    done = run(probe, snapshot)
    assert done.results[0].error is None, done.results[0].error
    assert done.findings == ()
    return done.results[0].notes


# --- ports ---


def port(index: int = 0, **facts: object) -> NicPort:
    """An InfiniBand port of a healthy eight-rail node."""
    base: dict[str, object] = {
        "device": f"mlx5_{index}",
        "port": 1,
        "pci": f"0000:{0x1A + 0x10 * index:02x}:00.0",
        "driver": "mlx5_core",
        "link_layer": "InfiniBand",
        "state": "ACTIVE",
        "phys_state": "LinkUp",
        "rate_gbps": 400.0,
        "rate_text": "400 Gb/sec (4X NDR)",
        "width_lanes": 4,
        "firmware_version": "28.41.1000",
        "board_id": "MT_0000000838",
        "readings": (reading(0, port_rcv_packets=1000), reading(2, port_rcv_packets=2000)),
    }
    return NicPort(**{**base, **facts})  # type: ignore[arg-type]


def ethernet(device: str = "eth0", **facts: object) -> NicPort:
    """An Ethernet interface without RDMA."""
    base: dict[str, object] = {
        "device": device,
        "pci": "0000:02:00.0",
        "pci_id": "8086:1521 8086:0002",
        "netdevs": (device,),
        "link_layer": "Ethernet",
        "state": "up",
        "admin_up": True,
        "carrier": True,
        "rate_gbps": 25.0,
    }
    return NicPort(**{**base, **facts})  # type: ignore[arg-type]


def reading(seconds: float, state: str | None = None, **counters: int) -> PortReading:
    """Counters at a time."""
    return PortReading(at_ns=int(seconds * SECOND), state=state, counters=counters)


def nics(*ports: NicPort, **sections: object) -> NodeSnapshot:
    """A node with these ports."""
    return node(nics=NicSection(ports=ports), **sections)


def rails(changed: Iterable[NicPort] = (), count: int = 8, **sections: object) -> NodeSnapshot:
    """A node with eight equal ports but for those given."""
    other = {item.key: item for item in changed}
    return nics(*(other.get(f"mlx5_{i}/1", port(i)) for i in range(count)), **sections)


def baseline(key: str, hours: float, boot: str = BOOT, **counters: int) -> Baseline:
    """The counters of one port as a run some hours ago saw them."""
    return Baseline(
        at_ns=TAKEN_NS - int(hours * 3600 * SECOND),
        boot_id=boot,
        sets=(CounterSet(kind="port", key=key, counters=counters),),
    )


# --- processes ---


def process(pid: int = 4711, states: str = "SS", **facts: object) -> Process:
    """A process with one reading per letter, two seconds apart."""
    base: dict[str, object] = {
        "pid": pid,
        "comm": "python3",
        "ppid": 4700,
        "uid": 1000,
        "threads": 59,
        "start_ticks": 90210,
        "nspids": (pid,),
        "nvidia_devices": (),
        "cpus_allowed_list": "0-63",
        "readings": tuple(
            ProcessReading(at_ns=2 * i * SECOND, state=state, cpu_ticks=600, kill_pending=False)
            for i, state in enumerate(states)
        ),
    }
    return Process(**{**base, **facts})  # type: ignore[arg-type]


def blocked(
    pid: int,
    *,
    tid: int | None = None,
    wchan: str | None = None,
    stack: tuple[str, ...] = (),
    switches: tuple[int, ...] = (77, 77),
    step_s: float = 2,
    kill_pending: bool = False,
    ticks: tuple[int, ...] = (600, 600),
    state: str = "D",
) -> tuple[ProcessReading, ...]:
    """Readings of a process with one thread in state D."""
    return tuple(
        ProcessReading(
            at_ns=int(i * step_s * SECOND),
            state=state,
            cpu_ticks=ticks[i],
            kill_pending=kill_pending,
            blocked=(
                BlockedThread(tid=tid or pid, wchan=wchan, stack=stack, context_switches=count),
            ),
        )
        for i, count in enumerate(switches)
    )


def procs(*processes: Process, **facts: object) -> ProcessSection:
    """The section of a host read by root."""
    states = [item.readings[0].state for item in processes if item.readings]
    base: dict[str, object] = {
        "scanned": 400,
        "zombies": states.count("Z"),
        "blocked": states.count("D"),
        "host_pid_namespace": True,
        "processes": processes,
    }
    return ProcessSection(**{**base, **facts})  # type: ignore[arg-type]


def gpu(index: int = 0, *, used_gib: float = 0.01, **facts: object) -> Gpu:
    """An idle GPU of 80 GiB whose driver tells reserved memory apart."""
    base: dict[str, object] = {
        "index": index,
        "state": GpuState.OK,
        "uuid": f"GPU-0000000{index}-aaaa-bbbb-cccc-000000000000",
        "pci": f"0000:{0x17 + 0x10 * index:02x}:00.0",
        "name": "NVIDIA H100 80GB HBM3",
        "minor_number": index,
        "memory_total_bytes": 80 * GIB,
        "memory_reserved_bytes": GIB // 2,
        "processes": (),
        "readings": tuple(
            GpuReading(
                at_ns=i * 2 * SECOND,
                memory_used_bytes=int(used_gib * GIB),
                utilization_gpu_percent=0,
            )
            for i in range(2)
        ),
    }
    return Gpu(**{**base, **facts})  # type: ignore[arg-type]


def on_gpu(pid: int, gib: float | None, kind: str = "compute") -> GpuProcess:
    """An entry of NVML's process list."""
    return GpuProcess(pid=pid, kind=kind, used_memory_bytes=None if gib is None else int(gib * GIB))


def gpus(*items: Gpu, processes: ProcessSection | None = None, **sections: object) -> NodeSnapshot:
    """A node with these GPUs and processes."""
    return node(nvml=NvmlSection(gpus=items), processes=processes, **sections)


def pci(*near: tuple[str, int | None, str | None]) -> PciSection:
    """GPUs with their NUMA node and local CPUs."""
    return PciSection(
        devices=tuple(
            PciDevice(address=address, numa_node=numa, local_cpulist=cpus)
            for address, numa, cpus in near
        )
    )
