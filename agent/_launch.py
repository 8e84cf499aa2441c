"""Shipped as the top-level module ``laggard``: pins this installation's directory, then runs.

A folder called ``agent`` on PYTHONPATH or in the current directory would otherwise be imported
instead of ours. Only what is already on the path is reordered, so a torch that a site hands over by
PYTHONPATH stays reachable, behind us.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


def _pin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    if os.path.isfile(os.path.join(here, "_launch.py")):  # run from a source tree: agent/_launch.py
        here = os.path.dirname(here)
    if os.path.isdir(os.path.join(here, "agent")):
        sys.path[:] = [here, *(entry for entry in sys.path if entry != here)]


def _flush(stream: TextIO | None) -> bool:
    """Whether all that was written has got out; no stream is one that our caller closed."""
    try:
        if stream is not None:
            stream.flush()
    except OSError:
        return False
    return True


def main() -> None:
    """Run the command line and exit with its code."""
    # A run is short and its modules all live to its end: collecting costs, and so does unloading.
    gc.disable()
    _pin()
    from agent.cli import run

    code = run(sys.argv[1:])
    # both, whatever becomes of the first
    flushed = [_flush(stream) for stream in (sys.stdout, sys.stderr)]
    if not all(flushed):
        code = code or 3
    os._exit(code)


if __name__ == "__main__":
    main()
