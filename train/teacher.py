"""A cross-encoder that teaches: it reads question, options and state together, and gives rows the probabilities to learn.

    python train/teacher.py fit --data DATA --encoder ENCODER --run TEACHER   # resumes
    python train/teacher.py label ROWS.jsonl.gz --encoder ENCODER --run TEACHER --out LABELLED.jsonl.gz

It is all-MiniLM-L6-v2 over `[CLS] type instructions [SEP] option [mark] option [mark] ... [SEP] state [SEP]`. An option's
score is linear in the hidden state at its mark, plus a product with the one at [CLS]: with the product alone, 40,000
rows taught nothing. Its answers hang on the order of the options, so `label` averages them over several orders. It is
never served: it reads 512 positions and sees the state anew for every question. Knows nothing of the starter."""

import argparse
import gzip
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from data import TYPES, Row, json_text, parse_row, read_raw, read_rows, shuffled
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

POINTER_DIM, MAX_POSITIONS = 128, 512
MAX_OPTION_TOKENS, MAX_INSTRUCTION_TOKENS, MIN_STATE_TOKENS = 24, 64, 16
MARK, TYPE_TOKENS = "[unused1]", {"noul": "[unused2]", "choice": "[unused3]", "score": "[unused4]"}
MOST_OPTIONS = 12  # of a training row: a longer list is cut to these
WINDOW_BATCHES = 32  # batches drawn together and cut by length; a run stops and resumes between two windows
WARM_STEPS, LAST_SHARE = 200, 0.02


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row as the encoder reads it."""

    ids: list[int]
    segments: list[int]  # 0 for type and instructions, 1 for the rest
    marks: list[int]  # place of each option's mark
    answer: int


class Reader:
    """Turns rows into tokens."""

    def __init__(self, encoder_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(encoder_dir / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        names = ("[CLS]", "[SEP]", MARK, *TYPE_TOKENS.values())
        self.special = {name: int(self.tokenizer.token_to_id(name) or 0) for name in names}
        if not all(self.special.values()):
            raise ValueError(f"the tokenizer in {encoder_dir} lacks one of {', '.join(names)}")

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def read(self, row: Row, order: Sequence[int], max_length: int) -> Tokens:
        """The options in this order; the state is cut so that all of it keeps to `max_length`. Raises ValueError if the
        options alone do not fit."""
        cls, sep, mark = (self.special[name] for name in ("[CLS]", "[SEP]", MARK))
        texts = [option_text(row, i) for i in order]
        options = [token for text in texts for token in [*self.encode(text)[:MAX_OPTION_TOKENS], mark]]
        instructions = self.encode(json_text(row.instructions))[:MAX_INSTRUCTION_TOKENS]
        first = [cls, self.special[TYPE_TOKENS[row.type]], *instructions, sep]
        room = max(MIN_STATE_TOKENS, max_length - len(first) - len(options) - 2)
        ids = [*first, *options, sep, *self.encode(json_text(row.state))[:room], sep]
        if len(first) + len(options) > MAX_POSITIONS:
            raise ValueError(f"{len(order)} options do not fit into {MAX_POSITIONS} positions")
        ids = ids[:MAX_POSITIONS]
        marks = [len(first) + at for at, token in enumerate(options) if token == mark]
        return Tokens(ids, [0] * len(first) + [1] * (len(ids) - len(first)), marks, list(order).index(row.answer))


def option_text(row: Row, index: int) -> str:
    """The option's name and description; the level's wording alone for a score."""
    name, description = row.options[index], row.descriptions[index]
    if row.type == "score":
        return json_text(description)
    return name if description is None else f"{name}: {json_text(description)}"


class Teacher(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.query = nn.Linear(config.hidden_size, POINTER_DIM)
        self.key = nn.Linear(config.hidden_size, POINTER_DIM)
        self.linear = nn.Linear(config.hidden_size, 1)

    def forward(self, rows: list[Tokens]) -> Tensor:
        """Scores (Q, K) float32, -inf where a row has fewer than K options."""
        ids, segments, mask = (padded(lists) for lists in (
            [one.ids for one in rows], [one.segments for one in rows], [[1] * len(one.ids) for one in rows]))  # fmt: skip
        marks, has_option = padded([one.marks for one in rows]), padded([[1] * len(one.marks) for one in rows])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            encoded = self.encoder(input_ids=ids, token_type_ids=segments, attention_mask=mask)
        hidden = encoded.last_hidden_state.float()
        at_marks = hidden.gather(1, marks[..., None].expand(-1, -1, hidden.shape[-1]))
        products = (self.key(at_marks) * self.query(hidden[:, :1])).sum(-1) * POINTER_DIM**-0.5
        scores: Tensor = self.linear(at_marks)[..., 0] + products
        return scores.masked_fill(has_option == 0, -torch.inf)


def padded(lists: list[list[int]]) -> Tensor:
    longest = max(map(len, lists))
    return torch.tensor([[*one, *[0] * (longest - len(one))] for one in lists])


def new_teacher(encoder_dir: Path) -> Teacher:
    """The encoder's weights and a head of random ones."""
    teacher = Teacher(BertConfig.from_pretrained(encoder_dir))
    weights = load_file(encoder_dir / "model.safetensors")
    teacher.encoder.load_state_dict(
        {name: w for name, w in weights.items() if not name.startswith("pooler")}, strict=False
    )
    return teacher


def order_to_train(row: Row, rng: random.Random) -> list[int]:
    """The options of a choice in a random order, a long list cut; levels and yes/no as they are."""
    order = list(range(len(row.options)))
    if row.type == "choice":
        others = [i for i in order if i != row.answer]
        order = [*rng.sample(others, min(len(others), MOST_OPTIONS - 1)), row.answer]
        rng.shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does. Only `rows` may change when it is resumed: it moves the decay of the learning rate."""

    rows: int
    batch_rows: int
    max_length: int
    lr: float
    head_lr: float
    seed: int


def batches_of(reader: Reader, rows: list[Row], plan: Plan, window: int) -> list[list[Tokens]]:
    """Batches of rows of like length, drawn epoch by epoch; they depend on the plan and the window alone."""
    rng, size = random.Random(f"{plan.seed}-{window}"), WINDOW_BATCHES * plan.batch_rows
    epoch, start = divmod(window * size, len(rows))
    drawn = np.concatenate([shuffled(len(rows), f"{plan.seed}-{e}") for e in (epoch, epoch + 1)])[start : start + size]
    read = [reader.read(row, order_to_train(row, rng), plan.max_length) for row in (rows[i] for i in drawn)]
    read.sort(key=lambda one: len(one.ids))
    parts = [read[at : at + plan.batch_rows] for at in range(0, len(read), plan.batch_rows)]
    rng.shuffle(parts)
    return parts


def fit(plan: Plan, teacher: Teacher, reader: Reader, rows: list[Row], run_dir: Path) -> None:
    """Trains up to plan.rows, saving after every window."""
    encoder, head = list(teacher.encoder.parameters()), [teacher.query, teacher.key, teacher.linear]
    groups = [
        {"params": encoder, "lr": plan.lr},
        {"params": [p for part in head for p in part.parameters()], "lr": plan.head_lr},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
    peaks, last, step, first = [plan.lr, plan.head_lr], run_dir / "last.pt", 0, 0
    if last.exists():
        saved = torch.load(last, weights_only=True)
        teacher.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, first = saved["step"], saved["window"]
    run_dir.mkdir(parents=True, exist_ok=True)
    teacher.train()
    for window in range(first, round(plan.rows / (WINDOW_BATCHES * plan.batch_rows))):
        began, losses, right = time.monotonic(), 0.0, 0
        for part in batches_of(reader, rows, plan, window):
            share = min(1.0, step / WARM_STEPS) * max(LAST_SHARE, 1 - step * plan.batch_rows / plan.rows)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
            scores, answers = teacher(part), torch.tensor([one.answer for one in part])
            loss = F.cross_entropy(scores, answers)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
            optimizer.step()
            step, losses, right = step + 1, losses + loss.item(), right + int((scores.argmax(-1) == answers).sum())
        count = WINDOW_BATCHES * plan.batch_rows
        print(f"{time.strftime('%H:%M:%S')} rows={(window + 1) * count} loss={losses / WINDOW_BATCHES:.3f} right={right / count:.3f} "
              f"rows_per_s={count / (time.monotonic() - began):.1f}", flush=True)  # fmt: skip
        saved = {"model": teacher.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "window": window + 1}
        torch.save(saved, run_dir / "next.pt")
        (run_dir / "next.pt").replace(last)  # a stop while writing leaves the old one whole


@torch.no_grad()
def probabilities(
    teacher: Teacher, reader: Reader, rows: list[Row], num_orders: int, at_once: int = 32
) -> Iterator[np.ndarray]:
    """For each row the mean probability of every option over up to `num_orders` cyclic orders of the options, so that
    each stands at the front, in the middle and at the end. Levels and yes/no are read in their own order alone."""
    teacher.eval()
    for start in range(0, len(rows), at_once):
        read, places = [], []
        for at, row in enumerate(rows[start : start + at_once]):
            count = len(row.options)
            turns = (
                np.linspace(0, count, min(num_orders, count), endpoint=False).astype(int)
                if row.type == "choice"
                else [0]
            )
            for turn in turns:
                order = [(i + int(turn)) % count for i in range(count)]
                read.append(reader.read(row, order, MAX_POSITIONS))
                places.append((at, order))
        sums = [np.zeros(len(row.options)) for row in rows[start : start + at_once]]
        for (at, order), shares in zip(places, teacher(read).softmax(-1).numpy(), strict=True):
            sums[at][order] += shares[: len(order)]
        yield from (total / total.sum() for total in sums)


def labelled(raw: dict[str, Any], shares: np.ndarray) -> dict[str, Any]:
    """The row with the teacher's probabilities, and with its best answer if the row has none."""
    best, kind = int(shares.argmax()), raw["question"]["type"]
    own = best == 0 if kind == "noul" else list(raw["question"]["criteria"])[best] if kind == "choice" else best
    answer = own if raw["answer"] is None else raw["answer"]
    return {**raw, "answer": answer, "probabilities": [round(float(share), 4) for share in shares]}


def unanswered(raw: dict[str, Any]) -> Row:
    """A row to label, whose answer may be null."""
    criteria = raw["question"]["criteria"]
    any_answer = {"noul": True, "choice": next(iter(criteria), None) if criteria else None, "score": 0}[
        raw["question"]["type"]
    ]
    return parse_row({**raw, "answer": any_answer if raw["answer"] is None else raw["answer"]})


def accuracies(teacher: Teacher, reader: Reader, rows: list[Row], num_orders: int) -> str:
    """Accuracy by type and by set, in Markdown."""
    right: dict[tuple[str, str], list[bool]] = {}
    for row, shares in zip(rows, probabilities(teacher, reader, rows, num_orders), strict=True):
        for name in ("all", row.dataset):
            right.setdefault((name, row.type), []).append(int(shares.argmax()) == row.answer)
    keys = sorted(right, key=lambda key: (key[0] != "all", key[0], TYPES.index(key[1])))
    lines = [
        f"| {name} | {kind} | {len(right[name, kind])} | {np.mean(right[name, kind]):.3f} |" for name, kind in keys
    ]
    return "\n".join(["| set | type | rows | accuracy |", "| --- | --- | --- | --- |", *lines])


def trained(args: argparse.Namespace) -> tuple[Teacher, Reader]:
    teacher = new_teacher(args.encoder)
    teacher.load_state_dict(torch.load(args.run / "last.pt", weights_only=True)["model"])
    return teacher, Reader(args.encoder)


def main_fit(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    plan = Plan(args.rows, args.batch_rows, args.max_length, args.lr, args.head_lr, args.seed)
    rows = read_rows(args.data, "train") + [parse_row(raw) for path in args.extra for raw in read_raw(path)]
    fit(plan, new_teacher(args.encoder), Reader(args.encoder), rows, args.run)


def main_label(args: argparse.Namespace) -> None:
    teacher, reader = trained(args)
    raws = read_raw(args.file)
    with gzip.open(args.out, "wt", encoding="utf-8") as out:
        for raw, shares in zip(
            raws, probabilities(teacher, reader, list(map(unanswered, raws)), args.orders), strict=True
        ):
            out.write(json.dumps(labelled(raw, shares), ensure_ascii=False) + "\n")


def main_evaluate(args: argparse.Namespace) -> None:
    teacher, reader = trained(args)
    print(accuracies(teacher, reader, [parse_row(raw) for raw in read_raw(args.file)], args.orders))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, does in (("fit", main_fit), ("label", main_label), ("evaluate", main_evaluate)):
        command = commands.add_parser(name)
        command.set_defaults(does=does)
        command.add_argument("--encoder", type=Path, required=True, help="folder of all-MiniLM-L6-v2")
        command.add_argument(
            "--run", type=Path, required=True, help="folder of the teacher; fit resumes if it holds last.pt"
        )
        command.add_argument("--threads", type=int, default=1, help="torch's (default: 1)")
        if name == "fit":
            command.add_argument("--data", type=Path, required=True, help="folder of decisions-train.jsonl.gz")
            command.add_argument("--extra", type=Path, nargs="*", default=[], help="more training rows")
            command.add_argument("--rows", type=int, default=480_000, help="rows to read in all (default: 480000)")
            command.add_argument("--batch-rows", type=int, default=32, help="rows of a batch (default: 32)")
            command.add_argument("--max-length", type=int, default=192, help="tokens of a row (default: 192)")
            command.add_argument("--lr", type=float, default=1e-4, help="peak, of the encoder (default: 0.0001)")
            command.add_argument("--head-lr", type=float, default=1e-3, help="peak, of the head (default: 0.001)")
            command.add_argument("--seed", type=int, default=0)
            continue
        command.add_argument("file", type=Path, help="rows: .jsonl or .jsonl.gz")
        command.add_argument(
            "--orders", type=int, default=4, help="orders of a choice's options to average (default: 4)"
        )
        if name == "label":
            command.add_argument("--out", type=Path, required=True, help="file to write, .jsonl.gz")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.does(args)


if __name__ == "__main__":
    main()
