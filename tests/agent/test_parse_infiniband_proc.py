"""Parsers of port files and of /proc/PID files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.parse.infiniband import (
    PortRate,
    parse_port_counter,
    parse_port_rate,
    parse_port_state,
)
from agent.parse.proc_pid import (
    ProcStat,
    ProcStatus,
    parse_cgroup,
    parse_stack,
    parse_stat,
    parse_status,
    parse_wchan,
)
from probes.cpulist import parse_cpulist
from tests.support.nics_processes import docstring_sample


def test_docstring_samples() -> None:
    assert parse_port_state(docstring_sample(parse_port_state)) == "ACTIVE"
    assert parse_port_rate(docstring_sample(parse_port_rate)) == PortRate(200.0, 4)
    assert parse_port_counter(docstring_sample(parse_port_counter)) is None
    assert parse_stat(docstring_sample(parse_stat)) == ProcStat(
        comm="python3 (rank)",
        state="D",
        ppid=4700,
        cpu_ticks=6000,
        threads=59,
        start_ticks=90210,
        is_kernel_thread=False,
    )
    assert parse_status(docstring_sample(parse_status)) == ProcStatus(
        name="python",
        state="D",
        ppid=4700,
        uid=1000,
        threads=59,
        nspids=(4711, 61),
        kill_pending=True,
        cpus_allowed_list="0-31,64-95",
        context_switches=922345,
    )
    assert parse_wchan(docstring_sample(parse_wchan)) == "folio_wait_bit_common"
    assert parse_stack(docstring_sample(parse_stack)) == (
        "folio_wait_bit_common",
        "nfs_file_fsync [nfs]",
    )
    path = docstring_sample(parse_cgroup).removeprefix("0::")
    assert parse_cgroup(docstring_sample(parse_cgroup)) == (path, "4c01db0b339c")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("2.5 Gb/sec (1X SDR)", PortRate(2.5, 1)),
        ("100 Gb/sec (2X HDR)\n", PortRate(100.0, 2)),
        ("800 Gb/sec (4X XDR)", PortRate(800.0, 4)),
        ("100 Gb/sec", PortRate(100.0, None)),
    ],
)
def test_rates(text: str, rate: PortRate) -> None:
    assert parse_port_rate(text) == rate


def test_kernel_thread_and_unknown_state() -> None:
    line = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 7 0 0 20 0 1 0 12 0 0"
    assert parse_stat(line).is_kernel_thread
    assert parse_port_state("<unknown>") == "<unknown>"


@pytest.mark.parametrize(
    ("text", "container"),
    [
        ("0::/system.slice/docker-" + "ab" * 32 + ".scope\n", "abababababab"),
        (
            "12:pids:/kubepods/besteffort/pod1f/" + "cd" * 32 + "\n0::/\n",
            "cdcdcdcdcdcd",
        ),
        ("0::/machine.slice/libpod-" + "ef" * 32 + ".scope/container", "efefefefefef"),
        ("0::/lxc.payload.train1/user.slice", "train1"),
        ("0::/system.slice/slurmstepd.scope/job_77/step_0", None),
        ("", None),
    ],
)
def test_containers(text: str, container: str | None) -> None:
    assert parse_cgroup(text)[1] == container


def test_hidden_wait_channel() -> None:
    assert parse_wchan("0") is None
    assert parse_wchan("") is None


def test_old_stack_format_and_module() -> None:
    text = "[<ffffffffa09c376e>] uvm_gpu_retain_by_uuid+0x1e/0x40 [nvidia_uvm]\n[<0>] 0xffff\n"
    assert parse_stack(text) == ("uvm_gpu_retain_by_uuid [nvidia_uvm]",)


def test_cpulist() -> None:
    assert parse_cpulist("0-2,8\n") == (0, 1, 2, 8)
    assert parse_cpulist("") == ()


NEVER_RAISE: tuple[Callable[[str], object], ...] = (
    parse_port_state,
    parse_status,
    parse_wchan,
    parse_stack,
    parse_cgroup,
)
VALUE_ERROR_ONLY: tuple[Callable[[str], object], ...] = (
    parse_port_rate,
    parse_port_counter,
    parse_stat,
    parse_cpulist,
)
STAT_LIKE = st.lists(
    st.one_of(st.integers().map(str), st.text(max_size=5), st.just("(x)")), max_size=30
).map(" ".join)
STATUS_LIKE = st.lists(
    st.tuples(
        st.sampled_from(["Uid", "NSpid", "ShdPnd", "SigPnd", "Threads", "State", "x"]),
        st.text(max_size=30),
    ).map(": ".join)
).map("\n".join)


@given(st.one_of(st.text(), STAT_LIKE, STATUS_LIKE, st.binary().map(lambda b: b.decode("latin1"))))
@settings(max_examples=200, deadline=None)
def test_any_text(text: str) -> None:
    for parser in NEVER_RAISE:
        parser(text)
    for parser in VALUE_ERROR_ONLY:
        with contextlib.suppress(ValueError):
            parser(text)
