"""The cache that is bounded by the cost of what it holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onepass.cache import LruCache


def cache_of(max_cost: int) -> LruCache[str, int]:
    """A cache of numbers, each of which costs itself."""
    return LruCache(max_cost, lambda value: value)


def test_what_was_used_last_is_kept_longest() -> None:
    cache = cache_of(30)
    for name in "abc":
        cache.put(name, 10)
    assert cache.get("a") == 10
    cache.put("d", 10)
    assert [name for name in "abcd" if name in cache] == ["a", "c", "d"]


def test_several_are_found_at_once_and_become_the_last_used() -> None:
    cache = cache_of(30)
    for name in "abc":
        cache.put(name, 10)
    assert cache.find(["a", "x", "b"]) == {"a": 10, "b": 10}
    cache.put("d", 10)
    assert cache.find("abcd") == {"a": 10, "b": 10, "d": 10}


def test_what_costs_more_than_the_cache_may_hold_is_not_kept() -> None:
    cache = cache_of(30)
    cache.put("a", 10)
    cache.put("giant", 31)
    assert cache.find(["a", "giant"]) == {"a": 10}
    nothing = cache_of(0)
    nothing.put("a", 1)
    assert nothing.find(["a"]) == {}


def test_a_pinned_value_costs_nothing_and_stays() -> None:
    cache = cache_of(10)
    cache.pin("pinned", 1000)
    cache.put("a", 10)
    cache.put("b", 10)
    cache.clear()
    assert (cache.get("pinned"), cache.cost, list(cache.pinned_keys)) == (1000, 0, ["pinned"])
    assert "b" not in cache


def test_hits_and_misses_are_counted_until_they_are_reset() -> None:
    cache = cache_of(10)
    cache.put("a", 1)
    cache.pin("b", 1)
    cache.get("a")
    cache.get("b")
    cache.get("c")  # whoever makes it then puts it, which is the miss
    assert (cache.hits, cache.misses) == (2, 1)
    cache.reset_counts()
    assert (cache.hits, cache.misses, cache.get("a")) == (0, 0, 1)


@given(st.integers(0, 50), st.lists(st.tuples(st.text("abcdef", max_size=1), st.integers(0, 60))))
def test_it_never_holds_more_than_it_may(max_cost: int, puts: list[tuple[str, int]]) -> None:
    cache = cache_of(max_cost)
    for key, value in puts:
        cache.put(key, value)
        assert cache.cost == sum(cache.find({key for key, _ in puts}).values()) <= max_cost
