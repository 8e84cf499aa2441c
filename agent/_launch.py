"""Shipped as the top-level module ``laggard``: pins this installation's directory, then runs.

A folder called ``agent`` on PYTHONPATH or in the current directory would otherwise be imported
instead of ours. Only what is already on the path is reordered, so a torch that a site hands over by
PYTHONPATH stays reachable, behind us.
"""

from __future__ import annotations

import os
import sys


def _pin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    if os.path.isfile(os.path.join(here, "_launch.py")):  # run from a source tree: agent/_launch.py
        here = os.path.dirname(here)
    if os.path.isdir(os.path.join(here, "agent")):
        sys.path[:] = [here, *(entry for entry in sys.path if entry != here)]


def main() -> None:
    """Run the command line and exit with its code."""
    _pin()
    from agent.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
