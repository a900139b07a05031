"""Answers to labelled rows become figures: by question, by type and in all. It knows nothing of who answered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onepass.decisions import statistics
from onepass.decisions.labelled import LabelledRow, question_key
from onepass.decisions.statistics import Bools, Floats, Interval
from onepass.wire.request import Question

ERROR_LEVELS = (0.01, 0.05)  # at which the coverage is said
MAX_NAME_CHARS = 80


@dataclass(frozen=True, slots=True)
class Case:
    """One labelled question of one row, and how it was answered."""

    line: int
    key: str
    question: Question
    probabilities: Floats  # shape (options,), in the order of the question's options
    label: int
    has_flipped: bool | None = None  # with the options in another order; None: not asked

    @property
    def answer(self) -> int:
        return int(self.probabilities.argmax())

    @property
    def is_right(self) -> bool:
        return self.answer == self.label


@dataclass(frozen=True, slots=True)
class Bin:
    """One point of a reliability diagram."""

    confidence: float
    accuracy: float
    interval: Interval
    num_rows: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What is said of a question, a type, or all. Shares are from 0 to 1; None where a figure has no meaning."""

    name: str
    type: str
    num_rows: int
    accuracy: float
    accuracy_interval: Interval
    chance: float  # the accuracy of guessing, each option equally often
    most_frequent: float  # the accuracy of always answering what is right most often
    brier: float
    log_loss: float
    calibration_error: float
    calibration_error_interval: Interval
    calibration_error_adaptive: float
    area_under_roc: float | None
    mean_absolute_error: float | None
    coverage: dict[str, float]  # by the share of errors, "0.01": the share answered above one threshold
    flip_rate: float | None
    bins: list[Bin] = field(default_factory=list)
    risk_curve: list[tuple[float, float]] = field(default_factory=list)  # (coverage, share of wrong answers)
    options: list[str] = field(default_factory=list)
    confusion: list[list[int]] = field(default_factory=list)  # [right option][answered option]


def probabilities_of(answer: Mapping[str, Any], question: Question) -> Floats:
    """In the order of the question's options. Raises `ValueError` for what is no answer to the question."""
    try:
        if question.type == "noul":
            found = [float(answer["noul"]), 1 - float(answer["noul"])]
        else:
            found = [float(answer["probabilities"][option]) for option in question.options]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the answer to {question.id!r} is no answer to a {question.type}") from None
    result = np.array(found)
    if not np.all(np.isfinite(result)) or result.min() < 0 or abs(result.sum() - 1) > 1e-3:
        raise ValueError(f"the answer to {question.id!r} holds no probabilities that sum to 1")
    return result


def cases_of(row: LabelledRow, response: bytes, others: Sequence[bytes] = ()) -> list[Case]:
    """The labelled questions of a row; `others` are responses with other orders of the options.

    Raises `ValueError` for what is no answer to the row."""
    answers, *again = [answers_in(content) for content in (response, *others)]
    cases = []
    for id_, label in row.labels.items():
        question = row.questions[id_]
        probabilities = probabilities_of(answers.get(id_, {}), question)
        has_flipped = None
        if again and question.type == "choice" and len(question.options) > 1:
            found = (probabilities_of(other.get(id_, {}), question).argmax() for other in again)
            has_flipped = any(place != probabilities.argmax() for place in found)
        cases.append(Case(row.number, question_key(question), question, probabilities, label, has_flipped))
    return cases


def answers_in(response: bytes) -> dict[str, Any]:
    """Raises `ValueError`."""
    try:
        answers = json.loads(response)["answers"]
    except (ValueError, LookupError, TypeError):
        answers = None
    if not isinstance(answers, dict):
        raise ValueError("the response holds no answers")
    return answers


def reordered(body: bytes, order: int) -> bytes:
    """The request with the options of every choice in order `order`: 1 reversed, then cyclic shifts by 1, 2, …"""
    request = json.loads(body)
    for question in request["questions"].values():
        if question.get("type") == "choice":
            items = list(question["criteria"].items())
            shift = (order - 1) % len(items)
            question["criteria"] = dict(items[::-1] if order == 1 else items[shift:] + items[:shift])
    return json.dumps(request, ensure_ascii=False).encode()


def evaluate(cases: Sequence[Case]) -> list[Figures]:
    """All first, then the types, then the questions in the order in which they came. Empty of no cases."""
    if not cases:
        return []
    by_type: dict[str, list[Case]] = {}
    by_question: dict[str, list[Case]] = {}
    for case in cases:
        by_type.setdefault(case.question.type, []).append(case)
        by_question.setdefault(case.key, []).append(case)
    types = [figures(type_, type_, group) for type_, group in by_type.items()] if len(by_type) > 1 else []
    questions = [figures(name_of(group[0].question), group[0].question.type, group) for group in by_question.values()]
    return [figures("all", "all", cases), *types, *map(with_confusion, questions, by_question.values())]


def name_of(question: Question) -> str:
    text = question.instructions
    shown = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) if text else question.id
    return shown if len(shown) <= MAX_NAME_CHARS else f"{shown[:MAX_NAME_CHARS]}…"


def figures(name: str, type_: str, cases: Sequence[Case]) -> Figures:
    confidence = np.array([case.probabilities.max() for case in cases])
    is_right = np.array([case.is_right for case in cases])
    briers = [statistics.brier_scores(case.probabilities[None], np.array([case.label]))[0] for case in cases]
    losses = [statistics.log_losses(case.probabilities[None], np.array([case.label]))[0] for case in cases]
    flips = [case.has_flipped for case in cases if case.has_flipped is not None]
    coverage, risk, _ = statistics.risk_curve(confidence, is_right)
    num_right = int(is_right.sum())
    return Figures(
        name=name,
        type=type_,
        num_rows=len(cases),
        accuracy=num_right / len(cases),
        accuracy_interval=statistics.wilson_interval(num_right, len(cases)),
        chance=float(np.mean([1 / len(case.question.options) for case in cases])),
        most_frequent=most_frequent_share(cases),
        brier=float(np.mean(briers)),
        log_loss=float(np.mean(losses)),
        calibration_error=statistics.calibration_error(confidence, is_right, statistics.width_bins(confidence)),
        calibration_error_interval=statistics.calibration_error_interval(confidence, is_right),
        calibration_error_adaptive=statistics.calibration_error(confidence, is_right, statistics.mass_bins(confidence)),
        area_under_roc=roc_of(type_, cases),
        mean_absolute_error=absolute_error(cases) if type_ == "score" else None,
        coverage={str(level): statistics.coverage_at_error(confidence, is_right, level) for level in ERROR_LEVELS},
        flip_rate=sum(flips) / len(flips) if flips else None,
        bins=reliability(confidence, is_right),
        risk_curve=list(zip(coverage.tolist(), risk.tolist(), strict=True)),
    )


def most_frequent_share(cases: Iterable[Case]) -> float:
    """Each question's most frequent right answer, over all rows."""
    counts: dict[str, dict[int, int]] = {}
    for case in cases:
        of_question = counts.setdefault(case.key, {})
        of_question[case.label] = of_question.get(case.label, 0) + 1
    most = sum(max(of_question.values()) for of_question in counts.values())
    return most / sum(sum(of_question.values()) for of_question in counts.values())


def roc_of(type_: str, cases: Sequence[Case]) -> float | None:
    if type_ != "noul":
        return None
    scores = np.array([case.probabilities[0] for case in cases])
    return statistics.area_under_roc(scores, np.array([case.label == 0 for case in cases]))


def absolute_error(cases: Sequence[Case]) -> float:
    """Of the expected level, in levels."""
    levels = [float(case.probabilities @ np.arange(len(case.probabilities))) for case in cases]
    return float(np.mean([abs(level - case.label) for level, case in zip(levels, cases, strict=True)]))


def reliability(confidence: Floats, is_right: Bools) -> list[Bin]:
    """The bins of equal width that hold rows, with the least confident first."""
    bins = statistics.width_bins(confidence)
    found = []
    for place in np.unique(bins):
        inside = bins == place
        num_rows, num_right = int(inside.sum()), int(is_right[inside].sum())
        interval = statistics.wilson_interval(num_right, num_rows)
        found.append(Bin(float(confidence[inside].mean()), num_right / num_rows, interval, num_rows))
    return found


def with_confusion(of_question: Figures, cases: Sequence[Case]) -> Figures:
    options = cases[0].question.options
    table = np.zeros((len(options), len(options)), dtype=np.int64)
    np.add.at(table, ([case.label for case in cases], [case.answer for case in cases]), 1)
    of_question.options.extend(options)
    of_question.confusion.extend(table.tolist())
    return of_question
