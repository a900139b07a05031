"""Tensors read from safetensors files: as the library reads them, and its own refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from onepass.forward.weights import DTYPES, SafetensorsReader


def test_every_dtype_and_shape_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"{dtype}{shape}": (torch.rand(shape) * 100).to(dtype)
        for dtype in DTYPES.values()
        for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 5))
    }
    half = len(tensors) // 2
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, part in zip(paths, (list(tensors.items())[:half], list(tensors.items())[half:]), strict=True):
        save_file(dict(part), path, metadata={"format": "pt"})
    reader = SafetensorsReader(paths)
    assert sorted(reader.keys()) == sorted(tensors)
    for path in paths:
        for name, expected in load_file(path).items():
            found = reader[name]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "content", [b"", b"x" * 7, (1 << 60).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"not json!"]
)
def test_what_is_not_a_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorError):
        SafetensorsReader([path])


def test_a_file_cut_short_is_refused_at_the_start_or_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    reader = SafetensorsReader([path])
    path.write_bytes(whole[:-1])
    with pytest.raises(SafetensorError, match="cut short"):
        reader["a"]
    with pytest.raises(SafetensorError):
        SafetensorsReader([path])


def test_a_tensor_is_a_copy_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    tensor = SafetensorsReader([path])["a"]
    path.write_bytes(bytes(path.stat().st_size))
    assert tensor.equal(torch.ones(100))
