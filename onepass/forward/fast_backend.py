"""Our own forward as a backend: plain passes of any shape, and on CUDA captured graphs.

It owns the weights, the score head and the graphs. It knows nothing of which rows run together and what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from onepass.checkpoint import Checkpoint, weight_files
from onepass.errors import StartupError
from onepass.forward import qwen3_5
from onepass.forward.backend import Scores
from onepass.forward.buckets import Buckets, Shape, graph_shapes, in_order_of_capture, suffix_shape, whole_shape
from onepass.forward.graphs import Capturer, Graph, GraphMemory, Graphs, Outputs, Work
from onepass.forward.heads import LabelHead, choose_head
from onepass.forward.inputs import (
    DEFAULT_MAX_TOKENS,
    Inputs,
    count_reads,
    count_scores,
    empty_inputs,
    make_inputs,
    split_scores,
)
from onepass.forward.loader import BadWeights
from onepass.forward.plan import Pass
from onepass.forward.prefix import Prefix, PrefixBuffers, stack
from onepass.forward.tower import Tower
from onepass.forward.tuning import Choice
from onepass.forward.weights import SafetensorsReader
from onepass.rows import PlacedPicture, Readout, Row, pictures_from

GRAPH_TOLERANCE = 2e-2  # of the largest output; under capture kernels may add up in another order, in bfloat16
PROBE_ID_STEP = 7  # the token ids on which a graph is checked are spread over the vocabulary

Pictures = Sequence[tuple[PlacedPicture, ...]]  # of each row, counted from the first token that is computed


@dataclass(frozen=True, slots=True)
class Capture:
    """What is captured, by whom, and how much memory it may take."""

    capturer: Capturer
    memory: GraphMemory
    buckets: Buckets
    max_tokens: int  # of one pass
    max_rows: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """The tensors from which a captured pass computes."""

    inputs: Inputs
    lengths: Tensor  # (B,) long, the tokens of each row that are not padding; a pass that computes prefixes needs them
    past: Prefix | None


class Tokens(NamedTuple):
    """What the forward is given for the tokens of a pass: their ids, or embeddings where a row shows a picture."""

    positions: Tensor  # (B, T), or (3, B, T) beside embeddings
    input_ids: Tensor | None = None  # (B, T)
    embeds: Tensor | None = None  # (B, T, hidden)


class FastBackend:
    """Worker thread only."""

    name = "fast"
    shares_prefixes = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        choice: Choice,
        readout: Readout,
        tower: Tower | None = None,
        capture: Capture | None = None,
    ) -> None:
        """With `capture`, passes of its shapes are captured when `graphs.capture_next` is called.

        Raises `UnsupportedModel` for a configuration that it does not cover, and `StartupError` for bad weights."""
        self._spec, self._device, self._tower = qwen3_5.Spec.from_config(checkpoint.config), device, tower
        try:
            with tqdm(unit="B", unit_scale=True, desc="loading", leave=False, disable=None) as bar:
                reader = SafetensorsReader(weight_files(checkpoint.folder), bar.update)
                bar.total = reader.num_bytes
                self._weights = qwen3_5.load_weights(self._spec, reader, device, choice.dtype, pack=choice.packs)
        except (BadWeights, SafetensorError) as err:
            raise StartupError(f"{checkpoint.folder} cannot be loaded: {err}") from None
        self.max_tokens: int = checkpoint.text_config.get("max_position_embeddings", DEFAULT_MAX_TOKENS)
        labels = LabelHead(self._weights.head)
        self._head = choose_head(readout, labels, checkpoint.folder, self._spec.hidden_size, device)
        self.buckets = Buckets() if capture is None else capture.buckets
        self.graphs: Graphs[Shape, Buffers] | None = None
        if capture is not None:
            self._prepare_graphs(capture)

    def run(self, planned: Pass, rows: Sequence[Row], past: Sequence[Prefix]) -> tuple[list[Scores], list[Prefix]]:
        """See `Backend.run`."""
        pictures = [pictures_from(row.pictures, start) for row, start in zip(rows, planned.starts, strict=True)]
        graph = None
        if self.graphs is not None:
            graph = self.graphs.find(None if any(pictures) else self._shape_of(planned, rows))
        if graph is not None:
            return self._replay(graph, planned, rows, past)
        inputs = make_inputs(rows, planned.starts).map(lambda tensor: tensor.to(self._device))
        keep, lengths = self._what_is_kept(planned, rows)
        states, prefix = self._compute(inputs, join(past), pictures, keep=keep, lengths=lengths)
        scores = split_scores(rows, self._score(inputs, states)) if planned.reads else []
        if prefix is None or len(rows) == 1:
            return scores, [] if prefix is None else [prefix]
        return scores, [prefix.row(index, row.num_shared) for index, row in enumerate(rows)]

    def _what_is_kept(self, planned: Pass, rows: Sequence[Row]) -> tuple[int | list[int], Tensor | None]:
        """`keep` and `lengths` of the forward."""
        if not planned.keep_keys:
            return 0, None
        kept = [row.num_shared - start for row, start in zip(rows, planned.starts, strict=True)]
        if len(rows) == 1:
            return kept[0], None
        return (kept, None) if planned.reads else (max(kept), torch.tensor(kept, device=self._device))

    def _compute(
        self,
        inputs: Inputs,
        past: Prefix | None,
        pictures: Pictures = (),
        *,
        keep: int | Sequence[int] = 0,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Prefix | None]:
        """The hidden states (B, R, hidden) that are read, and the prefix that is kept."""
        tokens = self._tokens(inputs, pictures)
        return qwen3_5.forward(
            self._spec,
            self._weights,
            positions=tokens.positions,
            input_ids=tokens.input_ids,
            embeds=tokens.embeds,
            read=inputs.reads,
            lengths=lengths,
            prefix=past,
            keep=keep,
        )

    def _score(self, inputs: Inputs, states: Tensor) -> Tensor:
        return self._head.scores(states, inputs.score_reads, inputs.score_others)

    def _begin(self, inputs: Inputs, lengths: Tensor) -> Prefix:
        """The prefix that whole rows, of which nothing is read, leave behind. Its rows are padded."""
        unread = Inputs(inputs.ids, inputs.starts, inputs.reads[:, :0], inputs.score_reads, inputs.score_others)
        prefix = self._compute(unread, None, keep=inputs.ids.shape[1], lengths=lengths)[1]
        assert prefix is not None
        return prefix

    def _tokens(self, inputs: Inputs, pictures: Pictures) -> Tokens:
        if any(pictures):
            assert self._tower is not None
            embeds, positions = self._tower.inputs(inputs.ids, inputs.starts, pictures, self._weights.embed)
            return Tokens(positions, embeds=embeds)
        places = torch.arange(inputs.ids.shape[1], device=inputs.ids.device)
        return Tokens(inputs.starts.unsqueeze(1) + places, input_ids=inputs.ids)

    def _shape_of(self, planned: Pass, rows: Sequence[Row]) -> Shape | None:
        """The shape to which this pass is padded for a graph, or None where no graph runs such a pass."""
        width = max(row.num_tokens - start for row, start in zip(rows, planned.starts, strict=True))
        if not planned.reads:
            return None if planned.past_keys else whole_shape(self.buckets, "begin", len(rows), width)
        reads, scores = max(map(count_reads, rows)), max(map(count_scores, rows))
        if planned.keep_keys or reads > self.buckets.reads or scores > self.buckets.scores:
            return None
        if planned.past_keys:
            return suffix_shape(self.buckets, len(rows), width, max(planned.starts))
        return whole_shape(self.buckets, "whole", len(rows), width)

    def _replay(
        self, graph: Graph[Buffers], planned: Pass, rows: Sequence[Row], past: Sequence[Prefix]
    ) -> tuple[list[Scores], list[Prefix]]:
        """Write the buffers, replay, and copy what came out before the next replay overwrites it."""
        buffers = graph.buffers
        inputs = make_inputs(rows, planned.starts, buffers.inputs.sizes)
        if not planned.reads:
            buffers.inputs.ids.copy_(inputs.ids, non_blocking=True)
            lengths = torch.tensor([row.num_tokens for row in rows])
            buffers.lengths[: len(rows)].copy_(lengths, non_blocking=True)
            made = unflatten(graph.replay())
            return [], [made.row(index, row.num_tokens) for index, row in enumerate(rows)]
        for buffer, tensor in zip(buffers.inputs.tensors(), inputs.tensors(), strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if buffers.past is not None:
            buffers.past.write(past)
        return split_scores(rows, graph.replay()[0]), []

    def _prepare_graphs(self, capture: Capture) -> None:
        """Queue the shapes for capture. The buffers of prefixes are made now: their layout is that of a sample."""
        shapes = graph_shapes(capture.buckets, capture.max_tokens, capture.max_rows, self.max_tokens)
        sample = empty_inputs((1, 1, 0, 0)).map(lambda tensor: tensor.to(self._device))
        pasts = [(shape.rows, shape.past) for shape in shapes if shape.past]
        self._prefix_buffers = PrefixBuffers(self._begin(sample, sample.ids.new_ones(1)), pasts)
        self.graphs = Graphs(capture.capturer, self._work, GRAPH_TOLERANCE, capture.memory)
        self.graphs.waiting = in_order_of_capture(shapes)

    def _work(self, shape: Shape) -> Work[Buffers]:
        """A shape's pass over buffers of its own, filled with something on which the graph is checked. The buffers of
        prefixes are the largest, and all shapes share them."""
        reads, scores = self.buckets.reads, self.buckets.scores
        inputs = empty_inputs((shape.rows, shape.width, reads, scores)).map(lambda tensor: tensor.to(self._device))
        count = torch.arange(shape.rows * shape.width, device=self._device)
        inputs.ids.copy_((count * PROBE_ID_STEP % self._spec.vocab_size).view(shape.rows, shape.width))
        inputs.reads.copy_((torch.arange(reads, device=self._device) % shape.width).expand_as(inputs.reads))
        inputs.score_reads.copy_(torch.arange(scores, device=self._device).expand_as(inputs.score_reads) % reads)
        inputs.starts.fill_(shape.past)
        lengths = torch.full((shape.rows,), shape.width, device=self._device)
        past = self._prefix_buffers.view(shape.rows, shape.past) if shape.past else None
        buffers = Buffers(inputs, lengths, past)
        if shape.kind == "begin":
            return Work(buffers, lambda: flatten(self._begin(inputs, lengths)))
        return Work(buffers, lambda: (self._score(inputs, self._compute(inputs, past)[0]),))


def join(past: Sequence[Prefix]) -> Prefix | None:
    """The prefixes of rows as one: the rows share it without a copy where it is one and the same."""
    if not past:
        return None
    return past[0] if all(prefix is past[0] for prefix in past) else stack(past)


def flatten(prefix: Prefix) -> Outputs:
    return (prefix.valid, *(tensor for state in prefix.layers for tensor in state))


def unflatten(tensors: Outputs) -> Prefix:
    valid, *layers = tensors
    return Prefix(tuple(zip(layers[::2], layers[1::2], strict=True)), valid)
