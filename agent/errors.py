"""Errors that a person is told about: what was tried, on what, what the system said, what to do."""

from __future__ import annotations


class LaggardError(Exception):
    """A failure with a clear text; the command ends with exit code 3 and no traceback.

    ``message`` says what was tried, on what, and what the system said; ``hint`` what to do.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
