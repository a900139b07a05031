"""What the start measures and chooses, on a machine whose times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from onepass.config import Config
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
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 512, "intermediate_size": 64}}))
    return tmp_path


def with_times(monkeypatch: pytest.MonkeyPatch, *times: tuple[float, ...]) -> None:
    """The measurements of one start, in order."""
    found = iter(times)

    def best_times(calls: Sequence[Callable[[], object]], rounds: int = 0) -> list[float]:
        for call in calls:
            call()
        return list(next(found))

    monkeypatch.setattr(tuning, "best_times", best_times)


@pytest.mark.parametrize(("half_s", "expected"), [(0.5, torch.bfloat16), (0.8, torch.float32), (10, torch.float32)])
def test_bfloat16_only_where_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, folder: Path, half_s: float, expected: torch.dtype
) -> None:
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: True)
    with_times(monkeypatch, (1, half_s), (1, 1), (1, 1), (1, 1))
    choice = tuning.choose(folder, CPU, Config(backend="transformers"))
    assert choice.dtype is expected
    assert f"{half_s:.2f} times as long" in choice.reasons["dtype"]


def test_bfloat16_is_not_even_measured_where_the_cpu_emulates_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(tuning, "multiplies_bfloat16", lambda: False)
    with_times(monkeypatch, (1, 1))  # of the mode of products alone
    assert tuning.choose(folder, CPU, Config(backend="transformers")).dtype is torch.float32


def test_a_dtype_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with_times(monkeypatch)
    choice = tuning.choose(folder, CPU, Config(dtype="bfloat16", backend="transformers"))
    assert (choice.dtype, choice.reasons["dtype"]) == (torch.bfloat16, "asked for")


@pytest.mark.parametrize(
    ("medium_s", "error", "expected"), [(0.5, 1, "medium"), (0.9, 1, "highest"), (0.1, 50, "highest")]
)
def test_another_library_multiplies_if_it_is_faster_and_as_exact(
    monkeypatch: pytest.MonkeyPatch, folder: Path, medium_s: float, error: float, expected: str
) -> None:
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        result = plain(x, matrix)
        is_medium = torch.get_float32_matmul_precision() == "medium"
        return result + 1e-6 * error * (is_medium and error > 1)

    monkeypatch.setattr(tuning.F, "linear", linear)
    with_times(monkeypatch, (1, medium_s))
    tuning.choose(folder, CPU, Config(dtype="float32", backend="transformers"))
    assert torch.get_float32_matmul_precision() == expected


@pytest.mark.parametrize(
    ("few", "many", "expected"),
    [(0.5, 1, True), (1, 0.7, True), (0.95, 1, False), (0.5, 1.5, False), (1.5, 0.5, False)],
)
def test_weights_are_packed_where_rows_of_one_length_gain_and_those_of_the_other_do_not_lose(
    monkeypatch: pytest.MonkeyPatch, folder: Path, few: float, many: float, expected: bool
) -> None:
    with_times(monkeypatch, (1, 1), (1, few), (1, many))
    choice = tuning.choose(folder, CPU, Config(dtype="float32"))
    assert choice.packs is expected
    assert choice.reasons["pack"].startswith("yes" if expected else "no")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "x", "intermediate_size": 3}', '{"text_config": 3}'])
def test_a_configuration_that_says_nothing_is_served_with_the_defaults(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    choice = tuning.choose(tmp_path, CPU, Config())
    assert (choice.dtype, choice.packs) == (torch.float32, False)


@pytest.mark.parametrize(
    ("times", "most", "used"),
    [
        ([(2, 1)], 2, {16: 1, 127: 1, 128: 2, 4096: 2}),
        ([(1.05, 1), (1.3, 1)], 2, {128: 1, 319: 1, 320: 2, 512: 2}),
        ([(1.05, 1), (1, 1)], 1, {16: 1, 512: 1, 8192: 1}),
        ([(1, 3), (1, 2)], 1, {8192: 1}),
    ],
)
def test_threads_are_used_where_they_help(
    monkeypatch: pytest.MonkeyPatch, times: list[tuple[float, float]], most: int, used: dict[int, int]
) -> None:
    torch.set_num_threads(2)
    with_times(monkeypatch, *times)
    reasons: dict[str, str] = {}
    seen: list[tuple[int, int]] = []
    threads = tuning.choose_threads(lambda tokens: seen.append((torch.get_num_threads(), tokens)), 256, reasons)
    assert seen == [(count, tokens) for tokens in (128, 512)[: len(times)] for count in (1, 2)]
    assert threads.most == most
    assert reasons["threads"].startswith(f"{most}: ")
    for tokens, count in used.items():
        threads.use(tokens)
        assert torch.get_num_threads() == count


def test_wide_models_use_all_threads_untimed() -> None:
    torch.set_num_threads(2)
    reasons: dict[str, str] = {}
    threads = tuning.choose_threads(lambda _: pytest.fail("a pass was timed"), 1024, reasons)
    assert threads == tuning.Threads(2)
    assert reasons["threads"].startswith("2: ")


def test_passes_are_timed_until_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = {"now": 0.0}
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: clock["now"])

    def run(num_tokens: int) -> None:
        clock["now"] += num_tokens * clock["per_token"]

    clock["per_token"] = 1e-4
    assert [tokens for tokens, _ in tuning.time_passes(run, CPU, 4096)] == [16, 64, 256]
    assert [tokens for tokens, _ in tuning.time_passes(run, CPU, 100)] == [16, 64]
    clock["per_token"] = 0.1
    samples = tuning.time_passes(run, CPU, 4096)
    assert [(tokens, round(seconds, 6)) for tokens, seconds in samples] == [(16, 1.6)]
