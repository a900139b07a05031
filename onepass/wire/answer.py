"""This module turns the option scores of a question into its answer: temperature, softmax, confidence.

It is pure arithmetic in doubles, and knows nothing of the model and of HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from onepass.wire.request import Question

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def probabilities(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return the softmax of `scores` / `temperature`. Raises `ValueError` for a score that is not finite."""
    if not all(map(math.isfinite, scores)):
        raise ValueError("a score is not finite")
    top = max(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def answer(question: Question, by_option: Sequence[float]) -> dict[str, Any]:
    """Return the answer in the wire's form. `by_option` has one probability for each of `question.options`, in order.

    Every derived number is computed from the same probabilities that are returned, by the formulas of the official
    service's documentation.
    """
    named = dict(zip(question.options, by_option, strict=True))
    if question.type == "noul":
        return {"type": "noul", "noul": named["true"]}
    best = max(range(len(by_option)), key=by_option.__getitem__)  # The first option wins a tie.
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
    """Return how far the top probability lies above chance. It is 0 at chance and 1 at certainty."""
    count = len(by_option)
    return 1.0 if count == 1 else max(0.0, (count * max(by_option) - 1) / (count - 1))


def score_confidence(by_level: Sequence[float]) -> float:
    """Return one minus the mean distance from the first mode.

    The unit of that distance is the mean distance of a uniform answer from the middle.
    """
    count = len(by_level)
    if count == 1:
        return 1.0
    mode = max(range(count), key=by_level.__getitem__)
    spread = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - math.fsum(p * abs(level - mode) for level, p in enumerate(by_level)) / spread)


def encode_response(
    *, model: str, answers: Mapping[str, Any], input_tokens: int, latency_ms: float, image_tokens: int | None = None
) -> bytes:
    """Return the body of a 200 response, with floats in full precision.

    Raises `ValueError` for a number that JSON cannot hold, so that no such number is ever sent.
    """
    usage = {"input_tokens": input_tokens, "output_tokens": 0}
    if image_tokens is not None:
        usage["image_tokens"] = image_tokens
    document = {"model": model, "answers": answers, "usage": usage, "x_latency_ms": round(latency_ms, 3)}
    return _ENCODER.encode(document).encode("utf-8")
