"""Who may import whom: probes <- collectives <- agent; heavy modules have one importer each."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPURE = {
    "os", "subprocess", "socket", "pathlib", "shutil", "time", "random", "urllib", "http",
    "logging", "threading", "asyncio", "multiprocessing", "tempfile", "secrets",
}  # fmt: skip


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def importers_of(module: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for package in ("agent", "probes", "collectives")
        for path in (ROOT / package).rglob("*.py")
        if any(name.split(".")[0] == module for name in imports_of(path))
    }


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", modules("probes"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_probes_are_pure(path: Path) -> None:
    allowed = (sys.stdlib_module_names - IMPURE) | {"msgspec", "probes"}
    assert {name for name in imports_of(path) if name.split(".")[0] not in allowed} == set()


@pytest.mark.parametrize("path", modules("probes"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_probes_open_nothing_and_print_nothing(path: Path) -> None:
    names = {
        node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
    }
    assert names & {"open", "print", "input", "exec", "eval", "__import__"} == set()


@pytest.mark.parametrize("path", modules("collectives"), ids=lambda p: p.name)
def test_collectives_never_import_agent(path: Path) -> None:
    assert not any(name.split(".")[0] == "agent" for name in imports_of(path))


@pytest.mark.parametrize("path", modules("agent/collect"), ids=lambda p: p.name)
def test_collectors_judge_nothing_and_report_nothing(path: Path) -> None:
    forbidden = ("probes.node", "probes.registry", "probes.result", "agent.report", "agent.cli")
    assert not [name for name in imports_of(path) if name.startswith(forbidden)]


@pytest.mark.parametrize("path", modules("agent/report"), ids=lambda p: p.name)
def test_reports_read_no_machine(path: Path) -> None:
    forbidden = ("agent.collect", "agent.host", "agent.run", "agent.cli", "probes.node")
    assert not [name for name in imports_of(path) if name.startswith(forbidden)]


@pytest.mark.parametrize("path", modules("agent/parse"), ids=lambda p: p.name)
def test_parsers_know_text_only(path: Path) -> None:
    forbidden = ("agent.host", "agent.collect", "agent.cli", "agent.report", "probes.node")
    assert not [name for name in imports_of(path) if name.startswith(forbidden)]


def test_each_heavy_module_has_one_importer() -> None:
    assert importers_of("pynvml") == {"agent/nvml_child.py"}
    assert importers_of("rich") <= {"agent/report/text.py"}
    assert len(importers_of("psutil")) <= 1
    assert importers_of("torch") == importers_of("numpy") == importers_of("jinja2") == set()


def test_the_command_line_starts_light() -> None:
    heavy = "torch numpy psutil pynvml rich jinja2 asyncio http urllib.request tomllib".split()
    program = f"import sys, agent.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
