"""Rows, prompts and batches: reads the data, renders the checkpoint's own templates and tokenises. Knows no model."""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

MARK = "<|mark|>"
TYPES = ("noul", "choice", "score")
NOUL_OPTIONS = ("true", "false")
IGNORED = -1  # padding of option indices; the answer of a question that is only there to be read past
PAD_MULTIPLE = 32  # tokens; the model works in chunks of this length


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled question about one state, in the template's terms."""

    dataset: str
    group: str  # rows with the same group share their original text
    state: object
    type: str
    instructions: object
    options: tuple[str, ...]
    descriptions: tuple[object, ...]
    answer: int  # index into options, or IGNORED


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised prompt and, per question, the positions read."""

    input_ids: list[int]
    marks: list[list[int]]  # per question: a position after each option, then the one at its end
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts side by side; Q counts the questions of all prompts that have an answer."""

    input_ids: torch.Tensor  # (B, T), right-padded
    reads: torch.Tensor  # (B, R) positions read in each prompt, in order, padded with 0
    options: torch.Tensor  # (Q, N) indices into the flat reads (B * R), IGNORED where a question has fewer options
    ends: torch.Tensor  # (Q,) indices into the flat reads
    answers: torch.Tensor  # (Q,)
    rows: list[Row]  # Q of them


def parse_row(raw: dict[str, Any]) -> Row:
    question, answer = raw["question"], raw["answer"]
    criteria = question["criteria"]
    if question["type"] == "noul":
        options: list[str] = list(NOUL_OPTIONS)
        descriptions: list[object] = [(criteria or {}).get(key) for key in ("yes", "no")]
        index = 0 if answer else 1
    elif question["type"] == "choice":
        options, descriptions = list(criteria), list(criteria.values())
        index = options.index(answer)
    else:
        options, descriptions, index = [str(i) for i in range(len(criteria))], list(criteria), answer
    return Row(
        dataset=raw["dataset"],
        group=raw["id"].rsplit("-", 1)[0],
        state=raw["state"],
        type=question["type"],
        instructions=question["instructions"],
        options=tuple(options),
        descriptions=tuple(descriptions),
        answer=index,
    )


def read_rows(data_dir: Path, part: str) -> list[Row]:
    with gzip.open(data_dir / f"decisions-{part}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [parse_row(json.loads(line)) for line in lines]


def shuffle_options(row: Row, rng: random.Random) -> Row:
    """A choice row with its options in a fresh order. Levels and yes/no keep theirs: the order means something."""
    if row.type != "choice":
        return row
    order = list(range(len(row.options)))
    rng.shuffle(order)
    return replace(
        row,
        options=tuple(row.options[i] for i in order),
        descriptions=tuple(row.descriptions[i] for i in order),
        answer=IGNORED if row.answer == IGNORED else order.index(row.answer),
    )


class Renderer:
    """Turns rows into prompts exactly as a server would: the templates of `model_dir` and its tokenizer."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.vocab_size = len(self.tokenizer)
        self.pad_id: int = self.tokenizer.pad_token_id
        self.tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
        self.mark_id = self.tokenizer.get_vocab()[MARK]
        self.single, self.joint = (
            _compile_jinja_template((model_dir / name).read_text(encoding="utf-8"))
            for name in ("decision_template.jinja", "decision_template_joint.jinja")
        )

    def render(self, rows: list[Row]) -> Prompt:
        """One prompt for all rows, which share the first one's state."""
        questions = [
            {
                "type": row.type,
                "instructions": row.instructions,
                "options": list(row.options),
                "labels": list(row.options),
                "descriptions": list(row.descriptions),
            }
            for row in rows
        ]
        if len(rows) == 1:
            text = self.single.render(state=rows[0].state, question=questions[0])
        else:
            text = self.joint.render(state=rows[0].state, questions=questions)
        input_ids: list[int] = []
        positions: list[int] = []
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if token == self.mark_id:
                positions.append(len(input_ids) - 1)  # the head reads the token just before the mark
            else:
                input_ids.append(token)
        marks, start = [], 0
        for row in rows:
            end = start + len(row.options) + 1
            marks.append(positions[start:end])
            start = end
        assert start == len(positions), "a prompt has one mark per option and one per question"
        return Prompt(input_ids, marks, rows)


def collate(prompts: list[Prompt], pad_id: int) -> Batch:
    longest = max(len(prompt.input_ids) for prompt in prompts)
    num_reads = max(sum(map(len, prompt.marks)) for prompt in prompts)
    num_options = max(len(marks) - 1 for prompt in prompts for marks in prompt.marks)
    input_ids = torch.full((len(prompts), -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE), pad_id)
    reads = torch.zeros(len(prompts), num_reads, dtype=torch.long)
    options, ends, rows = [], [], []
    for i, prompt in enumerate(prompts):
        input_ids[i, : len(prompt.input_ids)] = torch.tensor(prompt.input_ids)
        positions = [mark for marks in prompt.marks for mark in marks]
        reads[i, : len(positions)] = torch.tensor(positions)
        start = i * num_reads
        for row in prompt.rows:
            end = start + len(row.options)
            if row.answer != IGNORED:
                options.append([*range(start, end)] + [IGNORED] * (num_options - len(row.options)))
                ends.append(end)
                rows.append(row)
            start = end + 1
    answers = torch.tensor([row.answer for row in rows])
    return Batch(input_ids, reads, torch.tensor(options), torch.tensor(ends), answers, rows)


def iter_batches(prompts: list[Prompt], max_tokens: int, pad_id: int) -> Iterator[Batch]:
    """Batches of prompts of like length, shortest first, each of at most `max_tokens` with its padding."""
    taken: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.input_ids)):
        if taken and len(prompt.input_ids) * (len(taken) + 1) > max_tokens:
            yield collate(taken, pad_id)
            taken = []
        taken.append(prompt)
    if taken:
        yield collate(taken, pad_id)
