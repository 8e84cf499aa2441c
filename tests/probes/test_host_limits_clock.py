"""Limits, control groups and the clock: each alarm, and the tempting one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from agent.evaluate import Policy
from probes.finding import Confidence, FaultClass, JobImpact, Severity
from probes.gap import Gap, GapReason
from probes.result import Health, Outcome
from probes.snapshot.host import (
    CallerLimits,
    Cgroup,
    CgroupLevel,
    CgroupReading,
    Clock,
    ResourceLimit,
)
from probes.snapshot.node import NodeSnapshot
from tests.support.hosts import GIB, finding, judge, node, notes, rdma, readings, section

MEMLOCK, NOFILE = "host.memlock-low", "host.nofile-low"


def limited(memlock: int | None = None, nofile: int = 524288, capable: bool = False) -> Any:
    return section(
        limits=CallerLimits(
            memlock_bytes=ResourceLimit(soft=memlock, hard=memlock),
            nofile=ResourceLimit(soft=1024, hard=nofile),
            can_exceed_memlock=capable,
        )
    )


def test_locked_memory_in_the_jobs_container() -> None:
    found = finding(node(limited(8 << 20), nics=rdma(), container="docker"), MEMLOCK)
    assert found.summary == "locked-memory limit of the caller is 8 MiB, RDMA wants unlimited"
    assert (found.severity, found.confidence, found.fault_class, found.job_impact) == (
        Severity.WARNING,
        Confidence.LIKELY,
        FaultClass.CONFIGURATION,
        JobImpact.NONE,
    )
    assert found.evidence[0].quote == (
        "this process's own limit; a job's may differ unless it is started the same way"
    )


def test_locked_memory_of_crons_own_session_is_info() -> None:
    evaluation = judge(node(limited(8 << 20), nics=rdma()), MEMLOCK)
    assert evaluation.findings[0].severity is Severity.INFO
    assert evaluation.health is Health.OK


def test_locked_memory_does_not_bind_root_nor_matter_without_rdma() -> None:
    assert notes(node(limited(65536, capable=True), nics=rdma()), MEMLOCK) == (
        "CAP_IPC_LOCK: the locked-memory limit does not bind this user",
    )
    for nics in (node().nics, rdma(state="DOWN")):
        assert notes(node(limited(65536), nics=nics), MEMLOCK, Outcome.NOTAPPLICABLE) == (
            "no RDMA port is active",
        )
    # slow-two-nodes: ulimit -l says unlimited, so it is not that
    assert judge(node(limited(None), nics=rdma(), container="docker"), MEMLOCK).findings == ()


def test_a_low_soft_limit_of_open_files_is_no_fault() -> None:
    assert notes(node(limited()), NOFILE) == ()


def test_a_low_hard_limit_of_open_files() -> None:
    found = finding(node(limited(nofile=1024), container="docker"), NOFILE)
    assert found.summary == "the caller may open at most 1024 files, 4096 is a floor"
    assert found.severity is Severity.WARNING
    assert finding(node(limited(nofile=1024)), NOFILE).severity is Severity.INFO
    lowered = judge(node(limited(nofile=1024)), NOFILE, Policy(limits={NOFILE: {"files": 512}}))
    assert lowered.findings == ()


def grouped(first: CgroupReading, second: CgroupReading, level: CgroupLevel) -> NodeSnapshot:
    return node(
        section(
            cgroup=Cgroup(version=2, cgroup_path="/pod", levels=(level,)),
            readings=readings({"cgroups": (first,)}, cgroups=(second,)),
        )
    )


def cpu(periods: int, throttled: int) -> CgroupReading:
    return CgroupReading(cgroup_path="/pod", periods=periods, throttled_periods=throttled)


QUOTA = CgroupLevel(cgroup_path="/pod", cpu_quota=4.0)
THROTTLED, NEAR = "host.cgroup-cpu-throttled", "host.cgroup-memory-near-limit"


def test_a_quota_that_cuts_periods_short() -> None:
    found = finding(grouped(cpu(100, 50), cpu(120, 62), QUOTA), THROTTLED)
    assert found.summary == (
        "the quota of 4 CPUs cut short 12 of 20 periods of the caller's control group"
    )
    assert (found.severity, found.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (cpu(10**6, 10**5), cpu(10**6 + 20, 10**5)),  # throttled in the past
        (cpu(100, 5), cpu(120, 6)),  # one period of a burst
        (cpu(100, 5), cpu(100, 5)),  # nothing ran
    ],
)
def test_a_quota_that_costs_nothing_now(first: CgroupReading, second: CgroupReading) -> None:
    assert notes(grouped(first, second, QUOTA), THROTTLED) == ()


def test_no_quota_no_limit() -> None:
    assert notes(node(), THROTTLED, Outcome.NOTAPPLICABLE) == (
        "the caller's control group has no CPU quota",
    )
    assert notes(node(), NEAR, Outcome.NOTAPPLICABLE) == (
        "the caller's control group has no memory limit",
    )


def test_unreadable_counters_are_unknown() -> None:
    gap = Gap(
        source="host", reason=GapReason.DENIED, fields=("cgroups",), detail="/pod/cpu.stat: refused"
    )
    empty = CgroupReading(cgroup_path="/pod")
    snapshot = grouped(empty, empty, QUOTA)
    import msgspec

    evaluation = judge(msgspec.structs.replace(snapshot, gaps=(gap,)), THROTTLED)
    assert evaluation.results[0].missing == ("cgroups: denied (/pod/cpu.stat: refused)",)
    assert evaluation.health is Health.UNKNOWN


def memory(current: int, cache: int, kills: int | None = None) -> NodeSnapshot:
    now = CgroupReading(
        cgroup_path="/pod",
        memory_current_bytes=current,
        memory_inactive_file_bytes=cache,
        oom_kills=kills,
    )
    return grouped(now, now, CgroupLevel(cgroup_path="/pod", memory_max_bytes=100 * GIB))


def test_a_group_full_of_page_cache_is_no_fault() -> None:
    assert notes(memory(100 * GIB, 60 * GIB), NEAR) == ()


def test_a_group_near_its_memory_limit() -> None:
    found = finding(memory(99 * GIB, GIB, kills=2), NEAR)
    assert found.summary == (
        "the caller's control group uses 98 GiB of its limit of 100 GiB, 2 processes were killed"
    )
    assert found.severity is Severity.WARNING


def test_an_unsynchronized_clock_is_info_on_one_node() -> None:
    clock = Clock(synchronized=False, status_bits=0x40, clocksource="tsc")
    evaluation = judge(node(section(clock=clock)), "host.clock-unsynchronized")
    assert [f.severity for f in evaluation.findings] == [Severity.INFO]
    assert evaluation.health is Health.OK
    assert judge(node(), "host.clock-unsynchronized").findings == ()


@pytest.mark.parametrize(
    "name", ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "xen", "arch_sys_counter", "new"]
)
def test_clock_sources_that_are_no_fault(name: str) -> None:
    assert notes(node(section(clock=Clock(clocksource=name))), "host.clocksource") == ()


def test_slow_clock_sources() -> None:
    def clock(*available: str) -> NodeSnapshot:
        return node(section(clock=Clock(clocksource="hpet", available_clocksources=available)))

    distrusted = finding(clock("hpet", "acpi_pm"), "host.clocksource")
    assert distrusted.summary == (
        "clock source is hpet, tsc is not on offer: the kernel does not trust it"
    )
    assert distrusted.fault_class is FaultClass.CANNOT_TELL
    chosen = finding(clock("tsc", "hpet"), "host.clocksource")
    assert (chosen.severity, chosen.fault_class) == (Severity.WARNING, FaultClass.CONFIGURATION)
