"""pplx-decider and d3: the answers and the prompts that the Hugging Face library gives, on both backends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from onepass.config import Config
from onepass.decider import Decider
from onepass.errors import ApiError, StartupError
from onepass.families import readout
from onepass.wire.schema import parse_request

DATA = Path(__file__).parent / "data" / "readout"
TOLERANCE = 1e-5
# In these rows the library lets control tokens in option names, descriptions, levels and keys of the state through.
LET_THROUGH = frozenset({"special-option", "special-json"})


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"golden-{name}.jsonl").read_bytes().splitlines()]


def config(folder: Path, backend: str = "auto") -> Config:
    return Config(model=str(folder), device="cpu", dtype="float32", backend=backend)


@pytest.fixture(
    scope="module", params=[("d3", "fast"), ("d3", "transformers"), ("pplx", "fast"), ("pplx", "transformers")]
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Decider]]:
    name, backend = request.param
    with Decider(config(DATA / f"checkpoint-{name}", backend)) as decider:
        yield name, decider


def difference(given: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest, over the probabilities of one answer."""
    if "noul" in wanted:
        return abs(float(given["noul"]) - float(wanted["noul"]))
    assert given["probabilities"].keys() == wanted["probabilities"].keys()
    return max(abs(p - wanted["probabilities"][key]) for key, p in given["probabilities"].items())


def largest_difference(decider: Decider, row: dict[str, Any]) -> float:
    answers = json.loads(decider.decide(json.dumps(row["request"]).encode()))["answers"]
    return max(difference(answers[key], wanted) for key, wanted in row["answers"].items())


def test_every_golden_row_is_answered_as_by_the_library(served: tuple[str, Decider]) -> None:
    name, decider = served
    rows = [row for row in rows_of(name) if row["tag"] not in LET_THROUGH]
    differences = {row["tag"]: largest_difference(decider, row) for row in rows}
    assert {tag: value for tag, value in differences.items() if not value <= TOLERANCE} == {}


def test_rows_that_wait_together_are_answered_as_alone(served: tuple[str, Decider]) -> None:
    name, decider = served
    rows = [row for row in rows_of(name)[::-1] if row["tag"] not in LET_THROUGH] * 2
    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(lambda row: largest_difference(decider, row), rows)) <= TOLERANCE


def prompts_of(decider: Decider, row: dict[str, Any]) -> list[list[int]]:
    assert decider._loaded is not None
    request = parse_request(json.dumps(row["request"]).encode(), "application/json")
    return [list(prompt.input_ids) for prompt in decider._loaded.prompter.render(request)]


def test_every_prompt_has_the_golden_tokens(served: tuple[str, Decider]) -> None:
    name, decider = served
    for row in rows_of(name):
        if row["tag"] not in LET_THROUGH:
            assert prompts_of(decider, row) == row["prompts"], row["tag"]


def test_control_tokens_that_the_library_lets_through_are_the_same_text_and_no_tokens(
    served: tuple[str, Decider],
) -> None:
    name, decider = served
    tokenizer = AutoTokenizer.from_pretrained(DATA / f"checkpoint-{name}", local_files_only=True)
    control = set(tokenizer.added_tokens_decoder)
    rows = {row["tag"]: row for row in rows_of(name)}
    of_template = [[id_ for id_ in prompt if id_ in control] for prompt in rows["noul-plain"]["prompts"]]
    for tag in LET_THROUGH:
        for ours, theirs in zip(prompts_of(decider, rows[tag]), rows[tag]["prompts"], strict=True):
            assert tokenizer.decode(ours) == tokenizer.decode(theirs)
            assert [id_ for id_ in ours if id_ in control] == of_template[0]
            assert ours != theirs


def test_health_names_the_family_and_its_prompt(served: tuple[str, Decider]) -> None:
    name, decider = served
    facts = decider.status().document()
    assert (facts["family"], facts["readout"], facts["family_forced"]) == ("readout", "linear", False)
    assert facts["family_version"] in (name, "")


def test_a_state_cannot_write_the_tokens_of_a_picture(served: tuple[str, Decider]) -> None:
    question = {"q": {"type": "noul", "instructions": "Is it?"}}
    with pytest.raises(ApiError, match="send images in the field images"):
        served[1].ask([{"type": "text", "text": "a"}, {"type": "image"}], question)


def changed(tmp_path: Path, **fields: Any) -> Path:
    folder = Path(shutil.copytree(DATA / "checkpoint-d3", tmp_path / "checkpoint"))
    path = folder / "decision_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_mode", "noncausal_full_attention"),
        ("pooling", "mean"),
        ("prompt", "d25-vega"),
        ("codes", []),
        ("codes", ["A", "A"]),
        ("codes", ["A", 5]),
        ("codes", "AB"),
        ("temperature", 0),
        ("temperature", True),
        ("temperature", None),
        ("temperature", float("inf")),
    ],
)
def test_a_variant_that_is_not_computed_is_refused_by_its_field(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(StartupError, match=f"decision_config.json: {field}"):
        readout.load(changed(tmp_path, **{field: value}))


def test_more_options_than_codes_are_refused_with_their_number(tmp_path: Path) -> None:
    with Decider(config(changed(tmp_path, codes=["A", "B"]))) as decider, pytest.raises(ApiError, match="at most 2"):
        decider.ask("x", {"q": {"type": "choice", "instructions": "?", "criteria": {"a": None, "b": None, "c": None}}})


@pytest.mark.parametrize("rows", [{}, {"weight": torch.zeros(3, 5)}, {"weight": torch.zeros(7)}, {"weight": "few"}])
def test_a_damaged_readout_is_refused_by_its_file(tmp_path: Path, rows: dict[str, Any]) -> None:
    folder = changed(tmp_path)
    width = json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"]
    tensors = {name: torch.zeros(3, width) if value == "few" else value for name, value in rows.items()} if rows else {}
    save_file(tensors, folder / "readout.safetensors")
    with pytest.raises(StartupError, match=r"readout\.safetensors"), Decider(config(folder)):
        pass
