"""Crossed questions are valid for any text, and what is asked of WordNet has the answer that WordNet gives."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "train"))

from crossed import Words, crossed, read_nouns
from data import parse_row
from generate import Maker
from option_sets import OPTION_SETS
from teacher import unanswered

ROWS: list[dict[str, Any]] = [
    {"dataset": "a", "state": "Where is my parcel?", "question": {"type": "noul", "instructions": "Lost?", "criteria": None}, "answer": True},
    {"dataset": "b", "state": {"n": 1}, "question": {"type": "choice", "instructions": "Which?", "criteria": {"x": None, "y": None}}, "answer": "x"},
    {"dataset": "c", "state": "long " * 400, "question": {"type": "score", "instructions": "How?", "criteria": ["low", "high"]}, "answer": 0},
]  # fmt: skip

# in the format of wndb(5WN): offset, file, type, words (hexadecimal count), pointers, gloss
NOUNS = """  1 This line is a part of the licence.
00000001 03 n 01 bird 0 003 ~ 00000002 n 0000 ~ 00000003 n 0000 ~ 00000004 n 0000 | a warm-blooded animal that lays eggs
00000002 05 n 02 barn_owl 0 Tyto_alba 0 001 @ 00000001 n 0000 | an owl with a white face that lives in barns; "the owl flew out"
00000003 05 n 01 robin 0 001 @ 00000001 n 0000 | a small bird with a red breast that sings in winter
00000004 05 n 02 mallard 0 wild_duck 0 001 @ 00000001 n 0000 | a duck of ponds, the male of which has a green head
"""


@pytest.fixture
def nouns(tmp_path: Path) -> Path:
    path = tmp_path / "data.noun"
    path.write_text(NOUNS, encoding="utf-8")
    return path


def test_crossed_rows_are_valid_without_an_answer_and_keep_to_short_states() -> None:
    made = list(crossed(ROWS, 300, seed=0))
    assert made == list(crossed(ROWS, 300, seed=0))
    assert {row["dataset"] for row in made} == {"made_crossed_options", "made_crossed_sets", "made_crossed_plain"}
    assert {row["question"]["type"] for row in made} == {"noul", "choice", "score"}
    for row in made:
        assert row["answer"] is None
        assert row["state"] in ("Where is my parcel?", {"n": 1})
        assert len(unanswered(row).options) >= 2


def test_the_names_of_an_option_set_name_one_option_each() -> None:
    for name, (questions, options) in OPTION_SETS.items():
        names = sorted(one.lower() for names in options for one in names.split("/"))
        assert questions
        assert all(one != other for one, other in pairwise(names)), name


def test_wordnet_s_file_is_read_as_its_manual_describes(nouns: Path) -> None:
    read = read_nouns(nouns)
    assert read["00000002"].words == ("barn owl",)  # not the species' name
    assert read["00000002"].broader == ("00000001",)
    assert read["00000002"].gloss == "an owl with a white face that lives in barns"
    assert read["00000001"].broader == ()


def test_the_answer_about_a_word_is_what_wordnet_says_of_it(nouns: Path) -> None:
    read, make = read_nouns(nouns), Maker(random.Random(0))
    words, asked = Words(read), set()
    synsets = list(read.values())
    for _ in range(300):
        row = words.ask(make)
        question, right, state = row["question"]["instructions"], row["answer"], row["state"]
        asked.add(question)
        assert parse_row(row).options[parse_row(row).answer] == right
        if question in ("Which word is defined?", "What is described?", "Pick the word."):
            assert any(one.gloss == state and right in one.words for one in synsets)
        elif question in ("What does it mean?", "Which definition fits?"):
            assert any(one.gloss == right and state in one.words for one in synsets)
        elif question in ("Which word means the same?", "Find the synonym."):
            assert any({state, right} <= set(one.words) for one in synsets)
        else:
            assert right == "animal"
    assert len(asked) == 9


def test_files_without_related_nouns_are_refused() -> None:
    with pytest.raises(ValueError, match="no group of three"):
        Words({})
