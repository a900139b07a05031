"""Measures a checkpoint on a part of the data: accuracy and calibration per type and per set, per prompt form."""

import argparse
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads: spinning threads starve whoever shares the cores

import json

import numpy as np
import torch
from data import TYPES, Prompt, Renderer, Row, iter_batches, read_rows

from model import PointerModel, load_model

MAX_TOKENS = 8192  # of a batch, padding included
NUM_BINS = 10  # of the calibration error
MAX_JOINT = 6  # questions of a joint prompt


@dataclass(frozen=True, slots=True)
class Scored:
    row: Row
    scores: np.ndarray  # raw, one per option


@torch.no_grad()
def score_prompts(model: PointerModel, prompts: list[Prompt], pad_id: int) -> list[Scored]:
    """In the order of the batches, not of the prompts."""
    scored = []
    for batch in iter_batches(prompts, MAX_TOKENS, pad_id):
        for row, scores in zip(batch.rows, model(batch).numpy(), strict=True):
            scored.append(Scored(row, scores[: len(row.options)]))
    return scored


def softmax(scores: np.ndarray, temperature: float) -> np.ndarray:
    exp: np.ndarray = np.exp((scores - scores.max()) / temperature)
    exp /= exp.sum()
    return exp


def negative_log_likelihood(scored: list[Scored], temperature: float) -> float:
    return float(np.mean([-np.log(softmax(one.scores, temperature)[one.row.answer] + 1e-12) for one in scored]))


def fit_temperatures(scored: list[Scored]) -> dict[str, float]:
    """Per question type, the temperature of the least negative log likelihood, on a grid of 2 % steps."""
    grid = 1.02 ** np.arange(-60, 101)
    fitted = {}
    for kind in TYPES:
        of_kind = [one for one in scored if one.row.type == kind]
        losses = [negative_log_likelihood(of_kind, temperature) for temperature in grid]
        fitted[kind] = round(float(grid[int(np.argmin(losses))]), 3)
    return fitted


def calibration_error(confidences: np.ndarray, is_right: np.ndarray) -> float:
    """Expected calibration error of the top answer over equal-width bins."""
    bins = np.minimum((confidences * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = [abs(confidences[bins == b].mean() - is_right[bins == b].mean()) * (bins == b).mean() for b in set(bins)]
    return float(sum(gaps))


def summarise(scored: list[Scored], temperatures: dict[str, float]) -> dict[str, float]:
    probabilities = [softmax(one.scores, temperatures[one.row.type]) for one in scored]
    is_right = np.array([p.argmax() == one.row.answer for p, one in zip(probabilities, scored, strict=True)])
    return {
        "n": len(scored),
        "accuracy": float(is_right.mean()),
        "chance": float(np.mean([1 / len(one.row.options) for one in scored])),
        "calibration_error": calibration_error(np.array([p.max() for p in probabilities]), is_right),
        "nll": float(np.mean([-np.log(p[o.row.answer] + 1e-12) for p, o in zip(probabilities, scored, strict=True)])),
    }


def score_error(scored: list[Scored], temperatures: dict[str, float]) -> float:
    """Mean distance, in levels, of the expected level from the labelled one, over the score rows."""
    distances = []
    for one in scored:
        if one.row.type == "score":
            p = softmax(one.scores, temperatures["score"])
            distances.append(abs(float(p @ np.arange(len(p))) - one.row.answer))
    return float(np.mean(distances))


def report(scored: list[Scored], temperatures: dict[str, float]) -> str:
    """Markdown tables: per type, then per set and type."""
    groups: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    for one in scored:
        groups["all", one.row.type].append(one)
        groups[one.row.dataset, one.row.type].append(one)
    lines = ["| set | type | n | accuracy | chance | calibration error |", "| --- | --- | --- | --- | --- | --- |"]
    for name, kind in sorted(groups, key=lambda key: (key[0] != "all", key[0], TYPES.index(key[1]))):
        s = summarise(groups[name, kind], temperatures)
        figures = f"{s['n']} | {s['accuracy']:.3f} | {s['chance']:.3f} | {s['calibration_error']:.3f}"
        lines.append(f"| {name} | {kind} | {figures} |")
    return "\n".join(
        [*lines, "", f"score: mean distance of the expected level {score_error(scored, temperatures):.3f}"]
    )


def joint_groups(rows: list[Row]) -> list[list[Row]]:
    by_state: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_state[json.dumps([row.dataset, row.state])].append(row)
    return [group[:MAX_JOINT] for group in by_state.values() if len(group) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-{train,dev,test}.jsonl.gz")
    parser.add_argument("--model", type=Path, default=Path("model"), help="checkpoint folder (default: model)")
    parser.add_argument("--part", choices=("dev", "test"), default="test", help="part of the data (default: test)")
    parser.add_argument("--joint", action="store_true", help="rows with one state in one prompt; no other rows")
    args = parser.parse_args()
    renderer, model, rows = Renderer(args.model), load_model(args.model), read_rows(args.data, args.part)
    groups = joint_groups(rows) if args.joint else [[row] for row in rows]
    scored = score_prompts(model, [renderer.render(group) for group in groups], renderer.pad_id)
    print(report(scored, json.loads((args.model / "decision.json").read_text())["temperature"]))


if __name__ == "__main__":
    main()
