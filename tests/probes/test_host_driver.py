"""Driver versions, device files, peer memory, fabric manager: alarms, and tempting wrong ones."""

from __future__ import annotations

import pytest

from probes.finding import (
    Action,
    Confidence,
    FaultClass,
    JobImpact,
    Severity,
)
from probes.gap import Gap, GapReason
from probes.result import Health, Outcome
from probes.snapshot.gpu import Fabric, NvLink, NvmlSection
from probes.snapshot.host import DriverFacts, KernelModule
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciSection
from tests.support.hosts import (
    DRIVER,
    PROBES,
    devices,
    driver,
    fabric_manager,
    finding,
    gpu,
    gpus_on_bus,
    judge,
    node,
    notes,
    nvml_failed,
    rdma,
    section,
)

MISMATCH, ACCESS = "host.driver-version-mismatch", "host.device-access"
PERSISTENCE, PEERMEM, FABRIC = (
    "host.persistence",
    "host.peermem-missing",
    "host.fabric-manager",
)
OLD_MODULE = {"module_version": "570.86.10"}


def test_a_healthy_node_has_no_host_finding() -> None:
    snapshot = node(nics=rdma(), pci=gpus_on_bus(2, switches=4))
    for id in PROBES:
        assert judge(snapshot, id).findings == (), id


def test_an_upgrade_without_reboot_said_by_nvml() -> None:
    failed = nvml_failed("NVML_ERROR_LIB_RM_VERSION_MISMATCH", 18, "RM has detected an NVML/RM …")
    found = finding(node(section(driver=driver(**OLD_MODULE)), nvml=failed), MISMATCH)
    assert found.summary == (
        "kernel module is 570.86.10, library on disk is 570.86.15: new processes can't use the GPUs"
    )
    assert (found.severity, found.confidence, found.fault_class, found.job_impact) == (
        Severity.CRITICAL,
        Confidence.PROVEN,
        FaultClass.CONFIGURATION,
        JobImpact.NONE,
    )
    assert found.explains == ("nvml.init-failed", "kernel.nvrm", FABRIC)
    assert found.remedy is not None and found.remedy.action is Action.REBOOT
    assert [proof.locator for proof in found.evidence] == [
        "nvmlInit_v2",
        "/proc/driver/nvidia/version",
        "/usr/lib64/libnvidia-ml.so.570.86.15",
    ]


def test_an_upgrade_without_reboot_by_the_files_alone() -> None:
    found = finding(node(section(driver=driver(**OLD_MODULE)), nvml=None), MISMATCH)
    assert found.confidence is Confidence.LIKELY


def test_another_library_on_disk_while_nvml_works_is_no_fault() -> None:
    assert notes(node(section(driver=driver(**OLD_MODULE))), MISMATCH) == ()


def test_one_of_two_libraries_that_fits_is_enough() -> None:
    facts = driver(library_versions=("535.10.1", DRIVER), library_paths=("/a/x", "/b/y"))
    assert notes(node(section(driver=facts), nvml=None), MISMATCH) == ()


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (DriverFacts(gpu_addresses=()), "no NVIDIA kernel module is loaded"),
        (
            driver(library_versions=(), library_paths=()),
            "no libnvidia-ml with a version in its name is on the usual paths",
        ),
    ],
)
def test_mismatch_without_one_of_the_two(facts: DriverFacts, why: str) -> None:
    snapshot = node(section(driver=facts, modules=()), nvml=None)
    assert notes(snapshot, MISMATCH, Outcome.NOTAPPLICABLE) == (why,)


UNKNOWN_ERROR = nvml_failed("NVML_ERROR_UNKNOWN", 999, "Unknown Error")


def test_check_fails_in_container_the_case() -> None:
    """The container lost its devices to a systemd reload; the GPUs and the job are fine."""
    refused = devices(nvidiactl="EPERM", nvidia0="EPERM", nvidia1="EPERM", nvidia_uvm="EPERM")
    snapshot = node(section(driver=driver(devices=refused)), nvml=UNKNOWN_ERROR, container="docker")
    found = finding(snapshot, ACCESS)
    assert found.summary == (
        "the device cgroup of the caller refuses /dev/nvidiactl (EPERM), 2 GPUs are on this "
        "machine: container, not GPU"
    )
    assert (found.severity, found.confidence, found.fault_class, found.job_impact) == (
        Severity.WARNING,
        Confidence.PROVEN,
        FaultClass.CONFIGURATION,
        JobImpact.NONE,
    )
    assert found.explains == ("nvml.init-failed",)
    assert found.remedy is not None
    assert found.remedy.action is Action.RECONFIGURE
    assert found.remedy.text.startswith("Do not reboot: processes that hold the GPUs go on.")
    assert "daemon-reload" in found.remedy.text
    assert len(found.evidence) == 4
    # and versions do not differ
    assert notes(snapshot, MISMATCH) == ()


def test_a_user_outside_the_group_of_the_files() -> None:
    facts = driver(devices=devices(nvidiactl="EACCES", nvidia0="EACCES"))
    found = finding(node(section(driver=facts), nvml=UNKNOWN_ERROR), ACCESS)
    assert found.summary == (
        "the mode of the file refuses /dev/nvidiactl (EACCES), 2 GPUs are on this machine: "
        "permission, not GPU"
    )


def test_a_container_that_only_watches_is_info() -> None:
    facts = driver(devices=devices(nvidiactl="EPERM"))
    for failed in (None, nvml_failed("NVML_ERROR_LIBRARY_NOT_FOUND", 12)):
        evaluation = judge(node(section(driver=facts), nvml=failed), ACCESS)
        assert evaluation.findings[0].severity is Severity.INFO
        assert evaluation.health is Health.OK


def test_trap_30_some_gpus_not_granted_is_no_fault() -> None:
    facts = driver(devices=devices(nvidia1="EPERM"))
    assert notes(node(section(driver=facts)), ACCESS) == ("not granted here: /dev/nvidia1",)


def test_the_device_that_only_cuda_opens() -> None:
    facts = driver(devices=devices(nvidia_uvm="EPERM"))
    found = finding(node(section(driver=facts)), ACCESS)
    assert found.summary == (
        "the device cgroup of the caller refuses /dev/nvidia-uvm (EPERM), 2 GPUs are on this "
        "machine: container, not GPU"
    )
    # a driver that answers although its control device is refused: the files are not its own
    facts = driver(devices=devices(nvidia_uvm="EPERM", nvidiactl="EPERM"))
    assert notes(node(section(driver=facts)), ACCESS) == (
        "not granted here: /dev/nvidia-uvm, /dev/nvidiactl",
    )


def test_device_access_that_can_not_be_judged() -> None:
    facts = driver(devices=devices(nvidiactl="ENOENT"))  # listed in a copy, nobody asked access(2)
    evaluation = judge(node(section(driver=facts), nvml=UNKNOWN_ERROR), ACCESS)
    assert evaluation.results[0].outcome is Outcome.UNKNOWN
    assert evaluation.health is Health.OK
    bare = node(section(driver=driver(devices=())), nvml=UNKNOWN_ERROR)
    assert notes(bare, ACCESS, Outcome.NOTAPPLICABLE) == ("there is no /dev/nvidiactl here",)


def without_persistence(**changes: object) -> NodeSnapshot:
    gpus = NvmlSection(gpus=(gpu(0, persistence_mode=False), gpu(1)))
    return node(section(), nvml=gpus, **changes)


def test_trap_31_persistence_off_is_info_at_most() -> None:
    evaluation = judge(without_persistence(), PERSISTENCE)
    assert [(f.severity, f.summary) for f in evaluation.findings] == [
        (
            Severity.INFO,
            "persistence mode is off on 1 of 2 GPUs: the first call after a pause waits for them",
        )
    ]
    assert evaluation.health is Health.OK


def test_trap_31_persistence_daemon_container_and_guest() -> None:
    note = "persistence mode is off: start-up latency only, and the host decides"
    assert notes(without_persistence(container="docker"), PERSISTENCE) == (note,)
    slice_of_host = NvmlSection(gpus=(gpu(0, persistence_mode=False, virtualization_mode=2),))
    guest = node(section(), nvml=slice_of_host, virtualization="kvm")
    assert notes(guest, PERSISTENCE, Outcome.NOTAPPLICABLE) == (
        "vGPU guest: the host keeps the GPU up",
    )
    service = fabric_manager(name="nvidia-persistenced")
    snapshot = node(section(driver=driver(services=(service,))), nvml=without_persistence().nvml)
    assert notes(snapshot, PERSISTENCE) == (
        "nvidia-persistenced is running, which keeps the GPUs up",
    )


def peers(flavor: str | None, kernel: str = "6.8.0", *modules: str, **changes: object):  # type: ignore[no-untyped-def]
    return node(
        section(
            driver=driver(module_flavor=flavor),
            modules=tuple(KernelModule(name=name) for name in ("nvidia", *modules)),
        ),
        kernel_release=kernel,
        **{"nics": rdma(), **changes},
    )


def test_trap_40_dma_buf_replaces_peermem() -> None:
    assert notes(peers("open"), PEERMEM) == (
        "nvidia_peermem is not loaded: dma-buf replaces it (open module)",
    )


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem"])
def test_peermem_is_loaded(module: str) -> None:
    assert notes(peers("proprietary", "5.4.0-100", module), PEERMEM) == ()


def test_neither_peermem_nor_dma_buf() -> None:
    found = finding(peers("proprietary"), PEERMEM)
    assert found.summary == (
        "no GPUDirect RDMA: nvidia_peermem is not loaded and dma-buf is not to be had (proprietary "
        "module), 1 RDMA ports are active"
    )
    assert (found.severity, found.job_impact) == (Severity.WARNING, JobImpact.SLOWS)
    old = finding(peers("open", "5.4.0-100-generic"), PEERMEM)
    assert "(kernel 5.4.0-100-generic)" in old.summary


def test_peermem_where_it_does_not_matter() -> None:
    roce = judge(peers("proprietary", nics=rdma("Ethernet")), PEERMEM)
    assert roce.findings[0].severity is Severity.INFO
    assert notes(peers("proprietary", nics=rdma(state="DOWN")), PEERMEM, Outcome.NOTAPPLICABLE) == (
        "no RDMA port is active",
    )
    unknown = judge(peers(None), PEERMEM).results[0]
    assert (unknown.outcome, unknown.missing) == (
        Outcome.UNKNOWN,
        ("module_flavor: not-collected",),
    )


def fabric(
    state: int | None, *, switches: int = 4, service: object = None, **changes: object
) -> NodeSnapshot:
    gpus = NvmlSection(
        gpus=tuple(
            gpu(index, fabric=Fabric(state=state) if state is not None else None)
            for index in range(2)
        )
    )
    services = (service,) if service else ()
    return node(
        section(driver=driver(services=services)),
        **{"nvml": gpus, "pci": gpus_on_bus(2, switches=switches), **changes},
    )


STOPPED = fabric_manager(running=False, pid=None, seen_in="/proc/*/comm")
HIDDEN = fabric_manager(running=None, pid=None, seen_in=None, installed=False, version=None)


def test_fabric_manager_does_not_run_and_gpus_wait() -> None:
    found = finding(fabric(2, service=STOPPED), FABRIC)
    assert found.summary == "fabric manager does not run, 2 of 2 GPUs wait for it"
    assert (found.severity, found.fault_class, found.job_impact) == (
        Severity.CRITICAL,
        FaultClass.SOFTWARE,
        JobImpact.BREAKS,
    )
    assert found.explains == ("fabric.state", "nvml.init-failed")


def test_fabric_manager_of_another_version_can_not_run() -> None:
    service = fabric_manager(running=False, pid=None, version="570.124.06")
    found = finding(fabric(None, service=service), FABRIC)
    assert found.summary == (
        "fabric manager does not run, 4 NVSwitches are here; installed is 570.124.06, the driver is "
        "570.86.15"
    )
    assert (found.severity, found.fault_class) == (Severity.CRITICAL, FaultClass.CONFIGURATION)


def test_fabric_manager_gone_after_the_gpus_registered() -> None:
    found = finding(fabric(3, service=STOPPED), FABRIC)
    assert found.summary == (
        "fabric manager does not run, the GPUs are still registered from before"
    )
    assert (found.severity, found.job_impact) == (Severity.WARNING, JobImpact.NONE)


def test_fabric_manager_upgraded_under_a_running_one() -> None:
    found = finding(fabric(3, service=fabric_manager(version="570.124.06")), FABRIC)
    assert found.summary == (
        "fabric manager 570.124.06 is installed for driver 570.86.15: it won't start again"
    )
    assert found.severity is Severity.WARNING


def test_fabric_manager_runs() -> None:
    assert notes(fabric(3, service=fabric_manager()), FABRIC) == ()
    unknown_version = fabric_manager(version=None)
    assert notes(fabric(3, service=unknown_version), FABRIC) == ()


def test_fabric_manager_hidden_by_a_container() -> None:
    assert notes(fabric(3, service=HIDDEN), FABRIC) == (
        "the service can't be seen from here; every GPU is registered",
    )
    gap = Gap(source="host", reason=GapReason.DENIED, fields=("services",), detail="hidden")
    evaluation = judge(fabric(1, service=HIDDEN, gaps=(gap,)), FABRIC)
    assert evaluation.results[0].missing == ("services: denied (hidden)",)
    assert evaluation.health is Health.UNKNOWN


def test_trap_23_nodes_that_need_no_local_fabric_manager() -> None:
    none = "nothing says that there is an NVSwitch here"
    for state in (None, 0, 1):  # PCIe cards: not supported, or not started and nothing to join
        snapshot = fabric(state, switches=0, service=STOPPED)
        assert notes(snapshot, FABRIC, Outcome.NOTAPPLICABLE) == (none,)
    rack = Fabric(state=1, cluster_uuid="3c1f8f0e-0000-4000-8000-000000000001")
    for odd in (gpu(0, fabric=rack), gpu(0, fabric=Fabric(state=1), c2c_enabled=True)):
        snapshot = fabric(1, switches=0, service=STOPPED, nvml=NvmlSection(gpus=(odd,)))
        assert notes(snapshot, FABRIC, Outcome.NOTAPPLICABLE) == (
            "the NVLink switches of this rack have a fabric manager of their own",
        )
    guest = fabric(3, switches=0, service=STOPPED, virtualization="kvm")
    assert notes(guest, FABRIC, Outcome.NOTAPPLICABLE) == (
        "a guest without NVSwitch: the host runs the fabric manager",
    )


def test_switches_that_show_only_through_nvlink() -> None:
    """Newer boards have no NVSwitch on PCI; the links' remote end and an all-zero cluster tell."""
    fabric_info = Fabric(state=1, cluster_uuid="00000000-0000-0000-0000-000000000000")
    one = gpu(0, fabric=fabric_info, nvlinks=(NvLink(link=0, remote_type=2),))
    snapshot = fabric(1, switches=0, service=STOPPED, nvml=NvmlSection(gpus=(one,)))
    assert finding(snapshot, FABRIC).severity is Severity.CRITICAL


def test_nothing_of_the_driver_matters_without_gpus() -> None:
    host = section(driver=DriverFacts(gpu_addresses=(), devices=()), modules=())
    gap = Gap(source="nvml", reason=GapReason.ABSENT, detail="libnvidia-ml.so.1 does not load")
    snapshot = node(host, nvml=None, pci=PciSection(), gaps=(gap,))
    for id in (MISMATCH, ACCESS, PERSISTENCE, PEERMEM, FABRIC, "host.memlock-low"):
        evaluation = judge(snapshot, id)
        assert evaluation.results[0].outcome is Outcome.NOTAPPLICABLE, id
        assert evaluation.health is Health.OK
