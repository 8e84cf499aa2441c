"""What each Xid and SXid means and what the driver's vendor says to do.

Source: NVIDIA's Xid catalog (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html)
and, for 173 to 176, nverror.h of open-gpu-kernel-modules 595.45.04. Meanings are ours.
"""

from __future__ import annotations

import enum

import msgspec

CATALOG_VERSION = "2026-08 (catalog of 172 Xids; nverror.h 595.45.04)"


class XidClass(str, enum.Enum):
    """What a code asks for."""

    APP = "application"  # a process did something illegal, or its channel was torn down
    INFO = "information"  # an event, or the by-product of another one
    SYMPATHETIC = "detail of another Xid"
    SOFTWARE = "software or firmware"
    RESET = "reset the GPU"
    REBOOT = "reboot the node"
    RESTART_VM = "restart the virtual machine"
    LINK = "NVLink error, by its registers"
    REPAIR = "memory repair"
    CONTAINED = "contained memory error"
    HARDWARE = "hardware support"
    ACTION = "the driver's own recovery action"
    UNKNOWN = "unknown"


class Xid(msgspec.Struct, frozen=True):
    """One code. ``probe`` is the id of the finding that an unexcused one leads to."""

    name: str
    meaning: str
    kind: XidClass
    action: str  # NVIDIA's immediate action, its own word
    probe: str = "xid.app"
    recovery_since: int | None = None  # driver branch from which Xid 154 tells the action with it


def _app(name: str, meaning: str, action: str = "RESTART_APP") -> Xid:
    return Xid(name, meaning, XidClass.APP, action)


def _info(name: str, meaning: str, action: str = "IGNORE") -> Xid:
    return Xid(name, meaning, XidClass.INFO, action)


def _software(name: str, meaning: str, action: str = "UPDATE_SWFW") -> Xid:
    return Xid(name, meaning, XidClass.SOFTWARE, action)


def _reset(
    name: str, meaning: str, since: int | None = None, probe: str = "xid.reset-required"
) -> Xid:
    return Xid(name, meaning, XidClass.RESET, "RESET_GPU", probe, since)


def _link(unit: str) -> Xid:
    meaning = f"NVLink 5 error, unit {unit}"
    return Xid(f"NVLINK_{unit}", meaning, XidClass.LINK, "WORKFLOW_NVLINK5", "xid.nvlink", 565)


def _repair(name: str, meaning: str, action: str, since: int) -> Xid:
    return Xid(name, meaning, XidClass.REPAIR, action, "xid.row-remap", since)


def _engines(codes: str, name: str, engine: str, first: int = 0) -> dict[int, Xid]:
    return {
        int(code): _app(f"{name}{number}_ERROR", f"{engine} {number} error")
        for number, code in enumerate(codes.split(), first)
    }


XIDS: dict[int, Xid] = {
    8: _app("FIFO_ERROR_IDLE_TIMEOUT", "channel idle timeout"),
    11: _app("GR_ERROR_MISSING_HW", "push buffer names a missing hardware method"),
    13: _app("GR_EXCEPTION", "graphics or compute exception (illegal address or instruction)"),
    25: _app("GR_ILLEGAL_NOTIFY", "illegal notify in the push buffer"),
    31: _app("FIFO_ERROR_MMU_ERR_FLT", "MMU fault: the process used an illegal address"),
    32: _app("PBDMA_ERROR", "push buffer stream corrupt"),
    37: _info("FECS_ERR_UNIMP_FIRMWARE_METHOD", "method the FECS firmware does not know"),
    38: _info("FECS_ERR_WATCHDOG_TIMEOUT", "FECS firmware watchdog"),
    43: _app("RESETCHANNEL_VERIF_ERROR", "the process faulted and its channel was reset", "IGNORE"),
    44: _info("GR_FAULT_DURING_CTXSW", "graphics fault during a context switch"),
    45: _info("PREEMPTIVE_REMOVAL", "channel torn down after an earlier error or a kill", "FOLLOW"),
    46: _reset("GPU_TIMEOUT_ERROR", "GPU engine timeout"),
    48: _reset("GPU_ECC_DBE", "uncorrectable ECC error", 565, "xid.memory-error"),
    54: Xid(
        "SILENT_RUNNING_PWR_REDUCED_CLOCKING", "auxiliary power is not connected",
        XidClass.HARDWARE, "CHECK_MECHANICALS", "xid.hardware",
    ),
    60: _app("SEC2_ERROR", "SEC2 or video processor exception"),
    62: _reset("PMU_HALT_ERROR", "power management controller halted", 565),
    63: _repair("INFOROM_DRAM_RETIREMENT_EVENT", "memory row marked for remapping", "IGNORE", 565),
    64: _repair("INFOROM_DRAM_RETIREMENT_FAILURE", "row remapping failed", "RESET_GPU", 565),
    66: _info("FECS_ERR_REG_ACCESS_VIOLATION", "illegal register access by the driver"),
    67: _info("FECS_ERR_VERIF_VIOLATION", "FECS verification violation"),
    68: _app("NVDEC0_ERROR", "video decoder 0 exception"),
    69: _app("GR_CLASS_ERROR", "engine class error"),
    74: Xid(
        "NVLINK_ERROR", "NVLink error", XidClass.LINK, "WORKFLOW_XID_74", "xid.nvlink", 565,
    ),
    78: _software("VGPU_START_ERROR", "vGPU did not start, or guest and host driver differ"),
    79: Xid(
        "GPU_HAS_FALLEN_OFF_THE_BUS", "GPU has fallen off the bus", XidClass.REBOOT, "RESTART_BM",
        "xid.off-bus", 565,
    ),
    80: _app("PBDMA_PUSHBUFFER_CRC_MISMATCH", "push buffer checksum mismatch"),
    86: _app("OFA0_ERROR", "optical flow engine 0 error"),
    92: _info("EXCESSIVE_SBE_INTERRUPTS", "high rate of corrected ECC errors; watch the rate"),
    93: _info("INFOROM_ERASE_LIMIT_EXCEEDED", "InfoROM wear limit"),
    94: Xid(
        "CONTAINED_ERROR", "uncorrectable memory error contained to one process",
        XidClass.CONTAINED, "RESTART_APP", "xid.contained-memory-error", 565,
    ),
    95: _reset("UNCONTAINED_ERROR", "uncontained memory error", 565, "xid.memory-error"),
    106: _info("SMBPBI_TEST_MESSAGE", "management bus test message"),
    107: _info("SMBPBI_TEST_MESSAGE_SILENT", "management bus test message"),
    109: _reset("CTXSW_TIMEOUT_ERROR", "context switch timeout", 570),
    110: _reset("SEC_FAULT_ERROR", "security fault", 565),
    119: _reset("GSP_RPC_TIMEOUT", "the GPU's firmware processor does not answer", None, "xid.gsp"),
    120: _reset("GSP_ERROR", "error of the GPU's firmware processor", 565, "xid.gsp"),
    121: _info("C2C_ERROR", "corrected error of the CPU-GPU link"),
    136: _reset("ALI_TRAINING_FAIL", "NVLink training failed", 565, "xid.nvlink"),
    137: _app("NVLINK_PRIV_ERR", "peer access over NVLink to an illegal address", "IGNORE"),
    139: _app("OFA1_ERROR", "optical flow engine 1 error"),
    140: _reset(
        "UNRECOVERABLE_ECC_ERROR_ESCAPE", "ECC error escaped containment", None, "xid.memory-error"
    ),
    141: _info("FAST_PATH_ERROR", "CUDA fast path error"),
    142: Xid(
        "NVENC3_ERROR", "video encoder 3 error", XidClass.HARDWARE, "CONTACT_SUPPORT",
        "xid.hardware",
    ),
    143: _reset("GPU_INIT_ERROR", "GPU initialisation failed", 575),
    144: _link("SAW"),
    145: _link("RLW"),
    146: _link("TLW"),
    147: _link("TREX"),
    148: _link("NVLPW_CTRL"),
    149: _link("NETIR"),
    150: _link("MSE"),
    151: Xid(
        "KEY_ROTATION_ERROR", "key rotation of confidential computing failed", XidClass.RESTART_VM,
        "RESTART_VM", "xid.reboot-required",
    ),
    152: _info("DLA_SMMU_ERROR", "DLA memory management error"),
    153: _info("DLA_TIMEOUT", "DLA timeout"),
    154: Xid(
        "GPU_RECOVERY_ACTION_CHANGED", "the driver's recovery action changed", XidClass.ACTION,
        "FOLLOW", "xid.recovery-action",
    ),
    155: _reset("NVLINK_SW_DEFINED_ERROR", "software took an NVLink down", 565, "xid.nvlink"),
    156: _repair("RESOURCE_RETIREMENT_EVENT", "memory resource retired", "RESET_GPU", 565),
    157: _repair("RESOURCE_RETIREMENT_FAILURE", "retirement failed: no spare left", "IGNORE", 565),
    158: _reset("GPU_FATAL_TIMEOUT", "fatal timeout of the GPU", 565),
    159: _software("CHI_NON_DATA_ERROR", "CPU-GPU link error without data", "CHECK_UVM"),
    160: _repair("CHANNEL_RETIREMENT_EVENT", "memory channel retired", "IGNORE", 575),
    161: _repair("CHANNEL_RETIREMENT_FAILURE", "channel retirement failed", "IGNORE", 575),
    162: _info("PSHC_REENGAGED", "power smoothing engaged again"),
    163: _info("PSHC_DISENGAGED", "power smoothing disengaged"),
    164: _info("PSHC_LOW_LIFETIME", "power smoothing wear: little lifetime left"),
    165: _info("PSHC_ZERO_LIFETIME", "power smoothing wear: lifetime used up"),
    166: _software("NVLINK_SECURE_CRYPTO_ERR", "NVLink used before its secure setup", "-"),
    167: Xid("PCIE_FATAL_TIMEOUT", "fatal PCIe timeout", XidClass.REBOOT, "-", "xid.off-bus"),
    168: _software("REDUCED_GPU_MEMORY_CAPACITY", "less memory than nominal: enable ECC", "-"),
    169: _reset("SEC2_HALT_ERROR", "SEC2 processor halted"),
    170: _software("NVLINK_SECURE_OTHER", "NVLink interrupt in confidential mode", "-"),
    171: Xid(
        "UNCORRECTABLE_DRAM_ERROR", "detail of an uncorrectable DRAM error", XidClass.SYMPATHETIC,
        "-", "xid.memory-error",
    ),
    172: Xid(
        "UNCORRECTABLE_SRAM_ERROR", "detail of an uncorrectable SRAM error", XidClass.SYMPATHETIC,
        "-", "xid.memory-error",
    ),
    173: _reset("C2C_FATAL_LINK_FAILURE", "fatal failure of the CPU-GPU link"),
    174: _info("RESETCHANNEL_KILL_PROCESS_SILENT", "a process was killed", "-"),
    **_engines("39 40 41 70 71 72 75 76 77 85", "CE", "copy engine"),
    **_engines("126 127 128 129 130 131 132 133 134 135", "CE", "copy engine", 10),
    **_engines("82 99 100 101 102 103 104 105", "NVJPG", "JPEG engine"),
    **_engines("83 84 88 89 96 97 98", "NVDEC", "video decoder", 1),
}  # fmt: skip

# Names that the driver's header has and the catalog says nothing of: shown, never judged.
UNJUDGED_NAMES = {
    175: "MEMORY_SUBSYSTEM_ERROR",
    176: "PCIE_CORRECTABLE_ERROR_FAULT",
}


def xid(code: int) -> Xid:
    """The entry of a code; one that the catalog does not use or know is UNKNOWN, never fatal."""
    found = XIDS.get(code)
    if found is not None:
        return found
    name = UNJUDGED_NAMES.get(code, "")
    return Xid(name, "not in the catalog", XidClass.UNKNOWN, "-", "xid.unknown")


# Consequences of another fault: they join it when one is near, and accuse nobody by themselves.
BY_PRODUCTS = frozenset({43, 45})
# An application's illegal access, which a broken part of the GPU can also cause (W13, W31): the
# exception, the MMU fault, and the engines that the catalog sends to support when they repeat.
PATTERN = frozenset({13, 31, 32, 80, 86, 139}) | frozenset(
    code for code, entry in XIDS.items() if entry.name.startswith(("CE", "NVJPG", "NVDEC"))
)


def _codes(text: str) -> frozenset[int]:
    out: set[int] = set()
    for part in text.split():
        first, _, last = part.partition("-")
        out.update(range(int(first), int(last or first) + 1))
    return frozenset(out)


# SXids that stop traffic through the switch. The driver's own word on the line (Fatal, Non-fatal)
# comes first; this decides where the line has none.
SXIDS_ALWAYS_FATAL = _codes("11004 12020 12028 19084 22003 22011 23001-23017")
