"""Accepts connections: binds without resolving names, counts them, refuses what is too many; knows no routes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import socketserver
import sys
import threading
import time
from collections import OrderedDict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import framing
from config import Config
from errors import Overloaded, StartupError

logger = logging.getLogger(__name__)

REFUSED_KEPT = 64  # refused connections held open for a moment, so that their clients can read why


class Count:
    """How many (or how much) is inside, and a wait for none. Any thread."""

    def __init__(self) -> None:
        self._value = 0
        self._changed = threading.Condition()

    def enter(self, limit: int, amount: int = 1) -> bool:
        """False, and nothing is counted, if it would be more than `limit`."""
        with self._changed:
            has_room = self._value + amount <= limit
            self._value += amount * has_room
            return has_room

    def leave(self, amount: int = 1) -> None:
        with self._changed:
            self._value -= amount
            if self._value == 0:
                self._changed.notify_all()

    @property
    def value(self) -> int:
        return self._value

    def wait_none(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._value == 0, timeout_s)


class Listener(ThreadingHTTPServer):
    """Accepts on one thread, at most `max_connections` at a time; each connection gets a thread of its own."""

    daemon_threads = True  # an idle keep-alive connection must not hold up the exit
    request_queue_size = 1024  # the default of 5 drops connections in a burst; the kernel caps it

    def __init__(self, config: Config, handler: type[BaseHTTPRequestHandler]) -> None:
        """Binds and listens. Raises StartupError."""
        self.config = config
        self.connections = Count()
        self.num_refused = 0  # connections; changed by the accepting thread only
        self._idle: OrderedDict[socket.socket, None] = OrderedDict()  # connections without a request, longest first
        self._idle_lock = threading.Lock()
        self._refused: deque[tuple[float, socket.socket]] = deque()  # accepting thread only
        self._spare_fd = os.open(os.devnull, os.O_RDONLY)  # given up to accept, and refuse, when none is left
        self.address_family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            super().__init__((config.host, config.port), handler)
        except OSError as err:
            reason = err.strerror or str(err)
            raise StartupError(f"cannot listen on {config.host} port {config.port}: {reason}") from err

    def server_bind(self) -> None:
        """Without HTTPServer's getfqdn(): a dead resolver would hold up the start for its whole timeout."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.config.host, self.server_address[1]

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.server_port}"

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as err:
            if err.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        os.close(self._spare_fd)  # left unaccepted, the connection would make the accepting thread spin
        try:
            self._refuse(super().get_request()[0], keep=False)
        finally:
            self._spare_fd = os.open(os.devnull, os.O_RDONLY)
        raise OSError(errno.EMFILE, "no file descriptor is left for a connection")

    def process_request(self, request: Any, client_address: Any) -> None:
        has_place = self.connections.enter(self.config.max_connections)
        if not has_place and not (self._close_idle() and self.connections.enter(sys.maxsize)):
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self.connections.leave()
            self._refuse(request)

    def note_idle(self, connection: socket.socket) -> None:
        """The connection waits for a request: it may be closed to make room for another."""
        with self._idle_lock:
            self._idle[connection] = None

    def note_busy(self, connection: socket.socket) -> None:
        with self._idle_lock:
            self._idle.pop(connection, None)

    def _close_idle(self) -> bool:
        """End the connection that has been without a request for longest; its thread then finds it closed."""
        with self._idle_lock:
            if not self._idle:
                return False
            connection, _ = self._idle.popitem(last=False)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.leave()

    def _refuse(self, request: socket.socket, *, keep: bool = True) -> None:
        """Answer 503 without a thread: one send into an empty buffer, which cannot block."""
        self.num_refused += 1
        error = Overloaded("too many connections are open", retry_after_s=1)
        request_id = f"req_{os.urandom(16).hex()}"
        headers = {"Content-Type": "application/json", "x-typesafe-request-id": request_id, "Connection": "close"}
        try:
            request.setblocking(False)
            request.send(framing.render_response(error.status, headers | error.headers(), error.body(), is_head=False))
            request.shutdown(socket.SHUT_WR)
        except OSError:
            keep = False
        fields = {"id": request_id, "status": error.status, "error": error.error_type, "reason": "connections"}
        logger.info("request", extra={"fields": fields})
        if keep:
            self._refused.append((time.monotonic(), request))
        else:
            request.close()
        if len(self._refused) > REFUSED_KEPT:
            self._refused.popleft()[1].close()

    def service_actions(self) -> None:
        while self._refused and time.monotonic() - self._refused[0][0] > framing.LINGER_S:
            self._refused.popleft()[1].close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # reset before its first byte
            logger.exception("connection: failed")

    def server_close(self) -> None:
        super().server_close()
        os.close(self._spare_fd)
        while self._refused:
            self._refused.popleft()[1].close()
