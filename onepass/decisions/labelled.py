"""Labelled rows: a line of JSON to a request and its right answers. It knows nothing of what a server answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onepass.errors import InvalidRequest
from onepass.wire.body import read_json
from onepass.wire.request import Question
from onepass.wire.schema import parse_request

SINGLE_ID = "question"  # the id of the question in a line that asks one
_NOUL_NAMES = {"true": 0, "yes": 0, "false": 1, "no": 1}  # the place among a noul's options


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One line: what to ask, and for some of its questions the place of the right option."""

    number: int  # the line, from 1
    body: bytes  # the request as it is sent, without the right answers
    questions: Mapping[str, Question]
    labels: Mapping[str, int]


def read_row(number: int, line: bytes) -> LabelledRow:
    """Raises `InvalidRequest`, which names the field."""
    value = read_json(line)
    if not isinstance(value, dict):
        raise InvalidRequest.at((), "the line must be an object with a state, questions and answers")
    fields = dict(value)
    if "question" in fields:
        fields, answers = _from_single(fields)
    else:
        answers = fields.pop("answers", None)
    if not isinstance(answers, dict):
        raise InvalidRequest.at(("answers",), "must be an object: the right answer by the question's id")
    body = json.dumps({name: item for name, item in fields.items() if name != "id"}, ensure_ascii=False).encode()
    questions = {question.id: question for question in parse_request(body).questions}
    labels = {}
    for id_, answer in answers.items():
        if id_ not in questions:
            raise InvalidRequest.at(("answers", id_), "answers no question of this line")
        if answer is not None:  # not labelled
            labels[id_] = place_of(answer, questions[id_])
    return LabelledRow(number, body, questions, labels)


def _from_single(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if "questions" in fields or "answers" in fields:
        raise InvalidRequest.at(("question",), "must not stand beside `questions` or `answers`")
    if "answer" not in fields:
        raise InvalidRequest.at(("answer",), "is missing: the right answer to `question`")
    answers = {SINGLE_ID: fields.pop("answer")}
    return fields | {"questions": {SINGLE_ID: fields.pop("question")}}, answers


def place_of(answer: Any, question: Question) -> int:
    """The place of the right option among the question's. Raises `InvalidRequest`."""
    where = ("answers", question.id)
    if question.type == "noul":
        name = str(answer).lower() if isinstance(answer, (bool, str)) else ""
        if name not in _NOUL_NAMES:
            raise InvalidRequest.at(where, "must be true or false: the question is a noul")
        return _NOUL_NAMES[name]
    if question.type == "score":
        if isinstance(answer, int) and not isinstance(answer, bool):
            answer = str(answer)
        if answer not in question.options:
            raise InvalidRequest.at(where, f"must be the number of a level, 0 to {len(question.options) - 1}")
    elif not isinstance(answer, str) or answer not in question.options:
        raise InvalidRequest.at(where, "must be one of the options in `criteria`")
    return question.options.index(answer)


def question_key(question: Question) -> str:
    """The same for the same type, instructions and criteria, whatever the id: 16 hexadecimal digits."""
    content = [question.type, question.instructions, list(zip(question.options, question.descriptions, strict=True))]
    return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:16]
