"""The host collector on text trees and on this machine."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.access import check_access
from agent.collect.host import collect, resample
from agent.collect.identity import Identity, read_identity
from agent.fstree import format_fstree, parse_fstree
from agent.host import FixtureHost, LiveHost
from agent.recording import RecordingHost
from agent.tree import Refusal, TextTree
from probes.gap import Gap, GapReason
from probes.snapshot.host import (
    CallerLimits,
    Cgroup,
    CgroupLevel,
    CgroupReading,
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
    NumaNode,
    PackageThrottle,
    Pressure,
    ResourceLimit,
    Service,
)

HGX = (Path(__file__).parent.parent / "fixtures" / "host_hgx.fstree").read_text()
FILES = parse_fstree(HGX).epochs[0]
SECOND = 1_000_000_000


def tree(text: str) -> FixtureHost:
    return FixtureHost(parse_fstree(text))


def section_of(text: str) -> tuple[HostSection, tuple[Gap, ...]]:
    section, gaps = collect(tree("/proc/stat = cpu  1 0 0 1 0 0 0 0\n" + text))
    assert section is not None
    return section, gaps


def gap_of(gaps: tuple[Gap, ...], field: str) -> Gap:
    return next(gap for gap in gaps if field in gap.fields)


def test_a_whole_node_with_two_readings() -> None:
    host = tree(HGX)
    section, gaps = collect(host)
    assert section is not None
    host.sleep(2.0)
    section, later_gaps = resample(host, section)
    throttle = (
        PackageThrottle(package=0, package_count=7, package_ms=90, core_count=5, core_max_ms=12),
        PackageThrottle(
            package=1, package_count=0, package_ms=None, core_count=0, core_max_ms=None
        ),
    )
    first = HostReading(
        at_ns=1000 * SECOND,
        cpu=CpuReading(
            mhz=(800, 3500, 800, 3500),
            busy_ticks=(100, 100, 100, 100),
            total_ticks=(1000, 1000, 1000, 1000),
        ),
        throttle=throttle,
        load_1m=12.05,
        load_5m=8.08,
        cpu_pressure=Pressure(
            some_avg10_percent=1.53,
            some_avg60_percent=0.87,
            some_total_us=6900871,
            full_avg10_percent=0.0,
            full_avg60_percent=0.0,
            full_total_us=0,
        ),
        io_pressure=Pressure(
            some_avg10_percent=0.0,
            some_avg60_percent=0.0,
            some_total_us=10,
            full_avg10_percent=0.0,
            full_avg60_percent=0.0,
            full_total_us=9,
        ),
        memory_available_bytes=900000000 * 1024,
        swap_free_bytes=7000000 * 1024,
        pages_swapped_in=1000,
        pages_swapped_out=4000,
    )
    assert section == HostSection(
        cpu_count=4,
        cpu=CpuFacts(
            online=(0, 1, 2, 3),
            model="Invented(R) Xeon(R) 8480",
            sockets=2,
            numa_nodes=(
                NumaNode(node=0, cpulist="0-1"),
                NumaNode(node=1),
            ),
            policies=(
                CpuPolicy(
                    cpus=(0, 1),
                    driver="intel_pstate",
                    governor="powersave",
                    min_mhz=800,
                    max_mhz=3800,
                    hardware_max_mhz=3800,
                    base_mhz=2000,
                ),
                CpuPolicy(cpus=(2, 3), driver="intel_pstate", governor="performance"),
            ),
        ),
        memory_total_bytes=1056000000 * 1024,
        swap_total_bytes=8000000 * 1024,
        shared_memory=FileSystem(
            path="/dev/shm",
            type="tmpfs",
            options="rw,nosuid,nodev",
            size_bytes=540000000000,
            free_bytes=539000000000,
        ),
        file_systems=(
            FileSystem(
                path="/",
                type="ext4",
                options="rw,relatime",
                size_bytes=900000000000,
                free_bytes=400000000000,
            ),
        ),
        limits=CallerLimits(
            memlock_bytes=ResourceLimit(),
            nofile=ResourceLimit(soft=1024, hard=524288),
            can_exceed_memlock=True,
        ),
        cgroup=Cgroup(version=2, cgroup_path="/system.slice/cron.service", cpuset="0-3"),
        clock=Clock(
            synchronized=True,
            status_bits=8193,
            estimated_error_us=210,
            clocksource="tsc",
            available_clocksources=("tsc", "hpet", "acpi_pm"),
        ),
        modules=(
            KernelModule(name="nvidia", version="570.86.15", taint="OE"),
            KernelModule(name="nvidia_uvm"),
        ),
        driver=DriverFacts(
            module_version="570.86.15",
            module_flavor="open",
            library_paths=("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.86.15",),
            library_versions=("570.86.15",),
            gpu_addresses=("0000:17:00.0", "0000:3b:00.0"),
            devices=tuple(
                DeviceNode(path=f"/dev/{name}")
                for name in ("nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl")
            ),
            peer_memory_clients=("nvidia-peermem",),
            services=(
                Service(
                    name="nvidia-fabricmanager",
                    running=True,
                    pid=2211,
                    seen_in="/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.procs",
                    installed=True,
                    version="570.86.15",
                ),
                Service(
                    name="nvidia-persistenced",
                    running=True,
                    pid=2300,
                    seen_in="/run/nvidia-persistenced/nvidia-persistenced.pid",
                    installed=True,
                ),
                Service(name="nvidia-imex", running=False, seen_in="/proc/*/comm", installed=False),
            ),
        ),
        readings=(
            first,
            msgspec.structs.replace(
                first,
                at_ns=1002 * SECOND,
                cpu=CpuReading(
                    mhz=(800, 3500, 800, 3500),
                    busy_ticks=(100, 300, 100, 290),
                    total_ticks=(1200, 1200, 1200, 1200),
                ),
                pages_swapped_in=3000,
            ),
        ),
    )
    # no memory pressure in this kernel, one policy without governor, one NUMA node without CPU list
    assert [(gap.reason, gap.fields, gap.devices) for gap in gaps] == [
        (GapReason.ABSENT, ("cpulist",), ("node1",)),
        (GapReason.MALFORMED, ("governor",), ("policy3",)),
        (GapReason.UNSUPPORTED, ("memory_pressure",), ()),
    ]
    assert [(gap.reason, gap.fields) for gap in later_gaps] == [
        (GapReason.UNSUPPORTED, ("memory_pressure",))
    ]


def test_identity_of_bare_metal() -> None:
    assert read_identity(tree(HGX)) == Identity(
        host="gpu-a07",
        boot_id="0b6f8f3a-5d3c-4a59-9f2e-1d0f7c1e2a3b",
        kernel_release="6.8.0-52-generic",
        uptime_s=86400.25,
        virtualization=None,
        container=None,
        privileged=True,
        gaps=(),
    )


X86_GUEST = "/proc/cpuinfo:\n|processor : 0\n|flags : fpu hypervisor\n"
X86_METAL = "/proc/cpuinfo:\n|processor : 0\n|flags : fpu vme\n"
ARM = "/proc/cpuinfo:\n|processor : 0\n|BogoMIPS : 2000.00\n"
DMI = "/sys/class/dmi/id/sys_vendor = "
CLOCKS = "/sys/devices/system/clocksource/clocksource0/available_clocksource = "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (X86_METAL + DMI + "Amazon EC2\n", None),  # an i4i.metal says so too
        (X86_GUEST + DMI + "Amazon EC2\n", "amazon"),
        (X86_GUEST + DMI + "QEMU\n", "kvm"),
        (X86_GUEST + CLOCKS + "tsc kvm-clock\n", "kvm"),
        (X86_GUEST + CLOCKS + "hyperv_clocksource_tsc_page acpi_pm\n", "microsoft"),
        (X86_GUEST + "/sys/hypervisor/type = xen\n", "xen"),
        (X86_GUEST, "unknown"),
        (ARM, None),
        (ARM + DMI + "QEMU\n", "kvm"),
        (ARM + DMI + "Amazon EC2\n/sys/class/dmi/id/product_name = c7gd.metal\n", None),
        (ARM + "/proc/device-tree/hypervisor/compatible = linux,kvm\n", "kvm"),
        ("/proc/sys/kernel/osrelease = 5.15.153.1-microsoft-standard-WSL2\n", "wsl"),
    ],
)
def test_virtualization(text: str, expected: str | None) -> None:
    assert read_identity(tree(text)).virtualization == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/proc/self/cgroup = 0::/kubepods.slice/kubepods-pod1.slice/cri-1.scope\n", "kubernetes"),
        ("/var/run/secrets/kubernetes.io/serviceaccount/token =\n", "kubernetes"),
        ("/proc/self/cgroup = 4:memory:/docker/4f1d\n", "docker"),
        ("/proc/self/cgroup = 0::/machine.slice/libpod-4f1d.scope\n", "podman"),
        ("/proc/self/cgroup = 0::/system.slice/containerd.service\n", None),
        ("/run/systemd/container = systemd-nspawn\n", "systemd-nspawn"),
        ("/run/.containerenv =\n", "podman"),
        ("/.dockerenv =\n/proc/1/comm = python\n", "docker"),
        # all processes of the host are seen, yet the root is a container's (--pid=host)
        (
            "/.dockerenv =\n/proc/2/comm = kthreadd\n/proc/self/mounts = overlay / overlay rw 0 0\n",
            "docker",
        ),
        # a machine that was installed from an image keeps the image's mark
        (
            "/.dockerenv =\n/proc/2/comm = kthreadd\n/proc/self/mounts = /dev/vda / ext4 rw 0 0\n",
            None,
        ),
        ("/proc/2/comm = kthreadd\n", None),
    ],
)
def test_container(text: str, expected: str | None) -> None:
    assert read_identity(tree(text)).container == expected


def test_a_container_that_mounts_the_hosts_root_takes_the_hosts_name() -> None:
    text = "/proc/sys/kernel/hostname = laggard-x7d\n/etc/hostname = gpu-a07\n"
    assert read_identity(tree(text)).host == "laggard-x7d"
    pod = text + "/proc/self/cgroup = 0::/kubepods/pod1\n"
    assert read_identity(tree(pod)).host == "gpu-a07"


def test_nothing_to_read_is_said() -> None:
    identity = read_identity(tree("/@euid = 1000\n"))
    assert (identity.host, identity.boot_id, identity.privileged) == ("unknown", None, False)
    assert identity.gaps == (
        Gap(
            source="host",
            reason=GapReason.ABSENT,
            fields=("uptime_s",),
            detail="/proc/uptime: No such file or directory",
        ),
        Gap(
            source="host",
            reason=GapReason.ABSENT,
            fields=("host",),
            detail="/proc/sys/kernel/hostname, /etc/hostname: No such file or directory",
        ),
        Gap(
            source="host",
            reason=GapReason.ABSENT,
            fields=("boot_id",),
            detail="/proc/sys/kernel/random/boot_id: No such file or directory",
        ),
        Gap(
            source="host",
            reason=GapReason.ABSENT,
            fields=("kernel_release",),
            detail="/proc/sys/kernel/osrelease: No such file or directory",
        ),
    )
    section, gaps = collect(tree("/etc/hostname = gpu-a07\n"))
    assert section is None
    assert gaps == (
        Gap(source="host", reason=GapReason.ABSENT, detail="/proc: No such file or directory"),
    )


def test_refused_files_are_gaps_and_hide_nothing_else() -> None:
    section, gaps = section_of(
        "/proc/meminfo !EACCES\n/proc/self/limits !EACCES\n/proc/loadavg = 1.00 2.00 3.00 1/2 3\n"
        "/proc/pressure/cpu = what is this\n/dev/shm/\n"
    )
    assert section.readings[0].load_1m == 1.0
    assert section.memory_total_bytes is None
    assert gap_of(gaps, "memory_total_bytes").reason is GapReason.DENIED
    assert gap_of(gaps, "limits").reason is GapReason.DENIED
    assert gap_of(gaps, "cpu_pressure").reason is GapReason.MALFORMED
    assert gap_of(gaps, "shared_memory").devices == ("/dev/shm",)


V2_POD = """\
/sys/fs/cgroup/cgroup.controllers = cpu memory
/proc/self/cgroup = 0::/pod/main
/sys/fs/cgroup/pod/main/cpu.max = 400000 100000
/sys/fs/cgroup/pod/main/cpu.stat:
|usage_usec 100
|nr_periods 50
|nr_throttled 20
|throttled_usec 900000
/sys/fs/cgroup/pod/main/memory.max = max
/sys/fs/cgroup/pod/main/cpuset.cpus.effective = 0-3
/sys/fs/cgroup/pod/cpu.max = max 100000
/sys/fs/cgroup/pod/memory.max = 8589934592
/sys/fs/cgroup/pod/memory.current = 8000000000
/sys/fs/cgroup/pod/memory.stat:
|anon 1000
|inactive_file 6000000000
/sys/fs/cgroup/pod/memory.events:
|oom 2
|oom_kill 1
"""


def test_cgroup_v2_counts_every_level_that_limits() -> None:
    section, gaps = section_of(V2_POD)
    assert section.cgroup == Cgroup(
        version=2,
        cgroup_path="/pod/main",
        levels=(
            CgroupLevel(cgroup_path="/sys/fs/cgroup/pod/main", cpu_quota=4.0),
            CgroupLevel(cgroup_path="/sys/fs/cgroup/pod", memory_max_bytes=8 << 30),
        ),
        cpuset="0-3",
    )
    assert section.readings[0].cgroups == (
        CgroupReading(
            cgroup_path="/sys/fs/cgroup/pod/main",
            periods=50,
            throttled_periods=20,
            throttled_us=900000,
        ),
        CgroupReading(
            cgroup_path="/sys/fs/cgroup/pod",
            memory_current_bytes=8000000000,
            memory_inactive_file_bytes=6000000000,
            oom_kills=1,
        ),
    )
    assert not [gap for gap in gaps if "cgroup" in gap.fields or "cgroups" in gap.fields]


V1_DOCKER = """\
/proc/self/cgroup:
|4:memory:/docker/4f1d
|1:cpu,cpuacct:/docker/4f1d
/sys/fs/cgroup/cpu/cpu.cfs_quota_us = 200000
/sys/fs/cgroup/cpu/cpu.cfs_period_us = 100000
/sys/fs/cgroup/cpu/cpu.stat:
|nr_periods 10
|nr_throttled 1
|throttled_time 5000000
/sys/fs/cgroup/memory/memory.limit_in_bytes = 1073741824
/sys/fs/cgroup/memory/memory.usage_in_bytes = 500000000
/sys/fs/cgroup/memory/memory.stat:
|inactive_file 1
|total_inactive_file 100000000
/sys/fs/cgroup/memory/memory.oom_control:
|oom_kill_disable 0
|oom_kill 3
"""


def test_cgroup_v1_in_a_container_is_read_at_the_mount() -> None:
    section, _ = section_of(V1_DOCKER)
    assert section.cgroup == Cgroup(
        version=1,
        cgroup_path="/docker/4f1d",
        levels=(
            CgroupLevel(cgroup_path="/sys/fs/cgroup/cpu", cpu_quota=2.0),
            CgroupLevel(cgroup_path="/sys/fs/cgroup/memory", memory_max_bytes=1 << 30),
        ),
    )
    assert section.readings[0].cgroups == (
        CgroupReading(
            cgroup_path="/sys/fs/cgroup/cpu", periods=10, throttled_periods=1, throttled_us=5000
        ),
        CgroupReading(
            cgroup_path="/sys/fs/cgroup/memory",
            memory_current_bytes=500000000,
            memory_inactive_file_bytes=100000000,
            oom_kills=3,
        ),
    )


def test_clocks_of_arm_come_from_cpufreq() -> None:
    section, _ = section_of(
        "/proc/cpuinfo:\n|processor : 0\n|processor : 1\n"
        "/sys/devices/system/cpu/cpufreq/policy0/affected_cpus = 0 1\n"
        "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor = performance\n"
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq = 3000000\n"
        "/sys/devices/system/cpu/cpu1/cpufreq/cpuinfo_avg_freq = 3100000\n"
        "/sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq = 1000000\n"
    )
    assert section.readings[0].cpu == CpuReading(mhz=(3000, 3100))


DRIVER = (
    "/proc/driver/nvidia/version = NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.05  x\n"
)


def test_services_in_a_container_are_hidden_and_said_to_be() -> None:
    section, gaps = section_of(DRIVER + "/proc/1/comm = python\n")
    assert [service.running for service in section.driver.services] == [None, None, None]
    assert gap_of(gaps, "services") == Gap(
        source="host",
        reason=GapReason.DENIED,
        fields=("services",),
        detail="nvidia-fabricmanager, nvidia-persistenced, nvidia-imex: not among the processes "
        "seen here, and the host's are hidden",
        allow="run on the host, or in a container with --pid=host (hostPID: true)",
    )


def test_services_of_a_driver_container_are_found_by_name() -> None:
    section, gaps = section_of(
        DRIVER + "/proc/2/comm = kthreadd\n/proc/811/comm = nv-fabricmanage\n"
        "/run/nvidia-persistenced/nvidia-persistenced.pid = 812\n/proc/812/comm = bash\n"
    )
    found = {service.name: (service.running, service.pid) for service in section.driver.services}
    assert found == {
        "nvidia-fabricmanager": (True, 811),
        "nvidia-persistenced": (False, None),  # the pid file is stale
        "nvidia-imex": (False, None),
    }
    assert not [gap for gap in gaps if "services" in gap.fields]


def test_without_a_driver_no_service_is_looked_for() -> None:
    section, _ = section_of("/proc/2/comm = kthreadd\n")
    assert section.driver == DriverFacts(gpu_addresses=(), devices=None)


def test_device_files_are_asked_for_and_not_opened() -> None:
    section, _ = section_of(
        "/dev/nvidiactl !EIO\n/dev/nvidia0 !EIO\n/dev/nvidia-modeset !EIO\n/dev/null =\n"
        "/@access/dev/nvidiactl !EPERM\n/@access/dev/nvidia0 = ok\n"
    )
    assert section.driver.devices == (
        DeviceNode(path="/dev/nvidia0"),
        DeviceNode(path="/dev/nvidiactl", access_error="EPERM"),
    )


def test_flavor_follows_from_the_taint_where_the_version_file_is_missing() -> None:
    modules = (
        "/proc/modules = nvidia 1 0 - Live 0x0 (POE)\n/sys/module/nvidia/version = 550.54.15\n"
    )
    for taint, flavor in (("POE", "proprietary"), ("OE", "open")):
        section, _ = section_of(modules + f"/sys/module/nvidia/taint = {taint}\n")
        assert section.driver.module_version == "550.54.15"
        assert section.driver.module_flavor == flavor


def test_a_recording_gives_the_same_section_again() -> None:
    recorder = RecordingHost(LiveHost())
    section, gaps = collect(recorder)
    assert section is not None
    replayed, replayed_gaps = collect(FixtureHost(parse_fstree(format_fstree(recorder.tree))))
    assert replayed is not None
    same_time = msgspec.structs.replace(section.readings[0], at_ns=replayed.readings[0].at_ns)
    assert replayed == msgspec.structs.replace(section, readings=(same_time,))
    assert replayed_gaps == gaps


@given(
    path=st.sampled_from(sorted(p for p in FILES if not p.startswith("/@time"))),
    content=st.one_of(
        st.binary(max_size=80),
        st.from_regex(r"[0-9]{1,30}( [0-9a-z=.:-]{1,30}){0,5}\n", fullmatch=True).map(str.encode),
        st.sampled_from([Refusal(errno.EACCES), Refusal(errno.EIO), Refusal(errno.ETIMEDOUT)]),
    ),
)
@settings(max_examples=200, deadline=None)
def test_one_bad_file_never_stops_the_rest(path: str, content: bytes | Refusal) -> None:
    bad = TextTree([{**FILES, path: content}])
    section, _ = collect(FixtureHost(bad))
    assert section is not None
    section, _ = resample(FixtureHost(bad), section)
    read_identity(FixtureHost(bad))
    assert msgspec.json.decode(msgspec.json.encode(section), type=HostSection) == section


def test_live_here() -> None:
    host = LiveHost()
    section, _ = collect(host)
    assert section is not None
    section, _ = resample(host, section)
    assert section.cpu_count == len(section.cpu.online) > 0
    assert section.memory_total_bytes is not None and section.memory_total_bytes > 1 << 28
    assert len(section.readings) == 2
    assert section.readings[0].at_ns < section.readings[1].at_ns
    assert read_identity(host).host == os.uname().nodename


def test_access_says_why_and_opens_nothing(tmp_path: Path) -> None:
    check_access("/dev/null")
    with pytest.raises(FileNotFoundError):
        check_access(str(tmp_path / "nothing"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a device node and a control group")
def test_access_sees_the_device_cgroup(tmp_path: Path) -> None:
    """The claim that host.device-access rests on: EPERM without open(2)."""
    root = Path("/sys/fs/cgroup/devices")
    if not os.access(root / "tasks", os.W_OK):
        pytest.skip("no writable version 1 device control group")
    group, node = root / f"laggard-test-{os.getpid()}", tmp_path / "null"
    os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    group.mkdir()
    try:
        check_access(str(node))
        (group / "devices.deny").write_text("c 1:3 rwm")
        child = os.fork()
        if child == 0:
            (group / "tasks").write_text(str(os.getpid()))
            try:
                check_access(str(node))
            except OSError as error:
                os._exit(error.errno or 255)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1  # EPERM
    finally:
        group.rmdir()
