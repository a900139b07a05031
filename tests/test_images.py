"""Picture bytes to pixels: the library's own processor as the oracle, and every kind of file that must be refused."""

from __future__ import annotations

import gc
import io
import json
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

import images
from images import MAX_JPEG_SCANS, MAX_SOURCE_PIXELS, Picture, PictureReader, Settings, decode
from onepass.errors import BadRequest, DeadlineExceeded, Overloaded, StartupError
from tests.support import ROOT

SETTINGS = Settings(16, 2, min_pixels=65536, max_pixels=448 * 448, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
PROCESSOR = Qwen2VLImageProcessor(
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    size={"shortest_edge": 65536, "longest_edge": 448 * 448},
    image_mean=SETTINGS.mean,
    image_std=SETTINGS.std,
)


def noise(width: int = 90, height: int = 70, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Smooth, or a difference of JPEG's would hide any other."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 9, channels), dtype=np.uint8)
    planes = [Image.fromarray(small[..., i]).resize((width, height)) for i in range(channels)]
    return np.stack([np.asarray(plane) for plane in planes], axis=-1)


def rgb(width: int = 90, height: int = 70, seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(width, height, seed=seed))


def save(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def theirs(data: bytes) -> tuple[Tensor, list[int]]:
    made = PROCESSOR(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def ours(data: bytes, settings: Settings = SETTINGS) -> tuple[Tensor, list[int]]:
    """In the library's layout, which repeats the frame."""
    picture = decode(data, "image 'x'", settings)
    patches = settings.patches(picture.pixels)
    size = settings.patch_size
    repeated = patches.view(-1, 3, 1, size, size).expand(-1, -1, 2, -1, -1).reshape(len(patches), -1)
    return repeated, [1, *picture.grid]


def with_alpha(image: Image.Image) -> Image.Image:
    alpha = Image.fromarray(noise(*image.size, channels=1, seed=9)[..., 0])
    image = image.copy()
    image.putalpha(alpha)
    return image


PALETTE = rgb().quantize(32)
FILES = {
    "1": save(rgb().convert("1")),
    "L": save(rgb().convert("L")),
    "LA": save(with_alpha(rgb().convert("L"))),
    "P": save(PALETTE),
    "P with one transparent colour": save(PALETTE, transparency=3),
    "P with an alpha for each colour": save(PALETTE, transparency=bytes(range(0, 256, 8))),
    "L with a transparent grey": save(rgb().convert("L"), transparency=100),
    "RGB": save(rgb()),
    "RGB with a transparent colour": save(rgb(), transparency=(10, 20, 30)),
    "RGBA": save(with_alpha(rgb())),
    "JPEG": save(rgb(), "JPEG"),
    "grey JPEG": save(rgb().convert("L"), "JPEG"),
    "CMYK JPEG": save(rgb().convert("CMYK"), "JPEG"),
    "progressive JPEG": save(rgb(), "JPEG", progressive=True),
    "WebP": save(rgb(), "WEBP"),
    "WebP with alpha": save(with_alpha(rgb()), "WEBP", lossless=True),
    "GIF": save(PALETTE, "GIF"),
    "transparent GIF": save(PALETTE, "GIF", transparency=3),
    "interlaced GIF": save(PALETTE, "GIF", interlace=1),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_of_every_mode_are_those_of_the_librarys_processor(name: str) -> None:
    mine, grid = ours(FILES[name])
    expected, expected_grid = theirs(FILES[name])
    assert grid == expected_grid
    assert (mine - expected).abs().max() * min(SETTINGS.std) <= 1 / 255


@pytest.mark.parametrize(
    "size",
    [(1, 1), (26, 28), (27, 257), (332, 27), (31, 639), (1000, 5), (5, 1000), (448, 448), (1280, 720), (1999, 10)],
)
def test_pixels_of_every_size_are_those_of_the_librarys_processor(size: tuple[int, int]) -> None:
    data = save(rgb(*size))
    mine, grid = ours(data)
    expected, expected_grid = theirs(data)
    assert grid == expected_grid
    assert min(grid[1:]) >= 2
    assert (mine - expected).abs().max() * min(SETTINGS.std) <= 1 / 255


@given(height=st.integers(1, 6000), width=st.integers(1, 6000), budget=st.integers(1024, 1 << 21))
@example(height=5, width=1000, budget=200704)
@example(height=48, width=80, budget=200704)  # halves of a merged patch, rounded to even
def test_sides_are_the_librarys_whatever_the_budget(height: int, width: int, budget: int) -> None:
    settings = Settings(16, 2, 65536, budget, (0.5,) * 3, (0.5,) * 3)
    if max(height, width) <= 200 * min(height, width):
        assert settings.fit(height, width) == smart_resize(height, width, 32, 65536, budget)


def test_sixteen_bits_of_grey_are_scaled_not_cut_off() -> None:
    """The library cuts them off at 255, which leaves a white picture."""
    levels = noise(channels=1)[..., 0].astype(np.uint16) * 257
    deep = Image.fromarray(levels)
    assert deep.mode == "I;16"
    assert torch.equal(ours(save(deep))[0], ours(save(Image.fromarray((levels >> 8).astype(np.uint8))))[0])
    hidden = int(levels[0, 0])
    shown = Image.fromarray(np.where(levels == hidden, 255, levels >> 8).astype(np.uint8))
    assert torch.equal(ours(save(deep, transparency=hidden))[0], ours(save(shown))[0])


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (64, 64), (200, 0, 0, 0))
    assert torch.equal(ours(save(clear))[0], ours(save(Image.new("RGB", (64, 64), "white")))[0])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[images.ORIENTATION] = orientation
    data = save(rgb(), form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright.size == ((70, 90) if orientation > 4 else (90, 70))
    assert decode(data, "x", SETTINGS).digest == decode(save(upright.convert("RGB")), "x", SETTINGS).digest


def test_broken_exif_in_a_whole_picture_changes_nothing() -> None:
    broken = (b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0garbage", b"Exif\0\0")
    pictures = read(PictureReader(SETTINGS), save(rgb(), "JPEG"), *(save(rgb(), "JPEG", exif=exif) for exif in broken))
    assert len({picture.digest for picture in pictures}) == 1


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_shown(form: str) -> None:
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = save(frames[0], form, save_all=True, append_images=frames[1:], duration=50, **options)
    assert decode(data, "x", SETTINGS).digest == decode(save(frames[0]), "x", SETTINGS).digest


def test_the_same_picture_is_the_same_whatever_the_file_is_called_or_followed_by() -> None:
    plain = decode(FILES["RGB"], "x", SETTINGS)
    assert (
        decode(FILES["RGB"] + b"PK\x03\x04 a zip archive behind it <script>", "y.jpg", SETTINGS).digest == plain.digest
    )
    assert plain.num_tokens == plain.grid[0] * plain.grid[1] // 4
    assert plain.digest != decode(save(rgb(seed=1)), "x", SETTINGS).digest


def chunk(tag: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))


def png(width: int, height: int, *more: bytes, data: bytes = b"", colour_type: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    canvas = b"\0\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    inner = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + save(rgb(8, 8), "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(inner)) + inner


JPEG = save(rgb(300, 200), "JPEG")
SECRET = b"iVBORw0KGgo secret"
BROKEN = {
    "a JPEG without its last 128 bytes": (JPEG[:-128], "cut off JPEG"),
    "half a PNG": (FILES["RGB"][: len(FILES["RGB"]) // 2], "cut off PNG"),
    "half a GIF": (FILES["GIF"][: len(FILES["GIF"]) // 2], "cut off GIF"),
    "half a WebP": (FILES["WebP"][: len(FILES["WebP"]) // 2], "not a PNG"),
    "a PNG's signature": (b"\x89PNG\r\n\x1a\n", "not a PNG"),
    "a PNG whose data is no zlib": (png(20, 20, data=SECRET), "cut off PNG"),
    "a PNG without pixels": (png(20, 20), "cut off PNG"),
    "a PNG with a wrong check sum": (FILES["RGB"].replace(b"IHDR", b"IHDX"), "not a PNG"),
    "a PNG of no width": (png(0, 20), "not a PNG"),
    "text": (SECRET, "not a PNG"),
    "nothing": (b"", "not a PNG"),
    "one byte": (b"\xff", "not a PNG"),
    "zeros": (b"\0" * 5000, "not a PNG"),
    "a BMP": (save(rgb(), "BMP"), "not a PNG"),
    "a TIFF": (save(rgb(), "TIFF"), "not a PNG"),
    "an icon": (save(rgb(32, 32), "ICO"), "not a PNG"),
    "a PPM": (save(rgb(), "PPM"), "not a PNG"),
    "an SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not a PNG"),
    "EPS, which Pillow would hand to Ghostscript": (save(rgb(), "EPS"), "not a PNG"),
    "a PDF that says it is a GIF": (b"GIF89a%PDF-1.7", "not a PNG"),
    "1093x5": (save(rgb(1093, 5)), "more than 200 times"),
    "5x1093": (save(rgb(5, 1093), "JPEG"), "more than 200 times"),
    "a PNG bomb": (png(12000, 12000), "too many pixels"),
    "a larger PNG bomb": (png(1 << 30, 1 << 30), "too many pixels"),
    "a GIF bomb": (b"GIF89a" + struct.pack("<HH", 65535, 65535) + FILES["GIF"][10:], "too many pixels"),
    "a JPEG bomb": (JPEG.replace(struct.pack(">HH", 200, 300), struct.pack(">HH", 65000, 65000)), "too many pixels"),
    "a WebP bomb": (webp(16383, 16383), "too many pixels"),
    "a PNG with a bomb of text": (png(20, 20, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * (1 << 26)))), "not a PNG"),
    "a JPEG of many scans": (JPEG + b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" * MAX_JPEG_SCANS, "scans"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_shown_is_a_400_that_names_the_picture_and_echoes_nothing(name: str) -> None:
    data, says = BROKEN[name]
    with pytest.raises(BadRequest, match=says) as caught:
        PictureReader(SETTINGS).read([("image 'photo'", data)], time.monotonic() + 60)
    assert caught.value.message.startswith("image 'photo' ")
    assert "secret" not in caught.value.message
    assert len(caught.value.message) < 200


def one_colour_png(side: int) -> bytes:
    packer = zlib.compressobj(1)
    row = b"\0" + b"\x80" * side
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return png(side, side, data=data, colour_type=0)


MEASURE = """
import resource, sys, time
import images
from onepass.errors import BadRequest
settings = images.Settings(16, 2, 65536, 448 * 448, (0.5,) * 3, (0.5,) * 3)
reader = images.PictureReader(settings)
reader.read([("warm", open(sys.argv[2], "rb").read())], time.monotonic() + 60)
data = open(sys.argv[1], "rb").read()
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
try:
    reader.read([("bomb", data)], time.monotonic() + 60)
    said = "read"
except BadRequest as err:
    said = err.message
seconds = time.perf_counter() - started
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, seconds, said, sep=";")
"""


def test_a_bomb_of_12000_by_12000_costs_neither_time_nor_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(one_colour_png(12000))
    (tmp_path / "small.png").write_bytes(FILES["RGB"])
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "bomb.png"), str(tmp_path / "small.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    rise_mb, seconds, said = done.stdout.strip().split(";", 2)
    assert "too many pixels" in said
    assert float(rise_mb) < 100
    assert float(seconds) < 1


def test_the_largest_picture_that_is_read_is_read() -> None:
    side = int(MAX_SOURCE_PIXELS**0.5)
    assert decode(one_colour_png(side), "x", SETTINGS).grid == (28, 28)
    with pytest.raises(BadRequest, match="too many pixels"):
        decode(png(side + 1, side + 1), "x", SETTINGS)


def read(reader: PictureReader, *files: bytes, seconds: float = 60) -> list[Picture]:
    return reader.read([(f"image {n}", data) for n, data in enumerate(files, 1)], time.monotonic() + seconds)


def test_the_same_bytes_become_the_same_picture() -> None:
    first, second, third = read(PictureReader(SETTINGS), FILES["RGB"], FILES["L"], FILES["RGB"])
    assert first is third
    assert first is not second


def test_of_several_pictures_the_broken_one_is_named() -> None:
    with pytest.raises(BadRequest, match=r"^image 2 is not a PNG"):
        read(PictureReader(SETTINGS), FILES["RGB"], b"x", FILES["L"])


def test_few_pictures_are_decoded_at_once_and_waiting_counts_against_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)
    running: list[int] = []

    def slow(data: bytes, name: str, settings: Settings) -> Picture:
        running.append(1)
        begun.release()
        gate.wait(60)
        return decode(data, name, settings)

    monkeypatch.setattr(images, "decode", slow)
    reader = PictureReader(SETTINGS)
    num_decoders = reader._decoders._max_workers
    asked = [save(rgb(seed=seed)) for seed in range(num_decoders + 3)]
    with pytest.raises(DeadlineExceeded):
        read(reader, *asked, seconds=0.2)
    for _ in range(num_decoders):
        assert begun.acquire(timeout=60)
    assert len(running) == num_decoders <= images.MAX_DECODERS
    gate.set()
    monkeypatch.setattr(images, "decode", decode)
    assert len(read(reader, *asked)) == len(asked)
    assert len(running) == num_decoders  # those that were given up never began


def test_pixels_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PictureReader(SETTINGS)
    (held,) = read(reader, FILES["RGB"])
    monkeypatch.setattr(images, "MAX_HELD_BYTES", held.pixels.nbytes + 1)
    with pytest.raises(Overloaded):
        read(reader, FILES["L"])
    del held
    gc.collect()
    assert len(read(reader, FILES["L"])) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type 'CLIPImageProcessor'"),
        ({"resample": 2}, "resample 2"),
        ({"do_normalize": False}, "do_normalize"),
        ({"patch_size": None}, "not an image processor"),
        ({"patch_size": 0}, "above 0"),
        ({"image_std": [0, 0, 0]}, "image_std"),
        ({"size": {}}, "not an image processor"),
    ],
)
def test_a_processor_that_would_not_be_followed_is_refused_at_the_start(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    config = PROCESSOR.to_dict() | changes
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(StartupError, match=says):
        Settings.load(tmp_path, 1 << 20)


def test_settings_are_the_checkpoints_and_the_budget_the_smaller_one(tmp_path: Path) -> None:
    assert Settings.load(tmp_path, 448 * 448) is None
    PROCESSOR.save_pretrained(tmp_path)
    assert Settings.load(tmp_path, 448 * 448) == SETTINGS
    assert Settings.load(tmp_path, 1 << 24) == SETTINGS
    smaller = Settings.load(tmp_path, 256 * 256)
    assert smaller is not None
    assert smaller.max_pixels == 256 * 256
