"""The option scores of a question to its answer: temperature, softmax, confidence. Pure arithmetic in doubles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onepass.wire.schema import Question


def probabilities(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Softmax of `scores` / `temperature`. Raises `ValueError` for a score that is not finite."""
    if not all(map(math.isfinite, scores)):
        raise ValueError("a score is not finite")
    top = max(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def answer(question: Question, by_option: Sequence[float]) -> dict[str, Any]:
    """The answer in the wire's form from one probability an option, in the order of `question.options`.

    Every derived number is computed from the very probabilities returned, by the formulas of the official service's
    documentation.
    """
    named = dict(zip(question.options, by_option, strict=True))
    if question.type == "noul":
        return {"type": "noul", "noul": named["true"]}
    best = max(range(len(by_option)), key=by_option.__getitem__)  # the first on a tie
    if question.type == "choice":
        return {
            "type": "choice",
            "choice": question.options[best],
            "confidence": choice_confidence(by_option),
            "probabilities": named,
        }
    return {
        "type": "score",
        "score": math.fsum(level * p for level, p in enumerate(by_option)),
        "confidence": score_confidence(by_option),
        "legend": dict(zip(question.options, question.descriptions, strict=True)),
        "probabilities": named,
    }


def choice_confidence(by_option: Sequence[float]) -> float:
    """How far the top probability lies above chance: 0 at chance, 1 at certainty."""
    count = len(by_option)
    return 1.0 if count == 1 else max(0.0, (count * max(by_option) - 1) / (count - 1))


def score_confidence(by_level: Sequence[float]) -> float:
    """One minus the mean distance from the first mode, in units of a uniform answer's distance from the middle."""
    count = len(by_level)
    if count == 1:
        return 1.0
    mode = max(range(count), key=by_level.__getitem__)
    spread = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - math.fsum(p * abs(level - mode) for level, p in enumerate(by_level)) / spread)
