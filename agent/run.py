"""One run on a node: every source read once, again after the sample time, within the deadline."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import msgspec

from agent import __version__
from agent.errors import LaggardError
from agent.host import Host, LiveHost
from agent.isolate import First, InProcess, Isolated, Reader, Readings, Second, bug
from probes.gap import Gap, GapReason, fold_gaps
from probes.record import Record
from probes.snapshot.gpu import NvmlSection
from probes.snapshot.host import HostSection
from probes.snapshot.kernel import KernelSection
from probes.snapshot.nic import NicSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.pci import PciSection
from probes.snapshot.process import ProcessSection

# Shares of the deadline.
_FILES_SHARE = 0.6  # all files together, so that a driver that answers slowly still gets its turn
_SECTION_SHARE = 0.3  # one section
_KEPT_SHARE = 0.05  # what a section leaves for each one after it
_NVML_END_SHARE = 0.95  # when the driver's turn is over
_CALL_SHARE = 0.35  # one GPU's calls: by default more than the 6 s of one GSP timeout
_SECOND_SHARE = 0.1  # the second readings of all files
_SECOND_KEPT_SHARE = 0.02


class RunOptions(msgspec.Struct, frozen=True):
    """``sample_s`` between the two readings, 0 for one reading; ``deadline_s`` for all of it.

    ``spent_s`` of the deadline has passed before the run begins (modules were loaded).
    """

    sample_s: float = 2.0
    deadline_s: float = 20.0
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a sample that leaves no time to read."""
        if self.sample_s > self.deadline_s * 0.75:
            raise LaggardError(
                f"two readings {self.sample_s:g} s apart don't fit into {self.deadline_s:g} s",
                f"lower --sample, or raise --deadline to {math.ceil(self.sample_s / 0.75)} or more",
            )


def _section(name: str, source: str, record: type) -> Reader:
    def load() -> tuple[First, Second | None]:
        module = importlib.import_module(f"agent.collect.{source}")
        return module.collect, getattr(module, "resample", None)

    return Reader(name=name, source=source, record=record, load=load)


class _Head(Record, frozen=True, kw_only=True):
    """The fields of the snapshot that name the machine."""

    host: str
    boot_id: str | None = None
    kernel_release: str | None = None
    uptime_s: float | None = None
    virtualization: str | None = None
    container: str | None = None
    privileged: bool


def _load_identity() -> tuple[First, None]:
    from agent.collect.identity import read_identity

    def read(host: Host) -> tuple[_Head, tuple[Gap, ...]]:
        found = read_identity(host)
        return _Head(**{name: getattr(found, name) for name in _Head.__struct_fields__}), found.gaps

    return read, None


_IDENTITY = Reader(name="identity", source="host", record=_Head, load=_load_identity)
# By the snapshot's field. The kernel log first: what it says of a GPU holds even if looking at
# that GPU hangs.
FILES = (
    _section("kernel", "kernel", KernelSection),
    _section("pci", "pci", PciSection),
    _section("nics", "nics", NicSection),
    _section("processes", "processes", ProcessSection),
    _section("host_facts", "host", HostSection),
)


def collect_node(
    host: Host, options: RunOptions = RunOptions(), files: tuple[Reader, ...] = FILES
) -> NodeSnapshot:
    """Read this node. Never raises for what the node does; the gaps say what could not be read.

    ``files`` are read in a child (see ``agent.isolate``), in order, before the driver is touched.
    """
    readings = (
        Isolated(host, (_IDENTITY, *files)) if isinstance(host, LiveHost) else InProcess(host)
    )
    try:
        return _Run(host, options, readings, files).collect()
    finally:
        readings.close()


class _Run:
    def __init__(
        self, host: Host, options: RunOptions, readings: Readings, files: tuple[Reader, ...]
    ) -> None:
        self.host = host
        self.options = options
        self.readings = readings
        self.files = files
        self.start_ns = host.monotonic_ns() - int(options.spent_s * 1e9)
        self.gaps: list[Gap] = []
        self.sections: dict[str, Any] = {}

    def _until_ns(self, share: float) -> int:
        """When this share of the deadline has passed."""
        return self.start_ns + int(share * self.options.deadline_s * 1e9)

    def _seconds_until(self, moment_ns: int) -> float:
        return max(0.0, (moment_ns - self.host.monotonic_ns()) / 1e9)

    def collect(self) -> NodeSnapshot:
        """Everything once, and what moves a second time."""
        taken_at_ns = self.host.time_ns()
        head = self._head()
        self._first_of_files()
        self._driver_and_second_readings()
        return NodeSnapshot(
            schema=SNAPSHOT_SCHEMA,
            tool_version=__version__,
            taken_at_ns=taken_at_ns,
            sample_s=self.options.sample_s,
            gaps=fold_gaps(tuple(self.gaps)),
            **{name: getattr(head, name) for name in head.__struct_fields__},
            **self.sections,
        )

    # --- files ---

    def _turn(self, after: int, until_ns: int, kept_share: float) -> float:
        """Seconds for a section that ``after`` others wait behind: each of them gets its turn."""
        kept = self.options.deadline_s * kept_share
        left = self._seconds_until(until_ns) - after * kept
        return max(kept, min(self.options.deadline_s * _SECTION_SHARE, left))

    def _first(self, reader: Reader, after: int) -> Any:
        turn = self._turn(after, self._until_ns(_FILES_SHARE), _KEPT_SHARE)
        section, gaps = self.readings.first(reader, turn)
        self.gaps += gaps
        return section

    def _head(self) -> _Head:
        head = self._first(_IDENTITY, len(self.files))
        if isinstance(head, _Head):
            return head
        return _Head(host=os.uname().nodename, privileged=self.host.euid() == 0)

    def _first_of_files(self) -> None:
        for position, reader in enumerate(self.files):
            self.sections[reader.name] = self._first(reader, len(self.files) - 1 - position)

    def _second_of_files(self) -> None:
        until_ns = min(
            self.host.monotonic_ns() + int(_SECOND_SHARE * self.options.deadline_s * 1e9),
            self._until_ns(_NVML_END_SHARE),
        )
        moving = [reader for reader in self.files if self.sections[reader.name] is not None]
        for position, reader in enumerate(moving):
            turn = self._turn(len(moving) - 1 - position, until_ns, _SECOND_KEPT_SHARE)
            section = self.sections[reader.name]
            self.sections[reader.name], gaps = self.readings.second(reader, section, turn)
            self.gaps += gaps

    # --- the driver, and the time between two readings ---

    def _driver_and_second_readings(self) -> None:
        began_ns = self.host.monotonic_ns()
        if not _is_live(self.host) and not self.host.exists("/@nvml"):
            self.sections["nvml"] = None
            self.gaps.append(
                Gap(
                    source="nvml",
                    reason=GapReason.NOT_COLLECTED,
                    detail="files were read, and no driver stands behind them",
                )
            )
            if self.options.sample_s:
                self._wait(began_ns)
                self._second_of_files()
            return
        from agent.collect.nvml import NvmlCollector

        with NvmlCollector(
            self.host,
            until_ns=self._until_ns(_NVML_END_SHARE),
            call_deadline_s=self.options.deadline_s * _CALL_SHARE,
        ) as collector:
            nvml = self._nvml(collector.first, None)
            if self.options.sample_s:
                self._wait(began_ns)
                self._second_of_files()
                if (first := nvml) is not None and first.gpus:
                    nvml = self._nvml(lambda: collector.second(first), first)
        self.sections["nvml"] = nvml

    def _wait(self, began_ns: int) -> None:
        """Until the second readings are due, counted from the start of the driver's first one.

        Both readings go through the GPUs in the same order, so each GPU's two are as far apart.
        """
        due_ns = began_ns + int(self.options.sample_s * 1e9)
        latest_ns = self._until_ns(_NVML_END_SHARE - _SECOND_SHARE)
        self.host.sleep(self._seconds_until(min(due_ns, latest_ns)))

    def _nvml(
        self,
        read: Callable[[], tuple[NvmlSection | None, tuple[Gap, ...]]],
        before: NvmlSection | None,
    ) -> NvmlSection | None:
        try:
            section, gaps = read()
        except Exception as error:
            section, gaps = before, (bug("nvml", error, again=before is not None),)
        self.gaps += gaps
        return section


def _is_live(host: Host) -> bool:
    """Whether a driver can stand behind the files: also when what it says is being recorded."""
    return isinstance(getattr(host, "inner", host), LiveHost)
