"""A finding: one thing wrong (or worth knowing) with one component, and the proof."""

import enum
import hashlib
from typing import Literal

import msgspec

from probes.record import Record


class Severity(str, enum.Enum):
    """How bad it is."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Order: info < warning < critical."""
        return _SEVERITY_ORDER[self]


_SEVERITY_ORDER = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class Confidence(str, enum.Enum):
    """How sure the rule is that the readings mean what it says."""

    POSSIBLE = "possible"
    LIKELY = "likely"
    PROVEN = "proven"

    @property
    def rank(self) -> int:
        """Order: possible < likely < proven."""
        return _CONFIDENCE_ORDER[self]


_CONFIDENCE_ORDER = {Confidence.POSSIBLE: 0, Confidence.LIKELY: 1, Confidence.PROVEN: 2}


class FaultClass(str, enum.Enum):
    """What sort of cause it is (the Verdict contract's ``class``)."""

    HARDWARE = "hardware"  # broken, trained wrongly, wearing out
    CONFIGURATION = "configuration"  # a setting, a package state, a port wired or left wrong
    SOFTWARE = "software"  # what a program or a service did
    LOAD = "load"  # busier, not slower
    NO_FAULT = "no_fault"
    CANNOT_TELL = "cannot_tell"


class JobImpact(str, enum.Enum):
    """What the fault does to a job that runs on this node now."""

    NONE = "none"  # a job may go on as it is
    SLOWS = "slows"  # a job may go on, but slower than it should
    BREAKS = "breaks"  # a job cannot go on (or its results can't be trusted)

    @property
    def rank(self) -> int:
        """Order: none < slows < breaks."""
        return ("none", "slows", "breaks").index(self.value)


class Basis(str, enum.Enum):
    """Why a value was expected."""

    DEVICE_MAX = "device-max"
    SLOT_MAX = "slot-max"
    PEER_MEDIAN = "peer-median"
    MANIFEST = "manifest"
    VENDOR_LIMIT = "vendor-limit"
    OWN_BASELINE = "own-baseline"


class Action(str, enum.Enum):
    """What a person (never laggard) does about it."""

    NONE = "none"
    INSPECT_APP = "inspect-app"
    RESET_GPU = "reset-gpu"
    REBOOT = "reboot"
    RESEAT = "reseat"
    REPLACE = "replace"
    DRAIN = "drain"
    RECONFIGURE = "reconfigure"


ComponentType = Literal["rank", "gpu", "link", "nvlink", "nic", "host", "replica"]
Scalar = int | float | str | bool


class Component(Record, frozen=True, kw_only=True):
    """What a finding or a verdict speaks of; unknown keys are omitted, never null.

    ``pci`` is ``dddd:bb:dd.f`` in lower case. ``pid`` is the host's, ``nspid`` the container's.
    ``index`` is used with ``host`` only where the source gives nothing better.
    """

    type: ComponentType
    host: str | None = None
    rank: int | None = None
    pid: int | None = None
    nspid: int | None = None
    gpu_uuid: str | None = None
    pci: str | None = None
    link: int | None = None
    index: int | None = None
    device: str | None = None
    port: int | None = None
    replica: str | None = None
    src_rank: int | None = None
    dst_rank: int | None = None

    def label(self) -> str:
        """A short name for a line of text: the most telling identifier first."""
        if self.type == "nic" and self.device:
            return self.device if self.port is None else f"{self.device}/{self.port}"
        if self.type == "nvlink" and self.link is not None:
            return f"{self.pci or self.gpu_uuid or self.index} link {self.link}"
        if self.src_rank is not None and self.dst_rank is not None:
            return f"{self.src_rank}->{self.dst_rank}"
        for value in (self.pci, self.gpu_uuid, self.device):
            if value:
                return value
        if self.rank is not None:
            return f"rank {self.rank}"
        if self.pid is not None:
            return f"pid {self.pid}"
        if self.index is not None:
            return f"{self.type} {self.index}"
        return self.replica or self.host or self.type


class Expectation(Record, frozen=True, kw_only=True):
    """The value that was expected and why."""

    value: Scalar
    basis: Basis


class Evidence(Record, frozen=True, kw_only=True):
    """One reading that supports a finding or a verdict.

    ``source`` names the kind of source (``nvml``, ``sysfs``, ``kmsg``, ``procfs`` …), ``locator``
    the exact place (file, NVML call, log line number). ``quote`` is verbatim source text, escapes
    stripped, at most 300 characters. ``recheck`` is what a person types to see the same fact.
    """

    source: str
    locator: str
    observed: Scalar | None = None
    unit: str | None = None
    expected: Expectation | None = None
    at_ns: int | None = None
    quote: str | None = None
    recheck: str | None = None


class Remedy(Record, frozen=True, kw_only=True):
    """What to do next."""

    action: Action
    text: str
    disruptive: bool


class Finding(Record, frozen=True, kw_only=True):
    """One fact about one component that matters, with its proof.

    ``summary`` is one line with subject, number and expectation. ``explains`` holds the ids of
    findings on the same component that this one causes.
    """

    id: str
    severity: Severity
    confidence: Confidence
    fault_class: FaultClass = msgspec.field(name="class")
    job_impact: JobImpact
    component: Component
    summary: str
    evidence: tuple[Evidence, ...]
    explains: tuple[str, ...] = ()
    remedy: Remedy | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        """Refuse a finding without proof; derive the fingerprint from id and component."""
        if not self.evidence:
            raise ValueError(f"finding {self.id} has no evidence")
        if not self.fingerprint:
            msgspec.structs.force_setattr(self, "fingerprint", fingerprint(self.id, self.component))


def fingerprint(finding_id: str, component: Component) -> str:
    """Stable across runs: 16 hex digits over the id and the component without volatile parts.

    A GPU is its UUID when known, because an index or an address can move.
    """
    parts = msgspec.structs.asdict(component)
    parts.pop("pid"), parts.pop("nspid")
    if component.gpu_uuid:
        parts["index"] = parts["pci"] = None
    elif component.pci:
        parts["index"] = None
    text = "\n".join([finding_id, *(f"{k}={v}" for k, v in sorted(parts.items()) if v is not None)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
