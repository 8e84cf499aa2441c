"""Medians. The standard library's `statistics` costs more to import than all its uses here."""

from __future__ import annotations

from collections.abc import Iterable


def median(values: Iterable[float]) -> float:
    """The middle value, the mean of both for an even count. Raises ValueError on none."""
    return (median_low(kept := list(values)) + median_high(kept)) / 2


def median_low(values: Iterable[float]) -> float:
    """The middle value, the lower of both for an even count. Raises ValueError on none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[(len(ordered) - 1) // 2]


def median_high(values: Iterable[float]) -> float:
    """The middle value, the higher of both for an even count. Raises ValueError on none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[len(ordered) // 2]
