"""Heads, chunks and encodings; and as a property: whatever the bytes, well-formed answers or a clean close."""

from __future__ import annotations

import gzip
import random
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from backports import zstd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onepass.edge import framing
from onepass.edge.stream import Stream
from onepass.errors import ApiError, BadRequest, RequestTooLarge
from tests.support.http_client import PATIENCE_S, Running, get, parse_response, post, serve

ALLOWED = {200, 400, 401, 404, 405, 408, 411, 413, 415, 422, 431, 503}


@pytest.fixture(scope="module")
def fake_live() -> Iterator[Running]:
    with serve(read_timeout_s=2.0) as running:
        yield running


def status_of(function: Callable[..., object], *arguments: object) -> int:
    try:
        function(*arguments)
    except ApiError as err:
        return err.status
    return 200


def test_names_fold_case_and_repeated_fields_join() -> None:
    fields = framing.parse_fields("ACCEPT: a \r\naccept:\tb\r\nX-Y:\r\n")
    assert fields == {"accept": "a, b", "x-y": ""}


@pytest.mark.parametrize(
    ("version", "connection", "keeps_alive"),
    [
        ("1.1", "", True),
        ("1.1", "close", False),
        ("1.1", "keep-alive, CLOSE", False),
        ("1.1", "closed", True),
        ("1.0", "", False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "keep-alive, close", False),
    ],
)
def test_a_connection_is_kept_as_both_sides_said(version: str, connection: str, keeps_alive: bool) -> None:
    head = framing.parse_head(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: {connection}\r\n\r\n".encode())
    assert head.keeps_alive is keeps_alive


@pytest.mark.parametrize(
    "block", ["a: " + " " * 65_000 + "\r\n", "a" * 65_000 + "\r\n", "a:\t" * 20_000 + "\x01\r\n", "a:b\r" * 16_000]
)
def test_a_hostile_field_is_parsed_in_linear_time(block: str) -> None:
    started = time.process_time()
    for _ in range(10):
        status_of(framing.parse_fields, block)
    assert time.process_time() - started < 2.0  # 0.01 s; a quadratic pattern takes minutes


# Encodings


def zeros(encoding: str, num_bytes: int) -> bytes:
    """That many zeros, compressed piece by piece."""
    piece = bytes(1 << 20)
    encoder = zlib.compressobj(1, wbits=31) if encoding == "gzip" else zstd.ZstdCompressor()
    return b"".join(encoder.compress(piece) for _ in range(num_bytes >> 20)) + encoder.flush()


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_refused_early_in_bounded_memory(encoding: str) -> None:
    bomb = zeros(encoding, 1 << 28)
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLarge):
            framing.decompress(bomb, encoding)
        assert tracemalloc.get_traced_memory()[1] < 56 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_of_exactly_the_limit_is_read(encoding: str) -> None:
    assert len(framing.decompress(zeros(encoding, framing.MAX_BODY_BYTES), encoding)) == framing.MAX_BODY_BYTES
    more = gzip.compress(b"a") if encoding == "gzip" else zstd.compress(b"a")
    with pytest.raises(RequestTooLarge):
        framing.decompress(zeros(encoding, framing.MAX_BODY_BYTES) + more, encoding)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_what_does_not_compress_comes_back_whole(encoding: str) -> None:
    body = random.Random(1).randbytes(9_000_000)
    packed = gzip.compress(body, 1) if encoding == "gzip" else zstd.compress(body)
    assert framing.decompress(packed, encoding) == body


def test_a_zstd_frame_that_needs_a_huge_window_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    encoder = zstd.ZstdCompressor(options=cast(Any, options))
    with pytest.raises(BadRequest):
        framing.decompress(encoder.compress(b"a" * 1000) + encoder.flush(), "zstd")


@pytest.mark.parametrize("packed", [gzip.compress(b"") * 17, gzip.compress(b"{}") + b"rest", gzip.compress(b"{}")[:-1]])
def test_what_follows_the_data_must_be_data_within_reason(packed: bytes) -> None:
    with pytest.raises(BadRequest):
        framing.decompress(packed, "gzip")


@given(
    st.binary(max_size=300), st.sampled_from(["gzip", "zstd"]), st.integers(0, 400), st.binary(min_size=1, max_size=3)
)
def test_a_changed_compressed_body_is_decoded_or_refused(
    body: bytes, encoding: str, position: int, change: bytes
) -> None:
    packed = gzip.compress(body) if encoding == "gzip" else zstd.compress(body)
    assert framing.decompress(packed, encoding) == body
    changed = packed[:position] + change + packed[position + len(change) :]
    assert status_of(framing.decompress, changed, encoding) in (200, 400, 413)


# Parsers


@given(st.binary(max_size=400))
def test_any_bytes_are_a_head_or_a_client_error(raw: bytes) -> None:
    assert status_of(framing.parse_head, raw + b"\r\n\r\n") in (200, 400, 431)


class CutSocket:
    """A socket on which a stream arrives in given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]

    def recv(self, num_bytes: int) -> bytes:
        piece = self._pieces.pop(0) if self._pieces else b""
        if piece[num_bytes:]:
            self._pieces.insert(0, piece[num_bytes:])
        return piece[:num_bytes]

    def settimeout(self, _: object) -> None: ...

    def setsockopt(self, *_: object) -> None: ...


NAMES = st.text("abcXYZ-_!#$%&'*+.^`|~019", min_size=1, max_size=12)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, blacklist_categories=["Cc"]), max_size=30)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=20))
def test_legal_fields_come_back_as_sent(fields: list[tuple[str, str]]) -> None:
    wanted: dict[str, list[str]] = {}
    for name, value in fields:
        wanted.setdefault(name.lower(), []).append(value.strip(" \t"))
    parsed = framing.parse_fields("".join(f"{name}: {value}\r\n" for name, value in fields))
    assert parsed == {name: ", ".join(values) for name, values in wanted.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=10), st.data())
def test_chunks_cut_anywhere_come_back_joined(chunks: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    whole = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + wire + b"next"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    stream = Stream(cast(Any, CutSocket(pieces)), send_timeout_s=PATIENCE_S)
    assert stream.wait_request(PATIENCE_S, PATIENCE_S)
    assert stream.read_body(framing.parse_head(stream.read_head())) == b"".join(chunks)
    assert stream.wait_request(PATIENCE_S, PATIENCE_S)  # what follows is still there


# The whole edge

PIECES = [
    *(b"GET ", b"POST ", b"HEAD ", b"OPTIONS ", b"/v1/systemone", b"/health", b"*", b"http://", b"?", b"%", b" "),
    *(b" HTTP/1.1", b" HTTP/1.0", b" HTTP/2.0", b"\r\n", b"\n", b"\r", b"\0", b"\x80", b":", b": ", b",", b";"),
    *(b"Host: x\r\n", b"Content-Length: 2\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"\r\n\r\n"),
    *(
        b"Expect: 100-continue\r\n",
        b"Connection: close\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Content-Encoding: zstd\r\n",
    ),
    *(b"2\r\n{}\r\n0\r\n\r\n", b"0\r\n\r\n", b"{}", b"5", b"[1]", post(b"{}"), get("/livez"), b"a" * 5000),
]
GARBLED = st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=8)), max_size=25).map(b"".join)


def check_answers(running: Running, sent: bytes) -> None:
    """Send it all, close our side, and read what comes as whole responses to the end."""
    with running.connect() as client:
        try:
            client.send(sent).socket.shutdown(socket.SHUT_WR)
        except ConnectionError:  # refused and closed while we still sent
            return
        received = b"".join(iter(lambda: client.socket.recv(65536), b""))
    if not sent.strip(b"\r\n"):
        assert received == b""
    is_head = sent.lstrip(b"\r\n").startswith(b"HEAD ")
    num_responses = 0
    while received and not is_head:  # a bodiless answer among others cannot be told apart here
        response, received = parse_response(received)
        assert response.status in ALLOWED | {100}, response
        num_responses += 1
    assert num_responses or is_head or not sent.strip(b"\r\n")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(GARBLED.filter(lambda sent: b"HEAD " not in sent))
def test_any_bytes_get_well_formed_answers_or_a_clean_close(fake_live: Running, sent: bytes) -> None:
    check_answers(fake_live, sent)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([post(b"{}"), get("/health"), post(b"", headers="Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n"]),
    st.integers(0, 120),
    st.binary(max_size=3),
)
def test_a_request_with_a_few_bytes_changed_gets_the_same(
    fake_live: Running, request_bytes: bytes, position: int, change: bytes
) -> None:
    check_answers(fake_live, request_bytes[:position] + change + request_bytes[position + len(change) :])
