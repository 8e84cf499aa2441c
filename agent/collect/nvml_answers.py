"""What the NVML child answers, by the name of the record's field. Pure.

A group is one line of ``agent.nvml_child``, for example::

    {"group":"reading","gpu":0,"at_ns":5,"values":{"PowerUsage":70000,"FanSpeed":[3]}}

where ``[3]`` is a return code. A code becomes None and a gap, never a number, and so does a value
of another shape than asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

import msgspec

from agent.collect.gaps import Gaps
from agent.parse.nvml_codes import RESET_REQUIRED, name_of, reason_of
from probes.gap import GapReason
from probes.snapshot.gpu import CallTiming

T = TypeVar("T")

PERMISSION = "run as root, or give the container the GPU's device node"
# NVML_VALUE_NOT_AVAILABLE, -1 in members of either width; also what a read off the bus gives
_NOT_AVAILABLE = ((1 << 64) - 1, (1 << 32) - 1)
_SHOWN_CHARACTERS = 40
_NOTHING = object()


class Group(msgspec.Struct, frozen=True):
    """One line of the child. ``lost`` and ``slow`` name the call before which it broke off."""

    group: str
    at_ns: int
    values: dict[str, Any]
    gpu: int | None = None
    timings: tuple[tuple[str, float], ...] = ()
    lost: str | None = None
    slow: str | None = None

    def code(self, key: str) -> int | None:
        """The return code that stands in place of a value."""
        value = self.values.get(key)
        return value[0] if is_code(value) else None

    @property
    def wants_reset(self) -> str | None:
        """The first call that answered NVML_ERROR_RESET_REQUIRED."""
        for key, value in self.values.items():
            if value == [RESET_REQUIRED]:
                name = key.partition(".")[0]
                return f"nvmlDeviceGet{'FieldValues' if name == 'field' else name}"
        return None

    @property
    def slow_calls(self) -> tuple[CallTiming, ...]:
        """The calls that took long and returned."""
        return tuple(
            CallTiming(call=call, duration_ms=took_ms, returned=True)
            for call, took_ms in self.timings
        )


class Answers:
    """The answers about one GPU (or the driver); what is missing becomes gaps of ``device``."""

    def __init__(
        self, values: Mapping[str, Any], gaps: Gaps, device: str | None, *, wsl: bool = False
    ) -> None:
        self.values = values
        self._gaps = gaps
        self._device = device
        self._wsl = wsl

    def take(self, field: str, *keys: str) -> int | None:
        """The first number among the keys' answers, else None and a gap for ``field``."""
        return self._first((field,), keys, as_number)

    def text(self, field: str, key: str) -> str | None:
        """The same for text."""
        return self._first((field,), (key,), as_text)

    def flag(self, field: str, key: str) -> bool | None:
        """The same for a truth value."""
        value = self.take(field, key)
        return None if value is None else bool(value)

    def several(self, fields: tuple[str, ...], key: str) -> tuple[int | None, ...]:
        """As many numbers as fields from one answer; a hole in it is None without a gap."""

        def convert(value: object) -> tuple[int | None, ...] | None:
            if not isinstance(value, (list, tuple)) or len(value) != len(fields):
                return None
            found = tuple(map(as_number, value))
            return None if all(number is None for number in found) else found

        return self._first(fields, (key,), convert) or (None,) * len(fields)

    def items(self, field: str, key: str) -> list[Any] | None:
        """The same for a list (never of one number: that is a return code)."""
        return self._first((field,), (key,), lambda v: v if isinstance(v, list) else None)

    def inner(self, field: str, key: str) -> Answers | None:
        """The same for a struct, whose members are then taken without gaps."""
        value = self._first((field,), (key,), lambda v: v if isinstance(v, dict) else None)
        return None if value is None else Answers(value, Gaps(""), None)

    def _first(
        self, fields: tuple[str, ...], keys: tuple[str, ...], convert: Callable[[object], T | None]
    ) -> T | None:
        code: int | None = None
        odd: object = _NOTHING
        for key in keys:
            answer = self.values.get(key, _NOTHING)
            if is_code(answer):
                code = code or answer[0]
            elif answer is not _NOTHING:
                if (value := convert(answer)) is not None:
                    return value
                odd = answer
        if code is not None:
            self.miss(code, *fields)
        elif odd is None or (isinstance(odd, int) and odd in _NOT_AVAILABLE) or odd == "":
            self._gap(GapReason.ABSENT, fields, "the driver says that it has no value")
        elif odd is not _NOTHING:
            self._gap(GapReason.MALFORMED, fields, f"{keys[0]} answered {_shown(odd)}")
        return None

    def miss(self, code: int, *fields: str) -> None:
        """Note why fields are missing."""
        self._gap(reason_of(code, wsl=self._wsl), fields, name_of(code))

    def _gap(self, reason: GapReason, fields: tuple[str, ...], detail: str) -> None:
        allow = PERMISSION if reason is GapReason.DENIED else None
        self._gaps.add(reason, *fields, device=self._device, detail=detail, allow=allow)

    def known(self, key: str) -> int | None:
        """The number, None where there is none; without a gap."""
        return as_number(self.values.get(key))

    def known_text(self, key: str) -> str | None:
        """The text, None where there is none; without a gap."""
        return as_text(self.values.get(key))

    def table(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """A record's numbers by their keys."""
        return {field: self.take(field, key) for field, key in fields.items()}


def is_code(value: object) -> TypeGuard[list[int]]:
    """Whether a return code stands in place of the value."""
    return isinstance(value, list) and len(value) == 1 and type(value[0]) is int


def as_number(value: object) -> int | None:
    """A number that fits a snapshot and stands for something."""
    if type(value) is int and -(1 << 63) <= value < 1 << 64 and value not in _NOT_AVAILABLE:
        return value
    return None


def as_text(value: object) -> str | None:
    """Text that says something."""
    return value.strip("\0 ") or None if isinstance(value, str) else None


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
