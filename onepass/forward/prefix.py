"""Prefixes: what the first tokens of rows leave behind for what continues them.

These are keys and values, and the states of recurrent layers. It knows nothing of how they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

# What a layer leaves behind. Full attention leaves rotated keys, and values, both (B, kv_heads, P, D). Linear attention
# leaves the last inputs of the convolution (B, K - 1, conv_channels), and the recurrent state (B, value heads, Dk, Dv)
# in float32 at least.
State = tuple[Tensor, Tensor]


def is_attention(state: State) -> bool:
    return state[0].dim() == 4


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """B rows of P tokens, padding included. It never changes once it is made, so any number of rows may share it."""

    layers: tuple[State, ...]
    valid: Tensor  # (B, P) bool, False where the keys and values are padding

    @property
    def num_tokens(self) -> int:
        """Tokens of each row, padding included."""
        return self.valid.shape[1]

    @property
    def nbytes(self) -> int:
        return self.valid.nbytes + sum(first.nbytes + second.nbytes for first, second in self.layers)

    def row(self, index: int, num_tokens: int) -> Prefix:
        """A copy of one row without its padding. num_tokens: how many of its tokens are not padding."""

        def cut(state: State) -> State:
            first, second = (tensor[index : index + 1] for tensor in state)
            if is_attention(state):
                first, second = first[:, :, :num_tokens], second[:, :, :num_tokens]
            return first.clone(memory_format=torch.contiguous_format), second.clone(
                memory_format=torch.contiguous_format
            )

        return Prefix(tuple(map(cut, self.layers)), self.valid[index : index + 1, :num_tokens].clone())

    def write(self, rows: Sequence[Prefix]) -> None:
        """Copy prefixes of one row each into the first rows of this one, whose tensors are buffers.

        The rest of a row is marked as padding and holds what it held before, which must be finite. All copies start
        together, and neighbours that are the same prefix share one: a batch of 32 would otherwise start 1,500."""
        self.valid.zero_()
        buffers: list[Tensor] = []
        sources: list[Tensor] = []
        start = 0
        for row, same in groupby(rows, key=lambda row: row):
            end = start + len(list(same))
            places, length = slice(start, end), row.num_tokens
            buffers.append(self.valid[places, :length])
            sources.append(row.valid)
            for mine, theirs in zip(self.layers, row.layers, strict=True):
                for buffer, tensor in zip(mine, theirs, strict=True):
                    buffers.append(buffer[places, :, :length] if is_attention(theirs) else buffer[places])
                    sources.append(tensor)
            start = end
        with torch.no_grad():
            torch._foreach_copy_(buffers, [s.expand_as(b) for s, b in zip(sources, buffers, strict=True)])

    def shapes(self, num_rows: int, num_tokens: int) -> list[tuple[torch.Size, torch.Size]]:
        """The shapes of each layer's tensors in a prefix of `num_rows` rows of `num_tokens` tokens."""

        def resize(state: State) -> tuple[torch.Size, torch.Size]:
            first, second = ([num_rows, *tensor.shape[1:]] for tensor in state)
            if is_attention(state):
                first[2] = second[2] = num_tokens
            return torch.Size(first), torch.Size(second)

        return list(map(resize, self.layers))


class PrefixBuffers:
    """Buffers that hold one prefix at a time, of one of several sizes: each size is a view of the same memory."""

    def __init__(self, sample: Prefix, sizes: Sequence[tuple[int, int]]) -> None:
        """sample: any prefix of the model. sizes: the (rows, tokens) for which there must be room."""
        self._sample = sample
        self._layers: list[tuple[Tensor, Tensor]] = []
        shapes = [sample.shapes(*size) for size in sizes]
        for index, state in enumerate(sample.layers):
            first, second = (
                tensor.new_zeros(max((of_size[index][part].numel() for of_size in shapes), default=0))
                for part, tensor in enumerate(state)
            )
            self._layers.append((first, second))

    def view(self, num_rows: int, num_tokens: int) -> Prefix:
        """A prefix of this size, all of it padding and finite."""
        layers = tuple(
            (first[: one.numel()].view(one), second[: two.numel()].view(two))
            for (first, second), (one, two) in zip(self._layers, self._sample.shapes(num_rows, num_tokens), strict=True)
        )
        return Prefix(layers, self._sample.valid.new_zeros(num_rows, num_tokens))


def stack(prefixes: Sequence[Prefix]) -> Prefix:
    """One prefix whose rows are the given prefixes of one row each, right-padded to the longest."""
    size = len(prefixes), max(prefix.num_tokens for prefix in prefixes)
    stacked = PrefixBuffers(prefixes[0], [size]).view(*size)
    stacked.write(prefixes)
    return stacked
