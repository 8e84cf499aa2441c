"""NVLink state, speed, far ends and error rates."""

from __future__ import annotations

import msgspec

from probes.finding import Confidence, FaultClass, Severity
from probes.gap import GapReason
from probes.node_baseline import baseline_of
from probes.result import Outcome
from probes.snapshot.gpu import NvLinkErrors
from tests.support.gpus import (
    PCI,
    TAKEN_AT_NS,
    eight,
    findings,
    found,
    gaps,
    gpu_counters,
    h100,
    last_run,
    node,
    run,
)

DOWN = "nvlink.down"
SPEED = "nvlink.speed"
ERRORS = "nvlink.errors"
REMOTE = "nvlink.remote-missing"
OFF = {"state": 0, "speed_mbps": 0, "remote_pci": None, "remote_type": 255}


def errors(links=18, **odd):
    """Error counters of all links; ``l7={"crc_flit": 5}`` changes link 7."""
    still = NvLinkErrors(replay=0, recovery=0, crc_flit=0, crc_data=0, ecc_data=0)
    return tuple(msgspec.structs.replace(still, **odd.get(f"l{link}", {})) for link in range(links))


def test_one_link_off_that_all_siblings_have_on():
    (finding,) = findings(eight({2: h100(2, busy=True, links={7: OFF})}))
    assert finding.summary == (
        "GPU 0000:52:00.0 NVLink 7 is off, 7 of 7 siblings have it on (17 links on here)"
    )
    assert (finding.id, finding.severity, finding.confidence) == (
        DOWN,
        Severity.WARNING,
        Confidence.PROVEN,
    )
    assert (finding.component.type, finding.component.link, finding.component.pci) == (
        "nvlink",
        7,
        PCI[2],
    )


def test_links_that_are_not_even_listed():
    short = h100(2)
    short = msgspec.structs.replace(short, nvlinks=(short.nvlinks or ())[:17])
    (finding,) = findings(eight({2: short}, busy=False), DOWN)
    assert finding.summary.startswith("GPU 0000:52:00.0 NVLink 17 is absent, 7 of 7 siblings")


def test_a_gpu_without_any_link_is_one_finding():
    dark = h100(2, links=dict.fromkeys(range(18), OFF))
    (finding,) = findings(eight({2: dark}, busy=False))
    assert finding.summary == "GPU 0000:52:00.0 has no NVLink on, 7 siblings have 18"
    assert finding.severity is Severity.CRITICAL


def nvl(index, peer, **fields):
    """An H100 NVL: 12 of 18 links wired, over a bridge to one other card."""
    links = {link: {"remote_pci": PCI[peer], "remote_type": 0} for link in range(12)}
    links.update(dict.fromkeys(range(12, 18), OFF))
    links.update(fields.pop("links", {}))
    return h100(index, name="NVIDIA H100 NVL", fabric=None, links=links, **fields)


def test_links_that_no_sibling_has_are_not_wired():
    pairs = node([nvl(0, 1), nvl(1, 0), nvl(2, 3), nvl(3, 2)])
    assert findings(pairs) == []
    assert run(DOWN, pairs).notes[0] == (
        "0000:1b:00.0: 12 of 18 NVLinks on, as on its siblings: so it is wired"
    )


def test_a_bridge_link_is_off_at_both_ends():
    pairs = node([nvl(0, 1, links={3: OFF}), nvl(1, 0, links={3: OFF}), nvl(2, 3), nvl(3, 2)])
    first, second = findings(pairs)
    assert (first.component.pci, second.component.pci) == (PCI[0], PCI[1])
    assert first.summary.endswith("; GPU 0000:43:00.0 lacks a link, too")
    assert first.component.link == 3


def test_a_card_without_a_bridge_is_possible_only():
    bare = nvl(2, 3, links=dict.fromkeys(range(12), OFF))
    (finding,) = findings(node([nvl(0, 1), nvl(1, 0), bare]))
    assert (finding.confidence, finding.fault_class) == (
        Confidence.POSSIBLE,
        FaultClass.CONFIGURATION,
    )
    assert finding.summary.endswith("(is its bridge missing?)")


def test_links_asleep_are_no_fault():
    asleep = h100(7, links={link: {"state": 2, "speed_mbps": 0} for link in range(18)})
    assert findings(eight({7: asleep}, busy=False)) == []


def test_nvlink_5_off_on_an_idle_gpu_while_others_work():
    version = {"version": 7, "speed_mbps": 53125}
    rest = {**version, **OFF}
    busy = [h100(i, busy=True, links=dict.fromkeys(range(18), version)) for i in range(3)]
    idle = h100(3, links=dict.fromkeys(range(18), rest))
    assert findings(node([*busy, idle]), DOWN) == []
    working = h100(3, busy=True, links=dict.fromkeys(range(18), rest))
    assert len(findings(node([*busy, working]), DOWN)) == 1


def test_a_lone_gpu_can_not_show_which_links_should_be_on():
    assert run(DOWN, node([nvl(0, 1)])).outcome is Outcome.NOTAPPLICABLE
    assert run(DOWN, node([h100(0)])).outcome is Outcome.PASS


def test_states_that_could_not_be_read_are_never_clear():
    blind = h100(1, links={4: {"state": None}})
    snapshot = eight({1: blind}, gaps=gaps("nvlinks", reason=GapReason.TIMEOUT, device=PCI[1]))
    result = run(DOWN, snapshot)
    assert (result.outcome, result.judged) == (Outcome.UNKNOWN, 7)


def test_a_slow_link():
    slow = h100(4, links={9: {"speed_mbps": 13281}})
    (finding,) = findings(eight({4: slow}, busy=False))
    assert finding.summary == "GPU 0000:9d:00.0 NVLink 9 runs at 13281 MB/s, the others at 26562"
    assert (finding.id, finding.component.link) == (SPEED, 9)


def test_an_active_link_without_a_far_end():
    lost = h100(4, links={2: {"remote_pci": None, "remote_type": 255}})
    (finding,) = findings(eight({4: lost}, busy=False))
    assert finding.summary == ("GPU 0000:9d:00.0: 1 of 18 active NVLinks have no far end (link 2)")
    assert (finding.id, finding.component.link) == (REMOTE, 2)


def test_far_ends_that_nobody_names_are_not_judged():
    nameless = {"remote_pci": None, "remote_type": None}
    gpus = [h100(i, links=dict.fromkeys(range(18), nameless)) for i in range(2)]
    snapshot = node(gpus, gaps=gaps("nvlinks", reason=GapReason.UNSUPPORTED))
    assert run(REMOTE, snapshot).outcome is Outcome.NOTAPPLICABLE


def test_crc_errors_and_recoveries_by_rate():
    bad = h100(
        5,
        busy=True,
        readings=[
            {"nvlink_errors": errors(l11={"crc_flit": 81_200, "recovery": 40})},
            {
                "nvlink_errors": errors(l11={"crc_flit": 84_200, "recovery": 44}),
            },
        ],
    )
    (finding,) = findings(eight({5: bad}))
    assert finding.summary == (
        "GPU 0000:c3:00.0 NVLink 11 from 0000:07:00.0: 1500/s CRC errors (flit), 2/s recoveries "
        "at 369 GB/s on all its links"
    )
    assert (finding.id, finding.confidence, finding.component.link) == (
        ERRORS,
        Confidence.PROVEN,
        11,
    )
    assert [(e.observed, e.unit) for e in finding.evidence] == [
        (1500.0, "errors/s"),
        (7200.0, "events/h"),
    ]


def test_the_rate_stands_next_to_the_traffic():
    bad = h100(
        5,
        readings=[
            {"nvlink_tx_kib": 0, "nvlink_rx_kib": 0},
            {
                "nvlink_errors": errors(l0={"recovery": 1}),
                "nvlink_tx_kib": 324_000_000,
                "nvlink_rx_kib": 396_000_000,
            },
        ],
    )
    (finding,) = findings(eight({5: bad}, busy=False))
    assert finding.summary.endswith(": 0.5/s recoveries at 369 GB/s on all its links")


def test_replays_totals_and_slow_growth_are_no_fault():
    counted = [
        {"nvlink_errors": errors(l4={"replay": 12, "recovery": 1, "crc_flit": 60_231})},
        {"nvlink_errors": errors(l4={"replay": 90, "recovery": 1, "crc_flit": 60_300})},
    ]
    snapshot = eight({2: h100(2, busy=True, readings=counted)})
    assert findings(snapshot) == []
    assert run(ERRORS, snapshot).notes == (
        "0000:52:00.0: NVLink error counts stand still or grow slowly",
    )


def test_recoveries_since_the_last_run():
    bad = h100(1, samples=1, reading={"nvlink_errors": errors(l3={"recovery": 7})})
    counters = gpu_counters(bad, **{"nvlink3.recovery": 5})
    snapshot = eight({1: bad}, busy=False, baseline=last_run(counters, seconds_ago=600))
    (finding,) = findings(snapshot)
    assert finding.summary == (
        "GPU 0000:43:00.0 NVLink 3 from 0000:05:00.0: 12/h recoveries since the last run"
    )
    assert finding.confidence is Confidence.LIKELY


def test_the_last_run_is_what_the_baseline_keeps():
    before = h100(1, samples=1, reading={"nvlink_errors": errors(l3={"recovery": 5})})
    after = h100(1, samples=1, reading={"nvlink_errors": errors(l3={"recovery": 7})})
    then = eight({1: before}, busy=False, taken_at_ns=TAKEN_AT_NS - 600 * 10**9)
    snapshot = eight({1: after}, busy=False, baseline=baseline_of(then))
    assert found(snapshot) == [(ERRORS, f"{PCI[1]} link 3")]


def test_blackwell_counters():
    healthy = {"link_recovery_successful": 12, "link_recovery_failed": 1, "effective_errors": 400}
    grown = {"link_recovery_successful": 52, "link_recovery_failed": 21, "effective_errors": 1000}
    bad = h100(
        1,
        busy=True,
        readings=[
            {"nvlink_errors": errors(l3={**healthy, "symbol_errors": 9_000})},
            {"nvlink_errors": errors(l3={**grown, "symbol_errors": 149_000})},
        ],
    )
    (finding,) = findings(eight({1: bad}))
    assert finding.summary == (
        "GPU 0000:43:00.0 NVLink 3 from 0000:05:00.0: 20/s recoveries, 10/s failed recoveries, "
        "300/s errors after correction at 369 GB/s on all its links"
    )


def test_one_reading_without_a_last_run_gives_no_rate():
    result = run(ERRORS, eight({i: h100(i, samples=1) for i in range(8)}))
    assert (result.outcome, result.judged) == (Outcome.UNKNOWN, 0)


def test_a_part_without_nvlink_and_mig_are_not_judged():
    for gpu in (
        h100(0, nvlinks=()),
        h100(0, mig_mode=True, nvlinks=None),
    ):
        for probe_id in (DOWN, SPEED, ERRORS, REMOTE):
            assert run(probe_id, node([gpu])).outcome is Outcome.NOTAPPLICABLE


def test_faults_on_two_gpus_are_both_named():
    odd = {2: h100(2, links={7: OFF}), 6: h100(6, links={1: {"speed_mbps": 13281}})}
    assert found(eight(odd, busy=False)) == [
        (DOWN, f"{PCI[2]} link 7"),
        (SPEED, f"{PCI[6]} link 1"),
    ]
