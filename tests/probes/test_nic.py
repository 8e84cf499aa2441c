"""Rules about links, rates, lanes, subnet managers, firmware and the manifest."""

from __future__ import annotations

from msgspec.structs import replace

from agent.evaluate import evaluate
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
from probes.node.nic import firmware_differs, init_state, port_down, rate_low, width_low
from probes.node.nic_manifest import manifest_missing, manifest_rate
from probes.registry import discover
from probes.result import Outcome
from probes.snapshot.manifest import Manifest
from tests.support.nics_processes import (
    ethernet,
    findings,
    nics,
    node,
    notes,
    port,
    rails,
    reading,
    run,
)

DOWN = {"state": "DOWN", "phys_state": "Polling", "rate_gbps": 10.0, "rate_text": "10 Gb/sec"}


def down(index: int, **facts: object) -> object:
    counters = {"port_rcv_packets": 0, "link_downed": 0}
    return port(
        index,
        **{**DOWN, "readings": (reading(0, **counters), reading(2, **counters)), **facts},  # type: ignore[arg-type]
    )


def test_a_rail_that_lost_its_link() -> None:
    lost = port(3, **DOWN, readings=(reading(0, "DOWN", link_downed=2, port_rcv_packets=90),))  # type: ignore[arg-type]
    assert findings(port_down, rails([lost])) == (
        Finding(
            id="nic.port-down",
            severity=Severity.CRITICAL,
            confidence=Confidence.LIKELY,
            fault_class=FaultClass.HARDWARE,
            job_impact=JobImpact.BREAKS,
            component=Component(
                type="nic", host="n07", pci="0000:4a:00.0", device="mlx5_3", port=1
            ),
            summary="Port mlx5_3/1 has no link: DOWN (Polling); 7 of 7 equal ports have a link, "
            "it was in use before",
            evidence=(
                Evidence(
                    source="sysfs",
                    locator="/sys/class/infiniband/mlx5_3/ports/1/state",
                    observed="DOWN",
                    expected=Expectation(value="ACTIVE", basis=Basis.PEER_MEDIAN),
                    recheck="cat /sys/class/infiniband/mlx5_3/ports/1/state",
                ),
                Evidence(
                    source="sysfs",
                    locator="/sys/class/infiniband/mlx5_3/ports/1/counters/link_downed",
                    observed=2,
                    recheck="cat /sys/class/infiniband/mlx5_3/ports/1/counters/link_downed",
                ),
                Evidence(
                    source="sysfs",
                    locator="/sys/class/infiniband/mlx5_3/ports/1/counters/port_rcv_packets",
                    observed=90,
                    recheck="cat /sys/class/infiniband/mlx5_3/ports/1/counters/port_rcv_packets",
                ),
            ),
            remedy=Remedy(
                action=Action.RESEAT,
                text="Look at the other end: is the switch port up? Then reseat or swap the cable "
                "or transceiver; `mlxlink -d mlx5_3 -m -c` shows light levels and error counts.",
                disruptive=False,
            ),
        ),
    )


def test_never_wired_but_all_siblings_are_is_a_warning_about_cabling() -> None:
    (found,) = findings(port_down, rails([down(5)]))  # type: ignore[list-item]
    assert (found.severity, found.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)
    assert found.summary == (
        "Port mlx5_5/1 has no link: DOWN (Polling); 7 of 7 equal ports have a link"
    )


def test_manifest_makes_it_certain() -> None:
    snapshot = nics(down(0), manifest=Manifest(nic_rates_gbps={"mlx5_0": 400}))  # type: ignore[arg-type]
    (found,) = findings(port_down, snapshot)
    assert (found.severity, found.confidence) == (Severity.CRITICAL, Confidence.PROVEN)
    assert found.evidence[0].expected == Expectation(value="ACTIVE", basis=Basis.MANIFEST)


def test_trap_41_unplugged_port_is_unused() -> None:
    """One port in Polling, nothing says that it should be up."""
    assert notes(port_down, nics(port(0), down(1))) == (  # type: ignore[arg-type]
        "mlx5_1/1: no link and never had one since its driver came up: an unused port",
    )


def test_trap_41_unwired_second_ports_are_compared_among_themselves() -> None:
    """Eight first functions are up, none of the eight second ones: not eight faults."""
    second = [
        replace(down(i), pci=f"0000:{0x1A + 16 * i:02x}:00.1", device=f"mlx5_{i + 8}")
        for i in range(8)
    ]  # type: ignore[type-var]
    snapshot = nics(*(port(i) for i in range(8)), *second)  # type: ignore[arg-type]
    assert len(notes(port_down, snapshot)) == 8


def test_trap_41_administratively_down() -> None:
    off = port(3, state="DOWN", phys_state="Disabled")
    assert notes(port_down, rails([off])) == ("mlx5_3/1: switched off by an administrator",)
    unused = ethernet(state="down", admin_up=False, carrier=None)
    assert notes(port_down, nics(unused)) == ("eth0: switched off by an administrator",)


def test_switched_off_although_the_manifest_names_it_is_configuration() -> None:
    off = port(3, state="DOWN", phys_state="Disabled")
    manifest = Manifest(nic_rates_gbps={"mlx5_3/1": 400})
    (found,) = findings(port_down, rails([off], manifest=manifest))
    assert found.fault_class is FaultClass.CONFIGURATION
    assert found.remedy and found.remedy.action is Action.RECONFIGURE


def test_roce_phys_state_disabled_is_not_the_administrator() -> None:
    """mlx5 says Disabled for every Ethernet port without carrier; the interface's flag decides."""
    up = [
        port(i, link_layer="Ethernet", netdevs=(f"ens{i}",), admin_up=True, carrier=True)
        for i in range(4)
    ]
    up[2] = replace(up[2], state="DOWN", phys_state="Disabled", carrier=False)
    (found,) = findings(port_down, nics(*up))
    assert found.component.device == "mlx5_2"
    assert found.severity is Severity.CRITICAL
    assert found.summary == (
        "Port mlx5_2/1 has no link: DOWN; 3 of 3 equal ports have a link, it was in use before"
    )


def test_admin_up_without_a_cable_is_common_and_no_fault() -> None:
    spare = ethernet(state="down", carrier=False, readings=(reading(0, carrier_down_count=0),))
    assert notes(port_down, nics(spare)) == (
        "eth0: no link and never had one since its driver came up: an unused port",
    )


def test_virtual_function_without_link_is_its_users_business() -> None:
    unassigned = down(4, is_virtual_function=True)
    assert notes(port_down, nics(port(0), port(1), unassigned)) == (  # type: ignore[arg-type]
        "mlx5_4/1: a virtual function without a link: its user decides",
    )


def test_unknown_state_is_unread() -> None:
    gap = Gap(source="nics", reason=GapReason.DENIED, fields=("state",), devices=("mlx5_0/1",))
    blind = port(0, state=None, phys_state=None, readings=())
    done = run(port_down, nics(blind, gaps=(gap,)))
    assert done.results[0].outcome is Outcome.UNKNOWN
    assert done.results[0].missing == ("state of mlx5_0/1: denied",)


def test_interface_whose_driver_does_not_tell() -> None:
    vague = ethernet(state="unknown", carrier=None)
    assert run(port_down, nics(vague)).results[0].outcome is Outcome.UNKNOWN


def test_no_adapter_is_not_applicable() -> None:
    done = run(port_down, nics())
    assert done.results[0].outcome is Outcome.NOTAPPLICABLE


# --- subnet manager ---


def test_init_state_is_a_missing_subnet_manager() -> None:
    waiting = port(0, state="INIT", readings=(reading(0, "INIT"), reading(2, "INIT")))
    (found,) = findings(init_state, rails([waiting]))
    assert found.summary == (
        "Port mlx5_0/1 has a link but stays in INIT, expected ACTIVE: no subnet manager has "
        "configured it"
    )
    assert (found.severity, found.fault_class) == (Severity.CRITICAL, FaultClass.CONFIGURATION)
    assert findings(port_down, rails([waiting])) == ()


def test_init_that_moves_on_is_no_fault() -> None:
    coming = port(0, state="INIT", readings=(reading(0, "INIT"), reading(2, "ACTIVE")))
    assert notes(init_state, rails([coming])) == ("mlx5_0/1: on its way: INIT -> ACTIVE",)


def test_init_of_a_virtual_function() -> None:
    waiting = port(0, state="INIT", is_virtual_function=True)
    assert notes(init_state, nics(replace(waiting, readings=()))) == (
        "mlx5_0/1: a virtual function waits for its physical function's policy",
    )


# --- rate and width ---


def test_one_rail_at_half_rate_on_half_the_lanes() -> None:
    slow = port(6, rate_gbps=200.0, rate_text="200 Gb/sec (2X NDR)", width_lanes=2)
    (rate,) = findings(rate_low, rails([slow]))
    assert rate.summary == ("Port mlx5_6/1 runs at 200 Gbit/s, 7 of 7 equal ports have 400 Gbit/s")
    assert (rate.severity, rate.confidence) == (Severity.WARNING, Confidence.LIKELY)
    assert rate.evidence[0].quote == "200 Gb/sec (2X NDR)"
    assert rate.evidence[0].expected == Expectation(value=400.0, basis=Basis.PEER_MEDIAN)
    (width,) = findings(width_low, rails([slow]))
    assert width.summary == "Port mlx5_6/1 trained on 2 lanes, 7 of 7 equal ports have 4 lanes"
    assert width.explains == ("nic.rate-low",)
    assert width.fault_class is FaultClass.HARDWARE


def test_two_ports_on_a_slower_network_are_only_worth_knowing() -> None:
    storage = [port(i, rate_gbps=200.0) for i in (6, 7)]
    found = findings(rate_low, rails(storage))
    assert [item.severity for item in found] == [Severity.INFO, Severity.INFO]
    assert "so it may be meant so" in found[0].summary


def test_a_pair_can_not_tell_which_is_right() -> None:
    (found,) = findings(rate_low, nics(port(0), port(1, rate_gbps=200.0)))
    assert (found.severity, found.job_impact) == (Severity.INFO, JobImpact.NONE)


def test_two_lanes_by_design() -> None:
    """HDR100 cards run 2X; nothing to compare with says nothing."""
    lone = port(0, rate_gbps=100.0, rate_text="100 Gb/sec (2X HDR)", width_lanes=2)
    done = run(width_low, nics(lone))
    assert done.findings == ()
    assert done.results[0].outcome is Outcome.NOTAPPLICABLE


def test_rate_of_a_port_without_link_means_nothing() -> None:
    assert findings(rate_low, rails([down(5)])) == ()  # type: ignore[list-item]


def test_other_boards_are_no_siblings() -> None:
    storage = port(7, board_id="MT_0000000222", rate_gbps=100.0)
    assert findings(rate_low, rails([storage])) == ()


# --- firmware ---


def test_one_adapter_with_other_firmware() -> None:
    odd = port(2, firmware_version="28.39.1002")
    (found,) = findings(firmware_differs, rails([odd]))
    assert found.summary == (
        "Adapter mlx5_2 runs firmware 28.39.1002, 7 of 8 of board MT_0000000838 run 28.41.1000"
    )
    assert found.severity is Severity.INFO


def test_firmware_without_majority_blames_nobody() -> None:
    two = nics(port(0), port(1, firmware_version="28.39.1002"))
    assert notes(firmware_differs, two) == (
        "mlx5_0: no firmware version has a majority",
        "mlx5_1: no firmware version has a majority",
    )


# --- manifest ---

MANIFEST = Manifest(nic_rates_gbps={"mlx5_0": 400, "mlx5_9": 400, "eth0": 25})


def test_manifest_rate() -> None:
    snapshot = nics(port(0, rate_gbps=200.0), ethernet(), manifest=MANIFEST)
    (found,) = findings(manifest_rate, snapshot)
    assert found.summary == "Port mlx5_0/1 runs at 200 Gbit/s, the manifest expects 400 Gbit/s"
    assert found.confidence is Confidence.PROVEN


def test_manifest_missing() -> None:
    (found,) = findings(manifest_missing, nics(port(0), ethernet(), manifest=MANIFEST))
    assert found.summary == "Port mlx5_9 is not there, the manifest expects it at 400 Gbit/s"
    assert found.component == Component(type="nic", host="n07", device="mlx5_9")
    assert found.evidence[0].observed == "eth0, mlx5_0/1"


def test_trap_30_container_does_not_see_the_hosts_interfaces() -> None:
    done = run(manifest_missing, nics(port(0), manifest=MANIFEST, container="docker"))
    assert done.findings == ()
    assert done.results[0].notes == (
        "mlx5_9: the host's interfaces are not visible in a container",
        "eth0: the host's interfaces are not visible in a container",
    )


def test_without_manifest_nothing_is_expected() -> None:
    assert run(manifest_missing, rails()).results[0].outcome is Outcome.NOTAPPLICABLE
    assert run(manifest_rate, rails()).results[0].outcome is Outcome.NOTAPPLICABLE


def test_healthy_node_is_clean() -> None:
    done = evaluate(rails(), discover())
    mine = [item for item in done.results if item.id.startswith(("nic.", "manifest.nic"))]
    assert done.findings == ()
    assert {item.id: item.judged for item in mine if item.judged} == {
        "nic.firmware-differs": 8,
        "nic.init-state": 8,
        "nic.port-down": 8,
        "nic.rate-low": 8,
        "nic.width-low": 8,
    }


def test_section_missing() -> None:
    assert run(port_down, node()).results[0].outcome is Outcome.UNKNOWN
