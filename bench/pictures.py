"""What it saves to encode a picture once: the starter with a vision tower of random weights, in process.

    python bench/pictures.py

Times are CPU time on one thread, medians of alternated rounds, so that a busy machine disturbs the ratios little. The
tower's answers mean nothing; its size is that of a model one would serve.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["GOMP_SPINCOUNT"] = "1000"  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

import images
from onepass.config import STARTER_MODEL, Config
from onepass.decider import Decider
from onepass.forward import qwen3_5_vision
from onepass.loading import load

PREPROCESSOR = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QUESTIONS = [f"Is it number {n} of the things that one may ask about it?" for n in range(6)]
OTHERS = [f"{question} Really?" for question in QUESTIONS]  # the same ones would not be computed again


def make_checkpoint(folder: Path, depth: int, width: int) -> Any:
    """The starter with a random tower in place of its own."""
    document = json.loads((STARTER_MODEL / "config.json").read_text())
    config = Qwen3_5VisionConfig(
        depth=depth,
        hidden_size=width,
        intermediate_size=4 * width,
        num_heads=width // 64,
        out_hidden_size=document["text_config"]["hidden_size"],
    )
    torch.manual_seed(0)
    tower: Any = Qwen3_5VisionModel(config)
    tower.eval()
    shutil.copytree(STARTER_MODEL, folder, dirs_exist_ok=True)
    tensors = load_file(STARTER_MODEL / "model.safetensors")
    whole = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.visual.")}
    whole |= {f"model.visual.{name}": tensor.contiguous() for name, tensor in tower.state_dict().items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**document, "vision_config": config.to_dict()}, default=str))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return tower


def picture(seed: int, width: int = 640, height: int = 640) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def request(data: bytes, questions: list[str], words: str) -> bytes:
    body = {
        "state": f"{words} <image:1>",
        "questions": {str(n): {"type": "noul", "instructions": text} for n, text in enumerate(questions)},
        "images": [base64.b64encode(data).decode()],
    }
    return json.dumps(body).encode()


def start(folder: Path, **settings: Any) -> Decider:
    decider = Decider(Config(model=str(folder), **settings), load=load)
    decider.start()
    decider.wait_ready()
    return decider


def seconds(run: Callable[[], object]) -> float:
    """CPU time of the whole process: the worker's thread is another one."""
    started = time.process_time()
    run()
    return time.process_time() - started


def report(title: str, times: dict[str, list[float]]) -> None:
    print(f"\n{title}")
    base = median(next(iter(times.values())))
    for name, values in times.items():
        print(f"  {name:<58} {median(values) * 1e3:9.1f} ms   {base / median(values):7.2f} times as fast")


def measure_requests(folder: Path, rounds: int) -> None:
    plain, kept = start(folder, image_cache_mb=0, state_cache_mb=0), start(folder)
    names = (
        "six questions in six requests, nothing kept",
        "in one request, nothing kept: one encoding",
        "in one request, the picture kept, another text",
        "in one request, the picture and the text kept",
    )
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        data = picture(number)
        kept.decide(request(data, QUESTIONS[:1], "before"))
        runs = (
            lambda: [plain.decide(request(data, [one], "see")) for one in QUESTIONS],  # noqa: B023 - called here
            lambda: plain.decide(request(data, QUESTIONS, "see")),  # noqa: B023
            lambda: kept.decide(request(data, QUESTIONS, "see")),  # noqa: B023
            lambda: kept.decide(request(data, OTHERS, "see")),  # noqa: B023
        )
        for name, run in zip(names, runs, strict=True):
            times[name].append(seconds(run))
    report("Six questions about a picture of 448 x 448 pixels as the model sees it", times)
    for decider in (plain, kept):
        decider.drain(10)


def measure_tower(model: Any, rounds: int, count: int = 4) -> None:
    spec = qwen3_5_vision.Spec.from_config(model.config.to_dict())
    tensors = {f"visual.{name}": tensor for name, tensor in model.state_dict().items()}
    weights = qwen3_5_vision.load_weights(spec, tensors, torch.device("cpu"), torch.float32)
    settings = images.Settings(16, 2, 65536, 448 * 448, (0.5,) * 3, (0.5,) * 3)
    patches = [settings.patches(images.decode(picture(n), "picture", settings).pixels) for n in range(count)]
    grid = qwen3_5_vision.make_grid(spec, weights, 28, 28)
    tables = (grid.positions[None], grid.cos[None], grid.sin[None])
    frames = torch.cat(patches).view(-1, 3, 1, 256).expand(-1, -1, 2, -1).reshape(count * 784, -1)
    grids = torch.tensor([[1, 28, 28]] * count)
    runs = {
        f"transformers, {count} pictures": lambda: model(frames, grids),
        "ours, one by one": lambda: [qwen3_5_vision.forward(spec, weights, one[None], *tables) for one in patches],
        "ours, together": lambda: qwen3_5_vision.forward(spec, weights, torch.stack(patches), *tables),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    report("The tower alone", times)


def measure_reading(rounds: int) -> None:
    settings = images.Settings(16, 2, 65536, 448 * 448, (0.5,) * 3, (0.5,) * 3)
    files = {"a JPEG of 640 x 640": picture(0), "a JPEG of 4000 x 3000": picture(0, 4000, 3000)}
    times: dict[str, list[float]] = {name: [] for name in files}
    for _ in range(rounds):
        for name, data in files.items():
            times[name].append(seconds(lambda: images.decode(data, "picture", settings)))  # noqa: B023 - called here
    report("Reading: decode, turn, resize", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=12, help="layers of the tower (default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="its hidden size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), options.depth, options.width)
        print(f"tower: {options.depth} layers of {options.width}, float32, one thread, {options.rounds} rounds")
        measure_reading(options.rounds)
        measure_tower(model, options.rounds)
        measure_requests(Path(folder), options.rounds)


if __name__ == "__main__":
    main()
