"""The training code: its quick forward is the model's own, its rows are valid, its figures are computed as they say."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import ROOT
from tests.support.checkpoints import STARTER

sys.path.insert(0, str(ROOT / "train"))

from banks import NEUTRAL
from batches import Batcher
from check import largest_differences
from data import Row, Segments, number_rows, parse_row
from evaluate import Asked, brier, calibration_error, read_answer, reliability_svg, wilson
from generate import FAMILIES, Maker, crowded, generate
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from wiring import free_entries, is_boundary, signal_table, wire

from model import PointerModel, build_config
from train import distance

ROWS = [
    Row("a", "First sentence here. And a second, longer one!\nA third line", "choice", "Which is it?",
        ("billing", "delivery", "other"), ("Money and invoices", None, None), 0),
    Row("a", {"text": "Where is my parcel?", "n": 3}, "noul", "Is it about a parcel?", ("yes", "no"), (None, None), 0),
    Row("a", "", "score", None, ("1/3", "2/3", "3/3"), ("low", "middle", "high"), 1),
    Row("a", "no mark at the end", "choice", "", ("x",), (None,), 0),
    Row("a", "... Two marks, then text.!", "noul", None, ("yes", "no"), ("It is. So.", "It is not"), 1),
    Row("a", "Grüße aus Köln, 日本語 🎉. " * 20, "choice", {"ask": "language"}, tuple("abcdefghij"), (None,) * 10, 3),
]  # fmt: skip


@pytest.fixture(scope="module")
def wired() -> PointerModel:
    """Random weights, as large as trained ones, wired."""
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    torch.manual_seed(0)
    model = PointerModel(build_config(len(tokenizer)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
        model.lm.model.embed_tokens.weight.normal_(std=0.3)
    wire(model.lm, signal_table(tokenizer))
    return model.eval()


def test_the_quick_forward_is_the_library_s(wired: PointerModel) -> None:
    """In prompts of one question, and in one of all: there a question sees nothing of the others."""
    for rows in (ROWS, ROWS[3:4]):  # the last has no sentence that ends
        assert max(largest_differences(wired, rows, STARTER)) < 1e-3


def test_wiring_again_changes_nothing(wired: PointerModel) -> None:
    before = {name: value.clone() for name, value in wired.lm.state_dict().items()}
    wire(wired.lm, signal_table(AutoTokenizer.from_pretrained(STARTER)))
    for name, value in wired.lm.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_only_what_is_not_wired_is_free(wired: PointerModel) -> None:
    signals = signal_table(AutoTokenizer.from_pretrained(STARTER))
    free = free_entries(wired.lm, signals)
    embedding = free["model.embed_tokens.weight"]
    assert not embedding[:, -signals.shape[1] :].any()
    assert embedding[100:, : -signals.shape[1]].all()
    assert "model.norm.weight" not in free  # nothing of it is wired


def test_the_loss_of_a_teacher_s_probabilities_is_their_cross_entropy() -> None:
    """Where a row has fewer options than its batch, its scores are -inf; neither the loss nor its gradient is nan."""
    scores = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -torch.inf]], requires_grad=True)
    targets = torch.tensor([[0.2, 0.5, 0.3], [0.9, 0.1, 0.0]])
    with torch.enable_grad():
        loss = distance(scores, targets)
        loss.backward()
    first = torch.nn.functional.cross_entropy(scores[:1], targets[:1])
    second = torch.nn.functional.cross_entropy(scores[1:, :2], targets[1:, :2])
    torch.testing.assert_close(loss, (first + second) / 2)
    torch.testing.assert_close(scores.grad[0], (scores[0].softmax(-1) - targets[0]) / 2)
    assert scores.grad[1, 2] == 0


def test_a_batch_carries_the_teacher_s_probabilities_and_the_right_answers() -> None:
    raw = raw_rows()[:2]
    raw[0] |= {"probabilities": [0.5, 1.0, 0.5]}
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    segments = Segments(Tokenizer.from_file(str(STARTER / "tokenizer.json")))
    rows = number_rows([parse_row(one) for one in raw], segments)
    batch = Batcher(rows, segments, is_boundary(tokenizer).numpy()).batch(np.array([1, 0]))
    torch.testing.assert_close(batch.targets, torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.5, 0.25]]))


def test_probabilities_for_other_options_are_refused() -> None:
    with pytest.raises(ValueError, match="2 probabilities for 3 options"):
        parse_row(raw_rows()[0] | {"probabilities": [0.5, 0.5]})


def raw_rows() -> list[dict[str, Any]]:
    labels = {"card_lost": "The card is gone", "top_up": "Adding money", "exchange": "Changing currency"}
    rows = []
    for i in range(30):
        for dataset in ("banking77", "clinc150", "hwu64"):
            question = {"type": "choice", "instructions": "Intent?", "criteria": labels}
            rows.append({"dataset": dataset, "state": f"text {i}", "question": question, "answer": "top_up"})
        question = {"type": "choice", "instructions": "?", "criteria": {"good": None, "bad": None}}
        rows.append({"dataset": "uci_sentences", "state": f"good {i}", "question": question, "answer": "good"})
    return rows


def test_made_rows_are_valid_and_depend_on_the_seed_alone() -> None:
    rows = generate(raw_rows(), 400, seed=1)
    assert rows == generate(raw_rows(), 400, seed=1)
    assert rows != generate(raw_rows(), 400, seed=2)
    for raw in rows:
        row = parse_row(json.loads(json.dumps(raw)))
        assert 0 <= row.answer < len(row.options)
        assert len(set(row.options)) == len(row.options) <= 255
        assert "{" not in str(raw["question"]["instructions"])


@pytest.mark.parametrize("family", [family for family, _ in FAMILIES])
def test_every_family_gives_both_answers(family: Any) -> None:
    make = Maker(random.Random(0))
    rows = [family(make) for _ in range(300)]
    answers = [row["answer"] for row in rows if row["question"]["type"] == "noul"]
    assert 0.3 < np.mean(answers) < 0.7


def test_a_crowded_row_has_many_options_and_the_right_one() -> None:
    make = Maker(random.Random(0))
    pool = {f"label number {i}": f"text {i}" for i in range(400)}
    counts = []
    for _ in range(20):
        row = crowded(make, raw_rows()[0], pool)
        assert row["answer"].lower().replace("_", "").replace(" ", "") == "topup"
        assert row["answer"] in row["question"]["criteria"]
        counts.append(len(row["question"]["criteria"]))
    assert max(counts) > 100


def test_slots_are_filled() -> None:
    make = Maker(random.Random(0))
    for text in NEUTRAL:
        assert "{" not in make.sentence(text)


def test_wilson_is_the_textbook_s() -> None:
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))


def asked(right: int, *probabilities: float) -> Asked:
    return Asked("a", "choice", right, np.array(probabilities))


def test_calibration_and_brier_by_hand() -> None:
    answers = [asked(0, 0.9, 0.1), asked(1, 0.9, 0.1), asked(0, 0.6, 0.4)]
    assert calibration_error(answers) == pytest.approx((2 * abs(0.9 - 0.5) + abs(0.6 - 1)) / 3)
    assert brier(answers) == pytest.approx((0.02 + 1.62 + 0.32) / 3)
    assert "<circle" in reliability_svg(
        [*answers, Asked("a", "noul", 0, np.array([1.0, 0.0])), Asked("a", "score", 0, np.array([1.0]))]
    )


def test_an_answer_is_held_against_its_row() -> None:
    score = {"type": "score", "score": 1.0, "probabilities": {"0": 0.2, "1": 0.8}}
    assert read_answer({"answer": 1}, score).is_right
    assert not read_answer({"answer": 0}, score).is_right
    assert read_answer({"answer": False}, {"type": "noul", "noul": 0.3}).is_right
    choice = {"type": "choice", "choice": "b", "probabilities": {"a": 0.4, "b": 0.6}}
    assert read_answer({"answer": "b"}, choice).is_right
