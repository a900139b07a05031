"""Accepts connections, by TCP or a Unix socket, in the clear or by TLS; refuses what is too many; knows no routes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import socketserver
import ssl
import stat
import sys
import threading
import time
from collections import OrderedDict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from onepass.config import Config
from onepass.edge import framing
from onepass.edge.stream import LINGER_S
from onepass.errors import Overloaded, StartupError

logger = logging.getLogger(__name__)

REFUSED_KEPT = 64  # refused connections held open for a moment, so that their clients can read why


class InFlight:
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
        self.connections = InFlight()
        self.num_refused = 0  # connections; changed by the accepting thread only
        self._idle: OrderedDict[socket.socket, None] = OrderedDict()  # connections without a request, longest first
        self._idle_lock = threading.Lock()
        self._refused: deque[tuple[float, socket.socket]] = deque()  # accepting thread only
        self._spare_fd = os.open(os.devnull, os.O_RDONLY)  # given up to accept, and refuse, when none is left
        self._uds_id: tuple[int, int] | None = None  # device and inode of our Unix socket
        self._tls = make_tls_context(config)
        if config.uds:
            self.address_family = socket.AF_UNIX
            remove_stale_socket(config.uds)
        else:
            self.address_family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            super().__init__(config.uds or (config.host, config.port), handler)  # type: ignore[arg-type] # a path too
        except OSError as err:
            where = config.uds or f"{config.host} port {config.port}"
            raise StartupError(f"cannot listen on {where}: {err.strerror or err}") from err

    def server_bind(self) -> None:
        """Without HTTPServer's getfqdn(): a dead resolver would hold up the start for its whole timeout."""
        config = self.config
        if not config.uds:
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = config.host, self.server_address[1]
            return
        umask = os.umask(0o777 & ~int(config.uds_mode, 8))  # a chmod afterwards would leave it open for a moment
        try:
            socketserver.TCPServer.server_bind(self)
        finally:
            os.umask(umask)
        status = os.stat(config.uds)
        self._uds_id = (status.st_dev, status.st_ino)
        self.server_name, self.server_port = config.uds, 0

    @property
    def url(self) -> str:
        scheme = "https" if self._tls else "http"
        if self.config.uds:
            return f"{scheme}+unix:{self.config.uds}"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{scheme}://{host}:{self.server_port}"

    def remove_socket(self) -> None:
        """Take our Unix socket away, if it still is ours."""
        with contextlib.suppress(OSError):
            status = os.stat(self.config.uds)
            if (status.st_dev, status.st_ino) == self._uds_id:
                os.unlink(self.config.uds)

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
                socket.socket.shutdown(connection, socket.SHUT_RDWR)  # TLS's own would change what its thread uses
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self._tls is not None:
                request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                self._shake_hands(request)
            super().process_request_thread(request, client_address)
        except OSError as err:
            logger.debug("connection: no TLS: %s", getattr(err, "reason", None) or err.strerror or err)
            self.shutdown_request(request)
        finally:
            self.connections.leave()

    def _shake_hands(self, connection: ssl.SSLSocket) -> None:
        """On the connection's own thread, within the time that a request has; until then it counts as idle."""
        self.note_idle(connection)
        try:
            connection.settimeout(self.config.read_timeout_s)
            connection.do_handshake()
        finally:
            self.note_busy(connection)

    def refusal_headers(self) -> dict[str, str]:
        """Of answers to connections that are refused unread."""
        return {}

    def _refuse(self, request: socket.socket, *, keep: bool = True) -> None:
        """Answer 503 without a thread: one send into an empty buffer, which cannot block.

        In TLS it is closed unanswered: an answer needs a handshake, a millisecond of what there is too little of.
        """
        self.num_refused += 1
        error = Overloaded("too many connections are open", retry_after_s=1)
        request_id = f"req_{os.urandom(16).hex()}"
        headers = {"Content-Type": "application/json", "x-typesafe-request-id": request_id, "Connection": "close"}
        headers |= error.headers() | self.refusal_headers()
        try:
            request.setblocking(False)
            if self._tls is None:
                request.send(framing.render_response(error.status, headers, error.body(), is_head=False))
            request.shutdown(socket.SHUT_WR)
        except OSError:
            keep = False
        status = 0 if self._tls else error.status
        fields = {"id": request_id, "status": status, "error": error.error_type, "reason": "connections"}
        logger.info("request", extra={"fields": fields})
        if keep:
            self._refused.append((time.monotonic(), request))
        else:
            request.close()
        if len(self._refused) > REFUSED_KEPT:
            self._refused.popleft()[1].close()

    def service_actions(self) -> None:
        while self._refused and time.monotonic() - self._refused[0][0] > LINGER_S:
            self._refused.popleft()[1].close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # reset before its first byte
            logger.exception("connection: failed")

    def stop_accepting(self) -> None:
        """Take in who has connected, then listen no more. Any thread but the accepting one."""
        self.shutdown()
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):  # BlockingIOError: that was the last
            while True:
                self.process_request(*self.get_request())
        self.socket.close()

    def server_close(self) -> None:
        super().server_close()
        self.remove_socket()
        os.close(self._spare_fd)
        while self._refused:
            self._refused.popleft()[1].close()


def make_tls_context(config: Config) -> ssl.SSLContext | None:
    """Raises StartupError, which names the file that is wrong."""
    if not config.tls_cert:
        return None
    for flag, path in (("--tls-cert", config.tls_cert), ("--tls-key", config.tls_key)):
        try:
            if path:
                Path(path).read_bytes()
        except OSError as err:
            raise StartupError(f"{flag} {path} cannot be read: {err.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:  # without the callback an encrypted key would ask for its password on the terminal
        context.load_cert_chain(config.tls_cert, config.tls_key or None, password=lambda: "")
    except (OSError, ValueError) as err:  # SSLError is the former
        wrong = f"--tls-cert {config.tls_cert}" + (f" --tls-key {config.tls_key}" if config.tls_key else "")
        reason = getattr(err, "reason", None) or err
        raise StartupError(
            f"{wrong}: these are not a certificate and its own key, not encrypted, in PEM: {reason}"
        ) from None
    return context


def remove_stale_socket(path: str) -> None:
    """Make way for a Unix socket: one that nobody listens on is what a killed process left. Raises StartupError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as err:
        raise StartupError(f"cannot listen on {path}: {err.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"--uds {path} is there already and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as err:
            raise StartupError(f"cannot listen on {path}, which is there already: {err.strerror or err}") from None
    raise StartupError(f"cannot listen on {path}: another process does")
