"""The generated documents are what the code gives now."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.generated()


def test_files_are_current(generated: dict[str, str]) -> None:
    stale = [path for path, text in generated.items() if (ROOT / path).read_text() != text]
    assert stale == [], "run python docs/generate.py"


@pytest.mark.skipif(not shutil.which("man"), reason="man is not installed")
def test_the_man_page_renders(generated: dict[str, str]) -> None:
    done = subprocess.run(
        ["man", "--warnings", "-l", str(ROOT / "docs/man/laggard.1")],
        capture_output=True, text=True,
        env={"MANWIDTH": "80", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "troff" not in done.stderr
    assert "laggard check" in done.stdout
