"""Who and what the machine is: the head of a snapshot."""

from __future__ import annotations

import msgspec

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.cpuinfo import parse_cpuinfo
from agent.parse.mounts import parse_mounts
from probes.gap import Gap

# What the firmware calls the machine -> the hypervisor. Amazon and Google also build bare metal
# under these names, so x86 asks the CPU first whether there is a hypervisor at all.
_DMI_HYPERVISORS = (
    ("qemu", "kvm"),
    ("kvm", "kvm"),
    ("amazon ec2", "amazon"),
    ("google", "google"),
    ("microsoft corporation", "microsoft"),
    ("vmware", "vmware"),
    ("xen", "xen"),
    ("innotek", "oracle"),
    ("openstack", "kvm"),
)
_CLOCK_HYPERVISORS = (("kvm-clock", "kvm"), ("hyperv", "microsoft"), ("xen", "xen"))
_CGROUP_CONTAINERS = (
    ("kubepods", "kubernetes"),
    ("/docker", "docker"),
    ("libpod", "podman"),
    ("/lxc", "lxc"),
    ("containerd", "containerd"),
    ("crio", "crio"),
)
_CONTAINER_ROOTS = frozenset({"overlay", "fuse-overlayfs", "aufs", "zfs", "btrfs"})


class Identity(msgspec.Struct, frozen=True):
    """The fields of ``NodeSnapshot`` that name the machine; ``gaps`` say what stayed unknown."""

    host: str
    boot_id: str | None
    kernel_release: str | None
    uptime_s: float | None
    virtualization: str | None
    container: str | None
    privileged: bool
    gaps: tuple[Gap, ...]


def read_identity(host: Host) -> Identity:
    """Read the machine's names; what can't be read is None and has a gap of source ``host``."""
    gaps = Gaps("host")
    container = detect_container(host)
    uptime = _read(host, gaps, "/proc/uptime", "uptime_s")
    return Identity(
        host=_hostname(host, gaps, container),
        boot_id=_read(host, gaps, "/proc/sys/kernel/random/boot_id", "boot_id"),
        kernel_release=_read(host, gaps, "/proc/sys/kernel/osrelease", "kernel_release"),
        uptime_s=_first_number(uptime),
        virtualization=detect_virtualization(host),
        container=container,
        privileged=host.euid() == 0,
        gaps=gaps.folded(),
    )


def _read(host: Host, gaps: Gaps, path: str, field: str) -> str | None:
    try:
        return host.read_text(path, 4096).strip() or None
    except OSError as error:
        gaps.add_error(error, field, path=path)
        return None


def _text(host: Host, path: str) -> str:
    try:
        return host.read_text(path, 1 << 16).strip()
    except OSError:
        return ""


def _first_number(text: str | None) -> float | None:
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None


def _hostname(host: Host, gaps: Gaps, container: str | None) -> str:
    """The kernel's name; in a container that mounts the host's root, the name that stands there.

    In an ordinary container both are the same.
    """
    live = _text(host, "/proc/sys/kernel/hostname")
    lines = [line for line in _text(host, "/etc/hostname").splitlines() if not line.startswith("#")]
    stored = lines[0].strip() if lines else ""
    name = (stored or live) if container else (live or stored)
    if not name:
        gaps.add_error(
            FileNotFoundError(2, "No such file or directory"),
            "host",
            path="/proc/sys/kernel/hostname, /etc/hostname",
        )
    return name or "unknown"


def detect_virtualization(host: Host) -> str | None:
    """The hypervisor, by CPU flag, DMI, device tree and clock sources; None is bare metal.

    A machine whose firmware names a cloud but whose x86 CPU shows no hypervisor is bare metal.
    """
    if "microsoft" in _text(host, "/proc/sys/kernel/osrelease").lower():
        return "wsl"
    cpuinfo = parse_cpuinfo(_text(host, "/proc/cpuinfo"))
    if cpuinfo.hypervisor is False:
        return None
    dmi = " ".join(
        _text(host, f"/sys/class/dmi/id/{name}")
        for name in ("sys_vendor", "product_name", "bios_vendor")
    ).lower()
    if cpuinfo.hypervisor is None and ".metal" in dmi:
        return None
    for word, name in _DMI_HYPERVISORS:
        if word in dmi:
            return name
    if kind := _text(host, "/sys/hypervisor/type"):
        return kind
    clocks = _text(host, "/sys/devices/system/clocksource/clocksource0/available_clocksource")
    for word, name in _CLOCK_HYPERVISORS:
        if word in clocks:
            return name
    if tree := _text(host, "/proc/device-tree/hypervisor/compatible").strip("\x00"):
        return tree.split(",")[-1]
    return "unknown" if cpuinfo.hypervisor else None


def sees_all_processes(host: Host) -> bool:
    """Whether /proc is that of the first PID namespace: its pid 2 is the kernel's kthreadd."""
    return _text(host, "/proc/2/comm") == "kthreadd"


def detect_container(host: Host) -> str | None:
    """The container runtime whose marks the caller's world bears; None when there are none.

    Marks that lie in the image (/.dockerenv) count only with a second sign, because a machine can
    be built from an image: a PID namespace of its own, or a root file system that is layered.
    """
    if host.exists("/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    group = _text(host, "/proc/self/cgroup")
    for word, name in _CGROUP_CONTAINERS:
        # systemd runs containerd and docker themselves as services: their own group is no container
        if word in group and f"{word.strip('/')}.service" not in group:
            return name
    if kind := _text(host, "/run/systemd/container"):
        return kind
    marked = next(
        (
            name
            for path, name in (("/run/.containerenv", "podman"), ("/.dockerenv", "docker"))
            if host.exists(path)
        ),
        None,
    )
    if marked is None:
        return None
    roots = [
        mount.type for mount in parse_mounts(_text(host, "/proc/self/mounts")) if mount.path == "/"
    ]
    layered = bool(roots) and roots[-1] in _CONTAINER_ROOTS
    return marked if layered or not sees_all_processes(host) else None
