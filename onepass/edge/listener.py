"""This module accepts connections, by TCP or a Unix socket, with or without TLS, and refuses those that are too many.

It knows nothing of routes.
"""

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

REFUSED_KEPT = 64  # This many refused connections stay open for a moment, so that their clients can read the reason.


class InFlight:
    """This counts how many (or how much) is inside, and can wait until it is 0. Any thread may use it."""

    def __init__(self) -> None:
        self._value = 0
        self._changed = threading.Condition()

    def enter(self, limit: int, amount: int = 1) -> bool:
        """Count `amount` and return True. If the sum would exceed `limit`, count nothing and return False."""
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
    """A listener accepts at most `max_connections` at a time on one thread. Each connection gets its own thread."""

    daemon_threads = True  # An idle keep-alive connection must not delay the exit.
    request_queue_size = 1024  # The default of 5 drops connections in a burst. The kernel has its own limit.

    def __init__(self, config: Config, handler: type[BaseHTTPRequestHandler]) -> None:
        """Bind and listen. Raises StartupError."""
        self.config = config
        self.connections = InFlight()
        self.num_refused = 0  # It counts refused connections. Only the accepting thread changes it.
        # These connections have no request. The one that has been idle for longest comes first.
        self._idle: OrderedDict[socket.socket, None] = OrderedDict()
        self._idle_lock = threading.Lock()
        self._refused: deque[tuple[float, socket.socket]] = deque()  # Only the accepting thread uses it.
        # When no file descriptor is left, this one is closed, so that a connection can be accepted and refused.
        self._spare_fd = os.open(os.devnull, os.O_RDONLY)
        self._uds_id: tuple[int, int] | None = None  # This is (device, inode) of our Unix socket.
        self._tls = make_tls_context(config)
        if config.uds:
            self.address_family = socket.AF_UNIX
            remove_stale_socket(config.uds)
        else:
            self.address_family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            super().__init__(config.uds or (config.host, config.port), handler)  # type: ignore[arg-type] # It may be a path.
        except OSError as err:
            where = config.uds or f"{config.host} port {config.port}"
            raise StartupError(f"cannot listen on {where}: {err.strerror or err}") from err

    def server_bind(self) -> None:
        """Bind without HTTPServer's getfqdn(), which would delay the start by a dead resolver's whole timeout."""
        config = self.config
        if not config.uds:
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = config.host, self.server_address[1]
            return
        umask = os.umask(0o777 & ~int(config.uds_mode, 8))  # With a later chmod, it would be open for a moment.
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
        """Remove our Unix socket, if it is still ours."""
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
        os.close(self._spare_fd)  # If the connection were not accepted, the accepting thread would spin.
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
        except RuntimeError:  # No thread could be started.
            self.connections.leave()
            self._refuse(request)

    def note_idle(self, connection: socket.socket) -> None:
        """Note that the connection waits for a request. It may then be closed to make room for another."""
        with self._idle_lock:
            self._idle[connection] = None

    def note_busy(self, connection: socket.socket) -> None:
        with self._idle_lock:
            self._idle.pop(connection, None)

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for longest, and return whether there was one.

        The connection's thread then finds it closed.
        """
        with self._idle_lock:
            if not self._idle:
                return False
            connection, _ = self._idle.popitem(last=False)
            with contextlib.suppress(OSError):
                # The shutdown of an SSLSocket would change objects that the connection's thread uses.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
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
        """Do the TLS handshake on the connection's own thread, within the time that a request has.

        The connection counts as idle during the handshake.
        """
        self.note_idle(connection)
        try:
            connection.settimeout(self.config.read_timeout_s)
            connection.do_handshake()
        finally:
            self.note_busy(connection)

    def refusal_headers(self) -> dict[str, str]:
        """Return the headers of an answer to a connection that is refused before anything is read."""
        return {}

    def _refuse(self, request: socket.socket, *, keep: bool = True) -> None:
        """Answer 503 without a thread. One send into an empty buffer cannot block.

        A TLS connection is closed without an answer, since the handshake would take a millisecond of a busy server.
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
        if not isinstance(sys.exc_info()[1], OSError):  # An OSError is a connection that was reset.
            logger.exception("connection: failed")

    def stop_accepting(self) -> None:
        """Accept the connections that already wait, then stop listening. The accepting thread must not call this."""
        self.shutdown()
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):  # A BlockingIOError means that no connection waits.
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
    """Return the TLS context, or None without a certificate. Raises StartupError, which names the wrong file."""
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
    try:  # Without the callback, an encrypted key would ask for its password on the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key or None, password=lambda: "")
    except (OSError, ValueError) as err:  # An SSLError is an OSError.
        wrong = f"--tls-cert {config.tls_cert}" + (f" --tls-key {config.tls_key}" if config.tls_key else "")
        reason = getattr(err, "reason", None) or err
        raise StartupError(
            f"{wrong}: these are not a certificate and its own key, not encrypted, in PEM: {reason}"
        ) from None
    return context


def remove_stale_socket(path: str) -> None:
    """Remove a Unix socket on which no process listens, since a killed process left it. Raises StartupError."""
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
