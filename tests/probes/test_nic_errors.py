"""Rules about growing counters of ports."""

from __future__ import annotations

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
from probes.node.nic_errors import flapping, link_errors, retransmissions
from probes.result import Outcome
from tests.support.nics_processes import (
    baseline,
    ethernet,
    findings,
    nics,
    notes,
    port,
    reading,
    run,
)


def two(first: dict[str, int], second: dict[str, int], seconds: float = 2) -> dict[str, object]:
    return {"readings": (reading(0, **first), reading(seconds, **second))}


def test_symbol_errors_within_the_sample() -> None:
    bad = port(1, **two({"symbol_error": 40}, {"symbol_error": 90}))
    counter = "/sys/class/infiniband/mlx5_1/ports/1/counters/symbol_error"
    assert findings(link_errors, nics(port(0), bad)) == (
        Finding(
            id="nic.link-errors",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            fault_class=FaultClass.HARDWARE,
            job_impact=JobImpact.SLOWS,
            component=Component(
                type="nic", host="n07", pci="0000:2a:00.0", device="mlx5_1", port=1
            ),
            summary="Port mlx5_1/1: symbol_error grew by 50 in the sample of 2.0 s, "
            "10 would be too many",
            evidence=(
                Evidence(
                    source="sysfs",
                    locator=counter,
                    observed=50,
                    unit="errors in the sample of 2.0 s",
                    expected=Expectation(value=10, basis=Basis.VENDOR_LIMIT),
                    recheck=f"cat {counter}; sleep 10; cat {counter}",
                ),
            ),
            explains=("nic.retransmissions",),
            remedy=Remedy(
                action=Action.RESEAT,
                text="Look at the other end: is the switch port up? Then reseat or swap the cable "
                "or transceiver; `mlxlink -d mlx5_1 -m -c` shows light levels and error counts.",
                disruptive=True,
            ),
        ),
    )


def test_totals_and_single_ticks_are_no_fault() -> None:
    old = port(0, **two({"symbol_error": 60000}, {"symbol_error": 60001}))
    assert notes(link_errors, nics(old)) == ()


def test_rate_since_the_last_run() -> None:
    now = {"symbol_error": 900, "link_error_recovery": 3}
    bad = port(0, **two(now, now))
    (found,) = findings(link_errors, nics(bad, baseline=baseline("mlx5_0/1", 3, symbol_error=400)))
    assert found.summary == (
        "Port mlx5_0/1: symbol_error grew by 500 in 3.0 h since the last run, 360 would be too many"
    )


def test_baseline_of_another_boot_or_reset_counter_says_nothing() -> None:
    calm = port(0, **two({"symbol_error": 300}, {"symbol_error": 300}))
    other = baseline("mlx5_0/1", 1, boot="another", symbol_error=0)
    assert findings(link_errors, nics(calm, baseline=other)) == ()
    reset = baseline("mlx5_0/1", 1, symbol_error=5000)
    assert findings(link_errors, nics(calm, baseline=reset)) == ()


def test_counter_at_its_ceiling_is_said() -> None:
    full = {"symbol_error": 65535, "excessive_buffer_overrun_errors": 15}
    assert notes(link_errors, nics(port(0, **two(full, full)))) == (
        (
            "mlx5_0/1: symbol_error, excessive_buffer_overrun_errors: at the ceiling, further "
            "growth can't be seen (perfquery -R clears)"
        ),
    )


def test_one_reading_is_not_collected() -> None:
    once = port(0, readings=(reading(0, symbol_error=5),))
    done = run(link_errors, nics(once))
    assert done.results[0].outcome is Outcome.UNKNOWN
    assert done.health.value == "ok"


def test_ethernet_crc_errors() -> None:
    bad = ethernet(**two({"rx_crc_errors": 0}, {"rx_crc_errors": 44}))
    (found,) = findings(link_errors, nics(bad))
    assert found.evidence[0].locator == "/sys/class/net/eth0/statistics/rx_crc_errors"
    assert "ethtool -m eth0" in (found.remedy.text if found.remedy else "")


# --- flapping ---


def test_link_loss_within_the_sample() -> None:
    bad = port(2, **two({"link_downed": 4}, {"link_downed": 5}))
    (found,) = findings(flapping, nics(bad))
    assert found.summary == "Port mlx5_2/1 lost its link 1 x in the sample of 2.0 s, expected 0"
    assert (found.job_impact, found.confidence) == (JobImpact.BREAKS, Confidence.LIKELY)


def test_several_losses_since_the_last_run() -> None:
    bad = port(2, **two({"link_downed": 9}, {"link_downed": 9}))
    (found,) = findings(flapping, nics(bad, baseline=baseline("mlx5_2/1", 3, link_downed=5)))
    assert found.summary == (
        "Port mlx5_2/1 lost its link 4 x in 3.0 h since the last run, expected 0"
    )
    assert found.explains == ("nic.link-errors", "nic.retransmissions")


def test_trap_42_one_loss_since_the_last_run() -> None:
    """A cable swap or a restart of the switch."""
    swapped = port(2, **two({"link_downed": 6}, {"link_downed": 6}))
    snapshot = nics(swapped, baseline=baseline("mlx5_2/1", 3, link_downed=5))
    assert notes(flapping, snapshot) == (
        (
            "mlx5_2/1: lost its link 1 x in 3.0 h since the last run: a cable swap or a restart of "
            "the other end looks the same"
        ),
    )


def test_trap_42_totals_since_boot_mean_nothing() -> None:
    old = port(2, **two({"link_downed": 200}, {"link_downed": 200}))
    assert notes(flapping, nics(old)) == ()


def test_few_losses_over_a_long_time() -> None:
    weekly = port(2, **two({"link_downed": 8}, {"link_downed": 8}))
    snapshot = nics(weekly, baseline=baseline("mlx5_2/1", 7 * 24, link_downed=4))
    assert findings(flapping, snapshot) == ()


def test_ethernet_counts_losses_or_half_the_changes() -> None:
    both = ethernet(
        **two({"carrier_changes": 2, "carrier_down_count": 1},
              {"carrier_changes": 8, "carrier_down_count": 4})
    )  # fmt: skip
    assert "lost its link 3 x" in findings(flapping, nics(both))[0].summary
    older = ethernet(**two({"carrier_changes": 2}, {"carrier_changes": 6}))
    assert "lost its link 2 x" in findings(flapping, nics(older))[0].summary
    came_up = ethernet(**two({"carrier_changes": 2}, {"carrier_changes": 3}))
    assert findings(flapping, nics(came_up)) == ()


# --- retransmissions ---

QUIET = {
    "local_ack_timeout_err": 7,
    "packet_seq_err": 50,
    "out_of_sequence": 9,
    "port_xmit_packets": 1_000_000,
}


def test_ack_timeouts() -> None:
    bad = port(0, **two(QUIET, {**QUIET, "local_ack_timeout_err": 12}))
    (found,) = findings(retransmissions, nics(bad))
    assert found.summary == (
        "Port mlx5_0/1: local_ack_timeout_err grew by 5 in the sample of 2.0 s, "
        "3 would be too many: packets get lost on the path"
    )
    assert (found.confidence, found.fault_class) == (
        Confidence.POSSIBLE,
        FaultClass.CANNOT_TELL,
    )


def test_sequence_errors_are_judged_by_what_was_sent() -> None:
    lossy = {**QUIET, "packet_seq_err": 550, "port_xmit_packets": 2_000_000}
    (found,) = findings(retransmissions, nics(port(0, **two(QUIET, lossy))))
    assert "packet_seq_err grew by 500" in found.summary
    busy = {**QUIET, "packet_seq_err": 550, "port_xmit_packets": 900_000_000}
    assert findings(retransmissions, nics(port(0, **two(QUIET, busy)))) == ()


def test_out_of_order_alone_is_adaptive_routing() -> None:
    routed = {**QUIET, "out_of_sequence": 90_000, "port_xmit_packets": 2_000_000}
    assert notes(retransmissions, nics(port(0, **two(QUIET, routed)))) == (
        "mlx5_0/1: packets out of order without loss: adaptive routing",
    )


def test_adapter_without_these_counters() -> None:
    done = run(retransmissions, nics(port(0)))
    assert done.results[0].outcome is Outcome.NOTAPPLICABLE


def test_refused_counters_are_unread_absent_ones_not_applicable() -> None:
    bare = port(0, readings=(reading(0), reading(2)))
    for rule in (link_errors, flapping, retransmissions):
        assert run(rule, nics(bare)).results[0].outcome is Outcome.NOTAPPLICABLE
        gap = Gap(
            source="nics", reason=GapReason.TIMEOUT, fields=("counters",), devices=("mlx5_0/1",)
        )
        assert run(rule, nics(bare, gaps=(gap,))).results[0].outcome is Outcome.UNKNOWN
