"""The figures of an evaluation and their intervals, in numpy alone. It knows nothing of questions or files.

`confidence` is the probability of the option that was answered, `is_right` whether that was the right one; both have
the shape (rows,). `probabilities` has the shape (rows, options), `labels` (rows,) the places of the right options.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Interval = tuple[float, float]

NUM_BINS = 10
NUM_RESAMPLES = 1000
Z_95 = NormalDist().inv_cdf(0.975)


def wilson_interval(num_right: int, num_rows: int, z: float = Z_95) -> Interval:
    """The interval of a share by Wilson (1927), without continuity correction. (0, 1) of no rows."""
    if not num_rows:
        return 0.0, 1.0
    share = num_right / num_rows
    scale = 1 + z * z / num_rows
    centre = (share + z * z / (2 * num_rows)) / scale
    half = z * math.sqrt(share * (1 - share) / num_rows + z * z / (4 * num_rows**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def brier_scores(probabilities: Floats, labels: Ints) -> Floats:
    """By row: half the sum of the squared errors, so that 0 is the best and 1 the worst for any number of options."""
    errors = probabilities.copy()
    errors[np.arange(len(labels)), labels] -= 1
    scores: Floats = np.square(errors).sum(axis=1) / 2
    return scores


def log_losses(probabilities: Floats, labels: Ints) -> Floats:
    """By row, in nats; a probability below the least step of a float64 counts as that step."""
    losses: Floats = -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], np.finfo(np.float64).eps))
    return losses


def width_bins(confidence: Floats) -> Ints:
    """The bin of each row, of `NUM_BINS` bins of equal width, each with its lower edge and the last with both."""
    return np.minimum((confidence * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def mass_bins(confidence: Floats) -> Ints:
    """The bin of each row, of up to `NUM_BINS` bins of nearly equal numbers of rows."""
    places = np.empty(len(confidence), dtype=np.int64)
    places[np.argsort(confidence, kind="stable")] = np.arange(len(confidence))
    return places * NUM_BINS // max(1, len(confidence))


def calibration_error(confidence: Floats, is_right: Bools, bins: Ints) -> float:
    """The expected calibration error (Naeini et al. 2015): |accuracy - mean confidence| of a bin, weighted by rows."""
    gaps = np.bincount(bins, weights=confidence - is_right, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def calibration_error_interval(confidence: Floats, is_right: Bools, seed: int = 0) -> Interval:
    """The 95% percentile bootstrap interval of the error over bins of equal width; the same for the same rows."""
    random = np.random.default_rng(seed)
    bins, gaps = width_bins(confidence), confidence - is_right
    size = len(confidence)
    errors = np.empty(NUM_RESAMPLES)
    for number in range(NUM_RESAMPLES):
        drawn = random.integers(0, size, size)
        errors[number] = np.abs(np.bincount(bins[drawn], weights=gaps[drawn], minlength=NUM_BINS)).sum() / size
    low, high = np.quantile(errors, (0.025, 0.975))
    return float(low), float(high)


def area_under_roc(scores: Floats, is_positive: Bools) -> float | None:
    """The Mann-Whitney statistic with ties counted half; None unless both classes are there."""
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative:
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[places]
    return float((ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def risk_curve(confidence: Floats, is_right: Bools) -> tuple[Floats, Floats, Floats]:
    """(coverage, share of wrong answers, lowest confidence) with the most confident first.

    Rows of equal confidence are answered together or not at all, as a threshold does it."""
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    wrong = np.cumsum(~is_right[order])
    answered = np.arange(1, len(order) + 1)
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    return answered[is_last] / len(order), (wrong / answered)[is_last], ordered[is_last]


def coverage_at_error(confidence: Floats, is_right: Bools, max_error: float) -> float:
    """The largest share of the rows that one threshold answers with at most that share of wrong answers."""
    coverage, risk, _ = risk_curve(confidence, is_right)
    return float(np.max(coverage[risk <= max_error], initial=0.0))


def binomial_tail(num_right: int, num_rows: int, share: float) -> float:
    """P(X >= num_right), X binomial."""
    if num_right <= 0:
        return 1.0
    if share in (0.0, 1.0):
        return share
    count = np.arange(num_right, num_rows + 1)
    log_choose = np.array(
        [math.lgamma(num_rows + 1) - math.lgamma(k + 1) - math.lgamma(num_rows - k + 1) for k in count]
    )
    terms = np.exp(log_choose + count * math.log(share) + (num_rows - count) * math.log1p(-share))
    return float(min(1.0, terms.sum()))


def paired_difference(is_right: Bools, is_right_there: Bools) -> tuple[float, Interval, float]:
    """(difference of accuracy, its 95% interval, exact p value), first minus second, on the same rows.

    The interval is Agresti and Min's (2005) with half a row added to each cell; the p value McNemar's exact one."""
    num_better = int((is_right & ~is_right_there).sum())
    num_worse = int((~is_right & is_right_there).sum())
    total, better, worse = len(is_right) + 2, num_better + 0.5, num_worse + 0.5
    centre = (better - worse) / total
    half = Z_95 * math.sqrt(better + worse - (better - worse) ** 2 / total) / total
    num_apart = num_better + num_worse
    p_value = min(1.0, 2 * binomial_tail(max(num_better, num_worse), num_apart, 0.5)) if num_apart else 1.0
    difference = (num_better - num_worse) / len(is_right)
    return difference, (max(-1.0, centre - half), min(1.0, centre + half)), p_value
