"""What each path answers. A route takes an `Exchange` and returns a `Reply`."""

from __future__ import annotations

import time

from onepass.decider import Pending
from onepass.edge import metrics, openapi, page
from onepass.edge.exchange import Exchange, Reply, as_json
from onepass.edge.handler import Route
from onepass.errors import ClientLeft, WorkerDead


def decide(exchange: Exchange) -> Reply:
    _require_ready(exchange)
    record = exchange.record
    pending = _submit(exchange)
    record.num_rows, record.num_tokens = pending.num_rows, pending.num_tokens
    record.stages_ms |= pending.stages_ms
    _wait(exchange, pending)
    answered = exchange.decider.answer(pending)
    record.stages_ms |= answered.stages_ms
    total_ms = (time.monotonic() - record.started) * 1e3
    timing = ", ".join([f"{stage};dur={ms:.2f}" for stage, ms in record.stages_ms.items()])
    return Reply(answered.body, headers={"Server-Timing": f"{timing}, total;dur={total_ms:.2f}"})


def _submit(exchange: Exchange) -> Pending:
    """Read and queue the request. Its body is out of memory when this returns, before the thread waits."""
    assert exchange.head is not None
    with exchange.read_body() as body:
        return exchange.decider.submit(body, exchange.head.headers.get("content-type", ""), exchange.client)


def _wait(exchange: Exchange, pending: Pending) -> None:
    """Wait until the request is answered, has failed or has expired. Raises `ClientLeft`."""
    try:
        if not exchange.wait(pending.future, pending.deadline):
            exchange.decider.expire(pending)  # this fails it, unless the model has begun with it
            exchange.wait(pending.future, None)
    except ClientLeft:
        exchange.decider.cancel(pending)
        raise


def _require_ready(exchange: Exchange) -> None:
    error = exchange.decider.why_not_ready()
    if error is not None:
        raise error


def list_models(exchange: Exchange) -> Reply:
    _require_ready(exchange)
    return as_json(exchange.decider.models())


def check_ready(exchange: Exchange) -> Reply:
    status = exchange.decider.status()
    if status.error is None:
        return as_json(status.document())
    document = {**status.document(), "detail": status.error.detail()}
    return as_json(document, status.error.status, status.error.headers())


def check_alive(exchange: Exchange) -> Reply:
    if exchange.decider.dead.is_set():
        raise WorkerDead
    return as_json({"status": "alive"})


def show_metrics(exchange: Exchange) -> Reply:
    """Needs no key, as the scrapers of the other probes. The text names no state, no question and no client."""
    return Reply(exchange.metrics.render(), content_type=metrics.CONTENT_TYPE)


def show_openapi(_: Exchange) -> Reply:
    return Reply(openapi.encoded(ALIASES))


def show_page(_: Exchange) -> Reply:
    content, headers = page.load()
    return Reply(content, headers=headers, content_type="text/html; charset=utf-8")


ROUTES: dict[str, Route] = {
    path: route
    for route in (
        Route("/v1/systemone", "POST", decide, needs_key=True, aliases=("/systemone", "/v1/v1/systemone")),
        Route("/v1/models", "GET", list_models, needs_key=True, aliases=("/models", "/v1/v1/models")),
        Route("/health", "GET", check_ready, aliases=("/healthz", "/readyz"), is_probed=True),
        Route("/livez", "GET", check_alive, is_probed=True),
        Route("/metrics", "GET", show_metrics, is_probed=True),
        Route("/openapi.json", "GET", show_openapi),
        Route("/", "GET", show_page, is_page=True),
    )
    for path in (route.path, *route.aliases)
}
ALIASES = tuple((path, route.path) for path, route in ROUTES.items() if path != route.path)
