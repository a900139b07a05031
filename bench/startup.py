"""What each part of the start costs: seconds and resident memory, in one process that loads the starter.

    python bench/startup.py [--model FOLDER]

The parts come in the order of the server's own start. The server imports torch while it verifies the checkpoint; here
one part waits for the other, so that each has its own line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Laps:
    """Prints a line for each part: its seconds, and the resident memory after it."""

    def __init__(self) -> None:
        self._last = self._begun = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        print(f"| {part} | {now - self._last:.2f} | {pages * PAGE_BYTES >> 20} |", flush=True)
        self._last = time.perf_counter()

    def end_all(self) -> None:
        print(f"| all | {time.perf_counter() - self._begun:.2f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint (default: the starter)")
    args = parser.parse_args()
    print("| part | seconds | resident MB |\n|---|---|---|")
    laps = Laps()
    from onepass.config import Config
    from onepass.loading import load, set_environment, warm_up

    config = Config(model=args.model) if args.model else Config()
    set_environment(config)
    laps.end("our own modules")
    import torch

    torch.set_grad_enabled(False)
    laps.end("torch")
    import transformers

    laps.end("transformers")
    transformers.AutoTokenizer  # noqa: B018 - it is imported when it is first named
    laps.end("its tokenizers")
    loaded = load(config)
    laps.end("the checkpoint: verified, loaded, measured")
    warm_up(loaded)
    laps.end("warm-up")
    laps.end_all()


if __name__ == "__main__":
    main()
