"""What each path answers."""

from __future__ import annotations

import contextlib
import time

from onepass.decider import Pending
from onepass.edge import framing, metrics, openapi, page
from onepass.edge.handler import Handler, Reply, Route, as_json
from onepass.errors import BadRequest, WorkerDead


def decide(handler: Handler, head: framing.Head) -> Reply:
    _require_ready(handler)
    record = handler.record
    with contextlib.ExitStack() as bodies:  # given back before this thread waits, perhaps for long
        pending = _submit(handler, head, bodies)
    record.num_rows, record.num_tokens = pending.num_rows, pending.num_tokens
    record.stages_ms |= pending.stages_ms
    _wait(handler, pending)
    answered = handler.decider.answer(pending)
    record.stages_ms |= answered.stages_ms
    total_ms = (time.monotonic() - record.started) * 1e3
    timing = ", ".join([f"{stage};dur={ms:.2f}" for stage, ms in record.stages_ms.items()])
    return Reply(answered.body, headers={"Server-Timing": f"{timing}, total;dur={total_ms:.2f}"})


def _submit(handler: Handler, head: framing.Head, bodies: contextlib.ExitStack) -> Pending:
    encoding = framing.body_encoding(head.headers)
    server = handler.server
    server.hold_body(head.length or 0, bodies)
    body = handler.stream.read_body(head)
    handler.close_connection = not head.keeps_alive
    if head.length is None:
        server.hold_body(len(body), bodies)
    content = framing.decompress(body, encoding)
    if content is not body:
        server.hold_body(len(content), bodies)
    handler.record.stages_ms["read"] = (time.monotonic() - handler.record.started) * 1e3
    return handler.decider.submit(content, head.headers.get("content-type", ""), handler.client)


def _wait(handler: Handler, pending: Pending) -> None:
    """Until it is answered, failed or expired. Raises BadRequest when the client left."""
    for deadline in (pending.deadline, None):
        if not handler.stream.wait(pending.future, deadline):
            handler.decider.cancel(pending)
            handler.close_connection = True
            handler.record.error = metrics.CLIENT_LEFT
            raise BadRequest("the client closed its side of the connection before the answer")
        if pending.future.done():
            return
        handler.decider.expire(pending)  # fails it, unless it has begun: then it is waited for


def _require_ready(handler: Handler) -> None:
    error = handler.decider.why_not_ready()
    if error is not None:
        raise error


def list_models(handler: Handler, _: framing.Head) -> Reply:
    _require_ready(handler)
    return as_json(handler.decider.models())


def check_ready(handler: Handler, _: framing.Head) -> Reply:
    error, document = handler.decider.health()
    if error is None:
        return as_json(document)
    return as_json({**document, "detail": error.detail()}, error.status, error.headers())


def check_alive(handler: Handler, _: framing.Head) -> Reply:
    if handler.decider.dead.is_set():
        raise WorkerDead("the worker thread is dead; the process ends", retry_after_s=5)
    return as_json({"status": "alive"})


def show_metrics(handler: Handler, _: framing.Head) -> Reply:
    """Without a key, as the scrapers of the other probes; names no state, no question and no client."""
    return Reply(handler.server.metrics.render(), content_type=metrics.CONTENT_TYPE)


def show_openapi(_: Handler, __: framing.Head) -> Reply:
    return Reply(openapi.encoded(ALIASES))


def show_page(_: Handler, __: framing.Head) -> Reply:
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
