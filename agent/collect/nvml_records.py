"""Answers of the NVML child -> records of the snapshot. Pure."""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec

from agent.collect.gaps import Gaps
from agent.collect.nvml_answers import Answers, Group, as_number, is_code
from agent.parse.nvml_codes import FUNCTION_NOT_FOUND, NOT_SUPPORTED, name_of
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
    NvmlSection,
    RetiredPages,
    RowRemap,
    SramEcc,
)

_RESET, _DRAIN_AND_RESET = 1, 4  # of field 230
_MOST_GPUS = 1024  # more than that is no count
# the scope that adds all links up: NVML's 0xffffffff
_TRAFFIC = {"nvlink_tx_kib": "field.138.4294967295", "nvlink_rx_kib": "field.139.4294967295"}
_TEXTS = {
    "serial": "Serial", "board_part_number": "BoardPartNumber", "vbios_version": "VbiosVersion",
    "inforom_image_version": "InforomImageVersion", "gsp_firmware_version": "GspFirmwareVersion",
}  # fmt: skip
_NUMBERS = {
    "architecture": "Architecture", "minor_number": "MinorNumber", "module_id": "ModuleId",
    "virtualization_mode": "VirtualizationMode", "compute_mode": "ComputeMode",
    "c2c_link_count": "field.170",
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
_FABRIC = ("state", "status", "health_mask", "health_summary", "clique_id")
_SRAM = {
    "volatile_uncorrectable_parity": "volatileUncParity",
    "volatile_uncorrectable_sec_ded": "volatileUncSecDed", "volatile_correctable": "volatileCor",
    "aggregate_uncorrectable_parity": "aggregateUncParity",
    "aggregate_uncorrectable_sec_ded": "aggregateUncSecDed",
    "aggregate_correctable": "aggregateCor",
}  # fmt: skip


def section_of(group: Group, gaps: Gaps) -> tuple[NvmlSection, bool | None]:
    """The section without GPUs, and whether confidential computing is on."""
    answers = Answers(group.values, gaps, None)
    code = group.code("Init")
    cuda = answers.known("CudaDriverVersion")
    took_ms = group.values.get("init_ms")
    if not isinstance(took_ms, (int, float)) or not 0 <= took_ms < 1e12:
        took_ms = None
    section = NvmlSection(
        init_error=None if code is None else name_of(code),
        init_error_code=code,
        init_detail=None if code is None else f"nvmlInit answered {name_of(code)}",
        init_ms=None if took_ms is None else float(took_ms),
        library_path=answers.known_text("library"),
        nvml_version=answers.known_text("NVMLVersion"),
        driver_version=answers.text("driver_version", "DriverVersion"),
        device_count=answers.take("device_count", "Count"),
        cuda_driver_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
    )
    if section.device_count is not None and not 0 <= section.device_count <= _MOST_GPUS:
        detail = f"the driver counts {section.device_count} GPUs"
        gaps.add(GapReason.MALFORMED, "device_count", detail=detail)
        section = msgspec.structs.replace(section, device_count=None)
    if code is not None:
        return section, None
    return section, answers.flag("confidential_compute", "ConfComputeState")


def gpu_fields(gpu: Gpu, group: Group, gaps: Gaps, *, wsl: bool = False) -> dict[str, Any]:
    """Fields of Gpu from any group but the reading."""
    if group.group == "handle":
        return _handle(group, gaps, gpu)
    fill = _GROUPS.get(group.group)
    return fill(Answers(group.values, gaps, gpu.key, wsl=wsl)) if fill else {}


def _handle(group: Group, gaps: Gaps, gpu: Gpu) -> dict[str, Any]:
    if gpu.readings:  # a fresh child asks again; the reading checks whose index it is
        return {}
    bus_id = group.values.get("PciInfo")
    pci = normalize_pci_address(bus_id) if isinstance(bus_id, str) else None
    answers = Answers(group.values, gaps, pci or gpu.key)
    if pci is None:
        answers.take("pci", "PciInfo")
    return {"pci": pci, "name": answers.text("name", "Name"), "uuid": answers.text("uuid", "UUID")}


def _identity(answers: Answers) -> dict[str, Any]:
    out = answers.table(_NUMBERS)
    for field, key in _TEXTS.items():
        out[field] = answers.text(field, key)
    for field, key in _FLAGS.items():
        out[field] = answers.flag(field, key)
    for field, key in (("ecc_mode", "EccMode"), ("mig_mode", "MigMode")):
        pair = (field, f"{field}_pending")
        for name, value in zip(pair, answers.several(pair, key), strict=True):
            out[name] = None if value is None else bool(value)
    major, minor = answers.several(("cuda_compute_capability",) * 2, "CudaComputeCapability")
    if major is not None and minor is not None:
        out["cuda_compute_capability"] = f"{major}.{minor}"
    out["mig_instances"] = tuple(
        _mig_instance(Answers(device, Gaps(""), None))
        for device in answers.items("mig_instances", "Mig") or ()
        if isinstance(device, dict)
    )
    fabric = answers.inner("fabric", "Fabric")
    if fabric is not None:
        out["fabric"] = Fabric(
            cluster_uuid=fabric.known_text("cluster_uuid"),
            **{name: fabric.known(name) for name in _FABRIC},
        )
    out["recovery_action"] = _recovery_action(answers)
    return out


def _mig_instance(answers: Answers) -> MigInstance:
    return MigInstance(
        uuid=answers.known_text("UUID"),
        gpu_instance_id=answers.known("GpuInstanceId"),
        compute_instance_id=answers.known("ComputeInstanceId"),
        memory_total_bytes=answers.known("Memory"),
    )


def _recovery_action(answers: Answers) -> int | None:
    """Field 230; before driver 570 the two fields that it replaced: reset, drain and reset."""
    reset, drain = answers.known("field.226"), answers.known("field.227")
    if answers.known("field.230") is None and reset is not None and drain is not None:
        return _DRAIN_AND_RESET if drain else _RESET if reset else 0
    return answers.take("recovery_action", "field.230")


def _limits(answers: Answers) -> dict[str, Any]:
    span = ("power_limit_min_mw", "power_limit_max_mw")
    bounds = answers.several(span, "PowerManagementLimitConstraints")
    return {"limits": GpuLimits(**answers.table(_LIMITS), **dict(zip(span, bounds, strict=True)))}


def _memory(answers: Answers) -> dict[str, Any]:
    out: dict[str, Any] = {}
    correctable, uncorrectable, pending, failed = answers.several(
        ("row_remap",) * 4, "RemappedRows"
    )
    if (correctable, uncorrectable, pending, failed) != (None,) * 4:
        out["row_remap"] = RowRemap(
            correctable_rows=correctable,
            uncorrectable_rows=uncorrectable,
            pending=None if pending is None else bool(pending),
            failure_occurred=None if failed is None else bool(failed),
            **dict(zip(_BANKS, answers.several(_BANKS, "RowRemapperHistogram"), strict=True)),
        )
    single = answers.take("retired_pages", "RetiredPages.0")
    double = answers.take("retired_pages", "RetiredPages.1")
    if single is not None or double is not None:
        out["retired_pages"] = RetiredPages(
            multiple_single_bit=single,
            double_bit=double,
            pending=answers.flag("retired_pages", "RetiredPagesPendingStatus"),
        )
    sram = answers.inner("sram_ecc", "SramEccErrorStatus")
    if sram is not None:
        exceeded = sram.known("bThresholdExceeded")
        out["sram_ecc"] = SramEcc(
            threshold_exceeded=None if exceeded is None else bool(exceeded),
            **{field: sram.known(member) for field, member in _SRAM.items()},
        )
    return out


def _links(answers: Answers) -> dict[str, Any]:
    """None when the GPU has no NVLink. Field 165 also tells sleep; nvmlDeviceGetNvLinkState not."""
    states = answers.values.get("states")
    if not isinstance(states, list):
        answers.take("nvlinks", "NvLinkState")
        return {"nvlinks": None}
    links = []
    for link, state in enumerate(states):
        better = answers.known(f"field.165.{link}")
        remote = answers.known_text(f"NvLinkRemotePciInfo.{link}")
        found = NvLink(
            link=link,
            state=as_number(state) if better is None else better,
            version=answers.known(f"NvLinkVersion.{link}"),
            speed_mbps=answers.known(f"field.164.{link}"),
            remote_pci=None if remote is None else normalize_pci_address(remote),
            remote_type=answers.known(f"NvLinkRemoteDeviceType.{link}"),
        )
        if found.state is None and is_code(state):
            answers.miss(state[0], "nvlinks")
        links.append(found)
    if links and all(link.speed_mbps is None for link in links):
        answers.take("nvlinks", "field.164.0")
    return {"nvlinks": tuple(links)}


def _processes(answers: Answers) -> dict[str, Any]:
    """None when neither kind could be listed. One that does both is listed by what it computes."""
    found: dict[int, GpuProcess] = {}
    known = False
    for kind in ("Compute", "Graphics"):
        listed = answers.items("processes", f"{kind}RunningProcesses")
        known = known or listed is not None
        for entry in listed or ():
            pid, used = map(as_number, entry) if _is_pair(entry) else (None, None)
            if pid is None:
                continue
            process = GpuProcess(pid=pid, kind=kind.lower(), used_memory_bytes=used)
            found.setdefault(pid, process)
    return {"processes": tuple(found.values()) if known else None}


def _is_pair(entry: object) -> TypeGuard[list[Any]]:
    return isinstance(entry, list) and len(entry) == 2


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
            answers.miss(NOT_SUPPORTED, field)
    rates = ("utilization_gpu_percent", "utilization_memory_percent")
    fields |= zip(rates, answers.several(rates, "UtilizationRates"), strict=True)
    sizes = ("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes")
    static: dict[str, Any] = dict(zip(sizes, answers.several(sizes, "MemoryInfo"), strict=True))
    fields["memory_used_bytes"] = static.pop("memory_used_bytes")
    if fields["memory_used_bytes"] is not None and static["memory_reserved_bytes"] is None:
        answers.miss(FUNCTION_NOT_FOUND, "memory_reserved_bytes")  # the call's second version
    if links:
        fields |= answers.table(_TRAFFIC)
        fields["nvlink_errors"] = _link_errors(answers, links)
        if fields["nvlink_errors"] is None and group.slow is None:
            answers.take("nvlink_errors", "NvLinkErrorCounter.0.0", "field.219.0", "field.161.0")
    else:
        answers.miss(NOT_SUPPORTED, "nvlink_errors", *_TRAFFIC)  # as the link states say
    return GpuReading(at_ns=group.at_ns, **fields), static


def _link_errors(answers: Answers, links: int) -> tuple[NvLinkErrors, ...] | None:
    # only Blackwell is asked for these
    newer = any(f"field.{number}.0" in answers.values for number in (*_LINK_FIELDS.values(), 220))
    out = []
    for link in range(links):
        known: dict[str, Any] = {}
        for number, field in enumerate(_LINK_COUNTERS):
            known[field] = answers.known(f"field.{161 + number}.{link}") if number < 3 else None
            if known[field] is None:
                known[field] = answers.known(f"NvLinkErrorCounter.{link}.{number}")
        if newer:
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
