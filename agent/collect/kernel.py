"""The kernel log of this boot: /dev/kmsg, else the journal, else the files syslog writes."""

from __future__ import annotations

import datetime
import io

from agent.collect.gaps import Gaps
from agent.host import Host
from agent.parse.kernel_log import TimeReference, parse_kernel_log
from probes.gap import Gap, GapReason
from probes.snapshot.kernel import KernelSection

LIMIT_BYTES = 16 << 20
JOURNAL = (
    "journalctl", "-k", "-b", "0", "-o", "short-monotonic", "--no-pager", "-n", "50000",
)  # fmt: skip
_JOURNAL_TIMEOUT_S = 5.0
# /var/log/dmesg is not among them: it ends with the boot, and silence after that proves nothing
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_ALLOW = (
    "run as root, or `usermod -aG systemd-journal USER` (Debian: also adm), or `sysctl "
    "kernel.dmesg_restrict=0`; in a container add --device /dev/kmsg and --cap-add SYSLOG, or "
    "mount the host and use --root"
)


def collect(host: Host) -> tuple[KernelSection | None, tuple[Gap, ...]]:
    """What the kernel said since this boot that bears on GPUs, links, memory and hung tasks."""
    gaps = Gaps("kernel")
    tried: list[tuple[GapReason, str]] = []
    reference = TimeReference(taken_at_ns=host.time_ns(), uptime_s=_uptime_s(host))
    section = (
        _from_kmsg(host, reference, gaps, tried)
        or _from_journal(host, reference, tried)
        or _from_files(host, reference, tried)
    )
    if section is None:
        reasons = [reason for reason, _ in tried]
        hidden = [reason for reason in reasons if reason.hides_something]
        gaps.add(
            hidden[0] if hidden else GapReason.ABSENT,
            detail="; ".join(text for _, text in tried),
            allow=_ALLOW,
        )
    elif section.truncated and section.first_at_s is not None:
        gaps.add(
            GapReason.ABSENT,
            "first_at_s",
            detail=f"{section.source}: lines of this boot from before {section.first_at_s:.0f} s "
            "are gone",
            allow="look at `journalctl -k -b`; a larger ring buffer: boot with log_buf_len=4M",
        )
    return section, gaps.folded()


def _uptime_s(host: Host) -> float | None:
    try:
        return float(host.read_text("/proc/uptime", 100).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _failed(tried: list[tuple[GapReason, str]], error: OSError, what: str) -> None:
    probe = Gaps("kernel")
    probe.add_error(error, path=what)
    gap = probe.folded()[0]
    tried.append((gap.reason, gap.detail or what))


def _from_kmsg(
    host: Host, reference: TimeReference, gaps: Gaps, tried: list[tuple[GapReason, str]]
) -> KernelSection | None:
    try:
        raw = host.read_kmsg(LIMIT_BYTES)
    except OSError as error:
        _failed(tried, error, "/dev/kmsg")
        return None
    section = parse_kernel_log(
        raw.decode("utf-8", "replace"), "kmsg", reference, only_this_boot=True
    )
    if not section.lines_read or section.first_at_s is None:
        tried.append((GapReason.ABSENT, "/dev/kmsg: holds no kernel messages"))
        return None
    if len(raw) >= LIMIT_BYTES:
        gaps.add(
            GapReason.MALFORMED,
            "lines_read",
            detail=f"/dev/kmsg: more than {LIMIT_BYTES >> 20} MiB; the newest lines were not read",
        )
    return section


def _from_journal(
    host: Host, reference: TimeReference, tried: list[tuple[GapReason, str]]
) -> KernelSection | None:
    try:
        done = host.run(JOURNAL, _JOURNAL_TIMEOUT_S)
    except FileNotFoundError:
        tried.append((GapReason.ABSENT, "journalctl: not installed"))
        return None
    except OSError as error:
        _failed(tried, error, "journalctl -k -b")
        return None
    text = done.stdout[-LIMIT_BYTES:].decode("utf-8", "replace")
    section = parse_kernel_log(text, "journal", reference, only_this_boot=True)
    if done.returncode == 0 and section.first_at_s is not None:
        return section
    said = done.stderr.decode("utf-8", "replace").strip().replace("\n", " ")[:200]
    denied = "ermission" in said or "not seeing messages" in said
    tried.append(
        (
            GapReason.DENIED if denied else GapReason.ABSENT,
            f"journalctl -k -b: {said or f'no kernel messages, exit {done.returncode}'}",
        )
    )
    return None


def _from_files(
    host: Host, reference: TimeReference, tried: list[tuple[GapReason, str]]
) -> KernelSection | None:
    local = TimeReference(reference.taken_at_ns, reference.uptime_s, _zone(host))
    for path in _FILES:
        try:
            size = host.stat(path).size
            raw = host.read_bytes(path, LIMIT_BYTES) if size <= LIMIT_BYTES else b""
        except OSError as error:
            _failed(tried, error, path)
            continue
        if size > LIMIT_BYTES:
            tried.append((GapReason.MALFORMED, f"{path}: larger than {LIMIT_BYTES >> 20} MiB"))
            continue
        section = parse_kernel_log(raw.decode("utf-8", "replace"), path, local)
        if section.lines_read:
            return section
        tried.append((GapReason.ABSENT, f"{path}: empty"))
    return None


def _zone(host: Host) -> datetime.tzinfo:
    """The machine's own time zone: syslog writes local time."""
    import zoneinfo  # needed in this last resort only

    try:
        return zoneinfo.ZoneInfo.from_file(io.BytesIO(host.read_bytes("/etc/localtime", 1 << 16)))
    except (OSError, ValueError):
        return datetime.timezone.utc
