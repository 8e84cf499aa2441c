"""One node at one time: what a live run read, or what somebody collected."""

from probes.gap import Gap
from probes.record import Record
from probes.snapshot.baseline import Baseline
from probes.snapshot.gpu import NvmlSection
from probes.snapshot.host import HostSection
from probes.snapshot.kernel import KernelSection
from probes.snapshot.manifest import Manifest
from probes.snapshot.nic import NicSection
from probes.snapshot.pci import PciSection
from probes.snapshot.process import ProcessSection

SNAPSHOT_SCHEMA = "laggard.snapshot/1"


class NodeSnapshot(Record, frozen=True, kw_only=True):
    """The input of every node probe.

    A section is None when it was not collected; a gap says why. ``manifest`` and ``baseline`` are
    what the run compared with, so that a replay judges exactly as the live run did.
    """

    schema: str
    tool_version: str
    host: str  # the host's own name
    taken_at_ns: int  # Unix time
    boot_id: str | None = None
    kernel_release: str | None = None
    uptime_s: float | None = None
    virtualization: str | None = (
        None  # kvm, … as the hypervisor bit and DMI tell; None: bare metal or unknown
    )
    container: str | None = None  # docker, podman, lxc, kubernetes; None: none seen
    privileged: bool | None = None  # effective uid 0
    sample_s: float | None = None  # what --sample asked for
    nvml: NvmlSection | None = None
    pci: PciSection | None = None
    kernel: KernelSection | None = None
    nics: NicSection | None = None
    processes: ProcessSection | None = None
    host_facts: HostSection | None = None
    manifest: Manifest | None = None
    baseline: Baseline | None = None
    gaps: tuple[Gap, ...] = ()
