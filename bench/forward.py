"""Times our forward against transformers' own model and against its matrix products alone, on the 0.8B shape.

    python bench/forward.py                     # float32, and bfloat16 where the CPU multiplies it natively
    python bench/forward.py --threads 1 --lengths 64 300 --layers 8
    python bench/forward.py --shared            # six questions of 60 tokens about one state of 300

Weights are random and the vocabulary is 4096 instead of 248320 (1 GB less): of the embedding only rows are read, and
no score head is timed. Transformers is called in the way that costs it least: no cache, no mask, positions given.
"products" are the matrix products of our forward's linear layers, with its own weights, and nothing else. The three are
timed in turn, round after round in one process, so that what else runs on the machine falls on all of them; figures are
medians. CPU time counts the work of all threads and does not mind waiting for a core; wall time is what a request sees.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # before torch: threads that spin for a busy core take it from the others
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shapes import SHAPES
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

from onepass.forward import kernels, qwen3_5
from onepass.forward.prefix import Prefix
from onepass.forward.qwen3_5 import AttentionWeights, LayerWeights, Spec, Weights

SHAPE = {**SHAPES["0.8B"], "vocab_size": 4096}
WARMUP_ROUNDS = 1
STATE_TOKENS, QUESTION_TOKENS, QUESTIONS = 300, 60, 6
Call = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 300, 1000], help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one that is not")
    parser.add_argument("--layers", type=int, default=24, help="of 24; fewer for a quick look")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--matmul", choices=["highest", "high", "medium"], default="highest", help="float32 products")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], help="default: what the CPU has")
    parser.add_argument("--pack", action="store_true", help="our weights in oneDNN's layout; products too")
    parser.add_argument("--shared", action="store_true", help="time six questions about one state instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision(args.matmul)
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    dtypes = args.dtypes or (["float32", "bfloat16"] if has_bfloat16 else ["float32"])
    sizes = f"{args.threads} threads, {args.layers} layers, {args.rounds} rounds"
    print(f"torch {torch.__version__}, {sizes}, pack={args.pack}")
    if "bfloat16" not in dtypes:
        print("bfloat16: not measured, this CPU does not multiply it natively")
    if args.shared:
        measure_shared(getattr(torch, dtypes[-1]), args.rounds, args.layers, args.pack)
        return
    print("| dtype | tokens | transformers ms | ours ms | products ms | transformers / ours | ours / products |")
    print("|---|---|---|---|---|---|---|")
    for dtype in dtypes:
        measure(getattr(torch, dtype), args.lengths, args.rounds, args.layers, args.pack)


def build(dtype: torch.dtype, layers: int, pack: bool) -> tuple[Any, Spec, Weights]:
    """Transformers' model and the same weights for ours."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**(SHAPE | {"num_hidden_layers": layers}))
    model: Any = Qwen3_5TextModel(config)
    model.to(dtype).eval()
    spec = Spec.from_config(config)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return model, spec, qwen3_5.load_weights(spec, state, torch.device("cpu"), dtype, pack=pack)


@torch.inference_mode()
def measure_shared(dtype: torch.dtype, rounds: int, layers: int, pack: bool) -> None:
    _, spec, weights = build(dtype, layers, pack)
    state, questions = torch.randint(0, 4096, (1, STATE_TOKENS)), torch.randint(0, 4096, (QUESTIONS, QUESTION_TOKENS))
    whole = torch.cat((state.expand(QUESTIONS, -1), questions), dim=1)
    order, last = torch.arange(whole.shape[1])[None], torch.full((QUESTIONS, 1), QUESTION_TOKENS - 1)
    after = order[:, STATE_TOKENS:].expand(QUESTIONS, -1)

    def prefix() -> Prefix | None:
        start = order[:, :STATE_TOKENS]
        return qwen3_5.forward(spec, weights, positions=start, input_ids=state, keep=STATE_TOKENS)[1]

    def suffixes(start: Prefix | None) -> Tensor:
        return qwen3_5.forward(spec, weights, positions=after, input_ids=questions, read=last, prefix=start)[0]

    def one_by_one() -> Tensor:
        read = last[:1] + STATE_TOKENS
        rows = [qwen3_5.forward(spec, weights, positions=order, input_ids=row[None], read=read)[0] for row in whole]
        return torch.cat(rows)

    at_hand = prefix()
    calls = (one_by_one, lambda: suffixes(prefix()), lambda: suffixes(at_hand))
    check(calls[0](), calls[1](), whole.shape[1])
    wall, cpu = time_in_turn(calls, rounds)
    print(f"{QUESTIONS} questions of {QUESTION_TOKENS} tokens about a state of {STATE_TOKENS}, {dtype}")
    print("| | ms | times faster | in CPU time |")
    print("|---|---|---|---|")
    for name, a, b in zip(
        ("whole, one by one", "state once, questions together", "state at hand"), wall, cpu, strict=True
    ):
        print(f"| {name} | {1000 * a:.0f} | {wall[0] / a:.2f} | {cpu[0] / b:.2f} |")


@torch.inference_mode()
def measure(dtype: torch.dtype, lengths: list[int], rounds: int, layers: int, pack: bool) -> None:
    model, spec, weights = build(dtype, layers, pack)
    for length in lengths:
        calls = build_calls(model, spec, weights, length)
        check(calls[0](), calls[1](), length)
        wall, cpu = time_in_turn(calls, rounds)
        row = [str(dtype).removeprefix("torch."), str(length), *(f"{1000 * t:.0f}" for t in wall)]
        row += [f"{wall[a] / wall[b]:.2f} (CPU time {cpu[a] / cpu[b]:.2f})" for a, b in ((0, 1), (1, 2))]
        print(f"| {' | '.join(row)} |", flush=True)


def build_calls(model: Any, spec: Spec, weights: Weights, length: int) -> tuple[Call, Call, Call]:
    ids = torch.randint(0, spec.vocab_size, (1, length))
    positions, last = torch.arange(length)[None], torch.tensor([[length - 1]])
    wide, no_mask = positions.expand(3, -1, -1), {"full_attention": None, "linear_attention": None}
    matrices = [matrix for layer in weights.layers[:-1] for matrix in matrices_of(layer)]
    matrices.append(matrices_of(weights.layers[-1])[0])  # the last layer's keys and values; the rest is for one token
    inputs = {size: torch.randn(length, size, dtype=weights.dtype) for size in {m.shape[1] for m in matrices}}

    def theirs() -> Tensor:
        hidden: Tensor = model(input_ids=ids, position_ids=wide, attention_mask=no_mask, use_cache=False)[0]
        return hidden[:, -1:]

    def ours() -> Tensor:
        return qwen3_5.forward(spec, weights, positions=positions, input_ids=ids, read=last)[0]

    def products() -> Tensor:
        for matrix in matrices:
            product = kernels.linear(inputs[matrix.shape[1]], matrix)
        return product

    return theirs, ours, products


def matrices_of(layer: LayerWeights) -> tuple[Tensor, ...]:
    mixer = layer.mixer
    first = (mixer.kv, mixer.qg) if isinstance(mixer, AttentionWeights) else (mixer.qkvzba,)
    return *first, mixer.out, layer.gate_up, layer.down


def check(theirs: Tensor, ours: Tensor, length: int) -> None:
    """A forward that is fast and wrong is no forward."""
    difference = ((theirs - ours).abs().max() / theirs.abs().max()).item()
    limit = 1e-4 if ours.dtype == torch.float32 else 0.1
    assert difference < limit, f"{length} tokens: differs by {difference:.2g} of the largest hidden value"


def time_in_turn(calls: tuple[Call, ...], rounds: int) -> tuple[list[float], list[float]]:
    """Median seconds of each call, of wall time and of CPU time."""
    samples: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(WARMUP_ROUNDS + rounds):
        for call, sample in zip(calls, samples, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if number >= WARMUP_ROUNDS:
                sample.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall_times, cpu_times = ([statistics.median(t[i] for t in sample) for sample in samples] for i in (0, 1))
    return wall_times, cpu_times


if __name__ == "__main__":
    main()
