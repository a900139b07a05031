"""Keeps what the model computed for the beginning of prompts, bounded in bytes; knows nothing of what that is."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class StateCache(Generic[Value]):
    """Least recently used first out. Worker thread only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0
        self._values: OrderedDict[bytes, Value] = OrderedDict()

    def get(self, key: bytes) -> Value | None:
        value = self._values.get(key)
        if value is None:
            self.num_misses += 1
        else:
            self.num_hits += 1
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: Value) -> None:
        """Keep it, unless it is larger than the whole cache."""
        if value.nbytes > self.max_bytes or key in self._values:
            return
        self._values[key] = value
        self.num_bytes += value.nbytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._values.popitem(last=False)[1].nbytes
