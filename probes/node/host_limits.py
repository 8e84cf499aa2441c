"""What the caller may use: locked memory, open files, CPU and memory of its control group."""

from __future__ import annotations

from probes.finding import Action, Confidence, FaultClass, Finding, JobImpact, Remedy, Severity
from probes.gap import GapReason
from probes.host_facts import NO_GPU, evidence, facts, gpu_count, last, rdma_ports, size
from probes.registry import Clear, Limit, Limits, NotApplicable, Statements, Unread, probe
from probes.view import Node

_OWN = "this process's own limit; a job's may differ unless it is started the same way"


@probe(
    "host.memlock-low",
    needs=("host",),
    limits={
        "mib": Limit(
            1024.0, "MiB", "laggard: UCX, MPI and NCCL guides ask for unlimited; 1 GiB is a floor"
        )
    },
)
def memlock_low(node: Node, limits: Limits) -> Statements:
    """The locked-memory limit is too low for RDMA.

    Registering memory with an InfiniBand or RoCE adapter locks it. At the usual 64 KiB or 8 MiB the
    registration fails ("Cannot allocate memory"), and NCCL gives up or falls back to sockets.

    No fault: machines without RDMA ports in use; processes with CAP_IPC_LOCK, whom the limit does
    not bind. The limit that is read is laggard's own: in the job's container it is the job's, on a
    host a login's or cron's, which is why it is info there.

    Sure: possible; likely inside a container.

    Do: `ulimit -l` inside the job. Containers: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity;
    Slurm: PropagateResourceLimitsExcept=MEMLOCK.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    if node.snapshot.nics is None:
        yield Unread("nics", "ports")
        return
    if not rdma_ports(node):
        yield NotApplicable("no RDMA port is active")
        return
    own = section.limits
    if own is None or own.memlock_bytes is None:
        yield Unread("host", "limits")
        return
    soft = own.memlock_bytes.soft
    if own.can_exceed_memlock:
        yield Clear(host, "CAP_IPC_LOCK: the locked-memory limit does not bind this user")
        return
    if soft is None or soft >= limits["mib"] * (1 << 20):
        yield Clear(host, _OWN)
        return
    contained = node.snapshot.container is not None
    yield Finding(
        id="host.memlock-low",
        severity=Severity.WARNING if contained else Severity.INFO,
        confidence=Confidence.LIKELY if contained else Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary=f"locked-memory limit of the caller is {size(soft)}, RDMA wants unlimited",
        evidence=(
            evidence(
                "/proc/self/limits",
                soft,
                "ulimit -l  # inside the job",
                unit="bytes",
                quote=_OWN,
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Check ulimit -l inside the job; --ulimit memlock=-1, or LimitMEMLOCK=infinity.",
            disruptive=False,
        ),
    )


@probe(
    "host.nofile-low",
    needs=("host",),
    limits={
        "files": Limit(
            4096.0, "open files", "laggard: the kernel's old hard default; NCCL raises soft to hard"
        )
    },
)
def nofile_low(node: Node, limits: Limits) -> Statements:
    """The hard limit of open files is too low for a multi-GPU job.

    Every peer costs sockets and every loader worker files; at the limit a job dies with "Too many
    open files" when it connects, or later when a worker restarts.

    No fault: a low *soft* limit, which NCCL and most programs raise to the hard one themselves. The
    limit that is read is laggard's own, as for host.memlock-low.

    Sure: possible; likely inside a container.

    Do: `ulimit -Hn` inside the job; containers: --ulimit nofile=1048576; systemd: LimitNOFILE=.
    """
    section, host = facts(node), node.host_component()
    if not gpu_count(node):
        yield NO_GPU
        return
    own = section.limits
    if own is None or own.nofile is None:
        yield Unread("host", "limits")
        return
    hard = own.nofile.hard
    if hard is None or hard >= limits["files"]:
        yield Clear(host)
        return
    contained = node.snapshot.container is not None
    yield Finding(
        id="host.nofile-low",
        severity=Severity.WARNING if contained else Severity.INFO,
        confidence=Confidence.LIKELY if contained else Confidence.POSSIBLE,
        fault_class=FaultClass.CONFIGURATION,
        job_impact=JobImpact.NONE,
        component=host,
        summary=f"the caller may open at most {hard} files, {limits['files']:.0f} is a floor",
        evidence=(
            evidence(
                "/proc/self/limits", hard, "ulimit -Hn  # inside the job", unit="files", quote=_OWN
            ),
        ),
        remedy=Remedy(
            action=Action.RECONFIGURE,
            text="Check ulimit -Hn inside the job; --ulimit nofile=1048576, or LimitNOFILE=.",
            disruptive=False,
        ),
    )


@probe(
    "host.cgroup-cpu-throttled",
    needs=("host",),
    limits={
        "periods_percent": Limit(
            10.0, "% of periods", "laggard: every tenth period cut short; fewer are bursts"
        )
    },
)
def cgroup_cpu_throttled(node: Node, limits: Limits) -> Statements:
    """The CPU quota of this control group stops its processes.

    When the quota of a period (usually 100 ms) is used up, every thread of the group stands still
    until the next one begins: kernel launches and NCCL proxies stop with it.

    No fault: a quota that is not reached, throttling that lies in the past, or a few periods in a
    burst. Only the group that laggard runs in, and those above it, can be judged.

    Sure: proven for this group over the sample.

    Do: raise or remove the CPU limit (Kubernetes: resources.limits.cpu), or run fewer threads.
    """
    section, host = facts(node), node.host_component()
    cgroup = section.cgroup
    if cgroup is None:
        yield Unread("host", "cgroup")
        return
    limited = {level.cgroup_path: level for level in cgroup.levels if level.cpu_quota is not None}
    if not limited:
        yield NotApplicable("the caller's control group has no CPU quota")
        return
    if len(section.readings) < 2:
        yield Unread("host", "cgroups", reason=GapReason.NOT_COLLECTED)
        return
    before = {reading.cgroup_path: reading for reading in section.readings[0].cgroups}
    judged = False
    for now in section.readings[-1].cgroups:
        first = before.get(now.cgroup_path)
        if (
            now.cgroup_path not in limited
            or first is None
            or now.periods is None
            or first.periods is None
            or now.throttled_periods is None
            or first.throttled_periods is None
        ):
            continue
        judged = True
        periods = now.periods - first.periods
        throttled = now.throttled_periods - first.throttled_periods
        if periods <= 0 or 100 * throttled < limits["periods_percent"] * periods:
            continue
        quota = limited[now.cgroup_path].cpu_quota or 0
        gpus = gpu_count(node) > 0
        yield Finding(
            id="host.cgroup-cpu-throttled",
            severity=Severity.WARNING if gpus else Severity.INFO,
            confidence=Confidence.PROVEN,
            fault_class=FaultClass.CONFIGURATION,
            job_impact=JobImpact.SLOWS if gpus else JobImpact.NONE,
            component=host,
            summary=f"the quota of {quota:g} CPUs cut short {throttled} of {periods} periods of "
            f"the caller's control group",
            evidence=(
                evidence(
                    f"{now.cgroup_path}/cpu.stat",
                    throttled,
                    f"watch -d grep -H . {now.cgroup_path}/cpu.stat",
                    unit="throttled periods",
                ),
            ),
            remedy=Remedy(
                action=Action.RECONFIGURE,
                text="Raise or remove the CPU limit of this container, or run fewer threads in it.",
                disruptive=False,
            ),
        )
        return
    yield Clear(host) if judged else Unread("host", "cgroups")


@probe(
    "host.cgroup-memory-near-limit",
    needs=("host",),
    limits={
        "used_percent": Limit(
            95.0, "% of the limit", "laggard: without page cache that can be dropped at once"
        )
    },
)
def cgroup_memory_near_limit(node: Node, limits: Limits) -> Statements:
    """The memory limit of this control group is almost reached.

    At the limit the kernel first stalls the group's processes to reclaim memory, then kills one:
    the rank is gone, and its peers wait until the watchdog ends the job.

    No fault: a group that is full of page cache. What can be dropped at once (inactive_file) is
    not counted. Only the group that laggard runs in, and those above it, can be judged.

    Sure: proven for now; whether it grows, the next runs show.

    Do: raise the limit, or find what grows (loader workers and pinned buffers count too).
    """
    section, host = facts(node), node.host_component()
    cgroup = section.cgroup
    if cgroup is None:
        yield Unread("host", "cgroup")
        return
    limited = {
        level.cgroup_path: level.memory_max_bytes
        for level in cgroup.levels
        if level.memory_max_bytes is not None
    }
    if not limited:
        yield NotApplicable("the caller's control group has no memory limit")
        return
    newest = last(section)
    judged = False
    for now in newest.cgroups if newest else ():
        limit, current = limited.get(now.cgroup_path), now.memory_current_bytes
        if not limit or current is None:
            continue
        judged = True
        used = current - (now.memory_inactive_file_bytes or 0)
        if 100 * used < limits["used_percent"] * limit:
            continue
        yield Finding(
            id="host.cgroup-memory-near-limit",
            severity=Severity.WARNING,
            confidence=Confidence.PROVEN,
            fault_class=FaultClass.CONFIGURATION,
            job_impact=JobImpact.SLOWS,
            component=host,
            summary=f"the caller's control group uses {size(used)} of its limit of {size(limit)}"
            + (f", {now.oom_kills} processes were killed" if now.oom_kills else ""),
            evidence=(
                evidence(
                    now.cgroup_path,
                    used,
                    f"grep -H . {now.cgroup_path}/memory.current {now.cgroup_path}/memory.max",
                    unit="bytes",
                ),
            ),
            remedy=Remedy(
                action=Action.RECONFIGURE,
                text="Raise the container's memory limit, or find what grows in it.",
                disruptive=False,
            ),
        )
        return
    yield Clear(host) if judged else Unread("host", "cgroups")
