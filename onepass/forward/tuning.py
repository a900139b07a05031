"""Chooses how to compute on this machine; each choice comes with its reason. Worker thread only.

The number format and the threads follow from the checkpoint and the processor alone: they are never measured, so that
the same machine always chooses the same. Two choices are measured, by turns and in the time of one thread: which
library multiplies in float32, and whether weights are packed. Such a choice leaves its default only for a clear gain
in processor time and in wall time; a busy machine, on which the two disagree, gets the default. CUDA needs no choice.
"""

from __future__ import annotations

import platform
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from onepass.checkpoint import Checkpoint, weight_files
from onepass.config import Config
from onepass.errors import StartupError
from onepass.forward import kernels
from onepass.forward.weights import SafetensorsReader
from onepass.rows import Read, Readout, Row

ROUNDS = 9
PROBE_TOKENS, FEW_TOKENS = 128, 16
MIN_GAIN = {"matmul": 1.15, "pack": 1.15}  # times faster than the default
PACK_MAX_LOSS = 1.1  # at the other length
# Narrower models spend their time beside the products, and packing brings nothing
NARROW = 512
LARGE_WEIGHTS = 100_000_000  # in the pass; a smaller checkpoint is fast enough in float32 and gives the same everywhere
# Multiply-adds of one product from which a second thread gains: on two Zen 5 cores a pass of the starter (256 x 384)
# gains 1.2 times at 256 tokens for 1.4 times the processor time, and 1.3 times at 1,024 tokens for 1.25 times
THREADS_FROM_WORK = 100_000_000
PASS_TOKENS = {"cpu": (16, 64, 256), "cuda": (64, 512, 4096)}
PASS_BUDGET_S = 1.0  # a pass that takes longer than what is left of it is the last one timed
NOT_IN_THE_PASS = ("embed_tokens", "lm_head", "visual.", "wte.", "wpe.")  # looked up, read at a few rows, or a tower's

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


def choose(checkpoint: Checkpoint, device: torch.device, config: Config) -> Choice:
    """The dtype, the mode of matrix products and the layout of the weights; sets torch's mode."""
    asked = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype)
    if device.type != "cpu":
        return Choice(asked or torch.bfloat16, reasons={"dtype": "asked for" if asked else "CUDA"})
    reasons = {"dtype": "asked for"}
    dtype = asked or _choose_dtype(checkpoint.folder, reasons)
    sizes = matrix_sizes(checkpoint.text_config)
    if sizes is None:
        return Choice(dtype, reasons=reasons)
    matrix, x = _operands(sizes, dtype)
    with one_thread():
        if dtype == torch.float32:
            _choose_matmul(matrix, x, reasons)
        packs = config.backend != "transformers" and sizes[0] >= NARROW and _pays_to_pack(matrix, x, reasons)
    return Choice(dtype, packs, reasons)


@contextmanager
def one_thread() -> Iterator[None]:
    """The calling thread computes alone: two threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matrix_sizes(text_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(hidden, intermediate) of the model, where its configuration gives them."""
    hidden, inner = text_config.get("hidden_size"), text_config.get("intermediate_size")
    if type(hidden) is not int or type(inner) is not int:
        return None
    return (hidden, inner) if 0 < hidden <= 1 << 16 and 0 < inner <= 1 << 16 else None


def _operands(sizes: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(sizes[1], sizes[0], generator=generator).to(dtype)
    return matrix, torch.randn(PROBE_TOKENS, sizes[0], generator=generator).to(dtype)


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as the default a call is: medians of alternated rounds."""

    wall: float
    cpu: float  # by the processor time of the calling thread

    def reaches(self, least: float) -> bool:
        """Whether both clocks say so. Where they disagree the machine is busy, and the default is kept."""
        return min(self.wall, self.cpu) >= least

    def __str__(self) -> str:
        return f"{self.cpu:.2f} times as fast ({self.wall:.2f} by the wall clock)"


def compare(default: Call, other: Call, rounds: int = ROUNDS) -> Gain:
    """Runs both by turns, after once each that is not timed."""
    for call in (default, other):
        call()
    walls, cpus = [], []
    for _ in range(rounds):
        times = [_time(call) for call in (default, other)]
        walls.append(times[0][0] / times[1][0])
        cpus.append(times[0][1] / times[1][1])
    return Gain(median(walls), median(cpus))


def _time(call: Call) -> tuple[float, float]:
    """Seconds by the wall clock and of the thread's processor time, each above zero."""
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return max(time.perf_counter() - wall, 1e-9), max(time.thread_time() - cpu, 1e-9)


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has instructions for products in bfloat16. Elsewhere they are about ten times slower."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    features = [line for line in _read_text(cpuinfo).splitlines() if line.startswith("Features")]  # Arm's Linux
    return any("bf16" in line.split() for line in features)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _choose_dtype(folder: Path, reasons: dict[str, str]) -> torch.dtype:
    """bfloat16 where the checkpoint is stored in it and is large, and the processor multiplies it; else float32."""
    num_weights, num_bfloat16 = count_weights(folder)
    if 2 * num_bfloat16 <= num_weights:
        reasons["dtype"] = "float32: the checkpoint is not stored in bfloat16"
    elif num_weights < LARGE_WEIGHTS:
        reasons["dtype"] = f"float32: a pass has {num_weights / 1e6:.0f} M weights, fewer than 100 M"
    elif not multiplies_bfloat16():
        reasons["dtype"] = "float32: this CPU has no instructions for bfloat16"
    else:
        reasons["dtype"] = (
            f"bfloat16: stored so, {num_weights / 1e6:.0f} M weights in a pass, and this CPU multiplies it"
        )
        return torch.bfloat16
    return torch.float32


def count_weights(folder: Path) -> tuple[int, int]:
    """The weights that a pass multiplies with, and how many of them are stored in bfloat16, by the files' headers.

    Zeros for a checkpoint that cannot be read: whoever loads it says why.
    """
    try:
        shapes = SafetensorsReader(weight_files(folder)).describe()
    except (StartupError, SafetensorError, OSError, ValueError):
        return 0, 0
    counts = {torch.bfloat16: 0}
    for name, (dtype, num_values) in shapes.items():
        if not any(part in name for part in NOT_IN_THE_PASS):
            counts[dtype] = counts.get(dtype, 0) + num_values
    return sum(counts.values()), counts[torch.bfloat16]


def _choose_matmul(matrix: Tensor, x: Tensor, reasons: dict[str, str]) -> None:
    """ "medium" lets another library multiply; kept only where it is faster and no less exact than float32 is."""

    def multiply(mode: str) -> Tensor:
        torch.set_float32_matmul_precision(mode)
        return F.linear(x, matrix)

    exact = x.double() @ matrix.double().T
    errors = [float((multiply(mode).double() - exact).abs().max()) for mode in ("highest", "medium")]
    gain = compare(lambda: multiply("highest"), lambda: multiply("medium"))
    is_exact = errors[1] <= 2 * errors[0]
    mode = "medium" if is_exact and gain.reaches(MIN_GAIN["matmul"]) else "highest"
    torch.set_float32_matmul_precision(mode)
    reasons["matmul"] = f"{mode}: medium is {gain}, its error {errors[1] / errors[0]:.2g} times"


def _pays_to_pack(matrix: Tensor, x: Tensor, reasons: dict[str, str]) -> bool:
    packed, few = kernels.pack_matrix(matrix), x[:FEW_TOKENS]
    if not packed.is_mkldnn:
        reasons["pack"] = "no: there is no such layout here"
        return False
    gains = []
    for tokens in (few, x):
        gains.append(
            compare(lambda: F.linear(tokens, matrix), lambda: kernels.linear(tokens, packed))  # noqa: B023 - called here
        )
    pays = any(gain.reaches(MIN_GAIN["pack"]) for gain in gains) and all(
        gain.reaches(1 / PACK_MAX_LOSS) for gain in gains
    )
    said = f"{gains[0]} at {FEW_TOKENS} tokens, {gains[1]} at {PROBE_TOKENS}"
    reasons["pack"] = f"{'yes' if pays else 'no'}: {said}"
    return pays


def choose_threads(sizes: tuple[int, int] | None, reasons: dict[str, str]) -> Threads:
    """One thread for passes whose products are small, all that torch would take for the others.

    `sizes` are those of `matrix_sizes`. Nothing is timed: on a busy machine two threads wait for each other, and what
    was measured then would be kept for as long as the server runs.
    """
    most = torch.get_num_threads()
    if most == 1:
        reasons["threads"] = "1: there is no other core"
        return Threads(1)
    from_tokens = 0 if sizes is None else THREADS_FROM_WORK // (sizes[0] * sizes[1])
    if from_tokens < 2 * FEW_TOKENS:
        reasons["threads"] = f"{most}: products as large as this model's gain from all"
        return Threads(most)
    reasons["threads"] = f"{most}: for passes of {from_tokens} tokens and more, 1 for shorter ones"
    return Threads(most, from_tokens)


def probe_row(num_tokens: int, readout: Readout) -> Row:
    ids = array("i", [1 + place % 97 for place in range(num_tokens)])
    if readout != "pointer":
        return Row(ids, (Read((num_tokens - 1,), (0, 1)),))
    return Row(ids, (Read((num_tokens - 2, num_tokens - 1), ()),))


def time_passes(run: Callable[[int], object], device: torch.device, longest: int) -> list[tuple[int, float]]:
    """(tokens, least seconds) of passes of one row; `run` makes one of so many tokens.

    On a CPU it is the processor time of one thread, which other processes hardly change.
    """
    is_cuda = device.type == "cuda"
    clock = time.perf_counter if is_cuda else time.thread_time

    def timed(num_tokens: int) -> float:
        started = clock()
        run(num_tokens)
        if is_cuda:
            torch.cuda.synchronize(device)
        return clock() - started

    samples: list[tuple[int, float]] = []
    left = PASS_BUDGET_S
    with one_thread():
        for num_tokens in PASS_TOKENS[device.type]:
            if samples and (num_tokens > longest or samples[-1][1] * num_tokens / samples[-1][0] * 3 > left):
                break
            rounds = 6 if num_tokens == PASS_TOKENS[device.type][0] else 4  # the smallest tells what a start costs
            times = [timed(num_tokens) for _ in range(rounds)]
            samples.append((num_tokens, min(times[1:])))  # the first is not timed: it sets up
            left -= sum(times)
    return samples
