"""Measures this machine at the start and chooses how to compute on it; each choice comes with its reason.

A choice departs from the default only for a clear gain, so that the same machine chooses the same tomorrow. CUDA needs
no choice but the dtype. Worker thread only.
"""

from __future__ import annotations

import json
import platform
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.config import Config
from onepass.forward import kernels
from onepass.rows import Read, Readout, Row

ROUNDS = 5
PROBE_TOKENS, FEW_TOKENS, MANY_TOKENS = 128, 16, 512
MIN_GAIN = {"bfloat16": 1.5, "matmul": 1.15, "pack": 1.15, "threads": 1.1}  # times faster than the default
PACK_MAX_LOSS = 1.1  # at the other length
# Narrower models spend their time beside the products: the pass itself is timed for them, and packing brings nothing
NARROW = 512
WIDE = 1024  # from here on a pass takes most of a second, and all cores are used without timing one
PASS_TOKENS = {"cpu": (16, 64, 256), "cuda": (64, 512, 4096)}
PASS_BUDGET_S = 1.0  # a pass that takes longer than what is left of it is the last one timed

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Choice:
    dtype: torch.dtype
    packs: bool = False  # weights in oneDNN's layout
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Threads:
    """How many a pass on a CPU takes, by its tokens: products of few gain nothing from several."""

    most: int
    from_tokens: int = 0  # passes of fewer take one; 0: all take the most

    def use(self, num_tokens: int) -> None:
        """Sets torch's number for the calling thread's next pass, of so many tokens with padding."""
        torch.set_num_threads(self.most if num_tokens >= self.from_tokens else 1)


def choose(folder: Path, device: torch.device, config: Config) -> Choice:
    """The dtype, the mode of matrix products and the layout of the weights; sets torch's mode."""
    asked = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype)
    if device.type != "cpu":
        return Choice(asked or torch.bfloat16, reasons={"dtype": "asked for" if asked else "CUDA"})
    sizes = matrix_sizes(folder)
    if sizes is None:
        return Choice(asked or torch.float32, reasons={"dtype": "asked for" if asked else "CPU"})
    reasons: dict[str, str] = {}
    dtype = asked or _choose_dtype(sizes, reasons)
    if asked:
        reasons["dtype"] = "asked for"
    matrix, x = _operands(sizes, dtype)
    if dtype == torch.float32:
        _choose_matmul(matrix, x, reasons)
    packs = config.backend != "transformers" and sizes[0] >= NARROW and _pays_to_pack(matrix, x, reasons)
    return Choice(dtype, packs, reasons)


def matrix_sizes(folder: Path) -> tuple[int, int] | None:
    """(hidden, intermediate) of the model, where its configuration says so."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        hidden, inner = text["hidden_size"], text["intermediate_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_sane = all(type(size) is int and 0 < size <= 1 << 16 for size in (hidden, inner))
    return (hidden, inner) if is_sane else None


def _operands(sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(sizes[1], sizes[0], generator=generator).to(dtype)
    return matrix, torch.randn(PROBE_TOKENS, sizes[0], generator=generator).to(dtype)


def best_times(calls: Sequence[Call], rounds: int = ROUNDS) -> list[float]:
    """The least seconds of each call, taken in turn after one that is not timed: noise only ever adds."""
    for call in calls:
        call()
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for place, call in enumerate(calls):
            started = time.perf_counter()
            call()
            best[place] = min(best[place], time.perf_counter() - started)
    return best


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for it: a measurement alone would be wrong on a busy machine now and then, and
    answers must not change with that."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # torch does not tell; the measurement has to
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _choose_dtype(sizes: tuple[int, int], reasons: dict[str, str]) -> torch.dtype:
    if not multiplies_bfloat16():
        reasons["dtype"] = "float32: this CPU has no instructions for bfloat16"
        return torch.float32
    wide, half = (_operands(sizes, dtype) for dtype in (torch.float32, torch.bfloat16))
    full_s, half_s = best_times([lambda: F.linear(wide[1], wide[0]), lambda: F.linear(half[1], half[0])])
    reasons["dtype"] = f"a product in bfloat16 takes {half_s / full_s:.2f} times as long as in float32"
    return torch.bfloat16 if full_s >= MIN_GAIN["bfloat16"] * half_s else torch.float32


def _choose_matmul(matrix: Tensor, x: Tensor, reasons: dict[str, str]) -> None:
    """ "medium" lets another library multiply; kept only where it is faster and no less exact than float32 is."""

    def multiply(mode: str) -> Tensor:
        torch.set_float32_matmul_precision(mode)
        return F.linear(x, matrix)

    exact = x.double() @ matrix.double().T
    errors = [float((multiply(mode).double() - exact).abs().max()) for mode in ("highest", "medium")]
    high_s, medium_s = best_times([lambda: multiply("highest"), lambda: multiply("medium")])
    is_exact = errors[1] <= 2 * errors[0]
    mode = "medium" if is_exact and high_s >= MIN_GAIN["matmul"] * medium_s else "highest"
    torch.set_float32_matmul_precision(mode)
    said = f"medium is {high_s / medium_s:.2f} times as fast, its error {errors[1] / errors[0]:.2g} times"
    reasons["matmul"] = f"{mode}: {said}"


def _pays_to_pack(matrix: Tensor, x: Tensor, reasons: dict[str, str]) -> bool:
    packed, few = kernels.pack_matrix(matrix), x[:FEW_TOKENS]
    if not packed.is_mkldnn:
        reasons["pack"] = "no: there is no such layout here"
        return False
    gains = []
    for tokens in (few, x):
        plain_s, packed_s = best_times(
            [lambda: F.linear(tokens, matrix), lambda: kernels.linear(tokens, packed)]  # noqa: B023 - called here
        )
        gains.append(plain_s / packed_s)
    pays = max(gains) >= MIN_GAIN["pack"] and min(gains) >= 1 / PACK_MAX_LOSS
    said = f"{gains[0]:.2f} times as fast at {FEW_TOKENS} tokens, {gains[1]:.2f} at {PROBE_TOKENS}"
    reasons["pack"] = f"{'yes' if pays else 'no'}: {said}"
    return pays


def choose_threads(run: Callable[[int], object], hidden_size: int, reasons: dict[str, str]) -> Threads:
    """One thread or all that torch would take; `run` makes a pass of so many tokens."""
    most = torch.get_num_threads()
    if most == 1:
        reasons["threads"] = "1: there is no other core"
        return Threads(1)
    if hidden_size >= WIDE:
        reasons["threads"] = f"{most}: products as large as this model's gain from all"
        return Threads(most)

    def with_threads(count: int, num_tokens: int) -> None:
        torch.set_num_threads(count)
        run(num_tokens)

    gains = []
    # Where between the two the gain of the second begins is not worth more passes
    for num_tokens, from_tokens in (PROBE_TOKENS, PROBE_TOKENS), (MANY_TOKENS, (PROBE_TOKENS + MANY_TOKENS) // 2):
        one_s, all_s = best_times(
            [lambda: with_threads(1, num_tokens), lambda: with_threads(most, num_tokens)],  # noqa: B023 - called here
            rounds=3,
        )
        gains.append(f"{one_s / all_s:.2f} times as fast as one at {num_tokens} tokens")
        if one_s >= MIN_GAIN["threads"] * all_s:
            reasons["threads"] = f"{most}: {', '.join(gains)}, so from {from_tokens} tokens on"
            return Threads(most, from_tokens)
    reasons["threads"] = f"1: {most} are {', '.join(gains)}"
    return Threads(1)


def probe_row(num_tokens: int, readout: Readout) -> Row:
    ids = array("i", [1 + place % 97 for place in range(num_tokens)])
    if readout == "labels":
        return Row(ids, (Read((num_tokens - 1,), (0, 1)),))
    return Row(ids, (Read((num_tokens - 2, num_tokens - 1), ()),))


def time_passes(run: Callable[[int], object], device: torch.device, longest: int) -> list[tuple[int, float]]:
    """(tokens, least seconds of three) of passes of one row; `run` makes one of so many tokens."""

    def wait(num_tokens: int) -> None:
        run(num_tokens)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    samples: list[tuple[int, float]] = []
    left = PASS_BUDGET_S
    for num_tokens in PASS_TOKENS[device.type]:
        if samples and (num_tokens > longest or samples[-1][1] * num_tokens / samples[-1][0] * 3 > left):
            break
        started = time.perf_counter()
        rounds = ROUNDS if num_tokens == PASS_TOKENS[device.type][0] else 2  # the smallest tells what a start costs
        samples.append((num_tokens, best_times([lambda: wait(num_tokens)], rounds)[0]))  # noqa: B023 - called here
        left -= time.perf_counter() - started
    return samples
