"""Measures a checkpoint as it is served: accuracy per type and per set, calibration, order of the options, latency.

MODEL is any checkpoint that the server loads, FILE any JSON Lines file (.gz or not) of rows with `state`, `question`
and `answer`, `images` if there are any, and a `dataset` to tell sets apart. A noul counts as right on the right side of one half."""

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads: spinning threads starve whoever shares the cores
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from data import TYPES, read_raw

from onepass.config import Config
from onepass.decider import Decider

AT_ONCE = 64  # requests
NUM_BINS = 10  # of the calibration error, equal in width
Z95 = 1.96
SHORT = {"state": "I was charged twice.", "questions": {"q": {"type": "noul", "instructions": "Is it about money?"}}}
LATENCY_RUNS = 101


@dataclass(frozen=True, slots=True)
class Asked:
    """One answered row."""

    dataset: str
    type: str
    right: int  # place of the right option
    probabilities: np.ndarray

    @property
    def is_right(self) -> bool:
        return bool(self.probabilities.argmax() == self.right)


def ask(decider: Decider, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of the requests' only questions."""
    answers = []
    for start in range(0, len(requests), AT_ONCE):
        pending = [decider.submit(json.dumps(request).encode()) for request in requests[start : start + AT_ONCE]]
        answers += [json.loads(decider.answer(one).body)["answers"]["q"] for one in pending]
    return answers


def as_request(row: dict[str, Any], encoding: str | None) -> dict[str, Any]:
    request = {"state": row["state"], "questions": {"q": row["question"]}}
    if "images" in row:
        request["images"] = row["images"]
    return request if encoding is None else {**request, "encoding": encoding}


def read_answer(row: dict[str, Any], answer: dict[str, Any]) -> Asked:
    kind = answer["type"]
    if kind == "noul":
        probabilities, right = [answer["noul"], 1 - answer["noul"]], 0 if row["answer"] else 1
    else:
        names = list(answer["probabilities"])
        probabilities, right = list(answer["probabilities"].values()), names.index(str(row["answer"]))
    return Asked(row.get("dataset", "all"), kind, right, np.array(probabilities))


def flipped_share(decider: Decider, rows: list[dict[str, Any]], answers: list[dict[str, Any]], seed: int) -> float:
    """Of choice answers: how many are another label when the options come in another order."""
    rng, shuffled, before = random.Random(seed), [], []
    for row, answer in zip(rows, answers, strict=True):
        if answer["type"] == "choice" and len(row["question"]["criteria"]) > 1:
            items = list(row["question"]["criteria"].items())
            order = items[:]
            while order == items:
                rng.shuffle(order)
            shuffled.append({**row, "question": {**row["question"], "criteria": dict(order)}})
            before.append(answer["choice"])
    after = [answer["choice"] for answer in ask(decider, [as_request(row, None) for row in shuffled])]
    return float(np.mean([one != other for one, other in zip(before, after, strict=True)])) if before else float("nan")


def wilson(num_right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share."""
    share, square = num_right / count, Z95**2 / count
    centre = (share + square / 2) / (1 + square)
    half = Z95 / (1 + square) * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return centre - half, centre + half


def bins_of(asked: list[Asked]) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, count) of the top answers in each bin that is not empty."""
    confidence = np.array([one.probabilities.max() for one in asked])
    right = np.array([one.is_right for one in asked])
    places = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    return [
        (confidence[places == b].mean(), right[places == b].mean(), int((places == b).sum()))
        for b in sorted(set(places))
    ]


def calibration_error(asked: list[Asked]) -> float:
    return float(sum(abs(confidence - right) * count for confidence, right, count in bins_of(asked)) / len(asked))


def brier(asked: list[Asked]) -> float:
    """Mean over rows of the squared distance between the probabilities and the right answer's."""
    return float(
        np.mean([((one.probabilities - np.eye(len(one.probabilities))[one.right]) ** 2).sum() for one in asked])
    )


def line(name: str, kind: str, asked: list[Asked]) -> str:
    num_right = sum(one.is_right for one in asked)
    low, high = wilson(num_right, len(asked))
    chance = np.mean([1 / len(one.probabilities) for one in asked])
    return (
        f"| {name} | {kind} | {len(asked)} | {num_right / len(asked):.3f} | {low:.3f} to {high:.3f} | {chance:.3f} "
        f"| {calibration_error(asked):.3f} | {brier(asked):.3f} |"
    )


def table(asked: list[Asked]) -> str:
    """Markdown: a line a type, then a line a set and type."""
    groups: dict[tuple[str, str], list[Asked]] = defaultdict(list)
    for one in asked:
        groups["all", one.type].append(one)
        groups[one.dataset, one.type].append(one)
    keys = sorted(groups, key=lambda key: (key[0] != "all", key[0], TYPES.index(key[1])))
    head = "| set | type | rows | accuracy | 95% interval | chance | calibration error | Brier |\n" + "| --- " * 8 + "|"
    return "\n".join([head, *(line(*key, groups[key]) for key in keys)])


def latency_ms(decider: Decider) -> tuple[float, float]:
    """Median wall-clock and CPU time of one short question, one after the other, each with a state of its own."""
    times = []
    for i in range(LATENCY_RUNS):
        body = json.dumps({**SHORT, "state": f"{SHORT['state']} {i}"}).encode()
        wall, cpu = time.perf_counter(), time.process_time()
        decider.decide(body)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = 1000 * np.median(times, axis=0)
    return float(wall), float(cpu)


def reliability_svg(asked: list[Asked]) -> str:
    """Accuracy over confidence, a dot a bin, its area by the number of answers; the diagonal is perfect calibration."""
    size, colours = 300, {"noul": "#1f77b4", "choice": "#d62728", "score": "#2ca02c"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-45 -15 {size + 130} {size + 60}" font-family="sans-serif" font-size="12">',
        f'<rect x="0" y="0" width="{size}" height="{size}" fill="#fff" stroke="#888"/>',
        f'<path d="M0 {size}L{size} 0" stroke="#888" stroke-dasharray="4"/>',
        f'<text x="{size / 2}" y="{size + 38}" text-anchor="middle">probability of the top answer</text>',
        f'<text transform="translate(-32 {size / 2}) rotate(-90)" text-anchor="middle">share that is right</text>',
    ]
    for tick in (0, 0.5, 1):
        parts.append(f'<text x="{tick * size}" y="{size + 18}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="-6" y="{size - tick * size + 4}" text-anchor="end">{tick}</text>')
    for i, kind in enumerate(TYPES):
        bins = bins_of([one for one in asked if one.type == kind])
        points = [(round(x * size, 1), round(size - y * size, 1), round(1.5 + n**0.5 / 3, 1)) for x, y, n in bins]
        path = "L".join(f"{x} {y}" for x, y, _ in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colours[kind]}"/>')
        parts += [
            f'<circle cx="{x}" cy="{y}" r="{r}" fill="{colours[kind]}" fill-opacity="0.7"/>' for x, y, r in points
        ]
        parts.append(f'<text x="{size + 12}" y="{20 + 18 * i}" fill="{colours[kind]}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def report(decider: Decider, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    answers = ask(decider, [as_request(row, args.encoding) for row in rows])
    asked = [read_answer(row, answer) for row, answer in zip(rows, answers, strict=True)]
    print(table(asked))
    print(
        f"\nchoice answers that another order of the options changes: {flipped_share(decider, rows, answers, args.seed):.4f}"
    )
    wall, cpu = latency_ms(decider)
    print(f"one short question: {wall:.1f} ms, {cpu:.1f} ms of CPU time (medians of {LATENCY_RUNS})")
    if args.reliability:
        args.reliability.write_text(reliability_svg(asked), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder, or a repository on the Hugging Face Hub")
    parser.add_argument("file", metavar="FILE", type=Path, help="rows, JSON Lines, gzipped or not")
    parser.add_argument("--limit", type=int, default=0, help="ask so many rows only, drawn at random (default: all)")
    parser.add_argument("--encoding", choices=("joint", "per_question"), help="prompt form (default: the checkpoint's)")
    parser.add_argument("--seed", type=int, default=0, help="of the rows drawn and the other orders (default: 0)")
    parser.add_argument("--reliability", type=Path, help="also draw the calibration, an SVG file")
    args = parser.parse_args()
    try:
        rows = read_raw(args.file)
    except (OSError, ValueError) as err:
        parser.error(f"{args.file}: {err}")
    if not rows:
        parser.error(f"{args.file} holds no rows")
    if args.limit:
        rows = random.Random(args.seed).sample(rows, min(args.limit, len(rows)))
    with Decider(Config(model=args.model, max_queued_rows=4096, max_wait_s=3600.0, timeout_s=3600.0)) as decider:
        report(decider, rows, args)


if __name__ == "__main__":
    main()
