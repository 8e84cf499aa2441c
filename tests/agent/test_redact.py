from agent.redact import Redactor
from agent.snapshot_file import encode_snapshot
from probes.snapshot.gpu import Gpu, GpuState, NvmlSection
from probes.snapshot.kernel import KernelEvent, KernelSection
from probes.snapshot.node import SNAPSHOT_SCHEMA, NodeSnapshot
from probes.snapshot.process import Process, ProcessSection

UUID = "GPU-ed3baabb-c28a-b849-d89b-6517ee75c267"
LINE = f"NVRM: GPU at PCI:0000:3b:00: {UUID}"
SNAPSHOT = NodeSnapshot(
    schema=SNAPSHOT_SCHEMA,
    tool_version="0.1.0",
    host="gpu-r3-n07.cluster.example",
    boot_id="11111111-2222-3333-4444-555555555555",
    taken_at_ns=1,
    container="kubernetes",
    nvml=NvmlSection(
        library_path="/u/erin/stubs/libnvidia-ml.so.1",
        gpus=(
            Gpu(index=0, state=GpuState.OK, uuid=UUID, pci="0000:3b:00.0", serial="1560000000001"),
        ),
    ),
    kernel=KernelSection(
        source="kmsg",
        events=(
            KernelEvent(kind="nvrm", line=LINE, locator="812"),
            KernelEvent(
                kind="xid",
                line="NVRM: Xid (PCI:0000:88:00): 43, pid=88120, name=secret_train, Ch 10",
                locator="813",
                process="secret_train",
                pid=88120,
            ),
            KernelEvent(
                kind="nvrm",
                line="gpu-r3-n07 nfs: server 10.3.4.5 (fe80::1ff:fe23:4567:890a) mac "
                "aa:bb:cc:dd:ee:ff path /home/alice/run Serial Number: 1560000000001",
                locator="814",
            ),
        ),
    ),
    processes=ProcessSection(processes=(Process(pid=88120, comm="secret_train"),)),
)
SECRETS = (
    "gpu-r3-n07", "11111111-2222", UUID, UUID[4:12], "1560000000001", "secret_train", "10.3.4.5",
    "fe80::", "aa:bb:cc", "alice", "erin", "stubs",
)  # fmt: skip


def test_no_name_of_a_place_or_person_stays() -> None:
    text = encode_snapshot(Redactor(b"key").snapshot(SNAPSHOT)).decode()
    assert [secret for secret in SECRETS if secret in text] == []


def test_what_the_file_is_sent_for_stays() -> None:
    text = encode_snapshot(Redactor(b"key").snapshot(SNAPSHOT)).decode()
    for kept in (
        "0000:3b:00.0",
        "Xid (PCI:0000:88:00): 43",
        "pid=88120",
        "kubernetes",
        "Ch 10",
        "/libnvidia-ml.so.1",
    ):
        assert kept in text


def test_equal_things_keep_equal_names() -> None:
    found = Redactor(b"key").snapshot(SNAPSHOT)
    assert found.nvml and found.kernel and found.processes
    uuid = found.nvml.gpus[0].uuid
    assert uuid and uuid.startswith("GPU-")
    assert uuid in found.kernel.events[0].line
    alias = found.processes.processes[0].comm
    assert alias == found.kernel.events[1].process
    assert alias and f"name={alias}," in found.kernel.events[1].line
    assert found.host in found.kernel.events[2].line


def test_another_key_gives_other_names() -> None:
    assert Redactor(b"a").snapshot(SNAPSHOT).host != Redactor(b"b").snapshot(SNAPSHOT).host


def test_pci_addresses_and_times_are_no_network_addresses() -> None:
    redactor = Redactor(b"key")
    for text in (
        "0000:3b:00.0",
        "PCI:0000:3b:00",
        "00000000:3B:00.0",
        "12:34:56",
        "driver 550.54.14",
    ):
        assert redactor.text(text) == text
