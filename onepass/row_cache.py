"""Keeps the results of rows for when the same row is asked for again, bounded in tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any


class RowCache:
    """Least recently asked first out. Not locked: the batcher does that."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: of all rows together. A result is about as large as its row: an option has a token at least."""
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._kept: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()  # by key: the row's tokens, its result

    def find(self, keys: Iterable[Hashable]) -> dict[Hashable, Any]:
        """What is kept for these keys."""
        found = {key: self._kept[key][1] for key in keys if key in self._kept}
        for key in found:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Hashable, num_tokens: int, result: Any) -> None:
        """For a key that is not in it."""
        self._kept[key] = num_tokens, result
        self._num_tokens += num_tokens
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= self._kept.popitem(last=False)[1][0]
