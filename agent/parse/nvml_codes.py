"""NVML return codes: names, and what they mean for a reading. Source: nvml.h, nvmlReturn_t."""

from __future__ import annotations

from probes.gap import GapReason
from probes.snapshot.gpu import GpuState

NOT_SUPPORTED = 3
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
UNKNOWN = 999

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

# INVALID_ARGUMENT: a sensor, link or clock that the part does not have. ABSENT: the GPU, or what
# was asked about, is not there to answer.
_REASONS = {
    2: GapReason.UNSUPPORTED,
    3: GapReason.UNSUPPORTED,
    4: GapReason.DENIED,
    6: GapReason.ABSENT,
    8: GapReason.ABSENT,
    10: GapReason.TIMEOUT,
    11: GapReason.ABSENT,
    13: GapReason.UNSUPPORTED,
    15: GapReason.ABSENT,
    16: GapReason.ABSENT,
    21: GapReason.ABSENT,
    22: GapReason.UNSUPPORTED,
    25: GapReason.UNSUPPORTED,
    26: GapReason.UNSUPPORTED,
    27: GapReason.ABSENT,
    28: GapReason.ABSENT,
}


def name_of(code: int) -> str:
    """The code's name in nvml.h, or the bare number."""
    return NAMES.get(code, f"NVML return code {code}")


def state_of(code: int) -> GpuState:
    """What a refused handle says of its GPU."""
    return _STATES.get(code, GpuState.UNKNOWN)


def reason_of(code: int, *, wsl: bool = False) -> GapReason:
    """Why a reading is missing when the call answered so.

    NVML_ERROR_UNKNOWN is a failure that the driver cannot name (nvidia-smi prints ``ERR!``), but
    on WSL it is what unsupported calls answer (gpuopenanalytics/pynvml#42).
    """
    if code == UNKNOWN and wsl:
        return GapReason.UNSUPPORTED
    return _REASONS.get(code, GapReason.MALFORMED)


def on_wsl(library_path: str | None) -> bool:
    """Whether the library is the one that Windows lends to its Linux guests."""
    return library_path is not None and library_path.startswith("/usr/lib/wsl/")
