"""Regular expressions that are compiled when they are first used."""

from __future__ import annotations

import re
from functools import cached_property


class Pattern:
    """A quiet log needs none of the kernel's shapes, and compiling all of them takes 15 ms."""

    def __init__(self, text: str, flags: int = 0) -> None:
        self._text = text
        self._flags = flags

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._text, self._flags)

    def search(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.search."""
        return self._compiled.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.match."""
        return self._compiled.match(text)

    def findall(self, text: str) -> list[str]:
        """As re.Pattern.findall, for one group."""
        return self._compiled.findall(text)
