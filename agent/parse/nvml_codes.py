"""NVML return codes: names, and what they mean for a reading. Source: nvml.h, nvmlReturn_t."""

from __future__ import annotations

from probes.gap import GapReason
from probes.snapshot.gpu import GpuState

LIBRARY_NOT_FOUND = 12

NAMES = {
    1: "NVML_ERROR_UNINITIALIZED",
    2: "NVML_ERROR_INVALID_ARGUMENT",
    3: "NVML_ERROR_NOT_SUPPORTED",
    4: "NVML_ERROR_NO_PERMISSION",
    5: "NVML_ERROR_ALREADY_INITIALIZED",
    6: "NVML_ERROR_NOT_FOUND",
    7: "NVML_ERROR_INSUFFICIENT_SIZE",
    8: "NVML_ERROR_INSUFFICIENT_POWER",
    9: "NVML_ERROR_DRIVER_NOT_LOADED",
    10: "NVML_ERROR_TIMEOUT",
    11: "NVML_ERROR_IRQ_ISSUE",
    12: "NVML_ERROR_LIBRARY_NOT_FOUND",
    13: "NVML_ERROR_FUNCTION_NOT_FOUND",
    14: "NVML_ERROR_CORRUPTED_INFOROM",
    15: "NVML_ERROR_GPU_IS_LOST",
    16: "NVML_ERROR_RESET_REQUIRED",
    17: "NVML_ERROR_OPERATING_SYSTEM",
    18: "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    19: "NVML_ERROR_IN_USE",
    20: "NVML_ERROR_MEMORY",
    21: "NVML_ERROR_NO_DATA",
    22: "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
    23: "NVML_ERROR_INSUFFICIENT_RESOURCES",
    24: "NVML_ERROR_FREQ_NOT_SUPPORTED",
    25: "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    26: "NVML_ERROR_DEPRECATED",
    27: "NVML_ERROR_NOT_READY",
    28: "NVML_ERROR_GPU_NOT_FOUND",
    29: "NVML_ERROR_INVALID_STATE",
    999: "NVML_ERROR_UNKNOWN",
    -1: "an answer that the binding could not decode",
}

_STATES = {
    4: GpuState.NO_PERMISSION,
    6: GpuState.NOT_FOUND,
    8: GpuState.INSUFFICIENT_POWER,
    11: GpuState.IRQ_ISSUE,
    15: GpuState.LOST,
    16: GpuState.RESET_REQUIRED,
    27: GpuState.NOT_READY,
    28: GpuState.NOT_FOUND,
}

# INVALID_ARGUMENT: a sensor, link or clock that the part does not have. UNKNOWN: what WSL answers
# for unsupported calls (gpuopenanalytics/pynvml#42) while its GPU works.
_REASONS = {
    2: GapReason.UNSUPPORTED,
    3: GapReason.UNSUPPORTED,
    4: GapReason.DENIED,
    6: GapReason.ABSENT,
    10: GapReason.TIMEOUT,
    13: GapReason.UNSUPPORTED,
    15: GapReason.ABSENT,
    21: GapReason.ABSENT,
    22: GapReason.UNSUPPORTED,
    25: GapReason.UNSUPPORTED,
    26: GapReason.UNSUPPORTED,
    999: GapReason.UNSUPPORTED,
}


def name_of(code: int) -> str:
    """The code's name in nvml.h, or the bare number."""
    return NAMES.get(code, f"NVML return code {code}")


def state_of(code: int) -> GpuState:
    """What a refused handle says of its GPU."""
    return _STATES.get(code, GpuState.UNKNOWN)


def reason_of(code: int) -> GapReason:
    """Why a reading is missing when the call answered so."""
    return _REASONS.get(code, GapReason.MALFORMED)
