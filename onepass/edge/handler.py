"""One connection: requests in, each answered by one send, logged and counted. What the paths mean is not known here."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from onepass.config import Config
from onepass.decider import Decider
from onepass.edge import framing
from onepass.edge.access import Access
from onepass.edge.listener import InFlight, Listener
from onepass.edge.metrics import NONE, OTHER, Metrics, Record
from onepass.edge.stream import Disconnected, Stream
from onepass.errors import ApiError, BadRequest, InternalError, MethodNotAllowed, NotFound, Overloaded, ShuttingDown

logger = logging.getLogger("server")

MAX_HELD_BODY_BYTES = 256 << 20  # eight of the largest; without it every connection could hold 64 MiB
SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PERCENT = re.compile(r"%([0-9A-Fa-f]{2})?")
UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"})
METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})  # without a length it is unsure where these end


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """A route says what one path answers to one method. HEAD is allowed with GET, and OPTIONS is allowed everywhere."""

    path: str  # The log and the metrics use this name, whichever alias was called.
    method: str
    answer: Callable[[Handler, framing.Head], Reply]
    needs_key: bool = False
    aliases: tuple[str, ...] = ()
    is_page: bool = False  # The route is for browsers only.
    is_probed: bool = False  # It is called every few seconds, so it is logged with --verbose only.

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD", "OPTIONS") if self.method == "GET" else (self.method, "OPTIONS")


def as_json(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(), status, headers or {})


def as_reply(error: ApiError) -> Reply:
    return Reply(error.body(), error.status, error.headers())


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
                self.route: Route | None = None
                self.client = 0  # the number of its key
                self.record = Record(f"req_{os.urandom(16).hex()}", time.monotonic())
                self._send(self._answer())
            finally:
                self.server.requests.leave()
            if self.close_connection:
                self.stream.linger()
        except Disconnected:
            self.close_connection = True

    def _answer(self) -> Reply:
        """The border: whatever goes wrong in one request ends here as a reply. Only Disconnected passes."""
        try:
            self.head = framing.parse_head(self._read_head())
            return self._route(self.head)
        except ApiError as err:
            if self.record.error == NONE:
                self.record.error = err.error_type
            return as_reply(err)
        except Disconnected:
            raise
        except Exception:
            logger.exception("request failed", extra={"fields": {"id": self.record.request_id}})
            self.close_connection = True
            self.record.error = InternalError.error_type
            return as_reply(InternalError("the server failed to answer this request; its log says why"))

    def _read_head(self) -> bytes:
        raw_head = b""
        try:
            raw_head = self.stream.read_head()
        finally:
            if (raw_head or self.stream.peek(5)).startswith(b"HEAD "):
                self.record.method = "HEAD"  # its refusal too has no body
        return raw_head

    def _route(self, head: framing.Head) -> Reply:
        record, access = self.record, self.server.access
        record.method = head.method if head.method in KNOWN_METHODS else OTHER
        client_id = head.headers.get("x-request-id", "")
        record.client_id = client_id if SANE_ID.fullmatch(client_id) else NONE
        if not head.has_body and (head.length == 0 or head.method not in METHODS_WITH_BODY):
            self.close_connection = not head.keeps_alive
        if head.method == "OPTIONS" and head.target == "*":
            return as_json({}, headers={"Allow": "GET, HEAD, POST, OPTIONS"})
        self.route = route = self.server.routes.get(parse_path(head.target))
        if route is None:
            raise NotFound
        record.route = route.path
        if head.method == "OPTIONS":
            allowed = {"Allow": ", ".join(route.methods)}
            return as_json({}, headers=allowed | access.preflight_headers(head, route.methods))
        if head.method not in route.methods:
            raise MethodNotAllowed(route.methods)
        access.require_known_name(head, is_page=route.is_page)
        if route.needs_key:
            self.client = access.require_key(head)
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
            **self.server.access.cors_headers(self.head),
        }
        response = framing.render_response(reply.status, headers, reply.body, is_head=record.method == "HEAD")
        record.status = reply.status
        self.server.metrics.count(record)
        started = time.monotonic()
        try:
            self.stream.send(response)
        finally:
            ended = time.monotonic()
            self.server.metrics.count_write(record, ended - started)
            record.stages_ms["total"] = (ended - record.started) * 1e3
            level = logging.DEBUG if self.route and self.route.is_probed else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(level, "request", extra={"fields": record.fields()})


class HttpServer(Listener):
    """This is a listener, and what its handlers share."""

    def __init__(self, config: Config, decider: Decider, routes: Mapping[str, Route]) -> None:
        """Bind and listen. `routes` maps each path, and each alias, to its route. Raises StartupError."""
        self.decider = decider
        self.routes = routes
        self.access = Access(config)
        self.metrics = Metrics(self.read_facts)
        self.idle_timeout_s = config.idle_timeout_s
        self.requests = InFlight()  # from a request's first byte to the end of its answer
        self.streams: set[Stream] = set()  # of open connections
        self._body_bytes = InFlight()  # request bodies in memory, as sent and decompressed
        self.is_stopping = False
        super().__init__(config, Handler)

    def refusal_headers(self) -> dict[str, str]:
        return self.access.cors_headers(None)

    def stop_receiving(self) -> None:
        """End idle connections. Requests that have not arrived completely get the error `ShuttingDown`."""
        for stream in self.streams.copy():
            stream.stop_receiving(ShuttingDown("the server is shutting down", retry_after_s=1))

    def read_facts(self) -> dict[str, Any]:
        """What `/health` says, and what the listener knows."""
        error, facts = self.decider.health()
        return {
            **facts,
            "ready": error is None,
            "open_connections": self.connections.value,
            "refused_connections": self.num_refused,
            "threads_alive": threading.active_count(),
        }

    def hold_body(self, num_bytes: int, bodies: contextlib.ExitStack) -> None:
        """Count a body among those in memory until `bodies` closes. Raises Overloaded if they are too many."""
        num_bytes = min(num_bytes, framing.MAX_BODY_BYTES)
        if not self._body_bytes.enter(MAX_HELD_BODY_BYTES, num_bytes):
            raise Overloaded("too many large requests arrive at once", retry_after_s=1)
        bodies.callback(self._body_bytes.leave, num_bytes)
