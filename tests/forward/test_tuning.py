"""What the start measures and chooses, on a machine whose times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from onepass.checkpoint import Checkpoint
from onepass.config import STARTER_MODEL, Config
from onepass.forward import tuning

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads, mode = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of 600 weights in the pass, stored in bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 512, "intermediate_size": 64}}))
    store(tmp_path, {"model.layers.0.weight": (20, 30), "model.embed_tokens.weight": (90, 30)}, torch.bfloat16)
    return tmp_path


def checkpoint_in(folder: Path) -> Checkpoint:
    """Not verified: the files of these tests have no manifest."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Checkpoint(folder, "test", "folder", None, 0, config=config)


def store(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    save_file({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, folder / "model.safetensors")


def with_gains(monkeypatch: pytest.MonkeyPatch, *gains: float | tuple[float, float]) -> None:
    """The measurements of one start, in order: how many times as fast as the default, by both clocks or by each."""
    found = iter(gains)

    def compare(default: Callable[[], object], other: Callable[[], object], rounds: int = 0) -> tuning.Gain:
        default()
        other()
        gain = next(found)
        return tuning.Gain(*gain) if isinstance(gain, tuple) else tuning.Gain(gain, gain)

    monkeypatch.setattr(tuning, "compare", compare)


def exact_in_any_mode(monkeypatch: pytest.MonkeyPatch, error: float = 1) -> None:
    """What products give does not depend on the processor: "medium" is off by `error` times as much as float32 is."""

    def linear(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        is_medium = torch.get_float32_matmul_precision() == "medium"
        return (x.double() @ matrix.double().T).float() + 1e-3 * (error if is_medium else 1)

    monkeypatch.setattr(tuning.F, "linear", linear)


@pytest.mark.parametrize(
    ("stored", "least", "has_instructions", "expected", "reason"),
    [
        (torch.bfloat16, 600, True, torch.bfloat16, "and this CPU multiplies it"),
        (torch.bfloat16, 600, False, torch.float32, "no instructions for bfloat16"),
        (torch.bfloat16, 601, True, torch.float32, "fewer than 100 M"),
        (torch.float32, 600, True, torch.float32, "not stored in bfloat16"),
        (torch.float16, 600, True, torch.float32, "not stored in bfloat16"),
    ],
)
def test_bfloat16_only_for_a_large_checkpoint_stored_so_on_a_cpu_that_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    stored: torch.dtype,
    least: int,
    has_instructions: bool,
    expected: torch.dtype,
    reason: str,
) -> None:
    store(folder, {"model.layers.0.weight": (20, 30), "model.embed_tokens.weight": (90, 30)}, stored)
    monkeypatch.setattr(tuning, "LARGE_WEIGHTS", least)
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: has_instructions)
    with_gains(monkeypatch, 1)
    choice = tuning.choose(checkpoint_in(folder), CPU, Config(backend="transformers"))
    assert choice.dtype is expected
    assert reason in choice.reasons["dtype"]


@pytest.mark.parametrize("has_instructions", [True, False])
def test_the_starter_is_float32_on_any_processor(monkeypatch: pytest.MonkeyPatch, has_instructions: bool) -> None:
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: has_instructions)
    assert tuning.choose(checkpoint_in(STARTER_MODEL), CPU, Config()).dtype is torch.float32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
        ("model name\t: bf16\n", False),
        ("", False),
    ],
)
def test_an_arm_processor_says_whether_it_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected: bool
) -> None:
    monkeypatch.setattr(tuning.platform, "machine", lambda: "aarch64")
    (tmp_path / "cpuinfo").write_text(text)
    assert tuning.multiplies_bfloat16(tmp_path / "cpuinfo") is expected
    assert not tuning.multiplies_bfloat16(tmp_path / "nothing")


def test_a_dtype_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with_gains(monkeypatch)
    choice = tuning.choose(checkpoint_in(folder), CPU, Config(dtype="bfloat16", backend="transformers"))
    assert (choice.dtype, choice.reasons["dtype"]) == (torch.bfloat16, "asked for")


@pytest.mark.parametrize(
    ("gain", "error", "expected"),
    [
        (2.0, 1, "medium"),
        (1.1, 1, "highest"),
        (10.0, 50, "highest"),
        ((0.5, 2.0), 1, "highest"),  # the clocks disagree: something else runs on the machine
        ((2.0, 0.9), 1, "highest"),
    ],
)
def test_another_library_multiplies_if_it_is_faster_by_both_clocks_and_as_exact(
    monkeypatch: pytest.MonkeyPatch, folder: Path, gain: float | tuple[float, float], error: float, expected: str
) -> None:
    exact_in_any_mode(monkeypatch, error)
    with_gains(monkeypatch, gain)
    tuning.choose(checkpoint_in(folder), CPU, Config(dtype="float32", backend="transformers"))
    assert torch.get_float32_matmul_precision() == expected


@pytest.mark.parametrize(
    ("few", "many", "expected"),
    [
        (2.0, 1.0, True),
        (1.0, 1.4, True),
        (1.05, 1.0, False),
        (2.0, 0.7, False),
        (0.7, 2.0, False),
        ((0.8, 2.0), (0.8, 2.0), False),
    ],
)
def test_weights_are_packed_where_rows_of_one_length_gain_and_those_of_the_other_do_not_lose(
    monkeypatch: pytest.MonkeyPatch, folder: Path, few: Any, many: Any, expected: bool
) -> None:
    with_gains(monkeypatch, 1, few, many)
    choice = tuning.choose(checkpoint_in(folder), CPU, Config(dtype="float32"))
    assert choice.packs is expected
    assert choice.reasons["pack"].startswith("yes" if expected else "no")


def test_a_choice_is_measured_with_one_thread_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    calls: list[tuple[str, int]] = []
    with tuning.one_thread():
        gain = tuning.compare(
            lambda: calls.append(("default", torch.get_num_threads())),
            lambda: calls.append(("other", torch.get_num_threads())),
            rounds=3,
        )
    assert calls == [("default", 1), ("other", 1)] * 4
    assert gain.wall > 0
    assert gain.cpu > 0
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "text", ["{}", '{"text_config": null}', '{"hidden_size": "x", "intermediate_size": 3}', '{"text_config": {}}']
)
def test_a_configuration_that_says_nothing_is_served_with_the_defaults(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    choice = tuning.choose(checkpoint_in(tmp_path), CPU, Config())
    assert (choice.dtype, choice.packs) == (torch.float32, False)


@pytest.mark.parametrize(
    ("cores", "sizes", "threads", "used"),
    [
        (2, (256, 384), tuning.Threads(2, 1017), {16: 1, 1016: 1, 1017: 2, 4096: 2}),
        (8, (512, 1536), tuning.Threads(8, 127), {126: 1, 127: 8}),
        (2, (1024, 3584), tuning.Threads(2), {1: 2, 4096: 2}),
        (2, None, tuning.Threads(2), {1: 2}),
        (1, (256, 384), tuning.Threads(1), {4096: 1}),
    ],
)
def test_threads_follow_from_the_size_of_the_products(
    cores: int, sizes: tuple[int, int] | None, threads: tuning.Threads, used: dict[int, int]
) -> None:
    torch.set_num_threads(cores)
    reasons: dict[str, str] = {}
    assert tuning.choose_threads(sizes, reasons) == threads
    assert reasons["threads"].startswith(f"{cores}: ")
    for tokens, count in used.items():
        threads.use(tokens)
        assert torch.get_num_threads() == count


def test_passes_are_timed_until_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = {"now": 0.0}
    monkeypatch.setattr(tuning.time, "thread_time", lambda: clock["now"])

    def run(num_tokens: int) -> None:
        clock["now"] += num_tokens * clock["per_token"]

    clock["per_token"] = 1e-4
    assert [tokens for tokens, _ in tuning.time_passes(run, CPU, 4096)] == [16, 64, 256]
    assert [tokens for tokens, _ in tuning.time_passes(run, CPU, 100)] == [16, 64]
    clock["per_token"] = 0.1
    samples = tuning.time_passes(run, CPU, 4096)
    assert [(tokens, round(seconds, 6)) for tokens, seconds in samples] == [(16, 1.6)]
