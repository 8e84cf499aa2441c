"""laggard.report/1: keys sorted, unknown values omitted, never NaN."""

from __future__ import annotations

import msgspec

from agent.report import RenderOptions
from probes.result import Report


def render(report: Report, options: RenderOptions) -> str:
    """The report as indented JSON."""
    data = msgspec.json.Encoder(order="sorted").encode(report)
    return msgspec.json.format(data, indent=2).decode() + "\n"
