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
from agent.parse.nvml_codes import NOT_SUPPORTED, name_of, reason_of
from probes.gap import GapReason
from probes.pci_address import normalize_pci_address
from probes.snapshot.gpu import (
    CallTiming,
    Fabric,
    Gpu,
    GpuLimits,
    GpuProcess,
    GpuReading,
    MigInstance,
    NvLink,
    NvLinkErrors,
    NvmlSection,
    RetiredPages,
    RowRemap,
    SramEcc,
)

# the scope that adds all links up: NVML's 0xffffffff
_TRAFFIC = {"nvlink_tx_kib": "field.138.4294967295", "nvlink_rx_kib": "field.139.4294967295"}
_PERMISSION = "run as root, or give the container the GPU's device node"
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE

_IDENTITY = {
    "architecture": "Architecture", "serial": "Serial",
    "board_part_number": "BoardPartNumber", "minor_number": "MinorNumber",
    "module_id": "ModuleId", "vbios_version": "VbiosVersion",
    "inforom_image_version": "InforomImageVersion",
    "gsp_firmware_version": "GspFirmwareVersion", "virtualization_mode": "VirtualizationMode",
    "compute_mode": "ComputeMode", "c2c_link_count": "field.170",
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
    "ecc_volatile_correctable": "TotalEccErrors.0.0",
    "ecc_aggregate_correctable": "TotalEccErrors.0.1",
    "ecc_volatile_uncorrectable": "TotalEccErrors.1.0",
    "ecc_aggregate_uncorrectable": "TotalEccErrors.1.1",
    "ecc_volatile_dram_uncorrectable": "MemoryErrorCounter.1.0.2",
    "ecc_volatile_sram_uncorrectable": "MemoryErrorCounter.1.0.7",
}  # fmt: skip
# fields 74-79, nvmlPerfPolicyType_t 0-5
_VIOLATIONS = (
    "violation_power_ns", "violation_thermal_ns", "violation_sync_boost_ns",
    "violation_board_limit_ns", "violation_low_utilization_ns", "violation_reliability_ns",
)  # fmt: skip
_EVENT_REASONS = ("reason_sw_thermal_ns", "reason_hw_thermal_ns", "reason_hw_power_brake_ns")
_BANKS = ("banks_max", "banks_high", "banks_partial", "banks_low", "banks_none")
# nvmlNvLinkErrorCounter_t 0-4; the first three also fields 161-163
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


class Group(msgspec.Struct, frozen=True):
    """One line of the child. ``lost`` and ``slow`` name the call before which it broke off."""

    group: str
    at_ns: int
    values: dict[str, Any]
    gpu: int | None = None
    timings: tuple[tuple[str, float], ...] = ()
    lost: str | None = None
    slow: str | None = None

    def code(self, key: str) -> int | None:
        """The return code that stands in place of a value."""
        value = self.values.get(key)
        return value[0] if _is_code(value) else None

    @property
    def slow_calls(self) -> tuple[CallTiming, ...]:
        """The calls that took long and returned."""
        return tuple(
            CallTiming(call=call, duration_ms=took_ms, returned=True)
            for call, took_ms in self.timings
        )


class Answers:
    """The answers about one GPU (or the driver); what is missing becomes gaps of ``device``."""

    def __init__(self, values: Mapping[str, Any], gaps: Gaps, device: str | None) -> None:
        self.values = values
        self._gaps = gaps
        self._device = device

    def take(self, field: str, *keys: str) -> Any:
        """The first of the keys that was answered, else None and a gap for ``field``."""
        code: int | None = None
        for key in keys:
            value = self.values.get(key)
            if _is_code(value):
                code = code or value[0]
            elif value is not None and value != _NOT_AVAILABLE:
                return value
        if code is not None:
            self.miss(field, code)
        return None

    def flag(self, field: str, key: str) -> bool | None:
        """The same as a truth value."""
        value = self.take(field, key)
        return None if value is None else bool(value)

    def miss(self, field: str, code: int) -> None:
        """Note why a field is missing."""
        reason = reason_of(code)
        allow = _PERMISSION if reason is GapReason.DENIED else None
        self._gaps.add(reason, field, device=self._device, detail=name_of(code), allow=allow)

    def known(self, key: str) -> Any:
        """The answer, None where there is none; without a gap."""
        value = self.values.get(key)
        return None if _is_code(value) else value

    def table(self, fields: Mapping[str, str]) -> dict[str, Any]:
        """A record's fields by their keys."""
        return {field: self.take(field, key) for field, key in fields.items()}


def _is_code(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], int)


def section_of(group: Group, gaps: Gaps) -> tuple[NvmlSection, bool | None]:
    """The section without GPUs, and whether confidential computing is on."""
    answers = Answers(group.values, gaps, None)
    code = group.code("Init")
    cuda = answers.known("CudaDriverVersion")
    section = NvmlSection(
        init_error=None if code is None else name_of(code),
        init_error_code=code,
        init_detail=None if code is None else f"nvmlInit answered {name_of(code)}",
        init_ms=answers.known("init_ms"),
        library_path=answers.known("library"),
        nvml_version=answers.known("NVMLVersion"),
        driver_version=answers.take("driver_version", "DriverVersion"),
        device_count=answers.take("device_count", "Count"),
        cuda_driver_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )
    if code is not None:
        return section, None
    return section, answers.flag("confidential_compute", "ConfComputeState")


def gpu_fields(gpu: Gpu, group: Group, gaps: Gaps) -> dict[str, Any]:
    """Fields of Gpu from any group but the reading."""
    if group.group == "handle":
        return _handle(group, gaps, gpu)
    answers = Answers(group.values, gaps, gpu.key)
    return _GROUPS[group.group](answers)


def _handle(group: Group, gaps: Gaps, gpu: Gpu) -> dict[str, Any]:
    bus_id = group.values.get("PciInfo")
    pci = normalize_pci_address(bus_id) if isinstance(bus_id, str) else None
    if gpu.readings:  # a fresh child asks again; the reading checks whose index it is
        return {}
    answers = Answers(group.values, gaps, pci or gpu.key)
    if pci is None:
        answers.take("pci", "PciInfo")
    return {"pci": pci, **answers.table({"name": "Name", "uuid": "UUID"})}


def _identity(answers: Answers) -> dict[str, Any]:
    out = answers.table(_IDENTITY)
    for field, key in _FLAGS.items():
        out[field] = answers.flag(field, key)
    for field, later, key in (
        ("ecc_mode", "ecc_mode_pending", "EccMode"),
        ("mig_mode", "mig_mode_pending", "MigMode"),
    ):
        pair = answers.take(field, key)
        out[field], out[later] = (None, None) if pair is None else map(bool, pair)
    capability = answers.take("cuda_compute_capability", "CudaComputeCapability")
    if capability is not None:
        out["cuda_compute_capability"] = f"{capability[0]}.{capability[1]}"
    if isinstance(out["gsp_firmware_version"], str):
        out["gsp_firmware_version"] = out["gsp_firmware_version"].rstrip("\0") or None
    devices = answers.take("mig_instances", "Mig") or ()
    out["mig_instances"] = tuple(_mig_instance(Answers(d, Gaps(""), None)) for d in devices)
    fabric = answers.take("fabric", "Fabric")
    out["fabric"] = None if fabric is None else Fabric(**fabric)
    out["recovery_action"] = _recovery_action(answers)
    return out


def _mig_instance(answers: Answers) -> MigInstance:
    return MigInstance(
        uuid=answers.known("UUID"),
        gpu_instance_id=answers.known("GpuInstanceId"),
        compute_instance_id=answers.known("ComputeInstanceId"),
        memory_total_bytes=answers.known("Memory"),
    )


def _recovery_action(answers: Answers) -> int | None:
    """Field 230; before driver 570 the two fields that it replaced: reset, drain and reset."""
    reset, drain = answers.known("field.226"), answers.known("field.227")
    if answers.known("field.230") is None and (reset or drain):
        return 4 if drain else 1
    action = answers.take("recovery_action", "field.230")
    return action if isinstance(action, int) else None


def _limits(answers: Answers) -> dict[str, Any]:
    fields = answers.table(_LIMITS)
    span = answers.take("power_limit_min_mw", "PowerManagementLimitConstraints")
    low, high = span or (None, None)
    return {"limits": GpuLimits(power_limit_min_mw=low, power_limit_max_mw=high, **fields)}


def _memory(answers: Answers) -> dict[str, Any]:
    out: dict[str, Any] = {}
    rows = answers.take("row_remap", "RemappedRows")
    if rows is not None:
        banks = answers.take("banks_max", "RowRemapperHistogram") or (None,) * len(_BANKS)
        out["row_remap"] = RowRemap(
            correctable_rows=rows[0],
            uncorrectable_rows=rows[1],
            pending=bool(rows[2]),
            failure_occurred=bool(rows[3]),
            **dict(zip(_BANKS, banks, strict=True)),
        )
    single = answers.take("retired_pages", "RetiredPages.0")
    double = answers.take("retired_pages", "RetiredPages.1")
    if single is not None or double is not None:
        out["retired_pages"] = RetiredPages(
            multiple_single_bit=single,
            double_bit=double,
            pending=answers.flag("retired_pages", "RetiredPagesPendingStatus"),
        )
    sram = answers.take("sram_ecc", "SramEccErrorStatus")
    if sram is not None:
        out["sram_ecc"] = SramEcc(
            threshold_exceeded=bool(sram["bThresholdExceeded"]),
            **{field: sram[member] for field, member in _SRAM.items()},
        )
    return out


def _links(answers: Answers) -> dict[str, Any]:
    """None when the GPU has no NVLink. Field 165 also tells sleep; nvmlDeviceGetNvLinkState not."""
    states = answers.take("nvlinks", "states", "NvLinkState")
    if states is None:
        return {"nvlinks": None}
    links = []
    for link, state in enumerate(states):
        better = answers.known(f"field.165.{link}")
        remote = answers.known(f"NvLinkRemotePciInfo.{link}")
        links.append(
            NvLink(
                link=link,
                state=state if better is None else better,
                version=answers.known(f"NvLinkVersion.{link}"),
                speed_mbps=answers.known(f"field.164.{link}"),
                remote_pci=None if remote is None else normalize_pci_address(remote),
                remote_type=answers.known(f"NvLinkRemoteDeviceType.{link}"),
            )
        )
    return {"nvlinks": tuple(links)}


def _processes(answers: Answers) -> dict[str, Any]:
    """None when neither kind could be listed. One that does both is listed by what it computes."""
    found: dict[int, GpuProcess] = {}
    known = False
    for kind in ("Compute", "Graphics"):
        listed = answers.take("processes", f"{kind}RunningProcesses")
        known = known or listed is not None
        for pid, used in listed or ():
            memory = None if used == _NOT_AVAILABLE else used
            process = GpuProcess(pid=pid, kind=kind.lower(), used_memory_bytes=memory)
            found.setdefault(pid, process)
    return {"processes": tuple(found.values()) if known else None}


_GROUPS = {
    "identity": _identity, "limits": _limits, "memory": _memory, "links": _links,
    "processes": _processes,
}  # fmt: skip


def reading_of(answers: Answers, group: Group, links: int) -> tuple[GpuReading, dict[str, Any]]:
    """The reading group, and the static memory sizes that came with it."""
    fields = answers.table(_READING)
    for number, field in enumerate(_VIOLATIONS):
        fields[field] = answers.take(field, f"field.{74 + number}", f"ViolationStatus.{number}")
    for number, field in enumerate(_EVENT_REASONS):
        # by driver version 269-271, 251-253, or none of them
        keys = [f"field.{first + number}" for first in (269, 251)]
        fields[field] = answers.take(field, *keys)
        if group.slow is None and not any(key in group.values for key in keys):
            answers.miss(field, NOT_SUPPORTED)
    rates = answers.take("utilization_gpu_percent", "UtilizationRates")
    if rates is not None:
        fields["utilization_gpu_percent"], fields["utilization_memory_percent"] = rates
    memory = answers.take("memory_used_bytes", "MemoryInfo")
    static: dict[str, Any] = {}
    if memory is not None:
        static = {"memory_total_bytes": memory[0], "memory_reserved_bytes": memory[2]}
        fields["memory_used_bytes"] = memory[1]
    if links:
        fields |= answers.table(_TRAFFIC)
        fields["nvlink_errors"] = _link_errors(answers, links)
        if fields["nvlink_errors"] is None and group.slow is None:
            answers.miss("nvlink_errors", NOT_SUPPORTED)
    return GpuReading(at_ns=group.at_ns, **fields), static


def _link_errors(answers: Answers, links: int) -> tuple[NvLinkErrors, ...] | None:
    out = []
    for link in range(links):
        known: dict[str, Any] = {}
        for number, field in enumerate(_LINK_COUNTERS):
            known[field] = answers.known(f"field.{161 + number}.{link}") if number < 3 else None
            if known[field] is None:
                known[field] = answers.known(f"NvLinkErrorCounter.{link}.{number}")
        for field, number in _LINK_FIELDS.items():
            known[field] = answers.known(f"field.{number}.{link}")
        known["effective_ber"] = _rate(answers.known(f"field.220.{link}"))
        known["symbol_ber"] = _rate(answers.known(f"field.222.{link}"))
        out.append(NvLinkErrors(**known))
    return tuple(out) if any(each != NvLinkErrors() for each in out) else None


def _rate(packed: int | None) -> float | None:
    """A bit error rate: exponent in bits 0-7, mantissa in bits 8-11 (nvml.h, NVML_NVLINK_ERROR)."""
    if packed is None:
        return None
    mantissa, exponent = packed >> 8 & 0xF, packed & 0xFF
    return float(f"{mantissa}e-{exponent}")
