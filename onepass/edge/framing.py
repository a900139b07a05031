"""This module owns the grammar of HTTP/1.1: heads, encodings of bodies, and responses. It is strict and bounded.

It knows nothing of sockets.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from time import time
from typing import Any

from onepass.errors import BadRequest, HeadersTooLarge, RequestTooLarge, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_HEAD_BYTES = 64 * 1024  # It holds the request line and the fields; browsers and proxies stay below 16 KiB.
MAX_FIELDS = 100  # http.client has the same limit.
MAX_BODY_BYTES = 32 * 1024 * 1024  # The contract sets this limit, before and after decompression.
MAX_CHUNK_LINE_BYTES = 4096  # The line holds a chunk's size with its extensions.
MAX_CHUNK_OVERHEAD_BYTES = 1024 * 1024  # It bounds the sizes and line ends of one body: 200,000 one-byte chunks.
MAX_LENGTH_DIGITS = 15  # A longer number is too large anyway, and int() is slow for it or refuses it.
MAX_FRAMES = 16  # It bounds the gzip members or zstd frames of one body; each costs a copy of what follows.
MAX_WINDOW_LOG = 23  # This is 8 MiB, the largest window that RFC 9659 allows for `Content-Encoding: zstd`.
DECODE_STEP_BYTES = 4 * 1024 * 1024  # A decompression bomb is noticed before its last step is joined to the rest.

REASONS = {status.value: status.phrase for status in HTTPStatus}
TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
# RFC 9112, section 3, defines the line as: method SP request-target SP HTTP-version. Bytes above 0x7f pass here; the
# routes decide which paths exist.
REQUEST_LINE = re.compile(rf"({TOKEN}{{1,32}}) ([\x21-\x7e\x80-\xff]+) HTTP/([0-9])\.([0-9])\r\n")
# RFC 9112, section 5, forbids a blank before the colon, a folded line, a bare CR and control characters.
FIELD = re.compile(rf"^({TOKEN}+):([\t\x20-\x7e\x80-\xff]*)\r\n", re.MULTILINE)
HOST = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=%\-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?")
HEAD_END = re.compile(rb"\n\r?\n")  # A bare LF ends the head too, so that such a head is refused without a wait.
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")


@dataclass(frozen=True, slots=True)
class Head:
    method: str
    target: str
    headers: dict[str, str]  # Names are in lower case, and repeated fields are joined by ", ".
    keeps_alive: bool
    length: int | None  # This is the announced length of the body; None means that it is chunked or not announced.
    is_chunked: bool
    expects_continue: bool

    @property
    def has_body(self) -> bool:
        return self.is_chunked or bool(self.length)


def parse_request_line(line: str) -> tuple[str, str, int]:
    """Return the method, the target and the minor version. `line` includes its line end. Raises BadRequest."""
    match = REQUEST_LINE.fullmatch(line)
    if match is None:
        raise BadRequest("the request line must be: method, blank, target, blank, HTTP/1.1")
    method, target, major, minor = match.groups()
    if major != "1":
        raise BadRequest(f"HTTP/{major}.{minor} is not spoken here; use HTTP/1.1")
    return method, target, int(minor)


def parse_fields(block: str) -> dict[str, str]:
    """Parse header or trailer fields, each with its CRLF, in linear time. Raises BadRequest or HeadersTooLarge."""
    found = FIELD.findall(block)
    if len(found) > MAX_FIELDS:
        raise HeadersTooLarge(f"at most {MAX_FIELDS} header fields are read")
    # Each match starts after one line end and takes the next. If the counts differ, some field is broken.
    if len(found) != block.count("\n"):
        raise BadRequest("a header field must be: name, colon, value, CR LF, without control characters or folding")
    fields: dict[str, str] = {}
    for name, value in found:
        key = name.lower()
        value = value.strip(" \t")
        fields[key] = f"{fields[key]}, {value}" if key in fields else value
    return fields


def parse_head(raw: bytes) -> Head:
    """Parse a request head, which includes its last empty line. Raises BadRequest or HeadersTooLarge."""
    text = raw.decode("latin-1")
    line_end = text.find("\n") + 1
    method, target, minor = parse_request_line(text[:line_end])
    if not text.endswith("\r\n\r\n"):
        raise BadRequest("lines must end in CR LF")
    headers = parse_fields(text[line_end:-2])
    if HOST.fullmatch(headers.get("host", " " if minor else "")) is None:  # HTTP/1.0 needs no Host.
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
    """Return (Content-Length, whether the body is chunked), by RFC 9112, section 6.

    A head that two parsers could read in two ways is refused.
    """
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
    return int(digits[:MAX_LENGTH_DIGITS]), False  # A number is cut only if it is far above MAX_BODY_BYTES.


def body_encoding(headers: dict[str, str]) -> str:
    """Return the body's Content-Encoding: a key of DECODERS, or "identity". Raises UnsupportedEncoding."""
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
    """Return the decoded body, which has at most MAX_BODY_BYTES. Raises RequestTooLarge or BadRequest."""
    if encoding == "identity":
        return body
    parts: list[bytes] = []
    room = MAX_BODY_BYTES
    try:
        for _ in range(MAX_FRAMES):
            decoder = DECODERS[encoding]()
            while not decoder.eof:
                part = decoder.decompress(body, DECODE_STEP_BYTES)
                body = getattr(decoder, "unconsumed_tail", b"")  # The zstd decoder keeps it inside.
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
    """Return one whole response for one send. `headers` follow the first lines unchanged."""
    fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    line = f"HTTP/1.1 {status} {REASONS[status]}\r\nDate: {_date(int(time()))}\r\n"
    head = f"{line}Content-Length: {len(body)}\r\n{fields}\r\n".encode("latin-1")
    return head if is_head else head + body
