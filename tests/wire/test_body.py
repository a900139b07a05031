"""Body bytes to one JSON object: what the contract lets through, and what it does not."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepass.errors import BadRequest, InvalidRequest
from onepass.wire.body import MAX_DEPTH, RepeatedKeys, read_json, read_multipart

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_json_is_read_as_it_was_written(value: object) -> None:
    for ascii_only in (True, False):
        try:
            body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8")
        except UnicodeEncodeError:
            continue
        assert read_json(body) == value


@given(st.binary(max_size=60))
def test_whatever_the_bytes_only_our_own_errors_come_out(body: bytes) -> None:
    try:
        read_json(body)
    except InvalidRequest as err:
        json.loads(err.body())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body must be JSON: Expecting value"),
        (b"\xff", "the body must be JSON in UTF-8"),
        (b'{"a"', "the body must be JSON: Expecting ':' delimiter"),
        (b"{} x", "the body must be JSON: Extra data"),
        ('{"state": "x"}'.encode("utf-16"), "the body must be JSON in UTF-8"),
        (
            '{"state": "x"}'.encode("utf-16-le"),
            "the body must be JSON: Expecting property name enclosed in double quotes",
        ),
        (b'\xef\xbb\xbf{"a": 1}', "the body must not begin with a byte-order mark"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "the number 1e999 is too large for a double"),
        (b'{"a": -1e999}', "the number -1e999 is too large for a double"),
        (b'{"a": ' + b"1" * 4301 + b"}", "an integer must have at most 4300 digits"),
        (b'{"a": "\x01"}', "the body must be JSON: Invalid control character at"),
        (b'"\xed\xa0\x80"', "the body must be JSON in UTF-8"),
    ],
)
def test_what_is_not_json_is_said(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_json(body)
    assert caught.value.errors[0][1].rpartition(" (")[0] == message


LONG = "1" * 4301


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a": |NaN}', "column 7"),
        (r'{"é": ["NaN", "\"NaN", 1, |NaN, NaN]}', "column 27"),
        ('{\n "a": [1,\n  |-Infinity]}', "line 3, column 3"),
        ('{"a": "Infinity",\r\n"a" |1}', "line 2, column 5"),
        ('[1.5e300, 1e99, "1e999", 11e99, |1e999]', "column 33"),
        (f'["{LONG}", 0.{LONG}, 1{LONG}e-{LONG}, |-{LONG}]', ""),
        (f"[1,\n0.{LONG}e3, |{LONG}]", ""),
        ("{}|}", "column 3"),
        ("[" * 64 + "|" + "[" * 3 + "]" * 67, "column 65"),
        ('["[{", "\\"[",\n' * 64 + "|[" + "]" * 65, "line 65, column 1"),
        ("[[], " * 63 + "[|[], {}" + "]" * 64, ""),
        ("|\ufeff{}", "column 1"),
        ('{"a":\n"é|\udcff"}', "line 2, column 3"),
    ],
)
def test_what_is_wrong_is_located(text: str, where: str) -> None:
    body = text.replace("|", "", 1)
    with pytest.raises(InvalidRequest) as caught:
        read_json(body.encode("utf-8", "surrogateescape"))
    (((place,), msg, kind),) = caught.value.errors
    assert (place, kind) == (text.index("|"), "json_invalid")
    assert msg.endswith(f"({where})" if where else ")")
    assert len(msg) < 120


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        (rb'{"state": "\ud83d"}', ("state",)),
        (rb'{"state": ["a", {"b": "\udc00x"}]}', ("state", 1, "b")),
        (rb'{"\ud83d": 1}', ()),
        (rb'{"a": "\ude00\ud83d"}', ("a",)),
        (rb'{"s": {"a": "\ud83d", "a": "x"}}', ("s", "a")),
    ],
)
def test_a_lone_surrogate_is_found_wherever_it_is(body: bytes, loc: tuple[str | int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_json(body)
    assert caught.value.errors[0][0] == loc
    caught.value.body().decode("utf-8")


def test_a_surrogate_pair_is_a_character() -> None:
    assert read_json(rb'"\ud83d\ude00"') == "😀"
    assert read_json(rb'"\\ud83d"') == "\\ud83d"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_is_bounded_before_anything_recurses(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    read_json(opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 20_000, 1_000_000):
        with pytest.raises(InvalidRequest, match="deeper than 64"):
            read_json(opening * depth + b"1" + closing * depth)


def test_brackets_in_strings_are_not_nesting() -> None:
    text = "[{" * 1000 + '"\\'
    assert read_json(json.dumps([text]).encode()) == [text]


def test_the_depth_check_is_linear() -> None:
    started = time.process_time()
    for body in (
        b"[" * 65 + b'"' + b'\\"' * 500_000,
        b"[" * 65 + b'"\\' * 500_000,
        b'{"a":"' * 200_000,
        b'"\\' * 500_000,
        b"[]" * 500_000,
        b'["' + b"\\\\" * 500_000,
        b'{"a' * 300_000,
    ):
        with pytest.raises(InvalidRequest):
            read_json(body)
    assert time.process_time() - started < 20  # quadratic would be hours


def test_the_longest_integer_is_read_whatever_its_sign() -> None:
    assert read_json(b"-" + b"9" * 4300) == -int("9" * 4300)


def test_a_long_integer_is_refused_even_where_the_process_has_no_limit() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(InvalidRequest, match="4300 digits"):
            read_json(b"1" * 5000)
    finally:
        sys.set_int_max_str_digits(before)


def test_a_repeated_key_is_remembered() -> None:
    value = read_json(b'{"a": 1, "b": 2, "a": 3}')
    assert isinstance(value, RepeatedKeys)
    assert value.key == "a"
    assert not isinstance(read_json(b'{"a": 1, "b": {"a": 1}}'), RepeatedKeys)


def multipart(*parts: tuple[str, bytes], end: str = "--XX--\r\n") -> bytes:
    return (
        b"".join(
            f'--XX\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + content + b"\r\n"
            for name, content in parts
        )
        + end.encode()
    )


def test_multipart_gives_the_request_and_the_other_parts() -> None:
    body = multipart(("request", b'{"a": 1}'), ("asset-0", b"\x00\r\n--X\xff"))
    assert read_multipart(body, "multipart/form-data; boundary=XX") == (b'{"a": 1}', {"asset-0": b"\x00\r\n--X\xff"})


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"", "multipart/form-data", "boundary"),
        (b"", "multipart/form-data; boundary=XX", "closing boundary"),
        (b"", f"multipart/form-data; boundary={'x' * 300}", "Boundary length"),
        (multipart(("request", b"{}"), end=""), "multipart/form-data; boundary=XX", "closing boundary"),
        (multipart(("a", b"{}")), "multipart/form-data; boundary=XX", "part named request"),
        (
            multipart(("request", b"{}"), ("request", b"{}")),
            "multipart/form-data; boundary=XX",
            "two parts named 'request'",
        ),
        (multipart(*((str(n), b"") for n in range(70))), "multipart/form-data; boundary=XX", "at most 64 parts"),
        (b"--XX\r\n\r\nx\r\n--XX--\r\n", "multipart/form-data; boundary=XX", "must have a name"),
        (b"garbage", "multipart/form-data; boundary=XX", "cannot be read"),
    ],
)
def test_broken_multipart_is_a_400_that_says_why(body: bytes, content_type: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_multipart(body, content_type)


@given(st.binary(max_size=80), st.text(max_size=20))
def test_whatever_the_multipart_only_our_own_errors_come_out(body: bytes, boundary: str) -> None:
    for content in (body, b"--X\r\n" + body + b"\r\n--X--\r\n"):
        for content_type in (f"multipart/form-data; boundary={boundary}", "multipart/form-data; boundary=X"):
            with contextlib.suppress(BadRequest):
                read_multipart(content, content_type)
