"""Which family a folder belongs to: every mark is seen, and nothing is served by guess."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.checkpoint import find_checkpoint, open_checkpoint
from onepass.config import Config
from onepass.errors import StartupError
from onepass.families.markers import CHAT, DECISION, MARKERS, SERVED, TITLES, Family, FamilyRefused, identify
from tests.support import ROOT
from tests.support.checkpoints import STARTER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat model, as far as its files tell."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3_5ForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def refusal(folder: Path, asked: str = "auto") -> str:
    with pytest.raises(FamilyRefused) as caught:
        identify(folder, asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_folder_without_marks_is_a_chat_model(folder: Path) -> None:
    family = identify(folder)
    assert family.name == CHAT
    assert not family.is_forced


def test_the_starter_and_a_lone_template_are_in_the_librarys_format(folder: Path) -> None:
    assert identify(STARTER).name == DECISION
    write(folder / "decision_template_joint.jinja", "")
    assert identify(folder).name == DECISION


@pytest.mark.parametrize("file", sorted(file for file, family in MARKERS.items() if family not in SERVED))
def test_a_marker_file_refuses_by_its_name_and_its_family(folder: Path, file: str) -> None:
    write(folder / file, "{}")
    message = refusal(folder)
    assert file in message
    assert TITLES[MARKERS[file]] in message
    assert "--family chat" in message


def test_a_prompt_version_beside_temperatures_is_onejev_and_is_named(folder: Path) -> None:
    write(folder / "calibration.json", '{"temperatures": {}, "prompt_version": "qev-labels-v2"}')
    message = refusal(folder)
    assert "OneJev" in message
    assert "qev-labels-v2" in message


@pytest.mark.parametrize("text", ['"<decision>"', '"\\u003cdecision\\u003e"'])
@pytest.mark.parametrize("file", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
def test_a_decision_token_is_intern_decision(folder: Path, file: str, text: str) -> None:
    write(folder / file, f"{{{text}: 7}}")
    assert "Intern-Decision" in refusal(folder)


@pytest.mark.parametrize(
    "file",
    [
        "adapter_config.json",
        "lora/adapter_config.json",
        "pointer_head.safetensors",
        "Head.safetensors",
        "heads/Slot-Head-2.safetensors",
        "vectors.pt",
        "readout_v2.safetensors",
        "classifier.bin",
        "calibration.json",
    ],
)
def test_an_unknown_head_adapter_or_calibration_is_refused_by_its_file(folder: Path, file: str) -> None:
    write(folder / file, "{}")
    assert file in refusal(folder)


@pytest.mark.parametrize("name", ["Qwen3_5TextModel", "Qwen3_5ForSequenceClassification", "JevForDecision"])
def test_a_model_that_gives_no_next_token_is_no_chat_model(folder: Path, name: str) -> None:
    write(folder / "config.json", json.dumps({"architectures": [name]}))
    assert name in refusal(folder)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_a_model_that_gives_a_next_token_is_a_chat_model(folder: Path, name: str) -> None:
    write(folder / "config.json", json.dumps({"architectures": [name]}))
    assert identify(folder).name == CHAT


@pytest.mark.parametrize("config", [{"decision_format": 1}, {"text_config": {"decision_format": "x"}}])
def test_a_decision_format_in_the_configuration_is_refused(folder: Path, config: object) -> None:
    write(folder / "config.json", json.dumps(config))
    assert "decision_format" in refusal(folder)


def test_a_name_with_line_breaks_is_refused_in_one_line(folder: Path) -> None:
    write(folder / "config.json", json.dumps({"architectures": ["a\n\nModel"]}))
    assert refusal(folder)


def test_files_of_the_weights_index_are_no_extra_heads(folder: Path) -> None:
    write(folder / "model.safetensors.index.json", '{"weight_map": {"a": "model-head.safetensors"}}')
    write(folder / "model-head.safetensors", "")
    assert identify(folder).name == CHAT


def test_a_head_that_decision_json_does_not_read_is_refused(folder: Path) -> None:
    write(folder / "decision.json", "{}")
    write(folder / "head.safetensors", "")
    message = refusal(folder)
    assert "head.safetensors" in message
    assert f"--family {DECISION}" in message
    write(folder / "decision.json", '{"readout": "pointer"}')
    assert identify(folder).name == DECISION


def test_marks_of_two_families_are_refused_with_both_names(folder: Path) -> None:
    write(folder / "jevk5_config.json", "{}")
    write(folder / "blink.py", "")
    message = refusal(folder)
    assert "jevk5_config.json" in message
    assert "blink.py" in message
    (folder / "blink.py").unlink()
    write(folder / "decision.json", "{}")
    assert "decision.json" in refusal(folder)
    assert identify(folder, DECISION).is_forced


def test_chat_is_forced_knowingly(folder: Path) -> None:
    write(folder / "jevk5_config.json", "{}")
    assert identify(folder, "chat") == Family(CHAT, is_forced=True)


@pytest.mark.parametrize(("asked", "words"), [("kev", "not served"), ("cat", "one of auto"), ("decision", "none of")])
def test_a_family_that_cannot_be_forced_is_refused(folder: Path, asked: str, words: str) -> None:
    assert words in refusal(folder, asked)


def test_an_adapter_without_its_base_is_refused_by_its_family_not_for_its_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()
    write(folder / "head.pt", "")
    write(folder / "adapter_config.json", "{}")
    with pytest.raises(FamilyRefused, match=r"kev.*base model is not in the folder"):
        find_checkpoint(Config(model=str(folder)))


@pytest.mark.parametrize("text", ["[]", "{", "\udcff", "[" * 100000])
def test_a_damaged_file_that_could_be_a_mark_refuses(folder: Path, text: str) -> None:
    (folder / "calibration.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(StartupError, match=r"calibration\.json"):
        identify(folder)


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_any_json_configuration_is_judged_or_refused_in_one_line(value: object) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        for file in ("config.json", "decision.json", "model.safetensors.index.json"):
            write(path / file, json.dumps({"architectures": value, "weight_map": value, "readout": value}))
        assert identify(path).name == DECISION
        (path / "decision.json").unlink()
        assert identify(path, CHAT).name == CHAT
        with contextlib.suppress(FamilyRefused):  # a name in the list may be that of a class without a next token
            assert identify(path).name == CHAT


def test_code_that_a_manifest_does_not_list_may_lie_there_but_no_weights(folder: Path) -> None:
    listed = [f"{sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(folder.iterdir())]
    write(folder / "weights.sha256", "\n".join(listed))
    write(folder / "serve.py", "raise SystemExit")
    write(folder / "eval/results.json", "{}")
    assert open_checkpoint(Config(model=str(folder))).is_verified
    write(folder / "extra/config.json", "{}")
    with pytest.raises(StartupError, match=r"extra/config\.json"):
        open_checkpoint(Config(model=str(folder)))


def test_every_marker_stands_in_the_table_of_the_docs() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`([^`]+)`", page))
    assert set(MARKERS) <= table
