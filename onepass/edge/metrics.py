"""This module counts: one `Record` for each request, for its log line and for `/metrics`. It knows no HTTP, no model.

What the server knows of itself anyway is not counted again: it is read off the `Status` at each scrape.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from onepass.errors import ClientLeft, DeadlineExceeded
from onepass.status import EngineStatus, QueueStatus, ServerStatus, Status, versions

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
STAGES = ("read", "parse", "render", "queue", "model", "readout", "write")  # A decision passes them in this order.
BUCKETS_S = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)  # fmt: skip
TOTAL = "total"
NONE = "-"  # no error, no client id
OTHER = "other"  # a route or a method that is none of ours: what clients make up must not make new series
# What becomes of a request's rows, by its error; any other error: failed
OUTCOMES = {NONE: "answered", ClientLeft.error_type: "cancelled", DeadlineExceeded.error_type: "expired"}
MODEL_LABELS = ("source", "revision", "backend", "device", "dtype", "kernels", "encoding")

# Else a start time stands beside every counter, which nothing here resets
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Record:
    """A record holds what is known about one request so far. Its handler's thread owns it.

    `stages_ms` holds the stages that the request has passed (see STAGES), and at the end `total`.
    """

    request_id: str
    started: float  # This is time.monotonic() at its first byte.
    client_id: str = NONE
    method: str = OTHER
    route: str = OTHER
    status: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    error: str = NONE
    is_probe: bool = False  # such requests come every few seconds for ever, so they are logged with --verbose only
    stages_ms: dict[str, float] = field(default_factory=dict)

    def fields(self) -> dict[str, object]:
        """Return what the log line says, in order. The only text from the client is an id of safe characters."""
        return {
            "id": self.request_id,
            "client_id": self.client_id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            **{f"{stage}_ms": ms for stage, ms in self.stages_ms.items()},
            "error": self.error,
        }


class Metrics:
    """Any thread may use it. `read_status` is called at each scrape."""

    def __init__(self, read_status: Callable[[], ServerStatus]) -> None:
        self._registry = registry = CollectorRegistry()
        requests = Counter("onepass_requests", "Requests answered.", ("route", "method", "status"), registry=registry)
        errors = Counter(
            "onepass_request_errors", "Requests without the answer asked for.", ("error",), registry=registry
        )
        rows = Counter("onepass_rows", "Prompt rows of queued requests.", ("outcome",), registry=registry)
        # Finding a series by its labels takes longer than counting, so the series are kept.
        self._requests, self._errors, self._rows = (
            lru_cache(None)(counter.labels) for counter in (requests, errors, rows)
        )
        self._input_tokens = Counter(
            "onepass_input_tokens", "Tokens of queued requests, as `usage.input_tokens` counts them.", registry=registry
        )
        self._stages = _Stages()
        registry.register(self._stages)
        registry.register(_StatusCollector(read_status))
        ProcessCollector(registry=registry)

    def count(self, record: Record) -> None:
        """Count the request before its answer is sent, so that a client with its answer finds it counted."""
        self._requests(record.route, record.method, record.status).inc()
        if record.error != NONE:
            self._errors(record.error).inc()
        durations_ms = record.stages_ms
        if record.num_rows:
            self._rows(OUTCOMES.get(record.error, "failed")).inc(record.num_rows)
            self._input_tokens.inc(record.num_tokens)
            durations_ms = {**durations_ms, TOTAL: (time.monotonic() - record.started) * 1000}
        self._stages.observe(durations_ms)

    def count_write(self, record: Record, seconds: float) -> None:
        """Count the time of the write, after the answer was sent or could not be sent."""
        record.stages_ms["write"] = seconds * 1000
        if record.num_rows:
            self._stages.observe({"write": seconds * 1000})

    def render(self) -> bytes:
        """Return the metrics as Prometheus text."""
        return generate_latest(self._registry)


class _Stages(Collector):
    """This holds one histogram for each stage and one for the whole. One lock covers all entries of a request: the
    library's own histograms, with two locks each, took three times as long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {stage: [0] * (len(BUCKETS_S) + 1) for stage in (*STAGES, TOTAL)}
        self._sums_s = dict.fromkeys(self._counts, 0.0)

    def observe(self, durations_ms: Mapping[str, float]) -> None:
        with self._lock:
            for stage, ms in durations_ms.items():
                seconds = ms / 1000
                self._counts[stage][bisect_left(BUCKETS_S, seconds)] += 1
                self._sums_s[stage] += seconds

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            counts = {stage: list(accumulate(numbers)) for stage, numbers in self._counts.items()}
            sums_s = dict(self._sums_s)
        bounds = [*map(str, map(float, BUCKETS_S)), "+Inf"]
        stages = HistogramMetricFamily("onepass_stage_seconds", "Stages of a decision.", labels=["stage"])
        for stage in STAGES:
            stages.add_metric([stage], list(zip(bounds, counts[stage], strict=True)), sums_s[stage])
        yield stages
        yield HistogramMetricFamily(
            "onepass_decision_seconds",
            "A queued request, from its first byte until its answer is ready to be sent.",
            buckets=list(zip(bounds, counts[TOTAL], strict=True)),
            sum_value=sums_s[TOTAL],
        )


class _StatusCollector(Collector):
    """Turns the status into metrics at each scrape. Until the model is loaded, the model's counters are 0."""

    def __init__(self, read_status: Callable[[], ServerStatus]) -> None:
        self._read_status = read_status

    def describe(self) -> Iterable[Metric]:
        """Nothing. Without this the registry would scrape once to learn the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        server = self._read_status()
        status, queue = server.decider, server.decider.queue
        engine = status.loaded.engine if status.loaded else None
        ready = status.error is None
        yield GaugeMetricFamily("onepass_ready", "1 if a request sent now would be answered.", value=ready)
        yield GaugeMetricFamily("onepass_connections", "Open client connections.", value=server.open_connections)
        yield GaugeMetricFamily("onepass_queue_rows", "Prompt rows that wait.", value=queue.queued_rows)
        text = "How long ago the worker last came round; 0 while it has nothing to do."
        yield GaugeMetricFamily("onepass_worker_beat_age_seconds", text, value=queue.worker_beat_age_s)
        text = "Threads, one a connection and a few more."
        yield GaugeMetricFamily("onepass_threads", text, value=server.threads_alive)
        text = "Connections refused at once: too many were open."
        yield CounterMetricFamily("onepass_connections_refused", text, value=server.refused_connections)
        text = "Rows answered by another run of the same content."
        yield CounterMetricFamily("onepass_rows_repeated", text, value=queue.repeated_rows)
        yield _batch_rows(queue)
        yield from _of_engine(engine, queue)
        yield _model_info(status)


def _of_engine(engine: EngineStatus | None, queue: QueueStatus) -> Iterable[Metric]:
    text = "Memory used by states that may come again."
    yield GaugeMetricFamily("onepass_state_cache_bytes", text, value=engine.state_cache_bytes if engine else 0)
    text = "States whose computation was still there."
    yield CounterMetricFamily("onepass_state_cache_hits", text, value=engine.state_cache_hits if engine else 0)
    text = "States that were computed."
    yield CounterMetricFamily("onepass_state_cache_misses", text, value=engine.state_cache_misses if engine else 0)
    tokens = CounterMetricFamily("onepass_model_tokens", "Tokens in forward passes.", labels=["kind"])
    tokens.add_metric(["computed"], engine.tokens_computed if engine else 0)
    tokens.add_metric(["reused"], engine.tokens_reused if engine else 0)
    tokens.add_metric(["repeated"], queue.tokens_repeated)
    tokens.add_metric(["padded"], engine.tokens_padded if engine else 0)
    yield tokens
    graphs = engine.graphs if engine else None
    passes = CounterMetricFamily("onepass_graph_passes", "Forward passes on CUDA, by graph or not.", labels=["kind"])
    passes.add_metric(["replayed"], graphs.replays if graphs else 0)
    passes.add_metric(["plain"], graphs.plain if graphs else 0)
    yield passes


def _model_info(status: Status) -> Metric:
    loaded = status.loaded
    info = dict.fromkeys(MODEL_LABELS, "")
    if loaded is not None:
        info = {
            "source": loaded.source,
            "revision": loaded.revision or "",
            "backend": loaded.engine.backend,
            "device": loaded.engine.device,
            "dtype": loaded.engine.dtype,
            "kernels": loaded.engine.kernels,
            "encoding": loaded.encoding,
        }
    digests = loaded.digests if loaded else None
    info |= {"model": status.model, "version": versions()["onepass"], "digest": _digest(digests or {})}
    return InfoMetricFamily("onepass_model", "What is served, and how.", value=info)


def _batch_rows(queue: QueueStatus) -> Metric:
    """Batches by the power of two up to which their rows come: 1, 2, 4, 8..."""
    buckets: list[tuple[str, float]] = []
    count = 0
    for power, num_batches in enumerate(queue.batch_rows):
        count += num_batches
        buckets.append((str(float(1 << power)), count))
    buckets.append(("+Inf", count))
    text = "Prompt rows taken from the queue at a time."
    return HistogramMetricFamily("onepass_batch_rows", text, buckets=buckets, sum_value=queue.rows)


def _digest(digests: Mapping[str, str]) -> str:
    """Return one digest for the whole checkpoint: the SHA-256 of its sorted manifest, or "" without a manifest."""
    if not digests:
        return ""
    manifest = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(manifest.encode()).hexdigest()
