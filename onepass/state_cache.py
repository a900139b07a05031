"""Keeps what the model computed for the beginning of prompts, bounded in bytes; knows nothing of what that is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class StateCache(Generic[Value]):
    """Least recently used first out, beside a few that stay. Worker thread only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0  # those that stay are not counted
        self.hits = self.misses = 0
        self._values: OrderedDict[bytes, Value] = OrderedDict()
        self._pinned: dict[bytes, Value] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._values or key in self._pinned

    def get(self, key: bytes) -> Value | None:
        value = self._pinned[key] if key in self._pinned else self._values.get(key)
        if value is None:
            return None
        self.hits += 1
        if key in self._values:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: Value) -> None:
        """Keep what had to be computed, unless it is larger than the whole cache."""
        self.misses += 1
        if value.nbytes > self.max_bytes or key in self._values:
            return
        self._values[key] = value
        self.num_bytes += value.nbytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._values.popitem(last=False)[1].nbytes

    def pin(self, key: bytes, value: Value) -> None:
        """Keep it for good."""
        self._pinned[key] = value

    def find_pinned(self, key: bytes) -> bytes | None:
        """The longest key kept for good that `key` begins with."""
        return max((kept for kept in self._pinned if key.startswith(kept)), key=len, default=None)

    def clear(self) -> None:
        """Drop all but those kept for good."""
        self._values.clear()
        self.num_bytes = 0
