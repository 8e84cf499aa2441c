"""The NVML section: asks the child GPU by GPU, and goes on without one that hangs it.

Each GPU has its turn. When a call does not return within it, the child is abandoned, the call is
noted, and a fresh child asks the GPUs that remain, never the hung one again. A GPU whose calls
return, but slowly, keeps what it has answered when its turn is over.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import msgspec

from agent.collect.gaps import Gaps
from agent.collect.nvml_answers import PERMISSION, Answers, Group
from agent.collect.nvml_records import gpu_fields, reading_of, section_of
from agent.host import Host
from agent.nvml_channel import NvmlChannel
from agent.parse.nvml_codes import (
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    RESET_REQUIRED,
    name_of,
    on_wsl,
    reason_of,
    state_of,
)
from probes.gap import Gap, GapReason
from probes.snapshot.gpu import CallTiming, Gpu, GpuState, NvmlSection

_UTILITY = (
    "install the driver's user-space libraries; start a container with the driver capability "
    "`utility` (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
)
_MIN_TURN_S = 0.2
_INIT_TURNS = 2  # nvmlInit loads the driver where nothing keeps it loaded
# Of a turn: when a GPU whose calls do return is asked no more. A call that is still out at the end
# of the turn has then been out for the other half at least.
_SLOW_SHARE = 0.5


class _HungError(Exception):
    """A call that did not return; ``state`` is what the abandoned child was in."""

    def __init__(self, call: str, waited_s: float, state: str) -> None:
        super().__init__(call)
        self.call, self.waited_s, self.state = call, waited_s, state

    def __str__(self) -> str:
        return (
            f"{self.call} did not return within {round(self.waited_s, 1):g} s; the calling process "
            f"was in {self.state}"
        )


class _DiedError(Exception):
    """The child ended, or answered nonsense, while it was asked."""

    def __init__(self, call: str, how: str) -> None:
        super().__init__(call)
        self.call, self.how = call, how

    def __str__(self) -> str:
        where = f" in {self.call}" if self.call else ""
        return f"the process that calls NVML failed{where}: {self.how}"


class NvmlCollector:
    """Two readings of all GPUs within ``until_ns`` (monotonic); a context manager."""

    def __init__(self, host: Host, *, until_ns: int, call_deadline_s: float = 7.0) -> None:
        self._host = host
        self._until_ns = until_ns
        self._turn_s = call_deadline_s
        self._channel: NvmlChannel | None = None
        self._refused = ""  # why no further child is started
        self._confidential: bool | None = None
        self._wsl = False
        self._gaps = Gaps("nvml")

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
        if section is not None and section.init_error is None:
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
            self._read(gpu, f"sample {gpu.index} {len(gpu.nvlinks or ())} {gpu.architecture or 0}")
            if gpu.state is GpuState.OK and gpu.readings
            else gpu
            for gpu in section.gpus
        ]
        return msgspec.structs.replace(section, gpus=tuple(gpus)), self._gaps.folded()

    # --- one GPU ---

    def _read(self, gpu: Gpu, request: str) -> Gpu:
        left_s = self._left_s()
        if left_s < _MIN_TURN_S:
            return self._not_asked(gpu, "no time was left within the deadline")
        if self._channel is None:
            self._reopen()
        if self._channel is None:
            return self._not_asked(gpu, self._refused)
        try:
            # A turn that leaves time for the GPUs behind a hung one
            groups = self._ask(request, min(self._turn_s, max(self._left_s() / 2, _MIN_TURN_S)))
        except (_HungError, _DiedError) as error:
            for group in self._answered:
                gpu = self._with_group(gpu, group)
            return (
                self._hung(gpu, error) if isinstance(error, _HungError) else self._died(gpu, error)
            )
        for group in groups:
            gpu = self._with_group(gpu, group)
        return gpu

    def _with_group(self, gpu: Gpu, group: Group) -> Gpu:
        if group.group == "handle" and isinstance(code := group.code("Handle"), int):
            return self._without_handle(gpu, code)
        # what a lost GPU did not answer is missing for that one reason
        gaps = self._gaps if group.lost is None else Gaps("nvml")
        fields: dict[str, Any]
        if group.group == "reading":
            fields = self._reading(gpu, group)
        else:
            fields = gpu_fields(gpu, group, gaps, wsl=self._wsl)
        fields["slow_calls"] = gpu.slow_calls + group.slow_calls
        gpu = msgspec.structs.replace(gpu, **fields)
        if group.lost is not None:
            gpu = self._failed(gpu, group.lost, GPU_IS_LOST)
        elif gpu.state is GpuState.OK and (call := group.wants_reset) is not None:
            gpu = self._failed(gpu, call, RESET_REQUIRED)
        if group.slow is not None:
            self._gaps.add(
                GapReason.TIMEOUT,
                device=gpu.key,
                detail=f"answers so slowly that its turn was over before {group.slow}",
            )
        return gpu

    def _reading(self, gpu: Gpu, group: Group) -> dict[str, Any]:
        uuid = group.values.get("UUID")
        if isinstance(uuid, str) and gpu.uuid is not None and uuid != gpu.uuid:
            self._gaps.add(
                GapReason.MALFORMED,
                "readings",
                device=gpu.key,
                detail=f"index {gpu.index} was {gpu.uuid} at the first reading and {uuid} at the "
                "second: the GPUs were renumbered",
            )
            return {}
        if group.lost is not None:  # half a reading is none
            return {}
        answers = Answers(group.values, self._gaps, gpu.key, wsl=self._wsl)
        reading, fields = reading_of(answers, group, len(gpu.nvlinks or ()))
        return (fields if not gpu.readings else {}) | {"readings": (*gpu.readings, reading)}

    # --- what goes wrong ---

    def _without_handle(self, gpu: Gpu, code: int) -> Gpu:
        if gpu.readings and state_of(code) is GpuState.UNKNOWN:
            detail = f"no second reading: nvmlDeviceGetHandleByIndex answered {name_of(code)}"
            self._gaps.add(GapReason.MALFORMED, "readings", device=gpu.key, detail=detail)
            return gpu
        return self._failed(gpu, "nvmlDeviceGetHandleByIndex", code)

    def _failed(self, gpu: Gpu, call: str, code: int) -> Gpu:
        """What a code says of the whole GPU; one gap stands for all that is missing of it."""
        reason = reason_of(code)
        allow = PERMISSION if reason is GapReason.DENIED else None
        detail = f"{call} answered {name_of(code)}"
        self._gaps.add(reason, device=gpu.key, detail=detail, allow=allow)
        return msgspec.structs.replace(
            gpu, state=state_of(code), state_detail=name_of(code), state_call=call
        )

    def _hung(self, gpu: Gpu, hung: _HungError) -> Gpu:
        self._gaps.add(GapReason.TIMEOUT, device=gpu.key, detail=str(hung))
        timing = CallTiming(call=hung.call, duration_ms=hung.waited_s * 1e3, returned=False)
        return msgspec.structs.replace(
            gpu,
            state=GpuState.HUNG,
            state_detail=str(hung),
            state_call=hung.call,
            slow_calls=(*gpu.slow_calls, timing),
        )

    def _died(self, gpu: Gpu, died: _DiedError) -> Gpu:
        self._gaps.add(GapReason.MALFORMED, device=gpu.key, detail=str(died))
        return msgspec.structs.replace(
            gpu,
            state=GpuState.UNKNOWN,
            state_detail=str(died),
            state_call=died.call or None,
        )

    def _not_asked(self, gpu: Gpu, why: str) -> Gpu:
        detail = f"not asked: {why}"
        if gpu.readings:  # it answered once: what was read stands
            self._gaps.add(GapReason.TIMEOUT, "readings", device=gpu.key, detail=detail)
            return gpu
        self._gaps.add(GapReason.TIMEOUT, device=gpu.key, detail=detail)
        return msgspec.structs.replace(gpu, state=GpuState.UNKNOWN, state_detail=detail)

    # --- the child ---

    def _init(self) -> NvmlSection | None:
        try:
            group = self._open(min(self._left_s(), _INIT_TURNS * self._turn_s))
        except FileNotFoundError as error:
            self._gaps.add(GapReason.ABSENT, detail=str(error))
            return None
        except OSError as error:  # no process is to be had: nobody knows what the driver would say
            self._gaps.add_error(error, path="starting the process that asks the driver")
            return None
        except _HungError as hung:
            self._gaps.add(GapReason.TIMEOUT, detail=str(hung))
            return NvmlSection(
                init_error="hung", init_detail=str(hung), init_ms=hung.waited_s * 1e3
            )
        except _DiedError as died:
            self._gaps.add(GapReason.MALFORMED, detail=str(died))
            return None
        if group.code("Init") == LIBRARY_NOT_FOUND:
            self._gaps.add(
                GapReason.ABSENT, detail="libnvidia-ml.so.1 was not found", allow=_UTILITY
            )
            return None
        section, self._confidential = section_of(group, self._gaps)
        self._wsl = on_wsl(section.library_path)
        return section

    def _reopen(self) -> None:
        """Start a fresh child after one was abandoned; never again once that has failed."""
        if self._refused:
            return
        try:
            group = self._open(min(self._turn_s, max(self._left_s() / 2, _MIN_TURN_S)))
        except (OSError, _HungError, _DiedError) as error:
            self._refused = f"NVML did not start again behind a GPU that hung it: {error}"
            return
        if (code := group.code("Init")) is not None:
            self._refused = f"NVML did not start again behind a GPU that hung it: {name_of(code)}"
            self.close()

    def _open(self, turn_s: float) -> Group:
        self._channel = self._host.open_nvml()
        for group in self._ask("init", turn_s):
            return group
        self.close()
        raise _DiedError("nvmlInit", "it gave no answer")

    def _left_s(self) -> float:
        return (self._until_ns - self._host.monotonic_ns()) / 1e9

    def _ask(self, request: str, turn_s: float) -> list[Group]:
        """All groups of an answer; when it breaks off, ``_answered`` has those that came."""
        channel = self._channel
        assert channel is not None  # noqa: S101 - callers open it
        until_ns = min(self._host.monotonic_ns() + int(turn_s * 1e9), self._until_ns)
        self._answered: list[Group] = []
        try:
            channel.send(f"{request} {turn_s * _SLOW_SHARE:.3g}")
            while (line := channel.receive(until_ns)) != ".":
                self._answered.append(msgspec.json.decode(line[1:], type=Group))
        except TimeoutError:
            self._channel = None
            left = channel.abandon()
            waited_s = left.waited_s or turn_s
            raise _HungError(
                left.call or "the start of the process", waited_s, left.state
            ) from None
        except EOFError:
            self._channel = None
            left = channel.abandon()
            raise _DiedError(left.call, left.state) from None
        except msgspec.MsgspecError as error:
            self.close()
            raise _DiedError("", f"its answer cannot be read: {error}") from None
        return self._answered
