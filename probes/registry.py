"""How a node probe is declared and found.

A probe is a pure function of a ``Node``. It says of every component that it looks at exactly one
thing: a ``Finding``, ``Clear`` (judged, nothing wrong), ``Unread`` (a required reading was not to
be had) or ``NotApplicable``. A probe that says nothing judged nothing, and never counts as passed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import overload

import msgspec

from probes.finding import Component, Finding
from probes.gap import GapReason
from probes.view import Node


class Clear(msgspec.Struct, frozen=True):
    """The component was judged and is fine; ``note`` says why a tempting alarm is wrong."""

    component: Component
    note: str | None = None


class Unread(msgspec.Struct, frozen=True):
    """A required reading is missing: the record's field names, its section, the device's key.

    The snapshot's gaps tell why; ``reason`` overrides them where the probe knows better (a rate
    that needs a second reading: ``GapReason.NOT_COLLECTED``).
    """

    source: str
    field: str
    device: str | None = None
    reason: GapReason | None = None


class NotApplicable(msgspec.Struct, frozen=True):
    """This part, mode or machine has nothing for the probe to judge."""

    why: str


Statement = Finding | Clear | Unread | NotApplicable
Statements = Iterable[Statement]
Limits = Mapping[str, float]


class Limit(msgspec.Struct, frozen=True):
    """A threshold that the configuration may change, and where its default comes from."""

    default: float
    unit: str
    source: str


class Probe(msgspec.Struct, frozen=True):
    """One rule with a stable id, ``family.kebab-name``, that its findings carry.

    ``needs`` names the snapshot sections without which it can't run; ``docstring`` is the check's.
    """

    id: str
    needs: tuple[str, ...]
    limits: Mapping[str, Limit]
    docstring: str
    check: Callable[[Node, Limits], Statements]

    @property
    def family(self) -> str:
        """The part of the id before the dot."""
        return self.id.split(".", 1)[0]

    @property
    def doc(self) -> str:
        """The explain text: what it sees, why it matters, how sure it is, what to do."""
        first, _, rest = self.docstring.partition("\n")
        return f"{first.strip()}\n{textwrap.dedent(rest)}".strip()

    @property
    def title(self) -> str:
        """The first line of the explain text."""
        return self.docstring.strip().partition("\n")[0].strip().rstrip(".")


@overload
def probe(
    id: str, *, needs: tuple[str, ...]
) -> Callable[[Callable[[Node], Statements]], Probe]: ...


@overload
def probe(
    id: str, *, needs: tuple[str, ...], limits: Mapping[str, Limit]
) -> Callable[[Callable[[Node, Limits], Statements]], Probe]: ...


def probe(
    id: str, *, needs: tuple[str, ...], limits: Mapping[str, Limit] | None = None
) -> Callable[[Callable[..., Statements]], Probe]:
    """Turn a function into a Probe value; nothing is registered anywhere.

    The docstring's first line is the title. With ``limits`` the function also takes their values.
    """

    def decorate(function: Callable[..., Statements]) -> Probe:
        docstring = function.__doc__ or ""
        if not docstring.strip():
            raise ValueError(f"probe {id} has no docstring: it is what `laggard explain` prints")
        check = function if limits is not None else _without_limits(function)
        return Probe(id=id, needs=needs, limits=limits or {}, docstring=docstring, check=check)

    return decorate


def _without_limits(
    function: Callable[[Node], Statements],
) -> Callable[[Node, Limits], Statements]:
    @functools.wraps(function)
    def check(node: Node, _limits: Limits) -> Statements:
        return function(node)

    return check


def discover(package: str = "probes.node") -> tuple[Probe, ...]:
    """Every Probe value in the package's modules, by id. Raises ValueError on a repeated id."""
    found: dict[str, Probe] = {}
    root = importlib.import_module(package)
    for info in pkgutil.iter_modules(root.__path__, prefix=f"{package}."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Probe) and found.setdefault(value.id, value) is not value:
                raise ValueError(f"two probes are called {value.id}")
    return tuple(found[id] for id in sorted(found))
