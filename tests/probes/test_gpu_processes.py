"""Rules about GPU memory without a process, zombies and CPU affinity."""

from __future__ import annotations

from msgspec.structs import replace

from probes.finding import (
    Action,
    Basis,
    Component,
    Confidence,
    Evidence,
    Expectation,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import Gap, GapReason
from probes.node.gpu_processes import ghost_memory, numa_affinity, zombie_holder
from probes.result import Outcome
from probes.snapshot.gpu import GpuReading
from probes.snapshot.process import ProcessReading
from tests.support.nics_processes import (
    GIB,
    blocked,
    findings,
    gpu,
    gpus,
    node,
    notes,
    on_gpu,
    pci,
    process,
    procs,
    run,
)

HELD = ("/dev/nvidia0", "/dev/nvidiactl")


# --- ghost memory ---


def test_memory_held_by_a_process_that_can_not_end() -> None:
    dead = process(
        4711,
        "ZZ",
        nvidia_devices=HELD,
        ppid=1,
        container="4c01db0b339c",
        readings=blocked(4711, tid=4800, wchan="uvm_x", state="Z", kill_pending=True),
    )
    monitor = process(600, comm="dcgm", nvidia_devices=HELD)
    snapshot = gpus(gpu(0, used_gib=40), processes=procs(monitor, dead))
    assert findings(ghost_memory, snapshot) == (
        Finding(
            id="gpu.ghost-memory",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            fault_class=FaultClass.SOFTWARE,
            job_impact=JobImpact.BREAKS,
            component=Component(
                type="gpu",
                host="n07",
                gpu_uuid="GPU-00000000-aaaa-bbbb-cccc-000000000000",
                pci="0000:17:00.0",
                index=0,
            ),
            summary="GPU 0000:17:00.0: 40.0 GiB in use that no process in NVML's list accounts "
            "for; held by process 4711 (python3, container 4c01db0b339c)",
            evidence=(
                Evidence(
                    source="nvml",
                    locator="nvmlDeviceGetMemoryInfo, nvmlDeviceGetComputeRunningProcesses",
                    observed=40.0,
                    unit="GiB without a process",
                    expected=Expectation(value=1.0, basis=Basis.VENDOR_LIMIT),
                    recheck="nvidia-smi -i 0000:17:00.0 --query-gpu=memory.used,memory.reserved "
                    "--format=csv; nvidia-smi --query-compute-apps=pid,used_memory,gpu_bus_id "
                    "--format=csv",
                ),
                Evidence(
                    source="procfs",
                    locator="/proc/4711/fd",
                    observed="/dev/nvidia0 is open in process 4711 (python3, container "
                    "4c01db0b339c)",
                    quote="state Z, parent 1, uid 1000, SIGKILL pending, container 4c01db0b339c",
                    recheck="ls -l /proc/4711/fd | grep nvidia; grep -E 'State|PPid|Pnd' "
                    "/proc/4711/status",
                ),
            ),
            remedy=Remedy(
                action=Action.INSPECT_APP,
                text="End process 4711 (python3, container 4c01db0b339c); a reset needs every "
                "holder gone.",
                disruptive=True,
            ),
        ),
    )


def test_memory_held_by_nobody() -> None:
    (found,) = findings(ghost_memory, gpus(gpu(0, used_gib=40), processes=procs()))
    assert found.summary.endswith("nobody holds its device file")
    assert found.remedy and found.remedy.action is Action.RESET_GPU


def test_living_holders_that_nvml_does_not_list_are_only_possible() -> None:
    monitor = process(600, comm="dcgm", nvidia_devices=HELD)
    (found,) = findings(ghost_memory, gpus(gpu(0, used_gib=40), processes=procs(monitor)))
    assert found.confidence is Confidence.POSSIBLE
    assert "open in process 600 (dcgm)" in found.summary


def test_accounted_for() -> None:
    """One that computes and draws is listed twice and counts once."""
    used = gpu(0, used_gib=40.5, processes=(on_gpu(9, 40), on_gpu(9, 40, "graphics")))
    assert findings(ghost_memory, gpus(used, processes=procs())) == ()
    less = gpu(0, used_gib=80, processes=used.processes)
    assert len(findings(ghost_memory, gpus(less, processes=procs()))) == 1


def test_memory_that_goes_away_within_the_sample() -> None:
    readings = tuple(GpuReading(at_ns=i, memory_used_bytes=n * GIB) for i, n in enumerate((40, 0)))
    assert findings(ghost_memory, gpus(gpu(0, readings=readings), processes=procs())) == ()


def test_trap_36_reserved_memory_is_not_a_leak() -> None:
    """Before R510 used contains what the driver reserves: 551 MiB on an idle H100."""
    old = gpu(0, used_gib=2.0, memory_reserved_bytes=None)
    assert findings(ghost_memory, gpus(old, processes=procs())) == ()
    new = gpu(0, used_gib=0.01, memory_reserved_bytes=2 * GIB)
    assert findings(ghost_memory, gpus(new, processes=procs())) == ()


def test_trap_36_another_pid_namespace() -> None:
    """In a container NVML's pids match nothing, and most processes are out of sight."""
    used = gpu(0, used_gib=40)
    inside = procs(host_pid_namespace=False)
    done = run(ghost_memory, gpus(used, processes=inside))
    assert done.findings == ()
    assert done.results[0].notes == (
        "0000:17:00.0: 40.0 GiB in use by processes outside this container's PID namespace",
    )
    listed = gpu(0, used_gib=40, processes=(on_gpu(998877, 40),))
    assert findings(ghost_memory, gpus(listed, processes=procs())) == ()


def test_trap_36_other_users_processes() -> None:
    gap = Gap(source="processes", reason=GapReason.DENIED, fields=("nvidia_devices",))
    snapshot = gpus(gpu(0, used_gib=40), processes=procs(unreadable=12), gaps=(gap,))
    done = run(ghost_memory, snapshot)
    assert (done.findings, done.results[0].outcome) == ((), Outcome.UNKNOWN)
    assert done.results[0].missing == ("nvidia_devices: denied",)
    assert findings(ghost_memory, gpus(gpu(0), processes=procs(unreadable=12))) == ()


def test_trap_35_full_utilisation_without_a_process() -> None:
    busy = tuple(
        GpuReading(at_ns=i, memory_used_bytes=0, utilization_gpu_percent=100) for i in range(2)
    )
    assert notes(ghost_memory, gpus(gpu(0, readings=busy), processes=procs())) == (
        "0000:17:00.0: busy, but NVML names no process: one out of sight",
    )


def test_not_judged_where_memory_is_not_listed_by_process() -> None:
    parts = (
        gpu(0, used_gib=40, mig_mode=True),
        gpu(1, used_gib=40, virtualization_mode=2),
        gpu(2, used_gib=40, confidential_compute=True),
        gpu(3, used_gib=40, c2c_enabled=True),
    )
    done = run(ghost_memory, gpus(*parts, processes=procs()))
    assert done.findings == ()
    assert [note.partition(": ")[2][:9] for note in done.results[0].notes] == [
        "MIG mode:",
        "a vGPU: m",
        "confident",
        "the kerne",
    ]


def test_unknown_sizes_are_unread() -> None:
    unknown = gpu(0, used_gib=40, processes=(on_gpu(9, None),))
    hidden = replace(unknown, processes=None)
    for item in (unknown, hidden):
        done = run(ghost_memory, gpus(item, processes=procs()))
        assert (done.findings, done.results[0].outcome) == ((), Outcome.UNKNOWN)


# --- zombies ---


def test_zombie_whose_memory_is_still_counted() -> None:
    dead = process(4711, "ZZ", threads=1)
    used = gpu(0, used_gib=40, processes=(on_gpu(4711, 40),))
    (found,) = findings(zombie_holder, gpus(used, processes=procs(dead)))
    assert found.summary == (
        "Zombie process 4711 (python3) still holds 40.0 GiB of GPU memory, expected nothing"
    )
    assert (found.confidence, found.explains) == (Confidence.PROVEN, ("gpu.ghost-memory",))


def test_zombie_whose_threads_hold_the_device() -> None:
    dead = process(4711, "ZZ", nvidia_devices=HELD, threads=2)
    (found,) = findings(zombie_holder, node(processes=procs(dead)))
    assert found.confidence is Confidence.LIKELY
    assert "/dev/nvidia0, /dev/nvidiactl" in found.summary


def test_trap_37_zombie_child_of_a_notebook() -> None:
    plain = (process(800, "ZZ", threads=1), process(801, "ZZ", threads=1))
    assert notes(zombie_holder, node(processes=procs(*plain))) == (
        "n07: 2 zombies hold no GPU: their parents' business",
    )


def test_zombie_of_another_user_is_unread() -> None:
    hidden = process(800, "ZZ", threads=2, nvidia_devices=None)
    done = run(zombie_holder, node(processes=procs(hidden, unreadable=1)))
    assert (done.findings, done.results[0].outcome) == ((), Outcome.UNKNOWN)


def test_container_pids_are_not_joined_with_nvmls() -> None:
    """Pid 61 in the container and NVML's 61 of the host are different processes."""
    inside = procs(process(61, "ZZ", threads=1), host_pid_namespace=False)
    used = gpu(0, used_gib=40, processes=(on_gpu(61, 40),))
    assert findings(zombie_holder, gpus(used, processes=inside)) == ()


# --- affinity ---

NEAR = pci(("0000:17:00.0", 0, "0-31,64-95"), ("0000:27:00.0", 1, "32-63,96-127"))


def trainer(cpus: str, **facts: object) -> object:
    return process(4711, cpus_allowed_list=cpus, nvidia_devices=HELD, **facts)


def test_rank_bound_to_the_other_socket() -> None:
    snapshot = gpus(
        gpu(0, processes=(on_gpu(4711, 40),)),
        gpu(1),
        processes=procs(trainer("32-63")),  # type: ignore[arg-type]
        pci=NEAR,
    )
    (found,) = findings(numa_affinity, snapshot)
    assert found.summary == (
        "GPU 0000:17:00.0 is local to CPUs 0-31,64-95 (NUMA node 0); its process 4711 (python3) "
        "may run only on CPUs 32-63"
    )
    assert (found.severity, found.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)
    assert found.component.pci == "0000:17:00.0"


def test_unbound_or_near_one_of_its_gpus_is_fine() -> None:
    one = gpu(0, processes=(on_gpu(4711, 40),))
    assert findings(numa_affinity, gpus(one, processes=procs(trainer("0-127")), pci=NEAR)) == ()  # type: ignore[arg-type]
    both = (one, gpu(1, processes=(on_gpu(4711, 40),)))
    assert findings(numa_affinity, gpus(*both, processes=procs(trainer("40-43")), pci=NEAR)) == ()  # type: ignore[arg-type]


def test_no_numa_node_no_judgement() -> None:
    one = gpu(0, processes=(on_gpu(4711, 40),))
    blind = pci(("0000:17:00.0", None, "0-3"))
    done = run(numa_affinity, gpus(one, processes=procs(trainer("32-63")), pci=blind))  # type: ignore[arg-type]
    assert done.results[0].notes == ("0000:17:00.0: the firmware names no NUMA node for it",)


def test_container_pids_say_nothing_of_affinity() -> None:
    one = gpu(0, processes=(on_gpu(4711, 40),))
    inside = procs(trainer("32-63"), host_pid_namespace=False)  # type: ignore[arg-type]
    assert findings(numa_affinity, gpus(one, processes=inside, pci=NEAR)) == ()


def test_holder_out_of_sight_is_unread() -> None:
    one = gpu(0, processes=(on_gpu(5000, 40),))
    done = run(numa_affinity, gpus(one, processes=procs(), pci=NEAR))
    assert done.results[0].missing == ("cpus_allowed_list of 5000: not-collected",)


def test_nonsense_cpu_list_accuses_nobody() -> None:
    one = gpu(0, processes=(on_gpu(4711, 40),))
    assert findings(numa_affinity, gpus(one, processes=procs(trainer("x")), pci=NEAR)) == ()  # type: ignore[arg-type]


def test_readings_of_a_process_without_state() -> None:
    odd = process(4711, readings=(ProcessReading(at_ns=0),))
    assert findings(zombie_holder, node(processes=procs(odd))) == ()
