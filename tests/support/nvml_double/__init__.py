"""A test double of libnvidia-ml.so.1: a small C library that the real pynvml loads.

``build(workdir)`` compiles it once (gcc); ``Double.environ(scenario)`` gives the environment in
which a child process finds it instead of a driver::

    subprocess.run([sys.executable, "-c", "import pynvml; ..."],
                   env=os.environ | nvml_double.environ("h100x8"))

pynvml binds its library once per process, so each scenario needs a process of its own.

A scenario is a text file, one ``key = value`` a line, ``#`` comments. **The last line that matches
wins**, so a scenario includes a model and overrides what differs::

    include = models/h100.scn      # relative to this file
    gpus = 8                       # how many GPUs; also driver, cuda (12040), hide
    [gpu 3]                        # what follows is for GPU 3 ("[gpu 0,4-7]", "[all]")
    ClockInfo.1 = 345              # nvmlDeviceGetClockInfo(device, 1)

Keys are the function's name without ``nvmlDeviceGet`` and without ``_v2``, then its arguments;
``*`` and ranges match (``NvLinkState.0-17``), left-out arguments match anything. A key that the
scenario does not have answers NVML_ERROR_NOT_SUPPORTED. Special keys:

====================  ==============================================================================
``driver``            version; decides which symbols, field ids and struct versions exist
``hide``              symbols (blank separated) that this library lacks besides
``Init``              nvmlInit; ``!DRIVER_NOT_LOADED``, ``~hang``
``Handle``            nvmlDeviceGetHandleBy*; ``!GPU_IS_LOST``
``*``                 every call on the GPU, first: ``!15``, ``~hang``, ``~300ms ok`` (any value: go on)
``pci``               address, ``0000:1b:00.0``
``field.ID[.SCOPE]``  nvmlDeviceGetFieldValues, ``type:value`` with double uint ulong ull sll int
                      ushort (a fitting one is the default). Fields that repeat a function (83
                      energy, 94 replays, 165 link state ...) answer from the function's key.
``field.sw_thermal``  also ``hw_thermal``, ``hw_power_brake``: the event reason counters that moved
                      from ids 251-253 to 269-271 with driver 580.82 and do not exist before 575
``mig.KEY.N``         a key of MIG device N under the GPU; it exists when ``mig.UUID.N`` does
====================  ==============================================================================

Values:

====================  ==============================================================================
``980``, ``0x1f``     a number, ``80GiB`` ``MiB`` ``KiB``; ``-`` is "not available"; several numbers
                      blank separated where the call gives several
``^BASE+RATE``        grows by RATE a second from the moment ``environ`` was called;
                      ``^BASE+RATE/call`` grows with each call
``a | b``             alternates from call to call
``@ a, b, c``         one per GPU
``{i}``               the GPU's index; ``${NAME}`` an environment variable
``!CODE``             the call returns that code, by number or name (``!NO_PERMISSION``)
``~300ms VALUE``      the call takes so long first
``~hang``             never returns; ``~hang-hard`` ignores every signal but SIGKILL; ``~hang-d``
                      also shows state D in /proc, as a call stuck in the driver does (it differs
                      from the real thing in that SIGKILL ends it)
``?N: a : b``         ``a`` for the first N calls of a process, then ``b``
====================  ==============================================================================

``environ(..., log=PATH)`` also writes one line per call, ``gpu0 ClockInfo.1 0`` (the code last,
-1 for a call that never returns), from which a test counts what a collector asks for.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE.parent.parent / "scenarios"
SOURCES = ("nvml.c", "nvml_memory.c", "nvml_links.c", "scenario.c")
HEADERS = ("nvml.h", "scenario.h")
SONAME = "libnvidia-ml.so.1"

# API(535) nvmlFoo(  and the getters made by a macro: UINT(535, Foo), PROCESSES(510, Foo, _v3)
_EXPLICIT = re.compile(r"^API\((\d+)\) (nvml\w+)\(", re.MULTILINE)
_BY_MACRO = re.compile(r"^(?!#)[A-Z0-9]+\((\d+), (\w+)(?:, (\w+))?\)$", re.MULTILINE)


def why_unavailable() -> str | None:
    """The reason to skip, or None when the double can be built here."""
    if shutil.which("gcc") is None:
        return "the NVML double is a C library and needs gcc, which is not on PATH"
    return None


def scenario_path(scenario: str | Path) -> Path:
    """A name of tests/scenarios, or a path."""
    path = Path(scenario)
    return path if path.suffix == ".scn" else SCENARIOS / f"{scenario}.scn"


def exported_functions() -> dict[str, int]:
    """Every function of the double and the driver branch that first exports it."""
    source = "\n".join((HERE / name).read_text() for name in SOURCES)
    found = {name: int(since) for since, name in _EXPLICIT.findall(source)}
    for since, name, suffix in _BY_MACRO.findall(source):
        found[f"nvmlDeviceGet{name}{suffix}"] = int(since)
    found["nvmlErrorString"] = 0
    return found


@dataclass(frozen=True)
class Double:
    """The compiled double; a library per set of symbols is linked when first asked for."""

    workdir: Path

    def library_dir(self, scenario: str | Path) -> Path:
        """The directory with a libnvidia-ml.so.1 that has the symbols of the scenario's driver."""
        settings = _settings(scenario_path(scenario))
        branch = int(settings.get("driver", "0").split(".")[0])
        hidden = set(settings.get("hide", "").split())
        names = [n for n, since in exported_functions().items() if since <= branch] + ["nvmlInit"]
        names = sorted(set(names) - hidden)
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
        folder = self.workdir / digest
        if not (folder / SONAME).exists():
            folder.mkdir(exist_ok=True)
            script = folder / "symbols.map"
            script.write_text("{ global: " + " ".join(f"{n};" for n in names) + " local: *; };\n")
            objects = [str(self.workdir / f"{Path(name).stem}.o") for name in SOURCES]
            link = ["gcc", "-shared", f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={script}"]
            _run([*link, "-o", str(folder / "linking"), *objects])
            (folder / "linking").rename(folder / SONAME)
        return folder

    def environ(self, scenario: str | Path, log: Path | None = None) -> dict[str, str]:
        """What to put into the environment of the process that is to see the scenario."""
        variables = {
            "LD_LIBRARY_PATH": str(self.library_dir(scenario)),
            "LAGGARD_NVML_DOUBLE_SCENARIO": str(scenario_path(scenario)),
            "LAGGARD_NVML_DOUBLE_EPOCH_NS": str(time.monotonic_ns()),
        }
        if log is not None:
            variables["LAGGARD_NVML_DOUBLE_LOG"] = str(log)
        return variables


def build(workdir: Path) -> Double:
    """Compile the double into ``workdir``, once per state of its source."""
    files = [HERE / name for name in SOURCES + HEADERS]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    target = workdir / digest[:16]
    if not target.exists():
        building = Path(tempfile.mkdtemp(dir=workdir))
        flags = ["-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-c"]
        _run(["gcc", *flags, *(str(HERE / name) for name in SOURCES)], cwd=building)
        building.rename(target)
    return Double(target)


def environment(scenario: str | Path, workdir: Path) -> dict[str, str]:
    """``build`` and ``environ`` in one, for a caller that is no test."""
    reason = why_unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    return build(workdir).environ(scenario)


def calls(log: Path) -> list[str]:
    """The lines of a call log; none when nothing was called."""
    return log.read_text().splitlines() if log.exists() else []


def _settings(path: Path) -> dict[str, str]:
    """``driver`` and ``hide`` of a scenario, read through its includes: the last one wins."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.split("#")[0].partition("=")
        if equals and key.strip() == "include":
            found.update(_settings(path.parent / value.strip()))
        elif equals and key.strip() in ("driver", "hide"):
            found[key.strip()] = value.strip()
    return found


def _run(argv: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stderr}")
