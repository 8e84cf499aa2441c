"""The NVIDIA driver as files show it: modules, versions, device files. Nothing is opened."""

from __future__ import annotations

import errno
import posixpath
import re

from agent.collect.gaps import Gaps
from agent.collect.host_services import read_services
from agent.host import Host
from agent.parse.nvidia_version import parse_nvidia_version
from agent.parse.proc_modules import parse_proc_modules
from probes.snapshot.host import DeviceNode, DriverFacts, KernelModule

_PROC = "/proc/driver/nvidia"
_OTHER_MODULES = frozenset({"gdrdrv", "nv_peer_mem", "nouveau"})
_DEVICE = re.compile(r"nvidia(?:ctl|-uvm|\d+)\Z", re.ASCII)
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)\Z", re.ASCII)
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
)


def read_modules(host: Host, gaps: Gaps) -> tuple[KernelModule, ...] | None:
    """The loaded modules that bear on GPUs. A kernel without modules has none."""
    try:
        names: tuple[str, ...] = parse_proc_modules(host.read_text("/proc/modules"))
    except FileNotFoundError:
        try:
            names = tuple(host.listdir("/sys/module"))
        except OSError as error:
            gaps.add_error(error, "modules", path="/proc/modules, /sys/module")
            return None
    except OSError as error:
        gaps.add_error(error, "modules", path="/proc/modules")
        return None
    return tuple(
        KernelModule(
            name=name,
            version=_optional(host, f"/sys/module/{name}/version"),
            taint=_optional(host, f"/sys/module/{name}/taint"),
        )
        for name in sorted(names)
        if name.startswith("nvidia") or name in _OTHER_MODULES
    )


def _optional(host: Host, path: str) -> str | None:
    try:
        return host.read_text(path, 4096).strip() or None
    except OSError:
        return None


def read_driver(host: Host, modules: tuple[KernelModule, ...] | None, gaps: Gaps) -> DriverFacts:
    """Versions of the running module and of the library on disk, GPUs, device files, daemons."""
    module = next((module for module in modules or () if module.name == "nvidia"), None)
    version, flavor = _running_version(host, gaps)
    if flavor is None and module and module.taint:
        flavor = "proprietary" if "P" in module.taint else "open"
    libraries = _libraries(host)
    present = module is not None or version is not None
    return DriverFacts(
        module_version=version or (module.version if module else None),
        module_flavor=flavor,
        library_paths=tuple(libraries),
        library_versions=tuple(dict.fromkeys(libraries.values())),
        gpu_addresses=_gpu_addresses(host, gaps),
        devices=_devices(host, gaps),
        peer_memory_clients=_peer_memory_clients(host),
        services=read_services(host, gaps) if present else (),
    )


def _running_version(host: Host, gaps: Gaps) -> tuple[str | None, str | None]:
    path = f"{_PROC}/version"
    try:
        return parse_nvidia_version(host.read_text(path))
    except FileNotFoundError:
        return None, None  # no module, which is nothing to miss here
    except (OSError, ValueError) as error:
        gaps.add_error(error, "module_version", "module_flavor", path=path)
        return None, None


def _libraries(host: Host) -> dict[str, str]:
    """Version by path of what each ``libnvidia-ml.so.1`` leads to; the loader uses those."""
    found = {}
    for folder in _LIBRARY_FOLDERS:
        link = f"{folder}/libnvidia-ml.so.1"
        if not host.exists(link):
            continue
        try:
            target = host.realpath(link)
        except OSError:
            continue
        if match := _LIBRARY.match(posixpath.basename(target)):
            found[target] = match[1]
    return found


def _gpu_addresses(host: Host, gaps: Gaps) -> tuple[str, ...] | None:
    """The names only: reading the files below takes locks of the driver, a listing does not."""
    path = f"{_PROC}/gpus"
    try:
        return tuple(name.lower() for name in host.listdir(path))
    except FileNotFoundError:
        return ()
    except OSError as error:
        gaps.add_error(error, "gpu_addresses", path=path)
        return None


def _devices(host: Host, gaps: Gaps) -> tuple[DeviceNode, ...] | None:
    try:
        names = host.listdir("/dev")
    except OSError as error:
        gaps.add_error(error, "devices", path="/dev")
        return None
    nodes = []
    for name in names:
        if not _DEVICE.match(name):
            continue
        refused: str | None = None
        try:
            host.access(f"/dev/{name}")
        except OSError as error:
            refused = errno.errorcode.get(error.errno or 0, str(error.errno))
        nodes.append(DeviceNode(path=f"/dev/{name}", access_error=refused))
    return tuple(nodes)


def _peer_memory_clients(host: Host) -> tuple[str, ...]:
    try:
        return tuple(host.listdir("/sys/kernel/mm/memory_peers"))
    except OSError:
        return ()
