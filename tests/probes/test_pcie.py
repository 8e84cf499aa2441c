"""PCIe links against both their ends, slots, uplinks, siblings and the manifest."""

from collections.abc import Mapping
from typing import Any

import pytest

from probes.finding import Component, Confidence, FaultClass, JobImpact, Severity
from probes.node.pcie import width_trained_down
from probes.node.pcie_peers import manifest_generation, manifest_width, peer_differs
from probes.node.pcie_slot import slot_limited, upstream_bottleneck
from probes.node.pcie_speed import speed_drop_under_load, speed_trained_down
from probes.registry import Probe
from probes.result import Outcome
from probes.snapshot.gpu import Gpu, GpuState
from probes.snapshot.manifest import Manifest
from probes.snapshot.nic import NicPort, NicSection
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice, PciSection
from tests.support.pci_nodes import (
    BUSY,
    FIXTURES,
    IDLE,
    bridge,
    device,
    gpu,
    judge,
    nic,
    notes,
    read,
    snapshot,
    summaries,
)

LINK_RULES = (
    width_trained_down, speed_trained_down, speed_drop_under_load, slot_limited,
    upstream_bottleneck, peer_differs,
)  # fmt: skip
GPU = "0000:17:00.0"
ROOT = "0000:16:01.0"


def card(**changes: Any) -> tuple[PciDevice, ...]:
    """A GPU below a root port; the port's maximum is Gen5 x16."""
    port = {key: changes[key] for key in ("speed", "width") if key in changes}
    return (bridge(ROOT, **port), device(GPU, ROOT, **changes))


def silent(node: NodeSnapshot, *but: Probe) -> None:
    """No rule about links speaks, but these."""
    for item in LINK_RULES:
        if item not in but:
            assert summaries(item, node) == [], item.id


# --- whole machines ---


def gpus_of(
    section: PciSection, load: Mapping[str, int] = BUSY, generation: int = 5
) -> tuple[Gpu, ...]:
    return tuple(
        gpu(
            item.address,
            index,
            load=load,
            generation=generation,
            width=item.readings[-1].current_link_width_lanes,
        )
        for index, item in enumerate(d for d in section.devices if d.is_nvidia_gpu)
    )


def test_a_healthy_machine_is_clean() -> None:
    section, gaps = read("pci-hgx-h100")
    node = snapshot(section, gpus_of(section), gaps=gaps)
    silent(node)
    for item in LINK_RULES:
        assert judge(item, node)[0].outcome is Outcome.PASS, item.id
    assert judge(width_trained_down, node)[0].judged == 20
    assert notes(upstream_bottleneck, node) == tuple(
        f"0000:{bus}:00.0: 4 devices share it, by design" for bus in ("16", "38", "98", "b8")
    )


def test_a_gpu_link_that_came_up_narrow() -> None:
    section, gaps = read("pci-gpu-x8")
    node = snapshot(section, gpus_of(section), gaps=gaps)
    (finding,) = judge(width_trained_down, node)[1]
    assert finding.summary == (
        "GPU 0000:18:00.0: link to switch port 0000:17:00.0 trained x8, both ends support x16"
    )
    assert (finding.severity, finding.confidence, finding.fault_class, finding.job_impact) == (
        Severity.WARNING, Confidence.PROVEN, FaultClass.HARDWARE, JobImpact.SLOWS,
    )  # fmt: skip
    assert finding.component == Component(
        type="gpu", host="n07", pci="0000:18:00.0", index=0,
        gpu_uuid="GPU-00000000-0000-0000-0000-000000000000",
    )  # fmt: skip
    assert [
        (item.locator, item.observed, item.expected and item.expected.value)
        for item in finding.evidence
    ] == [
        ("/sys/bus/pci/devices/0000:18:00.0/current_link_width", 8, 16),
        ("/sys/bus/pci/devices/0000:18:00.0/max_link_width", 16, None),
        ("/sys/bus/pci/devices/0000:17:00.0/max_link_width", 16, None),
        ("nvmlDeviceGetCurrPcieLinkWidth", 8, 16),
    ]
    assert all(item.recheck for item in finding.evidence)
    silent(node, width_trained_down)  # one fault, one finding


def test_an_uplink_that_came_up_narrow_is_named_with_who_shares_it() -> None:
    section, gaps = read("pci-uplink-x8")
    node = snapshot(section, gpus_of(section), gaps=gaps)
    (finding,) = judge(width_trained_down, node)[1]
    assert finding.component == Component(type="link", host="n07", pci="0000:16:00.0")
    assert finding.confidence is Confidence.PROVEN
    assert finding.summary == (
        "Switch uplink 0000:16:00.0 to root port 0000:15:01.0 trained x8, both ends support x16; "
        "shared by GPU 0000:18:00.0, GPU 0000:19:00.0, NIC 0000:1a:00.0"
    )
    silent(node, width_trained_down)


def test_between_the_ports_of_one_switch_there_is_no_link() -> None:
    # The downstream port is x16, the upstream port behind it x8: two links, not one.
    devices = (
        bridge("0000:15:01.0", width=8, max_width=8),
        bridge("0000:16:00.0", "0000:15:01.0", width=8, max_width=8),
        bridge("0000:17:00.0", "0000:16:00.0"),
        device("0000:18:00.0", "0000:17:00.0"),
    )
    node = snapshot(devices, (gpu("0000:18:00.0"),))
    assert summaries(width_trained_down, node) == []
    assert summaries(upstream_bottleneck, node) == [
        (
            "Switch uplink 0000:16:00.0 to root port 0000:15:01.0 has Gen5 x8 at most, "
            "GPU 0000:18:00.0 behind it Gen5 x16; shared by GPU 0000:18:00.0"
        )
    ]


def test_copied_files_are_judged_by_the_siblings() -> None:
    section, gaps = read("pci-copied", readings=1)
    node = snapshot(section, None, gaps=gaps)
    (finding,) = judge(width_trained_down, node)[1]
    assert finding.summary == (
        "GPU 0000:31:00.0: link trained x8, it supports x16, the median of its 3 siblings is x16"
    )
    assert finding.confidence is Confidence.LIKELY
    assert finding.evidence[-1].quote == "RxErr 1842 BadDLLP 921 TOTAL_ERR_COR 2763"


def test_no_machine_makes_a_rule_fail_or_talk_too_long() -> None:
    for path in FIXTURES.glob("pci-*.fstree"):
        if path.stem != "pci-container":
            section, gaps = read(path.stem)
            for gpus in (None, gpus_of(section)):
                for item in LINK_RULES:
                    for summary in summaries(item, snapshot(section, gpus, gaps=gaps)):
                        assert len(summary) <= 200


# --- the traps of the reference's section B.6 ---


def test_trap_01_low_generation_at_rest_is_power_saving() -> None:
    section, gaps = read("pci-idle-gen1")
    node = snapshot(section, gpus_of(section, IDLE, generation=1), gaps=gaps)
    silent(node)
    assert notes(speed_trained_down, node)[0] == (
        "0000:05:00.0: idle-shrunk to Gen1 of Gen4: re-measure under load"
    )


def test_trap_01_one_idle_reading_is_enough_to_excuse() -> None:
    node = snapshot(card(speed=2.5), (gpu(GPU, generation=1, load=IDLE),))
    assert summaries(speed_trained_down, node) == []


def test_trap_01_a_desktop_in_p8_is_not_at_work() -> None:
    drawing = BUSY | {"utilization_gpu_percent": 3, "pstate": 8}
    node = snapshot(card(speed=2.5), (gpu(GPU, generation=1, load=drawing),))
    assert summaries(speed_trained_down, node) == []


def test_trap_02_low_generation_under_load_is_a_fault() -> None:
    node = snapshot(card(speed=5.0), (gpu(GPU, generation=2),))
    (finding,) = judge(speed_trained_down, node)[1]
    assert finding.summary == (
        f"GPU {GPU}: link to root port {ROOT} runs at Gen2 under load, both ends support Gen5"
    )
    assert (finding.severity, finding.confidence) == (Severity.WARNING, Confidence.PROVEN)
    assert [item.observed for item in finding.evidence] == [5.0, 32.0, 32.0, 2, 98]


def test_trap_02_whether_it_is_busy_has_to_be_known() -> None:
    unknown = {"utilization_gpu_percent": None, "pstate": None, "clocks_event_reasons": None}
    node = snapshot(card(speed=5.0), (gpu(GPU, generation=2, load=unknown),))
    result, findings = judge(speed_trained_down, node)
    assert findings == ()
    assert result.outcome is Outcome.UNKNOWN
    assert result.missing == (f"utilization_gpu_percent of {GPU}: not-collected",)


def test_trap_03_a_slot_with_fewer_lanes_is_no_fault() -> None:
    section, gaps = read("pci-slot-x8")
    gpus = gpus_of(section, generation=4)
    node = snapshot(section, gpus, gaps=gaps)
    silent(node, slot_limited)
    (finding,) = judge(slot_limited, node)[1]
    assert finding.summary == (
        "GPU 0000:b1:00.0 sits in a slot that gives x8 of x16 (siblings with a better slot: 1)"
    )
    assert (finding.severity, finding.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)
    assert "speed of slot 7" in (finding.remedy.text if finding.remedy else "")


def test_trap_03_when_all_slots_are_alike_it_is_the_design() -> None:
    devices = tuple(
        item
        for bus in ("16", "36")
        for item in (
            bridge(f"0000:{bus}:01.0", max_width=8, width=8),
            device(f"0000:{int(bus) + 1}:00.0", f"0000:{bus}:01.0", width=8),
        )
    )
    node = snapshot(devices, tuple(gpu(at, width=8) for at in ("0000:17:00.0", "0000:37:00.0")))
    silent(node, slot_limited)
    for finding in judge(slot_limited, node)[1]:
        assert (finding.severity, finding.job_impact) == (Severity.INFO, JobImpact.NONE)
        assert "gives x8 of x16 (as built: not trained down)" in finding.summary


def test_trap_03_a_card_with_four_lanes_in_a_wide_slot() -> None:
    silent(snapshot(card(max_width=4, width=4), (gpu(GPU, width=4),)))


@pytest.mark.parametrize(("count", "expected"), [(1, Severity.INFO), (4, None)])
def test_trap_03_a_guest_cannot_see_how_the_host_is_wired(
    count: int, expected: Severity | None
) -> None:
    gpus = tuple(gpu(f"0000:00:1{n}.0", n, width=8) for n in range(count))
    devices = tuple(device(f"0000:00:1{n}.0", width=8) for n in range(count))
    node = snapshot(devices, gpus, virtualization="kvm")
    _, findings = judge(width_trained_down, node)
    assert [finding.severity for finding in findings] == ([expected] if expected else [])


def test_a_guest_of_four_with_one_narrow_gpu() -> None:
    gpus = tuple(gpu(f"0000:00:1{n}.0", n, width=8 if n == 2 else 16) for n in range(4))
    node = snapshot((), gpus, virtualization="kvm")
    (finding,) = judge(width_trained_down, node)[1]
    assert finding.summary == (
        "GPU 0000:00:12.0: link trained x8, NVML's maximum for GPU and slot is x16"
    )
    assert (finding.severity, finding.confidence) == (Severity.WARNING, Confidence.LIKELY)


def test_trap_04_with_c2c_the_pcie_link_says_nothing() -> None:
    chip = gpu(GPU, width=1, generation=1, c2c_enabled=True)
    node = snapshot(card(width=1, speed=2.5), (chip,))
    silent(node)
    result, _ = judge(width_trained_down, node)
    assert result.outcome is Outcome.NOTAPPLICABLE
    assert "C2C" in result.notes[0]


def test_trap_04_an_integrated_gpu_shows_gen1_x1() -> None:
    chip = gpu("000f:01:00.0", width=1, generation=1, memory_total_bytes=None)
    node = snapshot((), (chip,))
    assert summaries(width_trained_down, node) == []
    assert judge(width_trained_down, node)[0].outcome is Outcome.NOTAPPLICABLE


def test_trap_28_a_vgpu_guest_has_no_link() -> None:
    node = snapshot((), (gpu(GPU, width=1, generation=1, virtualization_mode=2),))
    silent(node)
    result, _ = judge(speed_trained_down, node)
    assert result.outcome is Outcome.NOTAPPLICABLE
    assert "vGPU guest" in result.notes[0]


# --- where the chain can't be read ---


def test_nvml_alone_convicts_width_and_under_load_generation() -> None:
    narrow, slow = gpu(GPU, width=8), gpu("0000:31:00.0", 1, generation=3)
    node = snapshot(None, (narrow, slow))
    (width,) = judge(width_trained_down, node)[1]
    (speed,) = judge(speed_trained_down, node)[1]
    assert width.summary == f"GPU {GPU}: link trained x8, NVML's maximum for GPU and slot is x16"
    assert speed.summary == (
        "GPU 0000:31:00.0: link runs at Gen3 under load, NVML's maximum for GPU and slot is Gen5"
    )
    assert width.confidence is speed.confidence is Confidence.LIKELY
    resting = snapshot(None, (gpu(GPU, generation=1, load=IDLE),))
    assert summaries(speed_trained_down, resting) == []


def test_nvml_alone_shows_a_slot_of_a_lower_generation() -> None:
    node = snapshot(None, (gpu(GPU, generation=4, limits={"pcie_max_link_generation": 4}),))
    silent(node, slot_limited)
    (finding,) = judge(slot_limited, node)[1]
    assert finding.summary == (
        f"GPU {GPU} sits in a slot that gives Gen4 of Gen5 (as built: not trained down)"
    )
    assert (finding.severity, finding.confidence) == (Severity.INFO, Confidence.LIKELY)


def test_neither_source_says_unknown() -> None:
    for item in (width_trained_down, speed_trained_down):
        result, findings = judge(item, snapshot(None, None))
        assert (result.outcome, findings) == (Outcome.UNKNOWN, ())


def test_a_lone_copied_card_cannot_be_judged() -> None:
    result, findings = judge(width_trained_down, snapshot((device(GPU, width=8),), None))
    assert findings == ()
    assert result.missing == (f"parent of {GPU}: not-collected",)


def test_three_cards_alike_are_rather_how_the_machine_is_wired() -> None:
    devices = tuple(
        item
        for bus in (16, 36, 56)
        for item in (
            bridge(f"0000:{bus}:01.0", width=8),
            device(f"0000:{bus + 1}:00.0", f"0000:{bus}:01.0", width=8),
        )
    )
    node = snapshot(devices, tuple(gpu(f"0000:{bus + 1}:00.0", bus) for bus in (16, 36, 56)))
    for finding in judge(width_trained_down, node)[1]:
        assert (finding.confidence, finding.fault_class) == (
            Confidence.POSSIBLE, FaultClass.CONFIGURATION,
        )  # fmt: skip


def test_at_rest_a_narrow_link_is_likely() -> None:
    (finding,) = judge(
        width_trained_down, snapshot(card(width=8), (gpu(GPU, load=IDLE, width=8),))
    )[1]
    assert finding.confidence is Confidence.LIKELY


def test_an_emulated_port_is_no_slot() -> None:
    devices = (bridge(ROOT, max_width=1, max_speed=2.5, width=1, speed=2.5), device(GPU, ROOT))
    silent(snapshot(devices, (gpu(GPU),)))


def test_a_device_that_left_the_bus_has_no_width() -> None:
    section, gaps = read("pci-off-bus")
    gpus = tuple(
        gpu(item.address, width=63 if "45" in item.address else 16, state=state, generation=4)
        for item, state in (
            (item, GpuState.LOST if "45" in item.address else GpuState.OK)
            for item in section.devices
            if item.is_nvidia_gpu
        )
    )
    silent(snapshot(section, gpus, gaps=gaps))


# --- under load ---


def test_a_drop_under_load() -> None:
    node = snapshot(card(speed=[32.0, 8.0]), (gpu(GPU),))
    silent(node, speed_drop_under_load)
    assert summaries(speed_drop_under_load, node) == [
        (
            f"GPU {GPU}: link to root port {ROOT} fell from Gen5 to Gen3 "
            "within the sample while the GPU was busy"
        )
    ]
    resting = snapshot(card(speed=[32.0, 2.5]), (gpu(GPU, load=IDLE),))
    assert notes(speed_drop_under_load, resting) == (
        f"{GPU}: its speed fell with the load: idle links save power",
    )


def test_nvml_saw_the_link_awake() -> None:
    assert summaries(speed_trained_down, snapshot(card(speed=2.5), (gpu(GPU, generation=5),))) == []


def test_an_uplink_counts_in_speed_when_a_gpu_behind_it_is_busy() -> None:
    devices = (
        bridge("0000:15:01.0", speed=8.0),
        bridge("0000:16:00.0", "0000:15:01.0", speed=8.0),
        bridge("0000:17:00.0", "0000:16:00.0"),
        device("0000:18:00.0", "0000:17:00.0"),
    )
    assert summaries(speed_trained_down, snapshot(devices, (gpu("0000:18:00.0"),))) == [
        (
            "Switch uplink 0000:16:00.0 to root port 0000:15:01.0 runs at Gen3, "
            "both ends support Gen5; shared by GPU 0000:18:00.0"
        )
    ]
    resting = snapshot(devices, (gpu("0000:18:00.0", load=IDLE),))
    assert notes(speed_trained_down, resting) == (
        "0000:16:00.0: Gen3 of Gen5, no GPU behind it is busy: re-measure under load",
    )


# --- adapters ---


def adapter(rate_gbps: float | None, **changes: Any) -> NodeSnapshot:
    port = NicPort(device="mlx5_0", port=1, pci=GPU, rate_gbps=rate_gbps)
    devices = (bridge(ROOT, **changes.pop("port", {})), nic(GPU, ROOT, **changes))
    return snapshot(devices, (), nics=NicSection(ports=(port,)))


def test_an_adapter_is_judged_at_rest_too() -> None:
    node = adapter(400.0, width=8, speed=16.0)
    assert summaries(width_trained_down, node) == [
        f"NIC {GPU} (mlx5_0): link to root port {ROOT} trained x8, both ends support x16"
    ]
    assert summaries(speed_trained_down, node) == [
        f"NIC {GPU} (mlx5_0): link to root port {ROOT} runs at Gen4, both ends support Gen5"
    ]
    for item in (width_trained_down, speed_trained_down):
        assert judge(item, node)[1][0].severity is Severity.WARNING


def test_an_adapter_whose_port_is_slower_than_the_narrow_link() -> None:
    (finding,) = judge(width_trained_down, adapter(10.0, width=8))[1]
    assert (finding.severity, finding.job_impact) == (Severity.INFO, JobImpact.NONE)


def test_a_gen5_adapter_in_a_gen4_slot() -> None:
    slot = {"max_speed": 16.0, "speed": 16.0}
    fast = adapter(400.0, speed=16.0, port=slot)
    assert summaries(slot_limited, fast) == [
        (
            f"NIC {GPU} (mlx5_0) sits in a slot that gives Gen4 of Gen5 "
            "(252 Gbit/s for ports of 400 Gbit/s)"
        )
    ]
    enough = adapter(200.0, speed=16.0, port=slot)
    assert notes(slot_limited, enough) == (
        f"{GPU}: slot gives Gen4 of Gen5: enough for ports of 200 Gbit/s",
    )


def test_two_functions_of_an_adapter_share_one_link() -> None:
    devices = (bridge(ROOT, width=8), nic(GPU, ROOT, width=8), nic("0000:17:00.1", ROOT, width=8))
    assert len(summaries(width_trained_down, snapshot(devices, ()))) == 1


# --- siblings and manifest ---


def test_peers_differ_when_nothing_else_says_why() -> None:
    gpus = tuple(
        gpu(f"0000:00:1{n}.0", n, width=8 if n == 1 else 16,
            limits={"pcie_max_link_width_lanes": 8 if n == 1 else 16})
        for n in range(4)
    )  # fmt: skip
    node = snapshot((), gpus, virtualization="kvm")
    silent(node, peer_differs)
    (finding,) = judge(peer_differs, node)[1]
    assert finding.summary == "GPU 0000:00:11.0: link is x8, the median of its 3 siblings is x16"
    assert finding.confidence is Confidence.LIKELY


def test_peers_at_rest_are_not_compared_in_speed() -> None:
    gpus = tuple(
        gpu(f"0000:00:1{n}.0", n, generation=1 if n == 1 else 5, load=IDLE if n == 1 else BUSY)
        for n in range(4)
    )
    assert summaries(peer_differs, snapshot((), gpus)) == []


def test_the_manifest_expects_a_width() -> None:
    expects = Manifest(gpu_pcie_width_lanes=16, gpu_pcie_generation=5)
    node = snapshot(card(width=8, max_width=8), (gpu(GPU, width=8),), manifest=expects)
    assert summaries(width_trained_down, node) == []
    assert summaries(manifest_width, node) == [
        f"GPU {GPU}: link to root port {ROOT} trained x8, the manifest expects x16"
    ]


def test_the_manifest_expects_a_generation() -> None:
    expects = Manifest(gpu_pcie_generation=5)
    slow = snapshot(card(speed=8.0), (gpu(GPU, generation=3),), manifest=expects)
    assert summaries(manifest_generation, slow) == [
        f"GPU {GPU}: link to root port {ROOT} runs at Gen3 under load, the manifest expects Gen5"
    ]
    resting = snapshot(card(speed=2.5), (gpu(GPU, generation=1, load=IDLE),), manifest=expects)
    assert notes(manifest_generation, resting) == (f"{GPU}: Gen1 at rest: re-measure under load",)
    old = snapshot(card(max_speed=16.0, speed=2.5), (gpu(GPU, load=IDLE),), manifest=expects)
    assert summaries(manifest_generation, old) == [
        f"GPU {GPU}: link to root port {ROOT} reaches Gen4 at most, the manifest expects Gen5"
    ]


def test_trained_down_explains_what_the_manifest_says() -> None:
    node = snapshot(card(width=8), (gpu(GPU, width=8),), manifest=Manifest(gpu_pcie_width_lanes=16))
    (finding,) = judge(width_trained_down, node)[1]
    (wish,) = judge(manifest_width, node)[1]
    assert wish.id in finding.explains
    assert wish.component == finding.component
