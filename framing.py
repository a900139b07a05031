"""Bytes of a connection to requests and back, within limits and a deadline; knows no routes and no decisions."""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from time import monotonic, time
from typing import Any

from errors import BadRequest, HeadersTooLarge, LengthRequired, RequestTimeout, RequestTooLarge, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_HEAD_BYTES = 64 * 1024  # request line and fields; browsers and proxies stay below 16 KiB
MAX_FIELDS = 100  # http.client's own limit
MAX_BODY_BYTES = 32 * 1024 * 1024  # the contract's limit, before and after decompression
MAX_CHUNK_LINE_BYTES = 4096  # a chunk's size with its extensions
MAX_CHUNK_OVERHEAD_BYTES = 1024 * 1024  # sizes and line ends of one body: 200,000 one-byte chunks
MAX_LENGTH_DIGITS = 15  # beyond it the number is too large anyway, and int() itself is slow or refuses
MAX_FRAMES = 16  # gzip members or zstd frames of one body; each costs a copy of what follows
MAX_WINDOW_LOG = 23  # 8 MiB: what RFC 9659 lets a sender of `Content-Encoding: zstd` need
DECODE_STEP_BYTES = 4 * 1024 * 1024  # a bomb is noticed before its last step is joined to the rest
RECEIVE_BYTES = 64 * 1024
LINGER_S = 2.0  # a refused client may keep sending this long; closing sooner resets it before it reads the error
MAX_LINGER_BYTES = 64 * 1024 * 1024  # twice the largest legal body
GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # Linux; others say POLLHUP at the end

REASONS = {status.value: status.phrase for status in HTTPStatus}
TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
# RFC 9112, 3: method SP request-target SP HTTP-version. Bytes above 0x7f are let through: paths decide what exists.
REQUEST_LINE = re.compile(rf"({TOKEN}{{1,32}}) ([\x21-\x7e\x80-\xff]+) HTTP/([0-9])\.([0-9])\r\n")
# RFC 9112, 5: no blank before the colon, no folded line, no bare CR, no control characters.
FIELD = re.compile(rf"^({TOKEN}+):([\t\x20-\x7e\x80-\xff]*)\r\n", re.MULTILINE)
HOST = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=%\-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
HEAD_END = re.compile(rb"\n\r?\n")  # a bare LF ends the head too, so that it is refused at once instead of waited for
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")


class Disconnected(Exception):
    """The client left, or reads too slowly; nobody is there to be told."""


@dataclass(frozen=True, slots=True)
class Head:
    method: str
    target: str
    headers: dict[str, str]  # names in lower case; repeated fields joined by ", "
    keeps_alive: bool
    length: int | None  # of the body as announced; None: not announced, or chunked
    is_chunked: bool
    expects_continue: bool

    @property
    def has_body(self) -> bool:
        return self.is_chunked or bool(self.length)


def parse_request_line(line: str) -> tuple[str, str, int]:
    """Method, target and minor version. `line` includes its line end. Raises BadRequest."""
    match = REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadRequest("the request line must be: method, blank, target, blank, HTTP/1.1")
    method, target, major, minor = match.groups()
    if major != "1":
        raise BadRequest(f"HTTP/{major}.{minor} is not spoken here; use HTTP/1.1")
    return method, target, int(minor)


def parse_fields(block: str) -> dict[str, str]:
    """Header or trailer fields, each with its CRLF, in linear time. Raises BadRequest or HeadersTooLarge."""
    found = FIELD.findall(block)
    if len(found) > MAX_FIELDS:
        raise HeadersTooLarge(f"at most {MAX_FIELDS} header fields are read")
    if len(found) != block.count("\n"):  # each match starts after a line end and takes the next: all or some is broken
        raise BadRequest("a header field must be: name, colon, value, CR LF, without control characters or folding")
    fields: dict[str, str] = {}
    for name, value in found:
        key = name.lower()
        value = value.strip(" \t")
        fields[key] = f"{fields[key]}, {value}" if key in fields else value
    return fields


def parse_head(raw: bytes) -> Head:
    """A request head, its last empty line included. Raises BadRequest or HeadersTooLarge."""
    text = raw.decode("latin-1")
    line_end = text.find("\n") + 1
    method, target, minor = parse_request_line(text[:line_end])
    if not text.endswith("\r\n\r\n"):
        raise BadRequest("lines must end in CR LF")
    headers = parse_fields(text[line_end:-2])
    if HOST.fullmatch(headers.get("host", " " if minor else "")) is None:  # HTTP/1.0 needs none
        raise BadRequest("a request needs one Host header: a host, with or without a port")
    length, is_chunked = _framing(headers, minor)
    options = {option.strip() for option in headers.get("connection", "").lower().split(",")}
    return Head(
        method=method,
        target=target,
        headers=headers,
        keeps_alive="close" not in options and (minor > 0 or "keep-alive" in options),
        length=length,
        is_chunked=is_chunked,
        expects_continue=minor > 0 and headers.get("expect", "").lower() == "100-continue",
    )


def _framing(headers: dict[str, str], minor: int) -> tuple[int | None, bool]:
    """(Content-Length, whether chunked), RFC 9112, 6. What two parsers could read in two ways is refused."""
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if coding is not None:
        if length is not None:
            raise BadRequest("Content-Length and Transfer-Encoding exclude each other")
        if minor == 0:
            raise BadRequest("Transfer-Encoding needs HTTP/1.1")
        if coding.lower() != "chunked":
            raise BadRequest("the only Transfer-Encoding read is chunked")
        return None, True
    if length is None:
        return None, False
    if not (length.isascii() and length.isdigit()):
        raise BadRequest("Content-Length must be one number in digits")
    digits = length.lstrip("0") or "0"
    return int(digits[:MAX_LENGTH_DIGITS]), False  # cut only where it is far above MAX_BODY_BYTES


def body_encoding(headers: dict[str, str]) -> str:
    """The body's Content-Encoding, a key of DECODERS or "identity". Raises UnsupportedEncoding."""
    encoding = headers.get("content-encoding", "").lower() or "identity"
    if encoding != "identity" and encoding not in DECODERS:
        raise UnsupportedEncoding("Content-Encoding must be one of zstd, gzip, x-gzip, identity")
    return encoding


DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": partial(zlib.decompressobj, wbits=16 + zlib.MAX_WBITS),
    "x-gzip": partial(zlib.decompressobj, wbits=16 + zlib.MAX_WBITS),
    "zstd": partial(zstd.ZstdDecompressor, options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}),
}


def decompress(body: bytes, encoding: str) -> bytes:
    """The decoded body, at most MAX_BODY_BYTES. Raises RequestTooLarge or BadRequest."""
    if encoding == "identity":
        return body
    parts: list[bytes] = []
    room = MAX_BODY_BYTES
    try:
        for _ in range(MAX_FRAMES):
            decoder = DECODERS[encoding]()
            while not decoder.eof:
                part = decoder.decompress(body, DECODE_STEP_BYTES)
                body = getattr(decoder, "unconsumed_tail", b"")  # zstd keeps it inside
                if not part and not decoder.eof:
                    raise BadRequest(f"the body ends inside its {encoding} data")
                room -= len(part)
                if room < 0:
                    raise RequestTooLarge(f"at most {MAX_BODY_BYTES} bytes are read, after decompression too")
                parts.append(part)
            body = decoder.unused_data
            if not body:
                return parts[0] if len(parts) == 1 else b"".join(parts)
    except (zlib.error, zstd.ZstdError) as err:
        raise BadRequest(f"the body is not valid {encoding}") from err
    raise BadRequest(f"the body holds more than {MAX_FRAMES} {encoding} frames")


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


def render_response(status: int, headers: dict[str, str], body: bytes, *, is_head: bool) -> bytes:
    """One whole response for one send. `headers` come after the status line as they stand."""
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    line = f"HTTP/1.1 {status} {REASONS[status]}\r\nDate: {_date(int(time()))}\r\n"
    head = f"{line}Content-Length: {len(body)}\r\n{fields}\r\n".encode("latin-1")
    return head if is_head else head + body


class Bell:
    """Wakes a thread that polls `fd`. Any thread rings; the connection's own thread does the rest."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        self._lock = threading.Lock()
        self._is_open = True

    def ring(self, _: object = None) -> None:
        with self._lock:  # a late ring must not write into a number that now belongs to another connection
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
    """One connection's bytes, buffered. A request has one deadline in all, not one per read; its thread only."""

    def __init__(self, sock: socket.socket, *, send_timeout_s: float) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._deadline = 0.0
        self._timeout_s = 0.0
        self._send_timeout_s = send_timeout_s
        self._bell: Bell | None = None
        # Kernel timeouts on a blocking socket: one system call a read, where settimeout() costs three.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_s))

    def wait_request(self, idle_s: float, request_s: float) -> bool:
        """Wait for a request's first byte; False when none came. From then on `request_s` are left for all of it."""
        try:
            if not self._buffer:
                self._buffer += self._receive(RECEIVE_BYTES, idle_s)
            self._deadline = monotonic() + request_s
            while self._buffer and self._buffer[0] in b"\r\n":  # RFC 9112, 2.2: old clients end a body with a line end
                del self._buffer[0]
                if not self._buffer:
                    self._buffer += self._receive(RECEIVE_BYTES, self._deadline - monotonic())
        except (TimeoutError, Disconnected):  # idle for too long, or reset
            return False
        return bool(self._buffer)

    def read_head(self) -> bytes:
        """The next head with its empty line. Raises an ApiError, or Disconnected."""
        buffer = self._buffer
        searched, is_line_checked = 0, False
        while (match := HEAD_END.search(buffer, searched)) is None and len(buffer) <= MAX_HEAD_BYTES:
            line_end = -1 if is_line_checked else buffer.find(b"\n", searched)
            if line_end >= 0:  # HTTP/0.9 and other protocols wait for an answer after one line
                parse_request_line(buffer[: line_end + 1].decode("latin-1"))
                is_line_checked = True
            searched = max(0, len(buffer) - 2)
            self._fill()
        if match is None or match.end() > MAX_HEAD_BYTES:
            raise HeadersTooLarge(f"the request head may hold {MAX_HEAD_BYTES} bytes")
        return self._cut(match.end())

    def read_body(self, head: Head) -> bytes:
        """The body as sent, still compressed. Raises an ApiError, or Disconnected."""
        if head.length is None and not head.is_chunked:
            raise LengthRequired("a body needs Content-Length or Transfer-Encoding: chunked")
        if head.length is not None and head.length > MAX_BODY_BYTES:
            raise RequestTooLarge(f"at most {MAX_BODY_BYTES} bytes are read")
        if head.expects_continue and not self._buffer:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._take_chunks() if head.length is None else self._take(head.length)

    def _take_chunks(self) -> bytes:
        """RFC 9112, 7.1. Trailer fields are checked and dropped."""
        parts: list[bytes] = []
        room, overhead = MAX_BODY_BYTES, MAX_CHUNK_OVERHEAD_BYTES
        while True:
            line = self._take_line(MAX_CHUNK_LINE_BYTES)
            match = CHUNK_LINE.fullmatch(line)
            if match is None:
                raise BadRequest("a chunk must start with its size in hexadecimal digits and CR LF")
            size = int(match[1], 16)
            room -= size
            overhead -= len(line) + 2
            if room < 0 or overhead < 0:
                raise RequestTooLarge(f"at most {MAX_BODY_BYTES} bytes are read, in chunks of a sensible size")
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
        try:
            data = self._receive(num_bytes, self._deadline - monotonic())
        except TimeoutError:
            raise RequestTimeout("the request did not arrive in time") from None
        if not data:
            raise BadRequest("the connection was closed before the request was complete")
        return data

    def _receive(self, num_bytes: int, timeout_s: float) -> bytes:
        """Up to `num_bytes`, none at the end of the stream. Raises TimeoutError or Disconnected."""
        if timeout_s <= 0:
            raise TimeoutError
        try:
            if timeout_s != self._timeout_s:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
                self._timeout_s = timeout_s
            return self._socket.recv(num_bytes)
        except BlockingIOError:
            raise TimeoutError from None
        except OSError as err:
            raise Disconnected from err

    def send(self, data: bytes) -> None:
        """Send all of it. Raises Disconnected."""
        try:
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
        """Wait until `future` is done or the deadline has passed. False as soon as the client closed its side."""
        if future.done():
            return True
        try:
            self._bell = self._bell or Bell()
        except OSError:  # no file descriptor is left: answer without watching the client
            wait([future], None if deadline is None else max(0.0, deadline - monotonic()))
            return True
        future.add_done_callback(self._bell.ring)
        poller = select.poll()
        poller.register(self._bell.fd, select.POLLIN)
        poller.register(self._socket, GONE)  # and not POLLIN: a pipelined request waits its turn
        while not future.done():
            events = dict(poller.poll(None if deadline is None else max(0.0, deadline - monotonic()) * 1000))
            if not events:
                return True
            if self._bell.fd not in events:
                return False
            self._bell.hush()  # perhaps a late ring for the last request: ask the future again
        return True

    def linger(self) -> None:
        """Let the client read its answer before the connection closes under the rest of its request."""
        deadline = monotonic() + LINGER_S
        num_bytes = 0
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while num_bytes < MAX_LINGER_BYTES and (data := self._receive(RECEIVE_BYTES, deadline - monotonic())):
                num_bytes += len(data)
        except (OSError, Disconnected):
            pass

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()


def _timeval(seconds: float) -> bytes:
    """struct timeval; zero would mean for ever."""
    whole, fraction = divmod(max(seconds, 0.001), 1)
    return struct.pack("@ll", int(whole), int(fraction * 1_000_000))
