"""Owns the model: loads it, runs batches of rows through it and scores each row's options. Worker thread only.

Two bodies give hidden states: our own forward (`qwen3_5.py`), and the Hugging Face library's model class for every
other architecture. The score heads over them are the same, in float32, on the rows that are read alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

import qwen3_5
from checkpoint import Checkpoint, weight_files
from config import Config
from errors import StartupError
from plan import CostModel, Limits, plan_batches
from prompt import Row
from state_cache import StateCache
from template import Readout
from tower import Tower

logger = logging.getLogger(__name__)

HEAD_FILE = "head.safetensors"
DEFAULT_MAX_TOKENS = 4096  # for a configuration that names no limit
# These rescale the rotary frequencies by the batch's longest row: a row's answer would depend on the others.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# What starting a forward pass costs, in tokens: less padding than this is cheaper than another pass. Not measured at
# the start, so that the same rows are cut the same way tomorrow.
LAUNCH_TOKENS = {"cpu": 64, "cuda": 2048}
# Below it a second thread costs more than it brings: 300 tokens of the starter (256) take 37 ms with one, 44 with two
MIN_HIDDEN_FOR_THREADS = 512
HEAD_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}  # of the largest logit

# Pictures in one pass of the vision tower, and the patches that each is padded to where there are graphs: 256 are a
# picture of 256 x 256 pixels, 784 the default of --max-pixels. On a CPU only pictures of one size run together.
PICTURES = (1, 2, 4, 8)
PATCHES = (256, 400, 576, 784, 1024, 1600, 2304, 4096)
MAX_PATCHES = 8192
LAUNCH_PATCHES = {"cpu": 64, "cuda": 1024}  # what starting a pass costs, in patches
MAX_SHARED_TOKENS = 1 << 17  # keys and values of rows that continue one prefix are laid out for each of them

Scores = list[list[float]]  # of one row: for each question, a score an option


class Body(Protocol):
    """Token ids to hidden states."""

    backend: str
    hidden_size: int
    max_tokens: int

    can_share: bool  # `begin` is there
    tower: Tower | None
    no_images_reason: str  # why there is no tower

    def begin(self, row: Row) -> qwen3_5.Prefix:
        """What the row's `num_shared` first tokens leave behind for rows that begin with them."""
        ...

    def read(self, rows: list[Row], prefix: qwen3_5.Prefix | None = None, num_shared: int = 0) -> Tensor:
        """(N, hidden): the states at all positions that the rows' questions read, in their order.

        With `prefix` the rows' first `num_shared` tokens are computed already.
        """
        ...

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        """(N,): the next-token logit of ids[i] after states[i], float32; states (N, hidden) float32, ids (N,)."""
        ...


class Engine:
    """The loaded model. Made and used by the worker thread alone."""

    def __init__(self, checkpoint: Checkpoint, config: Config, readout: Readout) -> None:
        """Raises `StartupError` for a checkpoint that cannot be served as asked."""
        torch.set_grad_enabled(False)
        self.device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, self.device)
        self._body = load_body(checkpoint.folder, config, self.device, self.dtype)
        self.max_tokens = self._body.max_tokens
        if self.device.type == "cpu" and self._body.hidden_size < MIN_HIDDEN_FOR_THREADS:
            torch.set_num_threads(1)
        self._cost = CostModel(launch_s=LAUNCH_TOKENS[self.device.type], token_s=1)  # in tokens: only ratios matter
        self._limits = Limits(max_tokens=config.max_batch_tokens, max_rows=config.max_batch_rows)
        self._shares = config.share_state and self._body.can_share
        self._states: StateCache[qwen3_5.Prefix] = StateCache(config.state_cache_mb << 20)
        self.tokens_computed = self.tokens_reused = 0
        self._pointer = None
        if readout == "pointer":
            self._pointer = PointerHead.load(checkpoint.folder / HEAD_FILE, self._body.hidden_size, self.device)

    def describe(self) -> dict[str, Any]:
        """The engine's part of `/health`."""
        tower = self._body.tower.describe() if self._body.tower else {}
        return {
            "backend": self._body.backend,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernels": "torch" if self.device.type == "cpu" else "flash-linear-attention",
            "threads": torch.get_num_threads(),
            "shares_state": self._shares,
            "state_cache_bytes": self._states.num_bytes,
            "tokens_computed": self.tokens_computed,
            "tokens_reused": self.tokens_reused,
            **tower,
        }

    @property
    def tower(self) -> Tower | None:
        return self._body.tower

    @property
    def no_images_reason(self) -> str:
        return self._body.no_images_reason

    def forward(self, rows: list[Row]) -> list[Scores]:
        """Raw option scores in float32 arithmetic, one list a row, in row order; a score may be NaN."""
        scores: list[Scores] = [[] for _ in rows]
        shared = [self._shared_ids(row) for row in rows]
        lengths = [row.num_tokens - (row.num_shared if ids else 0) for row, ids in zip(rows, shared, strict=True)]
        for batch in plan_batches(lengths, self._cost, self._limits, shared):
            most = (
                len(batch.rows) if batch.prefix is None else max(1, MAX_SHARED_TOKENS // rows[batch.rows[0]].num_tokens)
            )
            for start in range(0, len(batch.rows), most):
                part = batch.rows[start : start + most]
                for index, row_scores in zip(part, self._score([rows[i] for i in part], shared[part[0]]), strict=True):
                    scores[index] = row_scores
        return scores

    def _shared_ids(self, row: Row) -> bytes | None:
        """The beginning that is computed apart: for any row whose state is long enough, whatever else is asked of it,
        so that its answers are the same however often they are asked for and with what."""
        if not self._shares or row.num_shared < LAUNCH_TOKENS[self.device.type]:
            return None
        return row.shared_key()

    def _begin(self, row: Row, key: bytes) -> qwen3_5.Prefix:
        prefix = self._states.get(key)
        if prefix is None:
            prefix = self._body.begin(row)
            self._states.put(key, prefix)
            self.tokens_computed += row.num_shared
        else:
            self.tokens_reused += row.num_shared
        return prefix

    def _score(self, rows: list[Row], shared: bytes | None) -> list[Scores]:
        """The same for rows that run together, padded to the longest, and begin with the tokens `shared`."""
        if shared is None:
            states = self._body.read(rows)
        else:
            states = self._body.read(rows, self._begin(rows[0], shared), rows[0].num_shared)
            self.tokens_reused += (len(rows) - 1) * rows[0].num_shared
        num_shared = 0 if shared is None else rows[0].num_shared
        self.tokens_computed += sum(row.num_tokens - num_shared for row in rows)
        states = states.float()
        flat = self._label_scores(rows, states) if self._pointer is None else self._pointer_scores(rows, states)
        values = iter(flat.tolist())  # the batch's one copy from the device
        return [[[next(values) for _ in range(num_options)] for num_options in option_counts(row)] for row in rows]

    def _pointer_scores(self, rows: list[Row], states: Tensor) -> Tensor:
        """(options of all questions of all rows,)"""
        assert self._pointer is not None
        options: list[int] = []
        ends: list[int] = []
        place = 0
        for row in rows:
            for num_options in option_counts(row):
                options += range(place, place + num_options)
                ends += [place + num_options] * num_options
                place += num_options + 1
        return self._pointer.scores(states[options], states[ends])

    def _label_scores(self, rows: list[Row], states: Tensor) -> Tensor:
        """(options of all questions of all rows,): the next-token logits of the label tokens and of no others."""
        reads = [read for row in rows for read in row.reads]
        places = [place for place, read in enumerate(reads) for _ in read.label_ids]
        label_ids = [label_id for read in reads for label_id in read.label_ids]
        return self._body.logits(states[places], torch.tensor(label_ids, device=self.device))


def option_counts(row: Row) -> Iterable[int]:
    """How many options each question of the row has."""
    return (len(read.label_ids) or len(read.positions) - 1 for read in row.reads)


@dataclass(frozen=True, slots=True)
class PointerHead:
    """Scores an option's hidden state against the question's last, as in the kev family."""

    query: Tensor  # (width, hidden), float32
    key: Tensor  # (width, hidden), float32

    @classmethod
    def load(cls, path: Path, hidden_size: int, device: torch.device) -> PointerHead:
        if not path.is_file():
            raise StartupError(f"{path} is missing; readout 'pointer' needs it")
        try:
            tensors = load_file(path)
        except SafetensorError as err:
            raise StartupError(f"{path} cannot be read: {err}") from None
        for name in ("query.weight", "key.weight"):
            if name not in tensors or tensors[name].ndim != 2 or tensors[name].shape[1] != hidden_size:
                raise StartupError(f"{path}: {name} must be a matrix with {hidden_size} columns")
        query, key = (tensors[name].to(device, torch.float32, copy=True) for name in ("query.weight", "key.weight"))
        if query.shape != key.shape:
            raise StartupError(f"{path}: query.weight and key.weight must have one shape")
        return cls(query, key)

    def scores(self, options: Tensor, ends: Tensor) -> Tensor:
        """(N, hidden) option and end states, float32, to (N,) scores."""
        return ((options @ self.key.T) * (ends @ self.query.T)).sum(-1).div(len(self.query) ** 0.5)


def pad(rows: list[Row], device: torch.device, start: int = 0, end: int | None = None) -> Tensor:
    """(B, T) ids from `start` on, up to `end`, padded on the right with zeros, which a causal model never reads."""
    parts = [torch.frombuffer(row.input_ids, dtype=torch.int32)[start:end] for row in rows]
    input_ids = torch.zeros((len(rows), max(map(len, parts))), dtype=torch.long)
    for index, ids in enumerate(parts):
        input_ids[index, : len(ids)] = ids
    return input_ids.to(device)


def read_places(rows: list[Row], start: int = 0) -> list[list[int]]:
    """For each row the positions that its questions read, in order, counted from `start`."""
    return [[place - start for read in row.reads for place in read.positions] for row in rows]


def dot_rows(states: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    """(N,): states[i] . head[ids[i]] by a product and a sum, which no setting of matrix products' precision touches."""
    return (states * head[ids].float()).sum(-1)


class FastBody:
    """Our own forward."""

    backend = "fast"
    can_share = True

    def __init__(self, folder: Path, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        """Raises `qwen3_5.UnsupportedModel` for a configuration it does not cover, `StartupError` for bad weights."""
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._spec = qwen3_5.Spec.from_config(document)
        self._device = device
        self.hidden_size = self._spec.hidden_size
        self.max_tokens = document.get("text_config", document).get("max_position_embeddings", DEFAULT_MAX_TOKENS)
        self.tower, self.no_images_reason = None, "the server was started with --no-images"
        try:
            reader = SafetensorsReader(weight_files(folder))
            self._weights = qwen3_5.load_weights(self._spec, reader, device, dtype)
            if config.images:
                self._load_tower(folder, document, reader, config)
        except (qwen3_5.BadWeights, SafetensorError) as err:
            raise StartupError(f"{folder} cannot be loaded: {err}") from None

    def _load_tower(self, folder: Path, document: dict[str, Any], reader: SafetensorsReader, config: Config) -> None:
        has_graphs = self._device.type == "cuda"
        try:
            self.tower = Tower.load(
                folder,
                document,
                reader,
                self._device,
                self._weights.dtype,
                max_pixels=config.max_pixels,
                cost=CostModel(launch_s=LAUNCH_PATCHES[self._device.type], token_s=1),
                limits=Limits(
                    MAX_PATCHES,
                    PICTURES[-1],
                    widths=PATCHES if has_graphs else (),
                    heights=PICTURES if has_graphs else (),
                ),
                cache_bytes=config.image_cache_mb << 20,
            )
            self.no_images_reason = ""
        except qwen3_5.UnsupportedModel as err:
            self.no_images_reason = str(err)

    def begin(self, row: Row) -> qwen3_5.Prefix:
        inputs = self._inputs([row], 0, row.num_shared)
        _, prefix = qwen3_5.forward(self._spec, self._weights, **inputs, want_prefix=True)
        assert prefix is not None
        return prefix

    def read(self, rows: list[Row], prefix: qwen3_5.Prefix | None = None, num_shared: int = 0) -> Tensor:
        places = read_places(rows, num_shared)
        widest = max(map(len, places))
        read = torch.tensor([row + row[:1] * (widest - len(row)) for row in places], device=self._device)
        inputs = self._inputs(rows, num_shared, None)
        hidden, _ = qwen3_5.forward(self._spec, self._weights, **inputs, read=read, prefix=prefix)
        return torch.cat([states[: len(row)] for states, row in zip(hidden, places, strict=True)])

    def _inputs(self, rows: list[Row], start: int, end: int | None) -> dict[str, Tensor]:
        """Tokens or embeddings, and positions, of the rows from `start` to `end`."""
        input_ids = pad(rows, self._device, start, end)
        if self.tower is not None and any(row.pictures for row in rows):
            embeds, places = self.tower.inputs(rows, input_ids, start, self._weights.embed)
            return {"embeds": embeds, "positions": places}
        positions = torch.arange(start, start + input_ids.shape[1], device=self._device).expand(input_ids.shape)
        return {"input_ids": input_ids, "positions": positions}

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        return dot_rows(states, self._weights.head, ids)


class SafetensorsReader:
    """Tensors by name over several files, each read from disk when asked for."""

    def __init__(self, paths: list[Path]) -> None:
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping

    def keys(self) -> Iterable[str]:
        return self._file_of.keys()

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor.clone()  # not a view of the file: what was verified must not change with it


class LibraryBody:
    """The Hugging Face library's own model class."""

    backend = "transformers"
    tower = None
    no_images_reason = "--backend transformers reads text only"
    can_share = False  # a cache of the library's is changed by who continues it

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises `StartupError`."""
        self._device = device
        self._model = load_library_model(folder, device, dtype)
        config = self._model.config.get_text_config()
        self.hidden_size = config.hidden_size
        self.max_tokens = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_TOKENS
        rope = getattr(config, "rope_parameters", None) or {}
        self._pads = rope.get("rope_type", "default") not in LENGTH_DEPENDENT_ROPE
        self._head = self._model.get_output_embeddings()
        self._scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._check_head()

    def begin(self, row: Row) -> qwen3_5.Prefix:
        raise NotImplementedError

    def read(self, rows: list[Row], prefix: qwen3_5.Prefix | None = None, num_shared: int = 0) -> Tensor:
        if not self._pads and len(rows) > 1:
            return torch.cat([self.read([row]) for row in rows])
        input_ids = pad(rows, self._device)
        inputs = {"input_ids": input_ids}
        lengths = torch.tensor([row.num_tokens for row in rows], device=self._device)
        if any(row.num_tokens != input_ids.shape[1] for row in rows):
            inputs["attention_mask"] = (torch.arange(input_ids.shape[1], device=self._device) < lengths[:, None]).long()
        hidden = self._model.get_decoder()(**inputs, use_cache=False).last_hidden_state
        return torch.cat([states[row] for states, row in zip(hidden, read_places(rows), strict=True)])

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        """What architectures do to their logits: a bias (Phi), a scale (Cohere, Granite), a cap (Gemma)."""
        logits = dot_rows(states, self._head.weight, ids)
        if getattr(self._head, "bias", None) is not None:
            logits = logits + self._head.bias[ids].float()
        logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def _check_head(self) -> None:
        """Label rows must give the model's own logits, or its answers would not be its own."""
        probe = torch.arange(1, 9, device=self._device)[None]
        logits = self._model(input_ids=probe, use_cache=False).logits[0, -1].float()
        hidden = self._model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state[0, -1].float()
        ids = torch.arange(0, logits.shape[0], max(1, logits.shape[0] // 64), device=self._device)
        difference = (self.logits(hidden.expand(len(ids), -1), ids) - logits[ids]).abs().max()
        if not difference <= HEAD_TOLERANCE[self._head.weight.dtype] * logits.abs().max():
            raise StartupError("what this architecture does to its logits is not known; it cannot be served")


def load_body(folder: Path, config: Config, device: torch.device, dtype: torch.dtype) -> Body:
    """`auto` takes our forward where it covers the configuration. Raises `StartupError`."""
    if config.backend != "transformers":
        try:
            return FastBody(folder, config, device, dtype)
        except qwen3_5.UnsupportedModel as err:
            if config.backend == "fast":
                raise StartupError(f"--backend fast does not cover this checkpoint ({err}); use transformers") from None
            logger.info("backend: transformers, since the fast one does not cover this checkpoint: %s", err)
    return LibraryBody(folder, device, dtype)


def load_library_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """From safetensors alone, running no code of the checkpoint's. Raises `StartupError` for weights not all there."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM.from_pretrained  # its annotations know nothing of `output_loading_info`
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    try:
        model, info = loader(folder, dtype=dtype, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as err:
        reason = next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)
        raise StartupError(f"{folder} cannot be loaded: {reason[:300]}") from err
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            names = sorted(map(str, info[problem]))[:3]
            raise StartupError(f"{folder} cannot be loaded: {problem.replace('_', ' ')}: {names}")
    for parameter in model.parameters():  # not views of the file: what was verified must not change with it
        parameter.data = parameter.data.clone()
    return model.to(device).eval()


def choose_device(asked: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise StartupError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[asked]
    return torch.float32 if device.type == "cpu" else torch.bfloat16
