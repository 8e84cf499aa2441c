"""Whole nodes: the NVML double's answers, /sys, /proc and a kernel log in one text tree.

``Machine(scenario=..., kmsg=..., changes=...)`` is a two-socket node with eight H100 behind root
ports of their own and eight InfiniBand ports. ``Machines`` reads several at once, ``report_of``
judges as ``laggard check`` does.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agent.build_report import build_report
from agent.evaluate import evaluate
from agent.fstree import parse_fstree
from agent.host import FixtureHost
from agent.nvml_channel import LiveNvmlChannel, NvmlChannel
from agent.run import RunOptions, collect_node
from agent.tree import TextTree
from probes.registry import discover
from probes.result import Outcome, Report
from probes.snapshot.node import NodeSnapshot
from tests.support.nvml_double import SCENARIOS, Double

HGX = Path(__file__).parent.parent / "fixtures" / "host_hgx.fstree"
PROBES = discover()
# As the double's H100 models have them.
GPUS = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
OPTIONS = RunOptions(sample_s=0.2, deadline_s=6.0)
ONES = base64.b64encode(b"\xff" * 64).decode()


def root_port(gpu: str) -> str:
    """The address of the root port above a GPU: ``0000:1a:01.0`` for ``0000:1b:00.0``."""
    return f"0000:{int(gpu[5:7], 16) - 1:02x}:01.0"


def gpu_path(gpu: str) -> str:
    """Where a GPU's files are."""
    port = root_port(gpu)
    return f"/sys/devices/pci{port[:7]}/{port}/{gpu}"


def pci_gpu(gpu: str) -> str:
    """A GPU and its root port, both at Gen5 x16."""
    port, path = root_port(gpu), gpu_path(gpu)
    return "".join(
        f"/sys/bus/pci/devices/{address} -> ../../../{at[5:]}\n"
        f"{at}/uevent:\n|DRIVER={driver}\n|PCI_CLASS={kind}\n|PCI_ID={id}\n"
        f"|PCI_SUBSYS_ID=10DE:16C1\n|PCI_SLOT_NAME={address}\n"
        f"{at}/driver -> ../../../bus/pci/drivers/{driver}\n"
        f"{at}/max_link_speed = 32.0 GT/s PCIe\n{at}/max_link_width = 16\n"
        f"{at}/current_link_speed = 32.0 GT/s PCIe\n{at}/current_link_width = 16\n"
        f"{at}/numa_node = {int(gpu[5:7], 16) >> 7}\n{at}/power_state = D0\n"
        f"{at}/aer_dev_correctable:\n|RxErr 0\n|BadTLP 0\n|TOTAL_ERR_COR 0\n"
        f"{at}/aer_dev_nonfatal:\n|CmpltTO 0\n|TOTAL_ERR_NONFATAL 0\n"
        f"{at}/aer_dev_fatal:\n|DLP 0\n|TOTAL_ERR_FATAL 0\n"
        f"{at}/config =base64 {base64.b64encode(header + bytes(60)).decode()}\n"
        for address, at, driver, kind, id, header in (
            (port, path.rpartition("/")[0], "pcieport", "60400", "8086:352A", b"\x86\x80\x2a\x35"),
            (gpu, path, "nvidia", "30200", "10DE:2330", b"\xde\x10\x30\x23"),
        )
    )


def port(index: int, state: str = "4: ACTIVE", phys: str = "5: LinkUp") -> str:
    """An InfiniBand port."""
    at = f"/sys/devices/pci0000:00/0000:0{index}:00.0/infiniband/mlx5_{index}"
    return (
        f"/sys/class/infiniband/mlx5_{index} -> ../../{at[5:]}\n"
        f"{at}/device -> ../../../0000:0{index}:00.0\n"
        f"{at}/fw_ver = 28.41.1000\n{at}/board_id = MT_0000000838\n"
        f"{at}/ports/1/state = {state}\n{at}/ports/1/phys_state = {phys}\n"
        f"{at}/ports/1/rate = 400 Gb/sec (4X NDR)\n{at}/ports/1/link_layer = InfiniBand\n"
        f"{at}/ports/1/counters/link_downed = 0\n"
    )


PORTS = "".join(port(index) for index in range(8))
BUS = "".join(pci_gpu(gpu) for gpu in GPUS)


# The double's driver and addresses, and nothing that a rule about the host would mention.
_TO_H100_NODE = {
    "570.86.15": "550.163.01",
    "0000:17:00.0": GPUS[0],
    "0000:3B:00.0": GPUS[1],
    "= 12.05 8.08 4.04": "= 1.05 1.08 1.04",
    "policy3": "policy2",
}
_DEVICES = "".join(
    (
        *(f"/proc/driver/nvidia/gpus/{gpu}/information =\n" for gpu in GPUS[2:]),
        *(f"/dev/nvidia{i} =\n/@access/dev/nvidia{i} = ok\n" for i in range(8)),
        "/proc/1/fd/0 -> /dev/null\n",
        f"/proc/1/stat = 1 (systemd) S 0 1 1 0 -1 4194560{' 0' * 44}\n",
        f"/proc/2/stat = 2 (kthreadd) S 0 0 0 0 -1 2129984{' 0' * 44}\n",
    )
)


@dataclass(frozen=True)
class Machine:
    """What a node shows. ``scenario`` is a name of tests/scenarios, or the text of one.

    ``changes`` are further lines of a text tree (the last one wins); paths that begin as one of
    ``hide`` are not there.
    """

    scenario: str | None = "h100x8_busy"
    bus: str = BUS
    ports: str = PORTS
    kmsg: str = ""
    changes: str = ""
    hide: tuple[str, ...] = ()

    def tree(self) -> TextTree:
        """Everything in one text tree; ``/@nvml`` is there when there is a scenario."""
        host = HGX.read_text().partition("\n@1\n")[0]
        for old, new in _TO_H100_NODE.items():
            host = host.replace(old, new)
        parts = (host, _DEVICES, self.bus, self.ports, "/dev/kmsg:", *self._kmsg(), self.changes)
        tree = parse_fstree("\n".join(parts))
        entries = tree.epochs[0]
        for path in [path for path in entries if path.startswith(self.hide or "-")]:
            del entries[path]
        if self.scenario is not None:
            entries["/@nvml"] = b"the double\n"
        return tree

    def _kmsg(self) -> Iterator[str]:
        """The lines of dmesg as records of /dev/kmsg, behind the first line of a boot."""
        yield "|5,1,0,-;Linux version 6.8.0-52-generic (buildd@lcy02)"
        for number, line in enumerate(self.kmsg.strip().splitlines(), 2):
            seconds, _, text = line.strip()[1:].partition("] ")
            yield f"|4,{number},{int(float(seconds) * 1e6)},-;{text}"


class _Host(FixtureHost):
    """Files from a tree, the driver from this process's environment, clocks of this machine."""

    def open_nvml(self) -> NvmlChannel:
        return LiveNvmlChannel()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        super().sleep(seconds)


def collect(machine: Machine, environ: dict[str, str]) -> bytes:
    """The snapshot of a machine; runs in a process of its own, which the double's variables need."""
    os.environ.update(environ)
    return msgspec.json.encode(collect_node(_Host(machine.tree()), OPTIONS))


def report_of(snapshot: NodeSnapshot) -> Report:
    """What ``laggard check`` says."""
    evaluation = evaluate(snapshot, PROBES)
    broken = [result.error for result in evaluation.results if result.outcome is Outcome.ERROR]
    assert broken == []
    return build_report(snapshot, evaluation)


class Machines:
    """Machines by name, all read at once; ``double`` answers for their drivers."""

    def __init__(
        self, machines: Mapping[str, Machine], double: Double, folder: Path, workers: int = 4
    ) -> None:
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        self._begun: dict[str, Future[bytes]] = {}
        for name, machine in machines.items():
            scenario = machine.scenario or "h100x8"
            if "\n" in scenario or "=" in scenario:
                path = folder / f"{name}.scn"
                path.write_text(scenario.replace("include = ", f"include = {SCENARIOS}/"))
                environ = double.environ(path)
            else:
                environ = double.environ(scenario)
            self._begun[name] = self._pool.submit(collect, machine, environ)

    def __getitem__(self, name: str) -> NodeSnapshot:
        return msgspec.json.decode(self._begun[name].result(timeout=60), type=NodeSnapshot)

    def close(self) -> None:
        """Forget what nobody waited for."""
        self._pool.shutdown(cancel_futures=True)
