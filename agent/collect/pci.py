"""GPUs, NVSwitches and network adapters from /sys/bus/pci, and every bridge above them.

Only what a rule uses is read: link and error counters are cheap, the configuration space is not
(each dword is a read on the bus), so its first 16 bytes tell whether a device answers, and only
the switch ports between two of the devices are asked for their access control.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec.structs import replace

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.pci_aer import parse_aer
from agent.parse.pci_config import (
    EXTENDED_BYTES,
    HEADER_BYTES,
    LEGACY_BYTES,
    find_acs_control,
    is_all_ones,
)
from agent.parse.pci_link import (
    ALL_ONES_WIDTH,
    PciIdentity,
    parse_device_path,
    parse_hex,
    parse_link_speed,
    parse_link_width,
    parse_pci_uevent,
)
from probes.gap import Gap, GapReason
from probes.pci_links import ports_between
from probes.snapshot.pci import PciDevice, PciReading, PciSection

T = TypeVar("T")

_DEVICES = "/sys/bus/pci/devices"
_SLOTS = "/sys/bus/pci/slots"
_TEXT_LIMIT = 4096  # no attribute is longer than a page
_ACS_FIRST_BYTES = 512  # most lists of capabilities end below
_BRIDGE = 0x060400
_NOT_COPIED = "the file is not in this copy of /sys"
_LINK = ("current_link_speed_gts", "current_link_width_lanes")
_AER = ("aer_correctable", "aer_nonfatal", "aer_fatal")


def collect(host: Host) -> tuple[PciSection | None, tuple[Gap, ...]]:
    """Every GPU, NVSwitch and network adapter and the bridges above, with a first reading."""
    return _Collector(host).collect()


def resample(host: Host, section: PciSection) -> tuple[PciSection, tuple[Gap, ...]]:
    """The same devices with one more reading each."""
    collector = _Collector(host)
    devices = tuple(collector.with_reading(device) for device in section.devices)
    return replace(section, devices=devices), collector.gaps.folded()


class _Collector:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.gaps = Gaps("pci")
        self._whole: dict[str, bool] = {}

    def collect(self) -> tuple[PciSection | None, tuple[Gap, ...]]:
        try:
            names = self.host.listdir(_DEVICES)
        except OSError as error:
            allow = "mount the host's /sys, or pass --root" if error.errno == errno.ENOENT else None
            if error.errno == errno.ENOENT and not self.host.exists("/sys/bus"):
                # every kernel has that: no machine without PCI, but one whose sysfs is hidden
                self.gaps.add(
                    GapReason.DENIED, detail="/sys/bus: sysfs is not mounted", allow=allow
                )
            else:
                self.gaps.add_error(error, path=_DEVICES, allow=allow)
            return None, self.gaps.folded()
        slots = None
        found: dict[str, PciDevice] = {}
        for name in names:
            device = self._function(name)
            if device is None or not _is_wanted(device):
                continue
            slots = self._slots() if slots is None else slots
            way = self._way(name)
            above = None
            for at in way[:-1]:
                if at not in found:
                    found[at] = self._bridge(at, above, slots)
                above = at
            found[name] = self._endpoint(replace(device, parent=above), slots)
        devices = [self.with_reading(found[address]) for address in sorted(found)]
        return PciSection(devices=tuple(self._with_acs(devices))), self.gaps.folded()

    # --- one file ---

    def _read(self, address: str, name: str) -> str:
        return self.host.read_text(f"{_DEVICES}/{address}/{name}", _TEXT_LIMIT).strip()

    def _optional(self, address: str, name: str) -> str | None:
        """A file's text; None where it is not offered."""
        try:
            return self._read(address, name) or None
        except OSError:
            return None

    def _link_target(self, address: str, name: str) -> str | None:
        """The last part of a link's target; None where there is none."""
        try:
            return self.host.readlink(f"{_DEVICES}/{address}/{name}").rpartition("/")[2]
        except OSError:
            return None

    def _value(
        self, address: str, name: str, parse: Callable[[str], T | None], field: str
    ) -> T | None:
        """A file's value; None and a gap where it is missing, unknown or senseless."""
        text = ""
        try:
            text = self._read(address, name)
            value = parse(text)
        except (OSError, ValueError) as error:
            self._missing(error, address, name, field)
            return None
        if value is None:
            self.gaps.add(
                GapReason.UNSUPPORTED,
                field,
                device=address,
                detail=f"{name}: the kernel says {text[:40]!r}",
            )
        return value

    def _missing(self, error: OSError | ValueError, address: str, name: str, field: str) -> None:
        """Note a file that gave nothing; one that is not there may just not have been copied."""
        base = f"{_DEVICES}/{address}"
        if isinstance(error, OSError) and error.errno == errno.ENOENT:
            if self._is_whole(address):
                self.gaps.add(
                    GapReason.UNSUPPORTED,
                    field,
                    device=address,
                    detail="the kernel has no such file",
                )
                return
            if self.host.exists(base):
                self.gaps.add(GapReason.NOT_COLLECTED, field, device=address, detail=_NOT_COPIED)
                return
        self.gaps.add_error(error, field, device=address, path=f"{base}/{name}")

    def _is_whole(self, address: str) -> bool:
        """Whether this is sysfs itself: a copy of some files lacks ``uevent``, which all have."""
        if address not in self._whole:
            self._whole[address] = self.host.exists(f"{_DEVICES}/{address}/uevent")
        return self._whole[address]

    # --- facts ---

    def _function(self, address: str) -> PciDevice | None:
        """Class, ids and driver of a function; None when not even its class can be read."""
        try:
            facts = parse_pci_uevent(self._read(address, "uevent"))
            self._whole[address] = True
        except (OSError, ValueError):
            try:
                facts = self._copied_identity(address)
            except (OSError, ValueError) as error:
                self._missing(error, address, "class", "class_code")
                return None
        return PciDevice(
            address=address,
            class_code=facts.class_code,
            vendor_id=facts.vendor_id,
            device_id=facts.device_id,
            subsystem_vendor_id=facts.subsystem_vendor_id,
            subsystem_device_id=facts.subsystem_device_id,
            driver=facts.driver,
        )

    def _copied_identity(self, address: str) -> PciIdentity:
        """The same from single files."""

        def number(name: str) -> int | None:
            text = self._optional(address, name)
            return parse_hex(text) if text else None

        return PciIdentity(
            class_code=parse_hex(self._read(address, "class")),
            vendor_id=parse_hex(self._read(address, "vendor")),
            device_id=number("device"),
            subsystem_vendor_id=number("subsystem_vendor"),
            subsystem_device_id=number("subsystem_device"),
            driver=self._link_target(address, "driver"),
        )

    def _way(self, address: str) -> tuple[str, ...]:
        """The addresses from the root port to the device; only the device where no link tells."""
        try:
            way = parse_device_path(self.host.readlink(f"{_DEVICES}/{address}"))
        except OSError:
            way = ()
        if not way:
            self.gaps.add(
                GapReason.NOT_COLLECTED,
                "parent",
                device=address,
                detail=f"{_DEVICES}/ADDRESS is no link, so the bridges above are not known",
                allow="copy /sys with its links (tar without -h)",
            )
        return way or (address,)

    def _slots(self) -> dict[str, str]:
        """Names of the physical slots by address without function; many machines have none."""
        try:
            names = self.host.listdir(_SLOTS)
        except OSError:
            return {}
        at = {name: self._slot_address(name) for name in names}
        return {address: name for name, address in at.items() if address}

    def _slot_address(self, name: str) -> str | None:
        try:
            return self.host.read_text(f"{_SLOTS}/{name}/address", _TEXT_LIMIT).strip()
        except OSError:
            return None

    def _bridge(self, address: str, parent: str | None, slots: dict[str, str]) -> PciDevice:
        device = self._function(address) or PciDevice(address=address, class_code=_BRIDGE)
        return self._with_link_limits(
            replace(device, parent=parent, physical_slot=slots.get(address[:-2]))
        )

    def _endpoint(self, device: PciDevice, slots: dict[str, str]) -> PciDevice:
        address = device.address
        if device.driver is None and not self._is_whole(address):
            self.gaps.add(
                GapReason.NOT_COLLECTED, "driver", "iommu_group", device=address, detail=_NOT_COPIED
            )
        if self._link_target(address, "physfn") is not None:
            # link, errors and place are those of the physical function
            return replace(device, is_virtual_function=True)
        numa_node = self._value(address, "numa_node", int, "numa_node")
        group = self._link_target(address, "iommu_group")
        revision = self._optional(address, "revision")
        return self._with_link_limits(
            replace(
                device,
                revision=_hex_or_none(revision),
                numa_node=numa_node if numa_node is None or numa_node >= 0 else None,
                local_cpulist=self._optional(address, "local_cpulist"),
                iommu_group=group,
                iommu_group_type=self._optional(address, "iommu_group/type") if group else None,
                physical_slot=slots.get(address[:-2]),
                power_state=self._optional(address, "power_state"),
            )
        )

    def _with_link_limits(self, device: PciDevice) -> PciDevice:
        if device.is_nvswitch:
            return device  # nothing of a job passes through its PCIe link
        at = device.address
        width = self._value(at, "max_link_width", parse_link_width, "max_link_width_lanes")
        speed = self._value(at, "max_link_speed", parse_link_speed, "max_link_speed_gts")
        if width == ALL_ONES_WIDTH:
            width = None
            self._gone(device, "its link capabilities read as all ones", "max_link_width_lanes")
        return replace(device, max_link_speed_gts=speed, max_link_width_lanes=width)

    def _gone(self, device: PciDevice, why: str, *fields: str) -> None:
        self.gaps.add(GapReason.ABSENT, *fields, device=device.address, detail=why)

    # --- what moves ---

    def with_reading(self, device: PciDevice) -> PciDevice:
        """The device with one more reading; unchanged where there is nothing to read."""
        if device.is_virtual_function:
            return device
        if device.readings and not self.host.exists(f"{_DEVICES}/{device.address}"):
            self._gone(device, "it was removed from the bus between the readings")
            return device
        return replace(device, readings=(*device.readings, self._reading(device)))

    def _reading(self, device: PciDevice) -> PciReading:
        at = device.address
        reading = PciReading(
            at_ns=self.host.monotonic_ns(),
            config_all_ones=None if device.is_bridge else self._answers_with_ones(at),
        )
        if reading.config_all_ones:
            self._gone(device, "its configuration space reads as all ones", *_LINK, *_AER)
            return reading
        if device.is_nvswitch:
            return reading
        correctable, nonfatal, fatal = (
            self._value(at, f"aer_dev_{kind}", parse_aer, f"aer_{kind}")
            for kind in ("correctable", "nonfatal", "fatal")
        )
        width = self._value(at, "current_link_width", parse_link_width, "current_link_width_lanes")
        if width == ALL_ONES_WIDTH:
            self._gone(device, "its link status reads as all ones (width 63)", *_LINK)
            width, speed = None, None
            ones: bool | None = True
        else:
            speed = self._value(
                at, "current_link_speed", parse_link_speed, "current_link_speed_gts"
            )
            ones = None if width is None else False
        return replace(
            reading,
            current_link_speed_gts=speed,
            current_link_width_lanes=width,
            link_status_all_ones=ones,
            aer_correctable=correctable,
            aer_nonfatal=nonfatal,
            aer_fatal=fatal,
        )

    def _answers_with_ones(self, address: str) -> bool | None:
        try:
            header = self.host.read_bytes(f"{_DEVICES}/{address}/config", HEADER_BYTES)
        except OSError as error:
            self._missing(error, address, "config", "config_all_ones")
            return None
        return is_all_ones(header)

    # --- access control ---

    def _with_acs(self, devices: Iterable[PciDevice]) -> list[PciDevice]:
        """The devices, with the ACS control register of the switch ports between two of them."""
        by_address = {device.address: device for device in devices}
        for port in ports_between(by_address):
            by_address[port.address] = replace(port, acs_control=self._acs(port.address))
        return list(by_address.values())

    def _acs(self, address: str) -> int | None:
        path = f"{_DEVICES}/{address}/config"
        wanted = _ACS_FIRST_BYTES
        while True:
            try:
                config = self.host.read_bytes(path, wanted)
                control = find_acs_control(config)
            except EOFError:
                if len(config) == wanted < EXTENDED_BYTES:
                    wanted = EXTENDED_BYTES
                    continue
                self._hidden_acs(address, len(config))
                return None
            except (OSError, ValueError) as error:
                self._missing(error, address, "config", "acs_control")
                return None
            if control is None:
                self.gaps.add(
                    GapReason.UNSUPPORTED,
                    "acs_control",
                    device=address,
                    detail="the port has no access control",
                )
            return control

    def _hidden_acs(self, address: str, size: int) -> None:
        """The list of capabilities is cut off: by permission, or because there is none."""
        if size < LEGACY_BYTES and self._is_whole(address):
            self.gaps.add(
                GapReason.DENIED,
                "acs_control",
                device=address,
                detail=f"config: only the first {size} bytes are given to uid {self.host.euid()}",
                allow="run as root (CAP_SYS_ADMIN)",
            )
        else:
            self.gaps.add(
                GapReason.UNSUPPORTED,
                "acs_control",
                device=address,
                detail=f"config ends after {size} bytes: no extended configuration space",
            )


def _is_wanted(device: PciDevice) -> bool:
    return device.is_nvidia_gpu or device.is_nvswitch or device.is_nic


def _hex_or_none(text: str | None) -> int | None:
    try:
        return parse_hex(text or "")
    except ValueError:
        return None
