"""This module turns the bytes of a request body into one JSON object, strictly.

It knows nothing of what the object must hold. Python's own JSON reader is too lenient for a decision: it accepts NaN,
it silently keeps the last of repeated keys, it makes strings that no encoder can write, and it recurses with its input.
"""

from __future__ import annotations

import json
import math
import re
from itertools import islice
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from onepass.errors import BadRequest, InvalidRequest, shorten

MAX_DEPTH = 64  # This is the limit on nested arrays and objects. The body's own object counts too.
# CPython has the same limit on the conversion of an integer. It holds here even if a process lifts CPython's limit,
# since the cost is quadratic.
MAX_DIGITS = 4300
MAX_PARTS = 64  # A multipart body has one part for the request and parts for its assets.
# The closing quote is optional. If it were required, an unterminated string would be tried again from each escape.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
# These two patterns find the place of an error. They match strings, which are skipped, and what may be wrong outside.
_STRING_OR_BRACKET = re.compile(f"{_STRING.pattern}|{_BRACKET.pattern}", re.DOTALL)
_STRING_OR_NUMBER = re.compile(
    _STRING.pattern + r"|-?(?:NaN|Infinity|(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)", re.DOTALL
)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RepeatedKeys(dict[str, Any]):
    """This is an object in which a key appears twice. `key` is the first such key."""

    key: str


def read_json(body: bytes) -> object:
    """Read the body as JSON. Raises `InvalidRequest` for anything but UTF-8 JSON as the contract allows it."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as err:
        before = body[: err.start].decode("utf-8")
        raise _invalid(before, len(before), "the body must be JSON in UTF-8") from None
    if text.startswith("\ufeff"):
        raise _invalid(text, 0, "the body must not begin with a byte-order mark")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
    except json.JSONDecodeError as err:
        raise _invalid(text, err.pos, f"the body must be JSON: {err.msg}") from None
    except _BadToken as err:
        place = next((token.start() for token in _STRING_OR_NUMBER.finditer(text) if token[0] == err.token), 0)
        raise _invalid(text, place, str(err)) from None
    if _SURROGATE.search(text):  # Only an escape can write a surrogate, since UTF-8 has none.
        _check_surrogates(json.loads(text, object_pairs_hook=_Pairs), ())
    return value


class _BadToken(Exception):
    """The contract forbids a number in the body. The JSON reader does not say where the number is."""

    def __init__(self, token: str, msg: str) -> None:
        super().__init__(msg)
        self.token = token


def _invalid(text: str, place: int, msg: str) -> InvalidRequest:
    """Make the error for the character at `place`, which counts from 0. The message gives the column, and the line if
    there are several."""
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    where = f"line {line}, column {column}" if "\n" in text else f"column {column}"
    return InvalidRequest.at((place,), f"{msg} ({where})", "json_invalid")


def _check_depth(text: str) -> None:
    """Check the depth of the brackets outside strings in one flat pass, before any recursion."""
    depth = 0
    for number, bracket in enumerate(_BRACKET.finditer(_STRING.sub("", text))):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            brackets = (token.start() for token in _STRING_OR_BRACKET.finditer(text) if token[0] in "[]{}")
            place = next(islice(brackets, number, None))
            raise _invalid(text, place, f"the body must not nest arrays and objects deeper than {MAX_DEPTH}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    repeated = RepeatedKeys(pairs)
    seen: set[str] = set()
    repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return repeated


def _integer(digits: str) -> int:
    if len(digits.removeprefix("-")) > MAX_DIGITS:
        raise _BadToken(digits, f"an integer must have at most {MAX_DIGITS} digits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _BadToken(digits, f"the number {digits[:20]} is too large for a double")
    return value


def _constant(name: str) -> float:
    raise _BadToken(name, f"{name} is not JSON")


class _Pairs(list[tuple[str, Any]]):
    """This is an object with all its keys, even those that appear twice."""


def _check_surrogates(value: object, loc: tuple[str | int, ...]) -> None:
    """Refuse a lone surrogate in any string. `MAX_DEPTH` bounds the recursion."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidRequest.at(loc, "must not hold a lone surrogate", "string_unicode") from None
    elif isinstance(value, _Pairs):
        for key, item in value:
            _check_surrogates(key, loc)
            _check_surrogates(item, (*loc, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_surrogates(item, (*loc, index))


def read_multipart(body: bytes, content_type: str) -> tuple[bytes, dict[str, bytes]]:
    """Split `multipart/form-data` into the JSON of the part `request` and the other parts by name.

    Raises `BadRequest`.
    """
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if not boundary:
        raise BadRequest("multipart/form-data must name its boundary")
    parts: dict[str, bytes] = {}
    reader = _PartReader(parts)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as err:
        raise BadRequest(f"the multipart body cannot be read: {str(err)[:100]}") from None
    if not reader.is_complete:
        raise BadRequest("the multipart body ends before its closing boundary")
    if "request" not in parts:
        raise BadRequest("the multipart body must have a part named request that holds the JSON")
    return parts.pop("request"), parts


class _PartReader:
    """A part reader collects what the parser's callbacks deliver in `parts`."""

    def __init__(self, parts: dict[str, bytes]) -> None:
        self.parts = parts
        self.is_complete = False
        self._field = bytearray()
        self._value = bytearray()
        self._content = bytearray()
        self._name: str | None = None

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_part_data": lambda data, start, end: self._content.extend(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._name = None
        self._content = bytearray()

    def _header(self) -> None:
        if bytes(self._field).lower() == b"content-disposition":
            name = parse_options_header(bytes(self._value))[1].get(b"name")
            self._name = None if name is None else name.decode("utf-8", "replace")
        self._field, self._value = bytearray(), bytearray()

    def _end(self) -> None:
        if self._name is None:
            raise BadRequest("each multipart part must have a name")
        if self._name in self.parts:
            raise BadRequest(f"the multipart body has two parts named {shorten(self._name)!r}")
        if len(self.parts) >= MAX_PARTS:
            raise BadRequest(f"the multipart body must have at most {MAX_PARTS} parts")
        self.parts[self._name] = bytes(self._content)

    def _finish(self) -> None:
        self.is_complete = True
