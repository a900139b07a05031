"""Labelled rows: every good form is read, every bad one is refused with the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.decisions.labelled import question_key, read_row
from onepass.errors import ApiError, InvalidRequest

TEAM = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": None, "sales": "Wants to buy"}}
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "A refund?"},
    "team": TEAM,
    "anger": {"type": "score", "criteria": ["calm", "cross", "furious"]},
}


def line(answers: Any, **fields: Any) -> bytes:
    return json.dumps({"state": "Pay me back", "questions": QUESTIONS, "answers": answers, **fields}).encode()


@pytest.mark.parametrize(
    ("answers", "labels"),
    [
        ({"refund": True, "team": "sales", "anger": 2}, {"refund": 0, "team": 1, "anger": 2}),
        ({"refund": False}, {"refund": 1}),
        ({"refund": "Yes", "anger": "1"}, {"refund": 0, "anger": 1}),
        ({"refund": None, "team": "billing"}, {"team": 0}),
        ({}, {}),
    ],
)
def test_right_answers_become_places_of_options(answers: Any, labels: dict[str, int]) -> None:
    row = read_row(7, line(answers, id="ticket-1"))
    assert (row.number, row.labels) == (7, labels)
    assert json.loads(row.body) == {"state": "Pay me back", "questions": QUESTIONS}


def test_a_line_may_ask_one_question() -> None:
    row = read_row(1, json.dumps({"state": "x", "question": TEAM, "answer": "sales"}).encode())
    assert row.labels == {"question": 1}
    assert json.loads(row.body) == {"state": "x", "questions": {"question": TEAM}}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (line({"refund": 1}), "answers.refund"),
        (line({"refund": "perhaps"}), "answers.refund"),
        (line({"team": "Billing"}), "answers.team"),
        (line({"team": ["billing"]}), "answers.team"),
        (line({"anger": 3}), "answers.anger"),
        (line({"anger": True}), "answers.anger"),
        (line({"anger": 1.5}), "answers.anger"),
        (line({"other": True}), "answers.other"),
        (line(["billing"]), "answers"),
        (b'{"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}}', "answers"),
        (json.dumps({"state": "x", "question": TEAM}).encode(), "answer"),
        (json.dumps({"state": "x", "question": TEAM, "answer": "sales", "answers": {}}).encode(), "question"),
        (json.dumps({"state": 3, "questions": QUESTIONS, "answers": {}}).encode(), "state"),
    ],
)
def test_a_bad_line_names_its_field(content: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_row(1, content)
    assert ".".join(map(str, caught.value.detail()[0]["loc"][1:])) == field


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_line_brings_the_reader_down(content: bytes) -> None:
    with pytest.raises(ApiError):
        read_row(1, content)


def test_the_same_question_has_one_key_whatever_its_id() -> None:
    first = read_row(1, json.dumps({"state": "x", "questions": {"a": TEAM, "b": TEAM}, "answers": {}}).encode())
    other = read_row(2, line({}))
    keys = {question_key(question) for question in first.questions.values()}
    assert keys == {question_key(other.questions["team"])}
    assert question_key(other.questions["refund"]) not in keys
