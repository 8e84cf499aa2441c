"""The process that talks to NVML, so that a call that never returns can be abandoned.

Run by path: ``python -I -S nvml_child.py PYNVML_DIR NOTE``; the only importer of pynvml. ``NOTE``
is a file descriptor of a page that holds the last call begun, behind the monotonic time in
nanoseconds: what hung is found there. It takes one request a line and answers in lines:

=====================================  ============================================================
``init S``                             nvmlInit and the versions
``gpu INDEX S``                        all of a GPU and a first reading
``sample INDEX LINKS ARCHITECTURE S``  a reading
``quit``                               end, as does the end of standard input
=====================================  ============================================================

- ``={...}``: a group of answers by key: the call's name without ``nvmlDeviceGet``, its arguments
  behind dots. A value, or ``[code]`` for a return code other than success;
- ``.``: the request is done.

Nothing is judged here. The file stands alone: our packages are not on its path. One thread: NVML's
thread safety has had bugs, and so has calling it in parallel on several GPUs. A request ends early
when the GPU is lost, or when its calls return but ``S`` seconds are over. What is imported is kept
small: it is half of the cost of a run.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import time
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself costs more to import than all calls on a GPU
    from collections.abc import Callable
    from typing import Any

SLOW_NS = 50_000_000
MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
BLACKWELL = 10  # NVML_DEVICE_ARCH_BLACKWELL
ALL_LINKS = 0xFFFFFFFF  # the scope of the traffic fields that adds all links up
PR_SET_PDEATHSIG = 1
SIGKILL = 9

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
VERSION_MISMATCH = 25
TRY_OLDER = ([NOT_SUPPORTED], [FUNCTION_NOT_FOUND], [VERSION_MISMATCH])
NO_SUCH_LINK = ([INVALID_ARGUMENT], [NOT_SUPPORTED], [FUNCTION_NOT_FOUND])
UNUSABLE = -1  # the binding could not decode the answer

NOTE_BYTES = 128

_note: Any = bytearray(NOTE_BYTES)  # main() maps the parent's page
_OUT = 1  # where answers go; main() moves it away from what a library may print to

pynvml: Any = None


class StopError(Exception):
    """No more is asked of this GPU: it is lost, or its time is over."""

    def __init__(self, why: str, call: str) -> None:
        super().__init__(why)
        self.why, self.call = why, call


def say(text: str) -> None:
    """One line, at once."""
    os.write(_OUT, text.encode() + b"\n")


def text_of(value: Any) -> str:
    """JSON; the json package costs more to import than this."""
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return str(int(value))
    if isinstance(value, float):
        return repr(value) if abs(value) < float("inf") else f"[{UNUSABLE}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{text_of(k)}:{text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(text_of, value)) + "]"
    if not isinstance(value, str):
        return f"[{UNUSABLE}]"
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return f'"{value}"'
    return '"' + "".join(f"\\u{min(ord(character), 0xFFFD):04x}" for character in value) + '"'


class Asker:
    """Asks the calls of one group and keeps the answers."""

    def __init__(self, absent: set[str], until_ns: int) -> None:
        self.values: dict[str, Any] = {}
        self.slow: list[tuple[str, float]] = []
        self.absent = absent  # functions that this library or binding lacks
        self.until_ns = until_ns

    def ask(
        self, key: str, name: str, *args: Any, convert: Callable[[Any], Any] | None = None
    ) -> Any:
        """The value, or None; the answer of either kind is kept under ``key``."""
        if name in self.absent:
            self.values[key] = [FUNCTION_NOT_FOUND]
            return None
        start = time.monotonic_ns()
        if start >= self.until_ns:
            raise StopError("slow", name)
        _note[:] = f"{start} {name}".encode().ljust(NOTE_BYTES)
        code = 0
        value: Any = None
        try:
            value = getattr(pynvml, name)(*args)
            if convert is not None:
                value = convert(value)
        except pynvml.NVMLError as error:
            code = error.value or NOT_SUPPORTED  # the binding raises 0 for "there are none"
        except AttributeError:
            code = FUNCTION_NOT_FOUND
        except Exception:
            code = UNUSABLE
        took_ns = time.monotonic_ns() - start
        if took_ns >= SLOW_NS:
            self.slow.append((name, round(took_ns / 1e6, 1)))
        if not code:
            if isinstance(value, bytes):
                value = value.decode("latin-1")
            self.values[key] = value
            return value
        self.values[key] = [code]
        if code == FUNCTION_NOT_FOUND:
            self.absent.add(name)
        if code == GPU_IS_LOST:
            raise StopError("lost", name)
        return None

    def each(self, handle: Any, *names: str) -> None:
        """Getters that take nothing but the handle."""
        for name in names:
            self.ask(name, f"nvmlDeviceGet{name}", handle)

    def either(self, key: str, newer: str, older: str, *args: Any) -> Any:
        """The newer function, or the older one where this library or part does without it."""
        value = self.ask(key, newer, *args)
        if self.values[key] in TRY_OLDER:
            value = self.ask(key, older, *args)
        return value

    def refused(self, key: str) -> bool:
        """Whether the answer is a return code."""
        value = self.values[key]
        return isinstance(value, list) and len(value) == 1

    def fields(self, handle: Any, ids: list[Any]) -> None:
        """Many field values in one call; each has its own return code."""
        name = "nvmlDeviceGetFieldValues"
        found = self.ask(name, name, handle, ids, convert=list)
        code = self.values.pop(name)
        for position, wanted in enumerate(ids):
            if isinstance(wanted, tuple):
                key = f"field.{wanted[0]}.{wanted[1]}"
            else:
                key = f"field.{wanted}"
            self.values[key] = code if found is None else field_value(found[position])
            if self.values[key] == [GPU_IS_LOST]:
                raise StopError("lost", name)


def field_value(field: Any) -> Any:
    """The member of nvmlValue_t that valueType names (nvmlValueType_t)."""
    if field.nvmlReturn:
        return [field.nvmlReturn]
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if field.valueType >= len(members):
        return [UNUSABLE]
    return getattr(field.value, members[field.valueType])


def event_reason_fields(driver: str) -> tuple[int, ...]:
    """Field ids of the thermal and brake counters: new with 575, renumbered with 580.82."""
    numbers = [int(part) for part in driver.split(".") if part.isdigit()]
    if not numbers or numbers[0] < 575:
        return ()
    return (269, 270, 271) if [*numbers, 0][:2] >= [580, 82] else (251, 252, 253)


class Session:
    """NVML initialised once, and what is the same for all GPUs."""

    def __init__(self) -> None:
        self.driver = ""
        self.absent: set[str] = set()
        self.handles: dict[int, Any] = {}
        self._budget_ns = self._until_ns = 0

    def group(self, name: str, index: int | None, fill: Callable[[Asker], None]) -> None:
        """Fill a group and send it, also when the GPU is lost on the way."""
        asker = Asker(self.absent, self._until_ns)
        out: dict[str, Any] = {
            "group": name,
            "gpu": index,
            "at_ns": time.monotonic_ns(),
            "values": asker.values,
        }
        stop = None
        try:
            fill(asker)
        except StopError as reason:
            stop = reason
            out[reason.why] = reason.call
        if asker.slow:
            out["timings"] = asker.slow
        say("=" + text_of(out))
        if stop is not None:
            raise stop

    def serve(self, words: list[str]) -> None:
        """Answer one request."""
        self._budget_ns = int(float(words[-1]) * 1e9)
        self._until_ns = time.monotonic_ns() + self._budget_ns
        try:
            if words[0] == "init":
                self.group("init", None, self.init)
            elif words[0] == "gpu":
                self.gpu(int(words[1]))
            elif words[0] == "sample":
                index, links, architecture = map(int, words[1:4])
                if self.handle(index) is not None:
                    self.reading(index, links, architecture)
        except StopError:
            pass
        say(".")

    def init(self, asker: Asker) -> None:
        """Initialise, and read the versions."""
        ask = asker.ask
        start = time.monotonic_ns()
        ask("Init", "nvmlInit")
        asker.values["init_ms"] = round((time.monotonic_ns() - start) / 1e6, 1)
        ask("NVMLVersion", "nvmlSystemGetNVMLVersion")
        asker.values["library"] = library_path()
        if asker.values["Init"] is not None:
            return
        self.driver = ask("DriverVersion", "nvmlSystemGetDriverVersion") or ""
        ask("CudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
        ask("Count", "nvmlDeviceGetCount")
        ask("ConfComputeState", "nvmlSystemGetConfComputeState", convert=lambda s: s.ccFeature)

    def handle(self, index: int) -> Any:
        """The handle, sent as a group when it is new: who the GPU is comes before all else."""
        if index not in self.handles:

            def fill(asker: Asker) -> None:
                found = asker.ask("Handle", "nvmlDeviceGetHandleByIndex", index)
                if found is None:
                    return
                asker.values["Handle"] = 0
                self.handles[index] = found
                # without persistence mode the driver starts the GPU here, which takes seconds
                self._until_ns = asker.until_ns = time.monotonic_ns() + self._budget_ns
                asker.ask("PciInfo", "nvmlDeviceGetPciInfo", found, convert=bus_id)
                asker.each(found, "UUID", "Name")

            self.group("handle", index, fill)
        return self.handles.get(index)

    def gpu(self, index: int) -> None:
        """All of a GPU once."""
        handle = self.handle(index)
        if handle is None:
            return
        found: dict[str, int] = {}
        self.group("identity", index, lambda asker: identity(asker, handle, found))
        self.group("limits", index, lambda asker: limits(asker, handle))
        self.group("memory", index, lambda asker: memory(asker, handle))
        self.group("links", index, lambda asker: nvlinks(asker, handle, found))
        self.group("processes", index, lambda asker: processes(asker, handle, self.driver))
        self.reading(index, found["links"], found["architecture"])

    def reading(self, index: int, links: int, architecture: int) -> None:
        """What moves."""
        handle = self.handles[index]

        def fill(asker: Asker) -> None:
            asker.each(handle, "UUID")  # an index can come to mean another GPU
            # counters first: their differences are divided by those of the group's time
            counters(asker, handle, event_reason_fields(self.driver), links, architecture)
            reading(asker, handle)

        self.group("reading", index, fill)


def identity(asker: Asker, handle: Any, found: dict[str, int]) -> None:
    """What the GPU is and which modes it is in."""
    ask = asker.ask
    asker.each(
        handle,
        "Serial", "BoardPartNumber", "MinorNumber", "VbiosVersion", "InforomImageVersion",
        "GspFirmwareVersion", "VirtualizationMode", "PersistenceMode", "ComputeMode",
        "DisplayActive", "EccMode", "CudaComputeCapability", "ModuleId", "MigMode",
    )  # fmt: skip
    found["architecture"] = ask("Architecture", "nvmlDeviceGetArchitecture", handle) or 0
    if not asker.refused("MigMode") and asker.values["MigMode"][0]:
        count = ask("Mig", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        devices = [mig_device(asker, handle, number) for number in range(count)]
        asker.values["Mig"] = [device for device in devices if device]
    ask("C2cModeInfo", "nvmlDeviceGetC2cModeInfoV", handle, convert=lambda c2c: c2c.isC2cEnabled)
    fabric(asker, handle)
    asker.fields(handle, [170, 226, 227, 230])


def mig_device(asker: Asker, handle: Any, number: int) -> dict[str, Any] | None:
    """One MIG device under its parent, or None where the slot is empty."""
    inner = Asker(asker.absent, asker.until_ns)
    inner.slow = asker.slow
    device = inner.ask("Handle", "nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
    if device is None:
        return None
    inner.each(device, "UUID", "GpuInstanceId", "ComputeInstanceId")
    inner.ask("Memory", "nvmlDeviceGetMemoryInfo", device, convert=lambda memory: memory.total)
    del inner.values["Handle"]
    return inner.values


def fabric(asker: Asker, handle: Any) -> None:
    """Versioned structs: one that is too new for the driver is refused, the older ones follow."""
    for name, type_name in (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        if not hasattr(pynvml, type_name):
            continue
        info = getattr(pynvml, type_name)()
        asker.ask("Fabric", name, handle, ctypes.byref(info), convert=lambda _: 0)
        if not asker.refused("Fabric"):
            asker.values["Fabric"] = {
                "state": info.state,
                "status": info.status,
                "clique_id": info.cliqueId,
                "cluster_uuid": bytes(info.clusterUuid).hex(),
                "health_mask": getattr(info, "healthMask", None),
                "health_summary": getattr(info, "healthSummary", None),
            }
            return
        if asker.values["Fabric"] not in ([FUNCTION_NOT_FOUND], [VERSION_MISMATCH]):
            return


def limits(asker: Asker, handle: Any) -> None:
    """The part's own bounds and what an operator set."""
    for number in (0, 1, 2):
        asker.ask(f"MaxClockInfo.{number}", "nvmlDeviceGetMaxClockInfo", handle, number)
    asker.ask("MaxCustomerBoostClock.1", "nvmlDeviceGetMaxCustomerBoostClock", handle, 1)
    for name in ("ApplicationsClock", "DefaultApplicationsClock"):
        for number in (1, 2):
            asker.ask(f"{name}.{number}", f"nvmlDeviceGet{name}", handle, number)
    asker.each(
        handle,
        "PowerManagementLimit", "EnforcedPowerLimit", "PowerManagementDefaultLimit",
        "PowerManagementLimitConstraints", "MaxPcieLinkGeneration", "GpuMaxPcieLinkGeneration",
        "MaxPcieLinkWidth",
    )  # fmt: skip
    for number in range(4):
        key = f"TemperatureThreshold.{number}"
        asker.ask(key, "nvmlDeviceGetTemperatureThreshold", handle, number)
    asker.fields(handle, [193, 194, 195, 196])
    asker.either(
        "SupportedClocksEventReasons",
        "nvmlDeviceGetSupportedClocksEventReasons",
        "nvmlDeviceGetSupportedClocksThrottleReasons",
        handle,
    )


def memory(asker: Asker, handle: Any) -> None:
    """Repairs of the memory: row remapping, or page retirement on what is older than Ampere."""
    asker.each(handle, "RemappedRows")
    if not asker.refused("RemappedRows"):
        asker.ask(
            "RowRemapperHistogram",
            "nvmlDeviceGetRowRemapperHistogram",
            handle,
            convert=lambda banks: [banks.max, banks.high, banks.partial, banks.low, banks.none],
        )
    else:
        for cause in (0, 1):  # several single-bit errors, a double-bit error
            asker.ask(
                f"RetiredPages.{cause}",
                "nvmlDeviceGetRetiredPages",
                handle,
                cause,
                convert=lambda pages: len(list(pages)),
            )
        asker.each(handle, "RetiredPagesPendingStatus")
    if hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
        status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        asker.ask(
            "SramEccErrorStatus",
            "nvmlDeviceGetSramEccErrorStatus",
            handle,
            ctypes.byref(status),
            convert=lambda _: {
                member: getattr(status, member)
                for member, _ in status._fields_
                if member != "version"
            },
        )


def nvlinks(asker: Asker, handle: Any, found: dict[str, int]) -> None:
    """Links until the first one that the part does not have; call by call, not link by link."""
    states: list[int | list[int]] = []
    for link in range(MAX_LINKS):
        asker.ask("NvLinkState", "nvmlDeviceGetNvLinkState", handle, link)
        if asker.values["NvLinkState"] in NO_SUCH_LINK:
            break
        states.append(asker.values.pop("NvLinkState"))  # one link's failure ends nothing
    found["links"] = len(states)
    if states:
        asker.values.pop("NvLinkState", None)
        asker.values["states"] = states
        asker.fields(handle, [(field, link) for field in (164, 165) for link in range(len(states))])
    for name, convert in (
        ("NvLinkVersion", None),
        ("NvLinkRemoteDeviceType", None),
        ("NvLinkRemotePciInfo", bus_id),
    ):
        for link in range(len(states)):
            asker.ask(f"{name}.{link}", f"nvmlDeviceGet{name}", handle, link, convert=convert)


def process_list_fits(driver: str) -> bool:
    """Whether the third version of the process list has the layout that the binding knows.

    Drivers 535.43 to 535.86 have a member more under the same name (XuehaiPan/nvitop#88).
    """
    numbers = [int(part) for part in driver.split(".")[:2] if part.isdigit()]
    return len(numbers) < 2 or numbers[0] != 535 or numbers[1] >= 98


def processes(asker: Asker, handle: Any, driver: str) -> None:
    """Who holds the GPU: one query a kind, each costs milliseconds."""
    for kind in ("Compute", "Graphics"):
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        key = f"{kind}RunningProcesses"
        if process_list_fits(driver):
            asker.ask(key, f"{name}_v3", handle, convert=listed)
        if asker.values.get(key) in (None, [FUNCTION_NOT_FOUND]):
            asker.ask(key, f"{name}_v2", handle, convert=listed)


def listed(found: list[Any]) -> list[list[int | None]]:
    """Process ids and what they hold."""
    return [[item.pid, item.usedGpuMemory] for item in found]


def reading(asker: Asker, handle: Any) -> None:
    """What moves: clocks, power, heat, load, link, memory errors."""
    ask = asker.ask
    for number in (0, 1, 2):
        ask(f"ClockInfo.{number}", "nvmlDeviceGetClockInfo", handle, number)
    asker.either(
        "CurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        handle,
    )
    asker.each(
        handle,
        "PerformanceState", "PowerUsage", "TotalEnergyConsumption", "FanSpeed",
        "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "PcieReplayCounter", "MarginTemperature",
    )  # fmt: skip
    asker.either("Temperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", handle, 0)
    name = "nvmlDeviceGetUtilizationRates"
    ask("UtilizationRates", name, handle, convert=lambda rates: [rates.gpu, rates.memory])
    memory_info(asker, handle)
    for kind in (0, 1):  # corrected, uncorrected
        for span in (0, 1):  # volatile, aggregate
            name = "nvmlDeviceGetTotalEccErrors"
            ask(f"TotalEccErrors.{kind}.{span}", name, handle, kind, span)
    for place in (2, 7):  # DRAM, SRAM
        name = "nvmlDeviceGetMemoryErrorCounter"
        ask(f"MemoryErrorCounter.1.0.{place}", name, handle, 1, 0, place)


def memory_info(asker: Asker, handle: Any) -> None:
    """The second version knows what the driver keeps for itself; older libraries lack it."""
    name = "nvmlDeviceGetMemoryInfo"
    version = getattr(pynvml, "nvmlMemory_v2", None)
    if version is not None and name not in asker.absent:
        asker.ask(
            "MemoryInfo",
            name,
            handle,
            version,
            convert=lambda memory: [memory.total, memory.used, memory.reserved],
        )
        if asker.values["MemoryInfo"] not in TRY_OLDER:
            return
        asker.absent.discard(name)  # what is missing is its second version
    convert = lambda memory: [memory.total, memory.used, None]  # noqa: E731
    asker.ask("MemoryInfo", name, handle, convert=convert)


def counters(
    asker: Asker, handle: Any, event_reasons: tuple[int, ...], links: int, architecture: int
) -> None:
    """All counters that field values have, in one call; the older calls for what they lack."""
    ids: list[Any] = [74, 75, 76, 77, 78, 79, 82, 169, 173, 179, 180, 197, 198, *event_reasons]
    each_link: tuple[int, ...] = ()
    if links:
        ids += [(138, ALL_LINKS), (139, ALL_LINKS)]
        if architecture >= BLACKWELL:
            each_link = (206, 207, 208, 211, 213, 214, 219, 220, 221, 222)
        else:
            each_link = (161, 162, 163)
    asker.fields(handle, ids + [(field, link) for field in each_link for link in range(links)])
    for number in range(6):
        # the fields are newer than the call, and not answered on some parts
        if asker.refused(f"field.{74 + number}"):
            asker.ask(
                f"ViolationStatus.{number}",
                "nvmlDeviceGetViolationStatus",
                handle,
                number,
                convert=lambda status: status.violationTime,
            )
    if architecture < BLACKWELL:
        for counter in range(5):
            in_fields = counter < 3 and not all(
                asker.refused(f"field.{161 + counter}.{link}") for link in range(links)
            )
            if not in_fields:
                link_counter(asker, handle, links, counter)


def link_counter(asker: Asker, handle: Any, links: int, counter: int) -> None:
    """A counter of each link, unless the first ones say that the part has none."""
    answered = False
    for link in range(links):
        key = f"NvLinkErrorCounter.{link}.{counter}"
        asker.ask(key, "nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
        answered = answered or not asker.refused(key)
        if link and not answered:
            return


def bus_id(info: Any) -> str:
    """The address in a nvmlPciInfo_t."""
    found = info.busId
    return found.decode("latin-1") if isinstance(found, bytes) else str(found)


def library_path() -> str | None:
    """The file that the loader chose."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                if "libnvidia-ml.so" in line:
                    return line.split(maxsplit=5)[5].strip()
    except OSError:
        pass
    return None


def load_binding(directory: str) -> Any:
    """Import pynvml from its own directory, without what its imports drag in.

    It imports ctypes.util for a function that it does not call on Linux; that module's own
    imports (shutil, subprocess, re) would be a third of the start.
    """
    stand_in = ModuleType("ctypes.util")

    def find_library(name: str) -> str | None:
        del sys.modules["ctypes.util"]
        import ctypes.util

        return ctypes.util.find_library(name)

    stand_in.find_library = find_library  # type: ignore[attr-defined]
    sys.modules["ctypes.util"] = stand_in
    sys.path.append(directory)
    import pynvml as binding

    return binding


def main() -> None:
    """Die with the parent, load the binding, answer requests."""
    global pynvml, _note, _OUT  # noqa: PLW0603 - imported where a failure can be told
    gc.disable()  # short-lived; collecting while the binding's thousands of names load costs 5 ms
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    _OUT = os.dup(1)
    os.dup2(2, 1)
    _note = mmap.mmap(int(sys.argv[2]), NOTE_BYTES)
    pynvml = load_binding(sys.argv[1])
    session = Session()
    for line in sys.stdin:
        words = line.split()
        if not words or words[0] == "quit":
            return
        session.serve(words)


if __name__ == "__main__":
    main()
    os._exit(0)  # without nvmlShutdown, which could hang, and without unloading
