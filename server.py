"""HTTP over `decider.py`: routes, the key, CORS, start order, signals, shutdown. Bytes are `framing.py`'s business."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import framing
from config import Config, load_config
from decider import Decider, Pending
from errors import (
    ApiError,
    BadRequest,
    InternalError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    StartupError,
    Unauthorized,
    WorkerDead,
)
from listener import Count, Listener
from process import StopSignal, allow_many_files, set_up_logging

logger = logging.getLogger("server")  # not __name__: run as a program that would be "__main__"

MAX_HELD_BODY_BYTES = 256 << 20  # eight of the largest; without it every connection could hold 64 MiB
WRITE_GRACE_S = 2.0  # after the queue is done, handlers get this long to send what they have
EXIT_CONFIGURATION, EXIT_FAILURE = 2, 1
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PERCENT = re.compile(r"%([0-9A-Fa-f]{2})?")
UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"})
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})  # without a length it is unsure where these end
CORS_ALLOWED = re.compile(r"authorization|content-type|content-encoding|x-typesafe-.*|typesafe-danger-zone-images")
CORS_EXPOSED = "x-typesafe-request-id, retry-after, retry-after-ms"


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(slots=True)
class Record:
    """What is known of one request so far, for its log line. Owned by its handler's thread."""

    request_id: str
    started: float
    client_id: str = "-"
    method: str = "-"
    route: str = "-"
    num_rows: int = 0
    num_tokens: int = 0
    queue_ms: float = 0.0
    model_ms: float = 0.0
    error: str = "-"


def as_json(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return Reply(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(), status, headers or {})


def as_reply(error: ApiError) -> Reply:
    return Reply(error.body(), error.status, error.headers())


def parse_path(target: str) -> str:
    """The path a request-target names: no query, no trailing or double slash, `%68` read as `h`. Raises BadRequest."""
    if not target.startswith("/"):
        if not re.match(r"https?://", target, re.IGNORECASE):
            raise BadRequest("the request target must be a path or an http URL")
        try:
            target = urlsplit(target).path or "/"
        except ValueError:
            raise BadRequest("the request target is not a valid URL") from None
    path = re.split(r"[?#]", target, maxsplit=1)[0]
    if "%" in path:
        path = PERCENT.sub(_decode_percent, path)
    return re.sub(r"/+", "/", path).rstrip("/") or "/"


def _decode_percent(match: re.Match[str]) -> str:
    if match[1] is None:
        raise BadRequest("% in a path must be followed by two hexadecimal digits")
    char = chr(int(match[1], 16))
    return char if UNRESERVED.fullmatch(char) else match[0]  # %2F is not a slash, %00 no end


def is_authorized(header: str, keys: Sequence[bytes]) -> bool:
    """Whether `Authorization` carries one of the keys; compared as bytes, in a time that does not tell which.

    Without keys whatever it carries is fine: users of the SDK then send a dummy."""
    if not keys:
        return True
    scheme, _, token = header.partition(" ")
    given = token.strip(" ").encode("latin-1")
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches) and scheme.lower() == "bearer"


class Handler(BaseHTTPRequestHandler):
    """One connection, on its own thread: requests one after the other, each answered by one send.

    Of the base class the loop over `handle_one_request` is used; its parser, its buffers and its replies are not.
    """

    server: HttpServer

    def setup(self) -> None:
        self.config = self.server.config
        self.decider = self.server.decider
        self.connection = self.request
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = framing.Stream(self.connection, send_timeout_s=self.config.read_timeout_s)

    def finish(self) -> None:
        self.stream.close()

    def handle_one_request(self) -> None:
        self.close_connection = True  # until a whole request was read
        try:
            self.server.note_idle(self.connection)
            try:
                has_request = self.stream.wait_request(self.server.idle_timeout_s, self.config.read_timeout_s)
            finally:
                self.server.note_busy(self.connection)
            if not has_request:
                return
            self.server.requests.enter(sys.maxsize)
            try:
                self.head: framing.Head | None = None
                self.record = Record(f"req_{os.urandom(16).hex()}", time.monotonic())
                self._send(self._answer())
            finally:
                self.server.requests.leave()
            if self.close_connection:
                self.stream.linger()
        except framing.Disconnected:
            self.close_connection = True

    def _answer(self) -> Reply:
        """The border: whatever goes wrong in one request ends here as a reply. Only Disconnected passes."""
        try:
            raw_head = self.stream.read_head()
            self.record.method = "HEAD" if raw_head.startswith(b"HEAD ") else "-"  # its refusal too has no body
            self.head = framing.parse_head(raw_head)
            return self._route(self.head)
        except ApiError as err:
            self.record.error = err.error_type
            return as_reply(err)
        except framing.Disconnected:
            raise
        except Exception:
            logger.exception("request: id=%s failed", self.record.request_id)
            self.close_connection = True
            return as_reply(InternalError("the server failed to answer this request; its log says why"))

    def _route(self, head: framing.Head) -> Reply:
        record = self.record
        record.method = head.method if head.method in KNOWN_METHODS else "other"
        client_id = head.headers.get("x-request-id", "")
        record.client_id = client_id if SANE_ID.fullmatch(client_id) else "-"
        if not head.has_body and (head.length == 0 or head.method not in METHODS_WITH_BODY):
            self.close_connection = not head.keeps_alive
        if head.method == "OPTIONS" and head.target == "*":
            return as_json({}, headers={"Allow": "GET, HEAD, POST, OPTIONS"})
        route = ROUTES.get(parse_path(head.target))
        if route is None:
            raise NotFound
        record.route = route.path
        if head.method == "OPTIONS":
            return as_json({}, headers={"Allow": ", ".join(route.methods), **self._preflight(head, route)})
        if head.method not in route.methods:
            raise MethodNotAllowed(route.methods)
        if route.needs_key and not is_authorized(head.headers.get("authorization", ""), self.server.keys):
            raise Unauthorized("the API key is missing or wrong; send it as: Authorization: Bearer KEY")
        return route.answer(self, head)

    def _send(self, reply: Reply) -> None:
        record = self.record
        if self.server.is_stopping:
            self.close_connection = True
        headers = {
            "Content-Type": reply.content_type,
            "x-typesafe-request-id": record.request_id,
            "Connection": "close" if self.close_connection else "keep-alive",
            **reply.headers,
        }
        if self.server.origins:
            headers |= self._cors()
        is_head = record.method == "HEAD"
        try:
            self.stream.send(framing.render_response(reply.status, headers, reply.body, is_head=is_head))
        finally:
            logger.log(
                logging.DEBUG if record.route in PROBED_ROUTES else logging.INFO,
                "request: id=%s client_id=%s method=%s route=%s status=%d rows=%d tokens=%d"
                " queue_ms=%.1f model_ms=%.1f total_ms=%.1f error=%s",
                record.request_id,
                record.client_id,
                record.method,
                record.route,
                reply.status,
                record.num_rows,
                record.num_tokens,
                record.queue_ms,
                record.model_ms,
                (time.monotonic() - record.started) * 1e3,
                record.error,
            )

    def _cors(self) -> dict[str, str]:
        origin = self.head.headers.get("origin", "") if self.head else ""
        if "*" in self.server.origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": CORS_EXPOSED}
        if origin not in self.server.origins:
            return {"Vary": "Origin"}
        exposed = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": CORS_EXPOSED}
        return {**exposed, "Vary": "Origin"}

    def _preflight(self, head: framing.Head, route: Route) -> dict[str, str]:
        origin = head.headers.get("origin")
        if origin is None or not ({"*", origin} & self.server.origins):
            return {}
        asked = [name.strip().lower() for name in head.headers.get("access-control-request-headers", "").split(",")]
        allowed = [name for name in asked if CORS_ALLOWED.fullmatch(name)] or ["authorization", "content-type"]
        return {
            "Access-Control-Allow-Methods": ", ".join(route.methods),
            "Access-Control-Allow-Headers": ", ".join(allowed),
            "Access-Control-Max-Age": "600",
        }

    def _require_ready(self) -> None:
        error = self.decider.unready()
        if error is not None:
            raise error

    def decide(self, head: framing.Head) -> Reply:
        self._require_ready()
        record = self.record
        with contextlib.ExitStack() as bodies:  # given back before this thread waits, perhaps for long
            pending = self._submit(head, bodies)
        record.num_rows, record.num_tokens = pending.num_rows, pending.num_tokens
        self._wait(pending)
        answered = self.decider.answer(pending)
        record.queue_ms, record.model_ms = answered.queue_ms, answered.model_ms
        total_ms = (time.monotonic() - record.started) * 1e3
        timing = f"queue;dur={answered.queue_ms:.2f}, model;dur={answered.model_ms:.2f}, total;dur={total_ms:.2f}"
        return Reply(answered.body, headers={"Server-Timing": timing})

    def _submit(self, head: framing.Head, bodies: contextlib.ExitStack) -> Pending:
        encoding = framing.body_encoding(head.headers)
        self._hold(head.length or 0, bodies)
        body = self.stream.read_body(head)
        self.close_connection = not head.keeps_alive
        if head.length is None:
            self._hold(len(body), bodies)
        content = framing.decompress(body, encoding)
        if content is not body:
            self._hold(len(content), bodies)
        return self.decider.submit(content, head.headers.get("content-type", ""))

    def _hold(self, num_bytes: int, bodies: contextlib.ExitStack) -> None:
        """Count a body among those in memory until `bodies` closes. Raises Overloaded if they are too many."""
        num_bytes = min(num_bytes, framing.MAX_BODY_BYTES)
        if not self.server.body_bytes.enter(MAX_HELD_BODY_BYTES, num_bytes):
            raise Overloaded("too many large requests arrive at once", retry_after_s=1)
        bodies.callback(self.server.body_bytes.leave, num_bytes)

    def _wait(self, pending: Pending) -> None:
        """Until it is answered, failed or expired. Raises BadRequest when the client left."""
        for deadline in (pending.deadline, None):
            if not self.stream.wait(pending.future, deadline):
                self.decider.cancel(pending)
                self.close_connection = True
                raise BadRequest("the client closed its side of the connection before the answer")
            if pending.future.done():
                return
            self.decider.expire(pending)  # fails it, unless it has begun: then it is waited for

    def list_models(self, _: framing.Head) -> Reply:
        self._require_ready()
        return as_json(self.decider.models())

    def check_ready(self, _: framing.Head) -> Reply:
        error, document = self.decider.health()
        if error is None:
            return as_json(document)
        return as_json({**document, "detail": error.detail()}, error.status, error.headers())

    def check_alive(self, _: framing.Head) -> Reply:
        if self.decider.dead.is_set():
            raise WorkerDead("the worker thread is dead; the process ends", retry_after_s=5)
        return as_json({"status": "alive"})


@dataclass(frozen=True, slots=True)
class Route:
    """What one path answers to one method. HEAD goes where GET does, OPTIONS everywhere."""

    path: str  # the name in the log, whichever alias was called
    method: str
    answer: Callable[[Handler, framing.Head], Reply]
    needs_key: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD", "OPTIONS") if self.method == "GET" else (self.method, "OPTIONS")


PROBED_ROUTES = frozenset({"/health", "/livez"})  # called every few seconds for ever: logged with --verbose only
ROUTES: dict[str, Route] = {
    path: route
    for route in (
        Route("/v1/systemone", "POST", Handler.decide, needs_key=True, aliases=("/systemone", "/v1/v1/systemone")),
        Route("/v1/models", "GET", Handler.list_models, needs_key=True, aliases=("/models", "/v1/v1/models")),
        Route("/health", "GET", Handler.check_ready, aliases=("/healthz", "/readyz")),
        Route("/livez", "GET", Handler.check_alive),
    )
    for path in (route.path, *route.aliases)
}


class HttpServer(Listener):
    """A listener and what its handlers share."""

    def __init__(self, config: Config, decider: Decider) -> None:
        """Binds and listens. Raises StartupError."""
        self.decider = decider
        self.idle_timeout_s = config.idle_timeout_s
        self.keys = tuple(key.encode() for key in config.api_keys)
        self.origins = frozenset(origin.strip() for origin in config.allowed_origins.split(",") if origin.strip())
        self.requests = Count()  # from a request's first byte to the end of its answer
        self.body_bytes = Count()  # request bodies in memory, as sent and decompressed
        self.is_stopping = False
        super().__init__(config, Handler)


def announce(server: HttpServer) -> None:
    server.decider.ready.wait()
    facts = server.decider.health()[1]
    said = " ".join(
        f"{key}={facts.get(key)}" for key in ("backend", "device", "dtype", "kernels", "encoding", "revision")
    )
    logger.info("serving %s at %s: %s", facts.get("model"), server.url, said)


def watch(decider: Decider, stop: StopSignal) -> None:
    decider.dead.wait()
    stop.give()


def shut_down(server: HttpServer) -> int:
    """Finish what is queued, or report why the worker died. Returns the exit code."""
    decider = server.decider
    server.is_stopping = True
    if not decider.dead.is_set():
        logger.info("shutting down: new work is refused, queued work has %.1f s", server.config.drain_s)
        is_drained = decider.drain(server.config.drain_s)
        logger.info("shutting down: %s", "all work is finished" if is_drained else "some work was not finished")
    server.requests.wait_none(WRITE_GRACE_S)
    if not decider.dead.is_set():
        return 0
    if isinstance(decider.failure, StartupError):
        sys.stderr.write(f"onepass: {decider.failure}\n")
    else:  # its traceback is in the log already
        logger.error("the worker died of %s; the process ends", type(decider.failure).__name__)
    return EXIT_FAILURE


def main(argv: Sequence[str], make_decider: Callable[[Config], Decider] = Decider) -> int:
    """Run until a signal or the worker's end. Returns the exit code; does not return while the worker is at work."""
    stop = StopSignal()
    exit_code = EXIT_CONFIGURATION
    try:
        config = load_config(argv)
        set_up_logging(is_verbose=config.verbose)
        allow_many_files()
        decider = make_decider(config)
        exit_code = EXIT_FAILURE
        server = HttpServer(config, decider)
    except StartupError as err:
        sys.stderr.write(f"onepass: {err}\n")
        return exit_code
    asked = f"backend={config.backend} device={config.device} dtype={config.dtype}"
    logger.info("listening at %s; loading %s: %s", server.url, config.served_name or config.model, asked)
    if not (config.api_keys or config.host in ("127.0.0.1", "::1", "localhost")):
        logger.warning("anyone who reaches %s may use this server: no API key is set", server.url)
    threading.Thread(target=server.serve_forever, name="accept", daemon=True).start()
    threading.Thread(target=watch, args=(decider, stop), name="watch", daemon=True).start()
    threading.Thread(target=announce, args=(server,), name="announce", daemon=True).start()
    decider.start()
    stop.wait()
    exit_code = shut_down(server)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)  # a worker inside a C++ call would abort the interpreter's own way out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
