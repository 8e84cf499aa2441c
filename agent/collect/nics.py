"""Network ports from /sys/class/infiniband and /sys/class/net.

Every read of a port's counter is a firmware command, and a physical function that the firmware
restricts refuses each one with a line in the kernel log. So only the counters that a rule uses are
read, a directory is left alone after its first refusal, and the whole section has a time budget.
"""

from __future__ import annotations

import errno
import re

from msgspec.structs import replace

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.infiniband import parse_port_counter, parse_port_rate, parse_port_state
from probes.gap import Gap, GapReason
from probes.snapshot.nic import NicPort, NicSection, PortReading

_RDMA = "/sys/class/infiniband"
_NET = "/sys/class/net"
_BUDGET_NS = 5_000_000_000  # reading 16 healthy ports takes well below 0.1 s
_IFF_UP = 0x1
_NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOENT, errno.ENOTDIR)

# What a rule in probes.node uses, by directory; InfiniBand's own error counters stay at zero on
# an Ethernet port, where the interface counts instead.
_PACKETS = ("port_rcv_packets", "port_xmit_packets")
_LINK_ERRORS = (
    "link_downed",
    "link_error_recovery",
    "symbol_error",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_TRANSPORT = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence")
_NETDEV = ("carrier_changes", "carrier_down_count")
_NETDEV_STATISTICS = ("rx_packets", "rx_crc_errors", "rx_frame_errors")

_PCI_DEVICE = re.compile(r"/([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?:/virtio\d+)?$")
_SUBFUNCTION = "/mlx5_core.sf."  # on the auxiliary bus below its PCI function
_REPRESENTOR = re.compile(r"(?:c\d+)?pf\d+(?:vf|sf)\d+")


def collect(host: Host) -> tuple[NicSection | None, tuple[Gap, ...]]:
    """All ports of physical adapters with a first reading of their counters."""
    return _Collector(host).collect()


def resample(host: Host, section: NicSection) -> tuple[NicSection, tuple[Gap, ...]]:
    """The same ports with one more reading each."""
    collector = _Collector(host)
    ports = tuple(
        replace(port, readings=(*port.readings, collector.reading(port))) for port in section.ports
    )
    return replace(section, ports=ports), collector.gaps.folded()


class _Collector:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.gaps = Gaps("nics")
        self.deadline_ns = host.monotonic_ns() + _BUDGET_NS

    def collect(self) -> tuple[NicSection | None, tuple[Gap, ...]]:
        rdma = self._names(_RDMA)
        net = self._names(_NET)
        if rdma is None and net is None:
            self.gaps.add(
                GapReason.ABSENT,
                detail=f"{_RDMA} and {_NET} are not there",
                allow="mount the host's /sys",
            )
            return None, self.gaps.folded()
        ports = [port for device in rdma or () for port in self._rdma_device(device)]
        owned = {name for port in ports for name in port.netdevs}
        ports += [
            port
            for name in net or ()
            if name not in owned and (port := self._interface(name)) is not None
        ]
        ports = [replace(port, readings=(self.reading(port),)) for port in ports]
        return NicSection(ports=tuple(ports)), self.gaps.folded()

    # --- facts ---

    def _names(self, path: str) -> list[str] | None:
        try:
            return self.host.listdir(path)
        except OSError as error:
            if error.errno != errno.ENOENT:
                self.gaps.add_error(error, "port", path=path)
            return None

    def _text(self, path: str) -> str | None:
        """A file's text; None when the device does not offer it or cannot say it now."""
        try:
            return self.host.read_text(path, 4096).strip()
        except OSError:
            return None

    def _fact(self, path: str, field: str, device: str) -> str | None:
        """A required fact: its absence is a gap."""
        try:
            return self.host.read_text(path, 4096).strip()
        except OSError as error:
            self.gaps.add_error(error, field, device=device, path=path)
            return None

    def _with_pci(self, port: NicPort, base: str) -> NicPort:
        """Address, driver and ids of the PCI function behind ``base``/device."""
        try:
            real = self.host.realpath(f"{base}/device")
        except OSError:
            return port
        found = _PCI_DEVICE.search(real)
        ids = [
            (self._text(f"{base}/device/{name}") or "").removeprefix("0x")
            for name in ("vendor", "device", "subsystem_vendor", "subsystem_device")
        ]
        try:
            driver = self.host.readlink(f"{base}/device/driver").rpartition("/")[2]
        except OSError:
            driver = None
        return replace(
            port,
            pci=found[1] if found else None,
            driver=driver,
            pci_id="{}:{} {}:{}".format(*ids) if all(ids) else None,
            is_virtual_function=_SUBFUNCTION in real or self.host.exists(f"{base}/device/physfn"),
        )

    def _rdma_device(self, device: str) -> list[NicPort]:
        base = f"{_RDMA}/{device}"
        try:
            if "/devices/virtual/" in self.host.realpath(base):
                return []  # soft RoCE and soft iWARP ride on an interface that is listed itself
            numbers = [int(name) for name in self.host.listdir(f"{base}/ports") if name.isdigit()]
        except OSError as error:
            self.gaps.add_error(error, "port", device=device, path=f"{base}/ports")
            return []
        facts = self._with_pci(
            NicPort(
                device=device,
                firmware_version=self._text(f"{base}/fw_ver") or None,
                board_id=self._text(f"{base}/board_id") or None,
            ),
            base,
        )
        netdevs = self._device_netdevs(base)
        ports = []
        for number in sorted(numbers):
            own = netdevs if len(numbers) == 1 else self._port_netdevs(base, number, netdevs)
            ports.append(self._rdma_port(replace(facts, port=number, netdevs=own)))
        return ports

    def _device_netdevs(self, base: str) -> tuple[str, ...]:
        try:
            names = self.host.listdir(f"{base}/device/net")
        except OSError:
            return ()
        return tuple(name for name in names if not self._is_representor(name))

    def _is_representor(self, name: str) -> bool:
        """Whether the interface stands for a virtual function (switchdev mode)."""
        return bool(_REPRESENTOR.fullmatch(self._text(f"{_NET}/{name}/phys_port_name") or ""))

    def _port_netdevs(self, base: str, number: int, names: tuple[str, ...]) -> tuple[str, ...]:
        """A two-port function's interfaces: the GID table names them, else dev_port counts."""
        named = self._text(f"{base}/ports/{number}/gid_attrs/ndevs/0")
        if named in names:
            return (named,)
        return tuple(
            name for name in names if self._text(f"{_NET}/{name}/dev_port") == str(number - 1)
        )

    def _rdma_port(self, port: NicPort) -> NicPort:
        base = f"{_RDMA}/{port.device}/ports/{port.port}"
        state = self._fact(f"{base}/state", "state", port.key)
        phys_state = self._fact(f"{base}/phys_state", "phys_state", port.key)
        rate_text = self._fact(f"{base}/rate", "rate_gbps", port.key)
        rate = None
        if rate_text:
            try:
                rate = parse_port_rate(rate_text)
            except ValueError as error:
                self.gaps.add_error(error, "rate_gbps", device=port.key, path=f"{base}/rate")
        link_layer = self._text(f"{base}/link_layer") or None
        port = replace(
            port,
            link_layer=link_layer,
            state=parse_port_state(state) if state else None,
            phys_state=parse_port_state(phys_state) if phys_state else None,
            rate_text=rate_text,
            rate_gbps=rate.gbps if rate else None,
            width_lanes=rate.width_lanes if rate else None,
        )
        if link_layer != "Ethernet":
            return port  # an IP-over-InfiniBand interface may be down while RDMA works
        if not port.netdevs:
            self.gaps.add(
                GapReason.ABSENT,
                "admin_up",
                "carrier",
                device=port.key,
                detail=f"{_RDMA}/{port.device}/device/net: no interface in this network namespace",
                allow="run in the host's network namespace",
            )
            return port
        admin_up, carrier = self._link(port.netdevs[0])
        return replace(port, admin_up=admin_up, carrier=carrier)

    def _link(self, name: str) -> tuple[bool | None, bool | None]:
        """IFF_UP and the carrier of an interface; the carrier of one that is down is unknown."""
        flags = self._text(f"{_NET}/{name}/flags")
        carrier = self._text(f"{_NET}/{name}/carrier")
        try:
            admin_up = bool(int(flags, 16) & _IFF_UP) if flags else None
        except ValueError:
            admin_up = None
        return admin_up, carrier == "1" if carrier else None

    def _interface(self, name: str) -> NicPort | None:
        """An Ethernet interface of a PCI function; None for virtual, USB and wireless ones."""
        base = f"{_NET}/{name}"
        try:
            real = self.host.realpath(f"{base}/device")
        except OSError:
            return None
        # a BMC's USB interface hangs below a PCI address too: the function must be the last part
        if not _PCI_DEVICE.search(real) or self._text(f"{base}/type") != "1":
            return None
        if self.host.exists(f"{base}/phy80211") or self._is_representor(name):
            return None
        admin_up, carrier = self._link(name)
        speed = self._text(f"{base}/speed")  # EINVAL or -1 without a link
        mbps = int(speed) if speed and speed.isascii() and speed.isdigit() else None
        port = NicPort(
            device=name,
            netdevs=(name,),
            link_layer="Ethernet",
            state=self._fact(f"{base}/operstate", "state", name),
            admin_up=admin_up,
            carrier=carrier,
            rate_gbps=mbps / 1000 if mbps else None,
        )
        return self._with_pci(port, base)

    # --- what moves ---

    def reading(self, port: NicPort) -> PortReading:
        """State and counters now."""
        at_ns = self.host.monotonic_ns()
        counters: dict[str, int] = {}
        if port.port is None:
            state = self._text(f"{_NET}/{port.device}/operstate")
        else:
            base = f"{_RDMA}/{port.device}/ports/{port.port}"
            text = self._text(f"{base}/state")
            state = parse_port_state(text) if text else None
            names = _PACKETS if port.link_layer == "Ethernet" else (*_PACKETS, *_LINK_ERRORS)
            self._counters(counters, port.key, f"{base}/counters", names)
            self._counters(counters, port.key, f"{base}/hw_counters", _TRANSPORT)
        if port.link_layer == "Ethernet" and port.netdevs:
            base = f"{_NET}/{port.netdevs[0]}"
            self._counters(counters, port.key, base, _NETDEV)
            self._counters(counters, port.key, f"{base}/statistics", _NETDEV_STATISTICS)
        return PortReading(at_ns=at_ns, state=state, counters=counters)

    def _counters(
        self, counters: dict[str, int], device: str, directory: str, names: tuple[str, ...]
    ) -> None:
        """Read counters until the first refusal. One that this device lacks is no gap."""
        for name in names:
            if self.host.monotonic_ns() > self.deadline_ns:
                self.gaps.add(
                    GapReason.TIMEOUT,
                    "counters",
                    device=device,
                    detail=f"reading the ports took longer than {_BUDGET_NS / 1e9:g} s: "
                    "the remaining counters were left out",
                )
                return
            path = f"{directory}/{name}"
            try:
                value = parse_port_counter(self.host.read_text(path, 256))
            except OSError as error:
                if error.errno == errno.ENOENT:
                    continue
                if error.errno in _NOT_OFFERED:
                    self.gaps.add(
                        GapReason.UNSUPPORTED,
                        "counters",
                        device=device,
                        detail=f"{path}: {error.strerror}; its other counters were left alone",
                    )
                else:
                    self.gaps.add_error(error, "counters", device=device, path=path)
                return
            except ValueError as error:
                self.gaps.add_error(error, "counters", device=device, path=path)
                return
            if value is None:
                self.gaps.add(
                    GapReason.UNSUPPORTED,
                    "counters",
                    device=device,
                    detail=f"{path}: the device has no performance management",
                )
                return
            counters[name] = value
