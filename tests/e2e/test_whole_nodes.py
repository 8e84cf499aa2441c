"""Whole nodes in trouble -> the real collectors -> all probes -> what ``laggard check`` answers.

Each case is one trouble with its tempting innocents; the answer is one verdict, not five.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from msgspec import structs

from agent.exitcode import exit_code
from probes.finding import Component
from probes.result import Report
from probes.snapshot.node import NodeSnapshot
from tests.support import nvml_double
from tests.support.whole_nodes import (
    BUS,
    GPUS,
    ONES,
    PORTS,
    Machine,
    Machines,
    gpu_path,
    pci_gpu,
    port,
    report_of,
    root_port,
)

HOST = Component(type="host", host="gpu-a07")


def gpu(index: int, *, uuid: bool = True, in_nvml: bool = True) -> Component:
    """A GPU with what is known of it."""
    return Component(
        type="gpu",
        host="gpu-a07",
        pci=GPUS[index],
        gpu_uuid=f"GPU-5a1c0de0-1111-4222-8333-00000000000{index}" if uuid else None,
        index=index if in_nvml else None,
    )


def trained(index: int, width: int, speed: str = "32.0") -> str:
    """Both ends of a GPU's link at this width and speed."""
    path = gpu_path(GPUS[index])
    return "".join(
        f"{at}/current_link_width = {width}\n{at}/current_link_speed = {speed} GT/s PCIe\n"
        for at in (path, path.rpartition("/")[0])
    )


FALLEN = """
[80110.221908] pcieport 0000:9c:01.0: AER: Multiple Uncorrected (Non-Fatal) error received: 0000:9d:00.0
[80110.221940] nvidia 0000:9d:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Requester ID)
[80110.221951] nvidia 0000:9d:00.0:   device [10de:2330] error status/mask=00004000/00000000
[80110.221960] nvidia 0000:9d:00.0:    [14] CmpltTO                (First)
[80111.004120] NVRM: GPU at PCI:0000:9d:00: GPU-5a1c0de0-1111-4222-8333-000000000004
[80111.004140] NVRM: Xid (PCI:0000:9d:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[80111.004151] NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.
[80111.004990] NVRM: Xid (PCI:0000:9d:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
[80133.118204] NVRM: Xid (PCI:0000:c3:00): 43, pid=88120, name=python, Ch 00000010
"""
LOADED = (
    "[80200.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Oct  8 03:22:07 2024"
)
GSP = (
    "] NVRM: Xid (PCI:0000:d1:00): 119, pid=41006, name=python, Timeout after 6s of waiting for RPC "
    "response from GPU6 GSP! Expected function 76 (GSP_RM_CONTROL) (0x2080a097 0x4)."
)
DOUBLE_BIT = """
[70000.1] NVRM: Xid (PCI:0000:61:00): 48, pid=41003, name=python, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 6, subpartition 0.
[70000.2] NVRM: Xid (PCI:0000:61:00): 63, pid=41003, name=python, Row Remapper: New row (0x1) marked for remapping, reset gpu to activate.
[70000.3] NVRM: Xid (PCI:0000:61:00): 94, pid=41003, name=python, Contained ECC error
[70000.4] NVRM: Xid (PCI:0000:61:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
"""
MISMATCH = """
[80111.0] NVRM: API mismatch: the client has the version 550.163.02, but
[80111.1] NVRM: this kernel module has the version 550.163.01.  Please
"""


def ones(path: str) -> str:
    """A device that answers every read with ones."""
    return (
        f"{path}/config =base64 {ONES}\n{path}/current_link_width = 63\n{path}/max_link_width = 63\n"
        f"{path}/current_link_speed = Unknown\n{path}/max_link_speed = Unknown\n"
    )


def bridge(address: str, path: str) -> str:
    """A port of a switch, or the root port above it."""
    at = f"/sys/devices/pci0000:10/{path}"
    return (
        f"/sys/bus/pci/devices/{address} -> ../../../devices/pci0000:10/{path}\n"
        f"{at}/uevent:\n|DRIVER=pcieport\n|PCI_CLASS=60400\n|PCI_ID=1000:C030\n"
        f"|PCI_SLOT_NAME={address}\n{at}/driver -> ../../../bus/pci/drivers/pcieport\n"
        f"{at}/max_link_speed = 32.0 GT/s PCIe\n{at}/max_link_width = 16\n"
        f"{at}/current_link_speed = 32.0 GT/s PCIe\n{at}/current_link_width = 16\n"
    )


ROOT, UP = "0000:10:01.0", "0000:10:01.0/0000:11:00.0"
DOWN = (f"{UP}/0000:12:00.0", f"{UP}/0000:12:01.0")


def behind_switch(index: int) -> str:
    """GPU 0 or 1 below the switch instead of below a root port of its own."""
    address = GPUS[index]
    text = pci_gpu(address).partition(f"/sys/bus/pci/devices/{address} ->")
    own = f"pci{root_port(address)[:7]}/{root_port(address)}/"
    return (text[1] + text[2]).replace(own, f"pci0000:10/{DOWN[index]}/")


SWITCHED = "".join(
    (
        bridge(ROOT, ROOT),
        bridge("0000:11:00.0", UP),
        *(bridge(path.rpartition("/")[2], path) for path in DOWN),
        *(behind_switch(index) for index in (0, 1)),
        *(pci_gpu(address) for address in GPUS[2:]),
    )
)
SWITCH_PATHS = (UP, *DOWN, *(f"{path}/{GPUS[index]}" for index, path in enumerate(DOWN)))
CONTAINER = (
    "/.dockerenv =\n/proc/self/cgroup = 0::/\n/proc/self/mounts = overlay / overlay rw 0 0\n"
)
REFUSED = "".join(f"/@access/dev/nvidia{name} !EPERM\n" for name in ("ctl", "-uvm", *range(8)))
WITHOUT_DRIVER = "".join(
    f"{line}\n"
    for line in BUS.splitlines()
    if "DRIVER=nvidia" not in line and "drivers/nvidia" not in line
)
HOT = (
    "Temperature.0 = 88\nClocksEventReasons = 0x48\nClockInfo.0-1 = 1215\n"
    "field.hw_thermal = ^0+600000000\nfield.75 = ^0+600000000\n"
)


@dataclass(frozen=True)
class Case:
    """A node and its first verdict; ``also`` are the codes of the others.

    ``says`` must match the whole summary; ``rules_out`` are beginnings of what is ruled out.
    """

    machine: Machine
    answer: str  # health, job impact, class, code, confidence
    culprits: tuple[Component, ...]
    says: str
    step: str
    victims: tuple[Component, ...] = ()
    rules_out: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    seen_in: tuple[str, ...] = field(default=())  # sources of the evidence


CASES = {
    # one fallen GPU, seen by everything: NVML has an index only, the neighbour has an app's Xid
    "fallen": Case(
        Machine("gpu_lost", kmsg=FALLEN, changes=ones(gpu_path(GPUS[4]))),
        "critical breaks hardware xid.off-bus proven",
        (gpu(4),),
        r"GPU 0000:9d:00\.0: Xid 79 \(GPU has fallen off the bus\) at 80111 s; driver asks for a "
        r"node reboot \(154: 0x2\); the other 7 of 8 GPUs answer",
        "Drain and power-cycle the node",
        rules_out=("gpu.off-bus on", "gpu.lost on", "kernel.aer on", "Xid 43 on 0000:c3:00.0"),
        seen_in=("kmsg", "nvml", "sysfs"),
    ),
    "fallen, two faults": Case(
        Machine(
            "include = gpu_lost.scn\n[gpu 2]\nCurrPcieLinkWidth = 8\n",
            kmsg=FALLEN,
            changes=trained(2, 8),
        ),
        "critical breaks hardware xid.off-bus proven",
        (gpu(4),),
        r".* the other 7 of 8 GPUs answer; also pcie\.width-trained-down",
        "Drain and power-cycle the node",
        also=("pcie.width-trained-down",),
    ),
    "fallen, unprivileged, no Xid to read": Case(
        Machine("gpu_lost", changes="/@euid = 1000\n/dev/kmsg !EPERM\n"),
        "critical breaks hardware gpu.lost proven",
        (gpu(4, uuid=False),),
        r"GPU 0000:9d:00\.0 is lost \(fallen off the bus\); 7 of 8 GPUs answer",
        "Drain and power-cycle the node",
        seen_in=("nvml", "sysfs"),
    ),
    "fallen and gone from the bus": Case(
        Machine(
            "include = h100x8_busy.scn\n[gpu 7]\nHandle = !GPU_IS_LOST\n",
            bus="".join(pci_gpu(address) for address in GPUS[:7]),
            kmsg=FALLEN.replace("9d:00", "df:00").replace("000000000004", "000000000007"),
        ),
        "critical breaks hardware xid.off-bus proven",
        (gpu(7),),
        r"GPU 0000:df:00\.0: Xid 79 .*; the other 7 of 8 GPUs answer",
        "Drain and power-cycle the node",
        rules_out=("gpu.lost on", "Xid 43 on 0000:c3:00.0"),
    ),
    "a switch of the fabric failed": Case(
        Machine(
            "nvlink_down",
            kmsg="[70000.1] nvidia-nvswitch2: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 40 LTSSM "
            "Fault Up",
        ),
        "critical breaks hardware sxid.fatal proven",
        (Component(type="link", host="gpu-a07", pci="0000:06:00.0", device="nvidia-nvswitch2"),),
        r"NVSwitch 2 \(0000:06:00\.0\): fatal SXid 20034 on link 40 at 70000 s",
        "Drain, then reset all GPUs and the switches together",
        victims=(structs.replace(gpu(2), type="nvlink", link=7),),
        rules_out=("nvlink.down on 0000:52:00.0 link 7",),
    ),
    "all links narrow: the slots are split": Case(
        Machine(
            "include = h100x8_busy.scn\nCurrPcieLinkWidth = 8\n",
            changes="".join(trained(index, 8) for index in range(8)),
        ),
        "warning slows configuration pcie.width-trained-down possible",
        (HOST,),
        r"GPU 0000:1b:00\.0: link to root port 0000:1a:01\.0 trained x8, both ends support x16; the "
        r"same on 7 more: .*",
        "Look at how the slots are split",
        victims=tuple(gpu(index) for index in range(8)),
    ),
    "fallen before the driver was loaded again": Case(
        Machine(kmsg=FALLEN + LOADED),
        "ok none no_fault node.fit proven",
        (),
        r"Nothing wrong found: \d+ rules passed on 8 of 8 GPUs .*",
        "",
        rules_out=("kernel.aer on", "Xid 79 on 0000:9d:00.0", "Xid 43 on 0000:c3:00.0"),
    ),
    "a switch takes two GPUs along": Case(
        Machine(
            "include = h100x8_busy.scn\n[gpu 0,1]\nHandle = !GPU_IS_LOST\n",
            bus=SWITCHED,
            changes="".join(ones(f"/sys/devices/pci0000:10/{path}") for path in SWITCH_PATHS),
        ),
        "critical breaks hardware gpu.off-bus proven",
        (Component(type="link", host="gpu-a07", pci="0000:11:00.0"),),
        r"switch port 0000:11:00\.0 has fallen off the bus: .* GPU 0000:1b:00\.0, "
        r"GPU 0000:43:00\.0 behind it read as ones; 6 other GPUs answer",
        "Drain the node and power-cycle it",
        victims=(
            gpu(0, uuid=False, in_nvml=False),
            gpu(1, uuid=False, in_nvml=False),
        ),
        seen_in=("nvml", "sysfs"),
    ),
    "the uplink of a switch is narrow": Case(
        Machine(
            bus=SWITCHED,
            changes="".join(
                f"/sys/devices/pci0000:10/{path}/current_link_width = 8\n" for path in (ROOT, UP)
            ),
        ),
        "warning slows hardware pcie.width-trained-down proven",
        (Component(type="link", host="gpu-a07", pci="0000:11:00.0"),),
        r"Switch uplink 0000:11:00\.0 to root port 0000:10:01\.0 trained x8, both ends support x16; "
        r"shared by GPU 0000:1b:00\.0, GPU 0000:43:00\.0",
        "Drain the node, reseat",
    ),
    "firmware hangs one GPU": Case(
        Machine("gpu_hung", kmsg=f"[80111.0{GSP}\n[80121.0{GSP}"),
        "critical breaks software xid.gsp likely",
        (gpu(6),),
        r"GPU 0000:d1:00\.0: Xid 119 .* 2 times from 80111 s; NVML calls to it do not return; .*; "
        r"the other 7 of 8 GPUs answer",
        "Start nothing here, and no further GPU tools",
        rules_out=("gpu.hung on 0000:d1:00.0",),
        seen_in=("kmsg", "nvml"),
    ),
    "firmware hangs the driver": Case(
        Machine("init_hung", kmsg=f"[80111.0{GSP}"),
        "critical breaks software xid.gsp likely",
        (gpu(6, uuid=False, in_nvml=False),),
        r"GPU 0000:d1:00\.0: Xid 119 .* at 80111 s; nvmlInit does not return; .*",
        "Start nothing here, and no further GPU tools",
        rules_out=("nvml.init-failed on",),
    ),
    # the driver and its permissions
    "the container lost its devices": Case(
        Machine("init_unknown", bus="", changes=CONTAINER + REFUSED, hide=("/dev/kmsg",)),
        "warning none configuration host.device-access proven",
        (HOST,),
        r"the device cgroup of the caller refuses /dev/nvidiactl \(EPERM\), 8 GPUs are on this "
        r"machine: container, not GPU",
        "Do not reboot: processes that hold the GPUs go on. Check the host from the host;",
        rules_out=("nvml.init-failed on",),
    ),
    "devices refused, nothing tells that it is a container": Case(
        Machine("init_unknown", changes=REFUSED),
        "warning none configuration host.device-access proven",
        (HOST,),
        r"the device cgroup of the caller refuses /dev/nvidiactl \(EPERM\), .*",
        "Do not reboot",
        rules_out=("nvml.init-failed on",),
    ),
    "driver packages upgraded without a reboot": Case(
        Machine(
            "version_mismatch",
            kmsg=MISMATCH,
            changes="/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> libnvidia-ml.so.550.163.02\n"
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.163.02 =\n",
        ),
        "critical none configuration host.driver-version-mismatch proven",
        (HOST,),
        r"kernel module is 550\.163\.01, library on disk is 550\.163\.02: new processes can't use "
        r"the GPUs",
        "Drain the node, then reboot it",
        rules_out=("nvml.init-failed on", "kernel.nvrm on"),
        seen_in=("file", "kmsg", "nvml", "procfs"),
    ),
    "no driver after a kernel upgrade": Case(
        Machine("driver_not_loaded", bus=WITHOUT_DRIVER, hide=("/proc/driver/nvidia",)),
        "critical breaks configuration gpu.no-driver proven",
        (HOST,),
        r"all 8 GPUs have no driver bound, a job needs nvidia",
        "modprobe nvidia",
        rules_out=("nvml.init-failed on",),
    ),
    "four of eight GPUs belong to others": Case(
        Machine("no_permission"),
        "ok none no_fault node.fit likely",
        (),
        r".* on 4 of 8 GPUs .*; 4 GPUs hidden from this user or container, not judged",
        "",
        rules_out=("gpu.missing on 0000:9d:00.0 and 3 more",),
    ),
    "unprivileged on a healthy node": Case(
        Machine(changes="/@euid = 1000\n/dev/kmsg !EPERM\n"),
        "unknown none cannot_tell node.cannot-tell possible",
        (),
        r"Nothing wrong seen, but \d+ rules could not judge \(.*; kernel: denied; .* 8 of 8 GPUs .*",
        "To settle it: run as root, or",
    ),
    # clocks, heat, power: what is shared is the host's
    "all GPUs too hot": Case(
        Machine("include = h100x8_busy.scn\n" + HOT),
        "warning slows hardware clocks.hw-thermal-slowdown likely",
        (HOST,),
        r"8 of 8 GPUs under hardware thermal slowdown at once \(up to \d+ % of 0\.\d s\): SM 1215 "
        r"MHz of 1980, .*: the node's cooling, not the GPUs",
        "Move the job off. Check the inlet air",
        victims=tuple(gpu(index) for index in range(8)),
        rules_out=("thermal.near-limit on",),
    ),
    "one GPU too hot, another narrow": Case(
        Machine(
            f"include = pcie_x8.scn\n[gpu 2]\n{HOT}",
            changes=trained(4, 8),
            kmsg=FALLEN.strip().splitlines()[-1],
        ),
        "warning slows hardware clocks.hw-thermal-slowdown proven",
        (gpu(2),),
        r"GPU 0000:52:00\.0 under hardware thermal slowdown \d+ % of 0\.\d s: SM 1215 MHz of 1980, "
        r"7 loaded siblings 1980; nothing found on the other 6 of 8 GPUs; also pcie\.width-.*",
        "Move the job off. Check fan, heat sink",
        rules_out=("thermal.near-limit on 0000:52:00.0 as", "Xid 43 on 0000:c3:00.0"),
        also=("pcie.width-trained-down",),
    ),
    "the chassis brakes all GPUs": Case(
        Machine("include = h100x8_busy.scn\nClocksEventReasons = 0x88\nClockInfo.0-1 = 990\n"),
        "warning slows hardware clocks.hw-power-brake likely",
        (HOST,),
        r"8 of 8 GPUs under power brake at once \(in both readings\): SM 990 MHz of 1980, .*: "
        r"chassis power, not the GPUs",
        "Read the power supplies' state",
    ),
    "all GPUs at their power limit under load": Case(
        Machine("h100x8_power_capped"),
        "ok none no_fault node.fit proven",
        (),
        r"Nothing wrong found: .*",
        "",
        rules_out=("clocks.sw-power-cap on 0000:1b:00.0 and 7 more",),
    ),
    "idle at Gen1": Case(
        Machine(
            "include = h100x8.scn\nCurrPcieLinkGeneration = 1\nPerformanceState = 8\n"
            "ClockInfo.0-1 = 210\n",
            changes="".join(trained(index, 16, "2.5") for index in range(8)),
        ),
        "ok none no_fault node.fit likely",
        (),
        r"Nothing wrong found: .*; all 8 GPUs idle \(P8\): clocks and link speed can't be judged at "
        r"rest",
        "To judge clocks, power and PCIe speed, check again under load",
        rules_out=(
            "clocks.low-without-reason on 0000:1b:00.0 and 7 more",
            "pcie.speed-trained-down on 0000:1b:00.0 and 7 more",
        ),
    ),
    # memory, fabric, network, applications
    "a double-bit error, remapped, the job may end": Case(
        Machine("remap_pending", kmsg=DOUBLE_BIT),
        "warning none hardware xid.memory-error proven",
        (gpu(3),),
        r"GPU 0000:61:00\.0: Xid 48 .* at 70000 s; DRAM; driver asks for drain and reset \(154: "
        r"0x4\); nothing found on the other 7 of 8 GPUs",
        "Let the job end, start nothing new here, then reset the GPU",
        rules_out=("memory.ecc-uncorrectable on", "memory.row-remap-pending on"),
    ),
    "the fabric manager is dead": Case(
        Machine(
            "fabric_in_progress",
            hide=("/proc/2211/", "/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service"),
        ),
        "critical breaks software host.fabric-manager proven",
        (HOST,),
        r"fabric manager does not run, 8 of 8 GPUs wait for it",
        "journalctl -u nvidia-fabricmanager -b says why",
        rules_out=("fabric.state on gpu-a07",),
    ),
    "the fabric manager died while one GPU joined": Case(
        Machine(
            "fabric_failed",
            hide=("/proc/2211/", "/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service"),
        ),
        "critical breaks software host.fabric-manager proven",
        (HOST,),
        r"fabric manager does not run, 1 of 8 GPUs could not register with it",
        "journalctl -u nvidia-fabricmanager -b says why",
        victims=(gpu(1),),
        rules_out=("fabric.state on 0000:43:00.0",),
    ),
    "a rail is down, a spare port is switched off": Case(
        Machine(ports=PORTS + port(7, "1: DOWN", "2: Polling") + port(8, "1: DOWN", "3: Disabled")),
        "warning slows configuration nic.port-down likely",
        (Component(type="nic", host="gpu-a07", pci="0000:07:00.0", device="mlx5_7", port=1),),
        r"Port mlx5_7/1 has no link: DOWN \(Polling\); 7 of 8 equal ports have a link",
        "Look at the other end",
        rules_out=("nic.port-down on mlx5_8/1",),
    ),
    "one application's fault thrice on one GPU": Case(
        Machine(
            kmsg="\n".join(
                f"[7{index}000.1] NVRM: Xid (PCI:0000:43:00): 31, pid=500{index}, name=python, "
                "Ch 00000001, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7f2c_00000000."
                for index in range(3)
            )
        ),
        "warning slows hardware xid.repeats-on-one-gpu possible",
        (gpu(1),),
        r"GPU 0000:43:00\.0: Xid 31 from 3 processes, limit 3; none on its 7 siblings; .*",
        "Run the same rank on another GPU",
    ),
}


@pytest.fixture(scope="module")
def machines(
    request: pytest.FixtureRequest,
    nvml: nvml_double.Double,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Machines]:
    """The machines of the selected tests, all read at once."""
    wanted = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    cases = {name: case.machine for name, case in CASES.items() if name in wanted}
    machines = Machines(cases, nvml, tmp_path_factory.mktemp("whole_nodes"))
    yield machines
    machines.close()


def replayed(snapshot: NodeSnapshot) -> Report:
    return report_of(msgspec.json.decode(msgspec.json.encode(snapshot), type=NodeSnapshot))


@pytest.mark.parametrize("name", CASES)
def test_whole_node(machines: Machines, name: str) -> None:
    case, snapshot = CASES[name], machines[name]
    report = report_of(snapshot)
    first, *others = report.verdicts
    assert (
        " ".join(
            (
                report.health.value,
                report.job_impact.value,
                first.fault_class.value,
                first.code,
                first.confidence.value,
            )
        )
        == case.answer
    ), [finding.summary for finding in report.findings]
    assert first.culprits == case.culprits
    assert re.fullmatch(case.says, first.summary), first.summary
    assert first.next_step.startswith(case.step)
    assert bool(first.next_step) is bool(case.step)
    assert first.victims == case.victims
    ruled_out = [item.what for item in first.ruled_out]
    for what in case.rules_out:
        assert any(item.startswith(what) for item in ruled_out), (what, ruled_out)
    assert tuple(verdict.code for verdict in others) == case.also
    assert set(case.seen_in) <= {item.source for item in first.evidence}

    assert exit_code(report.health, "nagios") == {"ok": 0, "warning": 1, "critical": 2}.get(
        report.health.value, 3
    )
    for verdict in report.verdicts:
        assert len(verdict.summary) <= 300
        assert verdict.evidence
        assert all(item.recheck for item in verdict.evidence)
        assert not set(verdict.victims) & set(verdict.culprits)
    assert replayed(snapshot) == report
