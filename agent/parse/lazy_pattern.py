"""Regular expressions that are compiled when they are first used."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property


class Pattern:
    """A quiet log needs none of the kernel's shapes, and compiling all of them takes 15 ms.

    ``words`` are plain texts of which every match has one: looking for those first is far cheaper
    than trying an expression at each character.
    """

    def __init__(self, text: str, flags: int = 0, *, words: tuple[str, ...] = ()) -> None:
        self._text = text
        self._flags = flags
        self._words = words

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._text, self._flags)

    def search(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.search."""
        if self._words and not any(word in text for word in self._words):
            return None
        return self._compiled.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        """As re.Pattern.match."""
        return self._compiled.match(text)

    def sub(self, to: str | Callable[[re.Match[str]], str], text: str) -> str:
        """As re.Pattern.sub."""
        return self._compiled.sub(to, text)

    def findall(self, text: str) -> list[str]:
        """As re.Pattern.findall, for one group."""
        return self._compiled.findall(text)
