"""Turns prompt rows into the tensors of one pass, and its scores into those of each question.

The tensors are made on the host, and whoever runs the pass moves them. It knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from onepass.rows import Row

DEFAULT_MAX_TOKENS = 4096  # that a row may have where the configuration names no limit

Sizes = tuple[int, int, int, int]  # rows, tokens of a row, states read of a row, scores of a row


@dataclass(frozen=True, slots=True)
class Inputs:
    """B rows, padded on the right with zeros. A causal model never reads the padding."""

    ids: Tensor  # (B, T) long
    starts: Tensor  # (B,) long, the position of each row's first token
    reads: Tensor  # (B, R) long, the places among T whose states are read
    score_reads: Tensor  # (B, S) long, and
    score_others: Tensor  # (B, S) long: the two numbers from which each score is made, see `heads.Head`

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(*(change(getattr(self, field.name)) for field in fields(self)))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def sizes(self) -> Sizes:
        return (*self.ids.shape, self.reads.shape[1], self.score_reads.shape[1])


def option_counts(row: Row) -> Iterable[int]:
    """How many options each question of the row has."""
    return (len(read.label_ids) or len(read.positions) - 1 for read in row.reads)


def count_reads(row: Row) -> int:
    return sum(len(read.positions) for read in row.reads)


def count_scores(row: Row) -> int:
    return sum(option_counts(row))


def make_inputs(rows: Sequence[Row], starts: Sequence[int], least: Sizes = (0, 0, 0, 0)) -> Inputs:
    """Row i from token starts[i] on; each size is that of `least`, or that of the largest row where this is more."""
    num_rows, width, num_reads, num_scores = (
        max(size, needed)
        for size, needed in zip(
            least,
            (
                len(rows),
                max(row.num_tokens - start for row, start in zip(rows, starts, strict=True)),
                max(map(count_reads, rows)),
                max(map(count_scores, rows)),
            ),
            strict=True,
        )
    )
    inputs = empty_inputs((num_rows, width, num_reads, num_scores))
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids = torch.frombuffer(row.input_ids, dtype=torch.int32)
        inputs.ids[index, : row.num_tokens - start] = ids[start:]
        inputs.starts[index] = row.position(start)
        reads = [place - start for read in row.reads for place in read.positions]
        made_of = list(_score_parts(row))
        inputs.reads[index, : len(reads)] = torch.tensor(reads)
        inputs.score_reads[index, : len(made_of)] = torch.tensor([read for read, _ in made_of])
        inputs.score_others[index, : len(made_of)] = torch.tensor([other for _, other in made_of])
    return inputs


def empty_inputs(sizes: Sizes) -> Inputs:
    num_rows, width, num_reads, num_scores = sizes
    shapes: tuple[tuple[int, ...], ...] = (
        (num_rows, width),
        (num_rows,),
        (num_rows, num_reads),
        (num_rows, num_scores),
        (num_rows, num_scores),
    )
    return Inputs(*(torch.zeros(shape, dtype=torch.long) for shape in shapes))


def _score_parts(row: Row) -> Iterable[tuple[int, int]]:
    """For each option of each question, the number of the read it is about, and its label or its question's end."""
    place = 0
    for read in row.reads:
        if read.label_ids:
            yield from ((place, label_id) for label_id in read.label_ids)
        else:
            end = place + len(read.positions) - 1
            yield from ((option, end) for option in range(place, end))
        place += len(read.positions)


def split_scores(rows: Sequence[Row], scores: Tensor) -> list[list[list[float]]]:
    """(B, S) scores to a list for each question of each row. This is the one copy of a batch from the device."""
    found = []
    for row, values in zip(rows, scores[: len(rows)].tolist(), strict=True):
        of_row, start = [], 0
        for num_options in option_counts(row):
            of_row.append(values[start : start + num_options])
            start += num_options
        found.append(of_row)
    return found
