"""Minimal pairs: each grammar's two rows are valid, differ in little, and their answers are what the text says."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from typing import Any

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "train"))

from data import parse_row
from generate import MONTHS, Maker
from pairs import GRAMMARS, Pair, make_pairs, near, pair_date, pair_number, pair_route, pair_threshold

Grammar = Any


def made(grammar: Grammar, count: int = 200) -> list[Pair]:
    make = Maker(random.Random(7))
    return [grammar(make) for _ in range(count)]


def text_of(row: dict[str, Any]) -> str:
    return json.dumps(row["state"], ensure_ascii=False)


@pytest.mark.parametrize("grammar", [grammar for grammar, _ in GRAMMARS])
def test_the_rows_of_a_pair_share_the_question_and_differ_in_state_and_answer(grammar: Grammar) -> None:
    for first, second in made(grammar):
        assert first["question"]["instructions"] == second["question"]["instructions"]
        assert first["question"]["type"] == second["question"]["type"]
        assert first["state"] != second["state"]
        told = [parse_row(row) for row in (first, second)]
        right = [str(one.options[one.answer] if one.type == "choice" else one.answer) for one in told]
        assert re.sub(r"\W|_", "", right[0]).lower() != re.sub(r"\W|_", "", right[1]).lower()


@pytest.mark.parametrize("grammar", [grammar for grammar, _ in GRAMMARS])
def test_no_slot_is_left_open(grammar: Grammar) -> None:
    for pair in made(grammar):
        for row in pair:
            assert not re.search(
                r"<\w+>|\{\w+\}|\{\d\}|\x00|\\u0000",
                json.dumps(
                    [
                        row["state"] if isinstance(row["state"], str) else list(row["state"].values()),
                        row["question"]["instructions"],
                    ]
                ),
            )


@pytest.mark.parametrize("grammar", [grammar for grammar, _ in GRAMMARS])
def test_the_labels_of_a_choice_are_distinct_and_none_is_a_whole_number(grammar: Grammar) -> None:
    """An object of JSON with whole numbers for keys loses its order in some libraries."""
    for pair in made(grammar):
        for row in pair:
            if row["question"]["type"] == "choice":
                labels = list(row["question"]["criteria"])
                assert len({label.lower() for label in labels}) == len(labels) >= 2
                assert not any(re.fullmatch(r"\d+", label) for label in labels)


def test_the_destination_is_the_city_after_to() -> None:
    checked = 0
    for pair in made(pair_route, 400):
        for row in pair:
            if row["question"]["type"] != "noul" or not isinstance(row["state"], str):
                continue
            found = re.search(r"from (\w+) to (\w+)", row["state"])
            asked = re.fullmatch(r"(?:Is (\w+) the destination|Does it go to (\w+))\?", row["question"]["instructions"])
            if found and asked:
                checked += 1
                assert row["answer"] is (found[2] == (asked[1] or asked[2]))
    assert checked > 20


def test_a_limit_is_broken_by_what_is_above_it() -> None:
    checked = 0
    for pair in made(pair_threshold, 400):
        for row in pair:
            state = row["state"]
            if isinstance(state, dict) and row["question"]["instructions"] in (
                "Is the rule kept?",
                "Is the limit exceeded?",
            ):
                limit, value = (int(re.findall(r"\d+", state[key])[-1]) for key in ("rule", "case"))
                checked += 1
                assert value != limit
                assert row["answer"] is ((value < limit) == (row["question"]["instructions"] == "Is the rule kept?"))
    assert checked > 20


def test_what_is_received_after_the_due_date_is_late() -> None:
    def order(text: str) -> tuple[int, int]:
        month = next((i for i, name in enumerate(MONTHS) if name in text), None)
        if month is None:
            _, number, day = map(int, text.split("-"))
            return number, day
        return month, next(int(part) for part in re.findall(r"\d+", text) if len(part) < 3)

    checked = 0
    for pair in made(pair_date, 400):
        for row in pair:
            if isinstance(row["state"], dict) and "due" in row["state"]:
                late = order(row["state"]["received"]) > order(row["state"]["due"])
                checked += 1
                assert row["answer"] is (late == ("too late" in row["question"]["instructions"]))
    assert checked > 20


def test_a_number_that_is_named_as_right_stands_in_the_text() -> None:
    for pair in made(pair_number):
        for row in pair:
            if row["question"]["type"] == "choice":
                said = re.search(r"\d+", row["answer"])
                assert said is not None
                assert said[0] in re.findall(r"\d+", text_of(row))


def test_a_near_number_is_another_one_and_has_no_leading_zero() -> None:
    make = Maker(random.Random(0))
    for value in [11, 40, 99, 100, 1000, 70707]:
        for _ in range(100):
            other = near(make, value)
            assert other != value
            assert other > 0


def test_yes_and_no_are_even_and_the_same_seed_makes_the_same_pairs() -> None:
    pairs = make_pairs(500, 3)
    assert pairs == make_pairs(500, 3)
    assert pairs != make_pairs(500, 4)
    answers = Counter(row["answer"] for pair in pairs for row in pair if row["question"]["type"] == "noul")
    assert answers[True] == answers[False] > 200
