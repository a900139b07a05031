"""Turns picture bytes into the pixels that a vision tower is shown: upright, on white, RGB, resized once; on the CPU.

Pillow opens and checks a picture. torch resizes it by the operation that torchvision's resize calls, since the import
of torchvision takes two seconds. Pixels and patches are those of transformers' `Qwen2VLImageProcessor`, which Qwen3.5
uses. The header bounds time and memory before a pixel is decoded. It knows nothing of requests, prompts and the model.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from onepass.errors import BadRequest, DeadlineExceeded, Overloaded, StartupError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SOURCE_PIXELS = 1 << 25  # 33 million, enough for a telephone's photo; decoded 134 MB, at worst four copies of them
MAX_ASPECT_RATIO = 200  # that of the library's processor
MAX_JPEG_SCANS = 100  # a progressive JPEG has about 10; a scan of a few bytes costs a pass over all pixels
MAX_HELD_BYTES = 512 << 20  # of pixels that wait for the model: 850 pictures of the default size
MAX_DECODERS = 4  # pictures decoded at once; the limit bounds memory and leaves cores to the model
BICUBIC = 3  # Pillow's number, which preprocessor_config.json uses
JPEG_SCAN = b"\xff\xda"
ORIENTATION = 0x0112  # the EXIF tag
TURNS = {  # its values -> what makes the picture upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")


@dataclass(frozen=True, slots=True)
class Settings:
    """The processor configuration of a checkpoint, and the server's limit on pixels."""

    patch_size: int
    merge_size: int  # patches on each side of the square that becomes one token
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]  # of each channel, between 0 and 1
    std: tuple[float, ...]

    @classmethod
    def load(cls, folder: Path, max_pixels: int) -> Settings | None:
        """None where the checkpoint has no such configuration. Raises `StartupError` for one that is not supported."""
        found = _processor_config(folder)
        if found is None:
            return None
        path, config = found
        size = config.get("size") or {}
        expected: dict[str, tuple[Any, ...]] = {
            "image_processor_type": PROCESSORS,
            "resample": (BICUBIC,),
            "rescale_factor": (1 / 255,),
            **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), (True,)),
        }
        for key, allowed in expected.items():
            if config.get(key, allowed[0]) not in allowed:
                raise StartupError(f"{path}: {key} {config[key]!r} is not supported; --no-images serves text only")
        try:
            settings = cls(
                patch_size=int(config["patch_size"]),
                merge_size=int(config["merge_size"]),
                min_pixels=int(config.get("min_pixels") or size["shortest_edge"]),
                max_pixels=min(max_pixels, int(config.get("max_pixels") or size["longest_edge"])),
                mean=tuple(map(float, config["image_mean"])),
                std=tuple(map(float, config["image_std"])),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise StartupError(f"{path} is not an image processor's configuration: {err!r}") from None
        sizes = (settings.patch_size, settings.merge_size, settings.min_pixels, settings.max_pixels)
        if min(sizes) < 1 or len(settings.mean) != 3 or len(settings.std) != 3 or not all(settings.std):
            raise StartupError(f"{path}: sizes must be above 0, image_mean and image_std of 3 numbers")
        return settings

    def fit(self, height: int, width: int) -> tuple[int, int]:
        """The sides to which a picture of this size is resized: whole merged patches, at least one, within the budget.

        The arithmetic is the library's, with its rounding of halves to even. So a picture that is much longer than wide
        may exceed the budget by a strip, as it does there.
        """
        unit = self.patch_size * self.merge_size
        sides = [round(side / unit) * unit for side in (height, width)]
        if sides[0] * sides[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = [max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)]
        elif sides[0] * sides[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * grow / unit) * unit for side in (height, width)]
        return sides[0], sides[1]

    def patches(self, pixels: Tensor) -> Tensor:
        """(3, H, W) uint8 as (patches, 3 * patch * patch) float32, normalised. Patches that merge are adjacent."""
        size, merge = self.patch_size, self.merge_size
        mean, std = (
            torch.tensor(values, device=pixels.device).mul(255).view(3, 1, 1) for values in (self.mean, self.std)
        )
        _, height, width = pixels.shape
        blocks = pixels.float().sub_(mean).div_(std)
        blocks = blocks.view(3, height // (merge * size), merge, size, width // (merge * size), merge, size)
        return blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * size * size)


def _processor_config(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The processor's configuration and its file. The newer file comes first, as in the library."""
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            config = config.get(key) if key else config
        except (OSError, ValueError, AttributeError):
            raise StartupError(f"{path} must hold a JSON object") from None
        if isinstance(config, dict):
            return path, config
    return None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Picture:
    """One picture as the model is shown it. It is one object wherever a request shows it."""

    pixels: Tensor  # (3, H, W) uint8
    digest: bytes  # of the pixels and their shape; pictures with the same digest are the same
    grid: tuple[int, int]  # rows and columns of patches
    shape: tuple[int, int]  # rows and columns of tokens
    embeds: Tensor | None = None  # (num_tokens, hidden), set by the worker thread

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_tokens(self) -> int:
        """Tokens that this picture takes in a prompt."""
        return self.shape[0] * self.shape[1]

    @property
    def span(self) -> int:
        """Positions that M-RoPE counts for this picture."""
        return max(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class PictureReader:
    """Decodes pictures on a few threads of its own; any thread may call `read`.

    It has its own threads because torch's resize starts OpenMP threads for each thread that calls it, and there may be
    hundreds of connections.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        num_threads = min(MAX_DECODERS, os.cpu_count() or 1)
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="picture")
        self._held_bytes = 0
        self._lock = threading.RLock()  # a picture is freed, and counted, in any thread that drops it last
        warnings.filterwarnings("ignore", module="PIL")  # clients send broken EXIF and the like

    def read(self, sources: Sequence[tuple[str, bytes]], deadline: float) -> list[Picture]:
        """`sources` are (what to call it in an error, bytes). The same bytes become the same `Picture`.

        `deadline` is on `time.monotonic()`'s clock. Raises `BadRequest` that names the first picture at fault,
        `DeadlineExceeded`, or `Overloaded` when too many pixels wait for the model.
        """
        jobs: dict[bytes, Future[Picture]] = {}
        for name, data in sources:
            if data not in jobs:
                jobs[data] = self._decoders.submit(self._decode, data, name)
        try:
            return [jobs[data].result(_seconds_until(deadline)) for _, data in sources]
        except FutureTimeoutError:
            raise DeadlineExceeded("the pictures waited too long to be read") from None
        finally:
            for job in jobs.values():
                job.cancel()

    def _decode(self, data: bytes, name: str) -> Picture:
        picture = decode(data, name, self.settings)
        self._count(picture.pixels.nbytes)
        weakref.finalize(picture, self._count, -picture.pixels.nbytes).atexit = False
        return picture

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            if self._held_bytes + num_bytes > MAX_HELD_BYTES:
                raise Overloaded("too many pictures wait for the model", retry_after_s=1)
            self._held_bytes += num_bytes


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def decode(data: bytes, name: str, settings: Settings) -> Picture:
    """Decode one picture. Raises `BadRequest`, whose message names only the picture's format and size."""
    image = _open(data, name)
    try:
        image.load()  # the first frame
        orientation = _orientation(image)
        image = _on_white(image)
    except MemoryError:
        raise
    except Exception:  # Pillow raises whatever its parsers raise
        raise BadRequest(f"{name} is a broken or cut off {image.format} picture") from None
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    del image
    sides = settings.fit(*pixels.shape[1:])
    pixels = F.interpolate(pixels[None], sides, mode="bicubic", antialias=True)[0]
    grid = sides[0] // settings.patch_size, sides[1] // settings.patch_size
    shape = grid[0] // settings.merge_size, grid[1] // settings.merge_size
    digest = hashlib.sha256(repr(sides).encode())
    digest.update(pixels.numpy().tobytes())
    return Picture(pixels, digest.digest(), grid, shape)


def _open(data: bytes, name: str) -> Image.Image:
    """Read the header, and refuse a picture that would take too long or too much memory to decode."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_large(name) from None
    except MemoryError:
        raise
    except Exception:  # Pillow raises whatever its parsers raise
        raise BadRequest(f"{name} is not a PNG, JPEG, WebP or GIF picture") from None
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise _too_large(name)
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadRequest(f"{name} is more than {MAX_ASPECT_RATIO} times as long as wide ({width}×{height})")
    if image.format in ("JPEG", "MPO") and data.count(JPEG_SCAN) > MAX_JPEG_SCANS:
        raise BadRequest(f"{name} is a JPEG of more than {MAX_JPEG_SCANS} scans")
    return image


def _too_large(name: str) -> BadRequest:
    return BadRequest(f"{name} has too many pixels; at most {MAX_SOURCE_PIXELS:,} are read")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the EXIF is broken but the picture is whole, so it is shown as it is stored
        return 1


def _on_white(image: Image.Image) -> Image.Image:
    """The picture in RGB, with transparent parts laid on white."""
    transparent = image.info.get("transparency")
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255 instead of scaling
        grey = np.asarray(image).astype(np.int32)
        levels = (grey >> 8).astype(np.uint8)
        if isinstance(transparent, int):
            levels[grey == transparent] = 255
        return Image.fromarray(levels).convert("RGB")
    if transparent is None and not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
