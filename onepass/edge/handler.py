"""One connection: requests in, each answered by one send, logged and counted. What the paths mean is not known here."""

from __future__ import annotations

import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from onepass.config import Config
from onepass.decider import Decider
from onepass.edge import framing
from onepass.edge.access import Access
from onepass.edge.exchange import Exchange, Reply, as_json, as_reply
from onepass.edge.listener import InFlight, Listener
from onepass.edge.metrics import NONE, OTHER, Metrics
from onepass.edge.stream import Disconnected, Stream
from onepass.errors import ApiError, BadRequest, InternalError, MethodNotAllowed, NotFound, ShuttingDown
from onepass.status import ServerStatus

logger = logging.getLogger("server")

SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PERCENT = re.compile(r"%([0-9A-Fa-f]{2})?")
UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"})
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})  # Without a length, the end of such a request is unclear.


@dataclass(frozen=True, slots=True)
class Route:
    """A route says what one path answers to one method. HEAD is allowed with GET, and OPTIONS is allowed everywhere."""

    path: str  # The log and the metrics use this name, whichever alias was called.
    method: str
    answer: Callable[[Exchange], Reply]
    needs_key: bool = False
    aliases: tuple[str, ...] = ()
    is_page: bool = False  # The route is for browsers only.
    is_probed: bool = False  # It is called every few seconds, so it is logged with --verbose only.

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD", "OPTIONS") if self.method == "GET" else (self.method, "OPTIONS")


def parse_path(target: str) -> str:
    """Return the path that a request target names, without its query and without trailing or double slashes.

    `%68` is read as `h`. Raises BadRequest.
    """
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
    return char if UNRESERVED.fullmatch(char) else match[0]  # %2F is not a slash, and %00 is not an end.


class Handler(BaseHTTPRequestHandler):
    """One connection, on its own thread: requests one after the other, each answered by one send.

    Of the base class the loop over `handle_one_request` is used; its parser, its buffers and its replies are not.
    """

    server: HttpServer

    def setup(self) -> None:
        self.config = self.server.config
        self.decider = self.server.decider
        self.connection = self.request
        if self.connection.family != socket.AF_UNIX:
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = Stream(self.connection, send_timeout_s=self.config.read_timeout_s)
        self.server.streams.add(self.stream)

    def finish(self) -> None:
        self.server.streams.discard(self.stream)
        self.stream.close()

    def handle_one_request(self) -> None:
        self.close_connection = True
        try:
            self.server.note_idle(self.connection)
            try:
                has_request = self.stream.wait_request(self.server.idle_timeout_s, self.config.read_timeout_s)
            finally:
                self.server.note_busy(self.connection)
            if has_request:
                self._serve()
        except Disconnected:
            self.close_connection = True

    def _serve(self) -> None:
        """Answer the request whose first byte has come. Raises `Disconnected`."""
        server = self.server
        server.requests.enter(sys.maxsize)
        try:
            exchange = Exchange(self.stream, server.decider, server.metrics, server.body_bytes)
            self._send(exchange, self._answer(exchange))
        finally:
            server.requests.leave()
        self.close_connection = exchange.must_close
        if self.close_connection:
            self.stream.linger()

    def _answer(self, exchange: Exchange) -> Reply:
        """The border of a request: whatever goes wrong inside becomes a reply. Only `Disconnected` passes."""
        try:
            return self._route(exchange, exchange.read_head())
        except ApiError as err:
            exchange.record.error = err.error_type
            return as_reply(err)
        except Disconnected:
            raise
        except Exception:
            logger.exception("request failed", extra={"fields": {"id": exchange.record.request_id}})
            exchange.close()
            exchange.record.error = InternalError.error_type
            return as_reply(InternalError("the server failed to answer this request; its log says why"))

    def _route(self, exchange: Exchange, head: framing.Head) -> Reply:
        record, access = exchange.record, self.server.access
        record.method = head.method if head.method in KNOWN_METHODS else OTHER
        client_id = head.headers.get("x-request-id", "")
        record.client_id = client_id if SANE_ID.fullmatch(client_id) else NONE
        if not head.has_body and (head.length == 0 or head.method not in METHODS_WITH_BODY):
            exchange.note_read()
        if head.method == "OPTIONS" and head.target == "*":
            return as_json({}, headers={"Allow": "GET, HEAD, POST, OPTIONS"})
        route = self.server.routes.get(parse_path(head.target))
        if route is None:
            raise NotFound
        record.route, record.is_probe = route.path, route.is_probed
        if head.method == "OPTIONS":
            allowed = {"Allow": ", ".join(route.methods)}
            return as_json({}, headers=allowed | access.preflight_headers(head, route.methods))
        if head.method not in route.methods:
            raise MethodNotAllowed(route.methods)
        access.require_known_name(head, is_page=route.is_page)
        if route.needs_key:
            exchange.client = access.require_key(head)
        return route.answer(exchange)

    def _send(self, exchange: Exchange, reply: Reply) -> None:
        """Send, count and log the answer. Raises `Disconnected`."""
        record, metrics = exchange.record, self.server.metrics
        if self.server.is_stopping:
            exchange.close()
        headers = {
            "Content-Type": reply.content_type,
            "x-typesafe-request-id": record.request_id,
            "Connection": "close" if exchange.must_close else "keep-alive",
            **reply.headers,
            **self.server.access.cors_headers(exchange.head),
        }
        response = framing.render_response(reply.status, headers, reply.body, is_head=record.method == "HEAD")
        record.status = reply.status
        metrics.count(record)
        started = time.monotonic()
        try:
            self.stream.send(response)
        finally:
            ended = time.monotonic()
            metrics.count_write(record, ended - started)
            record.stages_ms["total"] = (ended - record.started) * 1e3
            level = logging.DEBUG if record.is_probe else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(level, "request", extra={"fields": record.fields()})


class HttpServer(Listener):
    """This is a listener, and what its handlers share."""

    def __init__(self, config: Config, decider: Decider, routes: Mapping[str, Route]) -> None:
        """Bind and listen. `routes` maps each path, and each alias, to its route. Raises StartupError."""
        self.decider = decider
        self.routes = routes
        self.access = Access(config)
        self.metrics = Metrics(self.read_status)
        self.idle_timeout_s = config.idle_timeout_s
        self.requests = InFlight()  # from a request's first byte to the end of its answer
        self.streams: set[Stream] = set()  # of open connections
        self.body_bytes = InFlight()  # request bodies in memory, as sent and decompressed
        self.is_stopping = False
        super().__init__(config, Handler)

    def refusal_headers(self) -> dict[str, str]:
        return self.access.cors_headers(None)

    def stop_receiving(self) -> None:
        """End idle connections. Requests that have not arrived completely get the error `ShuttingDown`."""
        for stream in self.streams.copy():
            stream.stop_receiving(ShuttingDown())

    def read_status(self) -> ServerStatus:
        """What the decider and the listener know of themselves now."""
        return ServerStatus(
            decider=self.decider.status(),
            open_connections=self.connections.value,
            refused_connections=self.num_refused,
            threads_alive=threading.active_count(),
        )
