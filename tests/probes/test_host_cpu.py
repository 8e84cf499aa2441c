"""Host CPU rules: each alarm, and the tempting one that is wrong."""

from __future__ import annotations

import msgspec
import pytest

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
from probes.result import Health, Outcome
from probes.snapshot.host import CpuFacts, PackageThrottle, Pressure
from probes.snapshot.pci import PciSection
from tests.support.hosts import (
    CPUS,
    busy,
    finding,
    gpus_on_bus,
    idle_then,
    judge,
    node,
    notes,
    nvml,
    policy,
    reading,
    readings,
    section,
)

GOVERNOR, FREQUENCY = "host.cpu-governor", "host.cpu-frequency-low"
POWERSAVE = CpuFacts(online=CPUS, policies=(policy(governor="powersave"),))
NO_GPUS = {"nvml": None, "pci": PciSection()}


def no_driver_section(**changes: object):  # type: ignore[no-untyped-def]
    """A node without any GPU."""
    from probes.snapshot.host import DriverFacts

    return section(driver=DriverFacts(gpu_addresses=(), devices=()), modules=(), **changes)


def test_trap_44_powersave_under_hwp_that_boosts_is_no_fault() -> None:
    snapshot = node(section(cpu=POWERSAVE, readings=idle_then(3100)))
    assert notes(snapshot, GOVERNOR) == (
        "governor powersave (intel_pstate): busy CPUs measured at 3100 MHz",
    )
    assert notes(snapshot, FREQUENCY) == ()


def test_trap_44_powersave_at_rest_says_that_nothing_was_measured() -> None:
    snapshot = node(section(cpu=POWERSAVE, readings=idle_then(800, cpus=0)))
    assert notes(snapshot, GOVERNOR) == (
        "governor powersave (intel_pstate): no cost was measured: no CPU was seen busy",
    )
    assert notes(snapshot, FREQUENCY) == ("no CPU was busy: a clock at rest is power saving",)


def test_a_governor_that_costs_measured_clock_under_load() -> None:
    facts = CpuFacts(online=CPUS, policies=(policy(governor="powersave", driver="acpi-cpufreq"),))
    assert finding(node(section(cpu=facts, readings=idle_then(800, cpus=6))), GOVERNOR) == Finding(
        id=GOVERNOR,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.SLOWS,
        component=Component(type="host", host="gpu-a07"),
        summary="6 busy CPUs run at 800 MHz under governor powersave (acpi-cpufreq), base clock is "
        "2000 MHz",
        evidence=(
            Evidence(
                source="sysfs",
                locator="/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
                observed="powersave",
                expected=Expectation(value="performance", basis=Basis.VENDOR_LIMIT),
                recheck="grep . /sys/devices/system/cpu/cpufreq/policy*/scaling_governor | sort | "
                "uniq -c",
            ),
            Evidence(
                source="procfs",
                locator="/proc/cpuinfo",
                observed=800,
                unit="MHz",
                expected=Expectation(value=2000, basis=Basis.DEVICE_MAX),
                recheck="grep MHz /proc/cpuinfo | sort | uniq -c",
            ),
        ),
        explains=(FREQUENCY,),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="cpupower frequency-set -g performance, then measure again under load.",
            disruptive=False,
        ),
    )


def test_the_generic_powersave_governor_is_info_while_nothing_is_busy() -> None:
    facts = CpuFacts(online=CPUS, policies=(policy(governor="powersave", driver="acpi-cpufreq"),))
    snapshot = node(section(cpu=facts, readings=idle_then(800, cpus=0)))
    found = finding(snapshot, GOVERNOR)
    assert found.severity is Severity.INFO
    assert found.summary == (
        "governor powersave (acpi-cpufreq) holds 8 CPUs at 800 MHz of 3800 MHz; no CPU was busy, "
        "so no cost was measured"
    )
    assert judge(snapshot, GOVERNOR).health is Health.OK


def test_governor_and_frequency_do_not_apply_to_guests_and_nodes_without_gpu() -> None:
    guest = node(section(cpu=CpuFacts(online=CPUS, policies=())))
    without = node(no_driver_section(), **NO_GPUS)
    for id in (GOVERNOR, FREQUENCY):
        assert notes(guest, id, Outcome.NOTAPPLICABLE) == (
            "no cpufreq here: the firmware or the hypervisor sets the CPU clock",
        )
        assert notes(without, id, Outcome.NOTAPPLICABLE) == ("no NVIDIA GPU on this machine",)


def test_gpus_handed_to_guests_are_not_this_machines() -> None:
    snapshot = node(no_driver_section(), nvml=None, pci=gpus_on_bus(8, "vfio-pci"))
    assert notes(snapshot, GOVERNOR, Outcome.NOTAPPLICABLE) == ("no NVIDIA GPU on this machine",)


def test_one_reading_can_not_tell_what_was_busy() -> None:
    evaluation = judge(node(section(readings=(reading(),))), FREQUENCY)
    assert evaluation.results[0].outcome is Outcome.UNKNOWN
    assert evaluation.results[0].missing == ("mhz: not-collected",)
    assert evaluation.health is Health.OK


@pytest.mark.parametrize(
    ("mhz", "cpus", "low"),
    [
        (1499, 8, True),  # base 2000 MHz less 25 %
        (1500, 8, False),
        (1499, 1, True),  # one busy CPU, and it is slow
        (1700, 8, False),  # AVX-512 under the base clock
    ],
)
def test_frequency_against_the_base_clock(mhz: int, cpus: int, low: bool) -> None:
    evaluation = judge(node(section(readings=idle_then(mhz, cpus))), FREQUENCY)
    assert bool(evaluation.findings) is low


def test_without_a_base_clock_half_of_the_boost_is_the_bound() -> None:
    facts = CpuFacts(online=CPUS, policies=(policy(base_mhz=None),))
    assert not judge(node(section(cpu=facts, readings=idle_then(2000))), FREQUENCY).findings
    found = finding(node(section(cpu=facts, readings=idle_then(1200))), FREQUENCY)
    assert found.summary == "8 busy CPUs run at 1200 MHz, maximum clock is 3800 MHz"
    assert found.fault_class is FaultClass.CANNOT_TELL


def test_a_frequency_limit_that_somebody_set_is_named() -> None:
    facts = CpuFacts(online=CPUS, policies=(policy(max_mhz=1200),))
    found = finding(node(section(cpu=facts, readings=idle_then(1200))), FREQUENCY)
    assert found.fault_class is FaultClass.CONFIGURATION
    assert found.summary == (
        "8 busy CPUs run at 1200 MHz, base clock is 2000 MHz, scaling_max_freq is 1200 MHz"
    )


def test_one_slow_cpu_of_many_busy_ones_is_left_alone() -> None:
    before, after = idle_then(3000)
    mixed = busy(3000)
    mixed = msgspec.structs.replace(mixed, mhz=(900, *mixed.mhz[1:]))
    after = msgspec.structs.replace(after, cpu=mixed)
    assert not judge(node(section(readings=(before, after))), FREQUENCY).findings


THROTTLE = "host.cpu-thermal-throttle"


def throttled(first: dict[str, int], second: dict[str, int]):  # type: ignore[no-untyped-def]
    return node(
        section(
            readings=readings(
                {"throttle": (PackageThrottle(package=0, **first),)},
                throttle=(PackageThrottle(package=0, **second),),
            )
        )
    )


def test_counters_of_an_old_heat_wave_stand_still() -> None:
    snapshot = throttled(
        {"package_count": 812, "package_ms": 90_000}, {"package_count": 812, "package_ms": 90_000}
    )
    assert notes(snapshot, THROTTLE) == ("812 events since boot, none that matters now",)


def test_a_short_throttle_event_is_no_fault() -> None:
    snapshot = throttled(
        {"package_count": 1, "package_ms": 10}, {"package_count": 2, "package_ms": 20}
    )
    assert judge(snapshot, THROTTLE).findings == ()


def test_throttling_now_is_a_share_of_the_sample() -> None:
    found = finding(
        throttled(
            {"package_count": 1, "package_ms": 10}, {"package_count": 40, "package_ms": 1010}
        ),
        THROTTLE,
    )
    assert found.summary == "CPU socket 0 was throttled by heat 50% of the sample"
    assert (found.severity, found.fault_class) == (Severity.WARNING, FaultClass.HARDWARE)
    assert found.explains == (FREQUENCY,)


def test_old_kernels_count_events_only() -> None:
    assert not judge(throttled({"core_count": 5}, {"core_count": 6}), THROTTLE).findings
    found = finding(throttled({"core_count": 5}, {"core_count": 45}), THROTTLE)
    assert found.summary == "CPU socket 0 was throttled by heat 20 times a second"


def test_guests_have_no_throttle_counters() -> None:
    gap = Gap(source="host", reason=GapReason.UNSUPPORTED, fields=("throttle",))
    assert notes(node(gaps=(gap,)), THROTTLE, Outcome.NOTAPPLICABLE) == ()


LOAD, PRESSURE = "host.load", "host.cpu-pressure"


@pytest.mark.parametrize(
    ("one", "five", "alarm"), [(16.0, 16.0, True), (99.0, 3.0, False), (3.0, 99.0, False)]
)
def test_load_has_to_last(one: float, five: float, alarm: bool) -> None:
    snapshot = node(section(readings=readings({"load_1m": one, "load_5m": five})))
    assert bool(judge(snapshot, LOAD).findings) is alarm


def test_load_of_busy_cpus_is_load_and_of_idle_ones_is_stuck_tasks() -> None:
    before, after = idle_then(3000)
    high = {"load_1m": 40.0, "load_5m": 31.5}
    before, after = (msgspec.structs.replace(r, **high) for r in (before, after))
    found = finding(node(section(readings=(before, after))), LOAD)
    assert (found.fault_class, found.summary) == (
        FaultClass.LOAD,
        "load average 40 and 31.5 (1, 5 min) on 8 CPUs, CPUs 100% busy",
    )
    after = msgspec.structs.replace(after, cpu=busy(3000, cpus=0))
    found = finding(node(section(readings=(before, after))), LOAD)
    assert found.fault_class is FaultClass.SOFTWARE
    assert found.summary == (
        "load average 40 and 31.5 (1, 5 min) on 8 CPUs, CPUs 0% busy: tasks are stuck in I/O or a "
        "driver"
    )


def test_a_busy_machine_without_gpu_stays_healthy() -> None:
    pressure = Pressure(some_avg10_percent=90.0, some_avg60_percent=80.0)
    snapshot = node(
        no_driver_section(
            readings=readings({"load_1m": 90.0, "load_5m": 90.0, "cpu_pressure": pressure})
        ),
        **NO_GPUS,
    )
    for id in (LOAD, PRESSURE):
        evaluation = judge(snapshot, id)
        assert evaluation.findings[0].severity is Severity.INFO
        assert evaluation.health is Health.OK


@pytest.mark.parametrize(
    ("ten", "sixty", "alarm"), [(60, 55, True), (90, 20, False), (3, 80, False)]
)
def test_cpu_pressure_has_to_last(ten: float, sixty: float, alarm: bool) -> None:
    pressure = Pressure(some_avg10_percent=float(ten), some_avg60_percent=float(sixty))
    evaluation = judge(node(section(readings=readings({"cpu_pressure": pressure}))), PRESSURE)
    assert bool(evaluation.findings) is alarm
    if alarm:
        assert evaluation.findings[0].summary == "some task waited for a CPU 55% of the last minute"
        assert evaluation.findings[0].fault_class is FaultClass.LOAD


def test_a_gpu_that_only_nvml_sees_counts() -> None:
    snapshot = node(no_driver_section(cpu=POWERSAVE), nvml=nvml(1), pci=None)
    assert judge(snapshot, GOVERNOR).results[0].outcome is Outcome.PASS
