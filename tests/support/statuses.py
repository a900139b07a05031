"""Parts of a `Status` for fakes, with nothing counted yet."""

from __future__ import annotations

from typing import Any

from onepass.status import EngineStatus, ModelStatus, QueueStatus

ENGINE: dict[str, Any] = {
    "backend": "fake",
    "device": "cpu",
    "dtype": "float32",
    "kernels": "none",
    "threads": 1,
    "tuning": {},
    "launch_tokens": 16,
    "shares_state": False,
    "batch_invariant": False,
    "state_cache_bytes": 0,
    "state_cache_hits": 0,
    "state_cache_misses": 0,
    "tokens_computed": 0,
    "tokens_reused": 0,
    "tokens_padded": 0,
    "graphs": None,
}
QUEUE: dict[str, Any] = {
    "queued_rows": 0,
    "batches": 0,
    "rows": 0,
    "batch_rows": (),
    "worker_beat_age_s": 0.0,
    "repeated_rows": 0,
    "tokens_repeated": 0,
}
MODEL: dict[str, Any] = {
    "source": "folder",
    "revision": None,
    "family": "chat",
    "family_version": "",
    "family_forced": False,
    "verified": None,
    "digests": None,
    "readout": "pointer",
    "encoding": "joint",
    "encodings": ("joint",),
    "images": False,
    "images_reason": "the engine has no vision tower",
    "max_prompt_tokens": 1000,
    "load_s": 0.0,
    "warm_up": {},
    "hub_offline": True,
    "limits": {},
    "worker_alive": True,
}


def engine_status(**changes: Any) -> EngineStatus:
    return EngineStatus(**ENGINE | changes)


def queue_status(**changes: Any) -> QueueStatus:
    return QueueStatus(**QUEUE | changes)


def model_status(**changes: Any) -> ModelStatus:
    return ModelStatus(**{"engine": engine_status()} | MODEL | changes)
