"""Reads the tensors of a checkpoint by name, each into memory of its own. It knows nothing of what they mean."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, then the header, then the data


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    start: int  # in the file
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsReader:
    """Several safetensors files as one mapping from tensor name to tensor.

    The files are read, not mapped. So what was verified cannot change afterwards, and no pages of a mapping count as
    this process's memory beside the tensors made of them (docs/engine.md). One tensor at a time is held here.
    """

    def __init__(self, paths: Sequence[Path], on_read: Callable[[int], object] = lambda _: None) -> None:
        """`on_read` is called with the number of bytes of each read. Raises `SafetensorError` for a file that is not
        whole."""
        self._on_read = on_read
        self._places: dict[str, _Place] = {}
        for path in paths:
            with safe_open(path, framework="pt"):  # the library's own checks of the header: bounds, overlaps, sizes
                pass
            self._places |= _read_header(path)

    def keys(self) -> Iterable[str]:
        return self._places.keys()

    def describe(self) -> dict[str, tuple[torch.dtype, int]]:
        """The number format and the number of values of each tensor, by the headers."""
        return {name: (place.dtype, math.prod(place.shape)) for name, place in self._places.items()}

    @property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self._places.values())

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        if not place.num_bytes:
            return tensor
        room = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.start)
            while room:
                count = file.readinto(room)
                if not count:
                    raise SafetensorError(f"{place.path.name} was cut short while it was read")
                room = room[count:]
                self._on_read(count)
        return tensor


def _read_header(path: Path) -> dict[str, _Place]:
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(num_bytes))
    places = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        if facts["dtype"] not in DTYPES:
            raise SafetensorError(f"{path.name}: {name} has the dtype {facts['dtype']}, which is not read")
        begin, end = facts["data_offsets"]
        start = LENGTH_BYTES + num_bytes + begin
        places[name] = _Place(path, start, end - begin, DTYPES[facts["dtype"]], tuple(facts["shape"]))
    return places
