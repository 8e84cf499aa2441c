"""The machine around the GPUs: one section, two readings of what moves."""

from __future__ import annotations

import msgspec

from agent.collect.gaps import Gaps
from agent.collect.host_cpu import read_cpu, read_cpu_facts, read_cpuinfo, read_throttle
from agent.collect.host_driver import read_driver, read_modules
from agent.collect.host_limits import read_cgroup, read_cgroup_counters, read_limits
from agent.collect.host_memory import (
    read_file_systems,
    read_load,
    read_meminfo,
    read_pressure,
    read_vmstat,
)
from agent.host import Host
from agent.parse.cpuinfo import CpuInfoFile
from probes.gap import Gap
from probes.snapshot.host import Cgroup, Clock, CpuFacts, HostReading, HostSection

_STA_UNSYNC = 0x40  # linux/timex.h
_CLOCKSOURCE = "/sys/devices/system/clocksource/clocksource0"


def collect(host: Host) -> tuple[HostSection | None, tuple[Gap, ...]]:
    """Read everything once. None when not even /proc is there."""
    gaps = Gaps("host")
    if not host.exists("/proc/stat") and not host.exists("/proc/meminfo"):
        gaps.add_error(FileNotFoundError(2, "No such file or directory"), path="/proc")
        return None, gaps.folded()
    info = read_cpuinfo(host, gaps)
    cpu = read_cpu_facts(host, info, gaps)
    memory = read_meminfo(host, gaps)
    shm, file_systems = read_file_systems(host, gaps)
    cgroup = read_cgroup(host, gaps)
    modules = read_modules(host, gaps)
    section = HostSection(
        cpu_count=len(cpu.online) or None,
        cpu=cpu,
        memory_total_bytes=memory.get("MemTotal"),
        swap_total_bytes=memory.get("SwapTotal"),
        shared_memory=shm,
        file_systems=file_systems,
        limits=read_limits(host, gaps),
        cgroup=cgroup,
        clock=_clock(host, gaps),
        modules=modules,
        driver=read_driver(host, modules, gaps),
        readings=(_reading(host, cpu=cpu, info=info, memory=memory, cgroup=cgroup, gaps=gaps),),
    )
    return section, gaps.folded()


def resample(host: Host, section: HostSection) -> tuple[HostSection, tuple[Gap, ...]]:
    """Append a second reading of what moves."""
    gaps = Gaps("host")
    info, memory = read_cpuinfo(host, gaps), read_meminfo(host, gaps)
    reading = _reading(
        host, cpu=section.cpu, info=info, memory=memory, cgroup=section.cgroup, gaps=gaps
    )
    return msgspec.structs.replace(section, readings=(*section.readings, reading)), gaps.folded()


def _reading(
    host: Host,
    *,
    cpu: CpuFacts,
    info: CpuInfoFile,
    memory: dict[str, int],
    cgroup: Cgroup | None,
    gaps: Gaps,
) -> HostReading:
    vmstat = read_vmstat(host, gaps)
    load_1m, load_5m = read_load(host, gaps)
    return HostReading(
        at_ns=host.monotonic_ns(),
        cpu=read_cpu(host, cpu, info, gaps),
        throttle=read_throttle(host, info, gaps),
        load_1m=load_1m,
        load_5m=load_5m,
        cpu_pressure=read_pressure(host, "cpu", gaps),
        memory_pressure=read_pressure(host, "memory", gaps),
        io_pressure=read_pressure(host, "io", gaps),
        memory_available_bytes=memory.get("MemAvailable"),
        swap_free_bytes=memory.get("SwapFree"),
        pages_swapped_in=vmstat.get("pswpin"),
        pages_swapped_out=vmstat.get("pswpout"),
        cgroups=read_cgroup_counters(host, cgroup, gaps),
    )


def _clock(host: Host, gaps: Gaps) -> Clock:
    status: int | None = None
    error_us: int | None = None
    try:
        _, status, error_us = host.adjtimex()
    except (OSError, ValueError) as error:
        gaps.add_error(error, "synchronized", path="adjtimex")
    source: str | None = None
    available: tuple[str, ...] = ()
    try:
        source = host.read_text(f"{_CLOCKSOURCE}/current_clocksource").strip() or None
        available = tuple(host.read_text(f"{_CLOCKSOURCE}/available_clocksource").split())
    except OSError as error:
        gaps.add_error(error, "clocksource", path=_CLOCKSOURCE)
    return Clock(
        synchronized=None if status is None else not status & _STA_UNSYNC,
        status_bits=status,
        estimated_error_us=error_us,
        clocksource=source,
        available_clocksources=available,
    )
