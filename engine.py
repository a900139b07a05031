"""Owns the model: loads it, runs batches of rows through it and scores each row's options. Worker thread only."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint import Checkpoint
from config import Config
from errors import StartupError
from prompt import Readout, Row

logger = logging.getLogger(__name__)

HEAD_FILE = "head.safetensors"
DEFAULT_MAX_TOKENS = 4096  # for a configuration that names no limit
# These rescale the rotary frequencies by the longest row of the batch, so that a row's answer would depend on the others.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
HEAD_TOLERANCE = 1e-3  # of the largest logit; a head that does more than multiply is off by far more

Scores = list[list[float]]  # of one row: for each question, a score an option


@dataclass(frozen=True, slots=True)
class PointerHead:
    """Scores an option's hidden state against the question's last, as in the kev family."""

    query: torch.Tensor  # (width, hidden), float32
    key: torch.Tensor  # (width, hidden), float32

    @classmethod
    def load(cls, path: Path, hidden_size: int, device: torch.device) -> PointerHead:
        if not path.is_file():
            raise StartupError(f"{path} is missing; readout 'pointer' needs it")
        tensors = load_file(path)
        for name in ("query.weight", "key.weight"):
            if name not in tensors or tensors[name].ndim != 2 or tensors[name].shape[1] != hidden_size:
                raise StartupError(f"{path}: {name} must be a matrix with {hidden_size} columns")
        query, key = (tensors[name].to(device, torch.float32) for name in ("query.weight", "key.weight"))
        if query.shape != key.shape:
            raise StartupError(f"{path}: query.weight and key.weight must have one shape")
        return cls(query, key)

    def scores(self, options: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(N, hidden) option and end states, float32, to (N,) scores."""
        keys, queries = options @ self.key.T, ends @ self.query.T
        return (keys * queries).sum(-1) / self.query.shape[0] ** 0.5


class Engine:
    """The loaded model. Made and used by the worker thread alone."""

    def __init__(self, checkpoint: Checkpoint, config: Config, readout: Readout) -> None:
        """Raises `StartupError` for a checkpoint that cannot be served as asked."""
        started = time.monotonic()
        if config.backend == "fast":
            raise StartupError("--backend fast: this checkpoint runs on --backend transformers only")
        self.backend = "transformers"
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        torch.set_grad_enabled(False)
        self._model = load_model(checkpoint.folder, self.device, self.dtype)
        text_config = self._model.config.get_text_config()
        self.max_tokens = getattr(text_config, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
        rope = getattr(text_config, "rope_parameters", None) or {}
        self._pads = rope.get("rope_type", "default") not in LENGTH_DEPENDENT_ROPE
        self.readout = readout
        if readout == "pointer":
            self._head = PointerHead.load(checkpoint.folder / HEAD_FILE, text_config.hidden_size, self.device)
        else:
            self._label_rows = self._model.get_output_embeddings().weight
            self._check_label_rows()
        self.load_s = time.monotonic() - started

    def describe(self) -> dict[str, Any]:
        """The engine's part of `/health`."""
        return {
            "backend": self.backend,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernels": "torch",
            "threads": torch.get_num_threads(),
        }

    def forward(self, rows: list[Row]) -> list[Scores]:
        """Raw option scores in float32 arithmetic, one list a row, in row order; a score may be NaN."""
        if not self._pads and len(rows) > 1:
            return [scores for row in rows for scores in self.forward([row])]
        hidden = self._hidden_states(rows)
        flat = self._pointer_scores(rows, hidden) if self.readout == "pointer" else self._label_scores(rows, hidden)
        values = iter(flat.tolist())  # the batch's one copy from the device
        return [[[next(values) for _ in range(num_options(read, self.readout))] for read in row.reads] for row in rows]

    def _hidden_states(self, rows: list[Row]) -> torch.Tensor:
        """(B, T, hidden) after the final norm; rows are padded on the right, which a causal model never reads."""
        longest = max(row.num_tokens for row in rows)
        input_ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            input_ids[index, : row.num_tokens] = torch.frombuffer(row.input_ids, dtype=torch.int32)
            mask[index, : row.num_tokens] = 1
        inputs = {"input_ids": input_ids.to(self.device)}
        if any(row.num_tokens != longest for row in rows):
            inputs["attention_mask"] = mask.to(self.device)
        hidden: torch.Tensor = self._model.get_decoder()(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _pointer_scores(self, rows: list[Row], hidden: torch.Tensor) -> torch.Tensor:
        """(all options of all rows,)"""
        places, ends = [], []
        for index, row in enumerate(rows):
            for read in row.reads:
                *options, end = read.positions
                places += [(index, position) for position in options]
                ends += [(index, end)] * len(options)
        return self._head.scores(self._take(hidden, places), self._take(hidden, ends))

    def _label_scores(self, rows: list[Row], hidden: torch.Tensor) -> torch.Tensor:
        """(all options of all rows,): the next-token logits of the label tokens, the head's other rows left alone."""
        places, label_ids = [], []
        for index, row in enumerate(rows):
            for read in row.reads:
                places += [(index, read.positions[0])] * len(read.label_ids)
                label_ids += read.label_ids
        labels = self._label_rows[torch.tensor(label_ids, device=self.device)].float()
        return (self._take(hidden, places) * labels).sum(-1)

    def _take(self, hidden: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
        """(N, hidden), float32, at (row, position) pairs."""
        index = torch.tensor(places, device=self.device)
        return hidden[index[:, 0], index[:, 1]].float()

    def _check_label_rows(self) -> None:
        """Multiplying label rows must give the model's own logits: some architectures scale, cap or shift them."""
        probe = torch.arange(1, 9, device=self.device)[None]
        logits = self._model(input_ids=probe, use_cache=False).logits[0, -1].float()
        hidden = self._model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state[0, -1].float()
        ids = torch.arange(0, logits.shape[0], max(1, logits.shape[0] // 64), device=self.device)
        difference = (self._label_rows[ids].float() @ hidden - logits[ids]).abs().max()
        if not difference <= HEAD_TOLERANCE * logits.abs().max() * (1 if self.dtype == torch.float32 else 20):
            raise StartupError(
                "this architecture's head does more than multiply by its label rows; it is not supported"
            )


def num_options(read: Any, readout: Readout) -> int:
    return len(read.positions) - 1 if readout == "pointer" else len(read.label_ids)


def choose_device(asked: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise StartupError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """The library's own model class, from safetensors alone. Raises `StartupError` for weights that are not all there."""
    try:
        model_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as err:
        reason = next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
        raise StartupError(f"{folder} cannot be loaded: {reason[:300]}") from err
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            raise StartupError(
                f"{folder} cannot be loaded: {problem.replace('_', ' ')}: {sorted(map(str, info[problem]))[:3]}"
            )
    return model.to(device).eval()
