"""CPUs: how many, of what make, under which cpufreq settings, how fast and how busy."""

from __future__ import annotations

import re

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.cpuinfo import CpuInfoFile, parse_cpuinfo
from agent.parse.cpustat import parse_cpustat
from probes.cpulist import parse_cpulist
from probes.gap import GapReason
from probes.snapshot.host import CpuFacts, CpuPolicy, CpuReading, NumaNode, PackageThrottle

_CPU = "/sys/devices/system/cpu"
_NODE = "/sys/devices/system/node"
_CPUINFO_LIMIT = 16 << 20  # about 1.6 KB a CPU
_NUMBER = re.compile(r"\d{1,15}\Z", re.ASCII)
_POLICY_FILES = (
    "scaling_governor",
    "scaling_min_freq",
    "scaling_max_freq",
    "cpuinfo_max_freq",
    "base_frequency",
)


def read_cpu_facts(host: Host, info: CpuInfoFile, gaps: Gaps) -> CpuFacts:
    """Topology, NUMA nodes and cpufreq settings."""
    online = _online(host, info, gaps)
    packages = {cpu.package for cpu in info.cpus if cpu.package is not None}
    return CpuFacts(
        online=online,
        model=info.model,
        sockets=len(packages) or None,
        numa_nodes=_numa_nodes(host, gaps),
        policies=_policies(host, gaps),
    )


def read_cpuinfo(host: Host, gaps: Gaps) -> CpuInfoFile:
    """Parse /proc/cpuinfo: one read gives every CPU's measured frequency on x86."""
    try:
        return parse_cpuinfo(host.read_text("/proc/cpuinfo", _CPUINFO_LIMIT))
    except OSError as error:
        gaps.add_error(error, "model", "sockets", "mhz", path="/proc/cpuinfo")
        return CpuInfoFile((), None, None)


def _online(host: Host, info: CpuInfoFile, gaps: Gaps) -> tuple[int, ...]:
    path = f"{_CPU}/online"
    try:
        return parse_cpulist(host.read_text(path))
    except (OSError, ValueError) as error:
        if info.cpus:
            return tuple(sorted(cpu.processor for cpu in info.cpus))
        gaps.add_error(error, "cpu_count", "online", path=path)
        return ()


def _numa_nodes(host: Host, gaps: Gaps) -> tuple[NumaNode, ...]:
    try:
        names = host.listdir(_NODE)
    except OSError as error:
        gaps.add_error(error, "numa_nodes", path=_NODE)
        return ()
    nodes = []
    for name in names:
        if not name.startswith("node") or not _NUMBER.match(name[4:]):
            continue
        cpulist: str | None = None
        try:
            cpulist = host.read_text(f"{_NODE}/{name}/cpulist")
        except OSError as error:
            gaps.add_error(error, "cpulist", device=name)
        nodes.append(NumaNode(node=int(name[4:]), cpulist=cpulist))
    return tuple(sorted(nodes, key=lambda node: node.node))


def _policies(host: Host, gaps: Gaps) -> tuple[CpuPolicy, ...] | None:
    """One record per distinct set of settings."""
    base = f"{_CPU}/cpufreq"
    try:
        names = host.listdir(base)
    except FileNotFoundError:
        return ()
    except OSError as error:
        gaps.add_error(error, "policies", path=base)
        return None
    settings: dict[tuple[str | None, ...], list[int]] = {}
    driver: str | None = None  # one for the machine
    for name in names:
        if not name.startswith("policy"):
            continue
        at = f"{base}/{name}"
        driver = driver or _optional(host, f"{at}/scaling_driver")
        cpus = _optional(host, f"{at}/affected_cpus")
        values = tuple(_optional(host, f"{at}/{file}") for file in _POLICY_FILES)
        numbers = [int(word) for word in (cpus or "").split() if _NUMBER.match(word)]
        if values[0] is None or not numbers:
            gaps.add(
                GapReason.MALFORMED, "governor", device=name, detail=f"{at}: no governor or no CPUs"
            )
            continue
        settings.setdefault(values, []).extend(numbers)
    return tuple(
        CpuPolicy(
            cpus=tuple(sorted(cpus)),
            driver=driver,
            governor=values[0],
            min_mhz=_mhz(values[1]),
            max_mhz=_mhz(values[2]),
            hardware_max_mhz=_mhz(values[3]),
            base_mhz=_mhz(values[4]),
        )
        for values, cpus in settings.items()
    )


def _optional(host: Host, path: str) -> str | None:
    """A file that only some drivers have."""
    try:
        return host.read_text(path, 4096).strip() or None
    except OSError:
        return None


def _mhz(khz: str | None) -> int | None:
    count = _count(khz)
    return None if count is None else count // 1000


def _count(text: str | None) -> int | None:
    return int(text) if text and _NUMBER.match(text) else None


def read_cpu(host: Host, facts: CpuFacts, info: CpuInfoFile, gaps: Gaps) -> CpuReading | None:
    """Frequency and busy ticks of every CPU that is online."""
    try:
        ticks = parse_cpustat(host.read_text("/proc/stat"))
    except OSError as error:
        gaps.add_error(error, "busy_ticks", "total_ticks", path="/proc/stat")
        ticks = {}
    mhz = {cpu.processor: cpu.mhz for cpu in info.cpus if cpu.mhz is not None}
    for policy in facts.policies or () if not mhz else ():  # no MHz in /proc/cpuinfo: Arm
        for cpu in policy.cpus:
            at = f"{_CPU}/cpu{cpu}/cpufreq"
            now = _mhz(_optional(host, f"{at}/cpuinfo_avg_freq")) or _mhz(
                _optional(host, f"{at}/scaling_cur_freq")
            )
            if now is not None:
                mhz[cpu] = now
    whole = all(cpu in ticks for cpu in facts.online)
    if not mhz and not (ticks and whole):
        return None
    return CpuReading(
        mhz=tuple(mhz.get(cpu) for cpu in facts.online) if mhz else (),
        busy_ticks=tuple(ticks[cpu][0] for cpu in facts.online) if whole else (),
        total_ticks=tuple(ticks[cpu][1] for cpu in facts.online) if whole else (),
    )


def read_throttle(host: Host, info: CpuInfoFile, gaps: Gaps) -> tuple[PackageThrottle, ...]:
    """Thermal throttle counters, x86 bare metal only; one CPU of each core speaks for the core."""
    cores: dict[int, dict[int | None, int]] = {}
    for cpu in info.cpus:
        cores.setdefault(cpu.package or 0, {}).setdefault(cpu.core, cpu.processor)
    found = []
    for package, members in sorted(cores.items()):
        speaker = min(members.values())
        if not host.exists(f"{_CPU}/cpu{speaker}/thermal_throttle"):
            gaps.add(
                GapReason.UNSUPPORTED,
                "throttle",
                detail=f"{_CPU}/cpu{speaker}/thermal_throttle is not there (guest, AMD or Arm)",
            )
            return ()
        counts, times = [], []
        for cpu_number in members.values():
            at = f"{_CPU}/cpu{cpu_number}/thermal_throttle"
            counts.append(_count(_optional(host, f"{at}/core_throttle_count")))
            times.append(_count(_optional(host, f"{at}/core_throttle_total_time_ms")))
        at = f"{_CPU}/cpu{speaker}/thermal_throttle"
        found.append(
            PackageThrottle(
                package=package,
                package_count=_count(_optional(host, f"{at}/package_throttle_count")),
                package_ms=_count(_optional(host, f"{at}/package_throttle_total_time_ms")),
                core_count=sum(count for count in counts if count is not None)
                if any(count is not None for count in counts)
                else None,
                core_max_ms=max((time for time in times if time is not None), default=None),
            )
        )
    return tuple(found)
