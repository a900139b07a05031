"""The engine: batches answer as rows do alone, and what cannot be served is said in a line."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, round_launch
from onepass import loading
from onepass.checkpoint import open_checkpoint
from onepass.config import Config
from onepass.errors import OutOfMemory, StartupError
from onepass.forward.plan import Pass
from onepass.loading import Loaded, warm_up
from onepass.rows import Row
from onepass.wire.schema import parse_request
from tests.support import ROOT
from tests.support.checkpoints import STARTER, make_decision_checkpoint
from tests.support.live import Server
from tests.support.precision import DTYPE, are_alike, in_dtype, relative_distance
from tests.support.prompt_rows import about, rows_of


def load(config: Config) -> Loaded:
    return loading.load(in_dtype(config))


@pytest.fixture(scope="module")
def starter() -> Loaded:
    return load(Config(backend="fast"))


@pytest.fixture(scope="module")
def labels(labels_checkpoint: Path) -> Loaded:
    return load(Config(model=str(labels_checkpoint), backend="transformers"))


def refusal(folder: Path, **settings: Any) -> str:
    config = Config(model=str(folder), **settings)
    with pytest.raises(StartupError) as caught:
        load(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The starter without its manifest, to be broken."""
    return Path(shutil.copytree(STARTER, tmp_path / "copy"))


def test_both_backends_give_the_same_scores(starter: Loaded) -> None:
    rows = rows_of(starter, seed=4)
    library = load(Config(backend="transformers"))
    assert (starter.engine.describe().backend, library.engine.describe().backend) == ("fast", "transformers")
    assert are_alike(starter.engine.forward(rows), library.engine.forward(rows))


def test_a_configuration_the_fast_backend_does_not_cover_goes_to_the_library(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["attention_bias"] = True
    (copy / "config.json").write_text(json.dumps(config))
    assert "--backend fast does not cover this checkpoint (attention_bias True is not covered)" in refusal(
        copy, backend="fast"
    )
    assert "missing keys" in refusal(copy)  # the library would have read the biases


@pytest.fixture(scope="module")
def plain() -> Loaded:
    """The starter without shared states."""
    return load(Config(backend="fast", share_state=False))


@pytest.mark.parametrize("num_words", [64, 65, 80, 200, 500])
def test_a_shared_state_gives_the_scores_of_whole_rows(starter: Loaded, plain: Loaded, num_words: int) -> None:
    rows = about(starter, num_words)
    engine: Any = starter.engine
    before = engine.tokens.computed
    first, again = engine.forward(rows), engine.forward(rows)
    assert are_alike(first, plain.engine.forward(rows))
    assert first == again
    assert engine.tokens.computed - before < 0.8 * 2 * sum(row.num_tokens for row in rows)


def test_a_new_state_with_one_question_takes_one_pass_and_is_kept(starter: Loaded, plain: Loaded) -> None:
    engine: Any = starter.engine
    rows = about(starter, 150, seed=11)
    counts, cached = engine.tokens, engine.describe().state_cache_bytes
    computed, reused = counts.computed, counts.reused
    first = engine.forward(rows[:1])
    assert (counts.computed - computed, counts.reused - reused) == (rows[0].num_tokens, 0)
    assert engine.describe().state_cache_bytes > cached
    others = engine.forward(rows[1:])
    assert counts.reused - reused == 5 * rows[0].num_shared
    assert are_alike([*first, *others], plain.engine.forward(rows))


def test_new_states_with_a_question_each_share_a_pass_and_are_kept(starter: Loaded, plain: Loaded) -> None:
    engine: Any = starter.engine
    pairs = [about(starter, num_words, seed=20 + num_words, count=2) for num_words in (70, 75, 90, 200, 73)]
    firsts, seconds = [rows[0] for rows in pairs], [rows[1] for rows in pairs]
    passes: list[Pass] = []
    run = engine._backend.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._backend, "run", lambda planned, *rest: passes.append(planned) or run(planned, *rest))
        first = engine.forward(firsts)
    assert all(planned.reads and planned.keep_keys for planned in passes)
    assert sum(len(planned.rows) for planned in passes) == 5
    assert max(len(planned.rows) for planned in passes) > 1
    reused = engine.tokens.reused
    second = engine.forward(seconds)
    assert engine.tokens.reused - reused == sum(row.num_shared for row in seconds)
    assert are_alike(first + second, plain.engine.forward(firsts + seconds))


def test_a_question_alone_or_among_others_about_a_long_state_is_the_same(starter: Loaded) -> None:
    rows = about(starter, 200, seed=1)
    alone = [starter.engine.forward([row])[0] for row in rows]
    assert are_alike(starter.engine.forward(rows), alone)


def test_states_of_several_requests_in_one_batch_are_kept_apart(starter: Loaded, plain: Loaded) -> None:
    rows = [row for seed in range(4) for row in about(starter, 80, seed=seed, count=2)]
    random.Random(0).shuffle(rows)
    assert are_alike(starter.engine.forward(rows), plain.engine.forward(rows))


def test_the_cache_of_states_is_bounded_and_may_be_off() -> None:
    for megabytes in (0, 1):
        loaded = load(Config(backend="fast", state_cache_mb=megabytes))
        engine: Any = loaded.engine
        for seed in range(12):
            rows = about(loaded, 120, seed=seed, count=1)
            assert are_alike(engine.forward(rows), engine.forward(rows))
        assert engine.describe().state_cache_bytes <= megabytes << 20
        assert (engine.tokens.reused > 0) is (megabytes > 0)


@pytest.mark.parametrize("name", ["starter", "labels"])
def test_a_padded_batch_answers_as_its_rows_do_alone(name: str, request: pytest.FixtureRequest) -> None:
    loaded: Loaded = request.getfixturevalue(name)
    rows = rows_of(loaded)
    together, alone = loaded.engine.forward(rows), [loaded.engine.forward([row])[0] for row in rows]
    assert len({row.num_tokens for row in rows}) > 5
    assert are_alike(together, alone)
    assert max(abs(score) for row in alone for question in row for score in question) > 1e-2


def test_the_order_of_a_batch_changes_nothing(starter: Loaded) -> None:
    rows = rows_of(starter, seed=1)
    backwards = starter.engine.forward(rows[::-1])[::-1]
    assert are_alike(starter.engine.forward(rows), backwards)


def test_the_same_batch_gives_the_very_same_numbers(starter: Loaded) -> None:
    rows = rows_of(starter, seed=2)
    assert starter.engine.forward(rows) == starter.engine.forward(rows)


def test_a_row_has_a_score_for_each_option_of_each_question(starter: Loaded) -> None:
    for row, scores in zip(rows := rows_of(starter), starter.engine.forward(rows), strict=True):
        assert [len(question) for question in scores] == [len(read.positions) - 1 for read in row.reads]


def test_a_row_beside_one_fifty_times_longer_is_the_same(starter: Loaded) -> None:
    def render(state: str) -> Row:
        body = {"state": state, "questions": {"q": {"type": "noul", "instructions": "Is it late?"}}}
        return starter.prompter.render(parse_request(json.dumps(body).encode()))[0]

    small, giant = render("late"), render("the parcel was late " * 250)
    assert giant.num_tokens > 50 * small.num_tokens
    assert are_alike([starter.engine.forward([small, giant])[0]], starter.engine.forward([small]))


@pytest.fixture(scope="module")
def invariant() -> Loaded:
    return load(Config(backend="fast", batch_invariant=True))


@pytest.fixture(scope="module")
def invariant_library(labels_checkpoint: Path) -> Loaded:
    return load(Config(model=str(labels_checkpoint), backend="transformers", batch_invariant=True))


@pytest.mark.parametrize("name", ["invariant", "invariant_library"])
def test_with_batch_invariant_an_answer_is_the_same_to_the_bit(name: str, request: pytest.FixtureRequest) -> None:
    """Whatever shares the batch, in whatever order, whatever is in the cache."""
    loaded: Loaded = request.getfixturevalue(name)
    engine: Any = loaded.engine
    rows = [*rows_of(loaded), *about(loaded, 70), *about(loaded, 150, seed=1), *about(loaded, 40, count=3)]
    alone = [engine.forward([row])[0] for row in rows]
    assert engine.describe().batch_invariant
    rng = random.Random(0)
    for round_ in range(12):
        if round_ % 3 == 0:
            engine._states.clear()
        chosen = rng.sample(range(len(rows)), rng.randint(2, len(rows)))
        assert engine.forward([rows[index] for index in chosen]) == [alone[index] for index in chosen]


def test_weights_that_are_not_all_there_are_not_served(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, copy / "model.safetensors")
    assert "missing keys: ['model.layers.0.mlp.up_proj.weight']" in refusal(copy, backend="transformers")
    assert f"the checkpoint has no tensor {name}" in refusal(copy, backend="fast")
    save_file({**weights, name: weights[name][:-1].clone()}, copy / "model.safetensors")
    for backend in ("fast", "transformers"):
        assert "cannot be loaded" in refusal(copy, backend=backend)
    (copy / "model.safetensors").write_bytes(b"not safetensors")
    for backend in ("fast", "transformers"):
        assert "cannot be loaded" in refusal(copy, backend=backend)


@pytest.mark.parametrize(
    "change", [{"query.weight": None}, {"query.weight": torch.zeros(3, 5)}, {"key.weight": torch.zeros(3)}]
)
def test_a_pointer_head_must_fit_the_model(copy: Path, change: dict[str, Any]) -> None:
    head = {**load_file(copy / "head.safetensors"), **change}
    save_file({key: value for key, value in head.items() if value is not None}, copy / "head.safetensors")
    assert f"{next(iter(change))} must be a matrix with" in refusal(copy)
    (copy / "head.safetensors").write_bytes(b"x")
    assert "head.safetensors cannot be read" in refusal(copy)
    (copy / "head.safetensors").unlink()
    assert "head.safetensors is missing" in refusal(copy)


@pytest.mark.parametrize("backend", ["fast", "transformers"])
def test_a_checkpoint_that_changes_while_it_is_served_changes_no_answer(copy: Path, backend: str) -> None:
    loaded = load(Config(model=str(copy), backend=backend, share_state=False))
    rows = rows_of(loaded, count=1)
    before = loaded.engine.forward(rows)
    for path in copy.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))  # in place: a mapping of the file would see it
    assert loaded.engine.forward(rows) == before


def test_code_in_a_checkpoint_is_never_run(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config["model_type"] = "evil"
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text("raise SystemExit('it ran')")
    assert "cannot be loaded" in refusal(copy)


def test_a_model_whose_scores_are_not_numbers_never_becomes_ready(copy: Path) -> None:
    head = load_file(copy / "head.safetensors")
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in head.items()}, copy / "head.safetensors")
    with pytest.raises(StartupError, match="scores are not numbers"):
        warm_up(load(Config(model=str(copy))))


def test_a_device_that_is_not_there_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(StartupError, match="torch finds no CUDA device"):
        Engine(open_checkpoint(Config()), Config(device="cuda"), "pointer")


def test_bfloat16_answers_near_float32(labels_checkpoint: Path, labels: Loaded, tmp_path: Path) -> None:
    half = load(Config(model=str(labels_checkpoint), dtype="bfloat16", backend="transformers"))
    full = load(Config(model=str(labels_checkpoint), dtype="float32", backend="transformers"))
    rows = rows_of(labels, seed=3)
    assert relative_distance(half.engine.forward(rows), full.engine.forward(rows)) < 0.1


def test_untied_embeddings_are_read_from_their_own_head(tmp_path: Path) -> None:
    from tests.support.checkpoints import make_model, make_tokenizer

    folder = make_decision_checkpoint(tmp_path)
    make_model(folder, make_tokenizer(), tie_word_embeddings=False)
    loaded = load(Config(model=str(folder), backend="transformers"))
    assert len(loaded.engine.forward(rows_of(loaded, count=2))) == 4


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma2", {"final_logit_softcapping": 5.0, "head_dim": 8}),
        ("granite", {"logits_scaling": 7.0}),
        ("cohere", {"logit_scale": 0.3}),
        ("phi", {}),
    ],
)
def test_logits_that_an_architecture_bends_are_bent_the_same_way(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    """The start compares our label logits with the model's own, and refuses where they differ; these must not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.checkpoints import CHAT_TEMPLATE, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer), max_position_embeddings=512, **shape, **settings, **ids
    )
    model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(20)
        if head.bias is not None:
            head.bias.normal_()
    model.save_pretrained(tmp_path)
    loaded = load(Config(model=str(tmp_path)))
    assert loaded.engine.describe().backend == "transformers"
    assert len(loaded.engine.forward(rows_of(loaded, count=1))) == 3


def test_the_templates_own_beginning_is_kept_for_good(chat_checkpoint: Path) -> None:
    loaded = load(Config(model=str(chat_checkpoint), state_cache_mb=0))
    plain = load(Config(model=str(chat_checkpoint), share_state=False))
    engine: Any = loaded.engine
    engine._planner = replace(engine._planner, min_shared_tokens=1)  # this template's beginning is short
    (ids,) = loaded.prompter.beginnings()
    assert len(ids) // 4 >= 1
    assert engine.keep_beginning(ids)
    assert not engine.keep_beginning(ids)
    for num_words in (0, 3, 100):  # no state to share; with a state that is computed apart, on top of the beginning
        rows = about(loaded, num_words, count=3)
        assert all(row.input_ids.tobytes().startswith(ids) for row in rows)
        before = engine.tokens.reused
        assert are_alike(engine.forward(rows), plain.engine.forward(rows))
        assert engine.tokens.reused - before >= len(ids) // 4


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"
        ),
    ],
)
def test_without_memory_the_states_go_and_the_request_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    loaded = load(Config(backend="fast"))
    engine: Any = loaded.engine
    rows = about(loaded, 100)
    expected = engine.forward(rows)
    assert engine.describe().state_cache_bytes > 0

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._backend, "run", fail)
        with pytest.raises(OutOfMemory) as caught:
            engine.forward(rows)
    assert (caught.value.status, caught.value.__context__) == (503, None)
    assert engine.describe().state_cache_bytes == 0
    assert engine.forward(rows) == expected


def test_another_failure_is_not_taken_for_a_lack_of_memory(starter: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = starter.engine

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(engine._backend, "run", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        engine.forward(about(starter, 3))


def test_an_installed_flash_linear_attention_does_not_break_the_library_on_a_cpu(tmp_path: Path) -> None:
    """The library binds it when it imports the model's code, whatever the device."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    for place in ("", "ops"):
        (tmp_path / "fla" / place / "__init__.py").write_text(
            "def broken(*args, **kwargs):\n    raise RuntimeError('0 active drivers')\n"
            "chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = FusedRMSNormGated = broken\n"
        )
    code = (
        "from onepass.config import Config; from onepass.loading import load, warm_up; import sys\n"
        "loaded = load(Config(backend='transformers')); warm_up(loaded)\n"
        "print(loaded.engine.describe().backend, 'fla' in sys.modules)\n"
        "import fla; print(fla.broken.__name__)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["transformers", "False", "broken"]


def test_the_server_measures_what_a_pass_costs(live: Server) -> None:
    """In this process it is given, see conftest.py."""
    facts = json.loads(live.request("GET", "/health")[2])
    assert facts["launch_tokens"] in [2**n for n in range(4, 13)]
    assert facts["tuning"]["threads"].startswith(f"{facts['threads']}: ")
    assert set(facts["tuning"]) == {"dtype", "threads", *(["matmul"] if DTYPE == "float32" else [])}


@pytest.mark.parametrize(
    ("tokens", "launch"), [(0, 16), (16, 16), (17, 64), (64, 64), (255, 64), (257, 256), (1e9, 4096)]
)
def test_the_cost_of_a_pass_stays_at_its_default_unless_it_is_clearly_another(tokens: float, launch: int) -> None:
    assert round_launch(tokens, "cpu") == launch
