"""Checks of laggard's own footing: permissions, tools, versions, shadowed imports."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agent import __version__
from agent.host import Host, LiveHost

_PACKAGES = ("agent", "probes", "collectives")


class Item(msgspec.Struct, frozen=True):
    """One thing looked at; ``advice`` says what to do when it is not ok, or what it costs."""

    what: str
    ok: bool
    found: str
    advice: str = ""


def examine(root: str) -> Iterator[Item]:
    """Everything, in the order a person wants it: the installation, then each source."""
    host = LiveHost(root)
    version = sys.version.split()[0]
    yield Item("laggard", True, f"{__version__} on Python {version} at {sys.executable}")
    yield from imports()
    yield from _dependencies()
    yield _nvml(host)
    yield _kernel_log(host)
    yield _other_processes(host)
    yield _ptrace(host)
    yield _config_space(host)
    yield _py_spy()


def imports() -> Iterator[Item]:
    """Where our packages come from, and whether another distribution claims the same files."""
    home = Path(__file__).resolve().parent.parent
    for package in _PACKAGES:
        found = importlib.import_module(package).__file__
        place = Path(found).resolve().parent.parent if found else None
        if place != home:
            yield Item(
                f"package {package}",
                False,
                f"imported from {place}, laggard is in {home}",
                "a folder of that name shadows ours: start `laggard` itself (its launcher pins the "
                "path), or take the folder off PYTHONPATH",
            )
            continue
        shadows = [
            entry
            for entry in dict.fromkeys(
                (str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
            )
            if entry and Path(entry).resolve() != home and _has_package(Path(entry), package)
        ]
        claims = _claimed_by_others(package)
        if claims:
            yield Item(
                f"package {package}",
                False,
                f"also installed by {', '.join(claims)}",
                "one overwrites the other, and uninstalling it deletes our files: install laggard "
                "in an environment of its own (pipx or uv tool)",
            )
        else:
            note = f" (not the one in {', '.join(shadows)})" if shadows else ""
            yield Item(f"package {package}", True, f"{home / package}{note}")


def _has_package(folder: Path, package: str) -> bool:
    return (folder / package / "__init__.py").is_file() or (folder / f"{package}.py").is_file()


def _claimed_by_others(package: str) -> list[str]:
    claims = set()
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name == "laggard":
            continue
        # the text itself: `files` leaves out, from Python 3.13 on, what no longer exists
        record = distribution.read_text("RECORD") or ""
        top = {line.split(",")[0].split("/")[0] for line in record.splitlines()}
        if package in top or f"{package}.py" in top:
            claims.add(name)
    return sorted(claims)


def _dependencies() -> Iterator[Item]:
    names = {
        d.metadata["Name"].lower() for d in importlib.metadata.distributions() if d.metadata["Name"]
    }
    if "pynvml" in names:
        yield Item(
            "pynvml",
            False,
            "the deprecated distribution `pynvml` is installed",
            "it prints a warning on every import and torch warns too: pip uninstall pynvml; "
            "nvidia-ml-py has the module",
        )


def _nvml(host: Host) -> Item:
    from agent.collect.nvml import NvmlCollector

    with NvmlCollector(host, until_ns=host.monotonic_ns() + 10_000_000_000) as collector:
        section, gaps = collector.first()
    if section is None:
        detail = "; ".join(gap.detail or gap.reason.value for gap in gaps)
        allow = next((gap.allow for gap in gaps if gap.allow), "")
        hidden = host.exists("/proc/driver/nvidia") or any(g.reason.hides_something for g in gaps)
        return Item("NVML", not hidden, detail or "not here", allow or "")
    if section.init_error:
        return Item(
            "NVML", False, f"{section.init_error}: {section.init_detail}",
            "`laggard check --only 'nvml.*'` says what it means and what to do",
        )  # fmt: skip
    return Item("NVML", True, f"driver {section.driver_version}, {len(section.gpus)} GPUs")


def _kernel_log(host: Host) -> Item:
    from agent.collect.kernel import collect

    section, gaps = collect(host)
    if section is not None:
        return Item("kernel log", True, f"{section.lines_read} lines from {section.source}")
    detail = "; ".join(gap.detail or gap.reason.value for gap in gaps)
    return Item(
        "kernel log", False, detail, next((gap.allow for gap in gaps if gap.allow), "") or ""
    )


def _other_processes(host: Host) -> Item:
    if host.euid() == 0:
        return Item("open files of other users' processes", True, "running as root")
    return Item(
        "open files of other users' processes",
        False,
        "only own processes can be looked into",
        "run as root, or with CAP_SYS_PTRACE, to see who holds a GPU",
    )


def _ptrace(host: Host) -> Item:
    try:
        scope = int(host.read_text("/proc/sys/kernel/yama/ptrace_scope"))
    except (OSError, ValueError):
        scope = 0
    if host.euid() == 0 and scope < 3:
        return Item("stacks (ptrace)", True, f"root, ptrace_scope {scope}")
    if scope == 0:
        return Item("stacks (ptrace)", True, "own processes (ptrace_scope 0)")
    return Item(
        "stacks (ptrace)",
        False,
        f"ptrace_scope is {scope}",
        "run as root"
        + ("; ptrace_scope 3 forbids it to all until a reboot" if scope == 3 else
           ", or `sysctl kernel.yama.ptrace_scope=0`; in a container add --cap-add SYS_PTRACE"),
    )  # fmt: skip


def _config_space(host: Host) -> Item:
    base = "/sys/bus/pci/devices"
    try:
        names = host.listdir(base)
    except OSError as error:
        return Item("PCI", False, f"{base}: {error.strerror}", "mount /sys, or pass --root")
    if not names:
        return Item("PCI", True, "no PCI device here")
    try:
        size = len(host.read_bytes(f"{base}/{names[0]}/config", 4096))
    except OSError as error:
        return Item("PCI", False, f"{base}/{names[0]}/config: {error.strerror}", "run as root")
    if size > 64 or host.euid() == 0:
        return Item("PCI", True, f"{len(names)} devices, whole config space")
    return Item(
        "PCI", True, f"{len(names)} devices; capabilities (ACS) are hidden from non-root users",
        "run as root to have ACS judged",
    )  # fmt: skip


def _py_spy() -> Item:
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found:
        return Item("py-spy", True, found)
    return Item(
        "py-spy", False, "not found", "pip install py-spy; without it hung ranks show no stack"
    )
