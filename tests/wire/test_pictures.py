"""Which pictures a request carries and where they are shown: the three forms, and what is refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from onepass.errors import BadRequest
from onepass.wire.pictures import MAX_NAME_CHARS, Source, collect_pictures, decode_base64, mark_pictures
from onepass.wire.request import MAX_PICTURES, Request, picture_mark
from onepass.wire.schema import parse_request

DATA = b"\x89PNG\r\n\x1a\n\xfb\xff\xfe?\xff"
PLAIN = base64.b64encode(DATA).decode()
A, B = picture_mark(0), picture_mark(1)


def request(state: Any = "x", parts: dict[str, bytes] | None = None, **fields: Any) -> Request:
    question = {"type": "choice", "instructions": "i", "criteria": {"a": "d", "b": None}}
    body = json.dumps({"state": state, "questions": {"q": question}, **fields}).encode()
    if parts is None:
        return parse_request(body)
    lines = [b'Content-Disposition: form-data; name="request"\r\n\r\n' + body]
    lines += [f'Content-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + data for name, data in parts.items()]
    whole = b"".join(b"--edge\r\n" + line + b"\r\n" for line in lines) + b"--edge--\r\n"
    return parse_request(whole, "multipart/form-data; boundary=edge")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, DATA),
        (f"data:image/png;base64,{PLAIN}", DATA),
        (f"data:image/png;charset=x;base64,{PLAIN}", DATA),
        (f"DATA:image/jpeg;BASE64,{PLAIN}", DATA),
        (f"data:;base64,{PLAIN}", DATA),
        ("\n".join(PLAIN[i : i + 4] for i in range(0, len(PLAIN), 4)), DATA),
        (f" \t\r\n{PLAIN}\v\f", DATA),
        (PLAIN.rstrip("="), None),
        (PLAIN.replace("+", "-").replace("/", "_"), None),
        ("@@@@" + PLAIN, None),
        (PLAIN + "=", None),
        (PLAIN + PLAIN, None),  # padding in the middle
        ("no base 64 at all", None),
        ("bündel==", None),
        ("", None),
        ("data:image/png;base64,", None),
        ("data:image/png;base64" + PLAIN, None),
        (f"data:image/png,{PLAIN}", None),
        ("https://example.com/cat.png", None),
        ("HTTP://example.com/cat.png", None),
        ("file:///etc/passwd", None),
        ("  ftp://x", None),
        ("//example.com/cat.png", None),
        ("/etc/passwd", None),
    ],
)
def test_base64_is_read_strictly_but_for_white_space_and_a_data_prefix(text: str, expected: bytes | None) -> None:
    if expected is not None:
        assert decode_base64("image 'a'", text) == expected
        return
    with pytest.raises(BadRequest) as caught:
        decode_base64("image 'a'", text)
    assert caught.value.message.startswith("image 'a'")
    assert not text or text not in caught.value.message


def test_a_url_is_said_to_be_one() -> None:
    for url in ("https://example.com/a.png", "s3://bucket/a.png"):
        with pytest.raises(BadRequest, match="is a URL: pictures are not fetched"):
            collect_pictures(request(images={"a": url}))


@pytest.mark.parametrize(
    ("fields", "placeholders"),
    [
        ({"images": {"a": PLAIN, "b c": PLAIN}}, ["<image:a>", "<image:b c>"]),
        ({"images": [PLAIN, {"content_type": "image/png", "base64": PLAIN}]}, ["<image:1>", "<image:2>"]),
        ({"images": {"a": {"base64": PLAIN}}}, ["<image:a>"]),
        ({"assets": {"@a": {"type": "image", "format": "png", "data_base64": PLAIN}}}, ["@a"]),
        ({"assets": {"@a": {"type": "image", "data_base64": PLAIN}}}, ["@a"]),
        ({"images": [PLAIN], "assets": {"@a": {"type": "image", "data_base64": PLAIN}}}, ["<image:1>", "@a"]),
        (
            {
                "assets": {
                    "@a": {"type": "image", "part": "asset-0", "data_base64": "ignored"},
                    "@b": {"type": "image", "part": "asset-1"},
                },
                "parts": {"asset-1": DATA, "asset-0": DATA},
            },
            ["@a", "@b"],
        ),
    ],
)
def test_every_way_in_gives_the_same_bytes(fields: dict[str, Any], placeholders: list[str]) -> None:
    sources = collect_pictures(request(**fields))
    assert [source.placeholder for source in sources] == placeholders
    assert {source.data for source in sources} == {DATA}


IMAGE = {"type": "image", "data_base64": PLAIN}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"images": {"a": 1}}, "image 'a' must be base64"),
        ({"images": {"a": None}}, "image 'a' must be base64"),
        ({"images": {"a": {"content_type": "image/png"}}}, "image 'a' must be base64"),
        ({"images": [[PLAIN]]}, "image '1' must be base64"),
        ({"images": {"": PLAIN}}, "1 to 256 characters"),
        ({"images": {"a" * (MAX_NAME_CHARS + 1): PLAIN}}, "1 to 256 characters"),
        ({"images": [PLAIN] * (MAX_PICTURES + 1)}, "at most 16 images, not 17"),
        (
            {"images": [PLAIN] * 10, "assets": {f"@{n}": IMAGE for n in range(7)}},
            "at most 16 images, not 17",
        ),
        ({"assets": {"": IMAGE}}, "1 to 256 characters"),
        ({"assets": {"@a": "x"}}, "asset '@a' must be an object with type 'image'"),
        ({"assets": {"@a": {"data_base64": PLAIN}}}, "asset '@a' must be an object with type 'image'"),
        ({"assets": {"@a": {**IMAGE, "type": "video"}}}, "type 'image'"),
        (
            {"assets": {"@a": {**IMAGE, "format": "tiff"}}},
            "asset '@a': format must be one of gif, jpeg, jpg, png, webp",
        ),
        ({"assets": {"@a": {**IMAGE, "format": 5}}}, "format must be one of"),
        ({"assets": {"@a": {"type": "image"}}}, "asset '@a' must have data_base64"),
        ({"assets": {"@a": {"type": "image", "data_base64": 5}}}, "asset '@a' must have data_base64"),
        ({"assets": {"@a": {"type": "image", "part": "asset-0"}}}, "asset '@a': part must name a part"),
        ({"assets": {"@a": {"type": "image", "part": 3}}}, "asset '@a': part must name a part"),
        ({"assets": {"@a": {"type": "image", "part": "b"}}, "parts": {"a": DATA}}, "asset '@a': part must name a part"),
        (
            {
                "assets": {"@a": {"type": "image", "part": "a"}, "@b": {"type": "image", "part": "a"}},
                "parts": {"a": DATA},
            },
            "asset '@b': another asset has the same part",
        ),
        (
            {"assets": {"@a": {"type": "image", "part": "a"}}, "parts": {"a": DATA, "b": DATA}},
            "no asset claims the part 'b'",
        ),
        ({"parts": {"a": DATA}}, "no asset claims the part 'a'"),
        ({"images": {"a": PLAIN}, "assets": {"<image:a>": IMAGE}}, "one placeholder two pictures"),
        ({"state": "nothing here", "assets": {"@a": IMAGE}}, "asset '@a' is shown nowhere"),
        ({"state": {"@a": "only a key"}, "assets": {"@a": IMAGE}}, "asset '@a' is shown nowhere"),
    ],
)
def test_a_bad_picture_is_a_400_that_names_it(fields: dict[str, Any], says: str) -> None:
    asked = request(**fields)
    with pytest.raises(BadRequest, match=says) as caught:
        mark_pictures(asked, collect_pictures(asked))
    assert PLAIN not in caught.value.message
    assert caught.value.status == 400


def test_a_name_that_stands_twice_is_refused() -> None:
    body = b'{"state": "x", "questions": {"q": {"type": "noul", "instructions": "?"}}, "%s": {"a": "", "a": ""}}'
    for field in (b"images", b"assets"):
        with pytest.raises(BadRequest, match=f"{field.decode()} must not name 'a' twice"):
            collect_pictures(parse_request(body % field))


def sources(*placeholders: str, is_asset: bool = False) -> list[Source]:
    return [Source(f"picture {name}", name, DATA, is_asset) for name in placeholders]


@pytest.mark.parametrize(
    ("state", "placeholders", "expected", "tail"),
    [
        ("see @a and @b.", ("@a", "@b"), f"see {A} and {B}.", ""),
        ("@a@a", ("@a",), A + A, ""),
        ("@a", ("@a", "@b"), A, B),
        ("none", ("@a", "@b"), "none", A + B),
        ("@ab", ("@a", "@ab"), B, A),  # the longest first
        (
            {"a": ["@a", {"b": "x @b"}], "@a": None, "n": 1},
            ("@a", "@b"),
            {"a": [A, {"b": f"x {B}"}], "@a": None, "n": 1},
            "",
        ),
        (["@b", "@a"], ("@a", "@b"), [B, A], ""),
    ],
)
def test_marks_stand_where_a_text_names_a_picture(
    state: Any, placeholders: tuple[str, ...], expected: Any, tail: str
) -> None:
    placed = mark_pictures(request(state), sources(*placeholders))
    assert (placed.state, placed.tail) == (expected, tail)


def test_questions_can_show_pictures_too_but_not_in_their_labels() -> None:
    asked = parse_request(
        json.dumps(
            {
                "state": "",
                "questions": {
                    "@a": {
                        "type": "choice",
                        "instructions": ["like", "@a"],
                        "criteria": {"@a": "as @b", "other": None},
                    },
                    "s": {"type": "score", "criteria": ["@a", "x"]},
                },
            }
        ).encode()
    )
    placed = mark_pictures(asked, sources("@a", "@b", is_asset=True))
    first, second = placed.questions
    assert (first.id, first.instructions, first.options) == ("@a", ["like", A], ("@a", "other"))
    assert first.descriptions == (f"as {B}", None)
    assert second.descriptions == (A, "x")


def test_many_placeholders_in_a_long_text_take_no_time() -> None:
    text = "a" * (4 << 20)
    names = [f"{'a' * 200}{n}" for n in range(MAX_PICTURES)]
    assert mark_pictures(request(text), sources(*names)).state == text
