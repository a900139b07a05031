"""Decides which rows run together: the cheapest batches under a token budget and a cost model.

Pure arithmetic on lengths; it knows no tensors, requests or queues.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """What one forward costs, in seconds. Measured by whoever runs them."""

    launch_s: float  # whatever its size
    token_s: float  # for each token, padding included

    def __call__(self, num_rows: int, width: int) -> float:
        return self.launch_s + self.token_s * num_rows * width

    @classmethod
    def fit(cls, samples: Iterable[tuple[int, float]]) -> "CostModel":
        """The line through (tokens with padding, seconds), by least squares; neither part of it is below zero."""
        points = list(samples)
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else mean_y / max(mean_x, 1)
        slope = max(0.0, slope)
        if mean_y < slope * mean_x:  # a line that starts below zero: the one through zero instead
            return cls(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))
        return cls(mean_y - slope * mean_x, slope)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch may be, and the sizes that exist."""

    max_tokens: int  # padding included; a row that is longer runs alone
    max_rows: int
    widths: tuple[
        int, ...
    ] = ()  # ascending; a batch is padded to the first that fits, beyond the last to its longest row
    heights: tuple[int, ...] = ()  # the same for its number of rows

    def bucket(self, num_rows: int, width: int) -> tuple[int, int]:
        """The rows and the width that a batch of this size is padded to."""
        return first_fit(self.heights, num_rows), first_fit(self.widths, width)

    def allow(self, num_rows: int, width: int) -> bool:
        rows, tokens = self.bucket(num_rows, width)
        return num_rows == 1 or (num_rows <= self.max_rows and rows * tokens <= self.max_tokens)


def first_fit(sizes: tuple[int, ...], size: int) -> int:
    return next((fit for fit in sizes if fit >= size), size)


@dataclass(frozen=True, slots=True)
class Batch:
    rows: tuple[int, ...]  # indices into what was planned, longest first
    num_rows: int  # padding included
    width: int  # tokens that each row is padded to
    prefix: Hashable | None  # that all its rows continue
    cost_s: float


def plan_batches(
    lengths: Sequence[int], cost: CostModel, limits: Limits, prefixes: Sequence[Hashable | None] | None = None
) -> list[Batch]:
    """The cheapest batches that hold each row exactly once, the one with the earliest row first.

    lengths: tokens of each row that are to be computed, those of a shared prefix not among them; prefixes: which one
    each row continues. Rows of different prefixes never share a batch. Within a prefix the result is the cheapest there
    is: some cheapest plan takes its batches from the rows in order of length, and all such plans are searched. So it is
    never dearer than running rows one by one, nor than filling batches in order of length."""
    groups: dict[Hashable | None, list[int]] = {}
    for row in range(len(lengths)):
        groups.setdefault(prefixes[row] if prefixes is not None else None, []).append(row)
    batches = [
        batch
        for prefix, rows in groups.items()
        for batch in _plan_group(sorted(rows, key=lambda row: (-lengths[row], row)), lengths, cost, limits, prefix)
    ]
    return sorted(batches, key=lambda batch: min(batch.rows))


def _plan_group(
    rows: list[int], lengths: Sequence[int], cost: CostModel, limits: Limits, prefix: Hashable | None
) -> list[Batch]:
    """rows, longest first, cut where the sum of the costs is least. best[i] is the cheapest way to cut the first i."""
    best: list[tuple[float, Batch | None]] = [(0.0, None)]
    for end in range(1, len(rows) + 1):
        choices: list[tuple[float, Batch]] = []
        for start in range(end - 1, -1, -1):
            num_rows, width = limits.bucket(end - start, lengths[rows[start]])
            if not limits.allow(end - start, lengths[rows[start]]):
                break  # more rows, and longer ones, will not fit either
            price = cost(num_rows, width)
            choices.append((best[start][0] + price, Batch(tuple(rows[start:end]), num_rows, width, prefix, price)))
        best.append(min(choices, key=lambda choice: (choice[0], -len(choice[1].rows))))
    batches: list[Batch] = []
    end = len(rows)
    while end:
        batch = best[end][1]
        assert batch is not None
        batches.append(batch)
        end -= len(batch.rows)
    return batches


def plan_cost(batches: Iterable[Batch]) -> float:
    return sum(batch.cost_s for batch in batches)
