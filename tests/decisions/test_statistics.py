"""The figures of an evaluation against scikit-learn, scipy and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from onepass.decisions import statistics

EXACT = 1e-9


def sample(seed: int, num_rows: int = 400, num_options: int = 4) -> tuple[statistics.Floats, statistics.Ints]:
    random = np.random.default_rng(seed)
    probabilities = random.dirichlet(np.ones(num_options), num_rows)
    labels = random.integers(0, num_options, num_rows)
    labels[:num_options] = np.arange(num_options)
    return probabilities, labels


@given(total=st.integers(1, 3000), part=st.floats(0, 1))
def test_the_wilson_interval_is_scipys(total: int, part: float) -> None:
    right = round(total * part)
    expected = binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert statistics.wilson_interval(right, total) == pytest.approx((expected.low, expected.high), abs=EXACT)


@given(total=st.integers(1, 400), part=st.floats(0, 1), share=st.floats(0.01, 0.99))
def test_the_tail_of_the_binomial_is_scipys(total: int, part: float, share: float) -> None:
    right = round(total * part)
    expected = binomtest(right, total, share, alternative="greater").pvalue
    assert statistics.binomial_tail(right, total, share) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("num_options", [2, 3, 7])
def test_brier_score_and_log_loss_are_those_of_scikit_learn(num_options: int) -> None:
    probabilities, labels = sample(1, num_options=num_options)
    classes = list(range(num_options))
    brier = brier_score_loss(labels, probabilities, labels=classes, scale_by_half=True)
    assert statistics.brier_scores(probabilities, labels).mean() == pytest.approx(brier, abs=EXACT)
    loss = log_loss(labels, probabilities, labels=classes)
    assert statistics.log_losses(probabilities, labels).mean() == pytest.approx(loss, abs=EXACT)


@pytest.mark.parametrize("digits", [1, 2, 12])
def test_the_area_under_the_curve_is_that_of_scikit_learn_with_ties_too(digits: int) -> None:
    probabilities, labels = sample(2, num_options=2)
    scores = probabilities[:, 1].round(digits)
    expected = roc_auc_score(labels, scores)
    assert statistics.area_under_roc(scores, labels == 1) == pytest.approx(expected, abs=EXACT)


def test_one_class_alone_has_no_area_under_the_curve() -> None:
    assert statistics.area_under_roc(np.array([0.2, 0.7]), np.array([True, True])) is None


def test_the_calibration_error_is_the_weighted_gap_of_the_bins() -> None:
    confidence = np.array([0.95, 0.95, 0.55, 0.55])
    is_right = np.array([True, False, True, True])
    expected = 0.5 * abs(0.95 - 0.5) + 0.5 * abs(0.55 - 1.0)
    bins = statistics.width_bins(confidence)
    assert statistics.calibration_error(confidence, is_right, bins) == pytest.approx(expected, abs=EXACT)


def test_the_bins_have_their_lower_edge_and_the_last_has_both() -> None:
    assert statistics.width_bins(np.array([0.0, 0.1, 0.5, 0.999, 1.0])).tolist() == [0, 1, 5, 9, 9]


@given(st.integers(1, 500))
def test_adaptive_bins_differ_by_one_row_at_most(num_rows: int) -> None:
    counts = np.bincount(statistics.mass_bins(np.random.default_rng(0).random(num_rows)), minlength=10)
    assert counts.max() - counts.min() <= 1


def test_the_interval_of_the_calibration_error_repeats_and_holds_the_error_of_an_overconfident_model() -> None:
    random = np.random.default_rng(3)
    confidence = random.uniform(0.8, 1.0, 500)
    is_right = random.random(500) < confidence - 0.3
    low, high = statistics.calibration_error_interval(confidence, is_right)
    assert low < 0.3 < high
    assert statistics.calibration_error_interval(confidence, is_right) == (low, high)


def test_a_threshold_never_parts_rows_of_equal_confidence() -> None:
    confidence = np.array([0.9, 0.9, 0.8, 0.7])
    is_right = np.array([True, False, True, True])
    coverage, risk, threshold = statistics.risk_curve(confidence, is_right)
    assert coverage.tolist() == [0.5, 0.75, 1.0]
    assert risk.tolist() == [0.5, 1 / 3, 0.25]
    assert threshold.tolist() == [0.9, 0.8, 0.7]
    assert statistics.coverage_at_error(confidence, is_right, 0.01) == 0
    assert statistics.coverage_at_error(confidence, is_right, 0.3) == 1


def test_the_p_value_of_a_paired_difference_is_mcnemars_exact_one() -> None:
    here = np.array([True] * 70 + [False] * 30)
    there = np.array([True] * 58 + [False] * 12 + [True] * 3 + [False] * 27)
    difference, (low, high), p_value = statistics.paired_difference(here, there)
    assert difference == pytest.approx(0.09)
    assert low < difference < high
    assert p_value == pytest.approx(binomtest(12, 15).pvalue, abs=EXACT)


def test_the_interval_of_a_paired_difference_covers_the_truth() -> None:
    random = np.random.default_rng(4)
    found = 0
    for _ in range(1000):
        there = random.random(200) < 0.7
        here = np.where(random.random(200) < 0.2, random.random(200) < 0.9, there)
        _, (low, high), _ = statistics.paired_difference(here, there)
        found += low <= 0.2 * (0.9 - 0.7) <= high
    assert found >= 930
