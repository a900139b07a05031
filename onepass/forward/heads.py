"""Turns hidden states into option scores, in float32: a pointer head, or the next-token logits of the label tokens.

A head takes the states at the positions that are read and, for each score, the two numbers from which it is made. So
all scores of a batch are one tensor, which a captured graph can write. Nothing here reads a tensor on the host, and
nothing here knows how states are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from onepass.errors import StartupError

HEAD_FILE = "head.safetensors"


class Head(Protocol):
    def scores(self, states: Tensor, reads: Tensor, others: Tensor) -> Tensor:
        """(B, S) float32 scores. states (B, R, hidden). reads (B, S) long: which of a row's R states each score is
        about. others (B, S) long: for a pointer, which of the R states is the question's end; for labels, the id of the
        label's token."""
        ...


def pick(states: Tensor, places: Tensor) -> Tensor:
    """(B, S, hidden): states[b, places[b, s]]. states (B, R, hidden); places (B, S) long."""
    return states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


@dataclass(frozen=True, slots=True)
class PointerHead:
    """Scores the hidden state of an option against that of its question's end, as the kev family does."""

    query: Tensor  # (width, hidden), float32
    key: Tensor  # (width, hidden), float32

    @classmethod
    def load(cls, folder: Path, hidden_size: int, device: torch.device) -> PointerHead:
        """Raises `StartupError`."""
        path = folder / HEAD_FILE
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

    def scores(self, states: Tensor, reads: Tensor, others: Tensor) -> Tensor:
        states = states.float()
        keys, queries = pick(states @ self.key.T, reads), pick(states @ self.query.T, others)
        return (keys * queries).sum(-1).div(len(self.query) ** 0.5)


@dataclass(frozen=True, slots=True)
class LabelHead:
    """Gives the next-token logit of each option's label token alone: it reads 26 rows of the matrix, not 248,320."""

    weight: Tensor  # (vocabulary, hidden), as wide as it is stored
    bias: Tensor | None = None  # (vocabulary,)
    scale: float = 1.0  # Cohere, Granite
    cap: float | None = None  # Gemma: cap * tanh(logit / cap)

    def scores(self, states: Tensor, reads: Tensor, others: Tensor) -> Tensor:
        # A product and a sum, which no setting of matrix products' precision touches
        logits = (pick(states.float(), reads) * self.weight[others].float()).sum(-1)
        if self.bias is not None:
            logits = logits + self.bias[others].float()
        logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
