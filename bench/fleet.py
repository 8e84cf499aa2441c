"""Decode and judge a fleet's worth of snapshots: target <= 10 ms a node.

python -m bench.fleet SNAPSHOT.json [NODES]
"""

import sys
import time
from pathlib import Path

from agent.evaluate import evaluate
from agent.snapshot_file import decode_snapshot
from probes.registry import discover


def main() -> None:
    data = Path(sys.argv[1]).read_bytes()
    nodes = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    probes = discover()
    start = time.process_time()
    for _ in range(nodes):
        decode_snapshot(data, "node")
    decoded = time.process_time()
    for _ in range(nodes):
        evaluate(decode_snapshot(data, "node"), probes)
    judged = time.process_time()
    decode_ms = (decoded - start) / nodes * 1e3
    both_ms = (judged - decoded) / nodes * 1e3
    print(f"{nodes} nodes of {len(data) / 1024:.0f} KiB, {len(probes)} probes")
    print(f"decode {decode_ms:.2f} ms, decode and all probes {both_ms:.2f} ms a node")


if __name__ == "__main__":
    main()
