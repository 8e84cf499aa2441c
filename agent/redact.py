"""Makes a snapshot fit to leave the site: consistent pseudonyms for names of places and people.

Host names, user names, IP and MAC addresses, serial numbers, GPU UUIDs and process names become
stable pseudonyms (the same value gives the same name inside one file, nothing can be looked up from
outside: the key is drawn at random for each run). PCI addresses, device names and numbers stay:
they are what the file is sent for.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Any

import msgspec

from probes.snapshot.node import NodeSnapshot

_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_IPV6 = re.compile(
    r"(?<![\w:])(?=[0-9a-fA-F:]*::|(?:[0-9a-fA-F]{1,4}:){7})(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])"
)
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![\w:])")
_UUID = re.compile(
    r"\b((?:GPU-|MIG-|GPU\.)?)[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
)
_USER_PATH = re.compile(
    r"(/(?:home|[Uu]sers?|u|export/home|scratch|data|work|projects?|nfs)/)([^/\s\"']+)"
)
# Where packages put a library; any other folder is somebody's.
_SYSTEM_FOLDERS = ("/usr/", "/lib", "/opt/nvidia", "/run/nvidia")
_SERIAL_TEXT = re.compile(
    r"((?:serial(?: number)?|s/n)\s*[:=]?\s*)([A-Za-z0-9-]{6,})", re.IGNORECASE
)
_NAME_TEXT = re.compile(r"\b((?:name|comm|task)[= ]'?)([^\s,':()]+)")
# The kernel's lines: who was killed, who crashed, which server is silent.
_KERNEL_NAMES = (
    (re.compile(r"(Killed process \d+,? \()([^)]+)"), "process"),
    (re.compile(r"(stuck for \d+s! \[)([^\]]+?)(?=:\d+\])"), "process"),
    (re.compile(r"(^(?:traps: )?)(\S.*?)(?=\[\d+\]:? (?:segfault|general protection))"), "process"),
    (re.compile(r"((?:oom_memcg|task_memcg|cpuset)=)([^,]+)"), "cgroup"),
    (re.compile(r"(nfs: server )(\S+)"), "host"),
)
_LONG_DIGITS = re.compile(r"(?<![\w.])\d{12,}(?![\w.])")

# Fields that hold a name as a whole.
_FIELDS: dict[str, str] = {
    "host": "host",
    "hostname": "host",
    "boot_id": "boot",
    "server": "host",
    "serial": "serial",
    "comm": "process",
    "process": "process",
    "user": "user",
    "container": "container",
    "cgroup": "cgroup",
    "cgroup_path": "cgroup",
    "cluster_uuid": "cluster",
}
_KEPT_CONTAINERS = frozenset(("docker", "podman", "lxc", "kubernetes", "containerd"))


class Redactor:
    """Pseudonyms that are stable within one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._hosts: list[str] = []

    def alias(self, kind: str, value: str) -> str:
        """``host-3fa2c1d0`` for a value of a kind."""
        digest = hmac.new(self._key, f"{kind}\0{value}".encode(), hashlib.sha256).hexdigest()
        return f"{kind}-{digest[:8]}"

    def snapshot(self, snapshot: NodeSnapshot) -> NodeSnapshot:
        """The same snapshot under pseudonyms."""
        names = {snapshot.host, snapshot.host.split(".")[0]}
        self._hosts = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return msgspec.convert(self._walk(msgspec.to_builtins(snapshot), ""), NodeSnapshot)

    def _walk(self, value: Any, field: str) -> Any:
        if isinstance(value, dict):
            return {key: self._walk(item, key) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item, field) for item in value]
        if not isinstance(value, str) or not value:
            return value
        if field == "library_path" and not value.startswith(_SYSTEM_FOLDERS):
            folder, _, name = value.rpartition("/")
            return f"/{self.alias('folder', folder)}/{name}"
        if field in _FIELDS and value not in _KEPT_CONTAINERS:
            return self.alias(_FIELDS[field], value)
        return self.text(value)

    def text(self, text: str) -> str:
        """Free text with names, addresses and numbers of persons and machines replaced."""
        for name in self._hosts:
            text = re.sub(
                rf"(?<![\w-]){re.escape(name)}(?![\w-])", self.alias("host", self._hosts[0]), text
            )
        text = _UUID.sub(lambda m: m[1] + self._uuid(m[0]), text)
        text = _USER_PATH.sub(lambda m: m[1] + self.alias("user", m[2]), text)
        text = _SERIAL_TEXT.sub(lambda m: m[1] + self.alias("serial", m[2]), text)
        text = _NAME_TEXT.sub(self._process, text)
        for pattern, kind in _KERNEL_NAMES:
            text = pattern.sub(self._named(kind), text)
        text = _LONG_DIGITS.sub(lambda m: self.alias("serial", m[0]), text)
        for pattern, kind in ((_MAC, "mac"), (_IPV4, "ip"), (_IPV6, "ip")):
            text = pattern.sub(self._replace(kind), text)
        return text

    def _replace(self, kind: str) -> Callable[[re.Match[str]], str]:
        return lambda match: self.alias(kind, match[0])

    def _named(self, kind: str) -> Callable[[re.Match[str]], str]:
        return lambda match: match[1] + self.alias(kind, match[2])

    def _process(self, match: re.Match[str]) -> str:
        if match[2].startswith("<"):  # the driver's own <unknown>
            return match[0]
        return match[1] + self.alias("process", match[2])

    def _uuid(self, value: str) -> str:
        digest = hmac.new(self._key, value.encode(), hashlib.sha256).hexdigest()
        return "-".join((digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32]))
