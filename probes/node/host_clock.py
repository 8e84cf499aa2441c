"""The clock: whether it is kept right, and what it is read from."""

from __future__ import annotations

from probes.finding import Action, Confidence, FaultClass, Finding, JobImpact, Remedy, Severity
from probes.host_facts import evidence, facts
from probes.registry import Clear, Statements, Unread, probe
from probes.view import Node

# Read through a device register or the timer tick: slow, and one at a time.
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"})


@probe("host.clock-unsynchronized", needs=("host",))
def clock_unsynchronized(node: Node) -> Statements:
    """The kernel's clock is not kept in step with others.

    Nothing gets slower by it. But to say which rank was late, the logs and dumps of several nodes
    are joined by time; with clocks apart the order of events is wrong, and the blame with it.

    No fault on a single node: always info. chrony without `rtcsync` leaves the kernel's bit set
    although it keeps the clock, and some hypervisors keep a guest's clock from outside.

    Sure: possible: the kernel's own bit (STA_UNSYNC), which a time service may not maintain.

    Do: `chronyc tracking` or `timedatectl`; enable chrony, ntpd, systemd-timesyncd or phc2sys.
    """
    clock, host = facts(node).clock, node.host_component()
    if clock.synchronized is None:
        yield Unread("host", "synchronized")
        return
    if clock.synchronized:
        yield Clear(host)
        return
    yield Finding(
        id="host.clock-unsynchronized",
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary="kernel clock is marked unsynchronized: times of several nodes may not compare",
        evidence=(
            evidence(
                "adjtimex status",
                clock.status_bits,
                "timedatectl; chronyc tracking",
                quote="STA_UNSYNC (0x40) is set",
                source="adjtimex",
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Enable a time service (chrony, ntpd, systemd-timesyncd, phc2sys).",
            disruptive=False,
        ),
    )


@probe("host.clocksource", needs=("host",))
def clocksource(node: Node) -> Statements:
    """Time is read from a slow hardware timer instead of the CPU's counter.

    Programs read the clock all the time: frameworks, NCCL, profilers. With the TSC that takes some
    20 ns without entering the kernel; HPET and ACPI PM are device registers that take a microsecond
    and more, by system call, one CPU at a time. All host work slows, in all ranks.

    No fault: tsc, kvm-clock, Hyper-V's and Xen's clocks, Arm's arch_sys_counter, and any name not
    known to be slow.

    Sure: proven what is used. If the TSC is not even on offer the kernel stopped trusting it
    (firmware, or a watchdog misled by load); if it is on offer, somebody chose otherwise.

    Do: `dmesg | grep -i -e clocksource -e tsc`; drop clocksource= from the command line; with an
    unstable TSC update the firmware and compare with a node of the same kind.
    """
    clock, host = facts(node).clock, node.host_component()
    if clock.clocksource is None:
        yield Unread("host", "clocksource")
        return
    if clock.clocksource not in _SLOW_CLOCKS:
        yield Clear(host)
        return
    chosen = "tsc" in clock.available_clocksources
    yield Finding(
        id="host.clocksource",
        severity=Severity.WARNING,
        confidence=Confidence.PROVEN,
        fault_class=FaultClass.CONFIGURATION if chosen else FaultClass.CANNOT_TELL,
        job_impact=JobImpact.SLOWS,
        component=host,
        summary=f"clock source is {clock.clocksource}, "
        + ("tsc is on offer" if chosen else "tsc is not on offer: the kernel does not trust it"),
        evidence=(
            evidence(
                "/sys/devices/system/clocksource/clocksource0/current_clocksource",
                clock.clocksource,
                "grep . /sys/devices/system/clocksource/clocksource0/*_clocksource",
                quote=" ".join(clock.available_clocksources) or None,
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE if chosen else Action.NONE,
            text="dmesg | grep -i -e clocksource -e tsc says why; drop clocksource= from the "
            "kernel command line, or update the firmware.",
            disruptive=False,
        ),
    )
