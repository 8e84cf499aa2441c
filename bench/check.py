"""`laggard check --sample 0` against `nvitop -1` and `gpustat`, all on the 8-GPU double, in turn.

python -m bench.check [SCENARIO] [RUNS]    (needs gcc; pip install nvitop gpustat)
Targets: CPU of all processes <= 1.2 x nvitop's, largest process <= 45 MiB.
"""

import sys
import tempfile
from pathlib import Path

from bench.timing import in_turn, table
from tests.support.nvml_double import environment

BIN = Path(sys.executable).parent


def main() -> None:
    scenario = sys.argv[1] if len(sys.argv) > 1 else "h100x8_busy"
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 11
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        env = environment(scenario, Path(folder)) | {"XDG_STATE_HOME": str(state), "TERM": "xterm"}
        commands = {"nvitop -1": [str(BIN / "nvitop"), "-1"]}
        for output in ("json", "text", "line"):
            commands[f"laggard check ({output})"] = [
                str(BIN / "laggard"), "check", "--sample", "0", "--format", output,
            ]  # fmt: skip
        commands["gpustat"] = [str(BIN / "gpustat"), "--no-header"]
        print(f"scenario {scenario}, medians of {runs} runs in turn")
        print(table(in_turn(commands, runs=runs, env=env), "nvitop -1"))


if __name__ == "__main__":
    main()
