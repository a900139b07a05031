"""The planner's promises, on any rows, costs and limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.forward.batches import Batch, CostModel, Limits, plan_batches

COSTS = st.builds(CostModel, st.integers(0, 300), st.integers(0, 5))  # whole numbers: sums are exact
LADDERS = st.one_of(st.just(()), st.sets(st.integers(1, 40), min_size=1).map(lambda sizes: tuple(sorted(sizes))))
LIMITS = st.builds(Limits, st.integers(1, 300), st.integers(1, 8), LADDERS, LADDERS)
LENGTHS = st.lists(st.integers(1, 60), max_size=25)
PREFIXED = st.lists(st.tuples(st.integers(1, 60), st.sampled_from([None, "a", "b"])), max_size=25)


def total_cost(batches: list[Batch], cost: CostModel) -> float:
    return sum(cost(batch.num_rows, batch.width) for batch in batches)


def price(rows: list[int], lengths: list[int], cost: CostModel, limits: Limits) -> float:
    return cost(*limits.bucket(len(rows), max(lengths[row] for row in rows)))


@given(PREFIXED, COSTS, LIMITS)
def test_every_row_is_in_exactly_one_batch_and_every_batch_within_the_limits(
    rows: list[tuple[int, str | None]], cost: CostModel, limits: Limits
):
    lengths, prefixes = [length for length, _ in rows], [prefix for _, prefix in rows]
    batches = plan_batches(lengths, cost, limits, prefixes)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(rows)))
    for batch in batches:
        assert batch.num_rows >= len(batch.rows)
        assert batch.width >= max(lengths[row] for row in batch.rows)
        assert len({prefixes[row] for row in batch.rows}) == 1
        assert len(batch.rows) == 1 or len(batch.rows) <= limits.max_rows
        assert len(batch.rows) == 1 or batch.num_rows * batch.width <= limits.max_tokens


@given(PREFIXED, COSTS, LIMITS)
def test_the_same_rows_give_the_same_plan_in_order_of_arrival(
    rows: list[tuple[int, str | None]], cost: CostModel, limits: Limits
):
    lengths, prefixes = [length for length, _ in rows], [prefix for _, prefix in rows]
    batches = plan_batches(lengths, cost, limits, prefixes)
    assert plan_batches(lengths, cost, limits, prefixes) == batches
    assert [min(batch.rows) for batch in batches] == sorted(min(batch.rows) for batch in batches)


@given(LENGTHS, COSTS, LIMITS)
def test_a_plan_is_never_dearer_than_one_row_at_a_time(lengths: list[int], cost: CostModel, limits: Limits):
    alone = sum(price([row], lengths, cost, limits) for row in range(len(lengths)))
    assert total_cost(plan_batches(lengths, cost, limits), cost) <= alone


@given(LENGTHS, COSTS, LIMITS, st.booleans())
def test_a_plan_is_never_dearer_than_filling_batches_in_order_of_length(
    lengths: list[int], cost: CostModel, limits: Limits, longest_first: bool
):
    filled: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=longest_first):
        grown = [*filled[-1], row] if filled else [row]
        if filled and limits.allow(len(grown), max(lengths[row] for row in grown)):
            filled[-1] = grown
        else:
            filled.append([row])
    total = sum(price(batch, lengths, cost, limits) for batch in filled)
    assert total_cost(plan_batches(lengths, cost, limits), cost) <= total


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [rows[0], *group], *rest[i + 1 :]]


@given(st.lists(st.integers(1, 60), max_size=6), COSTS, LIMITS)
def test_no_plan_at_all_is_cheaper(lengths: list[int], cost: CostModel, limits: Limits):
    def is_allowed(batch: list[int]) -> bool:
        return limits.allow(len(batch), max(lengths[row] for row in batch))

    cheapest = min(
        sum(price(batch, lengths, cost, limits) for batch in batches)
        for batches in partitions(list(range(len(lengths))))
        if all(is_allowed(batch) for batch in batches)
    )
    assert total_cost(plan_batches(lengths, cost, limits), cost) == cheapest


ROOM = Limits(max_tokens=10_000, max_rows=32)


@pytest.mark.parametrize(
    ("lengths", "cost", "limits", "expected"),
    [
        ([], CostModel(1, 1), ROOM, []),
        ([50, 50, 50], CostModel(10, 1), ROOM, [(0, 1, 2)]),  # nothing to pad
        ([300, 40], CostModel(10, 1), ROOM, [(0,), (1,)]),  # 260 tokens of padding against one launch
        ([40, 300, 41, 290], CostModel(20, 1), ROOM, [(2, 0), (1, 3)]),
        ([300, 40], CostModel(500, 1), ROOM, [(0, 1)]),  # a launch dearer than the padding
        ([50] * 5, CostModel(10, 1), Limits(max_tokens=100, max_rows=32), [(0,), (1, 2), (3, 4)]),
        ([50] * 5, CostModel(10, 1), Limits(max_tokens=10_000, max_rows=3), [(0, 1), (2, 3, 4)]),
        ([5000, 10], CostModel(10, 1), Limits(max_tokens=100, max_rows=32), [(0,), (1,)]),  # too long for any budget
        ([50, 60], CostModel(10, 1), Limits(10_000, 32, widths=(64, 128)), [(1, 0)]),  # one bucket
    ],
)
def test_plans_by_example(lengths: list[int], cost: CostModel, limits: Limits, expected: list[tuple[int, ...]]):
    assert [batch.rows for batch in plan_batches(lengths, cost, limits)] == expected


def test_a_batch_says_the_bucket_it_is_padded_to():
    limits = Limits(1000, 32, widths=(64, 128), heights=(1, 2, 4))
    assert plan_batches([50, 60, 61], CostModel(1000, 1), limits) == [Batch((2, 1, 0), 4, 64)]
    assert plan_batches([500], CostModel(0, 1), limits) == [Batch((0,), 1, 500)]


def test_rows_that_continue_different_prefixes_never_run_together():
    batches = plan_batches([9, 9, 9, 9], CostModel(100, 1), ROOM, ["a", None, "a", "b"])
    assert [batch.rows for batch in batches] == [(0, 2), (1,), (3,)]


@pytest.mark.parametrize(
    ("samples", "launch", "per_token"),
    [
        ([(10, 30.0), (20, 50.0), (40, 90.0)], 10, 2),
        ([(10, 5.0), (20, 15.0)], 0, 0.7),  # a line that would start at -5
        ([(10, 5.0), (20, 3.0)], 4, 0),  # more tokens in less time is noise
        ([(10, 5.0)], 0, 0.5),
    ],
)
def test_a_cost_model_is_fitted_to_measurements(samples: list[tuple[int, float]], launch: float, per_token: float):
    model = CostModel.fit(samples)
    assert (model.launch, model.per_token) == pytest.approx((launch, per_token))


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 100)), min_size=1))
def test_a_fitted_cost_is_never_below_zero(samples: list[tuple[int, float]]):
    model = CostModel.fit(samples)
    assert model.launch >= 0
    assert model.per_token >= 0
