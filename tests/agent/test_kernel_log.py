"""Kernel logs in every form: headers, times, boots, messages, folding, floods."""

import datetime
import inspect
import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.parse.kernel_log import TimeReference, parse_kernel_log, parse_log_line, parse_log_lines
from agent.parse.kernel_message import WORDS, add_line, awaits_more, parse_kernel_message
from agent.parse.nvrm_message import parse_nvrm, parse_sxid
from agent.redact import Redactor
from probes.kernel_fold import MAX_PER_KIND
from probes.snapshot.kernel import KernelEvent, KernelSection

TAKEN_NS = 1_773_591_700_000_000_000  # 2026-03-15T16:21:40Z
REFERENCE = TimeReference(taken_at_ns=TAKEN_NS, uptime_s=402_211.0)
XID_NS = 1_773_591_600_000_000_000  # 2026-03-15T16:20:00Z
TEXT = "NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=python"


def sample(function: object) -> list[str]:
    """The indented block of a docstring."""
    doc = inspect.getdoc(function) or ""
    block = doc.partition("::\n\n")[2]
    return [line[4:] for line in block.splitlines() if line.startswith("    ")]


def facts(event: KernelEvent) -> dict[str, object]:
    """What an event says beyond line and place."""
    found: dict[str, object] = msgspec.json.decode(msgspec.json.encode(event))
    return {
        key: value
        for key, value in found.items()
        if key not in ("line", "locator", "at_s", "last_at_s")
    }


def only(text: str, **options: object) -> KernelEvent:
    section = parse_kernel_log(text, "kmsg", **options)  # type: ignore[arg-type]
    (event,) = section.events
    return event


# --- headers ---


def test_every_form_of_the_docstring_is_the_same_message() -> None:
    lines = sample(parse_log_line)
    assert len(lines) == 10
    for line in lines[:-1]:
        found = parse_log_line(line, 3, REFERENCE)
        assert found is not None
        assert found.text.startswith("NVRM: Xid (PCI:0000:9a:00): 43, pid=4711"), line
        assert found.tag == "kernel"
        assert found.at_s in (None, 402111.00414), line
        assert found.at_ns is None or found.at_ns // 10**9 == XID_NS // 10**9, line
        assert found.at_s is not None or found.at_ns is not None, line
        assert found.locator == ("seq 1843" if line.startswith("6,") else "line 3")


def test_journal_json() -> None:
    entry = {
        "_TRANSPORT": "kernel", "MESSAGE": TEXT, "__MONOTONIC_TIMESTAMP": "402111009999",
        "_SOURCE_MONOTONIC_TIMESTAMP": "402111004140", "__REALTIME_TIMESTAMP": "1773591600004140",
        "__CURSOR": "s=1;i=2", "SYSLOG_IDENTIFIER": "kernel",
    }  # fmt: skip
    found = parse_log_line(json.dumps(entry), 1, REFERENCE)
    assert found is not None
    assert (found.text, found.at_s, found.at_ns) == (TEXT, 402111.00414, XID_NS + 4_140_000)
    entry["MESSAGE"] = list(TEXT.encode() + b"\xff")  # type: ignore[assignment]
    found = parse_log_line(json.dumps(entry), 1, REFERENCE)
    assert found is not None
    assert found.text == TEXT + "\ufffd"
    log = json.dumps(entry, separators=(",", ":"))
    assert [event.code for event in parse_kernel_log(log, "journal").events] == [43]
    entry["_TRANSPORT"], entry["SYSLOG_IDENTIFIER"] = "syslog", "python"
    found = parse_log_line(json.dumps(entry), 1, REFERENCE)
    assert found is not None
    assert found.tag == "python"
    assert parse_log_line(json.dumps(entry)[:80], 1, REFERENCE) is None


@pytest.mark.parametrize(
    ("line", "text", "at_s"),
    [
        ("<3>[   12.345678] " + TEXT, TEXT, 12.345678),
        ("[   12.345678][  T123] " + TEXT, TEXT, 12.345678),
        ("[   12.345678][    C3] " + TEXT, TEXT, 12.345678),
        ("[   12.345678 <    0.000012>] " + TEXT, TEXT, 12.345678),
        ("[  +0.000012] " + TEXT, TEXT, None),
        ("kern  :info  : [Sun Mar 15 16:20:00 2026] " + TEXT, TEXT, None),
        ("\x1b[32m[   12.345678] \x1b[0m\x1b[31m" + TEXT + "\x1b[0m\r", TEXT, 12.345678),
        ("Sun 2026-03-15 16:20:00 UTC n07 kernel: " + TEXT, TEXT, None),
        ("2026-03-15T16:20:00.004140+00:00 n07 kernel: [   12.345678] " + TEXT, TEXT, 12.345678),
        ("kernel: " + TEXT, TEXT, None),
        (TEXT, TEXT, None),
    ],
)
def test_other_headers(line: str, text: str, at_s: float | None) -> None:
    found = parse_log_line(line, 1, REFERENCE)
    assert found is not None
    assert (found.text, found.at_s, found.tag) == (text, at_s, "kernel")


def test_other_programs_keep_their_name_and_yield_no_event() -> None:
    log = (
        "Mar 15 16:20:00 n07 systemd[1]: Reloading.\n"
        "Mar 15 16:20:01 n07 monitor[77]: saw NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off\n"
        "[402111.004140] n07 systemd[1]: Reloading.\n"
        "Mar 15 16:20:02 n07 my prog: NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off\n"
    )
    assert [(found.tag, found.text) for found in parse_log_lines(log.splitlines(), REFERENCE)] == [
        ("systemd", "Reloading."),
        ("monitor", "saw NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off"),
        ("systemd", "Reloading."),
        ("", "n07 my prog: NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off"),
    ]
    assert parse_kernel_log(log, "/var/log/syslog", REFERENCE).events == ()


def test_a_line_that_a_user_wrote_into_the_ring_buffer_is_not_the_kernels() -> None:
    assert parse_kernel_log(f"12,5,100,-;{TEXT}\n", "kmsg").events == ()
    assert len(parse_kernel_log(f"4,5,100,-;{TEXT}\n", "kmsg").events) == 1


def test_zones_and_the_year_that_syslog_leaves_out() -> None:
    berlin = TimeReference(TAKEN_NS, None, datetime.timezone(datetime.timedelta(hours=1)))
    for line, expected in (
        ("2026-03-15T18:20:00+0200 n07 kernel: x", XID_NS),
        ("2026-03-15T10:50:00-05:30 n07 kernel: x", XID_NS),
        ("2026-03-15T17:20:00 n07 kernel: x", XID_NS),
        ("Mar 15 17:20:00 n07 kernel: x", XID_NS),
        ("Dec 31 23:59:59 n07 kernel: x", 1_767_221_999_000_000_000),  # of 2025
        ("[Sun Mar 15 17:20:00 2026] x", XID_NS),
        ("Feb 30 17:20:00 n07 kernel: x", None),
    ):
        found = parse_log_line(line, 1, berlin)
        assert found is not None
        assert found.at_ns == expected, line


# --- the whole log ---


def test_kmsg_with_dictionary_lines_and_escapes() -> None:
    log = (
        "6,0,0,-;Linux version 6.8.0-41-generic\n"
        "6,1,10,-;Command line: ro quiet\n"
        "3,2,402110221908,-,caller=T12;nvidia 0000:9a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer\n"
        " SUBSYSTEM=pci\n"
        " DEVICE=+pci:0000:9a:00.0\n"
        "3,3,402110221909,-;nvidia 0000:9a:00.0:    [14] CmpltTO\\x09               (First)\n"
    )
    section = parse_kernel_log(log, "kmsg", REFERENCE)
    assert (section.lines_read, section.first_at_s, section.truncated) == (4, 0.0, False)
    (event,) = section.events
    assert facts(event) == {
        "kind": "aer", "what": "CmpltTO", "severity": "fatal", "pci": "0000:9a:00.0",
        "at_ns": TAKEN_NS - 402_211_000_000_000 + 402_110_221_908_000,
        "last_at_ns": TAKEN_NS - 402_211_000_000_000 + 402_110_221_908_000,
    }  # fmt: skip
    assert event.locator == "seq 2"


def test_a_wrapped_buffer_says_so() -> None:
    section = parse_kernel_log(f"3,81,402111004140,-;{TEXT}\n", "kmsg", REFERENCE)
    assert (section.first_at_s, section.truncated) == (402111.00414, True)
    assert parse_kernel_log("", "kmsg") == KernelSection(source="kmsg")


def test_only_the_last_boot_of_a_log_counts() -> None:  # trap 18
    lost = "Mar 14 10:00:00 n07 kernel: [ 9000.0] NVRM: Xid (PCI:0000:9a:00): 79, GPU has fallen off the bus.\n"
    boot = "Mar 14 11:00:00 n07 kernel: [    0.000000] Linux version 6.8.0-41-generic\n"
    after = f"Mar 14 11:00:09 n07 kernel: [    9.000000] {TEXT}\n"
    section = parse_kernel_log(lost + boot + after, "/var/log/kern.log", TimeReference(TAKEN_NS))
    assert [event.code for event in section.events] == [43]
    assert (section.lines_read, section.truncated) == (2, False)
    for marker in ("-- Reboot --\n", "-- Boot 0123456789abcdef0123456789abcdef --\n"):
        assert parse_kernel_log(lost + marker, "journal").events == ()


def test_without_a_boot_line_the_uptime_cuts() -> None:  # trap 18
    reference = TimeReference(TAKEN_NS, uptime_s=3600.0)
    old = "2026-03-15T10:00:00+00:00 n07 kernel: NVRM: Xid (PCI:0000:9a:00): 79, GPU\n"
    old_s = "2026-03-15T10:00:00+00:00 n07 kernel: [9000.0] NVRM: Xid (PCI:0000:9a:00): 79, GPU\n"
    new = f"2026-03-15T16:20:00+00:00 n07 kernel: {TEXT}\n"
    section = parse_kernel_log(old + old_s + new, "/var/log/messages", reference)
    assert [event.code for event in section.events] == [43]
    # a container's /proc/uptime is its own: what is of this boot anyhow is not cut by it
    kept = parse_kernel_log(f"3,1,402111004140,-;{TEXT}\n", "kmsg", reference, only_this_boot=True)
    assert [event.code for event in kept.events] == [43]


def test_cut_and_foreign_lines_are_tolerated() -> None:
    log = f"M: Xid (PCI:0000:9a:00): 79\n[12.5] {TEXT}\n[13.0] NVRM: Xid (PCI:0000:9a\n[14.0] NVRM: Xid (PCI:zz:00): 79, x"
    section = parse_kernel_log(log, "f")
    assert [event.code for event in section.events] == [43]
    assert (section.first_at_s, section.lines_read) == (12.5, 4)


# --- folding ---


def test_equal_lines_fold_by_minute_and_facts() -> None:
    log = "".join(f"[{at}.000000] NVRM: Xid (PCI:0000:9a:00): 45, pid={pid}, name=p, Ch {at:08x}\n"
                  for at, pid in ((60, 1), (61, 1), (119, 1), (120, 1), (121, 2)))  # fmt: skip
    section = parse_kernel_log(log, "kmsg")
    assert [(e.at_s, e.last_at_s, e.count, e.pid) for e in section.events] == [
        (60.0, 119.0, 3, 1), (120.0, 120.0, 1, 1), (121.0, 121.0, 1, 2),
    ]  # fmt: skip
    assert section.events[0].line.endswith("Ch 0000003c")


def test_a_driver_load_ends_the_minute() -> None:
    log = f"[60.0] {TEXT}\n[61.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n[62.0] {TEXT}\n"
    assert [(e.kind, e.count, e.versions) for e in parse_kernel_log(log, "kmsg").events] == [
        ("xid", 1, ()), ("driver-load", 1, ("580.65.06",)), ("xid", 1, ()),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [20_000, pytest.param(800_000, marks=pytest.mark.slow)])
def test_a_flood_of_duplicates_costs_neither_memory_nor_sight(count: int) -> None:
    line = "NVRM: Xid (PCI:0000:9a:00): 95, pid=4711, name=python, Uncontained: LTC TAG (0x7). RST: Yes"
    log = "".join(f"3,{n},{n * 5},-;{line}\n" for n in range(count))
    start = time.process_time()
    (event,) = parse_kernel_log(log, "kmsg").events
    assert (event.count, event.code, event.at_s) == (count, 95, 0.0)
    assert event.last_at_s == (count - 1) * 5 / 1e6
    assert (time.process_time() - start) / count < 50e-6


def test_a_flood_of_different_processes_is_bounded_and_crowds_nothing_out() -> None:
    log = "".join(
        f"[{n}.0] NVRM: Xid (PCI:0000:9a:00): 45, pid={n}, name=p\n" for n in range(1000, 9000)
    )
    log += "".join(
        f"[{n}.0] mlx5_core 0000:5e:00.{n % 8} eth0: Link down\n" for n in range(1000, 3000)
    )
    log += "[9000.0] INFO: task python:7 blocked for more than 120 seconds.\n"
    section = parse_kernel_log(log, "kmsg")
    kinds = [event.kind for event in section.events]
    assert kinds.count("xid") == MAX_PER_KIND
    assert kinds.count("hung-task") == 1
    assert sum(event.count for event in section.events if event.kind == "xid") == 8000
    assert section.dropped_events == 8000 - MAX_PER_KIND


def test_twenty_thousand_lines_in_time() -> None:
    other = (
        "systemd[1]: Started Session 4711 of User root.",
        'audit: type=1400 audit(1773.1:22): apparmor="DENIED" operation="open" pid=1 comm="x"',
        "IPv6: ADDRCONF(NETDEV_CHANGE): veth12ab: link becomes ready",
        "pci 0000:00:1f.0: [8086:1b81] type 00 class 0x060100 conventional PCI endpoint",
    )
    log = "".join(f"6,{n},{n * 1000},-;{other[n % 4]} {n}\n" for n in range(20_000))
    log += f"3,20001,20001000,-;{TEXT}\n"
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        assert len(parse_kernel_log(log, "kmsg").events) == 1
        best = min(best, time.process_time() - start)
    assert best < 0.15


# --- messages ---


def test_the_samples_of_the_docstring() -> None:
    assert [(e.kind, e.code, e.pci) if (e := parse_kernel_message(line)) else None
            for line in sample(parse_kernel_message)] == [
        ("xid", 79, "0000:9a:00.0"),
        ("xid", 154, "0000:9a:00.0"),
        ("sxid", 20034, "0000:c1:00.0"),
        ("aer", None, "0000:9a:00.0"),
        ("pcie-bandwidth", None, "0000:9a:00.0"),
        ("hung-task", None, None),
    ]  # fmt: skip
    block = [line for line in sample(add_line) if line]
    section = parse_kernel_log("\n".join(block), "kmsg")
    assert [(e.kind, e.what, e.pci) for e in section.events] == [
        ("nvrm", "off-bus", "0000:9a:00.0"), ("aer", "CmpltTO", "0000:9a:00.0"),
    ]  # fmt: skip
    assert section.events[0].line == (
        "NVRM: The NVIDIA GPU 0000:9a:00.0 (PCI ID: 10de:2330) installed in this system has fallen "
        "off the bus and is not responding to commands."
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM: Xid (PCI:0000:9a:00): 31, pid=4711, name=python, Ch 00000013, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_3 faulted @ 0x7f2c_00000000.",
         {"kind": "xid", "pci": "0000:9a:00.0", "code": 31, "pid": 4711, "process": "python"}),
        ("NVRM: Xid (PCI:0000:07:00 GPU-I:05): 31, pid='<unknown>', name=<unknown>, Ch 1",
         {"kind": "xid", "pci": "0000:07:00.0", "code": 31}),
        ("NVRM: Xid (0000:03:00): 13, pid=12, name=a b, Graphics SM Warp Exception on (GPC 4, TPC 2, SM 1): Out Of Range Address",
         {"kind": "xid", "pci": "0000:03:00.0", "code": 13, "pid": 12, "process": "a b", "gpc": 4, "tpc": 2}),
        ("NVRM: Xid (PCI:0000:9a:00): 48, pid=1, name=p, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 3, subpartition 1.",
         {"kind": "xid", "pci": "0000:9a:00.0", "code": 48, "pid": 1, "process": "p", "unit": "DRAM"}),
        ("NVRM: Xid (PCI:0000:9a:00): 48, DBE in SRAM of the L2",
         {"kind": "xid", "pci": "0000:9a:00.0", "code": 48, "unit": "SRAM"}),
        ("NVRM: Xid (PCI:0000:9a:00): 94, pid=1, name=p, Contained: SM (0x1). RST: No, D-RST: No",
         {"kind": "xid", "pci": "0000:9a:00.0", "code": 94, "pid": 1, "process": "p", "unit": "SM"}),
        ("NVRM: Xid (PCI:0000:9a:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
         {"kind": "xid", "pci": "0000:9a:00.0", "code": 74, "link": 14, "registers": [0, 0, 65536, 0, 0, 0, 0]}),
        ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000 0x0 0x0 0x0 0x0)",
         {"kind": "xid", "pci": "0018:01:00.0", "code": 149, "unit": "NETIR_LINK_EVT", "severity": "fatal", "link": 8, "registers": [0x4505C6, 0, 0, 0, 0, 0]}),
        ("NVRM: Xid (PCI:0018:01:00): 150, MSE Nonfatal XC0 i0 Link -1 (0x1 0x2)",
         {"kind": "xid", "pci": "0018:01:00.0", "code": 150, "unit": "MSE", "severity": "nonfatal", "registers": [1, 2]}),
        ("NVRM: Xid (PCI:0000:9a:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 (PF FLR)",
         {"kind": "xid", "pci": "0000:9a:00.0", "code": 154, "recovery_from": 4, "recovery_to": 1, "recovery_text": "PF FLR"}),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 11012, Non-fatal, Link 32 ingress ECC limit",
         {"kind": "sxid", "pci": "0000:05:00.0", "code": 11012, "switch": 0, "severity": "nonfatal", "link": 32}),
        ("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, something else",
         {"kind": "sxid", "pci": "0000:c1:00.0", "code": 20034, "switch": 3}),
        ("NVRM: GPU 0000:9a:00.0: RmInitAdapter failed! (0x22:0x56:762)",
         {"kind": "nvrm", "what": "init-failed", "pci": "0000:9a:00.0"}),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.127.05  Tue Oct  8 03:22:07 UTC 2024",
         {"kind": "driver-load", "versions": ["550.127.05"]}),
        ("pcieport 0000:99:00.0: AER: Correctable error message received from 0000:9a:00.0",
         {"kind": "aer", "severity": "correctable", "pci": "0000:9a:00.0", "port_pci": "0000:99:00.0"}),
        ("pcieport 0000:99:00.0: AER: Uncorrectable (Fatal) error message received from 0000:9a:00.0",
         {"kind": "aer", "severity": "fatal", "pci": "0000:9a:00.0", "port_pci": "0000:99:00.0"}),
        ("pcieport 0000:99:00.0: DPC: containment event, status:0x1f01 source:0x0000",
         {"kind": "dpc", "severity": "fatal", "pci": "0000:99:00.0", "port_pci": "0000:99:00.0"}),
        ("pcieport 0000:99:00.0: pciehp: Slot(12): Link Down",
         {"kind": "pcie-link", "what": "link-down", "pci": "0000:99:00.0"}),
        ("pcieport 0000:99:00.0: retraining failed",
         {"kind": "pcie-link", "what": "retrain-failed", "pci": "0000:99:00.0"}),
        ("mlx5_core 0000:b3:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:b2:01.0 (capable of 252.048 Gb/s with 16.0 GT/s PCIe x16 link)",
         {"kind": "pcie-bandwidth", "pci": "0000:b3:00.0", "port_pci": "0000:b2:01.0", "available_gbps": 63.008, "speed_gts": 8.0, "width_lanes": 8, "capable_gbps": 252.048}),
        ("INFO: task kworker/u8:2:77 blocked for more than 241 seconds.",
         {"kind": "hung-task", "process": "kworker/u8:2", "pid": 77, "seconds": 241}),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 26s! [python:4711]",
         {"kind": "lockup", "what": "soft", "seconds": 26, "process": "python", "pid": 4711}),
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3", {"kind": "lockup", "what": "hard"}),
        ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:", {"kind": "rcu-stall"}),
        ("Out of memory: Killed process 4711 (python) total-vm:9kB",
         {"kind": "oom", "what": "global", "pid": 4711, "process": "python"}),
        ("Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB",
         {"kind": "oom", "what": "cgroup", "pid": 4711, "process": "python"}),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=c,mems_allowed=0-1,oom_memcg=/kubepods/pod1,task_memcg=/kubepods/pod1/c,task=python,pid=4711,uid=0",
         {"kind": "oom", "what": "cgroup", "pid": 4711, "process": "python", "cgroup": "/kubepods/pod1"}),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
         {"kind": "mce", "severity": "uncorrected", "device": "MC0"}),
        ("mce: [Hardware Error]: Machine check events logged", {"kind": "mce", "severity": "corrected"}),
        ("{1}[Hardware Error]: event severity: corrected", {"kind": "mce", "severity": "corrected"}),
        ("mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7: be00000000800400",
         {"kind": "mce", "severity": "uncorrected"}),
        ("python[4711]: segfault at 10 ip 00007f1 sp 00007ff error 4 in libnccl.so.2.21.5[7f1+100]",
         {"kind": "segfault", "process": "python", "pid": 4711, "device": "libnccl.so.2.21.5"}),
        ("traps: python[4711] general protection fault ip:7f sp:7f error:0 in libcuda.so.550.127.05[7f+9]",
         {"kind": "segfault", "process": "python", "pid": 4711, "device": "libcuda.so.550.127.05"}),
        ("mlx5_core 0000:5e:00.0: print_health_info:416:(pid 0): device's health compromised - reached miss count",
         {"kind": "nic", "what": "health", "pci": "0000:5e:00.0"}),
        ("mlx5_core 0000:5e:00.0 ens1f0np0: Link down",
         {"kind": "nic", "what": "link-down", "pci": "0000:5e:00.0", "device": "ens1f0np0"}),
        ("nfs: server 192.0.2.40 OK", {"kind": "nfs", "what": "ok", "server": "192.0.2.40"}),
        ("NVRM: GPU 0000:9a:00.0: GPU has been reset", {"kind": "gpu-reset", "pci": "0000:9a:00.0"}),
        ("vfio-pci 0000:9a:00.0: reset done", {"kind": "gpu-reset", "pci": "0000:9a:00.0"}),
    ],
)  # fmt: skip
def test_messages(text: str, expected: dict[str, object]) -> None:
    event = only(f"[5.0] {text}")
    assert facts(event) == expected
    assert event.line == text


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: nvAssertOkFailedNoLog: Assertion failed: Nothing to do [NV_WARN_NOTHING_TO_DO] (0x3)",
        "NVRM: The NVIDIA GPU 0000:9a:00.0",
        "NVRM: Persistence mode is deprecated and will be removed in a future release.",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Data {0x50610002, 0x10100030, 0x00000000}",
        "mlx5_core 0000:5e:00.0: mlx5_pcie_event:300:(pid 9): PCIe slot advertised sufficient power (75W).",
        "nvidia 0000:9a:00.0: 504.112 Gb/s available PCIe bandwidth (32.0 GT/s PCIe x16 link)",
        "python[4711]: segfault at 10 ip 00007f1 sp 00007ff error 4 in libm.so.6[7f1+100]",
        "usb 1-1: reset high-speed USB device number 2",
        "mce: [Hardware Error]: TSC 0 ADDR 3f MISC 0",
        "AER: enabled with IRQ 122",
    ],
)
def test_lines_that_are_no_event(text: str) -> None:
    assert parse_kernel_log(f"[5.0] {text}\n", "kmsg").events == ()


def test_a_version_mismatch_over_two_lines() -> None:
    event = only(
        "[5.0] NVRM: API mismatch: the client has the version 550.127.05, but\n"
        "[5.0] NVRM: this kernel module has the version 535.104.05.  Please\n"
        "[5.0] NVRM: make sure that this kernel module and all NVIDIA driver\n"
        "[5.0] NVRM: components have the same version.\n"
    )
    assert (event.what, event.versions) == ("api-mismatch", ("550.127.05", "535.104.05"))


def test_a_word_stands_for_every_message() -> None:
    lines = [*sample(parse_kernel_message), *sample(add_line)]
    assert all(any(word in line for word in WORDS) for line in lines if line)


def test_names_in_kernel_lines_get_pseudonyms_and_facts_stay() -> None:
    redactor = Redactor(b"key")
    for text, names in (
        ("Out of memory: Killed process 4711 (train-llm) total-vm:9kB", ["train-llm"]),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 26s! [train-llm:4711]", ["train-llm"]),
        ("train-llm[4711]: segfault at 10 ip 00007f1 in libnccl.so.2[7f1+100]", ["train-llm"]),
        ("INFO: task train-llm:4711 blocked for more than 120 seconds.", ["train-llm"]),
        ("nfs: server filer1.example not responding, still trying", ["filer1"]),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/kubepods/pod1,task=train-llm,pid=4711",
            ["pod1", "train-llm"],
        ),
        ("NVRM: Xid (PCI:0000:9a:00): 43, pid=4711, name=train-llm, Ch 00000010", ["train-llm"]),
    ):
        hidden = redactor.text(text)
        assert not [name for name in names if name in hidden]
        before, after = parse_kernel_message(text), parse_kernel_message(hidden)
        assert before is not None
        assert after is not None
        assert (before.kind, before.pid, before.code) == (after.kind, after.pid, after.code)


# --- arbitrary input ---

_PIECES = st.sampled_from(
    [
        "NVRM: Xid (PCI:0000:9a:00): ", "74, ", "154, ", "145, ", "from 0x0 to 0x", "link 3(0x1, ", "\n",
        "[12.5] ", "6,1,2,-;", "Mar 15 16:20:00 n07 kernel: ", "2026-03-15T16:20:00+9999 ", "\x1b[31m",
        '{"MESSAGE":', "pid=", "AER: ", "PCIe Bus Error: severity=", "0000:9a:00.0: ", "EDAC MC0: 1 CE",
        "NVRM: The NVIDIA GPU 0000:9a:00.0", "fallen off the bus", "NVRM: API mismatch", "Linux version ",
        "\r", "\x00", "99999999999999999999", " Link 05 (0x0 0x1)", "available PCIe bandwidth", "\\xff",
    ]
)  # fmt: skip


@given(st.lists(_PIECES | st.text(max_size=20), max_size=30).map("".join))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read(text: str) -> None:
    section = parse_kernel_log(text, "f", REFERENCE)
    assert all(len(event.line) <= 300 and event.count > 0 for event in section.events)
    assert msgspec.json.decode(msgspec.json.encode(section), type=KernelSection) == section


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read(raw: bytes) -> None:
    parse_kernel_log(raw.decode("utf-8", "replace"), "f", REFERENCE)


@given(st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_message_is_read(text: str, more: str) -> None:
    event = parse_kernel_message(text)
    if event is not None and awaits_more(event):
        add_line(event, more)


def test_the_drivers_samples() -> None:
    lines = [*sample(parse_nvrm), *sample(parse_sxid)]
    assert [event.kind if (event := parse_kernel_message(line)) else None for line in lines] == [
        "xid", "nvrm", "gpu-map", "driver-load", "sxid",
    ]  # fmt: skip
