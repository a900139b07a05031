"""Reads the tensors of a checkpoint into weights: checked, in the wanted dtype, on the device, fused.

It knows nothing of architectures and files: whoever has an architecture names the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onepass.forward import kernels


class UnsupportedModel(ValueError):
    """The configuration asks for something that this forward does not compute. The message is one line."""


class BadWeights(ValueError):
    """A tensor is missing or has another shape than the configuration says. The message is one line."""


class TensorReader(Protocol):
    """A checkpoint by tensor name: a dict, or something that reads each tensor from disk when asked."""

    def keys(self) -> Iterable[str]: ...
    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """Every method takes a tensor's name and the shape it must have, and raises `BadWeights` where it has another.

    pack: on the CPU, fused matrices are kept in the layout of `kernels.pack_matrix`. Only one tensor of the source is
    held at a time beside what has been built.
    """

    tensors: TensorReader
    names: frozenset[str]
    device: torch.device
    dtype: torch.dtype
    pack: bool = False

    @classmethod
    def of(cls, tensors: TensorReader, device: torch.device, dtype: torch.dtype, *, pack: bool = False) -> WeightLoader:
        return cls(tensors, frozenset(tensors.keys()), device, dtype, pack)

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor as it is stored. It must be a float of 16 bits at least."""
        if name not in self.names:
            raise BadWeights(f"the checkpoint has no tensor {name}")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.element_size() < 2:
            raise BadWeights(f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, expected a float of {shape}")
        return tensor

    @property
    def wide_dtype(self) -> torch.dtype:
        """float32 at least: norms and what is not multiplied are kept in it."""
        return torch.promote_types(self.dtype, torch.float32)

    def cast(self, name: str, *shape: int) -> Tensor:
        """The tensor in the loader's dtype."""
        return self.read(name, *shape).to(self.device, self.dtype)

    def vector(self, name: str, size: int) -> Tensor:
        """A vector in float32 at least."""
        return self.read(name, size).to(self.device, self.wide_dtype)

    def table(self, name: str, *shape: int) -> Tensor:
        """A matrix whose rows are looked up one by one. It is never made wider than it is stored."""
        tensor = self.read(name, *shape)
        return tensor.to(self.device, tensor.dtype if tensor.element_size() <= self.dtype.itemsize else self.dtype)

    def fused(self, columns: int, *parts: tuple[str, int]) -> Tensor:
        """Copies of the named matrices, given with their rows, one below the other."""
        whole = torch.empty(sum(rows for _, rows in parts), columns, dtype=self.dtype, device=self.device)
        start = 0
        for name, rows in parts:
            whole[start : start + rows] = self.read(name, rows, columns)
            start += rows
        return kernels.pack_matrix(whole) if self.pack else whole
