"""Loads a checkpoint onto a device: chooses the device and the backend, and gives it the vision tower and the graphs.

It knows nothing of rows and of what is kept. Worker thread only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from onepass.checkpoint import Checkpoint
from onepass.config import Config
from onepass.errors import StartupError
from onepass.forward import qwen3_5
from onepass.forward.backend import Backend
from onepass.forward.batches import CostModel, Limits
from onepass.forward.buckets import PICTURE_BUCKETS, Buckets
from onepass.forward.fast_backend import GRAPH_TOLERANCE, Capture, FastBackend
from onepass.forward.loader import BadWeights, UnsupportedModel
from onepass.forward.tower import Tower
from onepass.forward.transformers_backend import TransformersBackend
from onepass.forward.tuning import Choice
from onepass.rows import Readout

logger = logging.getLogger(__name__)

MAX_PATCHES = 8192  # of one pass of the vision tower
LAUNCH_PATCHES = {"cpu": 64, "cuda": 1024}  # what starting such a pass costs, in patches; not measured


@dataclass(frozen=True, slots=True)
class Model:
    """What runs passes."""

    backend: Backend
    tower: Tower | None
    no_images_reason: str  # why there is no tower


def choose_device(asked: str) -> torch.device:
    """The device that `--device` asks for. Raises `StartupError` where it is not there."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise StartupError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")


def load_model(
    checkpoint: Checkpoint,
    config: Config,
    device: torch.device,
    choice: Choice,
    readout: Readout,
    capture: Capture | None = None,
) -> Model:
    """Load the backend that `--backend` asks for; `auto` takes our forward where it covers the configuration.

    With `capture`, the passes of the backend and of the tower are queued for capture. Raises `StartupError`."""
    if config.backend != "transformers":
        try:
            qwen3_5.Spec.from_config(checkpoint.config)
        except UnsupportedModel as err:
            if config.backend == "fast":
                raise StartupError(f"--backend fast does not cover this checkpoint ({err}); use transformers") from None
            logger.info("backend: transformers, since the fast one does not cover this checkpoint: %s", err)
        else:
            tower, reason = load_tower(checkpoint, config, device, choice.dtype, capture)
            return Model(FastBackend(checkpoint, device, choice, readout, tower, capture), tower, reason)
    backend = TransformersBackend(checkpoint.folder, device, choice.dtype, readout)
    return Model(backend, None, why_no_images(config) or "--backend transformers reads text only")


def why_no_images(config: Config) -> str:
    return "" if config.images else "the server was started with --no-images"


def load_tower(
    checkpoint: Checkpoint, config: Config, device: torch.device, dtype: torch.dtype, capture: Capture | None
) -> tuple[Tower | None, str]:
    """The vision tower, or why there is none. Raises `StartupError` for a broken one."""
    if reason := why_no_images(config):
        return None, reason
    buckets = Buckets() if capture is None else PICTURE_BUCKETS
    max_pictures = 1 if config.batch_invariant else PICTURE_BUCKETS.rows[-1]
    try:
        tower = Tower.load(
            checkpoint,
            device,
            dtype,
            max_pixels=config.max_pixels,
            cost=CostModel(launch=LAUNCH_PATCHES[device.type], per_token=1),
            limits=Limits(MAX_PATCHES, max_pictures, buckets.widths, buckets.rows),
            cache_bytes=config.image_cache_mb << 20,
        )
    except UnsupportedModel as err:
        return None, str(err)
    except (BadWeights, SafetensorError) as err:
        raise StartupError(f"{checkpoint.folder} cannot be loaded: {err}; --no-images serves text only") from None
    if capture is not None:
        tower.use_graphs(capture.capturer, GRAPH_TOLERANCE, capture.memory)
    return tower, ""
