"""What the kernel says of tasks, memory, PCIe, the driver, adapters and switches; and the traps."""

from msgspec.structs import replace

from probes.finding import FaultClass
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.pci import PciDevice, PciReading, PciSection
from probes.snapshot.process import BlockedThread, Process, ProcessReading, ProcessSection
from tests.support.kernel_logs import chain, gpus, judged, notes, said, xid

GPU = "0000:3b:00.0"
SAVE_LOG = """\
[401233.104411] nfs: server 192.0.2.40 not responding, still trying
[401241.220190] nfs: server 192.0.2.40 not responding, still trying
[401402.664103] INFO: task python:30510 blocked for more than 120 seconds.
[401402.664120]       Tainted: P           OE      6.5.0-41-generic #41~22.04.2-Ubuntu
[401402.664131] "echo 0 > /proc/sys/kernel/hung_task_timeout_secs" disables this message.
[401402.664140] task:python          state:D stack:0     pid:30510 ppid:30400  flags:0x00004002
"""


def summaries(log: str, **sections: object) -> list[str]:
    return [finding.summary for finding in judged(log, **sections).findings]


# --- tasks ---


def test_a_hung_task_names_the_server_that_went_silent_before() -> None:
    found = judged(SAVE_LOG)
    assert [(f.severity.value, f.id, f.component.pid) for f in found.findings] == [
        ("warning", "kernel.hung-task", 30510), ("warning", "kernel.nfs-not-responding", None),
    ]  # fmt: skip
    task, server = found.findings
    assert task.summary == (
        "Task python:30510 blocked for more than 120 s at 401403 s; NFS server 192.0.2.40 not "
        "responding since 401233 s"
    )
    assert task.fault_class is FaultClass.SOFTWARE
    assert [e.quote for e in task.evidence] == [
        "INFO: task python:30510 blocked for more than 120 seconds.",
        "nfs: server 192.0.2.40 not responding, still trying",
    ]
    assert server.summary == (
        "NFS server 192.0.2.40 not responding 2 times from 401233 s, and no OK since"
    )
    assert "kernel.hung-task" in server.explains


def test_a_server_that_came_back_is_a_note() -> None:
    log = SAVE_LOG + "[401500.0] nfs: server 192.0.2.40 OK\n"
    assert [item[1] for item in said(log)] == ["kernel.hung-task"]
    assert notes(log, "kernel.nfs-not-responding") == ["n44: NFS server 192.0.2.40 answers again"]


def holding(blocked: bool) -> ProcessSection:
    threads = (BlockedThread(tid=30510, wchan="rpc_wait_bit_killable"),) if blocked else ()
    reading = ProcessReading(at_ns=1, state="D" if blocked else "S", blocked=threads)
    return ProcessSection(processes=(Process(pid=30510, comm="python", readings=(reading,)),))


def test_whether_a_task_hangs_now_is_for_the_processes_to_say() -> None:  # trap 38
    assert "kernel.hung-task" not in [item[1] for item in said(SAVE_LOG, processes=holding(True))]
    assert notes(SAVE_LOG, "kernel.hung-task", processes=holding(True)) == [
        "pid 30510: Task python:30510 is blocked now: process.* judges it"
    ]
    assert ("info", "kernel.hung-task", None) in said(SAVE_LOG, processes=holding(False))
    old = SAVE_LOG.replace("[401", "[301")
    assert ("info", "kernel.hung-task", None) in said(old)


def test_lockups_and_stalls() -> None:
    soft = "[402100.0] watchdog: BUG: soft lockup - CPU#12 stuck for 26s! [python:4711]\n"
    hard = "[402100.0] NMI watchdog: Watchdog detected hard LOCKUP on cpu 3\n"
    stall = "[402100.0] rcu: INFO: rcu_sched self-detected stall on CPU\n"
    assert summaries(soft) == ["CPU soft lockup for 26 s in python (4711) at 402100 s"]
    assert said(soft) == [("warning", "kernel.lockup", None)]
    assert said(hard) == [("critical", "kernel.lockup", None)]
    assert said(stall) == [("warning", "kernel.lockup", None)]
    assert said(soft.replace("402100", "100")) == [("info", "kernel.lockup", None)]
    guest = judged(hard, virtualization="kvm").findings[0]
    assert (guest.severity.value, guest.confidence.value) == ("warning", "possible")
    assert "kvm guest" in guest.summary


def test_a_crash_in_nccl_is_the_applications() -> None:
    log = "[402100.0] python[4711]: segfault at 10 ip 00007f1 sp 00007ff error 4 in libnccl.so.2.21.5[7f1+100]\n"
    found = judged(log)
    assert [f.summary for f in found.findings] == [
        "python (4711) crashed in libnccl.so.2.21.5 at 402100 s"
    ]
    assert found.health.value == "ok"


# --- memory ---


def test_out_of_memory_in_a_container_and_on_the_host() -> None:
    cgroup = (
        "[402100.0] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/kubepods/pod1,task=python,pid=4711,uid=0\n"
        "[402100.0] Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB\n"
    )
    host = "[402100.0] Out of memory: Killed process 4711 (python) total-vm:9kB\n"
    assert said(cgroup) == [("info", "kernel.oom", None)]
    assert summaries(cgroup) == [
        "OOM killer ended 1 process, last python (4711) at 402100 s: memory cgroup /kubepods/pod1 is full"
    ]
    assert said(host) == [("warning", "kernel.oom", None)]
    assert said(host.replace("402100", "100")) == [("info", "kernel.oom", None)]


def test_corrected_hardware_errors_are_information() -> None:  # trap 11, of the host
    corrected = "[402100.0] EDAC MC0: 3 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n"
    lost = "[402100.0] EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0\n"
    assert said(corrected) == [("info", "kernel.machine-check", None)]
    assert said(lost) == [("critical", "kernel.machine-check", None)]
    assert said(lost.replace("402100", "100")) == [("warning", "kernel.machine-check", None)]
    assert summaries(lost) == ["Uncorrected hardware errors of the host (MC0) at 402100 s"]


# --- PCIe ---

FATAL = "[402100.0] pcieport 0000:3a:00.0: AER: Uncorrectable (Fatal) error message received from 0000:3b:00.0\n"
NONFATAL = FATAL.replace("(Fatal)", "(Non-Fatal)")
CORRECTED = FATAL.replace("Uncorrectable (Fatal)", "Correctable")


def test_bus_errors_by_severity_and_age() -> None:
    pci = chain(GPU, "0000:3a:00.0")
    assert said(FATAL, pci=pci) == [("critical", "kernel.aer", GPU)]
    assert said(NONFATAL, pci=pci) == [("warning", "kernel.aer", GPU)]
    assert said(CORRECTED, pci=pci) == [("info", "kernel.aer", GPU)]
    assert said(FATAL.replace("402100", "1000"), pci=pci) == [("warning", "kernel.aer", GPU)]
    assert said(NONFATAL.replace("402100", "1000"), pci=pci) == [("info", "kernel.aer", GPU)]
    assert summaries(NONFATAL, pci=pci) == [
        "0000:3b:00.0: PCIe nonfatal errors at 402100 s, seen by port 0000:3a:00.0"
    ]


def test_bus_errors_of_the_boot_or_of_other_devices_are_no_alarm() -> None:
    pci = chain(GPU, "0000:3a:00.0")
    assert said(FATAL.replace("402100", "12"), pci=pci) == []
    assert said(FATAL, pci=chain("0000:88:00.0")) == [("info", "kernel.aer", GPU)]


def test_bus_errors_before_a_fall_belong_to_it() -> None:
    fall = NONFATAL + xid(402_101, 79)
    assert said(fall) == [("critical", "xid.off-bus", GPU)]
    assert notes(fall, "kernel.aer") == [
        "0000:3b:00.0: PCIe errors just before it fell off the bus: see xid.off-bus"
    ]
    assert [item[1] for item in said(FATAL + xid(402_150, 79))] == ["kernel.aer", "xid.off-bus"]


def test_links_that_drop() -> None:
    down = "[402100.0] pcieport 0000:3a:00.0: pciehp: Slot(12): Link Down\n"
    up = "[402101.0] pcieport 0000:3a:00.0: pciehp: Slot(12): Link Up\n"
    pci = chain(GPU, "0000:3a:00.0")
    assert said(down, pci=pci) == [("warning", "kernel.pcie-link", "0000:3a:00.0")]
    assert said(down + up, pci=pci) == []
    assert said((down + up) * 4, pci=pci) == [("warning", "kernel.pcie-link", "0000:3a:00.0")]
    assert said(down, pci=PciSection()) == []
    assert said(down + xid(402_101, 79), pci=pci) == [("critical", "xid.off-bus", GPU)]


LIMITED = (
    "[20.0] nvidia 0000:3b:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x4 "
    "link at 0000:38:01.0 (capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)\n"
)


def hop(speed: float, width: int) -> PciSection:
    reading = PciReading(at_ns=1, current_link_speed_gts=speed, current_link_width_lanes=width)
    section = chain(GPU, "0000:38:01.0")
    return PciSection(
        devices=(section.devices[0], replace(section.devices[1], readings=(reading,)))
    )


def test_the_kernel_names_the_limiting_hop_as_information() -> None:  # trap 1
    (finding,) = judged(LIMITED, pci=hop(16.0, 4)).findings
    assert (finding.severity.value, finding.id) == ("info", "kernel.pcie-bandwidth-limited")
    assert finding.summary == (
        "0000:3b:00.0: PCIe limited to 63.008 of 504.112 Gb/s by the 16 GT/s x4 link at 0000:38:01.0 "
        "at 20 s"
    )
    assert said(LIMITED, pci=hop(32.0, 16)) == []
    assert notes(LIMITED, "kernel.pcie-bandwidth-limited", pci=hop(32.0, 16)) == [
        "0000:3b:00.0: limited to 16 GT/s x4 at 0000:38:01.0 then; 32 GT/s x16 now"
    ]


# --- the driver without an Xid ---

INIT = "[402100.0] NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x22:0x56:762)\n"
MISMATCH = (
    "[402100.0] NVRM: API mismatch: the client has the version 550.127.05, but\n"
    "[402100.0] NVRM: this kernel module has the version 535.104.05.  Please\n"
)


def test_a_gpu_that_does_not_start() -> None:
    assert said(INIT) == [("critical", "kernel.nvrm", GPU)]
    assert summaries(INIT) == [
        "GPU 0000:3b:00.0: the driver could not initialise it (RmInitAdapter failed) at 402100 s"
    ]
    missing = gpus(Gpu(index=2, state=GpuState.UNKNOWN, pci=GPU))
    assert said(INIT, nvml=missing) == [("critical", "kernel.nvrm", GPU)]


def test_a_gpu_that_started_since_is_a_note() -> None:
    assert said(INIT, nvml=gpus()) == []
    load = "[402150.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8\n"
    assert said(INIT + load) == []


def test_a_version_mismatch_is_critical_unless_nvml_itself_works() -> None:
    broken = NvmlSection(init_error="NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert said(MISMATCH, nvml=broken) == [("critical", "kernel.nvrm", None)]
    assert summaries(MISMATCH, nvml=broken) == [
        (
            "NVIDIA driver: driver library and kernel module differ: library 550.127.05, module 535.104.05 at "
            "402100 s"
        )
    ]
    assert said(MISMATCH, nvml=gpus()) == [("info", "kernel.nvrm", None)]


# --- adapters and switches ---


def test_an_adapter_whose_firmware_died() -> None:
    log = "[402100.0] mlx5_core 0000:5e:00.0: print_health_info:416:(pid 0): device's health compromised - reached miss count\n"
    assert said(log) == [("critical", "kernel.nic-health", "0000:5e:00.0")]
    assert said(log.replace("402100", "100")) == [("info", "kernel.nic-health", "0000:5e:00.0")]


def test_link_messages_of_adapters_are_left_to_the_ports() -> None:  # trap 42
    assert said("[402100.0] mlx5_core 0000:5e:00.0 ens1f0np0: Link down\n") == []


def sxid(code: int, rest: str, at: float = 402_100) -> str:
    return f"[{at:.6f}] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {code}, {rest}\n"


def test_a_fatal_sxid_accuses_the_switch() -> None:
    log = sxid(20034, "Fatal, Link 30 LTSSM Fault Up") + sxid(
        20034, "Severity 1 Engine instance 30 Sub-engine instance 00"
    )
    (finding,) = judged(log).findings
    assert (finding.id, finding.severity.value) == ("sxid.fatal", "critical")
    assert finding.summary == ("NVSwitch 3 (0000:c1:00.0): fatal SXid 20034 on link 30 at 402100 s")
    assert (finding.component.type, finding.component.pci, finding.component.device) == (
        "link", "0000:c1:00.0", "nvidia-nvswitch3",
    )  # fmt: skip


def test_the_drivers_word_decides_and_the_list_only_where_it_has_none() -> None:
    for code in (11012, 12021, 20001, 12028):
        assert said(sxid(code, "Non-fatal, Link 32 something")) == [
            ("info", "sxid.nonfatal", "0000:c1:00.0")
        ]
    assert said(sxid(22003, "something"))[0][1] == "sxid.fatal"
    assert said(sxid(31001, "something new"))[0][1] == "sxid.nonfatal"


def test_an_sxid_shows_the_gpus_that_saw_the_same_fault() -> None:
    link = "NVLink: fatal error detected on link 3(0x100, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
    log = sxid(20034, "Fatal, Link 30 LTSSM Fault Up") + xid(402_103, 74, link)
    found = {finding.id: finding for finding in judged(log).findings}
    assert "GPU link errors within 10 s on 1 GPU" in found["sxid.fatal"].summary
    assert len(found["sxid.fatal"].evidence) == 2


def test_an_sxid_from_before_a_driver_load_is_cured() -> None:
    load = "[402150.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8\n"
    assert said(sxid(20034, "Fatal, Link 30 LTSSM Fault Up") + load) == []


def test_a_switch_without_sxids_is_clear_and_a_machine_without_one_has_none() -> None:
    switch = PciDevice(address="0000:c1:00.0", vendor_id=0x10DE, class_code=0x068000)
    found = {r.id: r for r in judged("[1.0] x\n", pci=PciSection(devices=(switch,))).results}
    assert (found["sxid.fatal"].outcome.value, found["sxid.fatal"].judged) == ("pass", 1)
    none = {r.id: r for r in judged("[1.0] x\n", pci=PciSection()).results}
    assert none["sxid.fatal"].outcome.value == "notapplicable"


def test_a_quiet_log_is_clear() -> None:
    found = judged("[1.0] Linux version 6.8.0\n[2.0] usb 1-1: new device\n", nvml=gpus())
    assert found.findings == ()
    assert {r.outcome.value for r in found.results} == {"pass", "notapplicable"}
    assert [r.id for r in found.results if r.notes and not r.id.startswith("sxid")] == []
