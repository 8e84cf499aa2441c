"""CPU clocks: settings that hold them down, what they are under load, heat."""

from __future__ import annotations

from probes.finding import (
    Action,
    Basis,
    Confidence,
    FaultClass,
    Finding,
    JobImpact,
    Remedy,
    Severity,
)
from probes.gap import GapReason
from probes.host_facts import (
    NO_GPU,
    busy_cpus,
    evidence,
    expected_mhz,
    facts,
    gpu_count,
    last,
)
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, Unread, probe
from probes.snapshot.host import CpuPolicy, HostSection, PackageThrottle
from probes.stats import median
from probes.view import Node

_FREQUENCY = {
    "busy_percent": Limit(
        80.0, "% busy", "laggard: a CPU that rests a fifth of the time may clock down"
    ),
    "below_base_percent": Limit(
        25.0, "% below", "laggard: AVX-512 work runs up to about a fifth under the base clock"
    ),
    "below_max_percent": Limit(
        50.0,
        "% below",
        "laggard: the maximum is a one-core boost; all-core boost is well above half",
    ),
    "share_percent": Limit(25.0, "% of busy CPUs", "laggard: one slow socket of four"),
}
# In these drivers' own mode `powersave` lets the processor choose its clock up to the maximum
# (Documentation/admin-guide/pm/{intel_pstate,amd-pstate}.rst); with any other driver it is the
# generic governor, which stays at scaling_min_freq.
_SELF_CLOCKING = frozenset({"intel_pstate", "amd-pstate-epp"})
_NO_CPUFREQ = NotApplicable("no cpufreq here: the firmware or the hypervisor sets the CPU clock")


def _slow(
    section: HostSection, policies: tuple[CpuPolicy, ...], busy: dict[int, int], limits: Limits
) -> tuple[list[int], float, int, str] | None:
    """``(MHz of the slow busy CPUs, least, reference, its name)`` of the worst policy, or None."""
    worst = None
    for policy in policies:
        bound = expected_mhz(policy, limits["below_base_percent"], limits["below_max_percent"])
        mhz = [busy[cpu] for cpu in policy.cpus if cpu in busy]
        if bound is None or not mhz:
            continue
        low = [value for value in mhz if value < bound[0]]
        many = low and 100 * len(low) >= limits["share_percent"] * len(mhz)
        if many and (worst is None or len(low) > len(worst[0])):
            worst = (low, *bound)
    return worst


@probe("host.cpu-governor", needs=("host",), limits=_FREQUENCY)
def cpu_governor(node: Node, limits: Limits) -> Statements:
    """A CPU frequency governor holds busy CPUs below their clock.

    Launching kernels, loading data and the NCCL proxy threads run on CPU cores. At a third of the
    clock they feed the GPUs late, and the rank on this node arrives last at every all-reduce.

    No fault: `powersave` under intel_pstate or amd-pstate (active mode) is only a name, the
    processor still boosts; what counts is the clock that busy CPUs were measured at. Guests have no
    governor at all. A governor that holds CPUs low while nothing is busy costs nothing yet: info.

    Sure: likely when busy CPUs were measured low; the governor is then the first thing to change.

    Do: `cpupower frequency-set -g performance`, then measure again under load.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    policies = section.cpu.policies
    if policies is None:
        yield Unread("host", "policies")
        return
    if not policies:
        yield _NO_CPUFREQ
        return
    saving = tuple(policy for policy in policies if policy.governor != "performance")
    if not saving:
        yield Clear(host)
        return
    names = "/".join(sorted({f"{policy.governor} ({policy.driver})" for policy in saving}))
    busy = busy_cpus(section, limits["busy_percent"])
    slow = _slow(section, saving, busy, limits) if busy else None
    first = f"/sys/devices/system/cpu/cpu{saving[0].cpus[0]}/cpufreq/scaling_governor"
    recheck = "grep . /sys/devices/system/cpu/cpufreq/policy*/scaling_governor | sort | uniq -c"
    remedy = Remedy(
        action=Action.RECONFIGURE,
        text="cpupower frequency-set -g performance, then measure again under load.",
        disruptive=False,
    )
    if slow:
        low, _, reference, name = slow
        yield Finding(
            id="host.cpu-governor",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            fault_class=FaultClass.CONFIGURATION,
            job_impact=JobImpact.SLOWS,
            component=host,
            summary=f"{len(low)} busy CPUs run at {median(low):.0f} MHz under governor "
            f"{names}, {name} clock is {reference} MHz",
            evidence=(
                evidence(
                    first, saving[0].governor, recheck, expected=("performance", Basis.VENDOR_LIMIT)
                ),
                evidence(
                    "/proc/cpuinfo",
                    round(median(low)),
                    "grep MHz /proc/cpuinfo | sort | uniq -c",
                    unit="MHz",
                    expected=(reference, Basis.DEVICE_MAX),
                ),
            ),
            explains=("host.cpu-frequency-low",),
            remedy=remedy,
        )
        return
    held = tuple(
        policy
        for policy in saving
        if policy.governor == "powersave"
        and policy.driver not in _SELF_CLOCKING
        and policy.min_mhz is not None
        and (policy.hardware_max_mhz or 0) > policy.min_mhz
    )
    if held and not busy:
        count = sum(len(policy.cpus) for policy in held)
        yield Finding(
            id="host.cpu-governor",
            severity=Severity.INFO,
            confidence=Confidence.LIKELY,
            fault_class=FaultClass.CONFIGURATION,
            job_impact=JobImpact.NONE,
            component=host,
            summary=f"governor {names} holds {count} CPUs at {held[0].min_mhz} MHz of "
            f"{held[0].hardware_max_mhz} MHz; no CPU was busy, so no cost was measured",
            evidence=(evidence(first, held[0].governor, recheck),),
            remedy=remedy,
        )
        return
    cost = (
        f"busy CPUs measured at {median(busy.values()):.0f} MHz"
        if busy
        else "no cost was measured: no CPU was seen busy"
    )
    yield Clear(host, f"governor {names}: {cost}")


@probe("host.cpu-frequency-low", needs=("host",), limits=_FREQUENCY)
def cpu_frequency_low(node: Node, limits: Limits) -> Statements:
    """Busy CPUs run far below their base clock.

    The measured clock under load (APERF/MPERF through /proc/cpuinfo) is what the CPU really does,
    whatever the governor is called. Low means heat, a power cap, a frequency limit somebody set, or
    a processor that asserts PROCHOT because a sensor or a power supply is bad. Everything that the
    CPU does for the GPUs takes longer by the same factor.

    No fault: a low clock at rest; AVX-512 work a little under the base clock; all-core load well
    under the one-core maximum; guests, whose clock the host sets.

    Sure: likely: it is measured, but over seconds. The cause is proven only where a frequency limit
    or throttle counters say so; else the class is cannot_tell.

    Do: compare with a node of the same kind under the same load; look at scaling_max_freq, the
    BMC's power limit and event log, and `turbostat`.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    policies = section.cpu.policies
    if policies is None:
        yield Unread("host", "policies")
        return
    if not policies:
        yield _NO_CPUFREQ
        return
    if all(policy.base_mhz is None and policy.hardware_max_mhz is None for policy in policies):
        yield Unread("host", "hardware_max_mhz")
        return
    busy = busy_cpus(section, limits["busy_percent"])
    if busy is None:
        yield Unread("host", "mhz", reason=GapReason.NOT_COLLECTED)
        return
    slow = _slow(section, policies, busy, limits)
    if slow is None:
        note = None if busy else "no CPU was busy: a clock at rest is power saving"
        yield Clear(host, note)
        return
    low, least, reference, name = slow
    capped = next(
        (policy for policy in policies if policy.max_mhz is not None and policy.max_mhz < least),
        None,
    )
    proofs = [
        evidence(
            "/proc/cpuinfo",
            round(median(low)),
            "grep MHz /proc/cpuinfo | sort | uniq -c; turbostat --num_iterations 1",
            unit="MHz",
            expected=(reference, Basis.DEVICE_MAX),
        )
    ]
    cause, fault_class = "", FaultClass.CANNOT_TELL
    text = "Look at the BMC's power limit and event log and at turbostat; compare with a like node."
    if capped is not None:
        cause, fault_class = f", scaling_max_freq is {capped.max_mhz} MHz", FaultClass.CONFIGURATION
        text = "Somebody lowered scaling_max_freq: cpupower frequency-set -u restores it."
        at = f"/sys/devices/system/cpu/cpu{capped.cpus[0]}/cpufreq/scaling_max_freq"
        proofs.append(
            evidence(
                at, capped.max_mhz, f"cat {at}", unit="MHz", expected=(reference, Basis.DEVICE_MAX)
            )
        )
    yield Finding(
        id="host.cpu-frequency-low",
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        fault_class=fault_class,
        job_impact=JobImpact.SLOWS,
        component=host,
        summary=f"{len(low)} busy CPUs run at {median(low):.0f} MHz, {name} clock is "
        f"{reference} MHz{cause}",
        evidence=tuple(proofs),
        remedy=Remedy(
            action=Action.RECONFIGURE if capped else Action.NONE, text=text, disruptive=False
        ),
    )


@probe(
    "host.cpu-thermal-throttle",
    needs=("host",),
    limits={
        "duty_percent": Limit(5.0, "% of the sample", "laggard: a twentieth of the time is felt"),
        "events_per_s": Limit(
            1.0, "events/s", "laggard: for kernels before 5.6, which count events but no time"
        ),
    },
)
def cpu_thermal_throttle(node: Node, limits: Limits) -> Statements:
    """A CPU is being throttled by heat now.

    The processor lowers its clock until it cools down: the whole node's host work slows, and often
    the GPUs next to it are hot as well.

    No fault: counters that stand still. They count since boot, and a warm minute last week is no
    fault now; nor is a single event in the sample.

    Sure: proven that it throttled during the sample (the processor's own counter).

    Do: look at fans, inlet temperature and the heat sink; compare with the neighbours in the rack.
    """
    section, host = facts(node), node.host_component()
    newest = last(section)
    if newest is None or not newest.throttle:
        yield Unread("host", "throttle")
        return
    if len(section.readings) < 2:
        yield Unread("host", "throttle", reason=GapReason.NOT_COLLECTED)
        return
    seconds = (newest.at_ns - section.readings[0].at_ns) / 1e9
    before = {entry.package: entry for entry in section.readings[0].throttle}
    worst: tuple[float, str, PackageThrottle] | None = None
    total = 0
    for entry in newest.throttle:
        total += entry.package_count or 0
        first = before.get(entry.package)
        if first is None or seconds <= 0:
            continue
        score, text = _throttled(first, entry, seconds, limits)
        if score > 0 and (worst is None or score > worst[0]):
            worst = (score, text, entry)
    if worst is None:
        yield Clear(host, f"{total} events since boot, none that matters now" if total else None)
        return
    _, text, entry = worst
    yield Finding(
        id="host.cpu-thermal-throttle",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.HARDWARE,
        job_impact=JobImpact.SLOWS,
        component=host,
        summary=f"CPU socket {entry.package} was throttled by heat {text}",
        evidence=(
            evidence(
                "/sys/devices/system/cpu/cpu*/thermal_throttle/package_throttle_count",
                entry.package_count,
                "grep . /sys/devices/system/cpu/cpu0/thermal_throttle/*",
                unit="events since boot",
            ),
        ),
        explains=("host.cpu-frequency-low",),
        remedy=Remedy(
            action=Action.DRAIN,
            text="Look at fans, inlet temperature and heat sink; compare with the rack neighbours.",
            disruptive=False,
        ),
    )


def _throttled(
    first: PackageThrottle, now: PackageThrottle, seconds: float, limits: Limits
) -> tuple[float, str]:
    """How much over its limit (0: not) and in words; time where the kernel keeps it."""
    spans = [
        after - before
        for before, after in (
            (first.package_ms, now.package_ms),
            (first.core_max_ms, now.core_max_ms),
        )
        if before is not None and after is not None
    ]
    if spans:
        duty = min(max(spans) / (seconds * 10), 100.0)
        over = duty >= limits["duty_percent"] > 0
        return (duty / limits["duty_percent"] if over else 0.0), f"{duty:.0f}% of the sample"
    events = [
        after - before
        for before, after in (
            (first.package_count, now.package_count),
            (first.core_count, now.core_count),
        )
        if before is not None and after is not None
    ]
    rate = max(events, default=0) / seconds
    if max(events, default=0) > 1 and rate >= limits["events_per_s"] > 0:
        return rate / limits["events_per_s"], f"{rate:.0f} times a second"
    return 0.0, ""
