"""This module owns the bytes of one connection: requests in by a deadline, and responses out, with or without TLS.

It knows nothing of routes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
from concurrent.futures import Future, wait
from time import monotonic
from typing import Any

from onepass.edge import framing
from onepass.edge.framing import (
    CHUNK_LINE,
    HEAD_END,
    MAX_CHUNK_LINE_BYTES,
    MAX_CHUNK_OVERHEAD_BYTES,
    MAX_HEAD_BYTES,
    Head,
    parse_fields,
    parse_request_line,
)
from onepass.errors import ApiError, BadRequest, HeadersTooLarge, LengthRequired, RequestTimeout, RequestTooLarge

RECEIVE_BYTES = 64 * 1024
# A refused client may continue to send for this long. An earlier close would reset the connection before the client
# reads the error.
LINGER_S = 2.0
MAX_LINGER_BYTES = 64 * 1024 * 1024  # This is twice the largest legal body.
# POLLRDHUP exists on Linux. Other systems report POLLHUP when the client closes.
GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Disconnected(Exception):
    """The client has left, or reads too slowly. Nobody is there to receive an error."""


class Bell:
    """A bell wakes a thread that polls `fd`. Any thread may ring; only the connection's own thread calls the rest."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        self._lock = threading.Lock()
        self._is_open = True

    def ring(self, _: object = None) -> None:
        with self._lock:  # A late ring must not write to a file descriptor that now belongs to another connection.
            if self._is_open:
                os.write(self._write_fd, b"\0")

    def hush(self) -> None:
        os.read(self.fd, 64)

    def close(self) -> None:
        with self._lock:
            self._is_open = False
            os.close(self.fd)
            os.close(self._write_fd)


class Stream:
    """A stream buffers the bytes of one connection. Only the connection's own thread uses it.

    A request has one deadline in all, not one for each read.
    """

    def __init__(self, sock: socket.socket, *, send_timeout_s: float) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._deadline = 0.0
        self._timeout_s = 0.0
        self._send_timeout_s = send_timeout_s
        self._bell: Bell | None = None
        self._is_receiving = False
        self._is_fresh = True  # No byte has arrived yet.
        self._stopped: ApiError | None = None
        # Kernel timeouts on a blocking socket need one system call for each read, and settimeout() needs three. TLS
        # cannot use them, since it would take such a timeout as a reason to try again.
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        if not self._is_tls:
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_s))

    def wait_request(self, idle_s: float, request_s: float) -> bool:
        """Wait for a request's first byte, and return whether one arrived. The whole request must then arrive within
        `request_s`."""
        self._is_receiving = True
        try:
            if not self._buffer:
                self._buffer += self._receive(RECEIVE_BYTES, idle_s)
            self._deadline = monotonic() + request_s
            # Old clients end a body with a line end (RFC 9112, section 2.2).
            while self._buffer and self._buffer[0] in b"\r\n":
                del self._buffer[0]
                if not self._buffer:
                    self._buffer += self._receive(RECEIVE_BYTES, self._deadline - monotonic())
        except (TimeoutError, Disconnected):  # The connection was idle for too long, or was reset.
            return False
        finally:
            self._is_receiving = False
        self._is_fresh = False
        return bool(self._buffer)

    def read_head(self) -> bytes:
        """Return the next head with its empty line. Raises an ApiError or Disconnected."""
        buffer = self._buffer
        searched, is_line_checked = 0, False
        while (match := HEAD_END.search(buffer, searched)) is None and len(buffer) <= MAX_HEAD_BYTES:
            line_end = -1 if is_line_checked else buffer.find(b"\n", searched)
            if line_end >= 0:  # Clients of HTTP/0.9 and other protocols wait for an answer after one line.
                parse_request_line(buffer[: line_end + 1].decode("latin-1"))
                is_line_checked = True
            searched = max(0, len(buffer) - 2)
            self._fill()
        if match is None or match.end() > MAX_HEAD_BYTES:
            raise HeadersTooLarge(f"the request head may hold {MAX_HEAD_BYTES} bytes")
        return self._cut(match.end())

    def peek(self, num_bytes: int) -> bytes:
        """Return those of the next `num_bytes` bytes that have already arrived."""
        return bytes(self._buffer[:num_bytes])

    def read_body(self, head: Head) -> bytes:
        """Return the body as it was sent, still compressed. Raises an ApiError or Disconnected."""
        if head.length is None and not head.is_chunked:
            raise LengthRequired("a body needs Content-Length or Transfer-Encoding: chunked")
        if head.length is not None and head.length > framing.MAX_BODY_BYTES:
            raise RequestTooLarge(f"at most {framing.MAX_BODY_BYTES} bytes are read")
        if head.expects_continue and not self._buffer:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._take_chunks() if head.length is None else self._take(head.length)

    def _take_chunks(self) -> bytes:
        """Read a chunked body (RFC 9112, section 7.1). Trailer fields are checked and dropped."""
        parts: list[bytes] = []
        room, overhead = framing.MAX_BODY_BYTES, MAX_CHUNK_OVERHEAD_BYTES
        while True:
            line = self._take_line(MAX_CHUNK_LINE_BYTES)
            match = CHUNK_LINE.fullmatch(line)
            if match is None:
                raise BadRequest("a chunk must start with its size in hexadecimal digits and CR LF")
            size = int(match[1], 16)
            room -= size
            overhead -= len(line) + 2
            if room < 0 or overhead < 0:
                raise RequestTooLarge(f"at most {framing.MAX_BODY_BYTES} bytes are read, in chunks of a sensible size")
            if size == 0:
                break
            parts.append(self._take(size))
            if self._take(2) != b"\r\n":
                raise BadRequest("a chunk must end in CR LF after as many bytes as its size says")
        trailers = b""
        while (line := self._take_line(MAX_HEAD_BYTES)) != b"\r\n":
            trailers += line
            if len(trailers) > MAX_HEAD_BYTES:
                raise HeadersTooLarge(f"the trailer fields may hold {MAX_HEAD_BYTES} bytes")
        parse_fields(trailers.decode("latin-1"))
        return b"".join(parts)

    def _take_line(self, max_bytes: int) -> bytes:
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > max_bytes:
                raise BadRequest(f"a line of the chunked body is longer than {max_bytes} bytes")
            self._fill()
        return self._cut(end + 1)

    def _take(self, num_bytes: int) -> bytes:
        if len(self._buffer) >= num_bytes:
            return self._cut(num_bytes)
        parts = [bytes(self._buffer)]
        missing = num_bytes - len(self._buffer)
        self._buffer.clear()
        while missing:
            data = self._receive_some(min(missing, RECEIVE_BYTES))
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _cut(self, num_bytes: int) -> bytes:
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    def _fill(self) -> None:
        self._buffer += self._receive_some(RECEIVE_BYTES)

    def _receive_some(self, num_bytes: int) -> bytes:
        self._is_receiving = True
        try:
            data = self._receive(num_bytes, self._deadline - monotonic()) if self._stopped is None else b""
        except TimeoutError:
            raise RequestTimeout("the request did not arrive in time") from None
        finally:
            self._is_receiving = False
        if not data:
            raise self._stopped or BadRequest("the connection was closed before the request was complete")
        return data

    def stop_receiving(self, error: ApiError) -> None:
        """Make every wait for the rest of a request raise `error`, now and later. An idle connection ends. Any thread
        may call this.

        A new connection, from which nothing has arrived yet, may still send its request."""
        self._stopped = error
        if self._is_receiving and not self._is_fresh:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RD)  # Bytes that have arrived are still read.

    def _receive(self, num_bytes: int, timeout_s: float) -> bytes:
        """Receive up to `num_bytes`, and no byte at the end of the stream. Raises TimeoutError or Disconnected."""
        if timeout_s <= 0:
            raise TimeoutError
        try:
            self._set_timeout(timeout_s)
            return self._socket.recv(num_bytes)
        except BlockingIOError:
            raise TimeoutError from None
        except TimeoutError:
            raise
        except OSError as err:
            raise Disconnected from err

    def _set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of receiving. With TLS it is the timeout of sending too."""
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        if self._is_tls:
            self._socket.settimeout(timeout_s)
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises Disconnected."""
        try:
            if self._is_tls:
                self._set_timeout(self._send_timeout_s)
            sent = self._socket.send(data)
            if sent == len(data):
                return
            deadline = monotonic() + self._send_timeout_s
            rest = memoryview(data)[sent:]
            while rest and monotonic() < deadline:
                rest = rest[self._socket.send(rest) :]
        except OSError as err:
            raise Disconnected from err
        if rest:
            raise Disconnected

    def wait(self, future: Future[Any], deadline: float | None) -> bool:
        """Wait until `future` is done or the deadline has passed. Return False if the client closes its side first."""
        if future.done():
            return True
        try:
            self._bell = self._bell or Bell()
        except OSError:  # No file descriptor is left, so the thread waits without watching the client.
            wait([future], None if deadline is None else max(0.0, deadline - monotonic()))
            return True
        future.add_done_callback(self._bell.ring)
        poller = select.poll()
        poller.register(self._bell.fd, select.POLLIN)
        poller.register(self._socket, GONE)  # POLLIN is left out, since a pipelined request has to wait for its turn.
        while not future.done():
            events = dict(poller.poll(None if deadline is None else max(0.0, deadline - monotonic()) * 1000))
            if not events:
                return True
            if self._bell.fd not in events:
                return future.done()
            self._bell.hush()  # The ring may be a late one for the last request, so the loop asks the future again.
        return True

    def linger(self) -> None:
        """Read the rest of the request for a while, so that the client can read its answer before the close."""
        deadline = monotonic() + LINGER_S
        num_bytes = 0
        self._say_goodbye()
        try:
            self._socket.shutdown(socket.SHUT_WR)  # After this, bytes are read as they arrive, encrypted or not.
            while num_bytes < MAX_LINGER_BYTES and (data := self._receive(RECEIVE_BYTES, deadline - monotonic())):
                num_bytes += len(data)
        except (OSError, Disconnected):
            pass

    def _say_goodbye(self) -> None:
        """Tell a TLS client that nothing was cut off, and do not wait for its own message."""
        if isinstance(self._socket, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):  # A ValueError means that this was already said.
                self._set_timeout(0.0)
                self._socket.unwrap()

    def close(self) -> None:
        self._say_goodbye()
        if self._bell is not None:
            self._bell.close()


def _timeval(seconds: float) -> bytes:
    """Return a C `struct timeval`. The value is never 0, which would mean no timeout."""
    whole, fraction = divmod(max(seconds, 0.001), 1)
    return struct.pack("@ll", int(whole), int(fraction * 1_000_000))
