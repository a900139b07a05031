"""As properties, through the real handler and the real decider: whatever the bytes of a request, one well-formed
response with a status that the contract allows, and the next request is answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onepass.edge.handler import HttpServer
from tests.support.fake_engine import body
from tests.support.http_client import Client, Response, get, post
from tests.support.real_server import serve

ALLOWED = {200, 400, 413, 415, 422}  # of a request whose framing and path are right
HOSTILE = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with serve() as running:
        yield running


def ask(server: HttpServer, request: bytes) -> Response:
    """The response, checked; then another request, on the same connection if it is kept, must be answered."""
    with Client(("127.0.0.1", server.server_port)) as client:
        response = client.send(request).read()
        assert response.status in ALLOWED, response
        check_shape(response)
        if response.headers["connection"] == "keep-alive":
            assert client.send(post(body())).read().status == 200
        else:
            assert client.is_closed()
    return response


def check_shape(response: Response) -> None:
    document = json.loads(response.body, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
    if response.status == 200:
        assert set(document) == {"model", "answers", "usage", "x_latency_ms"}
        for answer in document["answers"].values():
            assert answer["type"] in answer
    elif response.status == 422:
        assert document["detail"]
        for error in document["detail"]:
            assert set(error) == {"loc", "msg", "type"}
            assert error["loc"][0] == "body"
            assert error["msg"]
    else:
        assert document["detail"]["error_type"]
        assert document["detail"]["message"]


# JSON, as bytes

FRAGMENTS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud83d", b"\\ude00", b"NaN", b"-Infinity", b"1e999"),
    *(b"true", b"null", b"-", b"0", b"1.5", b"9" * 5000, b"[" * 70, b"]" * 70, b"\xff", b"\xef\xbb\xbf", b"\0", b" "),
    *(b'"state"', b'"questions"', b'"type"', b'"noul"', b'"choice"', b'"criteria"', b'"x"', b'"\xc3\xa9"', body()),
]
BYTES = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=6)), max_size=20).map(b"".join)


@HOSTILE
@given(BYTES)
def test_any_bytes_as_a_body_are_answered(server: HttpServer, sent: bytes) -> None:
    ask(server, post(sent))


@HOSTILE
@given(st.integers(0, len(body())), st.integers(0, 6), st.one_of(st.binary(max_size=4), st.sampled_from(FRAGMENTS)))
def test_a_body_with_a_piece_changed_is_answered(server: HttpServer, place: int, cut: int, change: bytes) -> None:
    whole = body()
    ask(server, post(whole[:place] + change + whole[place + cut :]))


# JSON, as values

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=12,
)
TEXTS = st.one_of(VALUES, st.sampled_from(["", "Is it late?", {}, [], None]))
QUESTION = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["noul", "choice", "score", "x", None])},
        optional={
            "instructions": TEXTS,
            "criteria": st.one_of(
                VALUES,
                st.dictionaries(st.text(max_size=4), TEXTS, max_size=4),
                st.lists(TEXTS, max_size=11),
                st.fixed_dictionaries({}, optional={"true": TEXTS, "false": TEXTS, "yes": TEXTS, "no": TEXTS}),
            ),
            "extra": VALUES,
        },
    ),
)
REQUEST = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {"state": TEXTS, "questions": st.one_of(VALUES, st.dictionaries(st.text(max_size=6), QUESTION, max_size=4))},
        optional={
            "model": TEXTS,
            "encoding": st.one_of(VALUES, st.sampled_from(["joint", "per_question"])),
            "images": VALUES,
            "assets": VALUES,
            "extra": VALUES,
        },
    ),
)


@HOSTILE
@given(REQUEST)
def test_any_json_is_answered(server: HttpServer, document: object) -> None:
    """`json.dumps` writes NaN, Infinity and lone surrogates as escapes: those are among what is sent."""
    response = ask(server, post(json.dumps(document).encode()))
    if response.status == 200:
        assert isinstance(document, dict)
        assert list(json.loads(response.body)["answers"]) == list(document["questions"])


# What says how the body is to be read

CONTENT_TYPES = st.one_of(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, blacklist_categories=["Cc"]), max_size=40),
    st.sampled_from(
        [
            "multipart/form-data",
            "multipart/form-data; boundary=b",
            'multipart/form-data; boundary="',
            "multipart/form-data; boundary=" + "b" * 300,
            "multipart/form-data; boundary*=utf-8''%ff",
            "application/json; charset=x",
        ]
    ),
)
PARTS = [b"--b", b"--", b"\r\n", b"\n", b"\r\n\r\n", b"Content-Disposition: form-data; ", b'name="request"', b"name=x"]
FORMS = st.lists(st.one_of(st.sampled_from([*PARTS, body()]), st.binary(max_size=6)), max_size=16).map(b"".join)


@HOSTILE
@given(CONTENT_TYPES, st.one_of(FORMS, st.just(body())))
def test_any_content_type_is_answered(server: HttpServer, content_type: str, sent: bytes) -> None:
    ask(server, post(sent, headers=f"Content-Type: {content_type}\r\n"))


@HOSTILE
@given(st.sampled_from(["gzip", "x-gzip", "zstd", "br", "identity"]), st.data())
def test_any_encoded_body_is_answered(server: HttpServer, encoding: str, data: st.DataObject) -> None:
    packed = gzip.compress(body(), mtime=0)
    place = data.draw(st.integers(0, len(packed)))
    sent = data.draw(st.one_of(st.just(packed[:place] + b"\0" + packed[place:]), st.just(packed[:place]), BYTES))
    ask(server, post(sent, headers=f"Content-Encoding: {encoding}\r\n"))


FIELDS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Authorization", "Origin", "X-Request-Id", "Accept", "Accept-Encoding", "Cookie", "TE", "Via"]
        ),
        st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, blacklist_categories=["Cc"]), max_size=60),
    ),
    max_size=6,
)


@HOSTILE
@given(FIELDS)
def test_no_field_without_a_meaning_changes_the_answer(server: HttpServer, fields: list[tuple[str, str]]) -> None:
    assert ask(server, post(body(), headers="".join(f"{n}: {v}\r\n" for n, v in fields))).status == 200


def test_it_is_ready_after_all_that(server: HttpServer) -> None:
    with Client(("127.0.0.1", server.server_port)) as client:
        health = json.loads(client.send(get("/health")).read().body)
    assert health["status"] == "ready"
    assert health["queued_rows"] == 0
