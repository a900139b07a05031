"""The token-bounded cache of rows' results."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onepass.row_cache import RowCache


def test_what_was_asked_for_last_is_kept_longest() -> None:
    cache = RowCache(30)
    for name in "abc":
        cache.put(name, 10, name.upper())
    assert cache.find("a") == {"a": "A"}
    cache.put("d", 10, "D")
    assert cache.find("abcd") == {"a": "A", "c": "C", "d": "D"}


def test_a_row_with_more_tokens_than_may_be_kept_is_not() -> None:
    cache = RowCache(30)
    cache.put("giant", 31, "G")
    cache.put("a", 30, "A")
    assert cache.find(["giant", "a"]) == {"a": "A"}
    nothing = RowCache(0)
    nothing.put("a", 1, "A")
    assert nothing.find(["a"]) == {}


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60))))
def test_it_never_holds_more_than_it_may(max_tokens: int, puts: list[tuple[int, int]]) -> None:
    cache, sizes = RowCache(max_tokens), dict(puts)
    for key, size in sizes.items():
        cache.put(key, size, (key, size))
        held = cache.find(sizes)
        assert all(result == (found, sizes[found]) for found, result in held.items())
        assert sum(sizes[found] for found in held) <= max_tokens
