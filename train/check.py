"""Checks that the quick forward of training gives the scores of transformers' own, on rows of the data."""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from batches import Batcher
from data import Row, Segments, number_rows, read_rows
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from wiring import is_boundary

from model import POINTER_DIM, PointerModel, load_model
from onepass.prompt.prompter import Prompter
from onepass.prompt.template import DecisionFormat
from onepass.rows import Row as PromptRow
from onepass.wire.request import Question, Request

TOLERANCE = 5e-3  # of a score; a temperature is about 1
MAX_TOKENS = 16384


def question(row: Row, name: str) -> Question:
    if row.type == "choice":
        options = row.options
    else:
        options = ("true", "false") if row.type == "noul" else tuple(str(i) for i in range(len(row.options)))
    return Question(name, row.type, row.instructions, options, row.descriptions)


@torch.no_grad()
def library_scores(model: PointerModel, prompt: PromptRow) -> list[torch.Tensor]:
    """The option scores of each question, every token computed."""
    hidden = model.lm.model(input_ids=torch.tensor([list(prompt.input_ids)]), use_cache=False).last_hidden_state[0]
    scores = []
    for read in prompt.reads:
        *options, end = read.positions
        scores.append(model.key(hidden[options]) @ model.query(hidden[end]) * POINTER_DIM**-0.5)
    return scores


@torch.no_grad()
def quick_scores(model: PointerModel, rows: list[Row], model_dir: Path) -> list[torch.Tensor]:
    segments = Segments(Tokenizer.from_file(str(model_dir / "tokenizer.json")))
    boundary = is_boundary(AutoTokenizer.from_pretrained(model_dir)).numpy()
    batcher = Batcher(number_rows(rows, segments), segments, boundary)
    return list(model(batcher.batch(np.arange(len(rows)))))


def largest_differences(model: PointerModel, rows: list[Row], model_dir: Path) -> tuple[float, float]:
    """Between the two, over all scores: each row in a prompt of its own, and all about the first row's state in one."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompter = Prompter(tokenizer, DecisionFormat.load(model_dir), max_tokens=MAX_TOKENS)
    joint_rows = [Row(row.dataset, rows[0].state, *(getattr(row, n) for n in Row.__slots__[2:])) for row in rows[:6]]
    requests = [Request(row.state, (question(row, "q"),), encoding="per_question") for row in rows]
    joint = Request(rows[0].state, tuple(question(row, str(i)) for i, row in enumerate(joint_rows)), encoding="joint")
    worst = []
    for asked, of in (requests, rows), ([joint], joint_rows):
        slow = [scores for request in asked for scores in library_scores(model, prompter.render(request)[0])]
        quick = quick_scores(model, of, model_dir)
        worst.append(max(float((q[: len(s)] - s).abs().max()) for q, s in zip(quick, slow, strict=True)))
    return worst[0], worst[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-dev.jsonl.gz")
    parser.add_argument("--model", type=Path, default=Path("model"), help="checkpoint folder (default: model)")
    parser.add_argument("--rows", type=int, default=200, help="dev rows to compare (default: 200)")
    args = parser.parse_args()
    rows = random.Random(0).sample(read_rows(args.data, "dev"), args.rows)
    single, joint = largest_differences(load_model(args.model), rows, args.model)
    print(f"check: largest difference of a score: per question {single:.1e}, joint {joint:.1e}")
    if not max(single, joint) < TOLERANCE:
        raise SystemExit(f"check: over the tolerance of {TOLERANCE}")


if __name__ == "__main__":
    main()
