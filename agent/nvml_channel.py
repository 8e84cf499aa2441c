"""The parent's side of ``agent.nvml_child``: a process that can be abandoned."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
import time
from typing import Protocol

import msgspec

_END_WAIT_S = 0.5
_NOTE_BYTES = 128
_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_child.py")


class Abandoned(msgspec.Struct, frozen=True, kw_only=True):
    """What the process was doing when it was given up."""

    call: str = ""  # the last NVML call that it began
    waited_s: float = 0.0  # since that call began
    state: str = "state unknown"  # of the process, or how it ended


class NvmlChannel(Protocol):
    """Lines to and from the process that talks to NVML."""

    def send(self, line: str) -> None:
        """Ask. Raises EOFError when the process is gone."""

    def receive(self, until_ns: int) -> str:
        """The next line. Raises TimeoutError at ``until_ns`` (monotonic), EOFError at its end."""

    def abandon(self) -> Abandoned:
        """Kill the process without waiting for it, and say what it was doing."""

    def close(self) -> None:
        """Let it end; kill it when it does not."""


def binding_folder() -> str | None:
    """Where pynvml is installed: beside this package or msgspec, before what sys.path says.

    PYTHONPATH and the current folder may hold a pynvml.py that is not NVIDIA's.
    """
    for module_file in (os.path.abspath(__file__), msgspec.__file__):
        folder = os.path.dirname(os.path.dirname(module_file or ""))
        if os.path.isfile(os.path.join(folder, "pynvml.py")):
            return folder
    spec = importlib.util.find_spec("pynvml")
    return os.path.dirname(spec.origin) if spec and spec.origin else None


class LiveNvmlChannel:
    """A child of this process. Raises FileNotFoundError when nvidia-ml-py is not installed."""

    def __init__(self) -> None:
        folder = binding_folder()
        if folder is None:
            raise FileNotFoundError("the module pynvml is not installed (pip install nvidia-ml-py)")
        self._note = _shared_note()
        # -I -S: neither PYTHONPATH nor site hooks reach it, only the binding's own directory
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _CHILD, folder, str(self._note)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._note,),
        )
        assert self._process.stdin and self._process.stdout  # noqa: S101 - as asked for above
        self._asks, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._buffer = b""
        self._ended = False

    def send(self, line: str) -> None:
        """See NvmlChannel."""
        try:
            os.write(self._asks.fileno(), line.encode() + b"\n")
        except BrokenPipeError:
            self._ended = True
            raise EOFError from None

    def receive(self, until_ns: int) -> str:
        """See NvmlChannel."""
        while b"\n" not in self._buffer:
            left_s = (until_ns - time.monotonic_ns()) / 1e9
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise TimeoutError
            part = os.read(self._answers.fileno(), 1 << 16)
            if not part:
                self._ended = True
                raise EOFError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    def abandon(self) -> Abandoned:
        """See NvmlChannel."""
        began_ns, _, call = os.pread(self._note, _NOTE_BYTES, 0).strip(b"\0 ").partition(b" ")
        waited_s = (time.monotonic_ns() - int(began_ns)) / 1e9 if call else 0.0
        state = "" if self._ended else _state_of(self._process.pid)
        if not self._ended:
            self._process.kill()
        self._end()
        state = state or _ending_of(self._process.returncode)
        return Abandoned(call=call.decode(), waited_s=round(waited_s, 3), state=state)

    def close(self) -> None:
        """See NvmlChannel."""
        with contextlib.suppress(EOFError):
            self.send("quit")  # the end of its input alone would not do: a fork may hold it open
        self._end()

    def _end(self) -> None:
        """Reap it if it ends soon; an unkillable one is left behind."""
        for pipe in (self._asks, self._answers):
            pipe.close()
        os.close(self._note)
        try:
            self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.returncode = -9  # keeps the Popen object from complaining or waiting


def _shared_note() -> int:
    """A page that the child writes the call into that it begins, for a memory write a call."""
    if hasattr(os, "memfd_create"):
        note = os.memfd_create("laggard-nvml")
    else:  # a Python that was built for an older C library
        import tempfile

        with tempfile.TemporaryFile() as file:
            note = os.dup(file.fileno())
    os.ftruncate(note, _NOTE_BYTES)
    return note


def _ending_of(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _state_of(pid: int) -> str:
    """State letter and kernel function of a process, as /proc shows them."""
    try:
        letter = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "state unknown"
    try:
        wchan = _read(f"/proc/{pid}/wchan").strip("\0\n ")
    except OSError:
        wchan = ""
    return f"state {letter}" + (f" in {wchan}" if wchan not in ("", "0") else "")


class ReplayedNvmlChannel:
    """Answers as recorded.

    The text has, for each process that was started, a line ``@``, then ``> request`` and its
    ``< lines``; ``! {...}`` (see Abandoned) where it hung, ``x {...}`` where it ended. ``process``
    counts from 0. The last word of a request is the time it may take, and may differ::

        @
        > init 2
        < ={"group":"init","gpu":null,"at_ns":5,"values":{"Init":[9]}}
        < .
    """

    def __init__(self, text: str, process: int = 0) -> None:
        recorded = ("\n" + text).split("\n@")
        chosen = recorded[1:][process : process + 1] or recorded[-1:]
        self._exchanges: dict[str, list[list[str]]] = {}
        answers: list[str] = []
        for line in chosen[0].splitlines():
            if line.startswith("> "):
                answers = []
                self._exchanges.setdefault(_key(line[2:]), []).append(answers)
            else:
                answers.append(line)
        self._lines: list[str] = []

    def send(self, line: str) -> None:
        """See NvmlChannel."""
        recorded = self._exchanges.get(_key(line))
        if not recorded:
            raise EOFError
        self._lines = list(recorded.pop(0) if len(recorded) > 1 else recorded[0])

    def receive(self, until_ns: int) -> str:
        """See NvmlChannel."""
        line = self._lines[0] if self._lines else "x"
        if line.startswith("!"):
            raise TimeoutError
        if line.startswith("x"):
            raise EOFError
        del self._lines[0]
        return line[2:]

    def abandon(self) -> Abandoned:
        """See NvmlChannel."""
        try:
            return msgspec.json.decode(self._lines[0][1:], type=Abandoned)
        except (IndexError, msgspec.MsgspecError):
            return Abandoned()

    def close(self) -> None:
        """See NvmlChannel."""


def _key(request: str) -> str:
    return request.rpartition(" ")[0]
