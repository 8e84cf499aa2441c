"""What the stream that a report goes to can show. Conventions: no-color.org, TERM=dumb."""

from __future__ import annotations

import os
from typing import TextIO

from agent.report import RenderOptions


def options_for(stream: TextIO, *, color: str = "auto", verbose: int = 0) -> RenderOptions:
    """Options for a stream: a terminal is wrapped at its width, a pipe never.

    ``color`` is auto, always or never; auto follows NO_COLOR, FORCE_COLOR and TERM.
    """
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    if color == "auto":
        wanted = is_terminal or bool(os.environ.get("FORCE_COLOR"))
        colored = wanted and not os.environ.get("NO_COLOR")
    else:
        colored = color == "always"
    width = None
    if is_terminal:
        import shutil

        width = shutil.get_terminal_size().columns
    return RenderOptions(verbose=verbose, color=colored, width=width)
