"""The HTTP edge, by raw bytes against a real server: exact status, one response, and a connection kept or closed."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import re
import select
import socket
import socketserver
import statistics
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from backports import zstd

from onepass import logs
from onepass.edge import framing
from tests.support.http_client import PATIENCE_S, Running, get, post, serve

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def fake_live() -> Iterator[Running]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with serve(api_keys=KEYS) as running:
        yield running


def lines(*parts: str, body: bytes = b"") -> bytes:
    return "\r\n".join((*parts, "", "")).encode("latin-1") + body


def posted(*fields: str, body: bytes = b"{}") -> bytes:
    return lines("POST /v1/systemone HTTP/1.1", "Host: x", *fields, body=body)


def chunked(body: bytes) -> bytes:
    return posted("Transfer-Encoding: chunked", body=body)


MALFORMED = {  # name: (bytes, status); whatever follows them is never read as a request
    "no version": (b"GET /health\r\n", 400),
    "no version, bare LF": (b"GET /health\n", 400),
    "http/2.0": (lines("GET /health HTTP/2.0", "Host: x"), 400),
    "http/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "http/0.9 spelt out": (lines("GET /health HTTP/0.9"), 400),
    "lower-case version": (lines("GET /health http/1.1", "Host: x"), 400),
    "two-digit version": (lines("GET /health HTTP/1.10", "Host: x"), 400),
    "half a version": (lines("GET /health HTTP/1", "Host: x"), 400),
    "two blanks": (lines("GET  /health HTTP/1.1", "Host: x"), 400),
    "tab as blank": (lines("GET\t/health HTTP/1.1", "Host: x"), 400),
    "blank in target": (lines("GET /hea lth HTTP/1.1", "Host: x"), 400),
    "control character in target": (lines("GET /\x01 HTTP/1.1", "Host: x"), 400),
    "no method": (lines(" /health HTTP/1.1", "Host: x"), 400),
    "method no token": (lines("G(T /health HTTP/1.1", "Host: x"), 400),
    "long method": (lines("G" * 40 + " /health HTTP/1.1", "Host: x"), 400),
    "tls hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\n", 400),
    "bare LF everywhere": (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
    "bare LF after one field": (b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400),
    "bare CR in a field": (lines("GET /health HTTP/1.1", "Host: x", "A: b\rContent-Length: 5"), 400),
    "NUL in a field": (lines("GET /health HTTP/1.1", "Host: x", "A: b\0c"), 400),
    "DEL in a field": (lines("GET /health HTTP/1.1", "Host: x", "A: \x7f"), 400),
    "blank before colon": (lines("GET /health HTTP/1.1", "Host : x"), 400),
    "folded field": (lines("GET /health HTTP/1.1", "Host: x", "A: b", " c"), 400),
    "field without colon": (lines("GET /health HTTP/1.1", "Host: x", "hello"), 400),
    "field without name": (lines("GET /health HTTP/1.1", "Host: x", ": hello"), 400),
    "field name no token": (lines("GET /health HTTP/1.1", "Host: x", "a b: c"), 400),
    "field name not ASCII": (lines("GET /health HTTP/1.1", "Host: x", "\xe9: c"), 400),
    "101 fields": (lines("GET /health HTTP/1.1", "Host: x", *["A: b"] * 100), 431),
    "70 KB field": (lines("GET /health HTTP/1.1", "Host: x", "A: " + "b" * 70_000), 431),
    "70 KB target": (lines("GET /" + "b" * 70_000 + " HTTP/1.1", "Host: x"), 431),
    "70 KB without a line end": (b"G" * 70_000, 431),
    "no host": (lines("GET /health HTTP/1.1"), 400),
    "two hosts": (lines("GET /health HTTP/1.1", "Host: x", "Host: x"), 400),
    "host with a path": (lines("GET /health HTTP/1.1", "Host: x/y"), 400),
    "host with a user": (lines("GET /health HTTP/1.1", "Host: u@x"), 400),
    "host with a port in letters": (lines("GET /health HTTP/1.1", "Host: x:http"), 400),
    "target without slash": (lines("GET health HTTP/1.1", "Host: x", "Content-Length: 1"), 400),
    "length in letters": (posted("Content-Length: abc"), 400),
    "length with underscore": (posted("Content-Length: 1_0"), 400),
    "length with sign": (posted("Content-Length: +5"), 400),
    "negative length": (posted("Content-Length: -1"), 400),
    "empty length": (posted("Content-Length:"), 400),
    "length with a point": (posted("Content-Length: 2.0"), 400),
    "length in hexadecimal": (posted("Content-Length: 0x2"), 400),
    "length in other digits": (posted("Content-Length: \xb2"), 400),
    "length with a blank inside": (posted("Content-Length: 1 0"), 400),
    "two lengths": (posted("Content-Length: 2", "Content-Length: 3"), 400),
    "the same length twice": (posted("Content-Length: 2", "Content-Length: 2"), 400),
    "a list of lengths": (posted("Content-Length: 2, 2"), 400),
    "no length": (posted(body=b""), 411),
    "length over the limit": (posted(f"Content-Length: {32 * 1024 * 1024 + 1}"), 413),
    "length of 5,000 digits": (posted("Content-Length: " + "9" * 5000), 413),
    "length and coding": (posted("Content-Length: 2", "Transfer-Encoding: chunked"), 400),
    "unknown coding": (posted("Transfer-Encoding: gzip"), 400),
    "coding before chunked": (posted("Transfer-Encoding: gzip, chunked"), 400),
    "chunked twice": (posted("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
    "chunked misspelt": (posted("Transfer-Encoding: xchunked"), 400),
    "chunked with a parameter": (posted("Transfer-Encoding: chunked;q=1"), 400),
    "empty coding": (posted("Transfer-Encoding:"), 400),
    "chunked in http/1.0": (lines("POST /v1/systemone HTTP/1.0", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    "chunk size in letters": (chunked(b"zz\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk size with sign": (chunked(b"+2\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk size with prefix": (chunked(b"0x2\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk size with underscore": (chunked(b"1_0\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk size missing": (chunked(b"\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk size after a blank": (chunked(b" 2\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk size, bare LF": (chunked(b"2\n{}\r\n0\r\n\r\n"), 400),
    "chunk longer than said": (chunked(b"2\r\n{}}\r\n0\r\n\r\n"), 400),
    "chunk shorter than said": (chunked(b"4\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk over the limit": (chunked(b"7fffffff\r\n"), 413),
    "chunk size of 17 digits": (chunked(b"0" * 16 + b"2\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk extension without end": (chunked(b"2;" + b"a" * 5000), 400),
    "trailer without colon": (chunked(b"2\r\n{}\r\n0\r\nhello\r\n\r\n"), 400),
    "trailer, bare LF": (chunked(b"2\r\n{}\r\n0\r\nA: b\n\r\n"), 400),
    "unknown encoding": (posted("Content-Length: 2", "Content-Encoding: br"), 415),
    "two encodings": (posted("Content-Length: 2", "Content-Encoding: gzip, zstd"), 415),
    "GET with a body": (lines("GET /health HTTP/1.1", "Host: x", "Content-Length: 5", body=b"hello"), 200),
    "GET with chunks": (lines("GET /health HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 200),
    "unknown path with a body": (post(b"{}", path="/nope"), 404),
    "wrong method with a body": (post(b"{}", path="/health"), 405),
    "PUT": (posted("Content-Length: 2").replace(b"POST", b"PUT"), 405),
    "TRACE with a body": (lines("TRACE /health HTTP/1.1", "Host: x", "Content-Length: 2", body=b"{}"), 405),
    "DELETE with a body": (lines("DELETE /health HTTP/1.1", "Host: x", "Content-Length: 2", body=b"{}"), 405),
    "PATCH without a length": (lines("PATCH /health HTTP/1.1", "Host: x"), 405),
    "OPTIONS with a body": (lines("OPTIONS /health HTTP/1.1", "Host: x", "Content-Length: 2", body=b"{}"), 200),
    "length in an obsolete fold": (posted("Content-Length:", " 2"), 400),
    "length after a NUL": (posted("Content-Length: \0" + "2"), 400),
    "length and a sum of two": (posted("Content-Length: 2", "content-length:\t2"), 400),
    "coding with a tab inside": (posted("Transfer-Encoding: chun\tked"), 400),
    "coding and blank before colon": (posted("Transfer-Encoding : chunked", "Content-Length: 2"), 400),
    "coding and an empty length": (posted("Transfer-Encoding: chunked", "Content-Length:"), 400),
    "coding as a list with a gap": (posted("Transfer-Encoding: , chunked"), 400),
    "coding identity": (posted("Transfer-Encoding: identity", "Content-Length: 2"), 400),
    "expects, and too long": (posted("Content-Length: 33554433", "Expect: 100-continue", body=b""), 413),
    "expects, to an unknown path": (post(b"{}", path="/nope", headers="Expect: 100-continue\r\n"), 404),
    "expects, without a length": (posted("Expect: 100-continue", body=b""), 411),
    "chunk size and a NUL": (chunked(b"2\0\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk end missing": (chunked(b"2\r\n{}0\r\n\r\n"), 400),
    "chunk end, bare LF": (chunked(b"2\r\n{}\n0\r\n\r\n"), 400),
    "chunk extension with a control character": (chunked(b"2;a=\x01\r\n{}\r\n0\r\n\r\n"), 400),
    "negative chunk": (chunked(b"-2\r\n{}\r\n0\r\n\r\n"), 400),
    "trailer field with a blank before its colon": (chunked(b"2\r\n{}\r\n0\r\nA : b\r\n\r\n"), 400),
    "70 KB of trailers": (chunked(b"2\r\n{}\r\n0\r\n" + b"A: bbbbbbbb\r\n" * 6000), 431),
    "101 trailers": (chunked(b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 101 + b"\r\n"), 431),
    "a body of one-byte chunks without end": (chunked(b"1\r\na\r\n" * 250_000), 413),
    "http/1.0 with a body": (lines("POST /v1/systemone HTTP/1.0", "Content-Length: 2", body=b"{}"), 200),
    "http/1.0 without a length": (lines("POST /v1/systemone HTTP/1.0"), 411),
    "http/1.0, kept and closed": (lines("GET /health HTTP/1.0", "Connection: keep-alive, close"), 200),
    "http/1.0 with a host that is none": (lines("GET /health HTTP/1.0", "Host: x/y"), 400),
    "asked to close": (lines("GET /health HTTP/1.1", "Host: x", "Connection: foo, Close"), 200),
    "http/1.0": (lines("GET /health HTTP/1.0"), 200),
}


@pytest.mark.parametrize(("request_bytes", "status"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_request_that_cannot_be_followed_gets_one_answer_and_a_closed_connection(
    fake_live: Running, request_bytes: bytes, status: int
) -> None:
    with fake_live.connect() as client:
        client.send(request_bytes + get("/livez"))
        response = client.read()
        assert (response.status, response.headers["connection"]) == (status, "close")
        assert client.is_closed()
    assert fake_live.ask(post(b"{}")).status == 200


KEPT = {  # name: (bytes, status)
    "not JSON": (post(b"{"), 422),
    "empty body": (post(b""), 422),
    "cut gzip": (post(gzip.compress(b"{}")[:-4], headers="Content-Encoding: gzip\r\n"), 400),
    "empty gzip": (post(b"", headers="Content-Encoding: gzip\r\n"), 400),
    "no gzip": (post(b"{}", headers="Content-Encoding: x-gzip\r\n"), 400),
    "no zstd": (post(b"{}", headers="Content-Encoding: zstd\r\n"), 400),
    "gzip": (post(gzip.compress(b"{}"), headers="Content-Encoding: GZip\r\n"), 200),
    "x-gzip": (post(gzip.compress(b"{}"), headers="Content-Encoding: x-gzip\r\n"), 200),
    "zstd": (post(zstd.compress(b"{}"), headers="Content-Encoding: zstd\r\n"), 200),
    "zstd in two frames": (post(zstd.compress(b"{") + zstd.compress(b"}"), headers="Content-Encoding: zstd\r\n"), 200),
    "identity": (post(b"{}", headers="Content-Encoding: identity\r\n"), 200),
    "chunked": (chunked(b"1\r\n{\r\n1;a=b\r\n}\r\n0\r\nTrailer: x\r\n\r\n"), 200),
    "CHUNKED": (posted("transfer-encoding: Chunked", body=b"0002\r\n{}\r\n000\r\n\r\n"), 200),
    "length with zeros": (posted("Content-Length: 0002"), 200),
    "unknown path": (get("/nope"), 404),
    "path of bytes": (get("/\xff\xfe"), 404),
    "percent slash": (get("/v1%2Fmodels"), 404),
    "percent nul": (get("/health%00"), 404),
    "half a percent": (get("/health%4"), 400),
    "GET on decisions": (get("/v1/systemone"), 405),
    "DELETE": (get("/v1/systemone", method="DELETE"), 405),
    "a method of one's own": (get("/health", method="BREW"), 405),
    "lower-case method": (get("/health", method="get"), 405),
    "health": (get("/health"), 200),
    "healthz": (get("/healthz"), 200),
    "readyz": (get("/readyz"), 200),
    "models": (get("/v1/models"), 200),
    "trailing slash": (get("/health/"), 200),
    "two slashes": (post(b"{}", path="//v1/systemone/"), 200),
    "query": (get("/health?a=b&c"), 200),
    "query of bytes": (get("/health?\xff%zz"), 200),
    "alias": (post(b"{}", path="/systemone?x"), 200),
    "doubled v1": (post(b"{}", path="/v1/v1/systemone"), 200),
    "absolute form": (get("http://example.com:80/health"), 200),
    "absolute form without path": (get("HTTPS://example.com"), 200),
    "absolute form, broken": (get("http://[/health"), 400),
    "percent letter": (get("/%68ealth"), 200),
    "OPTIONS": (get("/v1/systemone", method="OPTIONS"), 200),
    "OPTIONS of all": (get("*", method="OPTIONS"), 200),
    "empty lines before": (b"\r\n\r\n" + get("/health"), 200),
    "empty host": (lines("GET /health HTTP/1.1", "Host:"), 200),
    "ipv6 host": (lines("GET /health HTTP/1.1", "Host: [::1]:80"), 200),
    "100 fields": (lines("GET /health HTTP/1.1", "Host: x", *["A: b"] * 99), 200),
    "60 KB field": (lines("GET /health HTTP/1.1", "Host: x", "A: " + "b" * 60_000), 200),
    "http/1.0 keep-alive": (lines("GET /health HTTP/1.0", "Connection: Keep-Alive"), 200),
    "CONNECT": (lines("CONNECT example.com:443 HTTP/1.1", "Host: example.com:443"), 400),
    "an upgrade that is not made": (
        lines("GET /health HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: h2c"),
        200,
    ),
    "another expectation": (post(b"{}", headers="Expect: 200-ok\r\n"), 200),
    "a length with blanks around it": (posted("Content-Length: \t 2 \t"), 200),
    "no chunk but the last": (chunked(b"0\r\n\r\n"), 422),
    "one-byte chunks": (chunked(b"1\r\n1\r\n" * 1000 + b"0\r\n\r\n"), 200),
    "GET of length 0": (lines("GET /health HTTP/1.1", "Host: x", "Content-Length: 0"), 200),
    "OPTIONS of nothing": (get("/nope", method="OPTIONS"), 404),
    "http/1.0 with a body, kept": (
        lines("POST /v1/systemone HTTP/1.0", "Connection: keep-alive", "Content-Length: 2", body=b"{}"),
        200,
    ),
    "http/1.2": (lines("GET /health HTTP/1.2", "Host: x"), 200),
}


@pytest.mark.parametrize(("request_bytes", "status"), KEPT.values(), ids=KEPT.keys())
def test_a_request_that_was_read_whole_leaves_the_connection_usable(
    fake_live: Running, request_bytes: bytes, status: int
) -> None:
    with fake_live.connect() as client:
        response = client.send(request_bytes).read()
        assert (response.status, response.headers["connection"]) == (status, "keep-alive")
        assert client.is_kept()


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz", "/livez", "/v1/models", "/openapi.json"])
def test_head_says_what_get_says_without_a_body(fake_live: Running, path: str) -> None:
    with fake_live.connect() as client:
        full = client.send(get(path)).read()
        bare = client.send(get(path, method="HEAD")).read(is_head=True)
        assert bare.headers["content-length"] == full.headers["content-length"] == str(len(full.body))
        assert client.is_kept()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (lines("HEAD /nope HTTP/1.1", "Host: x"), 404),
        (lines("HEAD /v1/systemone HTTP/1.1", "Host: x"), 405),
        (lines("HEAD /health HTTP/1.1"), 400),
        (lines("HEAD /health HTTP/1.1", "Host: x", "A: " + "b" * 70_000), 431),
        (lines("HEAD /health HTTP/2.0", "Host: x"), 400),
    ],
)
def test_a_refusal_of_head_has_no_body_either(fake_live: Running, request_bytes: bytes, status: int) -> None:
    """Its length announces the body that GET would have got, and what follows is the next response."""
    with fake_live.connect() as client:
        response = client.send(request_bytes).read(is_head=True)
        assert response.status == status
        assert int(response.headers["content-length"]) > 0
        assert client.is_closed() if response.headers["connection"] == "close" else client.is_kept()


@pytest.mark.parametrize("request_bytes", [get("/health"), get("/nope"), post(b"["), get("/health") + get("/livez")])
def test_a_client_that_has_said_all_it_will_say_gets_its_answers(fake_live: Running, request_bytes: bytes) -> None:
    """Half-closed before the answers: `curl` and `nc -N` do that. A decision is given up: see below."""
    with fake_live.connect() as client:
        client.send(request_bytes).socket.shutdown(socket.SHUT_WR)
        for _ in range(request_bytes.count(b"Host")):
            assert client.read().status in (200, 404, 422)
        assert client.is_closed()


def test_http_1_0_gets_no_continue(fake_live: Running) -> None:
    with fake_live.connect() as client:
        fields = ("Connection: keep-alive", "Content-Length: 2", "Expect: 100-continue")
        client.send(lines("POST /v1/systemone HTTP/1.0", *fields))
        assert not select.select([client.socket], [], [], 0.1)[0]
        assert client.send(b"{}").read().status == 200
        assert client.is_kept()


def test_nothing_is_continued_that_has_begun(fake_live: Running) -> None:
    with fake_live.connect() as client:
        assert client.send(post(b"{}", headers="Expect: 100-continue\r\n")).read().status == 200
        assert client.is_kept()


def test_a_wrong_method_is_told_the_right_ones(fake_live: Running) -> None:
    assert fake_live.ask(get("/v1/systemone")).headers["allow"] == "POST, OPTIONS"
    assert fake_live.ask(get("/health", method="PUT")).headers["allow"] == "GET, HEAD, OPTIONS"
    assert fake_live.ask(get("/v1/systemone")).body == b'{"detail":"Method Not Allowed"}'
    assert fake_live.ask(get("/nope")).body == b'{"detail":"Not Found"}'


def test_a_decision_carries_its_times(fake_live: Running) -> None:
    timing = fake_live.ask(post(b"{}")).headers["server-timing"]
    assert re.fullmatch(
        r"read;dur=\d+\.\d\d, parse;dur=0\.12, render;dur=0\.25, queue;dur=1\.25, model;dur=2\.50, readout;dur=0\.50,"
        r" total;dur=\d+\.\d\d",
        timing,
    )


def test_a_request_arrives_whole_however_it_is_cut(fake_live: Running) -> None:
    whole = chunked(b"1\r\n[\r\n1\r\n]\r\n0\r\n\r\n")
    with fake_live.connect() as client:
        for position in range(1, len(whole)):
            client.send(whole[:position])
            client.send(whole[position:])
            assert client.read().body == b"[]"


def test_pipelined_requests_are_answered_in_order(fake_live: Running) -> None:
    with fake_live.connect() as client:
        client.send(b"".join(post(b"%d" % number) for number in range(20)) + get("/nope"))
        assert [client.read().body for _ in range(20)] == [b"%d" % number for number in range(20)]
        assert client.read().status == 404
        assert client.is_kept()


def test_no_request_hides_in_the_body_of_a_refused_one(locked: Running) -> None:
    with locked.connect() as client:
        client.send(post(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert client.read().status == 401
        assert client.is_closed()


def test_small_requests_meet_no_delayed_acknowledgement(fake_live: Running) -> None:
    waits = []
    with fake_live.connect() as client:
        for request in [get("/livez"), post(b"{}")] * 50:
            start = time.monotonic()
            client.send(request).read()
            waits.append(time.monotonic() - start)
    assert statistics.median(waits) < 0.02  # it is 0.04 where a reply takes two sends


# Keys


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer first-key", 200),
        ("bearer  second-key", 200),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer first-key2", 401),
        ("Bearer first-ke", 401),
        ("Bearer FIRST-KEY", 401),
        ("Bearer \xe9", 401),
        ("Bearer " + "".join(map(chr, range(0x80, 0x100))), 401),
        ("Basic first-key", 401),
        ("first-key", 401),
        ("Bearer first-key, Bearer first-key", 401),
    ],
)
def test_a_key_opens_the_routes_that_need_one(locked: Running, authorization: str, status: int) -> None:
    header = f"Authorization: {authorization}\r\n"
    response = locked.ask(get("/v1/models", headers=header))
    assert response.status == locked.ask(post(b"{}", headers=header)).status == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.error_type == "authentication_error"
        assert b"key2" not in response.body


def test_who_calls_is_known_by_the_key(locked: Running) -> None:
    for key, number in (("first-key", 0), ("second-key", 1)):
        locked.decider.gate.clear()
        with locked.connect() as client:
            client.send(post(b"{}", headers=f"Authorization: Bearer {key}\r\n"))
            locked.wait_for_requests(1)
            assert locked.decider.told.get(timeout=PATIENCE_S) in ("queued", "running")
            assert [pending.client for pending in locked.decider._open] == [number]
            locked.decider.gate.set()
            assert client.read().status == 200


def test_a_key_is_asked_for_where_the_contract_says_so(locked: Running) -> None:
    statuses = {
        path: locked.ask(get(path)).status
        for path in ("/health", "/livez", "/metrics", "/openapi.json", "/v1/models", "/nope")
    }
    open_ones = dict.fromkeys(("/health", "/livez", "/metrics", "/openapi.json"), 200)
    assert statuses == {**open_ones, "/v1/models": 401, "/nope": 404}
    assert locked.ask(get("/v1/models")).status == 401
    assert locked.ask(post(b"{}", path="/v1/v1/systemone")).status == 401


def test_without_keys_the_header_is_ignored(fake_live: Running) -> None:
    assert fake_live.ask(post(b"{}", headers="Authorization: \xff\xfe\r\n")).status == 200


# States


def test_while_loading_only_liveness_is_fine() -> None:
    with serve(is_loaded=False) as running:
        assert running.ask(get("/livez")).status == 200
        for request in (get("/health"), get("/readyz"), get("/healthz"), get("/v1/models"), post(b"{}")):
            response = running.ask(request)
            assert (response.status, response.error_type) == (503, "loading")
            assert response.headers["retry-after"] == "3"
        assert b"\nonepass_ready 0.0\n" in running.ask(get("/metrics")).body


def test_a_dead_worker_ends_liveness() -> None:
    with serve() as running:
        running.decider.die(RuntimeError())
        for request in (get("/livez"), get("/health"), post(b"{}")):
            assert (running.ask(request).status, running.ask(request).error_type) == (503, "worker_dead")


def test_our_own_fault_is_a_500_without_internals(fake_live: Running, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> dict[str, object]:
        raise FileNotFoundError("a secret path")

    fake_live.decider.models = fail  # type: ignore[method-assign]
    for request in (post(b'"boom"'), get("/v1/models")):
        caplog.clear()
        with fake_live.connect() as client:
            response = client.send(request).read()
            assert (response.status, response.error_type) == (500, "internal_error")
            assert b"secret" not in response.body
            assert client.is_closed()
        assert [record.exc_info is not None for record in caplog.records].count(True) == 1
    del fake_live.decider.models


# Slow, stalled and leaving clients


def test_stalled_bodies_are_closed_by_the_deadline_while_others_are_served() -> None:
    with serve(read_timeout_s=0.5) as running:
        stalled = [running.connect().send(posted("Content-Length: 500000", body=b"1234567")) for _ in range(100)]
        assert running.ask(get("/health")).status == 200
        for client in stalled:
            response = client.read()
            assert (response.status, response.error_type) == (408, "request_timeout")
            assert client.is_closed()
            client.socket.close()
        running.wait_for_no_connection()


@pytest.mark.parametrize("start", [b"", posted("Content-Length: 500000", body=b""), chunked(b"ffff\r\n")])
def test_a_dripping_client_meets_the_deadline_all_the_same(start: bytes) -> None:
    with serve(read_timeout_s=0.3) as running, running.connect() as client:
        client.send(start or b"GET /")
        while not select.select([client.socket], [], [], 0.02)[0]:
            client.send(b"a")
        assert client.read().status == 408
        assert client.is_closed()


def test_dripped_line_ends_are_no_request_and_no_answer() -> None:
    with serve(read_timeout_s=0.2) as running, running.connect() as client:
        while not select.select([client.socket], [], [], 0.02)[0]:
            client.send(b"\r\n")
        assert client.is_closed()


def test_an_idle_connection_is_closed_without_a_word() -> None:
    with serve() as running:
        running.http.idle_timeout_s = 0.1
        with running.connect() as client:
            assert client.is_closed()
        with running.connect() as client:
            assert client.send(get("/livez")).read().status == 200
            assert client.is_closed()


def test_a_client_that_reads_nothing_does_not_hold_its_thread() -> None:
    with serve(read_timeout_s=0.3) as running, running.connect() as client:
        client.send(post(b'"' + b"a" * 16_000_000 + b'"'))
        running.wait_for_no_connection()


@pytest.mark.parametrize(("status", "key"), [(413, "first-key"), (401, "")])
def test_an_early_refusal_reaches_a_client_that_still_sends(
    status: int, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "MAX_BODY_BYTES", 1_000_000)
    with serve(api_keys=KEYS) as running:
        for _ in range(30):
            upload = http.client.HTTPConnection(*running.address, timeout=PATIENCE_S)
            upload.request("POST", "/v1/systemone", b"a" * 8_000_000, {"Authorization": f"Bearer {key}"})
            assert upload.getresponse().status == status
            upload.close()


def test_a_client_that_waits_for_continue_gets_it_or_a_refusal(locked: Running) -> None:
    expect = "Expect: 100-continue\r\n"
    key = "Authorization: Bearer first-key\r\n"
    with locked.connect() as client:
        client.send(post(b"", headers=expect + key).replace(b"Length: 0", b"Length: 2"))
        assert client.read().status == 100
        assert client.send(b"{}").read().status == 200
        client.send(post(b"", headers=expect + key).replace(b"Length: 0", b"Length: 99999999"))
        assert client.read().status == 413
        assert client.is_closed()
    with locked.connect() as client:
        client.send(post(b"", headers=expect).replace(b"Length: 0", b"Length: 2"))
        assert client.read().status == 401
        assert client.is_closed()


@pytest.mark.parametrize("begun", [b"GET /hea", get("/health")[:-2], post(b"{}")[:-1], chunked(b"2\r\n{}\r\n0\r\n")])
def test_a_request_cut_short_is_told_so(fake_live: Running, begun: bytes) -> None:
    with fake_live.connect() as client:
        client.send(begun).socket.shutdown(socket.SHUT_WR)
        assert client.read().status == 400
        assert client.is_closed()


def test_a_connection_closed_before_a_request_gets_nothing(fake_live: Running) -> None:
    for begun in (b"", b"\r\n"):
        with fake_live.connect() as client:
            client.send(begun).socket.shutdown(socket.SHUT_WR)
            assert client.is_closed()


@pytest.mark.parametrize("is_reset", [False, True])
def test_clients_that_leave_cost_no_forward_pass(is_reset: bool, caplog: pytest.LogCaptureFixture) -> None:
    with serve() as running:
        running.decider.gate.clear()
        clients = [running.connect().send(post(b"{}")) for _ in range(20)]
        told = [running.decider.told.get(timeout=PATIENCE_S) for _ in range(21)]
        assert sorted(told) == ["queued"] * 20 + ["running"]
        for client in clients:
            if is_reset:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.socket.close()
        running.wait_for_no_connection()
        running.decider.gate.set()
        assert running.ask(post(b"{}")).status == 200
        assert running.decider.num_forwards == 2  # the one begun, and the last
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_that_waits_beyond_its_deadline_is_given_up_and_a_running_one_is_not() -> None:
    with serve(timeout_s=0.2) as running, running.connect() as first, running.connect() as second:
        running.decider.gate.clear()
        first.send(post(b"1"))
        assert sorted(running.decider.told.get(timeout=PATIENCE_S) for _ in range(2)) == ["queued", "running"]
        response = second.send(post(b"2")).read()
        assert (response.status, response.error_type) == (503, "deadline_exceeded")
        assert [running.decider.told.get(timeout=PATIENCE_S) for _ in range(3)] == ["queued", "expired", "expired"]
        running.decider.gate.set()
        assert first.read().body == b"1"
        assert first.is_kept()
        assert second.is_kept()


def test_a_half_closed_client_is_told_that_it_left_too_soon() -> None:
    with serve() as running, running.connect() as client:
        running.decider.gate.clear()
        client.send(post(b"{}")).socket.shutdown(socket.SHUT_WR)
        assert client.read().status == 400
        assert client.is_closed()


def test_pipelined_bytes_do_not_look_like_a_client_that_left() -> None:
    with serve() as running, running.connect() as client:
        running.decider.gate.clear()
        client.send(post(b"1"))
        assert sorted(running.decider.told.get(timeout=PATIENCE_S) for _ in range(2)) == ["queued", "running"]
        client.send(post(b"2"))
        running.decider.gate.set()
        assert (client.read().body, client.read().body) == (b"1", b"2")
        assert client.is_kept()


def test_a_pipelining_client_that_leaves_is_noticed() -> None:
    with serve() as running:
        running.decider.gate.clear()
        client = running.connect().send(post(b"1"))
        assert sorted(running.decider.told.get(timeout=PATIENCE_S) for _ in range(2)) == ["queued", "running"]
        client.send(post(b"2")).socket.close()
        running.wait_for_no_connection()


# Limits


def test_one_connection_too_many_is_told_so_and_closed() -> None:
    with serve(max_connections=2) as running:
        held = [running.connect().send(post(b"{}")[:-1]) for _ in range(2)]  # both in the middle of a request
        running.wait_for_requests(2)
        with running.connect() as client:
            response = client.send(post(b"{}")).read()
            assert (response.status, response.error_type) == (503, "overloaded_error")
            assert 0 < int(response.headers["retry-after"]) < 30
            assert client.is_closed()
        for client in held:
            assert client.send(b"}").read().status == 200
            client.socket.close()
        running.wait_for_no_connection()
        assert running.ask(get("/livez")).status == 200


def test_an_idle_connection_makes_room_for_a_new_one() -> None:
    """Silent clients must not keep the probes of an orchestrator, or anyone, out."""
    with serve(max_connections=2) as running:
        silent = [running.connect(), running.connect().send(get("/livez"))]
        assert silent[1].read().status == 200
        running.wait_for_idle(2)
        newcomers = [running.connect() for _ in silent]
        for client, newcomer in zip(silent, newcomers, strict=True):
            assert newcomer.send(get("/livez")).read().status == 200
            assert client.is_closed()
        for client in (*silent, *newcomers):
            client.socket.close()


def test_without_a_file_descriptor_left_connections_are_refused_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept = socketserver.TCPServer.get_request
    failures = iter([OSError(24, "Too many open files")])

    def get_request(self: socketserver.TCPServer) -> object:
        for failure in failures:
            raise failure
        return accept(self)

    with serve() as running:
        monkeypatch.setattr(socketserver.TCPServer, "get_request", get_request)
        with running.connect() as client:
            assert client.read().status == 503
            assert client.is_closed()
        assert running.ask(get("/livez")).status == 200


def test_without_a_file_descriptor_left_an_admitted_request_is_still_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", fail)
    with serve() as running, running.connect() as client:
        running.decider.gate.clear()
        client.send(post(b"1"))
        assert sorted(running.decider.told.get(timeout=PATIENCE_S) for _ in range(2)) == ["queued", "running"]
        running.decider.gate.set()
        assert client.read().body == b"1"


def test_without_a_thread_left_connections_are_refused_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with serve() as running:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            assert running.ask(get("/livez")).status == 503
        assert running.ask(get("/livez")).status == 200


def test_no_name_is_ever_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no resolver")

    for name in ("getfqdn", "gethostbyaddr", "gethostbyname", "getnameinfo"):
        monkeypatch.setattr(socket, name, fail)
    with serve() as running:
        assert running.ask(get("/livez")).status == 200


# CORS


def test_a_browser_may_call_from_an_allowed_origin_only() -> None:
    with serve(allowed_origins="https://a.example, https://b.example") as running:
        for origin, is_allowed in (("https://b.example", True), ("https://evil.example", False), ("null", False)):
            for request in (post(b"{}", headers=f"Origin: {origin}\r\n"), get("/x", headers=f"Origin: {origin}\r\n")):
                headers = running.ask(request).headers
                assert headers.get("access-control-allow-origin") == (origin if is_allowed else None)
                assert headers["vary"] == "Origin"
                exposed = headers.get("access-control-expose-headers", "")
                assert exposed == ("x-typesafe-request-id, retry-after, retry-after-ms" if is_allowed else "")


@pytest.mark.parametrize(
    ("origins", "told"),
    [("*", "*"), ("https://a.example", "https://a.example"), ("https://a.example,https://b.example", None), ("", None)],
)
def test_a_refused_connection_may_be_read_where_only_one_origin_may(origins: str, told: str | None) -> None:
    """The request is not read, so there is no Origin to go by."""
    with serve(max_connections=1, allowed_origins=origins) as running, running.connect() as held:
        held.send(b"GET")
        running.wait_for_requests(1)
        response = running.ask(get("/livez"))
        assert (response.status, response.headers.get("access-control-allow-origin")) == (503, told)


def test_a_preflight_is_answered_without_a_key() -> None:
    asked = "Authorization, content-type,X-TypeSafe-Foo, cookie"
    headers = f"Origin: https://a.example\r\nAccess-Control-Request-Headers: {asked}\r\n"
    request = get("/v1/systemone", method="OPTIONS", headers=headers + "Access-Control-Request-Method: POST\r\n")
    with serve(allowed_origins="*", api_keys=KEYS) as running:
        response = running.ask(request)
        assert (response.status, response.headers["access-control-allow-origin"]) == (200, "*")
        assert response.headers["access-control-allow-headers"] == "authorization, content-type, x-typesafe-foo"
        assert response.headers["access-control-allow-methods"] == "POST, OPTIONS"
    with serve() as running:
        assert not [name for name in running.ask(request).headers if name.startswith("access-control")]


# Log


@pytest.mark.parametrize(
    ("client_id", "shown"), [("abc-1.2_3", "abc-1.2_3"), ("a b", "-"), ("x" * 65, "-"), ("\xe9", "-"), ("a=b", "-")]
)
def test_each_request_is_one_log_line_without_its_text(
    fake_live: Running, caplog: pytest.LogCaptureFixture, client_id: str, shown: str
) -> None:
    with caplog.at_level(logging.INFO), fake_live.connect() as client:
        request = post(b'"private"', path="/systemone?private", headers=f"X-Request-Id: {client_id}\r\n")
        response = client.send(request).read()
        unknown = client.send(get("/private", method="PRIVATE")).read()
        client.send(get("/livez")).read()  # a line is written after its answer, but before the next request
    messages = [logs.LineFormatter("%(message)s").format(record) for record in caplog.records]
    first, second = (
        next(line for line in messages if answer.headers["x-typesafe-request-id"] in line)
        for answer in (response, unknown)
    )
    ms = r"\d+\.\d\d"
    assert re.fullmatch(
        f"request: id={response.headers['x-typesafe-request-id']} client_id={shown} method=POST route=/v1/systemone"
        f" status=200 rows=1 tokens=7 read_ms={ms} parse_ms=0.12 render_ms=0.25 queue_ms=1.25 model_ms=2.50"
        f" readout_ms=0.50 write_ms={ms} total_ms={ms} error=-",
        first,
    )
    assert "method=other route=other status=404" in second
    assert "rivate" not in first + second


FORGED = "1\r\n2026 INFO forged\x1b[2J\x85\u2028\u202e\ud800"


def log_record(**extra: object) -> logging.LogRecord:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a=%s", (FORGED,), None)
    record.__dict__.update(extra)
    return record


def test_no_log_line_can_be_forged() -> None:
    escaped = r"1\r\n2026 INFO forged\x1b[2J\x85\u2028\u202e\ud800"
    formatter = logs.LineFormatter("%(message)s")
    assert formatter.format(log_record()) == f"a={escaped}"
    assert formatter.format(log_record(fields={"b": FORGED})) == f"a={escaped}: b={escaped}"


def test_a_json_line_holds_the_same_and_is_one_line() -> None:
    fields = {"b": FORGED, "rows": 3, "ms": 1.23456}
    try:
        raise ValueError(FORGED)
    except ValueError:
        record = log_record(fields=fields, created=1e9, msecs=5.0, exc_info=sys.exc_info())
    line = logs.JsonFormatter().format(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    found = json.loads(line)
    assert "ValueError" in found.pop("traceback")
    assert found == {
        "time": "2001-09-09T01:46:40.005Z",
        "level": "INFO",
        "logger": "x",
        "message": f"a={FORGED}",
        **fields,
        "ms": 1.235,
    }


# Names: DNS rebinding


@pytest.mark.parametrize(
    ("host", "origin", "is_served"),
    [
        ("evil.example:8017", "http://evil.example:8017", False),
        ("evil.example:8017", "null", False),
        ("evil.example.", "http://evil.example.", False),
        ("127.0.0.1.evil.example", "http://127.0.0.1.evil.example", False),
        ("evil.example:8017", None, True),  # no browser: a proxy, or a scraper by its own name for this machine
        ("evil.example", "https://a.example", True),  # what the operator allowed
        ("a.example", "http://a.example", True),  # its own page, under a name that the operator allowed
        ("127.0.0.1:8017", "http://127.0.0.1:8017", True),
        ("127.0.0.1:8017", "http://evil.example", True),  # another site: answered, but its script cannot read it
        ("[::1]:8017", "http://[::1]:8017", True),
        ("localhost:8017", "http://localhost:8017", True),
        ("box.local", "http://box.local", True),
        ("gpu-box:8017", "http://gpu-box:8017", True),
    ],
)
def test_a_browser_cannot_be_led_here_under_a_foreign_name(host: str, origin: str | None, is_served: bool) -> None:
    with serve(allowed_origins="https://a.example") as running:
        fields = [f"Host: {host}", *([f"Origin: {origin}"] if origin else []), "Content-Length: 2"]
        response = running.ask(lines("POST /v1/systemone HTTP/1.1", *fields, body=b"{}"))
        assert response.status == (200 if is_served else 400)
        if not is_served:
            assert b"--allowed-origins" in response.body
