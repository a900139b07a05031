"""What the starter's vision tower is trained on, and that it is trained as it is served."""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import ROOT
from tests.support.checkpoints import STARTER

sys.path.insert(0, str(ROOT / "train"))

from drawings import COLOURS, HELD_OUT, VOCABULARY, Drawing, draw, held_out_rows
from safetensors.torch import load_file
from see import Eyes, Reader, answers_loss, merge, pixels_of, words_loss
from transformers import AutoTokenizer

from onepass.config import Config
from onepass.loading import load, read_pictures
from onepass.wire.schema import parse_request


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(STARTER)


@pytest.fixture(scope="module")
def eyes(reader: Reader) -> Eyes:
    torch.manual_seed(0)
    words = torch.stack(list(reader.words.values()))
    return Eyes(words.shape[1], depth=1, width=32, embeddings=words)


def body(drawing: Drawing, questions: dict[str, object]) -> bytes:
    png = io.BytesIO()
    drawing.image.save(png, "PNG")
    images = [base64.b64encode(png.getvalue()).decode()]
    return json.dumps({"state": "<image:1>", "questions": questions, "images": images}).encode()


@torch.no_grad()
def test_what_is_trained_is_what_is_served(reader: Reader, eyes: Eyes, tmp_path: Path) -> None:
    """The scores of the quick forward, and those of the engine with the merged checkpoint, from the picture's bytes."""
    drawings, rng = [draw(seed) for seed in range(4)], random.Random(0)
    asked = [drawing.ask(rng, kind) for drawing in drawings for kind in drawing.facts]
    places = [index for index, drawing in enumerate(drawings) for _ in drawing.facts]
    batch = reader.batch(asked, places, [""] * len(drawings))
    quick = reader.model(batch, eyes(pixels_of(drawings)).flatten(0, 1))

    merge(reader, eyes, tmp_path)
    loaded = load(Config(model=str(tmp_path), dtype="float32"))
    for one, place, expected in zip(asked, places, quick, strict=True):
        question: dict[str, object] = {"type": "noul", "instructions": one.instructions}
        if one.options:
            question |= {"type": "choice", "criteria": dict.fromkeys(one.options)}
        request = parse_request(body(drawings[place], {"q": question}))
        marked, pictures = read_pictures(loaded, request, deadline=float("inf"))
        ((scores,),) = loaded.engine.forward(loaded.prompter.render(marked, pictures))
        assert np.abs(np.array(scores) - expected[: len(scores)].numpy()).max() < 2e-2  # its weights are float16


def test_the_text_weights_stay_as_they_are(reader: Reader, eyes: Eyes, tmp_path: Path) -> None:
    merge(reader, eyes, tmp_path)
    before, after = load_file(STARTER / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    text = [name for name in before if name.startswith("model.language_model.")]
    assert len(text) > 50
    assert all(torch.equal(before[name], after[name]) for name in text)


@torch.enable_grad()  # an engine made before in this process has switched it off
def test_a_step_lowers_the_loss_and_keeps_what_is_fixed(reader: Reader) -> None:
    torch.manual_seed(1)
    words = torch.stack(list(reader.words.values()))
    eyes, drawings = Eyes(words.shape[1], depth=1, width=32, embeddings=words), [draw(seed) for seed in range(8)]
    optimizer = torch.optim.AdamW(eyes.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        seen = eyes(pixels_of(drawings))
        answers, _ = answers_loss(reader, seen, drawings, random.Random(0))
        loss = answers + words_loss(reader, seen, drawings)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        eyes.fix()
    assert losses[-1] < 0.8 * losses[0]
    assert torch.equal(eyes(pixels_of(drawings))[..., eyes.fixed], eyes.constant[eyes.fixed].expand(8, 36, -1))


@pytest.mark.parametrize("seed", range(40))
def test_a_question_about_a_drawing_has_its_fact_for_an_answer(seed: int) -> None:
    drawing, rng = draw(seed), random.Random(seed)
    assert drawing.facts
    for kind, fact in drawing.facts.items():
        assert fact in VOCABULARY[kind]
        for asked in (drawing.ask(rng, kind) for _ in range(6)):
            if asked.options:
                assert asked.options[asked.answer] == fact
                assert len(set(asked.options)) == len(asked.options) > 1
            else:
                assert (fact in asked.instructions.replace("?", " ").replace('"', " ").split()) is (asked.answer == 0)


def test_the_colour_that_is_named_is_the_colour_that_is_drawn() -> None:
    for seed in range(60):
        drawing = draw(seed)
        if "colour" in drawing.facts:
            pixels = np.asarray(drawing.image, dtype=int)
            is_drawn = np.abs(pixels - pixels[0, 0]).sum(-1) > 60
            difference = np.abs(np.median(pixels[is_drawn], axis=0) - COLOURS[drawing.facts["colour"]]).max()
            assert difference <= 14, seed


def test_held_out_rows_are_those_of_drawings_never_trained_on() -> None:
    rows = list(held_out_rows(0, 3))
    assert {row["dataset"] for row in rows} <= VOCABULARY.keys()
    first = io.BytesIO(base64.b64decode(rows[0]["images"][0]))
    expected = io.BytesIO()
    draw(HELD_OUT).image.save(expected, "PNG")
    assert first.getvalue() == expected.getvalue()


def test_the_starter_s_tokenizer_file_says_what_the_library_does() -> None:
    """For this model type its class has rules of its own for cutting text into words, and adds tokens that lack."""
    done = json.loads(AutoTokenizer.from_pretrained(STARTER).backend_tokenizer.to_str())
    said = json.loads((STARTER / "tokenizer.json").read_text(encoding="utf-8"))
    for part in ("added_tokens", "normalizer", "decoder"):
        assert done[part] == said[part]
    assert [one.get("pattern") for one in done["pre_tokenizer"]["pretokenizers"]] == [
        one.get("pattern") for one in said["pre_tokenizer"]["pretokenizers"]
    ]
    assert done["model"]["vocab"] == said["model"]["vocab"]
