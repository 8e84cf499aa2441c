"""What the rules about processes share: who is stuck, for how long, where in the kernel."""

from __future__ import annotations

import msgspec

from probes.finding import Component, Evidence
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.kernel import KernelEvent
from probes.snapshot.process import BlockedThread, Process
from probes.view import Node

DRIVER = "the NVIDIA driver"
VFORK = "waiting for its child to start"

_DRIVER_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")
_NOT_THE_DRIVER = ("nvme", "nvdimm", "nvmem", "nvram")
# Kernel functions and modules by substring, the most telling first; raw text stays in the evidence.
_PLACES = (
    (("nfs", "sunrpc", "rpc_wait_bit"), "NFS"),
    (("lustre", "ptlrpc", "lnet", "cl_sync_io", "ll_file", "osc_"), "Lustre"),
    (("fuse", "request_wait_answer"), "a FUSE file system"),
    (("ceph",), "Ceph"),
    (("mmfs", "gpfs", "cxiWait"), "Storage Scale (GPFS)"),
    (("beegfs",), "BeeGFS"),
    (("wekafs",), "WEKA"),
    (("cifs", "smb"), "SMB"),
    (("mlx5", "mlx4", "ib_uverbs", "ib_core", "rdma_cm", "ib_umem"), "the RDMA driver"),
    (("nvme", "blk_", "submit_bio", "scsi", "md_"), "a block device"),
    (("ext4", "xfs", "btrfs", "jbd2", "zfs", "f2fs"), "a local file system"),
    (("io_schedule", "folio_wait", "wait_on_page", "balance_dirty"), "a disk or file system"),
)
_VFORK_FUNCTIONS = ("wait_for_vfork_done", "kernel_clone", "_do_fork", "do_fork")


class Stuck(msgspec.Struct, frozen=True):
    """A thread that did not run at all between the first and the last reading."""

    thread: BlockedThread  # as last read
    seconds: float  # 0 when there is one reading only
    place: str | None  # where it waits; None when hidden


def processes(node: Node) -> tuple[Process, ...]:
    """Every process of the snapshot."""
    return node.snapshot.processes.processes if node.snapshot.processes else ()


def component(node: Node, process: Process) -> Component:
    """The process, by its pid and, inside a PID namespace, the pid it has there."""
    return Component(
        type="host",
        host=node.host,
        pid=process.pid,
        nspid=process.nspids[-1] if len(process.nspids) > 1 else None,
    )


def name_of(process: Process) -> str:
    """``process 4711 (python, container 3f2a...)``."""
    inside = f", container {process.container}" if process.container else ""
    return f"process {process.pid} ({process.comm or '?'}{inside})"


def place_of(thread: BlockedThread) -> str | None:
    """Where a thread waits, as far as wchan and stack tell; the raw function when unknown.

    A lock function on top says nothing of whose lock it is, so the modules of the whole stack
    count first.
    """
    modules = [frame.partition(" [")[2].rstrip("]") for frame in thread.stack]
    if any(module in _DRIVER_MODULES for module in modules):
        return DRIVER
    functions = [frame.partition(" ")[0] for frame in thread.stack]
    if thread.wchan:
        functions.insert(0, thread.wchan)
    if not functions:
        return None
    if functions[0] in _VFORK_FUNCTIONS:
        return VFORK
    if _is_driver_function(functions[0]):
        return DRIVER
    text = " ".join([*functions, *modules])
    for needles, place in _PLACES:
        if any(needle in text for needle in needles):
            return place
    return functions[0]


def _is_driver_function(name: str) -> bool:
    if name.startswith(_NOT_THE_DRIVER):
        return False
    return name.startswith(("nv", "_nv", "uvm_", "os_acquire_", "rm_ioctl", "rm_init"))


def stuck_threads(process: Process) -> tuple[Stuck, ...]:
    """Threads in state D at every reading that were never scheduled in between.

    A thread that does much input and output is also often seen in D: its context switches move.
    """
    if not process.readings:
        return ()
    first, last = process.readings[0], process.readings[-1]
    before = {thread.tid: thread for thread in first.blocked}
    for reading in process.readings[1:-1]:
        kept = {thread.tid for thread in reading.blocked}
        before = {tid: thread for tid, thread in before.items() if tid in kept}
    return tuple(
        Stuck(thread, (last.at_ns - first.at_ns) / 1e9, place_of(thread))
        for thread in last.blocked
        if thread.tid in before and _has_not_run(before[thread.tid], thread)
    )


def _has_not_run(before: BlockedThread, now: BlockedThread) -> bool:
    if before.context_switches is not None and now.context_switches is not None:
        return before.context_switches == now.context_switches
    return (before.wchan, before.stack) == (now.wchan, now.stack)


def was_blocked(process: Process) -> bool:
    """Whether any reading shows a thread in state D."""
    return any(reading.blocked for reading in process.readings)


def killed(process: Process) -> bool:
    """Whether SIGKILL was pending at every reading."""
    return bool(process.readings) and all(reading.kill_pending for reading in process.readings)


def hung_task(node: Node, thread: BlockedThread) -> KernelEvent | None:
    """The kernel's own line that this thread was blocked for a long time (120 s by default)."""
    section = node.snapshot.kernel
    for event in section.events if section else ():
        if event.kind == "hung-task" and event.pid == thread.tid:
            return event
    return None


def gpus_held(node: Node, process: Process) -> tuple[Gpu, ...]:
    """The GPUs whose device file the process has open. CUDA opens all that it may see."""
    held = set(process.nvidia_devices or ())
    return tuple(
        gpu
        for gpu in node.gpus
        if gpu.minor_number is not None and f"/dev/nvidia{gpu.minor_number}" in held
    )


def sick_gpus(node: Node, process: Process) -> tuple[Gpu, ...]:
    """Of those, the ones that no longer answer as they should."""
    return tuple(gpu for gpu in gpus_held(node, process) if gpu.state is not GpuState.OK)


def thread_evidence(process: Process, stuck: Stuck) -> Evidence:
    """State, wait channel and kernel stack of a thread."""
    base = f"/proc/{process.pid}"
    if stuck.thread.tid != process.pid:
        base += f"/task/{stuck.thread.tid}"
    quote = " < ".join(stuck.thread.stack) or stuck.thread.wchan
    return Evidence(
        source="procfs",
        locator=f"{base}/stat",
        observed="D (uninterruptible sleep)",
        unit=f"for {stuck.seconds:.1f} s without running once" if stuck.seconds else None,
        quote=quote[:300] if quote else None,
        recheck=f"grep -H -e State -e ctxt {base}/status; cat {base}/wchan; cat {base}/stack",
    )


def hung_task_evidence(event: KernelEvent) -> Evidence:
    """The kernel's line about a task that did not run for long."""
    return Evidence(
        source="kmsg",
        locator=event.locator,
        observed=event.count,
        unit="hung-task lines",
        at_ns=event.at_ns,
        quote=event.line[:300],
        recheck="dmesg -T | grep -A1 'blocked for more than'",
    )
