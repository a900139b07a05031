"""Rows and their texts as tokens: reads the data, cuts a prompt into segments, keeps each text's tokens once.

A prompt is the state, then each question's instructions and options; every such piece is a segment that ends in a
control token. What the first layer makes of a segment depends on nothing but the segment (see wiring.py), so a text
that stands in many prompts is tokenised and computed once. Knows no model."""

import gzip
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

TYPES = ("noul", "choice", "score")
NOUL_NAMES = ("yes", "no")  # as the templates write them
STATE = "<|end_state|>"
ENCODE_AT_ONCE = 50_000  # texts


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled question about one state, in the template's terms."""

    dataset: str
    state: Any
    type: Any  # one of TYPES
    instructions: Any
    options: tuple[str, ...]
    descriptions: tuple[Any, ...]
    answer: int  # index into options
    probabilities: tuple[float, ...] | None = None  # of the options, where a teacher gives them


def parse_row(raw: dict[str, Any]) -> Row:
    """`raw` as train/README.md describes it; its `probabilities`, if any, are in the order of the options, "yes" first."""
    question, answer = raw["question"], raw["answer"]
    criteria = question["criteria"]
    if question["type"] == "noul":
        sides = {{"true": "yes", "false": "no"}.get(key, key): text for key, text in (criteria or {}).items()}
        options: list[str] = list(NOUL_NAMES)
        descriptions: list[object] = [sides.get(name) for name in NOUL_NAMES]
        index = 0 if answer else 1
    elif question["type"] == "choice":
        options, descriptions = list(criteria), list(criteria.values())
        index = options.index(answer)
    else:
        options, descriptions = [f"{i + 1}/{len(criteria)}" for i in range(len(criteria))], list(criteria)
        index = answer
    probabilities = raw.get("probabilities")
    if probabilities is not None and len(probabilities) != len(options):
        raise ValueError(f"{len(probabilities)} probabilities for {len(options)} options: {raw}")
    return Row(
        dataset=raw["dataset"],
        state=raw["state"],
        type=question["type"],
        instructions=question["instructions"],
        options=tuple(options),
        descriptions=tuple(descriptions),
        answer=index,
        probabilities=None if probabilities is None else tuple(probabilities),
    )


def read_raw(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, gzipped or not, as they stand there."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def read_rows(data_dir: Path, part: str) -> list[Row]:
    return [parse_row(raw) for raw in read_raw(data_dir / f"decisions-{part}.jsonl.gz")]


def json_text(value: object) -> str:
    """A text as it is, anything else as the compact JSON that the templates write."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


Segment = tuple[str, str, str | None]  # the control token at its end, its text, the text after <|description|>


def state_segment(row: Row) -> Segment:
    return STATE, json_text(row.state), None


def instructions_segment(row: Row) -> Segment:
    return f"<|{row.type}|>", json_text(row.instructions), None


def option_segment(name: str, description: object) -> Segment:
    return "<|end_option|>", name, None if description is None else json_text(description)


@dataclass(slots=True)
class Segments:
    """Every segment once, as tokens: number i is tokens[starts[i]:starts[i + 1]], its end's control token included."""

    tokenizer: Tokenizer
    numbers: dict[Segment, int] = field(default_factory=dict)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def add(self, segments: Iterable[Segment]) -> None:
        new = [segment for segment in dict.fromkeys(segments) if segment not in self.numbers]
        texts = {text for _, *pair in new for text in pair if text}
        ids = self._encode(list(texts))
        description = [self.tokenizer.token_to_id("<|description|>")]
        pieces = []
        for end, text, more in new:
            self.numbers[end, text, more] = len(self.numbers)
            after = [] if more is None else [*description, *ids.get(more, [])]
            pieces.append([*ids.get(text, []), *after, self.tokenizer.token_to_id(end)])
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        flat = np.fromiter((token for piece in pieces for token in piece), np.int32, int(lengths.sum()))
        self.tokens = np.concatenate([self.tokens, flat])
        self.starts = np.concatenate([self.starts, self.starts[-1] + lengths.cumsum()])

    def _encode(self, texts: list[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for start in range(0, len(texts), ENCODE_AT_ONCE):
            part = texts[start : start + ENCODE_AT_ONCE]
            for text, encoding in zip(part, self.tokenizer.encode_batch(part, add_special_tokens=False), strict=True):
                found[text] = encoding.ids
        return found


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as numbers of segments, for batches. The options of row i are entries firsts[i] to firsts[i + 1]."""

    dataset: np.ndarray  # (N,) number of its set in `names`
    type: np.ndarray  # (N,) index into TYPES
    state: np.ndarray  # (N,) segment
    instructions: np.ndarray  # (N,) segment
    firsts: np.ndarray  # (N + 1,)
    options: np.ndarray  # segment of each option, with its description
    bare: np.ndarray  # segment of each option without it, the same where it has none
    answer: np.ndarray  # (N,)
    targets: np.ndarray  # float32, one an option: the teacher's probability, or 1 for the right one and 0 elsewhere
    names: list[str]

    def __len__(self) -> int:
        return len(self.type)


def number_rows(rows: list[Row], segments: Segments) -> Rows:
    """Adds the rows' texts to `segments`."""
    segments.add(
        segment
        for row in rows
        for segment in (
            state_segment(row),
            instructions_segment(row),
            *(option_segment(name, text) for name, text in zip(row.options, row.descriptions, strict=True)),
            *(option_segment(name, None) for name in row.options),
        )
    )
    names = sorted({row.dataset for row in rows})
    of = segments.numbers
    pairs = [pair for row in rows for pair in zip(row.options, row.descriptions, strict=True)]
    return Rows(
        dataset=np.array([names.index(row.dataset) for row in rows]),
        type=np.array([TYPES.index(row.type) for row in rows]),
        state=np.array([of[state_segment(row)] for row in rows]),
        instructions=np.array([of[instructions_segment(row)] for row in rows]),
        firsts=np.concatenate([[0], np.cumsum([len(row.options) for row in rows])]),
        options=np.array([of[option_segment(*pair)] for pair in pairs]),
        bare=np.array([of[option_segment(name, None)] for name, _ in pairs]),
        answer=np.array([row.answer for row in rows]),
        targets=np.concatenate([target_of(row) for row in rows]),
        names=names,
    )


def target_of(row: Row) -> np.ndarray:
    """(options,) float32, which sum to 1."""
    if row.probabilities is None:
        return np.asarray(np.eye(len(row.options), dtype=np.float32)[row.answer])
    given = np.array(row.probabilities, np.float32)
    return np.asarray(given / given.sum())


def shuffled(count: int, seed: str) -> np.ndarray:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return np.array(order)
