"""Two runs of the command on the NVML double: the second sees what the first one left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import nvml_double

ROOT = Path(__file__).resolve().parent.parent.parent
ID = "pcie.replay-growth"


def check(environ: dict[str, str], *argv: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "agent._launch", "check", "--sample", "0", "--only", ID,
         "--format", "json", *argv],
        cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def ids(report: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in report["findings"]}


def test_growth_between_two_runs_is_seen_and_nothing_is_sticky(
    nvml: nvml_double.Double, tmp_path: Path
) -> None:
    environ = nvml.environ("pcie_replays") | {"STATE_DIRECTORY": str(tmp_path)}
    assert ids(check(environ)) == set()  # one reading, no last run: no rate
    second = check(environ)
    assert ids(second) == {ID}
    assert second["findings"][0]["component"]["pci"] == "0000:1b:00.0"
    assert ids(check(environ, "--no-state")) == set()

    kept = tmp_path / "baseline.json"
    text = kept.read_text()
    boot = json.loads(text)["boot_id"]
    kept.write_text(text.replace(boot, "another-boot"))
    assert ids(check(environ)) == set()

    healthy = nvml.environ("h100x8_busy") | {"STATE_DIRECTORY": str(tmp_path)}
    assert ids(check(healthy)) == set()  # its counters are lower: they were reset
    assert ids(check(healthy)) == set()
