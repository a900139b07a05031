"""The sizes of passes for which graphs are captured, and the passes that these sizes give; pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onepass.forward.batches import first_fit
from onepass.forward.plan import MAX_PAST_TOKENS


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that graphs exist for. A pass is padded to the first that fits. Without sizes nothing is padded."""

    rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()  # tokens of a whole row, or of a prefix
    suffix_widths: tuple[int, ...] = ()  # tokens of a row after its prefix
    pasts: tuple[int, ...] = ()  # tokens of the prefix that a row continues
    reads: int = 0  # states that are read of a row, and
    scores: int = 0  # scores of a row: a pass with more of either runs without a graph


CUDA_BUCKETS = Buckets(
    rows=(1, 2, 4, 8, 16, 32),
    widths=(64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    suffix_widths=(32, 64, 128, 256),
    pasts=(256, 512, 1024, 2048, 4096),
    reads=32,
    scores=32,
)
# The same for the vision tower: pictures in a pass, and patches of each. A picture of 256 x 256 pixels has 256 patches,
# and the default of --max-pixels allows 784. Without graphs pictures of one size run together, unpadded.
PICTURE_BUCKETS = Buckets(rows=(1, 2, 4, 8), widths=(256, 400, 576, 784, 1024, 1600, 2304, 4096))
COMMON_ROWS, COMMON_WIDTH, COMMON_PAST = 8, 512, 512  # `--fast-start` waits for the graphs up to these sizes


class Shape(NamedTuple):
    """The sizes of one captured pass."""

    kind: str  # "whole", "begin" (computes prefixes) or "continue" (rows after their prefixes)
    rows: int
    width: int
    past: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.width + self.past)

    @property
    def is_common(self) -> bool:
        return self.rows <= COMMON_ROWS and self.width <= COMMON_WIDTH and self.past <= COMMON_PAST


def graph_shapes(buckets: Buckets, max_tokens: int, max_rows: int, longest: int) -> list[Shape]:
    """Every shape to which batches of at most `max_tokens` tokens and `max_rows` rows are padded.

    `longest` is the number of tokens that a row may have."""
    widths = [width for width in buckets.widths if width <= longest]
    shapes = []
    for rows in (rows for rows in buckets.rows if rows <= max_rows):
        wide = [width for width in widths if rows == 1 or rows * width <= max_tokens]
        shapes += [Shape(kind, rows, width) for kind in ("whole", "begin") for width in wide]
        shapes += [
            Shape("continue", rows, width, past)
            for width in buckets.suffix_widths
            for past in buckets.pasts
            if past <= longest
            and (rows == 1 or rows * width <= max_tokens)
            and (rows == 1 or rows * past <= MAX_PAST_TOKENS)
        ]
    return shapes


def in_order_of_capture(shapes: list[Shape]) -> list[Shape]:
    """The common shapes first, and among these and the rest the largest first: smaller graphs reuse the memory that a
    larger one has given back to the pool."""
    return sorted(shapes, key=lambda shape: (not shape.is_common, -shape.num_tokens))


def whole_shape(buckets: Buckets, kind: str, num_rows: int, width: int) -> Shape:
    """The shape to which a pass over whole rows, or over prefixes, is padded."""
    return Shape(kind, first_fit(buckets.rows, num_rows), first_fit(buckets.widths, width))


def suffix_shape(buckets: Buckets, num_rows: int, width: int, past: int) -> Shape:
    """The shape to which a pass over rows that continue prefixes of up to `past` tokens is padded."""
    fits = first_fit(buckets.rows, num_rows), first_fit(buckets.suffix_widths, width), first_fit(buckets.pasts, past)
    return Shape("continue", *fits)
