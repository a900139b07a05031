"""The number format that the tests of the engine and the server compute in, and how far answers may lie apart in it.

`ONEPASS_DTYPE=bfloat16 python -m pytest tests/test_engine.py tests/system/test_oracle.py` runs them in bfloat16, on any
processor: where it has no instructions for that, torch emulates it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from onepass.config import Config

DTYPE = os.environ.get("ONEPASS_DTYPE") or "float32"
# Largest difference of a score between a row alone and the same row in a padded batch, float32, on scores of up to 8.
# 4e-6 is what is seen; left padding or a forgotten mask give differences above 1.
TOLERANCE = 5e-5
# Root of the mean square difference of scores over that of the scores themselves, bfloat16, of which eight bits are
# kept: 0.4% is seen, and a wrong path gives more than 20%.
RELATIVE_TOLERANCE = 0.02
PROBABILITY_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}[DTYPE]


def in_dtype(config: Config) -> Config:
    """The same settings with the number format that is tested, unless they name one."""
    return replace(config, dtype=DTYPE) if config.dtype == "auto" else config


def _flat(scores: Sequence[Any]) -> list[float]:
    return [score for row in scores for question in row for score in question]


def largest_difference(a: Sequence[Any], b: Sequence[Any]) -> float:
    return max(abs(x - y) for x, y in zip(_flat(a), _flat(b), strict=True))


def relative_distance(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Root mean square of the differences over that of `b`."""
    pairs = list(zip(_flat(a), _flat(b), strict=True))
    return sqrt(sum((x - y) ** 2 for x, y in pairs) / sum(y * y for _, y in pairs))


def are_alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two ways to compute the same scores agree as closely as the number format allows."""
    if DTYPE == "float32":
        return largest_difference(a, b) < TOLERANCE
    return relative_distance(a, b) < RELATIVE_TOLERANCE
