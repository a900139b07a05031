"""What the server knows of itself: one frozen `Status`. The metrics read its attributes, `/health` shows its document.

Each part is made by its owner: the engine, the vision tower, the graphs, the queue and the decider. A leaf: it imports
only the errors.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from onepass.errors import ApiError

VERSION = "0.1.0"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pydantic", "numpy")


@lru_cache(maxsize=1)  # reading them takes milliseconds, and /health is asked for every few seconds
def versions() -> dict[str, str]:
    """The versions of this server, of Python and of the installed packages that decide an answer."""
    found = {"onepass": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _Part:
    """A part of `Status`. Its field names are the keys of the `/health` document."""

    __slots__ = ()

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for item in fields(self):  # type: ignore[arg-type] # every part is a dataclass
            value = getattr(self, item.name)
            found[item.name] = value.document() if isinstance(value, _Part) else value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsStatus(_Part):
    """The captured CUDA graphs of one model. `replays` and `plain` count passes by graph and without one."""

    captured: int
    waiting: int
    failed: int
    bytes: int
    capture_s: float
    replays: int
    plain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerStatus(_Part):
    """The vision tower and the embeddings that it keeps."""

    image_cache_bytes: int
    images_encoded: int
    images_reused: int
    image_graphs: GraphsStatus | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus(_Part):
    """How the model runs and what it has computed. `tokens_*` and `state_cache_*` count since the start."""

    backend: str
    device: str
    dtype: str
    kernels: str
    threads: int
    tuning: Mapping[str, str]  # each choice of the start, with its reason
    launch_tokens: float
    shares_state: bool
    batch_invariant: bool
    state_cache_bytes: int
    state_cache_hits: int
    state_cache_misses: int
    tokens_computed: int
    tokens_reused: int
    tokens_padded: int
    graphs: GraphsStatus | None
    tower: TowerStatus | None = None

    def document(self) -> dict[str, Any]:
        """The fields of the tower stand beside those of the engine."""
        found = _Part.document(self)
        return found | (found.pop("tower") or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus(_Part):
    """What waits and what the worker has served."""

    queued_rows: int
    batches: int
    rows: int
    batch_rows: Sequence[int]  # batches of up to 1, 2, 4, 8... rows
    worker_beat_age_s: float  # 0 while the worker has nothing to do
    repeated_rows: int
    tokens_repeated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus(_Part):
    """The loaded checkpoint and how requests are put to it."""

    source: str
    revision: str | None
    family: str  # whose format the checkpoint has
    family_version: str
    family_forced: bool  # by `--family`, against what marks the checkpoint
    verified: bool | None
    digests: Mapping[str, str] | None
    engine: EngineStatus
    readout: str
    encoding: str
    encodings: Sequence[str]
    images: bool
    images_reason: str  # why no pictures are read; empty where they are
    max_prompt_tokens: int
    load_s: float
    warm_up: Mapping[str, Any]
    hub_offline: bool
    limits: Mapping[str, float]
    worker_alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The whole. `loaded` is None until the model has been loaded."""

    error: ApiError | None  # why a request that is sent now would not be answered
    model: str
    queue: QueueStatus
    loaded: ModelStatus | None = None

    def document(self) -> dict[str, Any]:
        """The flat document of `/health`. Before the model is loaded it holds only the status and the model's name."""
        found: dict[str, Any] = {"status": self.error.error_type if self.error else "ready"}
        if self.error:
            found["reason"] = self.error.message
        found["model"] = self.model
        if self.loaded is None:
            return found
        for name, value in self.loaded.document().items():
            found |= value if name == "engine" else {name: value}
        return found | self.queue.document() | {"versions": versions()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What the metrics show: the status of the decider, and what the listener knows."""

    decider: Status
    open_connections: int
    refused_connections: int
    threads_alive: int
