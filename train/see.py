"""Trains a small vision tower for a text checkpoint whose weights stay as they are, on drawings that it draws itself.

    python train/see.py --run RUN train               # goes on from the run's last step
    python train/see.py --run RUN merge --out OUT     # the checkpoint with the tower in it

The language model's weights do not change, so its answers about texts do not either. The loss is that of the answers,
through the quick forward of model.py, and, less and less, how far a picture's embeddings are from those of the words for
what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from batches import Batch, Batcher
from data import NOUL_NAMES, Row, Segments, number_rows
from drawings import HELD_OUT, VOCABULARY, Asked, Drawing, draw
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms
from transformers import AutoTokenizer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from wiring import is_boundary

from images import Settings
from model import load_model
from onepass.forward import qwen3_5_vision

SHOWN = 192  # pixels a side of a drawing as the tower is shown it: 36 tokens
SETTINGS = Settings(16, 2, min_pixels=SHOWN**2, max_pixels=SHOWN**2, mean=(0.5,) * 3, std=(0.5,) * 3)
GRID, NUM_TOKENS = (SHOWN // 16, SHOWN // 16), (SHOWN // 32) ** 2  # patches a side, tokens of a drawing
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
BEFORE = ("", "", "", "Here is a picture: ", "A drawing. ", "The picture ")  # what the state says before it
CONTRAST = 0.1  # temperature of the contrast between the words of one kind
VISION_KEYS = (
    "model_type",
    *(field.name for field in fields(qwen3_5_vision.Spec)[:-1]),
    "hidden_act",
    "rope_parameters",
)
TEXT, TOWER = "model.language_model.", "model.visual."  # names in a checkpoint with a tower


class Eyes(nn.Module):
    """The vision tower; components of an embedding that are the same in all words are given that value."""

    def __init__(self, hidden: int, depth: int, width: int, embeddings: Tensor) -> None:
        super().__init__()
        self.config = Qwen3_5VisionConfig(
            depth=depth,
            hidden_size=width,
            intermediate_size=2 * width,
            num_heads=4,
            out_hidden_size=hidden,
            num_position_embeddings=GRID[0] * GRID[1],
        )
        self.spec = qwen3_5_vision.Spec.from_config(self.config.to_dict())
        self.tower: Any = Qwen3_5VisionModel(self.config)
        self.fixed: Tensor = embeddings.std(0) < 1e-6 * embeddings.abs().max()
        self.constant: Tensor = embeddings.mean(0)
        nn.init.normal_(self.tower.merger.linear_fc2.weight, std=width**-0.5 * float(embeddings.std()) / 2)
        self.fix()

    @torch.no_grad()
    def fix(self) -> None:
        """After each step: the checkpoint's own tower must give the constants without this class."""
        last = self.tower.merger.linear_fc2
        last.weight[self.fixed] = 0
        last.bias[self.fixed] = self.constant[self.fixed]

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, as they are shown, to (B, NUM_TOKENS, hidden), by the server's own forward."""
        tensors = {f"visual.{name}": parameter for name, parameter in self.tower.named_parameters()}
        weights = qwen3_5_vision.load_weights(self.spec, tensors, torch.device("cpu"), torch.float32)
        grid = qwen3_5_vision.make_grid(self.spec, weights, *GRID)
        patches = torch.stack([SETTINGS.patches(one) for one in pixels])
        return qwen3_5_vision.forward(self.spec, weights, patches, grid.positions[None], grid.cos[None], grid.sin[None])


class Reader:
    """The frozen text checkpoint: the scores of answers, and what words mean in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_model(folder).requires_grad_(False)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.boundary = is_boundary(AutoTokenizer.from_pretrained(folder)).numpy()
        decision = json.loads((folder / "decision.json").read_text(encoding="utf-8"))
        self.temperature: dict[str, float] = decision["temperature"]
        table = self.model.lm.model.embed_tokens.weight
        self.words = {
            word: table[self.tokenizer.encode(f" {word}", add_special_tokens=False).ids].mean(0)
            for words in VOCABULARY.values()
            for word in words
        }

    def token_id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise SystemExit(f"{self.folder}: the tokenizer has no {token}")
        return int(found)

    def batch(self, asked: list[Asked], pictures: list[int], before: list[str]) -> Batch:
        """Questions about pictures; token ids from the vocabulary's size on are the pictures' embeddings, in turn.

        pictures: for each question the number of its picture; before: for each picture the text that precedes it.
        """
        rows = [
            Row(one.kind, "", one.type, one.instructions, options, (None,) * len(options), one.answer)
            for one in asked
            for options in [one.options or NOUL_NAMES]
        ]
        segments = Segments(self.tokenizer)
        numbered = number_rows(rows, segments)
        first, vocab_size = len(segments.starts) - 1, len(self.boundary)
        start, stop, end_state = (self.token_id(token) for token in (START, END, "<|end_state|>"))
        states = [
            [
                *self.tokenizer.encode(text, add_special_tokens=False).ids,
                start,
                *range(vocab_size + index * NUM_TOKENS, vocab_size + (index + 1) * NUM_TOKENS),
                stop,
                end_state,
            ]
            for index, text in enumerate(before)
        ]
        segments.tokens = np.concatenate([segments.tokens, *states]).astype(np.int32)
        ends = segments.starts[-1] + np.cumsum([len(state) for state in states])
        segments.starts = np.concatenate([segments.starts, ends])
        boundary = np.concatenate([self.boundary, np.zeros(len(before) * NUM_TOKENS, bool)])
        batcher = Batcher(replace(numbered, state=first + np.array(pictures)), segments, boundary)
        return batcher.batch(np.arange(len(rows)))


def pixels_of(drawings: list[Drawing]) -> Tensor:
    """(B, 3, SHOWN, SHOWN) uint8, resized as the server does it."""
    pixels = torch.from_numpy(np.stack([np.asarray(one.image) for one in drawings])).permute(0, 3, 1, 2)
    shown: Tensor = transforms.resize(pixels.contiguous(), [SHOWN, SHOWN], InterpolationMode.BICUBIC, antialias=True)
    return shown


def words_loss(reader: Reader, seen: Tensor, drawings: list[Drawing]) -> Tensor:
    """How far the mean of a picture's embeddings is from the words that name what is in it, against their like."""
    pooled, losses = seen.mean(1), []
    all_words = torch.stack(list(reader.words.values()))
    centre, scale = all_words.mean(0), all_words.norm(dim=-1).mean()
    for kind, words in VOCABULARY.items():
        places = [index for index, drawing in enumerate(drawings) if kind in drawing.facts]
        if not places:
            continue
        meanings = F.normalize(torch.stack([reader.words[word] for word in words]) - centre, dim=-1)
        likeness = F.normalize(pooled[places] - centre, dim=-1) @ meanings.T / CONTRAST
        answers = torch.tensor([words.index(drawings[index].facts[kind]) for index in places])
        losses.append(F.cross_entropy(likeness, answers, reduction="sum"))
    # Embeddings must be as large as words', or the frozen layers have never seen anything like them
    loss: Tensor = torch.stack(losses).sum() / len(drawings) + (seen.norm(dim=-1) / scale - 1).square().mean()
    return loss


def answers_loss(
    reader: Reader, seen: Tensor, drawings: list[Drawing], rng: random.Random
) -> tuple[Tensor, dict[str, list[bool]]]:
    """Cross entropy of the answers to a question about each fact of each drawing; which were right, by kind and type."""
    pairs = [(index, drawing.ask(rng, kind)) for index, drawing in enumerate(drawings) for kind in drawing.facts]
    asked = [one for _, one in pairs]
    batch = reader.batch(asked, [index for index, _ in pairs], [rng.choice(BEFORE) for _ in drawings])
    scores = reader.model(batch, seen.flatten(0, 1))
    temperatures = torch.tensor([reader.temperature[one.type] for one in asked])
    right: dict[str, list[bool]] = defaultdict(list)
    for one, is_right in zip(asked, (scores.argmax(-1) == batch.answers).tolist(), strict=True):
        right[f"{one.kind}, {one.type}"].append(is_right)
    return F.cross_entropy(scores / temperatures[:, None], batch.answers), right


def train(reader: Reader, eyes: Eyes, options: argparse.Namespace) -> None:
    """Drawings follow from the step's number, so a stop changes nothing."""
    path = options.run / "last.pt"
    optimizer = torch.optim.AdamW(eyes.parameters(), lr=options.lr, weight_decay=0.01)
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        first = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
    shares: dict[str, list[bool]] = defaultdict(list)
    started = time.monotonic()
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 100, (options.steps - step) / (0.3 * options.steps))
        seed = step * options.batch
        drawings = [draw(seed + index) for index in range(options.batch)]
        assert seed + options.batch <= HELD_OUT
        seen = eyes(pixels_of(drawings))
        of_answers, right = answers_loss(reader, seen, drawings, random.Random(seed))
        of_words = words_loss(reader, seen, drawings)
        optimizer.zero_grad()
        (of_answers + (1 - step / options.steps) * of_words).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
        optimizer.step()
        eyes.fix()
        for name, found in right.items():
            shares[name] += found
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(path, {"model": eyes.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
            told = {name: round(sum(found) / len(found), 3) for name, found in sorted(shares.items())}
            rate = (step + 1 - first) / (time.monotonic() - started)
            losses = f"answers={of_answers.item():.3f} words={of_words.item():.3f}"
            print(f"train: step={step + 1} {losses} steps_per_s={rate:.2f} {told}", flush=True)
            shares.clear()


def save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def merge(reader: Reader, eyes: Eyes, out: Path) -> None:
    """The text checkpoint with the tower in it, in the dtype it has. A tower that was in it already is left out."""
    out.mkdir(parents=True, exist_ok=True)
    for path in reader.folder.iterdir():
        if path.is_file() and path.resolve() != (out / path.name).resolve():
            shutil.copy(path, out)
    config = json.loads((reader.folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    tensors = load_file(reader.folder / "model.safetensors")
    whole = {
        TEXT + name.removeprefix(TEXT).removeprefix("model."): tensor.clone()
        for name, tensor in tensors.items()
        if not name.startswith(TOWER)
    }
    dtype = next(iter(whole.values())).dtype
    for name, tensor in eyes.tower.state_dict().items():
        whole[TOWER + name] = tensor.to(dtype).contiguous()
    save_file(whole, out / "model.safetensors", {"format": "pt"})
    start, pad, end = map(reader.token_id, (START, PAD, END))
    tower = eyes.config.to_dict()
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": str(dtype).removeprefix("torch."),
        "image_token_id": pad,
        "video_token_id": pad,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "dtype")},
        "vision_config": {key: tower[key] for key in VISION_KEYS},
    }
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": SETTINGS.min_pixels, "longest_edge": SETTINGS.max_pixels},
        "patch_size": SETTINGS.patch_size,
        "merge_size": SETTINGS.merge_size,
        "temporal_patch_size": 2,
        "image_mean": list(SETTINGS.mean),
        "image_std": list(SETTINGS.std),
    }
    for name, document in (("config.json", config), ("preprocessor_config.json", preprocessor)):
        (out / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    for path in out.iterdir():
        path.chmod(0o644)
    num_bytes = sum(tensor.nbytes for name, tensor in whole.items() if name.startswith(TOWER))
    print(f"merged into {out}; the tower has {num_bytes / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train", "merge"))
    parser.add_argument("--model", type=Path, default=Path("model"), help="text checkpoint of train.py")
    parser.add_argument("--run", type=Path, required=True, help="folder of this run")
    parser.add_argument("--out", type=Path, help="merge: folder of the new checkpoint, --model itself if you like")
    parser.add_argument("--depth", type=int, default=3, help="layers of the tower (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="its hidden size (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6000, help="in all (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="drawings a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=200, help="steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the tower's first weights (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    reader = Reader(options.model)
    words = torch.stack(list(reader.words.values()))
    eyes = Eyes(words.shape[1], options.depth, options.width, words)
    path = options.run / "last.pt"
    if path.exists():
        eyes.load_state_dict(torch.load(path, weights_only=True)["model"])
    if options.command == "train":
        train(reader, eyes, options)
    elif not path.exists() or options.out is None:
        parser.error(f"merge needs --out, and {path} of a training")
    else:
        merge(reader, eyes, options.out)


if __name__ == "__main__":
    main()
