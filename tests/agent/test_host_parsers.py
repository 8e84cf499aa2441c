"""The parsers of the host section: their docstrings' samples, and arbitrary text."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.parse.cgroup import parse_cpu_max, parse_memory_max, parse_proc_cgroup, quota_cpus
from agent.parse.cpuinfo import CpuInfo, CpuInfoFile, parse_cpuinfo
from agent.parse.cpustat import parse_cpustat
from agent.parse.keyvalue import parse_keyvalue
from agent.parse.limits import parse_limits
from agent.parse.loadavg import parse_loadavg
from agent.parse.mounts import Mount, parse_mounts
from agent.parse.nvidia_version import parse_nvidia_version
from agent.parse.proc_modules import parse_proc_modules
from agent.parse.psi import parse_psi
from probes.cpulist import parse_cpulist
from probes.snapshot.host import Pressure, ResourceLimit


def sample(function: Callable[..., object]) -> str:
    """The literal block of a docstring."""
    block = inspect.cleandoc(function.__doc__ or "").split("::\n", 1)[1]
    return inspect.cleandoc(block) + "\n"


def test_cpuinfo() -> None:
    assert parse_cpuinfo(sample(parse_cpuinfo)) == CpuInfoFile(
        (CpuInfo(processor=0, mhz=3000, package=0, core=4),),
        "Intel(R) Xeon(R) Platinum 8480C",
        True,
    )


def test_cpuinfo_of_arm_has_neither_clock_nor_flags() -> None:
    text = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd\n\nprocessor\t: 1\n"
    assert parse_cpuinfo(text) == CpuInfoFile(
        (CpuInfo(0, None, None, None), CpuInfo(1, None, None, None)), None, None
    )


def test_cpuinfo_of_bare_metal_has_no_hypervisor_flag() -> None:
    assert parse_cpuinfo("processor : 0\nflags : fpu vme\n").hypervisor is False


def test_keyvalue_turns_kilobytes_into_bytes() -> None:
    assert parse_keyvalue(sample(parse_keyvalue)) == {"MemTotal": 528000000 * 1024, "pswpin": 12}


def test_psi() -> None:
    assert parse_psi(sample(parse_psi)) == Pressure(
        some_avg10_percent=1.53,
        some_avg60_percent=0.87,
        some_total_us=6900871,
        full_avg10_percent=0.0,
        full_avg60_percent=0.0,
        full_total_us=1200,
    )


def test_psi_of_cpu_before_5_13_has_no_full_line() -> None:
    pressure = parse_psi("some avg10=0.00 avg60=0.50 avg300=0.00 total=7\n")
    assert (pressure.some_avg60_percent, pressure.full_avg60_percent) == (0.5, None)


def test_cpustat_takes_neither_the_sum_nor_idle_and_iowait() -> None:
    assert parse_cpustat(sample(parse_cpustat)) == {0: (2864, 554165)}


def test_loadavg() -> None:
    assert parse_loadavg(sample(parse_loadavg)) == (12.05, 8.08)


def test_limits() -> None:
    assert parse_limits(sample(parse_limits)) == {
        "Max open files": ResourceLimit(soft=1024, hard=524288),
        "Max locked memory": ResourceLimit(soft=None, hard=None),
    }


def test_proc_modules() -> None:
    assert parse_proc_modules(sample(parse_proc_modules)) == ("nvidia_uvm", "nvidia")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024",
            ("550.127.05", "proprietary"),
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build",
            ("570.86.15", "open"),
        ),
    ],
)
def test_nvidia_version(line: str, expected: tuple[str, str]) -> None:
    assert parse_nvidia_version(line) == expected


def test_nvidia_version_sample() -> None:
    assert parse_nvidia_version(sample(parse_nvidia_version)) == ("560.35.03", "open")


def test_mounts() -> None:
    assert parse_mounts(sample(parse_mounts)) == (
        Mount("/dev/shm", "tmpfs", "rw,nosuid,nodev,size=65536k"),
        Mount("/data one", "ext4", "rw,relatime"),
    )


def test_cgroup_files() -> None:
    assert parse_proc_cgroup(sample(parse_proc_cgroup)) == {
        "memory": "/docker/4f1d",
        "cpu": "/docker/4f1d",
        "cpuacct": "/docker/4f1d",
        "": "/system.slice/cron.service",
    }
    assert parse_cpu_max(sample(parse_cpu_max)) == 4.0
    assert parse_cpu_max("max 100000\n") is None
    assert quota_cpus("-1", "100000") is None
    assert quota_cpus("150000\n", "100000\n") == 1.5
    assert parse_memory_max(sample(parse_memory_max)) == 68719476736
    assert parse_memory_max("max") is None
    assert parse_memory_max("9223372036854771712\n") is None  # version 1: no limit


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,8,10-11\n", (0, 1, 2, 8, 10, 11)), ("", ()), ("\n", ()), ("5", (5,))]
)
def test_cpulist(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == cpus


@pytest.mark.parametrize("text", ["a", "3-1", "0-99999999", "-1", "1-2-3", "٣"])
def test_cpulist_refuses_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match="not a CPU list"):
        parse_cpulist(text)


@given(st.sets(st.integers(0, 8191)))
@settings(max_examples=100, deadline=None)
def test_cpulist_sorts(cpus: set[int]) -> None:
    assert parse_cpulist(",".join(map(str, cpus))) == tuple(sorted(cpus))


NEVER_RAISE: list[Callable[[str], object]] = [
    parse_cpuinfo,
    parse_keyvalue,
    parse_cpustat,
    parse_limits,
    parse_proc_modules,
    parse_mounts,
    parse_proc_cgroup,
]
ONLY_VALUE_ERROR: list[Callable[[str], object]] = [
    parse_psi,
    parse_loadavg,
    parse_nvidia_version,
    parse_cpulist,
    parse_cpu_max,
    parse_memory_max,
]
# text of the formats' own characters finds more than any text does
_LINES = st.one_of(
    st.text(),
    st.text(alphabet="cpu0123456789 .:,-/kBMaxunlited\t\n()", max_size=200),
    st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")),
)


@pytest.mark.parametrize("parser", NEVER_RAISE)
@given(text=_LINES)
@settings(max_examples=100, deadline=None)
def test_any_text_is_taken(parser: Callable[[str], object], text: str) -> None:
    parser(text)
    parser(sample(parser) + text)


@pytest.mark.parametrize("parser", ONLY_VALUE_ERROR)
@given(text=_LINES)
@settings(max_examples=100, deadline=None)
def test_any_text_is_taken_or_refused(parser: Callable[[str], object], text: str) -> None:
    with contextlib.suppress(ValueError):
        parser(text)
