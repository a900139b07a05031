"""Cuts rows into the cheapest batches under a token budget and a cost model.

Pure arithmetic on lengths: it knows nothing of tensors, requests and queues.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """What one pass costs, in any one unit. Whoever runs the passes measures it."""

    launch: float  # of any pass, whatever its size
    per_token: float  # of each token, padding included

    def __call__(self, num_rows: int, width: int) -> float:
        return self.launch + self.per_token * num_rows * width

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, float]]) -> CostModel:
        """The line through samples of (tokens with padding, cost), by least squares. No part of it is below zero."""
        points = list(samples)
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else mean_y / max(mean_x, 1)
        slope = max(0.0, slope)
        if mean_y < slope * mean_x:  # the line starts below zero, so it is replaced by the one through zero
            return cls(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))
        return cls(mean_y - slope * mean_x, slope)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large one batch may be, and the sizes to which batches are padded.

    `widths` and `heights` ascend. A batch is padded to the first size that fits, and one that is larger than all of
    them to its longest row and its own number of rows.
    """

    max_tokens: int  # padding included; a row that is longer runs alone
    max_rows: int
    widths: tuple[int, ...] = ()  # tokens of a row
    heights: tuple[int, ...] = ()  # rows

    def bucket(self, num_rows: int, width: int) -> tuple[int, int]:
        """The number of rows and the width to which a batch of this size is padded."""
        return first_fit(self.heights, num_rows), first_fit(self.widths, width)

    def allow(self, num_rows: int, width: int) -> bool:
        rows, tokens = self.bucket(num_rows, width)
        return num_rows == 1 or (num_rows <= self.max_rows and rows * tokens <= self.max_tokens)


def first_fit(sizes: tuple[int, ...], size: int) -> int:
    """The first of the ascending `sizes` that holds `size`, or `size` itself where none does."""
    return next((fit for fit in sizes if fit >= size), size)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that run together."""

    rows: tuple[int, ...]  # indices into what was planned, longest first
    num_rows: int  # padding included
    width: int  # tokens to which each row is padded


def plan_batches(
    lengths: Sequence[int], cost: CostModel, limits: Limits, groups: Sequence[Hashable] | None = None
) -> list[Batch]:
    """The cheapest batches that hold each row exactly once; the batch with the earliest row comes first.

    lengths: the tokens of each row that are to be computed. groups: the group of each row; rows of different groups
    never share a batch. Within a group no plan is cheaper: some cheapest plan takes its batches from the rows in order
    of length, and all such plans are searched. So a plan never costs more than running the rows one by one, nor more
    than filling batches in order of length."""
    rows_of: dict[Hashable, list[int]] = {}
    for row in range(len(lengths)):
        rows_of.setdefault(groups[row] if groups is not None else None, []).append(row)
    batches = [
        batch
        for rows in rows_of.values()
        for batch in _plan_group(sorted(rows, key=lambda row: (-lengths[row], row)), lengths, cost, limits)
    ]
    return sorted(batches, key=lambda batch: min(batch.rows))


def _plan_group(rows: list[int], lengths: Sequence[int], cost: CostModel, limits: Limits) -> list[Batch]:
    """Cut the rows, longest first, where the sum of the costs is least. best[i] is the cheapest way to cut the first i
    rows: its cost, and its last batch."""
    best: list[tuple[float, Batch | None]] = [(0.0, None)]
    for end in range(1, len(rows) + 1):
        choices: list[tuple[float, Batch]] = []
        for start in range(end - 1, -1, -1):
            num_rows, width = limits.bucket(end - start, lengths[rows[start]])
            if not limits.allow(end - start, lengths[rows[start]]):
                break  # more rows, and longer ones, do not fit either
            total = best[start][0] + cost(num_rows, width)
            choices.append((total, Batch(tuple(rows[start:end]), num_rows, width)))
        best.append(min(choices, key=lambda choice: (choice[0], -len(choice[1].rows))))
    batches: list[Batch] = []
    end = len(rows)
    while end:
        batch = best[end][1]
        assert batch is not None
        batches.append(batch)
        end -= len(batch.rows)
    return batches
