"""The process that talks to NVML, so that a call that never returns can be abandoned.

Run by path: ``python -I -S nvml_child.py PYNVML_DIR``; the only importer of pynvml. It takes one
request a line (``init``, ``gpu N``, ``sample N``, ``quit``) and answers in lines:

- ``>nvmlName``: this call begins (what hung is the last one begun);
- ``={...}``: a group of answers, by key: the call's name without ``nvmlDeviceGet``, arguments
  behind dots. A value, or ``[code]`` for a return code other than success;
- ``.``: the request is done.

Nothing is judged here. One thread: NVML's thread safety has had bugs, and so has calling it in
parallel on several GPUs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

SLOW_MS = 50.0
GPU_IS_LOST = 15
FUNCTION_NOT_FOUND = 13
UNUSABLE = -1  # the binding could not decode the answer
MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
BLACKWELL = 10  # NVML_DEVICE_ARCH_BLACKWELL
PR_SET_PDEATHSIG = 1

pynvml: Any = None


class LostError(Exception):
    """The GPU answered NVML_ERROR_GPU_IS_LOST: nothing more can be had from it."""


def say(text: str) -> None:
    """One line, at once."""
    os.write(1, text.encode() + b"\n")


class Asker:
    """Asks calls of one group and keeps the answers."""

    def __init__(self, absent: set[str]) -> None:
        self.values: dict[str, Any] = {}
        self.slow: list[tuple[str, float]] = []
        self._absent = absent  # functions that this library or binding lacks

    def ask(
        self, key: str, name: str, *args: Any, convert: Callable[[Any], Any] | None = None
    ) -> Any:
        """The value, or None; the answer of either kind is kept under ``key``."""
        if name in self._absent:
            self.values[key] = [FUNCTION_NOT_FOUND]
            return None
        say(">" + name)
        start = time.monotonic()
        code = 0
        value: Any = None
        try:
            value = getattr(pynvml, name)(*args)
            if convert is not None:
                value = convert(value)
        except pynvml.NVMLError as error:
            code = error.value
        except AttributeError:
            code = FUNCTION_NOT_FOUND
        except (UnicodeDecodeError, ValueError, TypeError, ctypes.ArgumentError):
            code = UNUSABLE
        took_ms = (time.monotonic() - start) * 1e3
        if took_ms >= SLOW_MS:
            self.slow.append((name, round(took_ms, 1)))
        if code:
            self.values[key] = [code]
            if code == FUNCTION_NOT_FOUND:
                self._absent.add(name)
            if code == GPU_IS_LOST:
                raise LostError(name)
            return None
        if isinstance(value, bytes):
            value = value.decode("latin-1")
        self.values[key] = value
        return value

    def either(self, key: str, first: str, second: str, *args: Any) -> Any:
        """The newer function, or the older one where the library lacks it."""
        value = self.ask(key, first, *args)
        if self.values[key] == [FUNCTION_NOT_FOUND]:
            value = self.ask(key, second, *args)
        return value

    def fields(self, handle: Any, ids: list[Any]) -> None:
        """Many field values in one call; each has its own return code."""
        name = "nvmlDeviceGetFieldValues"
        found = self.ask("FieldValues", name, handle, ids, convert=list)
        code = self.values.pop("FieldValues")
        for position, wanted in enumerate(ids):
            number, *scope = wanted if isinstance(wanted, tuple) else (wanted,)
            key = ".".join(map(str, ("field", number, *scope)))
            self.values[key] = code if found is None else _field_value(found[position])
            if self.values[key] == [GPU_IS_LOST]:
                raise LostError(name)


def _field_value(field: Any) -> Any:
    if field.nvmlReturn:
        return [field.nvmlReturn]
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if field.valueType >= len(members):
        return [UNUSABLE]
    return getattr(field.value, members[field.valueType])


def event_reason_fields(driver: str) -> tuple[int, int, int] | None:
    """Field ids of the thermal and brake counters: renumbered with 580.82 (nvml.h)."""
    numbers = [int(part) for part in driver.split(".") if part.isdigit()]
    if not numbers or numbers[0] < 575:
        return None
    if numbers[0] > 580 or (numbers[0] == 580 and len(numbers) > 1 and numbers[1] >= 82):
        return 269, 270, 271
    return 251, 252, 253


class Session:
    """NVML initialised once, and what is the same for all GPUs."""

    def __init__(self) -> None:
        self.driver = ""
        self.absent: set[str] = set()
        self.handles: dict[int, Any] = {}
        self.links: dict[int, int] = {}
        self.architectures: dict[int, int] = {}
        self.counters_of_links: dict[int, bool] = {}

    def group(self, name: str, index: int | None, fill: Callable[[Asker], None]) -> None:
        """Fill a group and send it, also when the GPU is lost on the way."""
        asker = Asker(self.absent)
        at_ns = time.monotonic_ns()
        lost = None
        try:
            fill(asker)
        except LostError as error:
            lost = str(error)
        out: dict[str, Any] = {"group": name, "gpu": index, "at_ns": at_ns, "values": asker.values}
        if asker.slow:
            out["slow"] = asker.slow
        if lost:
            out["lost"] = lost
        say("=" + json.dumps(out, separators=(",", ":")))
        if lost:
            raise LostError(lost)

    def init(self) -> None:
        """Initialise, and read the versions."""

        def fill(asker: Asker) -> None:
            start = time.monotonic()
            asker.ask("Init", "nvmlInit")
            asker.values["init_ms"] = round((time.monotonic() - start) * 1e3, 1)
            asker.ask("NVMLVersion", "nvmlSystemGetNVMLVersion")
            if asker.values["Init"] is not None:
                return
            self.driver = asker.ask("DriverVersion", "nvmlSystemGetDriverVersion") or ""
            asker.either(
                "CudaDriverVersion",
                "nvmlSystemGetCudaDriverVersion_v2",
                "nvmlSystemGetCudaDriverVersion",
            )
            asker.ask("Count", "nvmlDeviceGetCount")
            asker.ask(
                "ConfComputeState",
                "nvmlSystemGetConfComputeState",
                convert=lambda state: state.ccFeature,
            )
            asker.values["library"] = _library_path()

        self.group("init", None, fill)

    def gpu(self, index: int) -> None:
        """All of a GPU once."""
        self.group("handle", index, lambda asker: self._handle(asker, index))
        if index not in self.handles:
            return
        handle = self.handles[index]
        self.group("identity", index, lambda asker: self._identity(asker, handle, index))
        self.group("limits", index, lambda asker: _limits(asker, handle))
        self.group("memory", index, lambda asker: _memory(asker, handle))
        self.group("links", index, lambda asker: self._links(asker, handle, index))
        self.group("processes", index, lambda asker: _processes(asker, handle))
        self.sample(index)

    def sample(self, index: int) -> None:
        """What moves."""
        handle = self.handles.get(index)
        if handle is None:
            self.group("handle", index, lambda asker: self._handle(asker, index))
            if (handle := self.handles.get(index)) is None:
                return
        self.group("reading", index, lambda asker: self._reading(asker, handle, index))

    def _handle(self, asker: Asker, index: int) -> None:
        handle = asker.ask("Handle", "nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            asker.values["Handle"] = 0
            self.handles[index] = handle
            # Who it is, before anything that may hang: a group is sent when it is complete.
            for name in ("UUID", "Name"):
                asker.ask(name, f"nvmlDeviceGet{name}", handle)
            asker.ask("PciInfo", "nvmlDeviceGetPciInfo", handle, convert=_pci)

    def _identity(self, asker: Asker, handle: Any, index: int) -> None:
        ask = asker.ask
        for name in (
            "Serial", "BoardPartNumber", "MinorNumber", "VbiosVersion",
            "InforomImageVersion", "GspFirmwareVersion", "VirtualizationMode", "PersistenceMode",
            "ComputeMode", "DisplayActive", "EccMode", "CudaComputeCapability", "ModuleId",
        ):  # fmt: skip
            ask(name, f"nvmlDeviceGet{name}", handle)
        self.architectures[index] = ask("Architecture", "nvmlDeviceGetArchitecture", handle) or 0
        mode = ask("MigMode", "nvmlDeviceGetMigMode", handle)
        if mode and mode[0]:
            ask("Mig", "nvmlDeviceGetMaxMigDeviceCount", handle)
            count = asker.values["Mig"]
            asker.values["Mig"] = [
                found
                for number in range(count if isinstance(count, int) else 0)
                if (found := _mig(asker, handle, number))
            ] or [3]
        ask(
            "C2cModeInfo",
            "nvmlDeviceGetC2cModeInfoV",
            handle,
            convert=lambda info: info.isC2cEnabled,
        )
        _fabric(asker, "nvmlDeviceGetGpuFabricInfoV", handle)
        asker.fields(handle, [170, 193, 194, 195, 196, 230])

    def _links(self, asker: Asker, handle: Any, index: int) -> None:
        states: list[int] = []
        for link in range(MAX_LINKS):
            state = asker.ask("NvLinkState", "nvmlDeviceGetNvLinkState", handle, link)
            if state is None:
                break
            states.append(state)
        if states:
            del asker.values["NvLinkState"]
        asker.values["states"] = states
        self.links[index] = len(states)
        if not states:
            return
        asker.fields(handle, [(field, link) for link in range(len(states)) for field in (164, 165)])
        for link in range(len(states)):
            asker.ask(f"NvLinkVersion.{link}", "nvmlDeviceGetNvLinkVersion", handle, link)
            asker.ask(
                f"NvLinkRemoteDeviceType.{link}",
                "nvmlDeviceGetNvLinkRemoteDeviceType",
                handle,
                link,
            )
            asker.ask(
                f"NvLinkRemotePciInfo.{link}",
                "nvmlDeviceGetNvLinkRemotePciInfo",
                handle,
                link,
                convert=_pci,
            )

    def _reading(self, asker: Asker, handle: Any, index: int) -> None:
        ask = asker.ask
        for number in (0, 1, 2):
            ask(f"ClockInfo.{number}", "nvmlDeviceGetClockInfo", handle, number)
        asker.either(
            "CurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            handle,
        )
        for name in (
            "UUID", "PerformanceState", "PowerUsage", "TotalEnergyConsumption", "FanSpeed",
            "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "PcieReplayCounter",
            "MarginTemperature",
        ):  # fmt: skip
            ask(name, f"nvmlDeviceGet{name}", handle)
        asker.either(
            "Temperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", handle, 0
        )
        ask(
            "UtilizationRates",
            "nvmlDeviceGetUtilizationRates",
            handle,
            convert=lambda rates: [rates.gpu, rates.memory],
        )
        _memory_info(asker, handle)
        for kind in (0, 1):
            for span in (0, 1):
                ask(
                    f"TotalEccErrors.{kind}.{span}",
                    "nvmlDeviceGetTotalEccErrors",
                    handle,
                    kind,
                    span,
                )
        for place in (2, 7):  # DRAM, SRAM
            ask(
                f"MemoryErrorCounter.1.0.{place}",
                "nvmlDeviceGetMemoryErrorCounter",
                handle,
                1,
                0,
                place,
            )
        ids: list[Any] = [74, 75, 76, 77, 78, 79, 82, 138, 139, 169, 173, 179, 180, 197, 198]
        if newer := event_reason_fields(self.driver):
            ids += newer
        links = self.links.get(index, 0)
        if links and self.architectures.get(index, 0) >= BLACKWELL:
            ids += [
                (field, link)
                for link in range(links)
                for field in (206, 207, 208, 211, 213, 214, 219, 220, 221, 222)
            ]
        asker.fields(handle, ids)
        for number, field in enumerate((74, 75, 76, 77, 78, 79)):
            # the field is newer than the call on some drivers, and not answered on some parts
            if isinstance(asker.values[f"field.{field}"], list):
                ask(
                    f"ViolationStatus.{number}",
                    "nvmlDeviceGetViolationStatus",
                    handle,
                    number,
                    convert=lambda status: status.violationTime,
                )
        if links and self.architectures.get(index, 0) < BLACKWELL:
            self._link_errors(asker, handle, index, links)

    def _link_errors(self, asker: Asker, handle: Any, index: int, links: int) -> None:
        for link in range(links):
            if not self.counters_of_links.get(index, True):
                return
            answers = [
                asker.ask(
                    f"NvLinkErrorCounter.{link}.{counter}",
                    "nvmlDeviceGetNvLinkErrorCounter",
                    handle,
                    link,
                    counter,
                )
                for counter in range(5)
            ]
            if link == 0 and not any(answer is not None for answer in answers):
                self.counters_of_links[index] = False


def _limits(asker: Asker, handle: Any) -> None:
    ask = asker.ask
    for number in (0, 1, 2):
        ask(f"MaxClockInfo.{number}", "nvmlDeviceGetMaxClockInfo", handle, number)
    ask("MaxCustomerBoostClock.1", "nvmlDeviceGetMaxCustomerBoostClock", handle, 1)
    for number in (1, 2):
        ask(f"ApplicationsClock.{number}", "nvmlDeviceGetApplicationsClock", handle, number)
        name = "nvmlDeviceGetDefaultApplicationsClock"
        ask(f"DefaultApplicationsClock.{number}", name, handle, number)
    for name in (
        "PowerManagementLimit", "EnforcedPowerLimit", "PowerManagementDefaultLimit",
        "PowerManagementLimitConstraints", "MaxPcieLinkGeneration", "GpuMaxPcieLinkGeneration",
        "MaxPcieLinkWidth",
    ):  # fmt: skip
        ask(name, f"nvmlDeviceGet{name}", handle)
    for number in range(4):
        ask(f"TemperatureThreshold.{number}", "nvmlDeviceGetTemperatureThreshold", handle, number)
    asker.either(
        "SupportedClocksEventReasons",
        "nvmlDeviceGetSupportedClocksEventReasons",
        "nvmlDeviceGetSupportedClocksThrottleReasons",
        handle,
    )


def _memory(asker: Asker, handle: Any) -> None:
    ask = asker.ask
    ask("RemappedRows", "nvmlDeviceGetRemappedRows", handle)
    if not _refused(asker.values["RemappedRows"]):
        ask(
            "RowRemapperHistogram",
            "nvmlDeviceGetRowRemapperHistogram",
            handle,
            convert=lambda v: [v.max, v.high, v.partial, v.low, v.none],
        )
    else:
        for cause in (0, 1):  # several single-bit errors, a double-bit error
            ask(
                f"RetiredPages.{cause}",
                "nvmlDeviceGetRetiredPages",
                handle,
                cause,
                convert=lambda pages: len(list(pages)),
            )
        ask("RetiredPagesPendingStatus", "nvmlDeviceGetRetiredPagesPendingStatus", handle)
    name = "nvmlDeviceGetSramEccErrorStatus"
    if hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
        status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        members = [member for member, _ in status._fields_ if member != "version"]
        ask(
            "SramEccErrorStatus",
            name,
            handle,
            ctypes.byref(status),
            convert=lambda _: {member: getattr(status, member) for member in members},
        )


def _memory_info(asker: Asker, handle: Any) -> None:
    version = getattr(pynvml, "nvmlMemory_v2", None)
    name = "nvmlDeviceGetMemoryInfo"
    if version is not None:
        found = asker.ask(
            "MemoryInfo",
            name,
            handle,
            version,
            convert=lambda memory: [memory.total, memory.used, memory.reserved],
        )
        if found is not None:
            return
        # the function of that name exists: it is its second version that is missing
        asker._absent.discard(name)  # noqa: SLF001 - same module
    asker.ask("MemoryInfo", name, handle, convert=lambda memory: [memory.total, memory.used, None])


def _processes(asker: Asker, handle: Any) -> None:
    def listed(found: list[Any]) -> list[list[int | None]]:
        return [[item.pid, item.usedGpuMemory] for item in found]

    for kind in ("Compute", "Graphics"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        key = f"{kind}RunningProcesses"
        asker.ask(key, f"{name}_v3", handle, convert=listed)
        if asker.values[key] == [FUNCTION_NOT_FOUND]:
            asker.ask(key, f"{name}_v2", handle, convert=listed)


def _mig(asker: Asker, handle: Any, number: int) -> dict[str, Any] | None:
    inner = Asker(set())
    inner.slow = asker.slow
    device = inner.ask("Handle", "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
    if device is None:
        return None
    inner.ask("UUID", "nvmlDeviceGetUUID", device)
    inner.ask("GpuInstanceId", "nvmlDeviceGetGpuInstanceId", device)
    inner.ask("ComputeInstanceId", "nvmlDeviceGetComputeInstanceId", device)
    inner.ask("Memory", "nvmlDeviceGetMemoryInfo", device, convert=lambda memory: memory.total)
    del inner.values["Handle"]
    return inner.values


def _fabric(asker: Asker, name: str, handle: Any) -> None:
    """Versioned structs: one that is too new for the driver is refused, the older ones follow."""
    for type_name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        if not hasattr(pynvml, type_name):
            continue
        info = getattr(pynvml, type_name)()
        asker.ask("Fabric", name, handle, ctypes.byref(info), convert=_fabric_of(info))
        if not _refused(asker.values["Fabric"]) or asker.values["Fabric"] not in ([13], [25]):
            return
    info = pynvml.c_nvmlGpuFabricInfo_t()
    older = "nvmlDeviceGetGpuFabricInfo"
    asker.ask("Fabric", older, handle, ctypes.byref(info), convert=_fabric_of(info))


def _fabric_of(info: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda _: {
        "state": info.state,
        "status": info.status,
        "clique_id": info.cliqueId,
        "cluster_uuid": bytes(info.clusterUuid).hex(),
        "health_mask": getattr(info, "healthMask", None),
        "health_summary": getattr(info, "healthSummary", None),
    }


def _refused(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _pci(info: Any) -> str:
    bus_id = info.busId
    return bus_id.decode("latin-1") if isinstance(bus_id, bytes) else str(bus_id)


def _library_path() -> str | None:
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "libnvidia-ml.so" in line:
                    return line.split(maxsplit=5)[5].strip()
    except OSError:
        pass
    return None


def serve() -> None:
    """Answer requests until ``quit`` or the end of standard input."""
    session = Session()
    for line in sys.stdin:
        words = line.split()
        if not words or words[0] == "quit":
            return
        try:
            if words[0] == "init":
                session.init()
            elif words[0] == "gpu":
                session.gpu(int(words[1]))
            elif words[0] == "sample":
                session.sample(int(words[1]))
        except LostError:
            pass
        say(".")


def main() -> None:
    """Die with the parent, import the binding, serve."""
    global pynvml  # noqa: PLW0603 - imported where a failure can be told
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    sys.path.append(sys.argv[1])
    import pynvml as binding

    pynvml = binding
    serve()


if __name__ == "__main__":
    main()
