"""The teacher: how it reads a row, that its labels do not hang on the order of options, that a run resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig

from tests.support import ROOT

sys.path.insert(0, str(ROOT / "train"))

from data import Row, parse_row
from teacher import MARK, Plan, Reader, Teacher, fit, labelled, probabilities, unanswered

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[unused1]",
    "[unused2]",
    "[unused3]",
    "[unused4]",
    "which",
    "is",
    "it",
    "red",
    "blue",
    "green",
    "yes",
    "no",
    "warm",
    ":",
    "the",
    "box",
    "low",
    "high",
]
CHOICE = Row("a", "the box is blue", "choice", "which is it", ("red", "blue", "green"), ("warm", None, None), 1)
SCORE = Row("a", "the box", "score", None, ("1/2", "2/2"), ("low", "high"), 1)
NOUL = Row("b", "the box is red", "noul", "is it red", ("yes", "no"), (None, None), 0)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Reader(folder)


@pytest.fixture
def teacher() -> Teacher:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = Teacher(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return model


def words(ids: list[int]) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_a_row_is_type_and_instructions_then_options_with_their_marks_then_the_state(reader: Reader) -> None:
    read = reader.read(CHOICE, [2, 1, 0], 512)
    assert words(read.ids) == (
        "[CLS] [unused3] which is it [SEP] green [unused1] blue [unused1] red : warm [unused1] [SEP] the box is blue [SEP]"
    )
    assert [WORDS[read.ids[at]] for at in read.marks] == [MARK] * 3
    assert read.answer == 1
    assert sum(read.segments) == len(read.ids) - 6


def test_a_score_s_levels_are_read_by_their_wording(reader: Reader) -> None:
    assert "low [unused1] high [unused1]" in words(reader.read(SCORE, [0, 1], 512).ids)


def test_a_long_state_is_cut_and_too_many_options_are_refused(reader: Reader) -> None:
    long = Row("a", "box " * 900, "choice", "which", ("red", "blue"), (None, None), 0)
    assert len(reader.read(long, [0, 1], 100).ids) == 100
    many = Row("a", "box", "choice", "which", tuple(f"red{i}" for i in range(300)), (None,) * 300, 0)
    with pytest.raises(ValueError, match="300 options do not fit"):
        reader.read(many, range(300), 512)


def test_padding_changes_no_score(reader: Reader, teacher: Teacher) -> None:
    teacher.eval()
    read = [reader.read(row, range(len(row.options)), 512) for row in (CHOICE, SCORE, NOUL)]
    together = teacher(read)
    for one, scores in zip(read, together, strict=True):
        count = len(one.marks)
        torch.testing.assert_close(teacher([one])[0], scores[:count], atol=5e-2, rtol=0)  # computed in bfloat16
        assert torch.isneginf(scores[count:]).all()


def test_labels_averaged_over_all_turns_follow_their_options(reader: Reader, teacher: Teacher) -> None:
    turned = Row("a", CHOICE.state, "choice", CHOICE.instructions, ("blue", "green", "red"), (None, None, "warm"), 0)
    first, second = probabilities(teacher, reader, [CHOICE, turned], num_orders=3)
    assert first.sum() == pytest.approx(1)
    np.testing.assert_allclose(first, second[[2, 0, 1]], atol=1e-2)
    (single,) = probabilities(teacher, reader, [CHOICE], num_orders=1)
    assert np.abs(single - first).max() > 1e-2  # a single order is not the mean


@pytest.mark.parametrize(
    ("question", "shares", "answer"),
    [
        ({"type": "choice", "instructions": "", "criteria": {"red": None, "blue": None}}, [0.3, 0.7], "blue"),
        ({"type": "noul", "instructions": "", "criteria": None}, [0.3, 0.7], False),
        ({"type": "score", "instructions": "", "criteria": ["low", "mid", "high"]}, [0.3, 0.6, 0.1], 1),
    ],
)
def test_a_row_without_an_answer_gets_the_likeliest(question: dict[str, Any], shares: list[float], answer: Any) -> None:
    raw = {"dataset": "a", "state": "box", "question": question, "answer": None}
    assert len(unanswered(raw).options) == len(shares)
    done = labelled(raw, np.array(shares))
    assert done["answer"] == answer
    row = parse_row(json.loads(json.dumps(done)))
    assert row.probabilities == tuple(shares)
    assert int(np.argmax(shares)) == row.answer


def test_the_truth_of_a_row_stays_where_the_teacher_errs() -> None:
    raw = {
        "dataset": "a",
        "state": "box",
        "question": {"type": "noul", "instructions": "", "criteria": None},
        "answer": True,
    }
    assert labelled(raw, np.array([0.1, 0.9]))["answer"] is True


@torch.enable_grad()  # an engine made before in this process has switched it off
def test_a_stopped_run_resumes_to_the_same_weights(reader: Reader, teacher: Teacher, tmp_path: Path) -> None:
    for module in teacher.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    begin = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    plan, rows, save = Plan(256, 4, 64, lr=1e-3, head_lr=1e-3, seed=0), [CHOICE, SCORE, NOUL] * 60, torch.save
    fit(plan, teacher, reader, rows, tmp_path / "whole")
    whole = {name: weight.clone() for name, weight in teacher.state_dict().items()}

    def save_and_stop(state: Any, path: Path) -> None:
        save(state, path.parent / "last.pt")
        raise InterruptedError

    teacher.load_state_dict(begin)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save_and_stop)
        with pytest.raises(InterruptedError):
            fit(plan, teacher, reader, rows, tmp_path / "halves")
    teacher.load_state_dict(begin)
    fit(plan, teacher, reader, rows, tmp_path / "halves")
    for name, weight in teacher.state_dict().items():
        torch.testing.assert_close(weight, whole[name])
