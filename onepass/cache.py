"""A cache bounded by the cost of what it holds; it knows nothing of what that is.

`cachetools.LRUCache` was considered in its place. It bounds a cost as well, but it raises an error for a value that is
too large, counts nothing and has no pins, so that the code around it would be as long as this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Drops the least recently used values first. Pinned values stay, and their cost is not counted.

    It has no lock: its owner calls it from one thread, or under a lock of its own.
    """

    def __init__(self, max_cost: int, cost_of: Callable[[Value], int]) -> None:
        """`max_cost` bounds the sum of `cost_of` over all values that are not pinned. Both use any one unit."""
        self.max_cost, self._cost_of = max_cost, cost_of
        self.cost = 0
        self.hits = self.misses = 0
        self._values: OrderedDict[Key, Value] = OrderedDict()  # the least recently used first
        self._pinned: dict[Key, Value] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._values or key in self._pinned

    def get(self, key: Key) -> Value | None:
        """The value of `key`, which becomes the most recently used; it counts as a hit. None if there is none."""
        if key in self._pinned:
            self.hits += 1
            return self._pinned[key]
        if key not in self._values:
            return None
        self.hits += 1
        self._values.move_to_end(key)
        return self._values[key]

    def find(self, keys: Iterable[Key]) -> dict[Key, Value]:
        """The values of those keys that are in the cache."""
        found = {key: self.get(key) for key in keys if key in self}
        return {key: value for key, value in found.items() if value is not None}

    def put(self, key: Key, value: Value) -> None:
        """Keep a value that had to be made, which counts as a miss. A value that costs more than `max_cost` is not
        kept, and a key that is in the cache keeps its first value."""
        self.misses += 1
        cost = self._cost_of(value)
        if cost > self.max_cost or key in self:
            return
        self._values[key] = value
        self.cost += cost
        while self.cost > self.max_cost:
            self.cost -= self._cost_of(self._values.popitem(last=False)[1])

    def pin(self, key: Key, value: Value) -> None:
        """Keep a value for as long as the cache lives."""
        self._pinned[key] = value

    @property
    def pinned_keys(self) -> Iterable[Key]:
        return self._pinned.keys()

    def clear(self) -> None:
        """Drop all values that are not pinned."""
        self._values.clear()
        self.cost = 0

    def reset_counts(self) -> None:
        """Count hits and misses from zero; the values stay."""
        self.hits = self.misses = 0
