"""Renderers: a Report in, text out. They ask nobody and judge nothing."""

from __future__ import annotations

import importlib
from typing import cast

import msgspec

from probes.result import Report

# format -> module with render(report, options) -> str
FORMATS: dict[str, str] = {
    "text": "agent.report.text",
    "json": "agent.report.json",
    "prometheus": "agent.report.prometheus",
    "nagios": "agent.report.nagios",
    "line": "agent.report.line",
}


class RenderOptions(msgspec.Struct, frozen=True):
    """How a person wants to read it; only the text format cares.

    ``width`` is the terminal's, None never wraps. ``rich`` uses the terminal renderer.
    """

    verbose: int = 0
    color: bool = False
    width: int | None = None

    @property
    def rich(self) -> bool:
        """Whether anything asks for more than plain lines."""
        return self.color or self.width is not None


PLAIN = RenderOptions()


def render(report: Report, format: str, options: RenderOptions = PLAIN) -> str:
    """The report in one of FORMATS, ending in a newline."""
    module = importlib.import_module(FORMATS[format])
    return cast(str, module.render(report, options))
