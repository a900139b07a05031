"""Owns the model: loads it, decides which rows run together and what is computed once. Worker thread only.

Two bodies give option scores: our own forward (`onepass/forward/fast_backend.py`), and the Hugging Face library's
model class for every other architecture (`onepass/forward/transformers_backend.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from onepass.checkpoint import Checkpoint
from onepass.config import Config
from onepass.errors import OutOfMemory, StartupError
from onepass.forward import qwen3_5, tuning
from onepass.forward.fast_backend import (
    CUDA_BUCKETS,
    GRAPH_TOLERANCE,
    MAX_PAST_TOKENS,
    MAX_PATCHES,
    PICTURE_BUCKETS,
    Buckets,
    Buffers,
    FastBackend,
    Shape,
    graph_shapes,
)
from onepass.forward.graphs import CudaCapturer, Graphs
from onepass.forward.inputs import split_scores
from onepass.forward.plan import CostModel, Limits, first_fit, plan_batches
from onepass.forward.prefix import Prefix
from onepass.forward.tower import Tower
from onepass.forward.transformers_backend import TransformersBackend
from onepass.rows import PrefixTokens, Readout, Row, pictures_from
from onepass.state_cache import StateCache

logger = logging.getLogger(__name__)

MAX_NEW_PREFIXES = 64  # held at once beside the cache, where rows of several run together
LAUNCH_PATCHES = {"cpu": 64, "cuda": 1024}  # what starting a pass of the vision tower costs, in patches; not measured
MIN_LAUNCH_TOKENS, MAX_LAUNCH_TOKENS = 16, 4096
DEFAULT_LAUNCH_TOKENS = {"cpu": 64, "cuda": 512}  # what starting a pass costs, in tokens

Scores = list[list[float]]  # of one row: for each question, a score an option


class Backend(Protocol):
    """Token ids to option scores."""

    backend: str
    hidden_size: int
    max_tokens: int
    can_share: bool  # `begin` is there

    def begin(self, beginnings: Sequence[PrefixTokens], past: Prefix | None = None) -> list[Prefix]: ...

    def scores(self, rows: Sequence[Row], prefixes: Sequence[Prefix] | None = None) -> Tensor: ...

    def scores_and_beginnings(self, rows: Sequence[Row], past: Prefix | None = None) -> tuple[Tensor, list[Prefix]]: ...


@dataclass(slots=True)
class Counts:
    """Tokens of requests; the warm-up is none."""

    computed: int = 0
    reused: int = 0  # not computed, since a state was at hand
    padded: int = 0  # computed for nothing


class Engine:
    """The loaded model. Made and used by the worker thread alone."""

    def __init__(self, checkpoint: Checkpoint, config: Config, readout: Readout) -> None:
        """Raises `StartupError` for a checkpoint that cannot be served as asked."""
        torch.set_grad_enabled(False)
        self.device = choose_device(config.device)
        self._choice = tuning.choose(checkpoint.folder, self.device, config)
        self._body = load_body(checkpoint, config.backend, self.device, self._choice, readout)
        self.tower, self.no_images_reason = load_tower(checkpoint, self._body, config, self.device, self._choice.dtype)
        self.max_tokens = self._body.max_tokens
        self._limits = Limits(max_tokens=config.max_batch_tokens, max_rows=self._max_rows(config))
        self._suffix_limits = self._limits
        self._threads = tuning.Threads(torch.get_num_threads())
        if self.device.type == "cpu":
            self._threads = tuning.choose_threads(tuning.matrix_sizes(checkpoint.folder), self._choice.reasons)
        self._shares = config.share_state and self._body.can_share
        self._states: StateCache[Prefix] = StateCache(config.state_cache_mb << 20)
        self.tokens = Counts()
        if self.device.type == "cuda" and isinstance(self._body, FastBackend) and config.graph_memory_mb:
            self._capture(self._body, config)
        self._cost = self._measure(readout)
        self._launch_tokens = self._cost.launch_s

    def _max_rows(self, config: Config) -> int:
        """In one pass. With `--batch-invariant` 1: a product's kernel, and with it the order of its sums, is chosen by
        the number of its rows, so that a pass has to be of the row alone. What comes before a row is computed by itself
        as well, and whether it is, is decided by the row."""
        return 1 if config.batch_invariant else config.max_batch_rows

    @property
    def dtype(self) -> torch.dtype:
        return self._choice.dtype

    @property
    def _graphs(self) -> Graphs[Shape, Buffers] | None:
        return self._body.graphs if isinstance(self._body, FastBackend) else None

    @property
    def _mixes_prefixes(self) -> bool:
        """A graph has a place for each row's prefix; elsewhere rows of one prefix share it without a copy."""
        return self._graphs is not None

    def describe(self) -> dict[str, Any]:
        """The engine's part of `/health`."""
        return {
            "backend": self._body.backend,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kernels": "torch" if self.device.type == "cpu" else "flash-linear-attention",
            "threads": self._threads.most,
            "tuning": self._choice.reasons,
            "launch_tokens": self._launch_tokens,
            "shares_state": self._shares,
            "batch_invariant": self._limits.max_rows == 1,
            "state_cache_bytes": self._states.num_bytes,
            "state_cache_hits": self._states.hits,
            "state_cache_misses": self._states.misses,
            "tokens_computed": self.tokens.computed,
            "tokens_reused": self.tokens.reused,
            "tokens_padded": self.tokens.padded,
            "graphs": self._graphs.describe() if self._graphs else None,
            **(self.tower.describe() if self.tower else {}),
        }

    def reset_counts(self) -> None:
        """Count from here on; what is kept stays."""
        self.tokens = Counts()
        self._states.hits = self._states.misses = 0
        if self.tower is not None:
            self.tower.num_encoded = self.tower.num_reused = 0
        for graphs in (self._graphs, self.tower.graphs if self.tower else None):
            if graphs is not None:
                graphs.num_replays = graphs.num_plain = 0

    @property
    def _keeps_in_passing(self) -> bool:
        """New states with one question are computed with it, in the same pass. Not if answers have to be the same to
        the bit, and not with graphs, whose passes do the one or the other."""
        return not self._mixes_prefixes and self._limits.max_rows > 1

    def forward(self, rows: list[Row]) -> list[Scores]:
        """Raw option scores in float32 arithmetic, one list a row, in row order; a score may be NaN.

        Raises `OutOfMemory`, with what can be given back given back."""
        try:
            return self._forward(rows)
        except (RuntimeError, MemoryError) as err:
            if not is_out_of_memory(err):
                raise
        # Outside the handler: the exception's traceback holds the failed pass's tensors
        self._states.clear()
        if self.tower is not None:
            self.tower.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise OutOfMemory("the model has not enough memory for this request now", retry_after_s=1)

    def _forward(self, rows: list[Row]) -> list[Scores]:
        scores: list[Scores] = [[] for _ in rows]
        beginnings = {i: found for i, row in enumerate(rows) if (found := self._beginning(row)) is not None}
        whole = [index for index in range(len(rows)) if index not in beginnings]
        lengths, see = [rows[i].num_tokens for i in whole], [bool(rows[i].pictures) for i in whole]
        for batch in plan_batches(lengths, self._cost, self._limits, see):
            self._score(rows, [whole[place] for place in batch.rows], None, scores)
        members_of: dict[PrefixTokens, list[int]] = {}
        for index, beginning in beginnings.items():
            members_of.setdefault(beginning, []).append(index)
        if self._keeps_in_passing:
            new = [one for one, members in members_of.items() if len(members) == 1 and one.key not in self._states]
            self._score_and_begin(rows, {members_of.pop(one)[0]: one for one in new}, scores)
        distinct, step = list(members_of), MAX_NEW_PREFIXES if self._mixes_prefixes else 1
        for start in range(0, len(distinct), step):
            prefixes = self._begin(distinct[start : start + step])
            members = sorted(index for beginning in prefixes for index in members_of[beginning])
            for part in self._plan_suffixes(rows, members, beginnings):
                self._score(rows, part, [prefixes[beginnings[i]] for i in part], scores)
        return scores

    def _plan_suffixes(
        self, rows: Sequence[Row], members: list[int], beginnings: Mapping[int, PrefixTokens]
    ) -> Iterable[list[int]]:
        """Batches of rows that continue a prefix: on a CPU one and the same, with graphs any of like length."""
        pasts = [beginnings[i].num_tokens for i in members]
        lengths = [rows[i].num_tokens - past for i, past in zip(members, pasts, strict=True)]
        groups: list[Any] = [beginnings[i] for i in members]
        if isinstance(self._body, FastBackend) and self._mixes_prefixes:
            see = [bool(pictures_from(rows[i].pictures, past)) for i, past in zip(members, pasts, strict=True)]
            groups = [(first_fit(self._body.buckets.pasts, past), sees) for past, sees in zip(pasts, see, strict=True)]
        for batch in plan_batches(lengths, self._cost, self._suffix_limits, groups):
            longest = max(rows[members[place]].num_tokens for place in batch.rows)
            most = max(1, MAX_PAST_TOKENS // longest)
            for start in range(0, len(batch.rows), most):
                yield [members[place] for place in batch.rows[start : start + most]]

    def _beginning(self, row: Row) -> PrefixTokens | None:
        """The row's first tokens, if they are computed apart: for any row whose state is long enough, whatever else is
        asked of it, so that its answers are the same however often they are asked for and with what. A row whose state
        is not may still start with the template's own beginning."""
        if not self._shares:
            return None
        if row.num_shared >= self._launch_tokens:
            return row.beginning()
        pinned = self._states.find_pinned(row.input_ids[: row.num_shared].tobytes())
        return None if pinned is None else PrefixTokens(pinned)

    def keep_beginning(self, ids: bytes) -> bool:
        """Compute what every prompt starts with and keep it for good, if it is long enough to be worth a pass."""
        beginning = PrefixTokens(ids)
        if not self._shares or beginning.num_tokens < self._launch_tokens or self._states.find_pinned(ids) == ids:
            return False
        self._states.pin(ids, self._body.begin([beginning])[0])
        return True

    def _begin(self, beginnings: Sequence[PrefixTokens]) -> dict[PrefixTokens, Prefix]:
        """The prefix of each, from the cache or computed, those of like length together."""
        found: dict[PrefixTokens, Prefix] = {}
        missing: list[PrefixTokens] = []
        for beginning in beginnings:
            prefix = self._states.get(beginning.key)
            if prefix is None:
                missing.append(beginning)
            else:
                found[beginning] = prefix
                self.tokens.reused += beginning.num_tokens
        lengths, see = [one.num_tokens for one in missing], [bool(one.pictures) for one in missing]
        for batch in plan_batches(lengths, self._cost, self._limits, see):
            together = [missing[place] for place in batch.rows]
            past = self._pinned_past(together[0]) if len(together) == 1 else None
            before = 0 if past is None else past.num_tokens
            self._threads.use(batch.num_rows * batch.width)
            made = self._body.begin([one.after(before) for one in together], past)
            num_tokens = sum(one.num_tokens - before for one in together)
            self.tokens.computed += num_tokens
            self.tokens.reused += before
            self.tokens.padded += batch.num_rows * batch.width - sum(one.num_tokens for one in together)
            for beginning, prefix in zip(together, made, strict=True):
                found[beginning] = prefix
                self._states.put(beginning.key, prefix)
        return found

    def _pinned_past(self, beginning: PrefixTokens) -> Prefix | None:
        ids = self._states.find_pinned(beginning.ids)
        return None if ids is None else self._states.get(ids)

    def _score_and_begin(
        self, rows: Sequence[Row], beginnings: Mapping[int, PrefixTokens], scores: list[Scores]
    ) -> None:
        """The scores of rows, each the only one of a new beginning, which is kept: one pass instead of two."""
        numbers = list(beginnings)
        pasts = [self._pinned_past(beginnings[i]) for i in numbers]
        starts = [0 if past is None else past.num_tokens for past in pasts]
        lengths = [rows[i].num_tokens - start for i, start in zip(numbers, starts, strict=True)]
        groups = [(id(past), bool(rows[i].pictures)) for i, past in zip(numbers, pasts, strict=True)]
        for batch in plan_batches(lengths, self._cost, self._limits, groups):
            chosen = [numbers[place] for place in batch.rows]
            together = [rows[i] for i in chosen]
            self._prepare_pass([lengths[place] for place in batch.rows])
            found, made = self._body.scores_and_beginnings(together, pasts[batch.rows[0]])
            self.tokens.reused += sum(starts[place] for place in batch.rows)
            for index, row_scores, prefix in zip(chosen, split_scores(together, found), made, strict=True):
                scores[index] = row_scores
                self._states.put(beginnings[index].key, prefix)

    def _prepare_pass(self, lengths: list[int]) -> None:
        """Give a pass over rows with so many tokens to compute its threads, and count it."""
        self._threads.use(len(lengths) * max(lengths))
        self.tokens.computed += sum(lengths)
        self.tokens.padded += len(lengths) * max(lengths) - sum(lengths)

    def _score(
        self, rows: Sequence[Row], chosen: list[int], prefixes: list[Prefix] | None, scores: list[Scores]
    ) -> None:
        """Run the chosen rows together and put their scores in their places."""
        together = [rows[i] for i in chosen]
        starts = [prefix.num_tokens for prefix in prefixes] if prefixes else [0] * len(together)
        lengths = [row.num_tokens - start for row, start in zip(together, starts, strict=True)]
        self._prepare_pass(lengths)
        self.tokens.reused += sum(starts) - sum({id(prefix): prefix.num_tokens for prefix in prefixes or ()}.values())
        found = split_scores(together, self._body.scores(together, prefixes))
        for index, row_scores in zip(chosen, found, strict=True):
            scores[index] = row_scores

    def _capture(self, body: FastBackend, config: Config) -> None:
        """Have the graphs made that this device and these limits call for; with `--fast-start` the common ones now."""
        torch.backends.cuda.enable_cudnn_sdp(False)  # wrong with masks that are not square, seen by others
        max_tokens, max_rows = config.max_batch_tokens, self._max_rows(config)
        shapes = graph_shapes(CUDA_BUCKETS, max_tokens, max_rows, body.max_tokens)
        backend, max_bytes = CudaCapturer(self.device), config.graph_memory_mb << 20
        body.use_graphs(backend, CUDA_BUCKETS, shapes, max_bytes)
        self._limits = Limits(max_tokens, max_rows, CUDA_BUCKETS.widths, CUDA_BUCKETS.rows)
        self._suffix_limits = Limits(max_tokens, max_rows, CUDA_BUCKETS.suffix_widths, CUDA_BUCKETS.rows)
        assert body.graphs is not None
        graphs, said = body.graphs, time.monotonic()
        while graphs.waiting and not (config.fast_start and not graphs.waiting[0].is_common):
            graphs.capture_next()
            if time.monotonic() - said > 5:
                said = time.monotonic()
                logger.info("capturing graphs: %d of %d", len(graphs.ready), len(shapes))
        logger.info("graphs: %s", graphs.describe())
        if self.tower is not None:
            self.tower.use_graphs(backend, GRAPH_TOLERANCE, max_bytes - graphs.num_bytes)
            while not config.fast_start and self.tower.graphs is not None and self.tower.graphs.capture_next():
                pass

    def idle(self) -> bool:
        """A little of what was left for later; called while no request waits. Returns whether more is left."""
        all_graphs = (self._graphs, self.tower.graphs if self.tower else None)
        return any(graphs.capture_next() for graphs in all_graphs if graphs is not None)

    def _measure(self, readout: Readout) -> CostModel:
        """What a pass costs, by the time passes take, in tokens. Starting one costs the default unless it is clearly
        another power of two, so that noise does not cut the same rows in another way tomorrow."""

        def run(num_tokens: int) -> object:
            return self._body.scores([tuning.probe_row(num_tokens, readout)])

        cost = CostModel.fit(tuning.time_passes(run, self.device, self.max_tokens))
        tokens = cost.launch_s / cost.token_s if cost.token_s else MAX_LAUNCH_TOKENS
        for what, reason in self._choice.reasons.items():
            logger.info("chosen: %s %s", what, reason)
        return CostModel(launch_s=round_launch(tokens, self.device.type), token_s=1)  # only ratios matter


def round_launch(tokens: float, device: str) -> int:
    """The default where `tokens` is within four times of it, else the nearest power of two within the limits."""
    default = DEFAULT_LAUNCH_TOKENS[device]
    if default / 4 < tokens < default * 4:
        return default
    return int(2 ** round(math.log2(min(MAX_LAUNCH_TOKENS, max(MIN_LAUNCH_TOKENS, tokens)))))


def is_out_of_memory(err: Exception) -> bool:
    """torch has a class for it on CUDA only; the CPU's allocator raises a RuntimeError."""
    return isinstance(err, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in str(err)


def load_body(
    checkpoint: Checkpoint, backend: str, device: torch.device, choice: tuning.Choice, readout: Readout
) -> Backend:
    """`auto` takes our forward where it covers the configuration. Raises `StartupError`."""
    if backend != "transformers":
        try:
            return FastBackend(checkpoint.folder, device, choice.dtype, readout, pack=choice.packs)
        except qwen3_5.UnsupportedModel as err:
            if backend == "fast":
                raise StartupError(f"--backend fast does not cover this checkpoint ({err}); use transformers") from None
            logger.info("backend: transformers, since the fast one does not cover this checkpoint: %s", err)
    return TransformersBackend(checkpoint.folder, device, choice.dtype, readout)


def load_tower(
    checkpoint: Checkpoint, body: Backend, config: Config, device: torch.device, dtype: torch.dtype
) -> tuple[Tower | None, str]:
    """The vision tower, given to the body too, or why there is none. Raises `StartupError` for a broken one."""
    if not config.images:
        return None, "the server was started with --no-images"
    if not isinstance(body, FastBackend):
        return None, "--backend transformers reads text only"
    buckets = PICTURE_BUCKETS if device.type == "cuda" and config.graph_memory_mb else Buckets()
    max_pictures = 1 if config.batch_invariant else PICTURE_BUCKETS.rows[-1]
    try:
        body.tower = Tower.load(
            checkpoint.folder,
            device,
            dtype,
            max_pixels=config.max_pixels,
            cost=CostModel(launch_s=LAUNCH_PATCHES[device.type], token_s=1),
            limits=Limits(MAX_PATCHES, max_pictures, buckets.widths, buckets.rows),
            cache_bytes=config.image_cache_mb << 20,
        )
    except qwen3_5.UnsupportedModel as err:
        return None, str(err)
    except (qwen3_5.BadWeights, SafetensorError) as err:
        raise StartupError(f"{checkpoint.folder} cannot be loaded: {err}; --no-images serves text only") from None
    return body.tower, ""


def choose_device(asked: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise StartupError("--device cuda: torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if has_cuda and asked != "cpu" else "cpu")
