"""How much a request's answer depends on what shares its batch, and what it costs that it does not.

    python bench/determinism.py [--requests 1000] [--dtype float32 bfloat16] [--model FOLDER]

Each request is one row, asked as the server asks the engine: alone; in a full batch; padded, beside a row four times
longer; beside a row fifty times longer. Printed are the largest difference of a probability from the row alone, the
number of requests whose answers are not the same to the bit, the number whose winner changed, and the processor time of
a row, without `--batch-invariant` and with it. One thread. Rows of a company of others are taken in groups, so that the
long ones do not cost an hour: the company is the same for each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from serve import WORDS  # noqa: E402

from onepass.config import Config  # noqa: E402
from onepass.loading import Loaded, load  # noqa: E402
from onepass.rows import Row  # noqa: E402
from onepass.wire import answer  # noqa: E402
from onepass.wire.schema import parse_request  # noqa: E402

FULL, GROUP = 32, 16  # rows of a full batch; small rows beside one long one
Probabilities = list[list[float]]


def render(loaded: Loaded, rng: random.Random, num_words: int) -> Row:
    """One question about a state of so many words."""
    options = {f"option {n}": rng.choice([None, "what it means"]) for n in range(rng.randint(2, 6))}
    question: dict[str, Any] = rng.choice(
        [
            {"type": "noul", "instructions": "Is it late?"},
            {"type": "choice", "instructions": "Which is it?", "criteria": options},
            {"type": "score", "criteria": ["low", "middle", "high"]},
        ]
    )
    body = {"state": " ".join(rng.choices(WORDS, k=num_words)), "questions": {"q": question}}
    return loaded.prompter.render(parse_request(json.dumps(body).encode()))[0]


def ask(loaded: Loaded, rows: list[Row]) -> Probabilities:
    return [answer.probabilities(scores[0], 1.0) for scores in loaded.engine.forward(rows)]


def in_groups(rows: list[Row], size: int, run: Callable[[list[Row]], Probabilities]) -> tuple[Probabilities, float]:
    """What each row got, and the processor seconds of a row."""
    started, found = time.process_time(), []
    for start in range(0, len(rows), size):
        found += run(rows[start : start + size])
    return found, (time.process_time() - started) / len(rows)


def compare(alone: Probabilities, other: Probabilities) -> tuple[float, int, int]:
    """(largest difference, how many differ at all, how many winners changed)"""
    pairs = list(zip(alone, other, strict=True))
    largest = max(abs(p - q) for one, two in pairs for p, q in zip(one, two, strict=True))
    changed = sum(one.index(max(one)) != two.index(max(two)) for one, two in pairs)
    return largest, sum(one != two for one, two in pairs), changed


def measure(model: str, dtype: str, num_requests: int, *, is_invariant: bool) -> None:
    loaded = load(Config(model=model, dtype=dtype, batch_invariant=is_invariant))
    rng = random.Random(0)
    rows = [render(loaded, rng, rng.randint(3, 60)) for _ in range(num_requests)]
    typical = sum(row.num_tokens for row in rows) // len(rows)
    longer, longest = (render(loaded, rng, times * typical) for times in (4, 50))

    def beside(company: Row) -> Callable[[list[Row]], Probabilities]:
        return lambda group: ask(loaded, [company, *group])[1:]

    alone, alone_s = in_groups(rows, 1, lambda group: ask(loaded, group))
    label = f"{dtype}{', batch-invariant' if is_invariant else ''}"
    print(f"| {label} | alone | | | | {alone_s * 1e3:.2f} |")
    companies: list[tuple[str, int, Callable[[list[Row]], Probabilities]]] = [
        (f"full batch of {FULL}", FULL, lambda group: ask(loaded, group)),
        (f"beside {longer.num_tokens} tokens", 1, beside(longer)),
        (f"beside {longest.num_tokens} tokens", GROUP, beside(longest)),
    ]
    for name, size, run in companies:
        found, seconds = in_groups(rows, size, run)
        largest, num_different, num_changed = compare(alone, found)
        cost = f"{seconds * 1e3:.2f}" if size == FULL else ""
        print(f"| {label} | {name} | {largest:.1e} | {num_different} | {num_changed} | {cost} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "model"))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    print(f"{args.requests} requests\n")
    print("| | company | largest difference | not the same to the bit | winners changed | CPU ms a row |")
    print("|---|---|---|---|---|---|", flush=True)
    for dtype in args.dtype:
        for is_invariant in (False, True):
            measure(args.model, dtype, args.requests, is_invariant=is_invariant)


if __name__ == "__main__":
    main()
