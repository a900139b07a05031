"""This module finds which pictures a request carries, and where its texts show them.

A picture can come in three ways, and all of them become one form. `collect_pictures` finds the bytes, and
`mark_pictures` puts a mark where a picture is shown. The module knows nothing of what is in a picture.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onepass.errors import BadRequest, shorten
from onepass.wire.body import RepeatedKeys
from onepass.wire.request import MAX_PICTURES, Request, picture_mark

MAX_NAME_CHARS = 256  # of a picture's own name: each is searched for in every text
FORMAT_NAMES = frozenset({"png", "jpg", "jpeg", "webp", "gif"})
WHITE_SPACE = b" \t\n\r\v\f"
URL = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Source:
    """A source is a picture as it came."""

    field: str  # An error calls the picture by this name.
    placeholder: str
    data: bytes
    is_asset: bool  # An asset must be shown somewhere. Any other picture that no text names goes after the state.


def collect_pictures(request: Request) -> list[Source]:
    """Return the request's pictures, decoded from base64. Raises `BadRequest`, which names the picture at fault."""
    num_pictures = len(request.images or ()) + len(request.assets or ())
    if num_pictures > MAX_PICTURES:
        raise BadRequest(f"a request may carry at most {MAX_PICTURES} images, not {num_pictures}")
    for field, value in (("images", request.images), ("assets", request.assets)):
        if isinstance(value, RepeatedKeys):
            raise BadRequest(f"{field} must not name {shorten(value.key)!r} twice")
    sources = list(_images(request.images or {}))
    unclaimed = dict(request.parts)
    for name, asset in (request.assets or {}).items():
        field = f"asset {shorten(name)!r}"
        _check_name(field, name)
        sources.append(Source(field, name, _asset_data(field, asset, request.parts, unclaimed), True))
    if unclaimed:
        raise BadRequest(f"no asset claims the part {shorten(next(iter(unclaimed)))!r}")
    placeholders = {source.placeholder for source in sources}
    if len(placeholders) < len(sources):
        raise BadRequest("images and assets must not give one placeholder two pictures")
    return sources


def _images(images: Mapping[str, Any] | list[Any]) -> Iterator[Source]:
    named = images.items() if isinstance(images, Mapping) else ((str(n), item) for n, item in enumerate(images, 1))
    for name, item in named:
        field = f"image {shorten(name)!r}"
        _check_name(field, name)
        if isinstance(item, dict):
            item = item.get("base64")
        if not isinstance(item, str):
            raise BadRequest(f'{field} must be base64, a data: URL or {{"content_type", "base64"}}')
        yield Source(field, f"<image:{name}>", decode_base64(field, item), False)


def _asset_data(field: str, asset: object, parts: Mapping[str, bytes], unclaimed: dict[str, bytes]) -> bytes:
    if not isinstance(asset, dict) or asset.get("type") != "image":
        raise BadRequest(f"{field} must be an object with type 'image'")
    if asset.get("format") is not None and str(asset["format"]).lower() not in FORMAT_NAMES:
        raise BadRequest(f"{field}: format must be one of {', '.join(sorted(FORMAT_NAMES))}")
    part = asset.get("part")
    if part is not None:
        if not isinstance(part, str) or part not in parts:
            raise BadRequest(f"{field}: part must name a part of a multipart/form-data body")
        if part not in unclaimed:
            raise BadRequest(f"{field}: another asset has the same part")
        return unclaimed.pop(part)
    if not isinstance(asset.get("data_base64"), str):
        raise BadRequest(f"{field} must have data_base64, or a part in a multipart/form-data body")
    return decode_base64(field, asset["data_base64"])


def decode_base64(field: str, text: str) -> bytes:
    """Decode base64 strictly. Only white space and a `data:` prefix are allowed besides it.

    Raises `BadRequest`, which repeats nothing of the text.
    """
    if URL.match(text):
        raise BadRequest(f"{field} is a URL: pictures are not fetched, send their bytes in base64")
    start = 0
    if text[:64].lstrip().lower().startswith("data:"):
        start = text.find(",", 0, 1024) + 1
        if not text[: max(0, start - 1)].rstrip().lower().endswith(";base64"):
            raise BadRequest(f"{field}: a data URL must be data:TYPE;base64,DATA")
    try:
        encoded = text[start:].encode("ascii").translate(None, WHITE_SPACE)
        data = binascii.a2b_base64(encoded, strict_mode=True)
    except (UnicodeEncodeError, binascii.Error):
        raise BadRequest(f"{field} is not base64: A-Z a-z 0-9 + / and = to a multiple of four characters") from None
    if not data:
        raise BadRequest(f"{field} is empty")
    return data


def _check_name(field: str, name: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise BadRequest(f"{field}: the name must have 1 to {MAX_NAME_CHARS} characters")


def mark_pictures(request: Request, sources: list[Source]) -> Request:
    """Return the request with a mark wherever a text names a picture. `tail` holds the marks of unnamed pictures.

    The longest placeholder is searched first. Only strings are searched, not the keys of objects. Raises `BadRequest`
    for an asset that no text names.
    """
    marks = [(source.placeholder, picture_mark(index)) for index, source in enumerate(sources)]
    marks.sort(key=lambda mark: -len(mark[0]))
    used: set[str] = set()
    state = _mark(request.state, marks, used)
    questions = tuple(
        replace(
            question,
            instructions=_mark(question.instructions, marks, used),
            descriptions=tuple(_mark(text, marks, used) for text in question.descriptions),
        )
        for question in request.questions
    )
    unused = [source for source in sources if source.placeholder not in used]
    for source in unused:
        if source.is_asset:
            raise BadRequest(f"{source.field} is shown nowhere: its key must stand in the state or a question")
    tail = "".join(mark for placeholder, mark in sorted(marks, key=lambda mark: mark[1]) if placeholder not in used)
    return replace(request, state=state, questions=questions, tail=tail)


def _mark(value: Any, marks: list[tuple[str, str]], used: set[str]) -> Any:
    """Replace placeholders in every string of `value` by marks. The reader of the body bounds the recursion."""
    if isinstance(value, str):
        for placeholder, mark in marks:
            if placeholder in value:
                used.add(placeholder)
                value = value.replace(placeholder, mark)
        return value
    if isinstance(value, dict):
        return {key: _mark(item, marks, used) for key, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, marks, used) for item in value]
    return value
