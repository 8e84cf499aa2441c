"""Raw answers of the NVML child -> records. Pure.

A group is one line of ``agent.nvml_child``, for example::

    {"group":"reading","gpu":0,"at_ns":5,"values":{"PowerUsage":70000,"FanSpeed":[3]}}

where ``[3]`` is a return code. A code becomes None and a gap, never a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec

from agent.collect.gaps import Gaps
from agent.parse.nvml_codes import name_of, reason_of
from probes.gap import GapReason
from probes.pci_address import normalize_pci_address
from probes.snapshot.gpu import (
    Fabric,
    Gpu,
    GpuLimits,
    GpuProcess,
    GpuReading,
    MigInstance,
    NvLink,
    NvLinkErrors,
    RetiredPages,
    RowRemap,
    SramEcc,
)

_PERMISSION = "run as root, or give the container the GPU's device node"
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE

_IDENTITY = {
    "architecture": "Architecture", "serial": "Serial",
    "board_part_number": "BoardPartNumber", "minor_number": "MinorNumber",
    "module_id": "ModuleId", "vbios_version": "VbiosVersion",
    "inforom_image_version": "InforomImageVersion",
    "gsp_firmware_version": "GspFirmwareVersion", "virtualization_mode": "VirtualizationMode",
    "compute_mode": "ComputeMode", "c2c_link_count": "field.170", "recovery_action": "field.230",
}  # fmt: skip
_FLAGS = {
    "persistence_mode": "PersistenceMode", "display_active": "DisplayActive",
    "c2c_enabled": "C2cModeInfo",
}  # fmt: skip
_LIMITS = {
    "graphics_clock_max_mhz": "MaxClockInfo.0", "sm_clock_max_mhz": "MaxClockInfo.1",
    "mem_clock_max_mhz": "MaxClockInfo.2",
    "sm_clock_customer_boost_max_mhz": "MaxCustomerBoostClock.1",
    "sm_application_clock_mhz": "ApplicationsClock.1",
    "mem_application_clock_mhz": "ApplicationsClock.2",
    "sm_default_application_clock_mhz": "DefaultApplicationsClock.1",
    "mem_default_application_clock_mhz": "DefaultApplicationsClock.2",
    "power_limit_mw": "PowerManagementLimit", "power_limit_enforced_mw": "EnforcedPowerLimit",
    "power_limit_default_mw": "PowerManagementDefaultLimit",
    "temperature_shutdown_c": "TemperatureThreshold.0",
    "temperature_slowdown_c": "TemperatureThreshold.1",
    "temperature_mem_max_c": "TemperatureThreshold.2",
    "temperature_gpu_max_c": "TemperatureThreshold.3",
    "tlimit_shutdown_c": "field.193", "tlimit_slowdown_c": "field.194",
    "tlimit_mem_max_c": "field.195", "tlimit_gpu_max_c": "field.196",
    "supported_clocks_event_reasons": "SupportedClocksEventReasons",
    "pcie_max_link_generation": "MaxPcieLinkGeneration",
    "pcie_gpu_max_link_generation": "GpuMaxPcieLinkGeneration",
    "pcie_max_link_width_lanes": "MaxPcieLinkWidth",
}  # fmt: skip
_READING = {
    "pstate": "PerformanceState", "graphics_clock_mhz": "ClockInfo.0",
    "sm_clock_mhz": "ClockInfo.1", "mem_clock_mhz": "ClockInfo.2",
    "clocks_event_reasons": "CurrentClocksEventReasons", "power_mw": "PowerUsage",
    "total_energy_mj": "TotalEnergyConsumption", "temperature_c": "Temperature",
    "memory_temperature_c": "field.82", "margin_temperature_c": "MarginTemperature",
    "fan_speed_percent": "FanSpeed", "pcie_link_generation": "CurrPcieLinkGeneration",
    "pcie_link_width_lanes": "CurrPcieLinkWidth", "pcie_replay_count": "PcieReplayCounter",
    "pcie_l0_to_recovery_count": "field.169", "pcie_correctable_error_count": "field.173",
    "pcie_nonfatal_error_count": "field.179", "pcie_fatal_error_count": "field.180",
    "pcie_tx_bytes": "field.197", "pcie_rx_bytes": "field.198",
    "nvlink_tx_kib": "field.138", "nvlink_rx_kib": "field.139",
    "ecc_volatile_correctable": "TotalEccErrors.0.0",
    "ecc_aggregate_correctable": "TotalEccErrors.0.1",
    "ecc_volatile_uncorrectable": "TotalEccErrors.1.0",
    "ecc_aggregate_uncorrectable": "TotalEccErrors.1.1",
    "ecc_volatile_dram_uncorrectable": "MemoryErrorCounter.1.0.2",
    "ecc_volatile_sram_uncorrectable": "MemoryErrorCounter.1.0.7",
}  # fmt: skip
_VIOLATIONS = {
    "violation_power_ns": 0, "violation_thermal_ns": 1, "violation_sync_boost_ns": 2,
    "violation_board_limit_ns": 3, "violation_low_utilization_ns": 4, "violation_reliability_ns": 5,
}  # fmt: skip
_EVENT_REASONS = {
    "reason_sw_thermal_ns": (269, 251),
    "reason_hw_thermal_ns": (270, 252),
    "reason_hw_power_brake_ns": (271, 253),
}
_LINK_COUNTERS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
_LINK_FIELDS = {
    "malformed_packets": 206, "buffer_overrun": 207, "rx_errors": 208,
    "local_link_integrity": 211, "link_recovery_successful": 213, "link_recovery_failed": 214,
    "effective_errors": 219, "symbol_errors": 221,
}  # fmt: skip
_SRAM = {
    "volatile_uncorrectable_parity": "volatileUncParity",
    "volatile_uncorrectable_sec_ded": "volatileUncSecDed", "volatile_correctable": "volatileCor",
    "aggregate_uncorrectable_parity": "aggregateUncParity",
    "aggregate_uncorrectable_sec_ded": "aggregateUncSecDed",
    "aggregate_correctable": "aggregateCor",
}  # fmt: skip


class Answers:
    """The answers about one GPU; what is missing becomes gaps of ``device``."""

    def __init__(self, values: Mapping[str, Any], gaps: Gaps, device: str) -> None:
        self._values = values
        self._gaps = gaps
        self._device = device

    def take(self, field: str, *keys: str) -> Any:
        """The first of the keys that was answered, else None and a gap for ``field``."""
        code: int | None = None
        for key in keys:
            value = self._values.get(key)
            if _is_code(value):
                code = code or value[0]
            elif value is not None and value != _NOT_AVAILABLE:
                return value
        if code is not None:
            self.miss(field, code)
        return None

    def miss(self, field: str, code: int) -> None:
        """Note why a field is missing."""
        reason = reason_of(code)
        allow = _PERMISSION if reason is GapReason.DENIED else None
        self._gaps.add(reason, field, device=self._device, detail=name_of(code), allow=allow)

    def table(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """A record's fields by their keys."""
        return {field: self.take(field, key) for field, key in fields.items()}


def _is_code(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], int)


def pci_of(values: Mapping[str, Any]) -> str | None:
    """The GPU's PCI address in the kernel's spelling."""
    bus_id = values.get("PciInfo")
    return normalize_pci_address(bus_id) if isinstance(bus_id, str) else None


def handle_of(answers: Answers, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Gpu that say who it is, from the handle group."""
    out = {
        "name": answers.take("name", "Name"),
        "uuid": answers.take("uuid", "UUID"),
        "pci": pci_of(values),
    }
    if out["pci"] is None:
        answers.take("pci", "PciInfo")
    return out


def identity_of(answers: Answers, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Gpu from the identity group."""
    out = answers.table(_IDENTITY)
    for field, key in _FLAGS.items():
        value = answers.take(field, key)
        out[field] = None if value is None else bool(value)
    for field, later, key in (
        ("ecc_mode", "ecc_mode_pending", "EccMode"),
        ("mig_mode", "mig_mode_pending", "MigMode"),
    ):
        pair = answers.take(field, key)
        out[field], out[later] = (None, None) if pair is None else map(bool, pair)
    if capability := answers.take("cuda_compute_capability", "CudaComputeCapability"):
        out["cuda_compute_capability"] = f"{capability[0]}.{capability[1]}"
    if isinstance(out["gsp_firmware_version"], str):
        out["gsp_firmware_version"] = out["gsp_firmware_version"].rstrip("\0") or None
    out["mig_instances"] = tuple(
        MigInstance(
            uuid=_known(item["UUID"]),
            gpu_instance_id=_known(item["GpuInstanceId"]),
            compute_instance_id=_known(item["ComputeInstanceId"]),
            memory_total_bytes=_known(item["Memory"]),
        )
        for item in values.get("Mig", ())
        if isinstance(item, dict)
    )
    fabric = answers.take("fabric", "Fabric")
    if fabric is not None:
        out["fabric"] = Fabric(**fabric)
    return out


def _known(value: Any) -> Any:
    return None if _is_code(value) else value


def limits_of(answers: Answers) -> GpuLimits:
    """The limits group."""
    fields = answers.table(_LIMITS)
    span = answers.take("power_limit_min_mw", "PowerManagementLimitConstraints")
    low, high = span or (None, None)
    return GpuLimits(power_limit_min_mw=low, power_limit_max_mw=high, **fields)


def memory_of(answers: Answers) -> dict[str, Any]:
    """Fields of Gpu about repairs of its memory."""
    out: dict[str, Any] = {}
    rows = answers.take("row_remap", "RemappedRows")
    if rows is not None:
        banks = answers.take("row_remap_histogram", "RowRemapperHistogram") or (None,) * 5
        names = ("banks_max", "banks_high", "banks_partial", "banks_low", "banks_none")
        out["row_remap"] = RowRemap(
            correctable_rows=rows[0],
            uncorrectable_rows=rows[1],
            pending=bool(rows[2]),
            failure_occurred=bool(rows[3]),
            **dict(zip(names, banks, strict=True)),
        )
    single = answers.take("retired_pages", "RetiredPages.0")
    double = answers.take("retired_pages", "RetiredPages.1")
    if single is not None or double is not None:
        pending = answers.take("retired_pages_pending", "RetiredPagesPendingStatus")
        out["retired_pages"] = RetiredPages(
            multiple_single_bit=single,
            double_bit=double,
            pending=None if pending is None else bool(pending),
        )
    sram = answers.take("sram_ecc", "SramEccErrorStatus")
    if sram is not None:
        out["sram_ecc"] = SramEcc(
            threshold_exceeded=bool(sram["bThresholdExceeded"]),
            **{field: sram[member] for field, member in _SRAM.items()},
        )
    return out


def links_of(values: Mapping[str, Any], answers: Answers) -> tuple[NvLink, ...] | None:
    """The links group; None when the GPU has no NVLink."""
    states = values.get("states") or []
    if not states:
        answers.take("nvlinks", "NvLinkState")
        return None
    links = []
    for link, state in enumerate(states):
        better = _known(values.get(f"field.165.{link}", [3]))
        remote = _known(values.get(f"NvLinkRemotePciInfo.{link}", [3]))
        links.append(
            NvLink(
                link=link,
                state=state if better is None else better,
                version=_known(values.get(f"NvLinkVersion.{link}", [3])),
                speed_mbps=_known(values.get(f"field.164.{link}", [3])),
                remote_pci=normalize_pci_address(remote) if isinstance(remote, str) else None,
                remote_type=_known(values.get(f"NvLinkRemoteDeviceType.{link}", [3])),
            )
        )
    return tuple(links)


def processes_of(answers: Answers) -> tuple[GpuProcess, ...] | None:
    """The processes group; None when neither kind could be listed."""
    found: list[GpuProcess] = []
    seen: set[int] = set()
    known = False
    for kind in ("Compute", "Graphics"):
        listed = answers.take("processes", f"{kind}RunningProcesses")
        known = known or listed is not None
        for pid, used in listed or ():
            if pid not in seen:
                seen.add(pid)
                memory = None if used in (None, _NOT_AVAILABLE) else used
                found.append(GpuProcess(pid=pid, kind=kind.lower(), used_memory_bytes=memory))
    return tuple(found) if known else None


def reading_of(
    values: Mapping[str, Any], answers: Answers, at_ns: int, links: int
) -> tuple[GpuReading, dict[str, Any]]:
    """The reading group, and the static memory sizes that came with it."""
    fields = answers.table(_READING)
    for field, number in _VIOLATIONS.items():
        fields[field] = answers.take(field, f"field.{74 + number}", f"ViolationStatus.{number}")
    for field, (newer, older) in _EVENT_REASONS.items():
        if f"field.{newer}" in values or f"field.{older}" in values:
            fields[field] = answers.take(field, f"field.{newer}", f"field.{older}")
        else:
            answers.miss(field, 3)  # this driver has no such counter
    rates = answers.take("utilization_gpu_percent", "UtilizationRates")
    if rates is not None:
        fields["utilization_gpu_percent"], fields["utilization_memory_percent"] = rates
    memory = answers.take("memory_used_bytes", "MemoryInfo")
    static: dict[str, Any] = {}
    if memory is not None:
        static = {"memory_total_bytes": memory[0], "memory_reserved_bytes": memory[2]}
        fields["memory_used_bytes"] = memory[1]
    errors = _link_errors(values, links)
    if links and errors is None:
        answers.miss("nvlink_errors", 3)
    return GpuReading(at_ns=at_ns, nvlink_errors=errors, **fields), static


def _link_errors(values: Mapping[str, Any], links: int) -> tuple[NvLinkErrors, ...] | None:
    out = []
    for link in range(links):
        known: dict[str, Any] = {}
        for number, field in enumerate(_LINK_COUNTERS):
            known[field] = _known(values.get(f"NvLinkErrorCounter.{link}.{number}", [3]))
        for field, number in _LINK_FIELDS.items():
            known[field] = _known(values.get(f"field.{number}.{link}", [3]))
        known["effective_ber"] = _rate(_known(values.get(f"field.220.{link}", [3])))
        known["symbol_ber"] = _rate(_known(values.get(f"field.222.{link}", [3])))
        out.append(NvLinkErrors(**known))
    return tuple(out) if any(each != NvLinkErrors() for each in out) else None


def _rate(packed: int | None) -> float | None:
    """A bit error rate: exponent in bits 0-7, mantissa in bits 8-11 (nvml.h, NVML_NVLINK_ERROR)."""
    if packed is None:
        return None
    mantissa, exponent = packed >> 8 & 0xF, packed & 0xFF
    return float(f"{mantissa}e-{exponent}")


def with_fields(gpu: Gpu, fields: Mapping[str, Any]) -> Gpu:
    """The GPU with more of it known."""
    return msgspec.structs.replace(gpu, **fields) if fields else gpu
