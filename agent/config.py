"""Configuration: TOML files in order of precedence, and where each value came from.

::

    [check]                              # any option of `laggard check`, by its long name
    deadline = 30
    skip = ["host.cpu-governor"]

    [probes."pcie.replay-growth"]        # by finding id
    severity = "info"
    limits.rate = 10

Files, the later one wins: /etc/laggard/config.toml, the user's, ``$LAGGARD_CONFIG`` (or --config).
Then come LAGGARD_CHECK_* of the environment, then flags. Nothing is ever read from the current
directory: root's cron may stand in anybody's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from agent.errors import LaggardError
from probes.finding import Severity

if TYPE_CHECKING:
    from probes.registry import Probe

SITE_CONFIG = "/etc/laggard/config.toml"


class Setting(msgspec.Struct, frozen=True):
    """A value and the place that set it (``FILE: KEY``)."""

    value: Any
    origin: str


class Config(msgspec.Struct):
    """What all files together say; ``problems`` are files that had to be left out."""

    check: dict[str, Setting] = msgspec.field(default_factory=dict)
    severities: dict[str, Setting] = msgspec.field(default_factory=dict)
    limits: dict[str, dict[str, Setting]] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)


def read_toml(path: str) -> dict[str, Any]:
    """Read a TOML file. Raises LaggardError that names it."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with open(path, encoding="utf-8") as file:
            data: dict[str, Any] = tomllib.loads(file.read())
    except OSError as error:
        raise LaggardError(f"reading {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # bad TOML or bad UTF-8
        raise LaggardError(f"{path} is no TOML: {error}") from None
    return data


def toml_value(value: Any) -> str:
    """A string, number, truth value or list as TOML writes it: as JSON does, but for DEL."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")


def load_config(explicit: str | None, options: Collection[str]) -> Config:
    """Read all files. ``options`` are the names that [check] may have.

    Raises LaggardError with file and key for what is not known, and for an ``explicit`` file that
    can't be read; a file of the usual places that can't be read is left out, and said.
    """
    config = Config()
    for path in _usual_files():
        reason = _unusable(path)
        if reason is None:
            _merge(config, path, read_toml(path), options)
        elif reason:
            config.problems.append(f"{path}: {reason}; it is left out")
    if explicit:
        _merge(config, explicit, read_toml(explicit), options)
    return config


def _usual_files() -> Iterator[str]:
    yield SITE_CONFIG
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):  # the XDG specification: ignore a relative one
        base = os.path.join(os.path.expanduser("~"), ".config")
    if base.startswith("/"):
        yield os.path.join(base, "laggard/config.toml")


def _unusable(path: str) -> str | None:
    """None for a file to read, empty for one that is not there, else why it is left out."""
    try:
        with open(path, "rb") as file:
            owner = os.fstat(file.fileno()).st_uid
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return error.strerror or str(error)
    if owner not in (0, os.geteuid()):
        return f"it belongs to user id {owner}, who could set what this run does"
    return None


def _merge(config: Config, path: str, data: dict[str, Any], options: Collection[str]) -> None:
    for key, value in data.items():
        if key == "check":
            for name, option in _table(value, path, "check").items():
                _known(name, options, path, f"check.{name}", "option of `laggard check`")
                config.check[name] = Setting(option, f"{path}: check.{name}")
        elif key == "probes":
            for id, rule in _table(value, path, "probes").items():
                _merge_rule(config, path, id, _table(rule, path, f'probes."{id}"'))
        else:
            _known(key, ("check", "probes"), path, key, "section")


def _merge_rule(config: Config, path: str, id: str, rule: dict[str, Any]) -> None:
    place = f'probes."{id}"'
    for key, value in rule.items():
        where = f"{place}.{key}"
        if key == "severity":
            if value not in [severity.value for severity in Severity]:
                raise LaggardError(
                    f"{path}: {where} = {value!r}: not a severity", "info, warning or critical"
                )
            config.severities[id] = Setting(Severity(value), f"{path}: {where}")
        elif key == "limits":
            for name, limit in _table(value, path, where).items():
                if isinstance(limit, bool) or not isinstance(limit, (int, float)):
                    raise LaggardError(f"{path}: {where}.{name} = {limit!r}: not a number")
                setting = Setting(float(limit), f"{path}: {where}.{name}")
                config.limits.setdefault(id, {})[name] = setting
        else:
            _known(key, ("severity", "limits"), path, where, "setting of a finding")


def _table(value: Any, path: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise LaggardError(f"{path}: {where} is to be a table, not {value!r}")
    return value


def _known(name: str, known: Collection[str], path: str, where: str, what: str) -> None:
    if name not in known:
        raise LaggardError(f"{path}: {where}: no such {what}", nearest(name, known))


def nearest(name: str, known: Collection[str], most: int = 1) -> str:
    """A hint for a name that is not known."""
    import difflib

    def likeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, name, other).ratio()
        start = difflib.SequenceMatcher(None, name, other[: len(name)]).ratio()
        return max(whole, 0.9 * start)  # what was not typed to its end is meant as well

    near = sorted((other for other in known if likeness(other) >= 0.5), key=likeness, reverse=True)
    if near:
        return f"did you mean {', '.join(near[:most])}?"
    return f"known: {', '.join(sorted(known))}" if len(known) <= 20 else ""


def check_ids(config: Config, probes: Mapping[str, Probe]) -> None:
    """Refuse ids and thresholds that no probe has. Raises LaggardError with file and key."""
    for id, severity in config.severities.items():
        _known_origin(id, probes, severity.origin, "finding")
    for id, limits in config.limits.items():
        for name, limit in limits.items():
            _known_origin(id, probes, limit.origin, "finding")
            _known_origin(name, probes[id].limits, limit.origin, f"threshold of {id}")


def _known_origin(name: str, known: Collection[str], origin: str, what: str) -> None:
    if name not in known:
        raise LaggardError(f"{origin}: there is no {what} called {name!r}", nearest(name, known))
