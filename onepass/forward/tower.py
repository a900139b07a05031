"""Owns the loaded vision tower: which pictures are encoded together, what is kept of them, and how rows show them.

`qwen3_5_vision.py` has the forward; this module puts its embeddings, and the positions of M-RoPE, among those of words.
It knows nothing of picture files and of prompts. Worker thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from images import Picture, Settings
from onepass.cache import LruCache
from onepass.checkpoint import Checkpoint, weight_files
from onepass.forward import qwen3_5_vision
from onepass.forward.batches import CostModel, Limits, plan_batches
from onepass.forward.graphs import Capturer, GraphMemory, Graphs, Work, largest_first
from onepass.forward.loader import BadWeights, UnsupportedModel
from onepass.forward.weights import SafetensorsReader
from onepass.rows import PictureTokens, PlacedPicture
from onepass.status import TowerStatus

MAX_KEPT_GRIDS = 64  # sizes of pictures whose tables are kept; of 784 patches and width 1152 they take 4 MB
TOKEN_KEYS = {"start": "vision_start_token_id", "pad": "image_token_id", "end": "vision_end_token_id"}


class Buffers(NamedTuple):
    """The tensors from which a padded pass computes: see `qwen3_5_vision.forward`."""

    patches: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    lengths: Tensor


class Tower:
    """The vision tower of a checkpoint."""

    def __init__(
        self,
        spec: qwen3_5_vision.Spec,
        weights: qwen3_5_vision.Weights,
        settings: Settings,
        tokens: PictureTokens,
        *,
        cost: CostModel,
        limits: Limits,
        cache_bytes: int,
    ) -> None:
        """`limits` counts patches and pictures; without `widths` only pictures of one size run together, unpadded."""
        self.settings, self.tokens = settings, tokens
        self._spec, self._weights = spec, weights
        self._cost, self._limits = cost, limits
        self._embeds: LruCache[bytes, Tensor] = LruCache(cache_bytes, lambda embeds: embeds.nbytes)
        self._grid = functools.lru_cache(MAX_KEPT_GRIDS)(functools.partial(qwen3_5_vision.make_grid, spec, weights))
        self.num_encoded = self.num_reused = 0
        self.graphs: Graphs[tuple[int, int], Buffers] | None = None  # by pictures and patches

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_pixels: int,
        cost: CostModel,
        limits: Limits,
        cache_bytes: int,
    ) -> Tower:
        """Raises `UnsupportedModel` for a checkpoint without a vision tower, or with one that is not known here; and
        `BadWeights`, `SafetensorError` or `StartupError` for one that is broken."""
        config, text = checkpoint.config, checkpoint.text_config
        reader = SafetensorsReader(weight_files(checkpoint.folder))
        if not isinstance(config.get("vision_config"), dict) or not qwen3_5_vision.has_weights(reader):
            raise UnsupportedModel("the checkpoint has no vision tower")
        spec = qwen3_5_vision.Spec.from_config(config["vision_config"])
        settings = Settings.load(checkpoint.folder, max_pixels)
        if settings is None:
            raise UnsupportedModel("the checkpoint has no preprocessor_config.json")
        if (settings.patch_size, settings.merge_size) != (spec.patch_size, spec.spatial_merge_size):
            raise UnsupportedModel("preprocessor_config.json and vision_config differ in patch or merge size")
        tokens = PictureTokens(**{name: _read_token(config, key, text) for name, key in TOKEN_KEYS.items()})
        if spec.out_hidden_size != text.get("hidden_size"):
            raise BadWeights("config.json: out_hidden_size of the vision tower is not the model's hidden_size")
        weights = qwen3_5_vision.load_weights(spec, reader, device, dtype)
        return cls(spec, weights, settings, tokens, cost=cost, limits=limits, cache_bytes=cache_bytes)

    def clear(self) -> None:
        """Give back the memory of the embeddings that are kept."""
        self._embeds.clear()

    def reset_counts(self) -> None:
        """Count pictures and passes from zero; what is kept stays."""
        self.num_encoded = self.num_reused = 0
        self._embeds.reset_counts()
        if self.graphs is not None:
            self.graphs.reset_counts()

    def describe(self) -> TowerStatus:
        return TowerStatus(
            image_cache_bytes=self._embeds.cost,
            images_encoded=self.num_encoded,
            images_reused=self.num_reused,
            image_graphs=self.graphs.describe() if self.graphs else None,
        )

    def inputs(
        self, ids: Tensor, starts: Tensor, pictures: Sequence[tuple[PlacedPicture, ...]], table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the text model is given for rows that show pictures: embeddings (B, T, hidden), positions (3, B, T).

        ids (B, T). starts (B,): the position of each row's first token. pictures: those of each row, with places
        counted from that token. table: the embeddings of words."""
        batch, length = ids.shape
        placed = [(row * length + one.start, one.picture) for row, of_row in enumerate(pictures) for one in of_row]
        self.encode([picture for _, picture in placed])
        places = np.concatenate([np.arange(first, first + picture.num_tokens) for first, picture in placed])
        values = torch.cat([picture.embeds for _, picture in placed if picture.embeds is not None])
        embeds = F.embedding(ids, table).to(self._weights.dtype)
        embeds.view(batch * length, -1).index_copy_(0, torch.from_numpy(places).to(ids.device), values)
        positions = np.stack([rope_positions(length, of_row) for of_row in pictures], axis=1)
        return embeds, torch.from_numpy(positions).to(ids.device) + starts[:, None]

    def encode(self, pictures: Iterable[Picture]) -> None:
        """Give each picture its embeddings, unless it has them: those that are kept, or new ones from the tower."""
        missing: dict[bytes, list[Picture]] = {}
        for picture in pictures:
            picture.embeds = picture.embeds if picture.embeds is not None else self._embeds.get(picture.digest)
            if picture.embeds is None:
                missing.setdefault(picture.digest, []).append(picture)
            else:
                self.num_reused += 1
        todo = [same[0] for same in missing.values()]
        sizes = [picture.num_patches for picture in todo]
        grids: list[Hashable | None] | None = None if self._limits.widths else [picture.grid for picture in todo]
        for batch in plan_batches(sizes, self._cost, self._limits, grids):
            chosen = [todo[index] for index in batch.rows]
            made = self._run(chosen, batch.num_rows, batch.width)[: len(chosen)]
            for picture, embeds in zip(chosen, made, strict=True):
                kept = embeds[: picture.num_tokens].clone()  # not a view of the whole batch
                self._embeds.put(picture.digest, kept)
                for same in missing[picture.digest]:
                    same.embeds = kept
            self.num_encoded += len(chosen)

    def _run(self, pictures: list[Picture], num_rows: int, width: int) -> Tensor:
        """Embeddings (num_rows, width / merged, hidden), which hold until the next call. The pictures' own come first,
        the rest is padding."""
        device = self._weights.patch.weight.device
        patches = [self.settings.patches(picture.pixels.to(device)) for picture in pictures]
        grids = [self._grid(*picture.grid) for picture in pictures]
        is_full = num_rows == len(pictures) and width == len(patches[0])
        if self.graphs is None and is_full and all(grid is grids[0] for grid in grids):  # one table, nothing to mask
            tables = (grids[0].positions[None], grids[0].cos[None], grids[0].sin[None])
            return qwen3_5_vision.forward(self._spec, self._weights, torch.stack(patches), *tables)
        graph = self.graphs.find((num_rows, width)) if self.graphs is not None else None
        buffers = graph.buffers if graph is not None else self._buffers((num_rows, width))
        parts = (patches, *zip(*((grid.positions, grid.cos, grid.sin) for grid in grids), strict=True))
        for whole, of_pictures in zip(buffers[:-1], parts, strict=True):
            for row, part in enumerate(of_pictures):
                whole[row, : len(part)] = part
        lengths = [len(one) for one in patches] + [width] * (num_rows - len(patches))
        buffers[-1].copy_(torch.tensor(lengths))
        return graph.replay()[0] if graph is not None else self._forward(buffers)

    def _forward(self, buffers: Buffers) -> Tensor:
        return qwen3_5_vision.forward(self._spec, self._weights, *buffers)

    def _buffers(self, shape: tuple[int, int]) -> Buffers:
        """The buffers of a padded pass over (pictures, patches). All they hold is finite."""
        spec, weights = self._spec, self._weights
        device = weights.positions.device
        return Buffers(
            patches=torch.zeros(*shape, weights.patch.weight.shape[1], device=device),
            positions=torch.zeros(*shape, spec.hidden_size, dtype=weights.dtype, device=device),
            cos=torch.zeros(*shape, spec.head_dim // 2, dtype=weights.positions.dtype, device=device),
            sin=torch.zeros(*shape, spec.head_dim // 2, dtype=weights.positions.dtype, device=device),
            lengths=torch.full(shape[:1], shape[1], device=device),
        )

    def use_graphs(self, capturer: Capturer, tolerance: float, memory: GraphMemory) -> None:
        """Queue a pass of each bucket for capture; `graphs.capture_next` captures one."""
        limits = self._limits
        shapes = [(rows, width) for rows in limits.heights for width in limits.widths if limits.allow(rows, width)]
        self.graphs = Graphs(capturer, self._work, tolerance, memory)
        self.graphs.waiting = largest_first(shapes, lambda shape: shape[0] * shape[1])

    def _work(self, shape: tuple[int, int]) -> Work[Buffers]:
        buffers = self._buffers(shape)
        count = torch.arange(buffers.patches.numel(), device=buffers.patches.device)
        buffers.patches.copy_((count % 251 / 125 - 1).view_as(buffers.patches))  # something that is not all alike
        return Work(buffers, lambda: (self._forward(buffers),))


def _read_token(config: Mapping[str, Any], key: str, text_config: Mapping[str, Any]) -> int:
    """The token id that config.json gives under `key`. Raises `BadWeights`."""
    token, size = config.get(key), text_config.get("vocab_size")
    if type(token) is not int or type(size) is not int or not 0 <= token < size:
        raise BadWeights(f"config.json: {key} must be a token of the vocabulary, not {token!r}")
    return token


def rope_positions(num_tokens: int, pictures: Iterable[PlacedPicture]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(3, num_tokens): time, height and width of each token, as M-RoPE counts them.

    A token of text adds one to all three. Inside a picture time stands still, and height and width count its rows and
    columns; what follows a picture goes on after the longer of its sides.
    """
    steps = np.ones(num_tokens, dtype=np.int64)
    inside = np.zeros((2, num_tokens), dtype=np.int64)
    for placed in pictures:
        rows, columns = placed.picture.shape
        end = placed.start + rows * columns
        steps[placed.start + 1 : end] = 0
        steps[end : end + 1] = placed.picture.span
        inside[:, placed.start : end] = np.divmod(np.arange(rows * columns), columns)
    time = np.cumsum(steps) - 1
    return np.stack((time, time + inside[0], time + inside[1]))
