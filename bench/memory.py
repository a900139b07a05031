"""Peak memory of the server's process against the size of the weights: at the start, and under load.

    python bench/memory.py [--model FOLDER] [--dtype float32] [--seconds 20]

Without --model the weights are random, of Qwen3.5's architecture, about 600 MB in float32, so that they weigh more than
what torch and transformers take. `base` is the resident memory of a process that has imported these and loaded nothing;
it is taken off the rest. `weights` are the bytes of the tensors as they are held (in the dtype that is served, the
embedding as it is stored). The load is 16 clients with six questions about states of 500 tokens, each new.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from serve import Peer, Requests, answers_get, free_port, run_clients
from shapes import ROOT, SHAPES, make_checkpoint

SHAPE = {**SHAPES["0.8B"], "num_hidden_layers": 8}
NUM_CLIENTS, STATE_TOKENS, QUESTIONS = 16, 500, 6
BASE = (
    "import torch, transformers, engine, onepass.prompt.prompter, onepass.forward.fast_backend;"
    "torch.ones(64, 64) @ torch.ones(64, 64); input(1)"
)
ENVIRON = {**os.environ, "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "1000"}


def memory(pid: int, name: str) -> int:
    """Bytes; VmRSS is now, VmHWM the most so far."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def base_memory() -> int:
    with subprocess.Popen(
        [sys.executable, "-c", BASE], cwd=ROOT, env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        size = memory(process.pid, "VmRSS")
        process.kill()
    return size


def weight_bytes(folder: Path, dtype: str) -> int:
    from safetensors import safe_open

    width = {"float32": 4, "bfloat16": 2}[dtype]
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                is_table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
                total += tensor.numel() * (min(width, tensor.element_size()) if is_table else width)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint (default: one made for this)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load (default: 20)")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = args.model or make_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())), SHAPE)
        base, weights, port = base_memory(), weight_bytes(folder, args.dtype), free_port()
        command = [sys.executable, "server.py", "--port", str(port), "--model", str(folder), "--dtype", args.dtype]
        process: Any = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        stack.callback(process.terminate)
        while not answers_get(port, "/health"):
            if process.poll() is not None:
                raise SystemExit("the server did not come up")
            time.sleep(0.5)
        rows = [("start, most", memory(process.pid, "VmHWM")), ("start, when ready", memory(process.pid, "VmRSS"))]
        load(folder, port, args.seconds)
        rows += [("load, most", memory(process.pid, "VmHWM")), ("after it", memory(process.pid, "VmRSS"))]
    print(f"base {base >> 20} MB, weights {weights >> 20} MB")
    print("| | MB | less base | over weights |")
    print("|---|---|---|---|")
    for name, size in rows:
        print(f"| {name} | {size >> 20} | {size - base >> 20} | {(size - base) / weights:.2f} |")


def load(folder: Path, port: int, seconds: float) -> None:
    from transformers import AutoTokenizer

    requests = Requests(AutoTokenizer.from_pretrained(folder))
    peer = Peer("onepass", port, folder.name)
    lock = threading.Lock()

    def make() -> bytes:
        with lock:  # tokenizers take turns here, or the clients would be the load
            return requests.make(peer.model, STATE_TOKENS, QUESTIONS, is_first=True)

    run_clients(peer, NUM_CLIENTS, seconds, make)


if __name__ == "__main__":
    main()
