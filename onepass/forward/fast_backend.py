"""Our own forward as a body: whole rows, beginnings of rows, and rows that continue one; on CUDA by captured graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from onepass.checkpoint import weight_files
from onepass.errors import StartupError
from onepass.forward import qwen3_5
from onepass.forward.graphs import Capturer, Graph, Graphs, Outputs, Work, largest_first
from onepass.forward.heads import Head, LabelHead, PointerHead
from onepass.forward.inputs import (
    DEFAULT_MAX_TOKENS,
    Inputs,
    Sizes,
    count_reads,
    count_scores,
    empty_inputs,
    make_inputs,
)
from onepass.forward.plan import first_fit
from onepass.forward.prefix import Prefix, PrefixBuffers, stack
from onepass.forward.tower import Tower
from onepass.forward.weights import SafetensorsReader
from onepass.rows import PlacedPicture, PrefixTokens, Readout, Row, pictures_from

GRAPH_TOLERANCE = 2e-2  # of the largest output; kernels may add up in another order under capture, in bfloat16
PROBE_ID_STEP = 7  # token ids of the self-check, spread over the vocabulary


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that graphs exist for. A pass is padded to the first that fits. Empty: nothing is padded."""

    rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()  # tokens of a whole row, or of a beginning
    suffix_widths: tuple[int, ...] = ()  # tokens of a row after its beginning
    pasts: tuple[int, ...] = ()  # tokens of the beginning
    reads: int = 0  # states read of a row, and
    scores: int = 0  # scores of a row; a pass with more runs without a graph


CUDA_BUCKETS = Buckets(
    rows=(1, 2, 4, 8, 16, 32),
    widths=(64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    suffix_widths=(32, 64, 128, 256),
    pasts=(256, 512, 1024, 2048, 4096),
    reads=32,
    scores=32,
)
# The same for the vision tower: pictures in a pass, and their patches. 256 are a picture of 256 x 256 pixels, 784 the
# default of --max-pixels. Without graphs pictures of one size run together, unpadded.
PICTURE_BUCKETS = Buckets(rows=(1, 2, 4, 8), widths=(256, 400, 576, 784, 1024, 1600, 2304, 4096))
MAX_PATCHES = 8192  # of one pass of the tower
COMMON_ROWS, COMMON_WIDTH, COMMON_PAST = 8, 512, 512  # what `--fast-start` waits for
MAX_PAST_TOKENS = 1 << 16  # before the rows of one pass: keys and values are laid out for each of them


Pictures = Sequence[tuple[PlacedPicture, ...]]  # of each row, counted from the first token that is computed


class Shape(NamedTuple):
    kind: str  # "whole", "begin" or "continue"
    rows: int
    width: int
    past: int = 0

    @property
    def num_tokens(self) -> int:
        return self.rows * (self.width + self.past)

    @property
    def is_common(self) -> bool:
        return self.rows <= COMMON_ROWS and self.width <= COMMON_WIDTH and self.past <= COMMON_PAST


def graph_shapes(buckets: Buckets, max_tokens: int, max_rows: int, longest: int) -> list[Shape]:
    """Every shape that batches of at most so many tokens and rows are padded to. longest: tokens a row may have."""
    widths = [width for width in buckets.widths if width <= longest]
    heights = [rows for rows in buckets.rows if rows <= max_rows]
    shapes = []
    for rows in heights:
        wide = [width for width in widths if rows == 1 or rows * width <= max_tokens]
        shapes += [Shape(kind, rows, width) for kind in ("whole", "begin") for width in wide]
        shapes += [
            Shape("continue", rows, width, past)
            for width in buckets.suffix_widths
            for past in buckets.pasts
            if past <= longest
            and (rows == 1 or rows * width <= max_tokens)
            and (rows == 1 or rows * past <= MAX_PAST_TOKENS)
        ]
    return shapes


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a captured pass reads."""

    inputs: Inputs
    lengths: Tensor  # (B,) long, tokens of each row that are not padding; a beginning needs them
    past: Prefix | None


class FastBackend:
    """Worker thread only."""

    backend = "fast"
    can_share = True

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, readout: Readout, *, pack: bool = False
    ) -> None:
        """Raises `qwen3_5.UnsupportedModel` for a configuration it does not cover, `StartupError` for bad weights."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._spec = qwen3_5.Spec.from_config(config)
        try:
            with tqdm(unit="B", unit_scale=True, desc="loading", leave=False, disable=None) as bar:
                reader = SafetensorsReader(weight_files(folder), bar.update)
                bar.total = reader.num_bytes
                self._weights = qwen3_5.load_weights(self._spec, reader, device, dtype, pack=pack)
        except (qwen3_5.BadWeights, SafetensorError) as err:
            raise StartupError(f"{folder} cannot be loaded: {err}") from None
        self._device = device
        self.hidden_size = self._spec.hidden_size
        self.max_tokens = config.get("text_config", config).get("max_position_embeddings", DEFAULT_MAX_TOKENS)
        self._head: Head = LabelHead(self._weights.head)
        if readout == "pointer":
            self._head = PointerHead.load(folder, self.hidden_size, device)
        self.buckets = Buckets()
        self.graphs: Graphs[Shape, Buffers] | None = None
        self.tower: Tower | None = None

    def begin(self, beginnings: Sequence[PrefixTokens], past: Prefix | None = None) -> list[Prefix]:
        """What these tokens leave behind: a prefix of one row each. past, of one row of text, comes before them."""
        rows = [torch.frombuffer(bytearray(beginning.ids), dtype=torch.int32) for beginning in beginnings]
        pictures = [beginning.pictures for beginning in beginnings]
        lengths = [len(row) for row in rows]
        graph = None
        if self.graphs is not None and past is None and not any(pictures):
            shape = Shape(
                "begin", first_fit(self.buckets.rows, len(rows)), first_fit(self.buckets.widths, max(lengths))
            )
            graph = self.graphs.find(shape)
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for place, row in zip(ids, rows, strict=True):
            place[: len(row)] = row
        if graph is not None:
            buffers = graph.buffers
            buffers.inputs.ids[: len(rows), : ids.shape[1]].copy_(ids, non_blocking=True)
            buffers.lengths[: len(rows)].copy_(torch.tensor(lengths), non_blocking=True)
            made = unflatten(graph.replay())
        else:
            on_device = torch.tensor(lengths, device=self._device)
            made = self._begin(ids.to(self._device), on_device, past, pictures)
        before = 0 if past is None else past.num_tokens
        if len(rows) == 1 and graph is None:
            return [made]
        return [made.row(index, before + length) for index, length in enumerate(lengths)]

    def scores(self, rows: Sequence[Row], prefixes: Sequence[Prefix] | None = None) -> Tensor:
        """(at least len(rows), at least the most scores of a row): option scores, valid until the next call.

        prefixes: what comes before each row, one row each; the row's first tokens are in it."""
        starts = [prefix.num_tokens for prefix in prefixes] if prefixes else [0] * len(rows)
        pictures = [pictures_from(row.pictures, start) for row, start in zip(rows, starts, strict=True)]
        graph = None if any(pictures) else self._graph_for(rows, starts)
        if graph is not None:
            inputs = make_inputs(rows, starts, graph.buffers.inputs.sizes)
            for buffer, tensor in zip(graph.buffers.inputs.tensors(), inputs.tensors(), strict=True):
                buffer.copy_(tensor, non_blocking=True)
            if prefixes and graph.buffers.past is not None:
                graph.buffers.past.write(prefixes)
            return graph.replay()[0]
        past = None
        if prefixes:
            is_one = all(prefix is prefixes[0] for prefix in prefixes)
            past = prefixes[0] if is_one else stack(prefixes)
        return self._score(make_inputs(rows, starts).map(lambda tensor: tensor.to(self._device)), past, pictures)

    def scores_and_beginnings(self, rows: Sequence[Row], past: Prefix | None = None) -> tuple[Tensor, list[Prefix]]:
        """The option scores of rows as in `scores`, and what their shared tokens leave behind, in one pass. past, of
        one row of text, comes before them all."""
        start = 0 if past is None else past.num_tokens
        inputs = make_inputs(rows, [start] * len(rows)).map(lambda tensor: tensor.to(self._device))
        tokens = self._tokens(inputs.ids, inputs.starts, [pictures_from(row.pictures, start) for row in rows])
        lengths = [row.num_shared - start for row in rows]
        keep = lengths if len(rows) > 1 else lengths[0]
        hidden, prefix = qwen3_5.forward(self._spec, self._weights, **tokens, read=inputs.reads, prefix=past, keep=keep)
        assert prefix is not None
        made = [prefix.row(index, row.num_shared) for index, row in enumerate(rows)] if len(rows) > 1 else [prefix]
        return self._head.scores(hidden, inputs.score_reads, inputs.score_others), made

    def _graph_for(self, rows: Sequence[Row], starts: Sequence[int]) -> Graph[Buffers] | None:
        if self.graphs is None:
            return None
        width = max(row.num_tokens - start for row, start in zip(rows, starts, strict=True))
        num_rows, past = first_fit(self.buckets.rows, len(rows)), max(starts)
        if max(map(count_reads, rows)) > self.buckets.reads or max(map(count_scores, rows)) > self.buckets.scores:
            self.graphs.num_plain += 1
            return None
        if past:
            past = first_fit(self.buckets.pasts, past)
            return self.graphs.find(Shape("continue", num_rows, first_fit(self.buckets.suffix_widths, width), past))
        return self.graphs.find(Shape("whole", num_rows, first_fit(self.buckets.widths, width)))

    def _score(self, inputs: Inputs, past: Prefix | None, pictures: Pictures = ()) -> Tensor:
        tokens = self._tokens(inputs.ids, inputs.starts, pictures)
        hidden, _ = qwen3_5.forward(self._spec, self._weights, **tokens, read=inputs.reads, prefix=past)
        return self._head.scores(hidden, inputs.score_reads, inputs.score_others)

    def _begin(self, ids: Tensor, lengths: Tensor, past: Prefix | None, pictures: Pictures = ()) -> Prefix:
        starts = torch.full(ids.shape[:1], 0 if past is None else past.num_tokens, device=ids.device)
        tokens = self._tokens(ids, starts, pictures)
        mind = lengths if len(ids) > 1 or self.graphs is not None else None
        _, prefix = qwen3_5.forward(self._spec, self._weights, **tokens, lengths=mind, prefix=past, keep=ids.shape[1])
        assert prefix is not None
        return prefix

    def _tokens(self, ids: Tensor, starts: Tensor, pictures: Pictures) -> dict[str, Any]:
        """What the forward is given: ids, or embeddings where a row shows a picture, and positions from `starts` on."""
        if any(pictures):
            assert self.tower is not None
            embeds, positions = self.tower.inputs(ids, starts, pictures, self._weights.embed)
            return {"embeds": embeds, "positions": positions}
        return {"input_ids": ids, "positions": starts.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)}

    def use_graphs(self, backend: Capturer, buckets: Buckets, shapes: Sequence[Shape], max_bytes: int) -> None:
        """Have passes of these shapes captured, the common ones first; `graphs.capture_next` captures one."""
        self.buckets = buckets
        one = torch.ones(1, 1, dtype=torch.long, device=self._device)
        self.graphs = Graphs(backend, self._work, GRAPH_TOLERANCE, max_bytes)
        pasts = [(shape.rows, shape.past) for shape in shapes if shape.past]
        self._room = PrefixBuffers(self._begin(one, one[0], None), pasts)
        common = [shape for shape in shapes if shape.is_common]
        rest = [shape for shape in shapes if not shape.is_common]
        self.graphs.waiting = [
            shape for part in (common, rest) for shape in largest_first(part, lambda one: one.num_tokens)
        ]

    def _work(self, shape: Shape) -> Work[Buffers]:
        """A shape's pass over buffers of its own, filled with something to check it on. Those of past rows are the
        largest and shared by all shapes."""
        sizes: Sizes = (shape.rows, shape.width, self.buckets.reads, self.buckets.scores)
        inputs = empty_inputs(sizes).map(lambda tensor: tensor.to(self._device))
        count = torch.arange(shape.rows * shape.width, device=self._device)
        inputs.ids.copy_((count * PROBE_ID_STEP % self._spec.vocab_size).view(shape.rows, shape.width))
        inputs.reads.copy_(
            (torch.arange(self.buckets.reads, device=self._device) % shape.width).expand_as(inputs.reads)
        )
        inputs.score_reads.copy_(
            torch.arange(self.buckets.scores, device=self._device).expand_as(inputs.score_reads) % self.buckets.reads
        )
        inputs.starts.fill_(shape.past)
        lengths = torch.full((shape.rows,), shape.width, device=self._device)
        past = self._room.view(shape.rows, shape.past) if shape.past else None
        buffers = Buffers(inputs, lengths, past)
        if shape.kind == "begin":
            return Work(buffers, lambda: flatten(self._begin(inputs.ids, lengths, None)))
        return Work(buffers, lambda: (self._score(inputs, past),))


def flatten(prefix: Prefix) -> Outputs:
    return (prefix.valid, *(tensor for state in prefix.layers for tensor in state))


def unflatten(tensors: Outputs) -> Prefix:
    valid, *layers = tensors
    return Prefix(tuple(zip(layers[::2], layers[1::2], strict=True)), valid)
