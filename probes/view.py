"""What probes ask of a snapshot: siblings, chains, differences between two readings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TypeVar

from msgspec.structs import replace

from probes.finding import Component
from probes.snapshot.gpu import Gpu, GpuReading, GpuState, NvLink
from probes.snapshot.node import NodeSnapshot
from probes.snapshot.pci import PciDevice
from probes.stats import median

T = TypeVar("T")
ReadingT = TypeVar("ReadingT")

# nvmlClocksEventReasons (nvml.h)
REASON_GPU_IDLE = 0x1
REASON_SW_POWER_CAP = 0x4

# These GPUs are in NVML's count and none of this caller's business.
_HIDDEN_STATES = (GpuState.NO_PERMISSION,)

LAST_RUN_MAX_NS = 24 * 3600 * 10**9


class Node:
    """A read-only view of one snapshot; everything on it is derived once and kept."""

    def __init__(self, snapshot: NodeSnapshot) -> None:
        self.snapshot = snapshot
        self._memo: dict[object, object] = {}

    def memo(self, key: object, compute: Callable[[Node], T]) -> T:
        """A fold over the snapshot that several probes share, computed once per snapshot."""
        if key not in self._memo:
            self._memo[key] = compute(self)
        return self._memo[key]  # type: ignore[return-value]

    @property
    def host(self) -> str:
        """The host's name."""
        return self.snapshot.host

    def host_component(self) -> Component:
        """The node itself."""
        return Component(type="host", host=self.host)

    # --- the last run ---

    @cached_property
    def _last_counters(self) -> dict[tuple[str, str], dict[str, int]]:
        """Counters of the last run by kind and key; empty unless boot and driver are the same."""
        last, nvml = self.snapshot.baseline, self.snapshot.nvml
        if last is None or last.boot_id != self.snapshot.boot_id:
            return {}
        if nvml is not None and last.driver_version != nvml.driver_version:
            return {(s.kind, s.key): s.counters for s in last.sets if s.kind != "gpu"}
        return {(s.kind, s.key): s.counters for s in last.sets}

    def has_last_run(self, kind: str, key: str | None) -> bool:
        """Whether the last run on this node left counters of the component."""
        return (kind, key) in self._last_counters

    def since_last_run(
        self, kind: str, key: str | None, counter: str, now: int | None
    ) -> tuple[int, int] | None:
        """``(difference, nanoseconds)`` of a counter since the last run on this node.

        None without a valid last run within a day (an older one says nothing about now), or when
        the counter went backwards (it was reset).
        """
        if key is None or now is None or self.snapshot.baseline is None:
            return None
        before = self._last_counters.get((kind, key), {}).get(counter)
        elapsed_ns = self.snapshot.taken_at_ns - self.snapshot.baseline.at_ns
        if before is None or now < before or not 0 < elapsed_ns <= LAST_RUN_MAX_NS:
            return None
        return now - before, elapsed_ns

    # --- GPUs ---

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU that NVML lists, also those that no longer answer.

        NVML gives no more than an index for a GPU that it has no handle for. Where it is the only
        such one, and all but one of the GPUs on the bus are accounted for, it is that one; where
        the bus has none left over, it is the only one of which the kernel log has an Xid.
        """
        listed = self.snapshot.nvml.gpus if self.snapshot.nvml else ()
        nameless = [gpu for gpu in listed if gpu.pci is None]
        candidates = {device.address for device in self.unlisted_gpus} or self._gone_gpus
        if len(nameless) != 1 or len(candidates) != 1 or nameless[0].state in _HIDDEN_STATES:
            return listed
        (address,) = candidates
        named = replace(
            nameless[0], pci=address, uuid=nameless[0].uuid or self.uuid_in_log.get(address)
        )
        return tuple(named if gpu is nameless[0] else gpu for gpu in listed)

    @cached_property
    def _gone_gpus(self) -> set[str]:
        """GPUs that had an Xid in this boot, and that neither NVML nor the bus lists any more."""
        events = self.snapshot.kernel.events if self.snapshot.kernel else ()
        there = {gpu.pci for gpu in self.snapshot.nvml.gpus} if self.snapshot.nvml else set()
        if self.snapshot.pci is None:
            return set()
        xids = {event.pci for event in events if event.kind == "xid" and event.pci}
        return xids - there - self.pci_by_address.keys()

    def is_named_by_bus(self, gpu: Gpu) -> bool:
        """Whether NVML did not give the GPU's address, and the bus did."""
        nvml = self.snapshot.nvml
        return nvml is not None and gpu.pci not in {listed.pci for listed in nvml.gpus}

    @cached_property
    def unlisted_gpus(self) -> tuple[PciDevice, ...]:
        """GPUs on the bus that have the nvidia driver and whose address NVML does not name."""
        nvml = self.snapshot.nvml
        if nvml is None or nvml.init_error is not None:
            return ()
        listed = {gpu.pci for gpu in nvml.gpus}
        return tuple(
            device
            for device in self.pci_by_address.values()
            if device.is_nvidia_gpu
            and not device.is_virtual_function
            and device.driver == "nvidia"
            and device.address not in listed
        )

    @cached_property
    def uuid_in_log(self) -> dict[str, str]:
        """UUIDs by address, as the driver's own lines in the kernel log give them."""
        events = self.snapshot.kernel.events if self.snapshot.kernel else ()
        return {event.pci: event.gpu_uuid for event in events if event.pci and event.gpu_uuid}

    @cached_property
    def live_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs whose readings mean something."""
        return tuple(gpu for gpu in self.gpus if gpu.state is GpuState.OK)

    @cached_property
    def _by_model(self) -> dict[tuple[str | None, bool], tuple[Gpu, ...]]:
        groups: dict[tuple[str | None, bool], list[Gpu]] = {}
        for gpu in self.live_gpus:
            groups.setdefault((gpu.name, bool(gpu.mig_mode)), []).append(gpu)
        return {key: tuple(members) for key, members in groups.items()}

    def siblings(self, gpu: Gpu) -> tuple[Gpu, ...]:
        """The other live GPUs of the same model and MIG mode on this node."""
        members = self._by_model.get((gpu.name, bool(gpu.mig_mode)), ())
        return tuple(other for other in members if other is not gpu)

    def gpu_component(self, gpu: Gpu) -> Component:
        """The GPU with every identifier that is known."""
        return Component(
            type="gpu", host=self.host, gpu_uuid=gpu.uuid, pci=gpu.pci, index=gpu.index
        )

    def nvlink_component(self, gpu: Gpu, link: NvLink) -> Component:
        """One NVLink, by its GPU and link number."""
        return Component(
            type="nvlink",
            host=self.host,
            gpu_uuid=gpu.uuid,
            pci=gpu.pci,
            index=gpu.index,
            link=link.link,
        )

    # --- PCI ---

    @cached_property
    def pci_by_address(self) -> dict[str, PciDevice]:
        """PCI devices by address."""
        section = self.snapshot.pci
        return {device.address: device for device in section.devices} if section else {}

    def pci_chain(self, address: str) -> tuple[PciDevice, ...]:
        """The device and every bridge above it, device first, root port last."""
        chain: list[PciDevice] = []
        seen: set[str] = set()
        at: str | None = address
        while at is not None and at not in seen and (device := self.pci_by_address.get(at)):
            seen.add(at)
            chain.append(device)
            at = device.parent
        return tuple(chain)

    def pci_component(self, device: PciDevice) -> Component:
        """A PCI function; a GPU that NVML also lists carries its UUID."""
        if device.is_nvidia_gpu:
            for gpu in self.gpus:
                if gpu.pci == device.address:
                    return self.gpu_component(gpu)
            uuid = self.uuid_in_log.get(device.address)
            return Component(type="gpu", host=self.host, pci=device.address, gpu_uuid=uuid)
        if device.is_nic:
            return Component(type="nic", host=self.host, pci=device.address)
        return Component(type="link", host=self.host, pci=device.address)


def last_reading(gpu: Gpu) -> GpuReading | None:
    """The newest reading of a GPU."""
    return gpu.readings[-1] if gpu.readings else None


def is_busy(reading: GpuReading | None) -> bool | None:
    """Whether kernels ran; None when utilisation and event reasons are both unknown.

    The idle bit (0x1) proves idle even where utilisation is not readable (MIG).
    """
    if reading is None:
        return None
    if reading.clocks_event_reasons is not None and reading.clocks_event_reasons & REASON_GPU_IDLE:
        return False
    if reading.utilization_gpu_percent is not None:
        return reading.utilization_gpu_percent > 0
    return None


def busy_throughout(gpu: Gpu) -> bool | None:
    """True when every reading shows the GPU busy, False when any shows it idle."""
    answers = [is_busy(reading) for reading in gpu.readings]
    if not answers or None in answers:
        return None if False not in answers else False
    return all(answers)


def delta(
    readings: Iterable[ReadingT], value: Callable[[ReadingT], int | None]
) -> tuple[int, int] | None:
    """``(difference, nanoseconds)`` of a counter from the first to the last reading that has it.

    None with fewer than two readings, or when the counter went backwards (it was reset).
    """
    have = [
        (reading.at_ns, counter)  # type: ignore[attr-defined]
        for reading in readings
        if (counter := value(reading)) is not None
    ]
    if len(have) < 2:
        return None
    (start_ns, start), (end_ns, end) = have[0], have[-1]
    if end < start or end_ns <= start_ns:
        return None
    return end - start, end_ns - start_ns


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
