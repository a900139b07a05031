"""Owns the model: plans passes, runs them, and keeps what comes again. Worker thread only.

It knows nothing of requests, prompts and HTTP, and nothing of architectures: `onepass/forward/load.py` loads a backend,
which is our own forward or the Hugging Face library's model class.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onepass.cache import LruCache
from onepass.checkpoint import Checkpoint
from onepass.config import Config
from onepass.errors import OutOfMemory
from onepass.forward import tuning
from onepass.forward.backend import Scores
from onepass.forward.batches import CostModel, Limits
from onepass.forward.buckets import CUDA_BUCKETS, Buckets
from onepass.forward.fast_backend import Capture
from onepass.forward.graphs import Capturer, GraphMemory, Graphs, make_capturer
from onepass.forward.load import choose_device, load_model
from onepass.forward.plan import Kept, Pass, Planner
from onepass.forward.prefix import Prefix
from onepass.rows import Readout, Row
from onepass.status import EngineStatus

logger = logging.getLogger(__name__)

MIN_LAUNCH_TOKENS, MAX_LAUNCH_TOKENS = 16, 4096
DEFAULT_LAUNCH_TOKENS = {"cpu": 64, "cuda": 512}  # what starting a pass costs, in tokens
REPORT_EVERY_S = 5  # while graphs are captured


@dataclass(slots=True)
class Counts:
    """Tokens of requests; those of the warm-up are not counted."""

    computed: int = 0
    reused: int = 0  # not computed, since a prefix was at hand
    padded: int = 0  # computed for nothing


class Engine:
    """The loaded model. The worker thread makes it and uses it, and no other thread does."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Config,
        readout: Readout,
        capturer: Callable[[torch.device], Capturer | None] = make_capturer,
        buckets: Buckets = CUDA_BUCKETS,
    ) -> None:
        """`capturer` gives what captures graphs on a device, or None where nothing does; `buckets` are the sizes of
        these graphs. Raises `StartupError` for a checkpoint that cannot be served as asked."""
        torch.set_grad_enabled(False)
        self.device = choose_device(config.device)
        self._choice = tuning.choose(checkpoint, self.device, config)
        max_tokens, max_rows = config.max_batch_tokens, max_rows_of(config)
        maker = capturer(self.device) if config.graph_memory_mb else None
        capture = None
        if maker is not None:
            capture = Capture(maker, GraphMemory(config.graph_memory_mb << 20), buckets, max_tokens, max_rows)
            if self.device.type == "cuda":
                torch.backends.cuda.enable_cudnn_sdp(False)  # others saw it fail with masks that are not square
        model = load_model(checkpoint, config, self.device, self._choice, readout, capture)
        self._backend, self.tower, self.no_images_reason = model.backend, model.tower, model.no_images_reason
        self.max_tokens = self._backend.max_tokens
        self._threads = tuning.Threads(torch.get_num_threads())
        if self.device.type == "cpu":
            self._threads = tuning.choose_threads(tuning.matrix_sizes(checkpoint.text_config), self._choice.reasons)
        self._states: LruCache[bytes, Prefix] = LruCache(config.state_cache_mb << 20, lambda prefix: prefix.nbytes)
        self.tokens = Counts()
        self._capture(config.fast_start)
        sizes, cost = self._backend.buckets, self._measure(readout)
        self._planner = Planner(
            cost,
            Limits(max_tokens, max_rows, sizes.widths, sizes.rows),
            Limits(max_tokens, max_rows, sizes.suffix_widths, sizes.rows),
            shares=config.share_state and self._backend.shares_prefixes,
            min_shared_tokens=int(cost.launch),
            past_sizes=sizes.pasts,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._choice.dtype

    @property
    def _all_graphs(self) -> list[Graphs[Any, Any]]:
        """The backend's graphs, then those of the vision tower."""
        found = (self._backend.graphs, self.tower.graphs if self.tower else None)
        return [graphs for graphs in found if graphs is not None]

    def describe(self) -> EngineStatus:
        """The engine's part of `/health`."""
        graphs = self._backend.graphs
        return EngineStatus(
            backend=self._backend.name,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            kernels="torch" if self.device.type == "cpu" else "flash-linear-attention",
            threads=self._threads.most,
            tuning=self._choice.reasons,
            launch_tokens=self._planner.cost.launch,
            shares_state=self._planner.shares,
            batch_invariant=self._planner.limits.max_rows == 1,
            state_cache_bytes=self._states.cost,
            state_cache_hits=self._states.hits,
            state_cache_misses=self._states.misses,
            tokens_computed=self.tokens.computed,
            tokens_reused=self.tokens.reused,
            tokens_padded=self.tokens.padded,
            graphs=graphs.describe() if graphs else None,
            tower=self.tower.describe() if self.tower else None,
        )

    def reset_counts(self) -> None:
        """Count from zero; what is kept stays."""
        self.tokens = Counts()
        self._states.reset_counts()
        if self._backend.graphs is not None:
            self._backend.graphs.reset_counts()
        if self.tower is not None:
            self.tower.reset_counts()

    def forward(self, rows: list[Row]) -> list[Scores]:
        """Raw option scores in float32 arithmetic, one list for each row, in the order of the rows. A score may be NaN.

        Raises `OutOfMemory` after it has given back all memory that it can."""
        try:
            return self._forward(rows)
        except (RuntimeError, MemoryError) as err:
            if not is_out_of_memory(err):
                raise
        # Outside the handler: the exception's traceback holds the tensors of the failed pass
        self._states.clear()
        if self.tower is not None:
            self.tower.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory("the model has not enough memory for this request now", retry_after_s=1)

    def _forward(self, rows: Sequence[Row]) -> list[Scores]:
        """Plan; then run each pass, keep its prefixes, and put its scores in their places."""
        scores: list[Scores] = [[] for _ in rows]
        passes = self._planner.plan(rows, Kept(self._states, list(self._states.pinned_keys)))
        last_use = {key: number for number, planned in enumerate(passes) for key in planned.past_keys}
        at_hand = self._states.find(last_use)  # held here, for the cache may drop them before their turn
        num_computed = 0
        for number, planned in enumerate(passes):
            chosen = planned.select(rows)
            num_tokens = planned.count_tokens(chosen)
            self._threads.use(planned.num_rows * planned.width)
            found, prefixes = self._backend.run(planned, chosen, [at_hand[key] for key in planned.past_keys])
            for key, prefix in zip(planned.keep_keys, prefixes, strict=True):
                self._states.put(key, prefix)
                if key in last_use:
                    at_hand[key] = prefix
            for key in {key for key in planned.past_keys if last_use[key] == number}:
                del at_hand[key]
            if planned.reads:
                for index, row_scores in zip(planned.rows, found, strict=True):
                    scores[index] = row_scores
            num_computed += num_tokens
            self.tokens.padded += planned.num_rows * planned.width - num_tokens
        self.tokens.computed += num_computed
        self.tokens.reused += sum(row.num_tokens for row in rows) - num_computed
        return scores

    def keep_beginning(self, ids: bytes) -> bool:
        """Compute what every prompt begins with and keep it for good, if it is long enough to be worth a pass."""
        row = Row(array("i", ids), ())
        row = Row(row.input_ids, (), num_shared=row.num_tokens)
        is_long = row.num_tokens >= self._planner.min_shared_tokens
        if not self._planner.shares or not is_long or ids in self._states.pinned_keys:
            return False
        _, (prefix,) = self._backend.run(self._planner.plan_prefix(row), [row], [])
        self._states.pin(ids, prefix)
        return True

    def _capture(self, fast_start: bool) -> None:
        """Capture all graphs, or with `fast_start` those of the backend's common shapes; `idle` captures the rest."""
        graphs, reported = self._backend.graphs, time.monotonic()
        if graphs is None:
            return
        num_shapes = len(graphs.waiting)
        while graphs.waiting and not (fast_start and not graphs.waiting[0].is_common):
            graphs.capture_next()
            if time.monotonic() - reported > REPORT_EVERY_S:
                reported = time.monotonic()
                logger.info("capturing graphs: %d of %d", len(graphs.ready), num_shapes)
        logger.info("graphs: %s", graphs.describe())
        while not fast_start and self.idle():
            pass

    def idle(self) -> bool:
        """Capture one graph of those that wait. It is called while no request waits. Returns whether more are left."""
        waiting = [graphs for graphs in self._all_graphs if graphs.waiting]
        if waiting:
            waiting[0].capture_next()
        return any(graphs.waiting for graphs in waiting)

    def _measure(self, readout: Readout) -> CostModel:
        """What a pass costs, in tokens, by the time that passes take. Starting one costs the default unless it is
        clearly another power of two, so that noise does not cut the same rows in another way tomorrow."""

        def run(num_tokens: int) -> object:
            planned = Pass((0,), (0,), (), (), True, 1, num_tokens)
            return self._backend.run(planned, [tuning.probe_row(num_tokens, readout)], [])

        cost = CostModel.fit(tuning.time_passes(run, self.device, self.max_tokens))
        tokens = cost.launch / cost.per_token if cost.per_token else MAX_LAUNCH_TOKENS
        for what, reason in self._choice.reasons.items():
            logger.info("chosen: %s %s", what, reason)
        return CostModel(launch=round_launch(tokens, self.device.type), per_token=1)  # only ratios matter


def max_rows_of(config: Config) -> int:
    """The most rows of one pass.

    With `--batch-invariant` it is 1: the number of rows chooses a product's kernel, and with it the order of its sums,
    so that a pass has to be of the row alone. What comes before a row is computed by itself as well, and whether it is
    depends on the row alone."""
    return 1 if config.batch_invariant else config.max_batch_rows


def round_launch(tokens: float, device: str) -> int:
    """The default where `tokens` is within four times of it, else the nearest power of two within the limits."""
    default = DEFAULT_LAUNCH_TOKENS[device]
    if default / 4 < tokens < default * 4:
        return default
    return int(2 ** round(math.log2(min(MAX_LAUNCH_TOKENS, max(MIN_LAUNCH_TOKENS, tokens)))))


def is_out_of_memory(err: Exception) -> bool:
    """torch has a class for it on CUDA only; the CPU's allocator raises a RuntimeError."""
    return isinstance(err, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in str(err)
