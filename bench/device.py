"""One run on a CUDA machine, at most six minutes: is it right there, and how fast is it?

    pip install -r requirements.txt -r requirements-cuda.txt
    python bench/device.py [--shapes 0.8B 4B] [--budget-s 350]

For each shape, with random weights in bfloat16: every kernel against its torch code, the pass without graphs against
float32 on the CPU, every graph against the same pass without graphs (the server's own start does that), stored requests
with graphs against without. Then the server itself, over HTTP on this machine: time to ready, memory, latency of one
client by prompt length, requests a second by clients and questions. What the budget does not allow is skipped and said.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from serve import Peer, Requests, answers_get, free_port, run_clients
from shapes import ROOT, SHAPES
from torch import Tensor

from onepass.forward import kernels

LENGTHS, CLIENTS, QUESTIONS = (64, 128, 300, 1000), (1, 16, 64), (1, 6)
STATE_TOKENS = 200
SECONDS = 3.0  # of each closed loop
READY_PATIENCE_S = 150
KERNEL_TOLERANCE, BFLOAT16_TOLERANCE = 2e-2, 5e-2  # of the largest value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--budget-s", type=float, default=350.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    parser.add_argument("--layers", type=int, help="so many, and a small vocabulary: to try this script")
    args = parser.parse_args()
    until = time.monotonic() + args.budget_s
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}")
    if args.device == "cuda":
        check_kernels()
    for name in args.shapes:
        if time.monotonic() > until - 60:
            print(f"{name}: skipped, the budget is spent")
            continue
        shape = dict(SHAPES[name])
        if args.layers:
            shape |= {"num_hidden_layers": args.layers, "vocab_size": 4096}
        with tempfile.TemporaryDirectory() as folder:
            make_large_checkpoint(Path(folder), shape)
            check_engine(name, Path(folder), args.device)
            measure_server(name, Path(folder), args.device, until)


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double().cpu() - theirs.double().cpu()).abs().max() / theirs.double().abs().max())


def check(what: str, distance: float, limit: float) -> None:
    print(f"{'ok  ' if distance <= limit else 'FAIL'} {what}: {distance:.1e} of the largest value", flush=True)


def check_kernels() -> None:
    """Those of flash-linear-attention against our torch code, in float32, as the passes call them."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 130, 4, 128)
    v, z = torch.randn(2, 3, 130, 8, 128)
    decay, beta, state = -torch.rand(3, 130, 8) * 0.3, torch.rand(3, 130, 8), torch.randn(3, 8, 128, 128)
    x, filters, before = torch.randn(3, 130, 512), torch.randn(512, 4), torch.randn(3, 3, 512)
    query, key = torch.randn(3, 40, 8, 256), torch.randn(3, 2, 170, 256)
    mask = torch.where(torch.rand(3, 1, 40, 170) < 0.3, -torch.inf, 0.0)

    def rule(start: Tensor | None) -> Callable[..., Tensor]:
        def run(*tensors: Tensor) -> Tensor:
            output, final = kernels.gated_delta_rule(
                *tensors[:5], state=tensors[5] if start is not None else None, want_state=True
            )
            assert final is not None
            return torch.cat((output.flatten().float(), final.flatten().float()))

        return run

    cases: list[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = [
        ("gated delta rule", rule(None), (q, k, v, decay, beta, state)),
        ("gated delta rule with a state", rule(state), (q, k, v, decay, beta, state)),
        ("convolution", lambda a, w: kernels.causal_conv_silu(a, w), (x, filters)),
        ("convolution with a state", kernels.causal_conv_silu, (x, filters, before)),
        ("gated norm", lambda a, g, w: kernels.gated_rms_norm(a, g, w, 1e-6), (v, z, torch.rand(128))),
        ("attention with a mask", kernels.attention, (query, key, key.flip(2), mask)),
    ]
    for name, run, tensors in cases:
        check(name, relative(run(*(t.cuda() for t in tensors)), run(*tensors)), KERNEL_TOLERANCE)


def make_large_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """Random bfloat16 weights, made on the device: `shapes.make_checkpoint` would take minutes."""
    from safetensors.torch import save_file
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from tests.support.checkpoints import make_decision_checkpoint

    make_decision_checkpoint(folder)
    config = Qwen3_5TextConfig(**shape)
    with torch.device("meta"):
        names = {name: tensor.shape for name, tensor in Qwen3_5ForCausalLM(config).state_dict().items()}
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, size in names.items():
        if name != "lm_head.weight":  # tied
            noise = torch.randn(size, generator=generator, device=device)
            scale = 1.0 if len(size) < 2 else (size[-1] if len(size) == 2 else 4) ** -0.5
            is_norm = "norm" in name
            tensors[name] = (noise * (0.1 if is_norm else scale)).to(torch.bfloat16).cpu().contiguous()
    save_file(tensors, folder / "model.safetensors")


def check_engine(name: str, folder: Path, device: str) -> None:
    """Stored requests in process: with graphs against without, and without against float32 on the CPU."""
    from onepass.config import Config
    from onepass.loading import load

    settings: dict[str, Any] = {"model": str(folder), "backend": "fast", "share_state": True}
    loaded = load(Config(**settings, device=device, dtype="bfloat16", fast_start=True))
    engine: Any = loaded.engine
    rows = stored_rows(loaded)
    with_graphs = flat(engine.forward(rows))
    graphs, engine._backend.graphs = engine._backend.graphs, None
    if graphs is not None:
        print(f"{name}: graphs {json.dumps(graphs.describe())}; failed {list(graphs.failed.items())[:3]}")
    engine._states.clear()
    without = flat(engine.forward(rows))
    check(f"{name}: stored requests, graphs against none", relative(with_graphs, without), BFLOAT16_TOLERANCE)
    del loaded, engine, graphs
    torch.cuda.empty_cache()
    exact = load(Config(**settings, device="cpu", dtype="float32")).engine
    check(f"{name}: bfloat16 against float32", relative(without, flat(exact.forward(rows))), BFLOAT16_TOLERANCE)


def stored_rows(loaded: Any) -> list[Any]:
    from transformers import AutoTokenizer

    from onepass.wire.schema import parse_request

    requests = Requests(AutoTokenizer.from_pretrained(loaded.checkpoint.folder))
    sizes = ((20, 1), (150, 3), (400, 2))  # tokens of the state, questions
    bodies = [requests.make("m", tokens, questions, is_first=True) for tokens, questions in sizes]
    return [row for body in bodies for row in loaded.prompter.render(parse_request(body))]


def flat(scores: list[list[list[float]]]) -> Tensor:
    return torch.tensor([score for row in scores for question in row for score in question])


def measure_server(name: str, folder: Path, device: str, until: float) -> None:
    port, started = free_port(), time.monotonic()
    command = [sys.executable, "server.py", "--port", str(port), "--model", str(folder), "--device", device]
    process = subprocess.Popen([*command, "--fast-start"], cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        while not answers_get(port, "/health"):
            if process.poll() is not None or time.monotonic() - started > READY_PATIENCE_S:
                print(f"FAIL {name}: the server was not ready after {time.monotonic() - started:.0f} s")
                return
            time.sleep(0.2)
        print(f"{name}: ready after {time.monotonic() - started:.1f} s")
        print_speed(name, folder, port, until)
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            print(f"{name}: device memory in use {(total - free) >> 20} MB")
    finally:
        process.terminate()
        process.wait(60)


def print_speed(name: str, folder: Path, port: int, until: float) -> None:
    from transformers import AutoTokenizer

    requests, peer = Requests(AutoTokenizer.from_pretrained(folder)), Peer("onepass", port, folder.name)
    print("| shape | state | questions | clients | req/s | p50 ms |\n|---|---|---|---|---|---|")
    cells = [(tokens, 1, 1) for tokens in LENGTHS]
    cells += [(STATE_TOKENS, questions, clients) for questions in QUESTIONS for clients in CLIENTS]
    for tokens, questions, clients in cells:
        if time.monotonic() > until:
            print(f"| {name} | {tokens} | {questions} | {clients} | skipped: the budget is spent | |")
            continue

        def make(tokens: int = tokens, questions: int = questions) -> bytes:
            return requests.make(peer.model, tokens, questions, is_first=True)

        rate, median = run_clients(peer, clients, SECONDS, make)
        print(f"| {name} | {tokens} | {questions} | {clients} | {rate:.1f} | {1000 * median:.2f} |", flush=True)


if __name__ == "__main__":
    main()
