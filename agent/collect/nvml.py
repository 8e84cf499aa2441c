"""The NVML section: asks the child GPU by GPU, and goes on without one that hangs it.

Each GPU has one deadline for all its calls. When it passes, the child is abandoned, the call that
did not return is noted, and a fresh child asks the GPUs that remain, never the hung one again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec

from agent.collect.gaps import Gaps
from agent.collect.nvml_answers import (
    Answers,
    handle_of,
    identity_of,
    limits_of,
    links_of,
    memory_of,
    pci_of,
    processes_of,
    reading_of,
    with_fields,
)
from agent.host import Host
from agent.nvml_channel import NvmlChannel
from agent.parse.nvml_codes import LIBRARY_NOT_FOUND, name_of, state_of
from probes.gap import Gap, GapReason
from probes.snapshot.gpu import CallTiming, Gpu, GpuState, NvmlSection

_UTILITY = (
    "the driver's user-space library; in a container, start it with the driver capability "
    "`utility` (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)
_MIN_TURN_S = 0.2


class _HungError(Exception):
    """A request that did not return; ``state`` is what the abandoned child was in."""

    def __init__(self, call: str, waited_s: float, calls: int, state: str) -> None:
        super().__init__(call)
        self.call, self.waited_s, self.calls, self.state = call, waited_s, calls, state


class _DiedError(Exception):
    """The child ended while it was asked."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.call = call


class NvmlCollector:
    """Two readings of all GPUs within ``until_ns`` (monotonic); a context manager."""

    def __init__(self, host: Host, *, until_ns: int, call_deadline_s: float = 7.0) -> None:
        self._host = host
        self._until_ns = until_ns
        self._turn_s = call_deadline_s
        self._channel: NvmlChannel | None = None
        self._gaps = Gaps("nvml")
        self._confidential: bool | None = None

    def __enter__(self) -> NvmlCollector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # --- the two readings ---

    def first(self) -> tuple[NvmlSection | None, tuple[Gap, ...]]:
        """Everything once. None when the library is not here."""
        self._gaps = Gaps("nvml")
        section = self._init()
        if section is None or section.init_error:
            return section, self._gaps.folded()
        gpus = []
        for index in range(section.device_count or 0):
            gpu = Gpu(index=index, state=GpuState.OK, confidential_compute=self._confidential)
            gpus.append(self._read(gpu, f"gpu {index}"))
        section = msgspec.structs.replace(section, gpus=tuple(gpus))
        return section, self._gaps.folded()

    def second(self, section: NvmlSection) -> tuple[NvmlSection, tuple[Gap, ...]]:
        """One more reading of each GPU that answered the first time."""
        self._gaps = Gaps("nvml")
        gpus = [
            self._read(gpu, f"sample {gpu.index}") if gpu.state is GpuState.OK else gpu
            for gpu in section.gpus
        ]
        return msgspec.structs.replace(section, gpus=tuple(gpus)), self._gaps.folded()

    # --- one GPU ---

    def _read(self, gpu: Gpu, request: str) -> Gpu:
        if self._channel is None:
            refused = self._reopen()
            if refused:
                return self._not_asked(gpu, refused)
        # A turn that leaves time for the GPUs behind a hung one: never more than half of the rest.
        left_s = (self._until_ns - self._host.monotonic_ns()) / 1e9
        if left_s < _MIN_TURN_S:
            return self._not_asked(gpu, "no time was left within the deadline")
        turn_s = min(self._turn_s, max(left_s / 2, _MIN_TURN_S))
        try:
            for group in self._ask(request, turn_s):
                gpu = self._with_group(gpu, group)
                if gpu.state is not GpuState.OK:
                    break
        except _HungError as hung:
            return self._hung(gpu, hung)
        except _DiedError as died:
            return self._died(gpu, died)
        if gpu.state is not GpuState.OK:
            self._drain(turn_s)
        return gpu

    def _with_group(self, gpu: Gpu, group: dict[str, Any]) -> Gpu:
        values = group["values"]
        timings = tuple(
            CallTiming(call=call, duration_ms=took_ms, returned=True)
            for call, took_ms in group.get("slow", ())
        )
        name = group["group"]
        device = pci_of(values) or gpu.key if name == "handle" else gpu.key
        answers = Answers(values, self._gaps, device)
        if name == "handle":
            if isinstance(values.get("Handle"), list):
                return self._refused(gpu, values["Handle"][0])
            fields = handle_of(answers, values)
        elif name == "identity":
            fields = identity_of(answers, values)
        elif name == "limits":
            fields = {"limits": limits_of(answers)}
        elif name == "memory":
            fields = memory_of(answers)
        elif name == "links":
            fields = {"nvlinks": links_of(values, answers)}
        elif name == "processes":
            fields = {"processes": processes_of(answers)}
        else:
            return self._with_reading(gpu, group, answers, timings)
        if timings:
            fields["slow_calls"] = gpu.slow_calls + timings
        return self._unless_lost(with_fields(gpu, fields), group)

    def _with_reading(
        self, gpu: Gpu, group: dict[str, Any], answers: Answers, timings: tuple[CallTiming, ...]
    ) -> Gpu:
        values = group["values"]
        uuid = values.get("UUID")
        if isinstance(uuid, str) and gpu.uuid is not None and uuid != gpu.uuid:
            self._gaps.add(
                GapReason.MALFORMED,
                "readings",
                device=gpu.key,
                detail=f"index {gpu.index} was {gpu.uuid} at the first reading and {uuid} at the "
                "second: GPUs were renumbered",
            )
            return gpu
        reading, static = reading_of(values, answers, group["at_ns"], len(gpu.nvlinks or ()))
        if "lost" in group:  # half a reading is none
            return self._unless_lost(gpu, group)
        if gpu.readings:
            static = {}
        fields = {"readings": (*gpu.readings, reading), **static}
        if timings:
            fields["slow_calls"] = gpu.slow_calls + timings
        return with_fields(gpu, fields)

    # --- what goes wrong ---

    def _refused(self, gpu: Gpu, code: int) -> Gpu:
        return with_fields(
            gpu,
            {
                "state": state_of(code),
                "state_detail": name_of(code),
                "state_call": "nvmlDeviceGetHandleByIndex",
            },
        )

    def _unless_lost(self, gpu: Gpu, group: dict[str, Any]) -> Gpu:
        if "lost" not in group:
            return gpu
        return with_fields(
            gpu,
            {"state": GpuState.LOST, "state_detail": name_of(15), "state_call": group["lost"]},
        )

    def _hung(self, gpu: Gpu, hung: _HungError) -> Gpu:
        if hung.calls <= 1:
            said = f"did not return within {hung.waited_s:.3g} s"
        else:
            said = f"had not returned after {hung.waited_s:.3g} s and {hung.calls} calls"
        detail = f"{hung.call} {said}; the calling process was in {hung.state}"
        self._gaps.add(GapReason.TIMEOUT, device=gpu.key, detail=detail)
        timing = CallTiming(call=hung.call, duration_ms=hung.waited_s * 1e3, returned=False)
        return with_fields(
            gpu,
            {
                "state": GpuState.HUNG,
                "state_detail": detail,
                "state_call": hung.call,
                "slow_calls": (*gpu.slow_calls, timing),
            },
        )

    def _died(self, gpu: Gpu, died: _DiedError) -> Gpu:
        detail = f"the process that called NVML ended in {died.call or 'its start'}"
        self._gaps.add(GapReason.MALFORMED, device=gpu.key, detail=detail)
        return with_fields(
            gpu,
            {"state": GpuState.UNKNOWN, "state_detail": detail, "state_call": died.call or None},
        )

    def _not_asked(self, gpu: Gpu, why: str) -> Gpu:
        self._gaps.add(GapReason.TIMEOUT, device=gpu.key, detail=f"not asked: {why}")
        if gpu.readings:  # it answered once: what was read stands
            return gpu
        return with_fields(gpu, {"state": GpuState.UNKNOWN, "state_detail": f"not asked: {why}"})

    # --- the child ---

    def _init(self) -> NvmlSection | None:
        try:
            self._channel = self._host.open_nvml()
        except OSError as error:
            self._gaps.add(GapReason.ABSENT, detail=str(error))
            return None
        try:
            left_s = (self._until_ns - self._host.monotonic_ns()) / 1e9
            groups = list(self._ask("init", left_s))
        except _HungError as hung:
            detail = f"{hung.call} did not return within {hung.waited_s:.3g} s; the calling "
            detail += f"process was in {hung.state}"
            self._gaps.add(GapReason.TIMEOUT, detail=detail)
            return NvmlSection(init_error="hung", init_detail=detail, init_ms=hung.waited_s * 1e3)
        except _DiedError as died:
            detail = f"the process that calls NVML ended in {died.call or 'its start'}"
            self._gaps.add(GapReason.MALFORMED, detail=detail)
            return None
        return self._section(groups[0]["values"])

    def _section(self, values: dict[str, Any]) -> NvmlSection | None:
        init = values["Init"]
        if init == [LIBRARY_NOT_FOUND]:
            detail = "libnvidia-ml.so.1 was not found"
            self._gaps.add(GapReason.ABSENT, detail=detail, allow=_UTILITY)
            return None
        code = init[0] if isinstance(init, list) else None
        answers = Answers(values, self._gaps, "")
        cuda = values.get("CudaDriverVersion")
        section = NvmlSection(
            init_error=None if code is None else name_of(code),
            init_error_code=code,
            init_detail=None if code is None else f"nvmlInit answered {name_of(code)}",
            init_ms=values.get("init_ms"),
            library_path=values.get("library"),
            driver_version=answers.take("driver_version", "DriverVersion"),
            nvml_version=answers.take("nvml_version", "NVMLVersion"),
            cuda_driver_version=f"{cuda // 1000}.{cuda % 1000 // 10}"
            if isinstance(cuda, int)
            else None,
            device_count=answers.take("device_count", "Count"),
        )
        if code is None:
            feature = answers.take("confidential_compute", "ConfComputeState")
            self._confidential = None if feature is None else bool(feature)
        return section

    def _reopen(self) -> str:
        """Start a fresh child; empty, or why that failed."""
        try:
            self._channel = self._host.open_nvml()
            left_s = (self._until_ns - self._host.monotonic_ns()) / 1e9
            groups = list(self._ask("init", max(min(self._turn_s, left_s / 2), _MIN_TURN_S)))
        except (OSError, _HungError, _DiedError) as error:
            return f"NVML could not be started again after a GPU had hung it ({error})"
        if groups[0]["values"]["Init"] is not None:
            self.close()
            return "NVML could not be initialised again after a GPU had hung it"
        return ""

    def _ask(self, request: str, turn_s: float) -> Iterator[dict[str, Any]]:
        assert self._channel is not None  # noqa: S101 - callers open it
        started_ns = self._host.monotonic_ns()
        until_ns = min(started_ns + int(turn_s * 1e9), self._until_ns)
        call, calls = "", 0
        try:
            self._channel.send(request)
            while (line := self._channel.receive(until_ns)) != ".":
                if line.startswith(">"):
                    call, calls = line[1:], calls + 1
                else:
                    yield json.loads(line[1:])
        except TimeoutError:
            state = self._channel.abandon()
            self._channel = None
            waited_s = max(0.0, (until_ns - started_ns) / 1e9)
            raise _HungError(call or "the start of the process", waited_s, calls, state) from None
        except EOFError:
            self._channel.abandon()
            self._channel = None
            raise _DiedError(call) from None

    def _drain(self, turn_s: float) -> None:
        """Read the rest of an answer that is of no more use."""
        assert self._channel is not None  # noqa: S101 - it has just answered
        try:
            while self._channel.receive(self._host.monotonic_ns() + int(turn_s * 1e9)) != ".":
                pass
        except (TimeoutError, EOFError):
            self._channel.abandon()
            self._channel = None
