"""The planner's promises about passes, on any rows, prefixes at hand and limits; without tensors."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.forward.batches import CostModel, Limits
from onepass.forward.plan import MAX_PAST_TOKENS, Kept, Pass, Planner
from onepass.rows import Read, Row
from tests.support import ROOT

LIMITS = Limits(max_tokens=64, max_rows=4)
PLAIN = Planner(CostModel(4, 1), LIMITS, LIMITS, shares=True, min_shared_tokens=4)
PADDED = Planner(
    CostModel(4, 1),
    Limits(64, 4, widths=(8, 16, 32), heights=(1, 2, 4)),
    Limits(64, 4, widths=(4, 8), heights=(1, 2, 4)),
    shares=True,
    min_shared_tokens=4,
    past_sizes=(8, 16),
)
INVARIANT = replace(PLAIN, limits=Limits(64, 1), suffix_limits=Limits(64, 1))
PLANNERS = st.sampled_from([PLAIN, PADDED, INVARIANT, replace(PLAIN, shares=False)])


def row(state: int, num_shared: int, num_own: int) -> Row:
    """Rows of one state share its first tokens; every state begins with the token 9."""
    shared = [9, *[state] * (num_shared - 1)] if num_shared else []
    return Row(array("i", [*shared, *[100] * num_own]), (Read((num_shared + num_own - 1,), (1,)),), num_shared)


ROWS = st.lists(
    st.builds(row, st.integers(1, 3), st.sampled_from([0, 2, 4, 7, 12, 20]), st.integers(1, 12)), max_size=9
)
TEMPLATE = array("i", [9]).tobytes()


def key(state: int, num_shared: int) -> bytes:
    return row(state, num_shared, 1).shared_key()


KEPT = st.builds(
    lambda keys, pins: Kept(frozenset(keys), pins),
    st.sets(st.builds(key, st.integers(1, 3), st.sampled_from([4, 7, 12, 20]))),
    st.sampled_from([(), (TEMPLATE,)]),
)


@given(PLANNERS, ROWS, KEPT)
def test_every_row_is_read_exactly_once(planner: Planner, rows: list[Row], kept: Kept) -> None:
    read = Counter(index for planned in planner.plan(rows, kept) if planned.reads for index in planned.rows)
    assert read == Counter(range(len(rows)))


@given(PLANNERS, ROWS, KEPT)
def test_a_prefix_is_at_hand_when_a_row_continues_it_and_is_the_rows_own(
    planner: Planner, rows: list[Row], kept: Kept
) -> None:
    made: set[bytes] = set()
    for planned in planner.plan(rows, kept):
        assert len(planned.starts) == len(planned.rows)
        assert len(planned.past_keys) in (0, len(planned.rows))
        for index, start, past in zip(planned.rows, planned.starts, planned.past_keys, strict=False):
            assert past in made or past in kept
            assert rows[index].input_ids.tobytes()[: start * 4] == past  # rows of text: a key is its tokens
        if not planned.past_keys:
            assert not any(planned.starts)
        made.update(planned.keep_keys)


@given(PLANNERS, ROWS, KEPT)
def test_no_prefix_is_computed_twice_and_none_that_is_at_hand(planner: Planner, rows: list[Row], kept: Kept) -> None:
    computed = [key for planned in planner.plan(rows, kept) for key in planned.keep_keys]
    assert len(computed) == len(set(computed))
    assert not any(key in kept for key in computed)


@given(PLANNERS, ROWS, KEPT)
def test_a_pass_is_within_the_limits(planner: Planner, rows: list[Row], kept: Kept) -> None:
    for planned in planner.plan(rows, kept):
        chosen = planned.select(rows)
        lengths = [one.num_tokens - start for one, start in zip(chosen, planned.starts, strict=True)]
        assert min(lengths) > 0
        assert planned.width >= max(lengths)
        assert planned.num_rows >= len(chosen)
        assert planned.count_tokens(chosen) == sum(lengths)
        assert len(chosen) <= planner.limits.max_rows
        assert len(chosen) == 1 or planned.num_rows * planned.width <= planner.limits.max_tokens


@given(ROWS, KEPT)
def test_the_passes_of_a_row_with_batch_invariant_are_those_of_the_row_alone(rows: list[Row], kept: Kept) -> None:
    def passes_of(planned: Sequence[Pass]) -> set[tuple[object, ...]]:
        return {(one.starts, one.past_keys, one.keep_keys, one.reads, one.num_rows, one.width) for one in planned}

    alone = set[tuple[object, ...]]().union(*(passes_of(INVARIANT.plan([one], kept)) for one in rows))
    assert passes_of(INVARIANT.plan(rows, kept)) == alone


def test_new_states_with_a_question_each_are_read_and_kept_in_one_pass() -> None:
    rows = [row(1, 7, 3), row(2, 7, 4)]
    (planned,) = PLAIN.plan(rows, Kept())
    assert planned == Pass((1, 0), (0, 0), (), (key(2, 7), key(1, 7)), True, 2, 11)


def test_a_new_state_with_several_questions_is_computed_before_them() -> None:
    rows = [row(1, 7, 3), row(1, 7, 4)]
    assert PLAIN.plan(rows, Kept()) == [
        Pass((0,), (0,), (), (key(1, 7),), False, 1, 7),
        Pass((1, 0), (7, 7), (key(1, 7),) * 2, (), True, 2, 4),
    ]


def test_a_state_that_is_at_hand_is_continued() -> None:
    assert PLAIN.plan([row(1, 7, 3)], Kept({key(1, 7)})) == [Pass((0,), (7,), (key(1, 7),), (), True, 1, 3)]


def test_a_new_state_goes_on_from_the_pinned_beginning_of_the_template() -> None:
    rows = [row(1, 7, 3), row(1, 7, 4)]
    first, _ = PLAIN.plan(rows, Kept(pinned=[TEMPLATE]))
    assert first == Pass((0,), (1,), (TEMPLATE,), (key(1, 7),), False, 1, 6)


def test_rows_of_different_states_share_a_pass_only_where_it_has_a_place_for_each_prefix() -> None:
    rows, kept = [row(1, 7, 3), row(2, 7, 4)], Kept({key(1, 7), key(2, 7)})
    assert [planned.rows for planned in PLAIN.plan(rows, kept)] == [(0,), (1,)]
    assert PADDED.plan(rows, kept) == [Pass((1, 0), (7, 7), (key(2, 7), key(1, 7)), (), True, 2, 4)]


def test_the_prefixes_of_one_pass_have_a_bound() -> None:
    limits = Limits(1 << 20, 64)
    planner = replace(PLAIN, limits=limits, suffix_limits=limits, cost=CostModel(1 << 20, 1))
    rows = [row(1, MAX_PAST_TOKENS // 2 - 1, 1) for _ in range(5)]
    read = [planned.rows for planned in planner.plan(rows, Kept()) if planned.reads]
    assert [len(rows) for rows in read] == [2, 2, 1]


@pytest.mark.parametrize("module", ["onepass.forward.plan", "onepass.forward.buckets"])
def test_planning_needs_no_tensor_library(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules or 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
