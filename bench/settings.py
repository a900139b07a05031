"""What settings buy on this machine: the same work under several of them, in turn, in processor time.

    python bench/settings.py
    python bench/settings.py --model Qwen/Qwen3.5-0.8B --rounds 3

Processor time (of all threads) rather than the clock's, so that other work on the machine matters little; medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onepass.cli.bench import QUESTIONS, STATES  # noqa: E402
from onepass.config import STARTER_MODEL, Config  # noqa: E402
from onepass.decider import Decider  # noqa: E402

NUM_AT_ONCE = 64
Bodies = Iterator[list[bytes]]  # what is asked at once, time after time


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    bodies: Callable[[], Bodies]
    settings: tuple[dict[str, Any], ...]


def body(state: str, questions: dict[str, Any]) -> bytes:
    return json.dumps({"state": state, "questions": questions}).encode()


def new_states() -> Bodies:
    for number in itertools.count():
        yield [body(f"{number}: {STATES['long']}", QUESTIONS)]


def one_state() -> Bodies:
    """Another question about the same state each time."""
    for number in itertools.count():
        yield [
            body(STATES["long"], {"q": {"type": "noul", "instructions": f"Is it the case that {number} cups broke?"}})
        ]


def many_at_once() -> Bodies:
    question = {"refund": QUESTIONS["refund"]}
    for number in itertools.count():
        yield [body(f"{number} {place}: {STATES['short']}", question) for place in range(NUM_AT_ONCE)]


COMPARISONS = (
    Comparison(
        "six questions about a long state, a new one each time",
        new_states,
        ({}, {"share_state": False}, {"encoding": "joint"}, {"dtype": "bfloat16"}),
    ),
    Comparison("another question about the same long state", one_state, ({}, {"state_cache_mb": 0})),
    Comparison(
        f"{NUM_AT_ONCE} requests at once, each a question about a new short state",
        many_at_once,
        ({}, *({"max_batch_rows": rows} for rows in (1, 4, 16, 64))),
    ),
)


def ask(decider: Decider, bodies: list[bytes]) -> float:
    """Processor time for all of them."""
    started = time.process_time()
    pending = [decider.submit(content) for content in bodies]
    for one in pending:
        decider.answer(one)
    return time.process_time() - started


def compare(comparison: Comparison, model: str, rounds: int) -> None:
    deciders: list[tuple[dict[str, Any], Decider, Bodies, list[float]]] = []
    for settings in comparison.settings:
        decider = Decider(Config(model=model, **({"dtype": "float32"} | settings)))
        decider.__enter__()
        deciders.append((settings, decider, comparison.bodies(), []))
    for round_ in range(rounds + 1):
        for _, decider, bodies, seconds in deciders:
            taken = ask(decider, next(bodies))
            if round_:  # the first warms up
                seconds.append(taken)
    print(f"\n{comparison.name}, {Path(model).name}, medians of {rounds}")
    default = statistics.median(deciders[0][3])
    for settings, decider, _, seconds in deciders:
        taken = statistics.median(seconds)
        name = " ".join(f"{key}={value}" for key, value in settings.items()) or "default (float32)"
        print(f"  {name:24} {taken * 1e3:9.1f} ms of processor time  {taken / default:6.2f}")
        decider.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="What settings buy on this machine.")
    parser.add_argument("--model", default=str(STARTER_MODEL), help="checkpoint (default: the starter)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each setting (default: 9)")
    arguments = parser.parse_args()
    for comparison in COMPARISONS:
        compare(comparison, arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
