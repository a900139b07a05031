"""Batches: which segments and positions a set of rows needs, as index tensors. Knows no model."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from data import Rows, Segments
from tokenizer import CONTROL_TOKENS
from torch import Tensor

SOME_OPTIONS, MANY_OPTIONS = 6, 16  # rows with more are kept apart
PADS = 2  # before each segment, for the convolution


@dataclass(frozen=True, slots=True)
class Ragged:
    """Segments one after the other, each after PADS places without a token."""

    tokens: Tensor  # (L,) into a batch's `vocabulary`; its length where there is no token
    ends: Tensor  # (L,) the last place of the segment each place belongs to
    segment: Tensor  # (L,) which segment


@dataclass(frozen=True, slots=True)
class Batch:
    """Q rows with O options in all; their states have S sentences. A position is a place where something is read:
    first the instructions' ends, then the options', the answers, the sentences' and the states', P in all."""

    vocabulary: Tensor  # (V,) token ids, each once
    questions: Ragged  # U segments: instructions and options, each once
    ends: Tensor  # (U,) their control tokens, into `vocabulary`
    states: Ragged  # Q segments
    instructions_of: Tensor  # (Q,) segment in `questions`
    options_of: Tensor  # (O,) segment in `questions`
    question: Tensor  # (O,) row of each option
    last_option: Tensor  # (Q,) the row's last option
    controls: Tensor  # (2,) <|end_state|> and <|answer|>, into `vocabulary`
    sentence_tokens: Tensor  # (S,) the marks that end the sentences, into `vocabulary`
    sentence_of: Tensor  # (L of states,) sentence that each place belongs to; S where to none
    sentence_ends: Tensor  # (L of states,) the place where that sentence ends
    num_sentences: int
    asked: Tensor  # (Q, M) positions of each row, P where there is none
    place: Tensor  # (P,) where a position stands in `asked`, flat
    keys: Tensor  # (Q, T) into `vocabulary`: what each row's attention may see, <|state|> and the tokens of the state
    summaries: Tensor  # (Q, N) and its positions, counted from the first sentence; those past the end are hidden
    hidden: Tensor  # (Q, M, T + N) bool
    options: Tensor  # (Q, K) options of each row, O where it has fewer
    answers: Tensor  # (Q,)
    targets: Tensor  # (Q, K) float32, the probabilities to learn; 0 where a row has fewer options
    rows: np.ndarray  # (Q,) numbers of the rows

    def __len__(self) -> int:
        return len(self.answers)

    def to(self, device: torch.device) -> "Batch":
        return replace(self, **_moved(self, device))


def _moved(fields_of: Batch | Ragged, device: torch.device) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for item in fields(fields_of):
        value = getattr(fields_of, item.name)
        if isinstance(value, Tensor):
            moved[item.name] = value.to(device)
        elif isinstance(value, Ragged):
            moved[item.name] = replace(value, **_moved(value, device))
    return moved


def concatenated_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[starts[0], starts[0] + 1, ..., starts[1], ...], lengths[i] of each."""
    offsets = np.repeat(starts - np.concatenate([[0], lengths.cumsum()[:-1]]), lengths)
    return offsets + np.arange(lengths.sum())


def padded(values: np.ndarray, lengths: np.ndarray, fill: float) -> np.ndarray:
    """Ragged rows side by side, in the values' type: (len(lengths), longest)."""
    table = np.full((len(lengths), max(1, int(lengths.max()))), fill, values.dtype)
    table[np.arange(table.shape[1]) < lengths[:, None]] = values
    return table


class Batcher:
    """Makes batches of rows whose segments are in `segments`."""

    def __init__(self, rows: Rows, segments: Segments, is_boundary: np.ndarray) -> None:
        self.rows, self.segments = rows, segments
        self.is_boundary = is_boundary
        self.state_token, self.end_state, self.answer = map(
            CONTROL_TOKENS.index, ("<|state|>", "<|end_state|>", "<|answer|>")
        )

    def lay_out(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids (-1 at pads), last place and segment of each place."""
        starts = self.segments.starts[numbers]
        lengths = self.segments.starts[numbers + 1] - starts
        tokens = np.full(int(lengths.sum()) + PADS * len(numbers), -1)
        ends = (lengths + PADS).cumsum() - 1
        segment = np.repeat(np.arange(len(numbers)), lengths + PADS)
        tokens[concatenated_ranges(ends + 1 - lengths, lengths)] = self.segments.tokens[
            concatenated_ranges(starts, lengths)
        ]
        return tokens, ends[segment], segment

    def drop(self, tokens: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
        """Text tokens left out at random, as if they were padding."""
        is_gone = (tokens >= len(CONTROL_TOKENS)) & (rng.random(len(tokens)) < share) & ~self.is_boundary[tokens]
        return np.where(is_gone, -1, tokens)

    def batch(
        self, numbers: np.ndarray, rng: np.random.Generator | None = None, drop: float = 0.0, bare: float = 0.0
    ) -> Batch:
        """`numbers` (Q,) of rows. With `rng`, a `drop` share of the text tokens is left out, and for a `bare` share of
        the rows the descriptions of the options."""
        rows = self.rows
        counts = rows.firsts[numbers + 1] - rows.firsts[numbers]
        entries = concatenated_ranges(rows.firsts[numbers], counts)
        options = rows.options[entries]
        if rng is not None and bare:
            options = np.where((rng.random(len(numbers)) < bare).repeat(counts), rows.bare[entries], options)
        unique, inverse = np.unique(np.concatenate([rows.instructions[numbers], options]), return_inverse=True)
        texts, text_ends, text_segment = self.lay_out(unique)
        states, state_ends, state_segment = self.lay_out(rows.state[numbers])
        if rng is not None and drop:
            texts, states = self.drop(texts, drop, rng), self.drop(states, drop, rng)
        controls = [self.state_token, self.end_state, self.answer]
        vocabulary, places = np.unique(np.concatenate([texts, states, controls]), return_inverse=True)
        # np.unique has put -1, the pads, first; they come last in `tokens`
        vocabulary, places = vocabulary[1:], np.where(places == 0, len(vocabulary) - 1, places - 1)
        text_tokens, state_tokens = places[: len(texts)], places[len(texts) : -3]
        num_rows, num_options = len(numbers), len(entries)

        is_end = self.is_boundary[states] & (states >= 0)
        mark_at = np.flatnonzero(is_end)
        num_before = np.concatenate([[0], is_end.cumsum()])
        next_mark = num_before[:-1]  # the first mark at or after each place, if it is in the same state
        in_sentence = np.append(state_segment[mark_at], -1)[next_mark] == state_segment
        sentence_of = np.where(in_sentence, next_mark, len(mark_at))
        sentence_ends = np.where(in_sentence, np.append(mark_at, 0)[sentence_of], np.arange(len(states)))

        # Positions: instructions, options, answers, sentences, states
        last = counts.cumsum() - 1
        first_sentence = 2 * num_rows + num_options
        row_ids = np.arange(num_rows)
        num_sentences = np.bincount(state_segment[mark_at], minlength=num_rows)
        first_state = first_sentence + len(mark_at)
        of_row = np.concatenate([row_ids, row_ids.repeat(counts), row_ids, state_segment[mark_at], row_ids])
        order = np.argsort(of_row, kind="stable")
        num_asked = counts + 2 + num_sentences + 1
        asked = padded(order, num_asked, len(of_row))
        place = np.zeros(len(of_row), np.int64)
        place[order] = concatenated_ranges(row_ids * asked.shape[1], num_asked)
        is_key = (states >= 0) & ~is_end
        ends = state_ends[np.flatnonzero(np.diff(state_segment, prepend=-1))]
        is_key[ends] = False
        key_counts = np.bincount(state_segment[is_key], minlength=num_rows) + 1
        with_state = np.argsort(np.concatenate([row_ids, state_segment[is_key]]), kind="stable")
        keys = padded(np.concatenate([np.full(num_rows, places[-3]), state_tokens[is_key]])[with_state], key_counts, -1)
        key_at = padded(
            np.concatenate([np.full(num_rows, -1), np.flatnonzero(is_key)])[with_state], key_counts, 1 << 40
        )
        with_end = np.argsort(np.concatenate([state_segment[mark_at], row_ids]), kind="stable")
        summary_at = padded(np.concatenate([mark_at, ends])[with_end], num_sentences + 1, 1 << 40)
        summaries = padded(np.arange(len(mark_at) + num_rows)[with_end], num_sentences + 1, 0)
        seen_from = np.full(len(of_row) + 1, (1 << 40) - 1)  # places up to this one
        seen_from[first_sentence:first_state], seen_from[first_state:-1] = mark_at, ends
        hidden = np.concatenate([key_at, summary_at], axis=1)[:, None, :] > seen_from[asked][..., None]
        as_tensor = torch.from_numpy
        return Batch(
            vocabulary=as_tensor(vocabulary),
            questions=Ragged(as_tensor(text_tokens), as_tensor(text_ends), as_tensor(text_segment)),
            ends=as_tensor(text_tokens[text_ends[np.flatnonzero(np.diff(text_segment, prepend=-1))]]),
            controls=as_tensor(places[-2:]),
            states=Ragged(as_tensor(state_tokens), as_tensor(state_ends), as_tensor(state_segment)),
            instructions_of=as_tensor(inverse[:num_rows]),
            options_of=as_tensor(inverse[num_rows:]),
            question=as_tensor(row_ids.repeat(counts)),
            last_option=as_tensor(last),
            sentence_tokens=as_tensor(state_tokens[mark_at]),
            sentence_of=as_tensor(sentence_of),
            sentence_ends=as_tensor(sentence_ends),
            num_sentences=len(mark_at),
            asked=as_tensor(asked),
            place=as_tensor(place),
            keys=as_tensor(np.maximum(keys, 0)),
            summaries=as_tensor(summaries),
            hidden=as_tensor(hidden),
            options=as_tensor(padded(np.arange(num_options), counts, num_options)),
            answers=as_tensor(rows.answer[numbers]),
            targets=as_tensor(padded(rows.targets[entries], counts, 0.0)),
            rows=numbers,
        )

    def slices(self, numbers: np.ndarray, size: int) -> list[np.ndarray]:
        """Rows of like length together, shortest first, `size` at a time; those with many options apart, fewer at a time."""
        lengths = self.segments.starts[self.rows.state[numbers] + 1] - self.segments.starts[self.rows.state[numbers]]
        counts = self.rows.firsts[numbers + 1] - self.rows.firsts[numbers]
        order = np.lexsort([lengths, counts > SOME_OPTIONS])
        order, crowded = order[counts[order] <= MANY_OPTIONS], np.argsort(counts, kind="stable")
        crowded, few = crowded[counts[crowded] > MANY_OPTIONS], max(1, size // 8)
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        parts += [crowded[start : start + few] for start in range(0, len(crowded), few)]
        return [numbers[part] for part in parts]

    def batches(self, numbers: np.ndarray, size: int) -> Iterator[Batch]:
        return map(self.batch, self.slices(numbers, size))
