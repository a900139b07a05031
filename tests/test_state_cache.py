"""The byte-bounded cache of prompt beginnings."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from onepass.state_cache import StateCache


@dataclass(frozen=True)
class Block:
    nbytes: int


def test_what_was_used_last_is_kept_longest() -> None:
    cache: StateCache[Block] = StateCache(30)
    for name in (b"a", b"b", b"c"):
        cache.put(name, Block(10))
    assert cache.get(b"a") is not None
    cache.put(b"d", Block(10))
    assert [name for name in (b"a", b"b", b"c", b"d") if cache.get(name)] == [b"a", b"c", b"d"]


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache: StateCache[Block] = StateCache(30)
    cache.put(b"a", Block(10))
    cache.put(b"giant", Block(31))
    assert cache.get(b"giant") is None
    assert cache.get(b"a") is not None


@given(st.integers(0, 50), st.lists(st.tuples(st.binary(max_size=1), st.integers(0, 60))))
def test_it_never_holds_more_than_it_may(max_bytes: int, puts: list[tuple[bytes, int]]) -> None:
    cache: StateCache[Block] = StateCache(max_bytes)
    for key, size in puts:
        cache.put(key, Block(size))
        held = [cache.get(key) for key in {key for key, _ in puts}]
        assert cache.num_bytes == sum(block.nbytes for block in held if block) <= max_bytes
