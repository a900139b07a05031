"""Scores to answers, by the contract's formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.wire.answer import answer, choice_confidence, probabilities, score_confidence
from onepass.wire.request import Question

scores = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=255)


def question(kind: str, count: int) -> Question:
    options = ("true", "false") if kind == "noul" else tuple(str(n) for n in range(count))
    return Question("q", kind, None, options, (None,) * len(options))  # type: ignore[arg-type]


@given(scores, st.floats(0.01, 100))
def test_probabilities_are_a_distribution_in_the_order_of_the_scores(values: list[float], temperature: float) -> None:
    result = probabilities(values, temperature)
    assert all(0 <= p <= 1 for p in result)
    assert abs(math.fsum(result) - 1) <= 1e-12
    for a, b in zip(range(len(values)), range(1, len(values)), strict=False):
        assert (values[a] < values[b]) <= (result[a] <= result[b])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_never_an_answer(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        probabilities([0.0, bad])


@pytest.mark.parametrize(
    ("levels", "confidence"),
    [
        ((0.5, 0, 0.5), 0.0),
        ((0, 0.14, 0.86, 0, 0), 0.883),
        ((0, 0, 0.48, 0.52), 0.52),
        ((0, 0.03, 0, 0.97), 0.94),
        ((1,), 1.0),
    ],
)
def test_a_scores_confidence_is_the_official_one(levels: tuple[float, ...], confidence: float) -> None:
    assert score_confidence(levels) == pytest.approx(confidence, abs=5e-4)


def test_a_choices_confidence_runs_from_chance_to_certainty() -> None:
    assert choice_confidence([0.88, 0.12]) == pytest.approx(0.76)
    assert choice_confidence([0.25] * 4) == 0
    assert choice_confidence([0, 1, 0]) == 1
    assert choice_confidence([1.0]) == 1


@given(scores)
def test_everything_is_computed_from_the_very_numbers_returned(values: list[float]) -> None:
    by_option = probabilities(values)
    choice = answer(question("choice", len(values)), by_option)
    assert list(choice["probabilities"].values()) == by_option
    assert choice["choice"] == str(by_option.index(max(by_option)))
    assert 0 <= choice["confidence"] <= 1
    levels = by_option[:10]
    score = answer(question("score", len(levels)), levels)
    assert score["score"] == pytest.approx(sum(n * p for n, p in enumerate(levels)))
    assert 0 <= score["confidence"] <= 1


def test_a_tie_goes_to_the_first() -> None:
    assert answer(question("choice", 3), [0.2, 0.4, 0.4])["choice"] == "1"


def test_the_legend_is_the_levels_unchanged() -> None:
    levels = ("20", {"a": 1}, ["x"])
    result = answer(Question("q", "score", None, ("0", "1", "2"), levels), [0.2, 0.3, 0.5])
    assert result["legend"] == {"0": "20", "1": {"a": 1}, "2": ["x"]}
    assert result["score"] == pytest.approx(1.3)


def test_a_noul_is_the_probability_of_yes() -> None:
    assert answer(question("noul", 2), [0.75, 0.25]) == {"type": "noul", "noul": 0.75}
