"""`laggard --version` against `python -I -c 'import click'`: target ratio <= 1.6.

python -m bench.start [RUNS]
"""

import subprocess
import sys
from pathlib import Path

from bench.timing import in_turn, table

PYTHON = sys.executable
LAGGARD = str(Path(PYTHON).parent / "laggard")


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    figures = in_turn(
        {
            "python -I -c 'import click'": [PYTHON, "-I", "-c", "import click"],
            "laggard --version": [LAGGARD, "--version"],
            "laggard explain": [LAGGARD, "explain"],
        },
        runs=runs,
    )
    print(table(figures, "python -I -c 'import click'"))
    count = "import sys, agent.cli; print(len(sys.modules))"
    for name, program in (("import click", "import sys, click; print(len(sys.modules))"),
                          ("import agent.cli", count)):  # fmt: skip
        done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True)
        print(f"modules after {name}: {done.stdout.strip()}")


if __name__ == "__main__":
    main()
