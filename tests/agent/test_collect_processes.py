"""Processes from a tree of /proc."""

from __future__ import annotations

from agent.collect import processes
from agent.fstree import parse_fstree
from agent.host import FixtureHost
from agent.tree import TextTree
from probes.gap import Gap, GapReason
from probes.snapshot.process import BlockedThread, Process, ProcessReading, ProcessSection

START_NS = 1_000_000_000_000
CONTAINER = "4c01db0b339c" + "0" * 52


def stat(pid: int, comm: str = "python3", state: str = "S", *, ppid: int = 1, flags: int = 4194560,
         ticks: int = 600, threads: int = 1, start: int = 90210) -> str:  # fmt: skip
    return (
        f"{pid} ({comm}) {state} {ppid} 1 1 0 -1 {flags} 9 0 0 0 {ticks} 0 0 0 20 0 {threads} 0 "
        f"{start} 1 1"
    )


HOST = f"""
/dev/null =
/dev/nvidiactl =
/proc/1/stat = {stat(1, "systemd", ppid=0)}
/proc/1/fd/0 -> /dev/null
/proc/2/stat = {stat(2, "kthreadd", ppid=0, flags=2129984)}
/proc/77/stat = {stat(77, "kworker/3:1", ppid=2, flags=69238880)}
"""
TRAINER = f"""
/proc/4711/stat = {stat(4711, "python3 (rank)", threads=2)}
/proc/4711/status:
|Name:	python3 (rank)
|Uid:	1000	1000	1000	1000
|NSpid:	4711	61
|SigPnd:	0000000000000000
|ShdPnd:	0000000000000000
|Cpus_allowed_list:	0-31
/proc/4711/cgroup = 0::/system.slice/docker-{CONTAINER}.scope
/proc/4711/fd/0 -> /dev/null
/proc/4711/fd/5 -> /dev/nvidiactl
/proc/4711/fd/6 -> /dev/nvidia3
/proc/4711/fd/7 -> socket:[99]
/proc/4711/task/4711/stat = {stat(4711, threads=2)}
/proc/4711/task/4800/stat = {stat(4800, "cuda", "D")}
/proc/4711/task/4800/status:
|voluntary_ctxt_switches:	70
|nonvoluntary_ctxt_switches:	7
/proc/4711/task/4800/wchan = uvm_va_space_destroy
/proc/4711/task/4800/stack:
|[<0>] uvm_va_space_destroy+0x10/0x80 [nvidia_uvm]
|[<0>] __fput+0x88/0x1d0
@1
/proc/4711/stat = {stat(4711, "python3 (rank)", threads=2, ticks=601)}
"""


def host(text: str) -> FixtureHost:
    return FixtureHost(parse_fstree(text))


def test_gpu_holder_with_a_stuck_thread_over_two_readings() -> None:
    machine = host(HOST + TRAINER)
    section, gaps = processes.collect(machine)
    assert section is not None
    machine.sleep(2)
    section, more = processes.resample(machine, section)
    assert (*gaps, *more) == ()
    stuck = BlockedThread(
        tid=4800,
        wchan="uvm_va_space_destroy",
        stack=("uvm_va_space_destroy [nvidia_uvm]", "__fput"),
        context_switches=77,
    )
    assert section == ProcessSection(
        scanned=4,
        host_pid_namespace=True,
        processes=(
            Process(
                pid=4711,
                comm="python3 (rank)",
                ppid=1,
                uid=1000,
                threads=2,
                start_ticks=90210,
                nspids=(4711, 61),
                cgroup=f"/system.slice/docker-{CONTAINER}.scope",
                container="4c01db0b339c",
                nvidia_devices=("/dev/nvidia3", "/dev/nvidiactl"),
                cpus_allowed_list="0-31",
                readings=(
                    ProcessReading(
                        at_ns=START_NS,
                        state="S",
                        cpu_ticks=600,
                        kill_pending=False,
                        blocked=(stuck,),
                    ),
                    ProcessReading(
                        at_ns=START_NS + 2_000_000_000,
                        state="S",
                        cpu_ticks=601,
                        kill_pending=False,
                        blocked=(stuck,),
                    ),
                ),
            ),
        ),
    )


class Watched(TextTree):
    """Notes every path that is read."""

    def read_bytes(self, path: str, limit: int = 4096) -> bytes:
        self.paths.append(path)
        return super().read_bytes(path, limit)

    paths: list[str] = []


def test_never_reads_what_can_block_or_is_private() -> None:
    tree = Watched(parse_fstree(HOST + TRAINER).epochs)
    tree.paths = []
    machine = FixtureHost(tree)
    section, _ = processes.collect(machine)
    assert section is not None
    processes.resample(machine, section)
    names = {path.rpartition("/")[2] for path in tree.paths if path.startswith("/proc/")}
    assert names <= {"stat", "status", "wchan", "stack", "cgroup"}


def test_kernel_threads_cost_one_read() -> None:
    tree = Watched(parse_fstree(HOST).epochs)
    tree.paths = []
    processes.collect(FixtureHost(tree))
    assert [path for path in tree.paths if "/77/" in path] == ["/proc/77/stat"]


def test_unprivileged_counts_what_it_could_not_list() -> None:
    section, gaps = processes.collect(host(HOST + f"""
/proc/900/stat = {stat(900)}
/proc/900/fd !EACCES
/proc/901/stat = {stat(901, state="D")}
/proc/901/fd !EACCES
/proc/901/wchan = 0
/proc/901/stack !EACCES
"""))  # fmt: skip
    assert section is not None
    assert (section.scanned, section.unreadable, section.blocked) == (5, 2, 1)
    assert section.processes[0].nvidia_devices is None
    assert gaps == (
        Gap(
            source="processes",
            reason=GapReason.DENIED,
            fields=("wchan", "stack"),
            devices=("901",),
            detail="wchan reads 0 and stack is refused",
            allow="run as root: wchan and stack of a thread are hidden from other users",
        ),
        Gap(
            source="processes",
            reason=GapReason.DENIED,
            fields=("nvidia_devices",),
            detail="the open files of 2 of 5 processes could not be listed",
            allow="run as root on the host, or grant CAP_SYS_PTRACE",
        ),
    )


def test_zombies() -> None:
    """A plain zombie holds nothing; one whose threads live on keeps its files."""
    section, gaps = processes.collect(host(HOST + f"""
/proc/800/stat = {stat(800, state="Z", ppid=799)}
/proc/801/stat = {stat(801, state="Z", ppid=799, threads=2)}
/proc/801/task/801/stat = {stat(801, state="Z")}
/proc/801/task/805/stat = {stat(805, state="D")}
/proc/801/task/805/wchan = os_acquire_rwlock_write
/proc/801/task/805/fd/9 -> /dev/nvidia1
"""))  # fmt: skip
    assert section is not None
    assert (section.zombies, gaps) == (2, ())
    plain, held = section.processes
    assert (plain.pid, plain.nvidia_devices) == (800, ())
    assert (held.pid, held.nvidia_devices) == (801, ("/dev/nvidia1",))
    assert [thread.tid for thread in held.readings[0].blocked] == [805]


def test_thousands_of_zombies_are_counted_not_kept() -> None:
    tree = "\n".join(f"/proc/{pid}/stat = {stat(pid, state='Z')}" for pid in range(1000, 1400))
    section, gaps = processes.collect(host(HOST + tree))
    assert section is not None
    assert (section.zombies, len(section.processes)) == (400, 128)
    assert [gap.detail for gap in gaps] == ["400 zombies: the first 128 were recorded"]


def test_container_and_hidepid() -> None:
    inside, _ = processes.collect(host(f"/dev/null =\n/proc/1/stat = {stat(1, 'bash')}\n"))
    assert inside is not None and inside.host_pid_namespace is False
    hidden, gaps = processes.collect(host(f"/dev/null =\n/proc/900/stat = {stat(900)}\n"))
    assert hidden is not None and hidden.host_pid_namespace is None
    assert [(gap.reason, gap.fields) for gap in gaps] == [
        (GapReason.DENIED, ("host_pid_namespace", "nvidia_devices"))
    ]


def test_itself_and_its_children_are_left_out() -> None:
    section, _ = processes.collect(host(HOST + f"""
/proc/self -> 600
/proc/600/stat = {stat(600, "laggard")}
/proc/601/stat = {stat(601, "laggard", ppid=600)}
/proc/601/fd/3 -> /dev/nvidia0
"""))  # fmt: skip
    assert section is not None
    assert (section.scanned, section.processes) == (3, ())


def test_the_process_that_forked_the_reader_is_left_out_too() -> None:
    """A shell that started laggard, and the jobs that it started, are not."""
    tree = (
        HOST
        + f"""
/proc/self -> 601
/proc/600/stat = {stat(600, "laggard", ppid=500)}
/proc/601/stat = {stat(601, "laggard", ppid=600, flags=4194624)}
/proc/602/stat = {stat(602, "python3", ppid=600)}
/proc/602/fd/3 -> /dev/nvidia0
/proc/500/stat = {stat(500, "bash")}
/proc/500/fd/0 -> /dev/null
/proc/501/stat = {stat(501, "python3", ppid=500)}
/proc/501/fd/3 -> /dev/nvidia0
"""
    )
    section, _ = processes.collect(host(tree))
    assert section is not None
    assert [process.pid for process in section.processes] == [501]


def test_another_process_with_the_same_pid_is_not_read_again() -> None:
    later = f"@1\n/proc/900/stat = {stat(900, state='D', start=99999)}\n"
    machine = host(HOST + f"/proc/900/stat = {stat(900, state='D')}\n/proc/900/fd/\n" + later)
    section, _ = processes.collect(machine)
    assert section is not None
    machine.sleep(2)
    section, _ = processes.resample(machine, section)
    assert len(section.processes[0].readings) == 1


def test_copied_proc_with_status_only() -> None:
    section, _ = processes.collect(host("""
/proc/30510/status:
|Name:	python
|State:	D (disk sleep)
|PPid:	30400
|Threads:	58
/proc/30510/wchan = folio_wait_bit_common
"""))  # fmt: skip
    assert section is not None
    (process,) = section.processes
    assert (process.comm, process.threads, process.nvidia_devices) == ("python", 58, None)
    assert process.readings[0].blocked[0].wchan == "folio_wait_bit_common"


def test_no_driver_means_no_holder() -> None:
    section, gaps = processes.collect(host(f"""
/dev/null =
/proc/1/stat = {stat(1)}
/proc/2/stat = {stat(2, "kthreadd", ppid=0, flags=2129984)}
/proc/900/stat = {stat(900)}
/proc/900/fd !EACCES
"""))  # fmt: skip
    assert section == ProcessSection(scanned=3, host_pid_namespace=True)
    assert gaps == ()


def test_malformed_and_vanished() -> None:
    section, _ = processes.collect(host(HOST + "/proc/5/stat = junk\n/proc/6/stat !ESRCH\n"))
    assert section is not None and section.scanned == 3


def test_no_proc() -> None:
    section, gaps = processes.collect(host("/etc/hostname = n07\n"))
    assert section is None
    assert gaps[0].reason is GapReason.ABSENT
