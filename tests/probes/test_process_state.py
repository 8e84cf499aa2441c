"""Rules about processes stuck in the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.collect import processes as collector
from agent.fstree import parse_fstree
from agent.host import FixtureHost
from probes.finding import (
    Action,
    Component,
    Confidence,
    Evidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import Gap, GapReason
from probes.node.process_state import d_state, kill_pending, stuck_in_driver
from probes.process_view import DRIVER, VFORK, place_of
from probes.result import Outcome
from probes.snapshot.gpu import GpuState, NvmlSection
from probes.snapshot.kernel import KernelEvent, KernelSection
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.process import BlockedThread, Process
from tests.support.nics_processes import (
    blocked,
    findings,
    gpu,
    node,
    notes,
    process,
    procs,
    run,
)

FIXTURES = Path(__file__).parent.parent / "fixtures"
HELD = ("/dev/nvidia3", "/dev/nvidiactl")
STACK = ("rwsem_down_write_slowpath", "os_acquire_rwlock_write [nvidia]", "rm_ioctl [nvidia]")
NFS = ("folio_wait_bit_common", "file_write_and_wait_range", "nfs_file_fsync [nfs]")


def snapshot(*items: Process, **sections: object) -> NodeSnapshot:
    return node(processes=procs(*items), **sections)


def hung(pid: int) -> KernelSection:
    line = f"INFO: task python:{pid} blocked for more than 120 seconds."
    return KernelSection(
        source="kmsg",
        events=(KernelEvent(kind="hung-task", line=line, locator="kmsg 881", pid=pid, count=2),),
    )


# --- stuck in the driver ---


def test_stuck_in_the_driver_with_the_kernels_word() -> None:
    held = process(4711, nvidia_devices=HELD, readings=blocked(4711, stack=STACK))
    assert findings(stuck_in_driver, snapshot(held, kernel=hung(4711))) == (
        Finding(
            id="process.stuck-in-driver",
            severity=Severity.CRITICAL,
            confidence=Confidence.PROVEN,
            fault_class=FaultClass.CANNOT_TELL,
            job_impact=JobImpact.BREAKS,
            component=Component(type="host", host="n07", pid=4711),
            summary="Process 4711 (python3) in state D for 2.0 s (limit 10 s) in the NVIDIA "
            "driver; the kernel reports it as a hung task",
            evidence=(
                Evidence(
                    source="procfs",
                    locator="/proc/4711/stat",
                    observed="D (uninterruptible sleep)",
                    unit="for 2.0 s without running once",
                    quote="rwsem_down_write_slowpath < os_acquire_rwlock_write [nvidia] < "
                    "rm_ioctl [nvidia]",
                    recheck="grep -H -e State -e ctxt /proc/4711/status; cat /proc/4711/wchan; "
                    "cat /proc/4711/stack",
                ),
                Evidence(
                    source="kmsg",
                    locator="kmsg 881",
                    observed=2,
                    unit="hung-task lines",
                    quote="INFO: task python:4711 blocked for more than 120 seconds.",
                    recheck="dmesg -T | grep -A1 'blocked for more than'",
                ),
            ),
            explains=("process.kill-pending", "process.zombie-holder", "gpu.ghost-memory"),
            remedy=Remedy(
                action=Action.REBOOT,
                text="Look for Xid 119, 120 or 79 in the kernel log. Do not attach a debugger: it "
                "would hang as well. Kill has no effect until the wait ends. A GPU reset needs "
                "every holder gone, so a reboot is the usual way out.",
                disruptive=True,
            ),
        ),
    )


def test_a_thread_other_than_the_main_one_in_a_container() -> None:
    held = process(
        4711,
        nvidia_devices=HELD,
        container="4c01db0b339c",
        nspids=(4711, 61),
        readings=blocked(4711, tid=4800, wchan="uvm_va_space_destroy", state="S", step_s=12),
    )
    (found,) = findings(stuck_in_driver, snapshot(held))
    assert found.component == Component(type="host", host="n07", pid=4711, nspid=61)
    assert found.summary == (
        "Thread 4800 of process 4711 (python3, container 4c01db0b339c) in state D for 12.0 s "
        "(limit 10 s) in the NVIDIA driver"
    )
    assert (found.severity, found.confidence) == (Severity.CRITICAL, Confidence.LIKELY)
    assert found.evidence[0].locator == "/proc/4711/task/4800/stat"


def test_trap_38_short_waits_in_the_driver_are_no_fault() -> None:
    """The whole sample of two seconds is worth knowing, one of two readings is nothing."""
    whole = process(4711, nvidia_devices=HELD, readings=blocked(4711, stack=STACK))
    (found,) = findings(stuck_in_driver, snapshot(whole))
    assert (found.severity, found.confidence) == (Severity.INFO, Confidence.POSSIBLE)
    assert found.job_impact is JobImpact.NONE
    once = process(
        4711, nvidia_devices=HELD, readings=(*process(4711, "S").readings, *whole.readings[1:])
    )
    assert notes(stuck_in_driver, snapshot(once)) == (
        "pid 4711: state D in the driver at one reading only: short waits are normal",
    )


def test_trap_38_a_thread_that_ran_in_between_is_not_stuck() -> None:
    busy = process(
        4711, nvidia_devices=HELD, readings=blocked(4711, stack=STACK, switches=(70, 71), step_s=60)
    )
    assert len(notes(stuck_in_driver, snapshot(busy))) == 1


def test_lost_gpu_makes_a_short_wait_a_fault() -> None:
    held = process(4711, nvidia_devices=HELD, readings=blocked(4711, stack=STACK))
    lost = gpu(3, state=GpuState.LOST)
    (found,) = findings(stuck_in_driver, snapshot(held, nvml=NvmlSection(gpus=(gpu(0), lost))))
    assert (found.severity, found.fault_class) == (Severity.CRITICAL, FaultClass.HARDWARE)
    assert found.summary.endswith("GPU 0000:47:00.0 is lost")


def test_hidden_wait_channel_of_a_holder_is_only_possible() -> None:
    held = process(4711, nvidia_devices=HELD, readings=blocked(4711, step_s=20))
    (found,) = findings(stuck_in_driver, snapshot(held))
    assert found.confidence is Confidence.POSSIBLE


def test_hidden_from_this_user_is_unread() -> None:
    other = process(900, nvidia_devices=None, readings=blocked(900, step_s=20))
    gap = Gap(source="processes", reason=GapReason.DENIED, fields=("wchan",), devices=("900",))
    done = run(stuck_in_driver, snapshot(other, gaps=(gap,)))
    assert done.results[0].outcome is Outcome.UNKNOWN
    assert done.results[0].missing == ("wchan of 900: denied",)


def test_one_reading_needs_another() -> None:
    held = process(4711, nvidia_devices=HELD, readings=blocked(4711, stack=STACK, switches=(7,)))
    done = run(stuck_in_driver, snapshot(held))
    assert done.findings == ()
    assert done.results[0].outcome is Outcome.UNKNOWN


def test_no_holder() -> None:
    assert run(stuck_in_driver, snapshot()).results[0].outcome is Outcome.NOTAPPLICABLE
    fine = process(4711, nvidia_devices=HELD)
    assert run(stuck_in_driver, snapshot(fine)).results[0].judged == 1


# --- places ---


@pytest.mark.parametrize(
    ("wchan", "stack", "place"),
    [
        ("os_acquire_mutex", (), DRIVER),
        ("nvidia_unlocked_ioctl", (), DRIVER),
        ("_nv042851rm", (), DRIVER),
        ("uvm_ioctl", (), DRIVER),
        ("nvme_wait_freeze", (), "a block device"),
        ("rwsem_down_write_slowpath", STACK, DRIVER),
        ("folio_wait_bit_common", NFS, "NFS"),
        ("rpc_wait_bit_killable", (), "NFS"),
        ("request_wait_answer", (), "a FUSE file system"),
        ("cl_sync_io_wait", (), "Lustre"),
        ("io_schedule", (), "a disk or file system"),
        ("mlx5_cmd_exec", (), "the RDMA driver"),
        ("some_new_function", (), "some_new_function"),
        ("kernel_clone", (), VFORK),
        (None, (), None),
    ],
)
def test_places(wchan: str | None, stack: tuple[str, ...], place: str | None) -> None:
    assert place_of(BlockedThread(tid=1, wchan=wchan, stack=stack)) == place


# --- state D elsewhere ---


def test_checkpoint_on_a_dead_nfs_server() -> None:
    saving = process(30510, comm="python", nvidia_devices=HELD, readings=blocked(30510, stack=NFS))
    (found,) = findings(d_state, snapshot(saving, kernel=hung(30510)))
    assert found.summary == (
        "Process 30510 (python) in state D for 2.0 s (limit 10 s) in NFS; the kernel reports it "
        "as a hung task"
    )
    assert (found.severity, found.confidence) == (Severity.WARNING, Confidence.PROVEN)
    assert found.fault_class is FaultClass.SOFTWARE
    assert findings(stuck_in_driver, snapshot(saving, kernel=hung(30510))) == ()


def test_the_same_from_copied_files() -> None:
    """One reading only: the kernel's line decides."""
    text = (FIXTURES / "proc_copy_nfs_hang.txt").read_text()
    section, gaps = collector.collect(FixtureHost(parse_fstree(text)))
    done = run(d_state, node(processes=section, kernel=hung(30510), gaps=gaps))
    assert [(item.component.pid, item.severity) for item in done.findings] == [
        (30510, Severity.WARNING)
    ]
    assert "in state D for one reading in NFS" in done.findings[0].summary
    without = run(d_state, node(processes=section, gaps=gaps))
    assert (without.findings, without.results[0].outcome) == ((), Outcome.UNKNOWN)


def test_trap_38_disk_wait_below_ten_seconds() -> None:
    slow = process(900, readings=blocked(900, wchan="io_schedule"))
    assert notes(d_state, snapshot(slow)) == (
        (
            "pid 900: state D for the 2.0 s of the sample in a disk or file system: below 10 s it "
            "can be slow input and output"
        ),
    )
    moving = process(900, readings=blocked(900, wchan="io_schedule", switches=(1, 90), step_s=30))
    assert len(notes(d_state, snapshot(moving))) == 1


def test_kernel_threads_and_vfork_parents_sleep_in_d_by_design() -> None:
    worker = process(77, comm="kworker/3:1", is_kernel_thread=True, readings=blocked(77, step_s=30))
    parent = process(901, readings=blocked(901, wchan="kernel_clone", step_s=30))
    assert notes(d_state, snapshot(worker, parent)) == (
        "pid 77: kernel thread kworker/3:1: sleeps in state D by design",
        "pid 901: waits in state D for its vforked child, which is normal",
    )


def test_stuck_without_gpu_is_information() -> None:
    other = process(902, readings=blocked(902, wchan="rpc_wait_bit_killable", step_s=30))
    (found,) = findings(d_state, snapshot(other))
    assert (found.severity, found.job_impact) == (Severity.INFO, JobImpact.NONE)


# --- kill pending ---


def test_killed_and_stuck_with_a_gpu() -> None:
    dead = process(
        4711, nvidia_devices=HELD, readings=blocked(4711, stack=STACK, kill_pending=True)
    )
    (found,) = findings(kill_pending, snapshot(dead))
    assert found.summary == (
        "SIGKILL is pending on process 4711 (python3), which did not run for 2.0 s: stuck in the "
        "NVIDIA driver"
    )
    assert (found.severity, found.confidence) == (Severity.CRITICAL, Confidence.PROVEN)
    (cause,) = findings(stuck_in_driver, snapshot(dead))
    assert cause.severity is Severity.CRITICAL
    assert kill_pending.id in cause.explains
    assert cause.summary.endswith("SIGKILL has no effect")


def test_killed_and_still_freeing_its_memory() -> None:
    ending = process(
        4711,
        nvidia_devices=HELD,
        readings=blocked(4711, stack=STACK, kill_pending=True, ticks=(600, 790)),
    )
    assert notes(kill_pending, snapshot(ending)) == ("pid 4711: killed and still ending: it runs",)


def test_killed_at_one_reading_only() -> None:
    just = process(4711, readings=blocked(4711, kill_pending=True, switches=(7,), ticks=(6,)))
    done = run(kill_pending, snapshot(just))
    assert (done.findings, done.results[0].outcome) == ((), Outcome.UNKNOWN)


def test_nobody_was_killed() -> None:
    assert run(kill_pending, snapshot(process())).results[0].outcome is Outcome.PASS
