"""The parent's side of ``agent.nvml_child``: a process that can be abandoned."""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

_END_WAIT_S = 0.5
_CHILD = Path(__file__).with_name("nvml_child.py")


class NvmlChannel(Protocol):
    """Lines to and from the process that talks to NVML."""

    def send(self, line: str) -> None:
        """Ask. Raises EOFError when the process is gone."""

    def receive(self, until_ns: int) -> str:
        """The next line. Raises TimeoutError at ``until_ns`` (monotonic), EOFError at its end."""

    def abandon(self) -> str:
        """Kill the process without waiting for it, and say what state it was in."""

    def close(self) -> None:
        """Let it end; kill it when it does not."""


class LiveNvmlChannel:
    """A child of this process. Raises FileNotFoundError when nvidia-ml-py is not installed."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("pynvml")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("the module pynvml is not installed (pip install nvidia-ml-py)")
        # -I -S: neither PYTHONPATH nor site hooks reach it, only the binding's own directory
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), str(Path(spec.origin).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout  # noqa: S101 - as asked for above
        self._asks, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._buffer = b""

    def send(self, line: str) -> None:
        """See NvmlChannel."""
        try:
            os.write(self._asks.fileno(), line.encode() + b"\n")
        except BrokenPipeError:
            raise EOFError from None

    def receive(self, until_ns: int) -> str:
        """See NvmlChannel."""
        while b"\n" not in self._buffer:
            left_s = (until_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise TimeoutError
            part = os.read(self._answers.fileno(), 1 << 16)
            if not part:
                raise EOFError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def abandon(self) -> str:
        """See NvmlChannel."""
        state = _state_of(self._process.pid)
        self._process.kill()
        self._end()
        return state

    def close(self) -> None:
        """See NvmlChannel."""
        self._asks.close()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._end()

    def _end(self) -> None:
        """Reap it if it ends soon; an unkillable one is left behind."""
        for pipe in (self._asks, self._answers):
            pipe.close()
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = -9  # keeps the Popen object from complaining or waiting


def _state_of(pid: int) -> str:
    """State letter and kernel function of a process, as /proc shows them."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "state unknown"
    try:
        wchan = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n ")
    except OSError:
        wchan = ""
    return f"state {letter}" + (f" in {wchan}" if wchan not in ("", "0") else "")


class ReplayedNvmlChannel:
    """Answers as a recorded one did: ``> request``, then its lines behind ``< ``; ``!`` hung."""

    def __init__(self, text: str) -> None:
        self._exchanges: dict[str, list[list[str]]] = {}
        for line in text.splitlines():
            if line.startswith("> "):
                answers: list[str] = []
                self._exchanges.setdefault(line[2:], []).append(answers)
            elif self._exchanges:
                answers.append(line)
        self._lines: list[str] = []

    def send(self, line: str) -> None:
        """See NvmlChannel."""
        recorded = self._exchanges.get(line)
        if not recorded:
            raise EOFError
        self._lines = list(recorded.pop(0) if len(recorded) > 1 else recorded[0])

    def receive(self, until_ns: int) -> str:
        """See NvmlChannel."""
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if line.startswith("!"):
            self._lines = [line]
            raise TimeoutError
        return line[2:]

    def abandon(self) -> str:
        """See NvmlChannel."""
        return self._lines[0][1:].strip() if self._lines else "state unknown"

    def close(self) -> None:
        """See NvmlChannel."""
