"""Trains a small vision tower for a text checkpoint whose weights stay as they are, on drawings that it draws itself.

    python train/see.py --model model --run runs/see words       # patches land where the words' embeddings are
    python train/see.py --model model --run runs/see questions   # then the answers, through the frozen model
    python train/see.py --model model --run runs/see evaluate
    python train/see.py --model model --run runs/see merge --out OUT

The language model's weights do not change, so its answers about texts do not either. Both kinds of training go on from
what is in the run's folder, and save there every --save-every steps. `merge` writes the checkpoint as a
Qwen3_5ForConditionalGeneration with a preprocessor_config.json, for transformers and for the server.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from drawings import VOCABULARY, Asked, Drawing, draw
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms
from transformers import AutoTokenizer, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

import vision
from images import Picture, Settings
from prompt import PictureTokens, Prompter, Row
from template import DecisionFormat
from tokens import picture_mark
from tower import rope_positions
from wire import Question, Request

SHOWN = 192  # pixels a side of a drawing as the tower is shown it: 36 tokens
SETTINGS = Settings(16, 2, min_pixels=SHOWN**2, max_pixels=SHOWN**2, mean=(0.5,) * 3, std=(0.5,) * 3)
GRID, SHAPE = (SHOWN // 16, SHOWN // 16), (SHOWN // 32, SHOWN // 32)  # patches and tokens of a drawing
TOKENS = {"start": "<|vision_start|>", "pad": "<|image_pad|>", "end": "<|vision_end|>"}
HELD_OUT = 1 << 40  # drawings from this seed on are never trained on
TEMPERATURE = 0.1  # of the contrast between the words of one kind
COPIED = ("decision.json", "decision_template.jinja", "decision_template_joint.jinja", "head.safetensors")


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
        self.spec = vision.Spec.from_config(self.config.to_dict())
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
        """(B, 3, H, W) uint8, as they are shown, to (B, tokens, hidden), by the server's own forward."""
        tensors = {f"visual.{name}": parameter for name, parameter in self.tower.named_parameters()}
        weights = vision.load_weights(self.spec, tensors, torch.device("cpu"), torch.float32)
        grid = vision.make_grid(self.spec, weights, *GRID)
        patches = torch.stack([SETTINGS.patches(one) for one in pixels])
        return vision.forward(self.spec, weights, patches, grid.positions[None], grid.cos[None], grid.sin[None])


class Reader:
    """The frozen text checkpoint: prompts, their scores, and what words mean in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokenizer = AutoTokenizer.from_pretrained(folder)
        vocab = tokenizer.get_vocab()
        if not vocab.keys() >= set(TOKENS.values()):
            raise SystemExit(f"{folder}: the tokenizer must have {', '.join(TOKENS.values())}")
        ids = {name: int(vocab[token]) for name, token in TOKENS.items()}
        self.tokens = PictureTokens(ids["start"], ids["pad"], ids["end"])
        self.decision = DecisionFormat.load(folder)
        if self.decision.readout != "pointer":
            raise SystemExit(f"{folder}: readout 'pointer' is needed")
        self.prompter = Prompter(tokenizer, self.decision, max_tokens=1024, picture_tokens=self.tokens)
        self.model: Any = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.requires_grad_(False)
        self.head = load_file(folder / "head.safetensors")
        self.head = {name: tensor.float() for name, tensor in self.head.items()}
        table: Any = self.model.get_input_embeddings().weight
        self.words = {
            word: table[tokenizer(f" {word}", add_special_tokens=False)["input_ids"]].mean(0)
            for words in VOCABULARY.values()
            for word in words
        }

    def row(self, asked: Asked, picture: Picture) -> Row:
        kind, options = ("choice", asked.options) if asked.options else ("noul", ("true", "false"))
        question = Question("", kind, asked.instructions, options, (None,) * len(options))  # type: ignore[arg-type]
        request = Request(picture_mark(0), (question,), encoding="per_question")
        return self.prompter.render(request, [picture])[0]

    def scores(self, rows: list[Row], seen: Tensor) -> list[Tensor]:
        """For each row the scores of its options. seen (B, tokens, hidden), what stands for each row's picture."""
        width = max(row.num_tokens for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in zip(ids, rows, strict=True):
            place[: row.num_tokens] = torch.from_numpy(np.array(row.input_ids, dtype=np.int64))
        embeds = self.model.get_input_embeddings()(ids).clone()
        for index, row in enumerate(rows):
            start = row.pictures[0].start
            embeds[index, start : start + seen.shape[1]] = seen[index]
        positions = np.stack([rope_positions(width, row.pictures) for row in rows], axis=1)
        states = self.model.model(
            inputs_embeds=embeds, position_ids=torch.from_numpy(positions), use_cache=False
        ).last_hidden_state
        query, key = self.head["query.weight"], self.head["key.weight"]
        scores = []
        for state, row in zip(states, rows, strict=True):
            *options, end = row.reads[0].positions
            scores.append((state[options] @ key.T) @ (query @ state[end]) / len(query) ** 0.5)
        return scores


def pixels_of(drawings: list[Drawing]) -> Tensor:
    """(B, 3, SHOWN, SHOWN) uint8, resized as the server does it."""
    pixels = torch.from_numpy(np.stack([np.asarray(one.image) for one in drawings])).permute(0, 3, 1, 2)
    shown: Tensor = transforms.resize(pixels.contiguous(), [SHOWN, SHOWN], InterpolationMode.BICUBIC, antialias=True)
    return shown


def stand_in(pixels: Tensor) -> Picture:
    return Picture(pixels, b"", GRID, SHAPE)


def word_losses(reader: Reader, seen: Tensor, drawings: list[Drawing]) -> tuple[Tensor, dict[str, list[bool]]]:
    """How far the mean of a picture's embeddings is from the words that name what is in it, and which were nearest."""
    pooled, losses = seen.mean(1), []
    right: dict[str, list[bool]] = defaultdict(list)
    centre = torch.stack(list(reader.words.values())).mean(0)
    for kind, words in VOCABULARY.items():
        places = [index for index, drawing in enumerate(drawings) if kind in drawing.facts]
        if not places:
            continue
        meanings = F.normalize(torch.stack([reader.words[word] for word in words]) - centre, dim=-1)
        likeness = F.normalize(pooled[places] - centre, dim=-1) @ meanings.T / TEMPERATURE
        answers = torch.tensor([words.index(drawings[index].facts[kind]) for index in places])
        losses.append(F.cross_entropy(likeness, answers, reduction="sum"))
        right[kind] += (likeness.argmax(-1) == answers).tolist()
    # Patches must look like words, or the frozen layers have never seen anything like them
    scale = torch.stack(list(reader.words.values())).norm(dim=-1).mean()
    size = (seen.norm(dim=-1) / scale - 1).square().mean()
    return torch.stack(losses).sum() / len(drawings) + size, right


def question_losses(
    reader: Reader, seen: Tensor, drawings: list[Drawing], rng: random.Random, *, asks_all: bool = False
) -> tuple[Tensor, dict[str, list[bool]]]:
    """Cross entropy of the answers to one question a drawing, or to one about each of its facts."""
    rows, answers, names, places = [], [], [], []
    for index, drawing in enumerate(drawings):
        for kind in drawing.facts if asks_all else [rng.choice(sorted(drawing.facts))]:
            asked = drawing.ask(rng, kind)
            rows.append(reader.row(asked, stand_in(torch.zeros(3, 1, 1))))
            is_swapped = not asked.options and reader.decision.noul_options[0] == "false"
            answers.append(1 - asked.answer if is_swapped else asked.answer)
            names.append(f"{kind}, {'choice' if asked.options else 'noul'}")
            places.append(index)
    losses = []
    right: dict[str, list[bool]] = defaultdict(list)
    for scores, answer, name in zip(reader.scores(rows, seen[places]), answers, names, strict=True):
        losses.append(F.cross_entropy(scores[None], torch.tensor([answer])))
        right[name].append(bool(scores.argmax() == answer))
    return torch.stack(losses).mean(), right


def train(reader: Reader, eyes: Eyes, options: argparse.Namespace) -> None:
    """Goes on from the run's last step; drawings follow from the step's number, so a stop changes nothing."""
    path = options.run / "last.pt"
    optimizer = torch.optim.AdamW(eyes.parameters(), lr=options.lr, weight_decay=0.01)
    steps: dict[str, int] = {}
    if path.exists():
        saved = torch.load(path, weights_only=True)
        steps = saved["steps"]
        if options.command in steps:
            optimizer.load_state_dict(saved["optimizer"])
    seen_right: dict[str, list[bool]] = defaultdict(list)
    started, first = time.monotonic(), steps.get(options.command, 0)
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 100, (options.steps - step) / (0.2 * options.steps))
        seed = step * options.batch + (0 if options.command == "words" else HELD_OUT // 2)
        drawings = [draw(seed + index) for index in range(options.batch)]
        seen = eyes(pixels_of(drawings))
        if options.command == "words":
            loss, right = word_losses(reader, seen, drawings)
        else:
            loss, right = question_losses(reader, seen, drawings, random.Random(seed))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
        optimizer.step()
        eyes.fix()
        for name, found in right.items():
            seen_right[name] += found
        steps[options.command] = step + 1
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(path, {"model": eyes.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps})
            shares = {name: round(sum(found) / len(found), 3) for name, found in sorted(seen_right.items())}
            rate = (step + 1 - first) / (time.monotonic() - started)
            print(
                f"{options.command}: step={step + 1} loss={loss.item():.3f} steps_per_s={rate:.2f} {shares}", flush=True
            )
            seen_right.clear()


def save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


@torch.no_grad()
def evaluate(reader: Reader, eyes: Eyes, options: argparse.Namespace) -> None:
    """Accuracy on held-out drawings, by kind, with what guessing would get."""
    named: dict[str, list[bool]] = defaultdict(list)
    answered: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, options.count, options.batch):
        drawings = [draw(HELD_OUT + start + index) for index in range(min(options.batch, options.count - start))]
        seen = eyes(pixels_of(drawings))
        for name, found in word_losses(reader, seen, drawings)[1].items():
            named[name] += found
        for name, found in question_losses(reader, seen, drawings, random.Random(start), asks_all=True)[1].items():
            answered[name] += found
    for title, groups in (("nearest word", named), ("answers", answered)):
        for name, found in sorted(groups.items()):
            print(f"{title}: {name}: {sum(found) / len(found):.3f} of {len(found)}")


def merge(reader: Reader, eyes: Eyes, out: Path) -> None:
    """The text checkpoint with the tower in it, float16 as it is."""
    out.mkdir(parents=True, exist_ok=True)
    for path in reader.folder.iterdir():
        if path.name in COPIED or path.name.startswith("tokenizer"):
            shutil.copy(path, out)
    text = json.loads((reader.folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(reader.folder / "model.safetensors")
    whole = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    dtype = next(iter(tensors.values())).dtype
    for name, tensor in eyes.tower.state_dict().items():
        whole[f"model.visual.{name}"] = tensor.to(dtype).contiguous()
    save_file(whole, out / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": str(dtype).removeprefix("torch."),
        "image_token_id": reader.tokens.pad,
        "video_token_id": reader.tokens.pad,
        "vision_start_token_id": reader.tokens.start,
        "vision_end_token_id": reader.tokens.end,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
        "text_config": {key: value for key, value in text.items() if key not in ("architectures", "dtype")},
        "vision_config": {key: value for key, value in eyes.config.to_dict().items() if value is not None},
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
    num_bytes = sum(tensor.nbytes for name, tensor in whole.items() if name.startswith("model.visual."))
    print(f"merged into {out}; the tower has {num_bytes / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("words", "questions", "evaluate", "merge"))
    parser.add_argument("--model", type=Path, default=Path("model"), help="text checkpoint with readout 'pointer'")
    parser.add_argument("--run", type=Path, required=True, help="folder of this run")
    parser.add_argument("--out", type=Path, help="merge: folder of the new checkpoint")
    parser.add_argument("--depth", type=int, default=2, help="layers of the tower (default: %(default)s)")
    parser.add_argument("--width", type=int, default=96, help="its hidden size (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=6000, help="of this kind of training, in all (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=32, help="drawings a step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(default: %(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="evaluate: held-out drawings (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=200, help="steps (default: %(default)s)")
    parser.add_argument("--start", type=Path, help="last.pt of a run to start as, the tower's last layer aside")
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
    elif options.start is not None:
        saved = torch.load(options.start, weights_only=True)["model"]
        eyes.load_state_dict({name: saved[name] for name in saved if "merger.linear_fc2" not in name}, strict=False)
    elif options.command in ("evaluate", "merge"):
        parser.error(f"{path} is missing: train first")
    if options.command == "merge":
        if options.out is None:
            parser.error("merge needs --out")
        merge(reader, eyes, options.out)
    elif options.command == "evaluate":
        evaluate(reader, eyes, options)
    else:
        train(reader, eyes, options)


if __name__ == "__main__":
    main()
