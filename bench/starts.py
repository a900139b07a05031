"""Which choices the server makes at its start, on a quiet machine and beside processes that keep the cores busy.

    python bench/starts.py [--starts 20] [--busy 2] [--model FOLDER]

Each start is a process of its own that loads the checkpoint as the server does. Printed is how many starts made each
choice, and the time from the process's begin to the end of the warm-up. A choice that depends on what else runs on the
machine shows as two lines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRON = {**os.environ, "HF_HUB_OFFLINE": "1"}
START = """
import json, sys
from onepass.config import Config
from onepass.loading import load, warm_up
loaded = load(Config(model=sys.argv[1]) if sys.argv[1] else Config())
warm_up(loaded)
facts = loaded.engine.describe().document()
names = {name: reason.split(":")[0] for name, reason in facts["tuning"].items()}
print(json.dumps({**names, "dtype": facts["dtype"], "launch_tokens": facts["launch_tokens"]}))
"""


@contextmanager
def kept_busy(num_processes: int) -> Iterator[None]:
    """So many processes that compute without a pause."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start(model: str) -> tuple[str, float]:
    """The choices of one start as a line, and its seconds."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", START, model]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, check=True)
    choices = json.loads(done.stdout.splitlines()[-1])
    return ", ".join(f"{name} {value}" for name, value in choices.items()), time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep the cores busy (default: 2)")
    parser.add_argument("--model", default="", help="checkpoint (default: the starter)")
    args = parser.parse_args()
    print("| machine | choices | starts | seconds, median |")
    print("|---|---|---|---|")
    for machine, num_processes in (("quiet", 0), (f"{args.busy} busy processes", args.busy)):
        with kept_busy(num_processes):
            runs = [start(args.model) for _ in range(args.starts)]
        for choices, count in Counter(choices for choices, _ in runs).most_common():
            seconds = statistics.median(seconds for found, seconds in runs if found == choices)
            print(f"| {machine} | {choices} | {count} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
