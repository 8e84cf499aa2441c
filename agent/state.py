"""The directory in which laggard keeps what it knows from run to run."""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from agent.errors import LaggardError
from agent.snapshot_file import write_output

T = TypeVar("T")


def state_directory() -> str:
    """STATE_DIRECTORY (systemd sets it), else XDG_STATE_HOME when set, else by user.

    A directory of the user's may be shared by many nodes (a home on NFS), and what one node's last
    run saw says nothing of another: there each node has a folder of its own.
    """
    if given := _absolute(os.environ.get("STATE_DIRECTORY", "").split(":")[0]):
        return given
    if given := _absolute(os.environ.get("XDG_STATE_HOME", "")):
        return os.path.join(given, "laggard", os.uname().nodename)
    if os.geteuid() == 0:
        return "/var/lib/laggard"
    home = _absolute(os.path.expanduser("~")) or "/nonexistent"
    return os.path.join(home, ".local/state/laggard", os.uname().nodename)


def _absolute(text: str) -> str | None:
    """The XDG specification: a path that is not absolute is to be ignored."""
    return text if text.startswith("/") else None


class State:
    """Files of one directory. A state that can't be used is a problem to tell, never a failure.

    ``directory`` None keeps nothing.
    """

    def __init__(self, directory: str | None) -> None:
        self.directory = directory
        self.problems: list[str] = []

    def forget(self, why: str) -> None:
        """Go on without a directory."""
        self.problems.append(f"{why}; nothing is kept from run to run (--no-state: not tried)")
        self.directory = None

    def read(self, name: str, type: type[T]) -> T | None:
        """What was kept under a name; None when nothing usable was."""
        if self.directory is None:
            return None
        path = os.path.join(self.directory, name)
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(), type=type)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror}; this run does without it")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.problems.append(f"{path}: {error}; this run does without it")
        return None

    def write(self, name: str, value: object) -> bool:
        """Keep a value, whole or not at all; False when that is not possible."""
        if self.directory is None:
            return False
        try:
            os.makedirs(self.directory, exist_ok=True)
            data = msgspec.json.Encoder(order="sorted").encode(value)
            write_output(
                os.path.join(self.directory, name), msgspec.json.format(data, indent=1) + b"\n"
            )
        except (OSError, LaggardError) as error:
            said = (
                error.message
                if isinstance(error, LaggardError)
                else f"{error.filename}: {error.strerror}"
            )
            self.forget(said)
            return False
        return True
