"""/proc/cpuinfo. Source: arch/x86/kernel/cpu/proc.c, arch/arm64/kernel/cpuinfo.c."""

from __future__ import annotations

import msgspec


class CpuInfo(msgspec.Struct, frozen=True):
    """One logical CPU; what the architecture does not print is None."""

    processor: int
    mhz: int | None
    package: int | None
    core: int | None


class CpuInfoFile(msgspec.Struct, frozen=True):
    """All CPUs, and what the first one says of the model."""

    cpus: tuple[CpuInfo, ...]
    model: str | None
    hypervisor: bool | None  # the x86 flag; None where no flags are printed


def parse_cpuinfo(text: str) -> CpuInfoFile:
    """Read the blocks that begin with ``processor``; lines of other shapes are passed over.

    ::

        processor   : 0
        model name  : Intel(R) Xeon(R) Platinum 8480C
        cpu MHz     : 3000.125
        physical id : 0
        core id     : 4
        flags       : fpu vme hypervisor
    """
    cpus: list[CpuInfo] = []
    model: str | None = None
    hypervisor: bool | None = None
    processor: int | None = None
    numbers: dict[str, float] = {}

    def close() -> None:
        if processor is not None:
            mhz = numbers.get("cpu MHz")
            cpus.append(
                CpuInfo(
                    processor,
                    None if mhz is None else round(mhz),
                    _whole(numbers.get("physical id")),
                    _whole(numbers.get("core id")),
                )
            )

    for line in text.split("\n"):
        key, colon, value = line.partition(":")
        if not colon:
            continue
        key = key.rstrip()
        if key == "processor":
            number = _number(value)
            close()
            numbers = {}
            processor = _whole(number)
        elif key in ("cpu MHz", "physical id", "core id"):
            if (number := _number(value)) is not None:
                numbers[key] = number
        elif key == "model name":
            model = model or value.strip() or None
        elif key == "flags" and hypervisor is None:
            hypervisor = " hypervisor " in f"{value} "
    close()
    return CpuInfoFile(tuple(cpus), model, hypervisor)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e9 else None  # also refuses nan and inf


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
