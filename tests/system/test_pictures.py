"""Pictures over HTTP, as the official SDK and as curl would send them, against a server of a tiny Qwen3.5 that sees."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps
from typesafe_sdk import AsyncTypeSafeClient, Choice, Image, Noul, RetryPolicy, TypeSafeBadRequestError, TypeSafeClient

from tests.support.live import Server

TOLERANCE = 2e-4  # in probability, as in test_cases.py
QUESTION = {"type": "choice", "instructions": "What is it?", "criteria": {"a": None, "b": "second", "c": None}}
NO_RETRY = RetryPolicy(max_retries=0)


def drawing(width: int = 300, height: int = 200, seed: int = 0) -> Pillow.Image:
    small = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Pillow.fromarray(small).resize((width, height))


def save(image: Pillow.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


PNG, JPEG = save(drawing()), save(drawing(seed=1), "JPEG")


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def ask(server: Server, state: Any, **fields: Any) -> tuple[int, Any]:
    return server.post({"state": state, "questions": {"q": QUESTION}, **fields})


def probabilities(server: Server, state: Any, **fields: Any) -> dict[str, float]:
    status, document = ask(server, state, **fields)
    assert status == 200, document
    found: dict[str, float] = document["answers"]["q"]["probabilities"]
    return found


def assert_close(one: dict[str, float], other: dict[str, float]) -> None:
    assert one == pytest.approx(other, abs=TOLERANCE)


def assert_differ(one: dict[str, float], other: dict[str, float]) -> None:
    assert max(abs(one[name] - other[name]) for name in one) > 10 * TOLERANCE


def message(status: int, document: Any) -> str:
    assert (status, document["detail"]["error_type"]) == (400, "api_usage_error"), document
    found: str = document["detail"]["message"]
    return found


@pytest.fixture(autouse=True)
def still_answers(seeing: Server) -> Iterator[None]:
    """Whatever was sent, the worker is alive afterwards and nothing of a picture is in the log."""
    yield
    assert 0 <= seeing.ask("words", {"type": "noul", "instructions": "?"})["noul"] <= 1
    log = "".join(seeing.log)
    assert "Traceback" not in log
    assert not re.search(r"[A-Za-z0-9+/]{60}", log)


def test_the_warm_up_is_in_no_counter(vision_checkpoint: Path) -> None:
    """It shows a picture and asks everything twice."""
    with Server("--model", str(vision_checkpoint)) as server:
        facts = json.loads(server.request("GET", "/health")[2])
        counters = ("tokens_computed", "tokens_reused", "tokens_padded", "state_cache_hits", "state_cache_misses")
        counters += ("images_encoded", "images_reused", "rows", "batches", "repeated_rows")
        assert {name: facts[name] for name in counters} == dict.fromkeys(counters, 0)
        for _ in range(2):
            status, document = ask(server, "see <image:1>", images=[encoded(PNG)])
            assert status == 200
        facts = json.loads(server.request("GET", "/health")[2])
        assert facts["tokens_computed"] + facts["tokens_reused"] == document["usage"]["input_tokens"]
        assert facts["tokens_repeated"] == document["usage"]["input_tokens"]
        # The second time it is answered from what is kept, and is in no batch
        assert (facts["rows"], facts["repeated_rows"], facts["images_encoded"]) == (1, 1, 1)


def test_the_picture_is_seen_and_counted(seeing: Server) -> None:
    status, document = ask(seeing, "see <image:a>", images={"a": encoded(PNG)})
    assert status == 200
    # 300 x 200 is shown as 320 x 224 pixels: 10 x 7 tokens
    assert document["usage"]["image_tokens"] == 70
    text = seeing.post({"state": "see ", "questions": {"q": QUESTION}})[1]
    assert "image_tokens" not in text["usage"]
    assert document["usage"]["input_tokens"] == text["usage"]["input_tokens"] + 70 + 2  # start and end
    assert_differ(document["answers"]["q"]["probabilities"], text["answers"]["q"]["probabilities"])
    assert_differ(
        document["answers"]["q"]["probabilities"],
        probabilities(seeing, "see <image:a>", images={"a": encoded(save(drawing(seed=5)))}),
    )


def test_image_tokens_are_counted_once_for_each_row_and_place(seeing: Server) -> None:
    questions = {"q": QUESTION, "r": QUESTION}
    fields = {"state": "<image:1> <image:1>", "questions": questions, "images": [encoded(PNG)]}
    for encoding, rows in (("joint", 1), ("per_question", 2)):
        assert seeing.post({**fields, "encoding": encoding})[1]["usage"]["image_tokens"] == rows * 2 * 70


def multipart(request: dict[str, Any], parts: dict[str, bytes]) -> tuple[bytes, str]:
    chunks = [b'--edge\r\nContent-Disposition: form-data; name="request"\r\n\r\n' + json.dumps(request).encode()]
    for name, data in parts.items():
        chunks.append(f'\r\n--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + data)
    return b"".join(chunks) + b"\r\n--edge--\r\n", "multipart/form-data; boundary=edge"


def test_the_same_picture_gives_the_same_answer_whichever_way_it_came_in(seeing: Server) -> None:
    expected = probabilities(seeing, "see <image:a> here", images={"a": encoded(JPEG)})
    asset = {"type": "image", "format": "jpg", "data_base64": encoded(JPEG)}
    for state, fields in (
        ("see <image:a> here", {"images": {"a": f"data:image/jpeg;base64,{encoded(JPEG)}"}}),
        ("see <image:1> here", {"images": [encoded(JPEG)]}),
        ("see <image:1> here", {"images": [{"content_type": "image/jpeg", "base64": encoded(JPEG)}]}),
        ("see @photo here", {"assets": {"@photo": asset}}),
        ("see <image:a> here", {"assets": {"<image:a>": {**asset, "format": "png"}}}),  # the bytes say what it is
        ("see <image:a> here", {"images": {"a": encoded(save(Pillow.open(io.BytesIO(JPEG))))}}),  # the same pixels
    ):
        assert_close(probabilities(seeing, state, **fields), expected)
    body, content_type = multipart(
        {
            "state": "see @photo here",
            "questions": {"q": QUESTION},
            "assets": {"@photo": {"type": "image", "part": "asset-0"}},
        },
        {"asset-0": JPEG},
    )
    status, document = seeing.post(body, Content_Type=content_type, TypeSafe_Danger_Zone_Images="1")
    assert status == 200
    assert_close(document["answers"]["q"]["probabilities"], expected)
    joint = probabilities(seeing, "see <image:a> here", images={"a": encoded(JPEG)}, encoding="joint")
    assert set(joint) == set(expected)


def test_a_picture_that_nothing_names_is_shown_at_the_end(seeing: Server) -> None:
    picture = encoded(PNG)
    assert_close(
        probabilities(seeing, "text", images={"a": picture}),
        probabilities(seeing, "text\n<image:1>", images=[picture]),
    )
    shown = probabilities(seeing, {"k": "v"}, images={"a": picture})
    assert_close(shown, probabilities(seeing, '{"k": "v"}\n<image:a>', images={"a": picture}))
    assert_differ(shown, probabilities(seeing, {"k": "v"}))


def test_the_sdk_sends_pictures_in_every_way_it_has(seeing: Server) -> None:
    """It always sends them as multipart; as JSON they go by `extra_body`."""
    questions = {"q": Choice(instructions="What is it?", criteria=QUESTION["criteria"]), "n": Noul(instructions="?")}
    photo = Image(PNG)

    def given(response: Any) -> dict[str, float]:
        assert response.usage.input_tokens > 140
        assert response.request_id.startswith("req_")
        return dict(response.choices["q"].probabilities)

    with TypeSafeClient(api_key="unused", base_url=seeing.url, retry=NO_RETRY) as sdk:
        placed = given(sdk.system_one(state={"photo": photo}, questions=questions))
        named = given(sdk.system_one(state={"photo": "@it"}, questions=questions, assets={"@it": photo}))
        with sdk.attach_assets(photo):
            attached = given(sdk.system_one(state={"photo": f"{photo}"}, questions=questions))
        asset = {"type": "image", "format": "png", "data_base64": encoded(PNG)}
        as_json = given(
            sdk.system_one(state={"photo": "@1"}, questions=questions, extra_body={"assets": {"@1": asset}})
        )
        other = given(sdk.system_one(state={"photo": Image(JPEG)}, questions=questions))
        in_question = sdk.system_one(state="x", questions={"n": Noul(instructions=["Is it like", photo, "?"])})
        drawn = Image.from_pil(drawing(), format="png")
        both = sdk.system_one(state=[drawn, Image(JPEG)], questions={"n": Noul(instructions="?")})
    for same in (named, attached, as_json):
        assert_close(same, placed)
    assert_close(placed, probabilities(seeing, {"photo": "<image:1>"}, images=[encoded(PNG)]))
    assert_differ(other, placed)
    assert 0 <= in_question.nouls["n"].noul <= 1
    assert both.usage.input_tokens > 140

    async def ask_many() -> list[Any]:
        async with AsyncTypeSafeClient(api_key="unused", base_url=seeing.url, retry=NO_RETRY) as sdk:
            return await asyncio.gather(
                *(sdk.system_one(state={"photo": photo}, questions=questions) for _ in range(6)),
                sdk.system_one(state={"photo": "@1"}, questions=questions, extra_body={"assets": {"@1": asset}}),
            )

    for response in asyncio.run(ask_many()):
        assert_close(given(response), placed)


def test_the_sdk_is_told_which_picture_is_broken(seeing: Server) -> None:
    with TypeSafeClient(api_key="unused", base_url=seeing.url, retry=NO_RETRY) as sdk:
        with pytest.raises(TypeSafeBadRequestError, match="asset 'it' is not a PNG, JPEG, WebP or GIF picture"):
            sdk.system_one(state="it", questions={"n": Noul(instructions="?")}, assets={"it": Image(b"no picture")})
        with pytest.raises(TypeSafeBadRequestError, match="asset 'it' is shown nowhere"):
            sdk.system_one(state="x", questions={"n": Noul(instructions="?")}, assets={"it": Image(PNG)})


def wrapped(text: str) -> str:
    return "\n".join(text[i : i + 76] for i in range(0, len(text), 76))


@pytest.mark.parametrize(
    ("change", "is_read"),
    [
        (lambda text: text, True),
        (lambda text: f"data:image/png;base64,{text}", True),
        (wrapped, True),
        (lambda text: text.rstrip("="), False),
        (lambda text: text.replace("+", "-").replace("/", "_"), False),
        (lambda text: "@@@@" + text, False),
        (lambda _: "not base64", False),
    ],
    ids=["plain", "data url", "line breaks", "no padding", "url-safe", "@@@@", "text"],
)
def test_base64_is_read_as_the_contract_says(seeing: Server, change: Any, is_read: bool) -> None:
    for data in (PNG + b"\0" * (-len(PNG) % 3 + 1), JPEG + b"\0" * (-len(JPEG) % 3 + 1)):  # so that there is padding
        picture = change(encoded(data))
        status, document = ask(seeing, "see <image:a>", images={"a": picture})
        if is_read:
            assert_close(
                document["answers"]["q"]["probabilities"],
                probabilities(seeing, "see <image:1>", images=[encoded(data)]),
            )
        else:
            assert message(status, document).startswith("image 'a' is not base64")


@pytest.mark.parametrize(
    "data",
    [JPEG[:-128], b"just some text, no picture at all", b"", b"data:image/png;base64"],
    ids=["cut off", "text", "zero bytes", "data URL without comma"],
)
def test_a_file_that_is_no_picture_is_a_400_that_names_it(seeing: Server, data: bytes) -> None:
    sent = data.decode() if data.startswith(b"data:") else encoded(data)
    said = message(*ask(seeing, "see <image:a>", images={"a": sent}))
    assert said.startswith("image 'a'")
    assert not sent or sent not in said
    body, content_type = multipart(
        {"state": "@", "questions": {"q": QUESTION}, "assets": {"@": {"type": "image", "part": "p"}}}, {"p": data}
    )
    assert message(*seeing.post(body, Content_Type=content_type)).startswith("asset '@'")


@pytest.mark.parametrize(
    ("size", "is_read"),
    [
        ((1000, 5), True),
        ((1093, 5), False),
        ((5, 1093), False),
        ((1, 1), True),
        ((26, 28), True),
        ((27, 257), True),
        ((332, 27), True),
        ((31, 639), True),
    ],
)
def test_any_size_is_shown_but_what_is_200_times_as_long_as_wide(
    seeing: Server, size: tuple[int, int], is_read: bool
) -> None:
    status, document = ask(seeing, "<image:1>", images=[encoded(save(drawing(*size)))])
    if is_read:
        assert status == 200
        assert document["usage"]["image_tokens"] >= 64
    else:
        assert "more than 200 times" in message(status, document)


def test_a_turned_photo_is_upright(seeing: Server) -> None:
    for orientation in range(1, 9):
        exif = Pillow.Exif()
        exif[0x0112] = orientation
        turned = save(drawing(), "JPEG", exif=exif)
        upright = save(ImageOps.exif_transpose(Pillow.open(io.BytesIO(turned))).convert("RGB"))
        assert_close(
            probabilities(seeing, "<image:1>", images=[encoded(turned)]),
            probabilities(seeing, "<image:1>", images=[encoded(upright)]),
        )


def test_every_mode_is_shown_and_transparency_is_white(seeing: Server) -> None:
    clear = drawing().copy()
    clear.putalpha(0)
    deep = Pillow.fromarray(np.asarray(drawing().convert("L")).astype(np.uint16) * 257)
    frames = [drawing(seed=seed) for seed in range(3)]
    moving = save(frames[0], "GIF", save_all=True, append_images=frames[1:])
    answers = {
        name: probabilities(seeing, "<image:1>", images=[encoded(data)])
        for name, data in {
            "white": save(Pillow.new("RGB", (300, 200), "white")),
            "RGBA": save(clear),
            "P+tRNS": save(drawing().quantize(8), transparency=bytes(8)),
            "LA": save(drawing().convert("LA")),
            "grey": save(drawing().convert("L")),
            "16 bit": save(deep),
            "CMYK": save(drawing().convert("CMYK"), "JPEG"),
            "WebP": save(drawing(), "WEBP", lossless=True),
            "plain": save(drawing()),
            "animated": moving,
            "first frame": save(Pillow.open(io.BytesIO(moving)).convert("RGB")),
        }.items()
    }
    for one, other in (
        ("white", "RGBA"),
        ("white", "P+tRNS"),
        ("grey", "LA"),
        ("grey", "16 bit"),
        ("plain", "WebP"),
        ("animated", "first frame"),
    ):
        assert_close(answers[one], answers[other])
    assert_differ(answers["plain"], answers["white"])
    assert_differ(answers["plain"], answers["grey"])


def test_levels_that_show_pictures_come_back_as_they_were_sent(seeing: Server) -> None:
    levels = ["unlike <image:1>", {"like": "<image:1>"}]
    question = {"type": "score", "instructions": "How much is it like <image:1>?", "criteria": levels}
    answer = seeing.ask("<image:1>", question, images=[encoded(PNG)])
    assert list(answer["legend"].values()) == levels
    choice = {"type": "choice", "criteria": {"<image:1>": "like <image:1>", "b": None}}
    assert list(seeing.ask("x", choice, images=[encoded(PNG)])["probabilities"]) == ["<image:1>", "b"]


def test_urls_are_not_fetched(seeing: Server) -> None:
    for url in ("http://127.0.0.1:9/a.png", "https://example.com/a.png", "file:///etc/passwd"):
        for fields in ({"images": {"a": url}}, {"images": [url]}, {"images": [{"base64": url}]}):
            assert "is a URL: pictures are not fetched" in message(*ask(seeing, "x", **fields))
        asset = {"type": "image", "format": "png", "data_base64": url}
        assert "is a URL" in message(*ask(seeing, "@", assets={"@": asset}))


def test_sixteen_pictures_are_shown_seventeen_refused(seeing: Server) -> None:
    small = encoded(save(Pillow.new("RGB", (8, 8), "red")))
    # 16 pictures of 64 tokens are more than this model's 1,024 tokens: refused for that, with the count
    status, document = ask(seeing, "x", images=[small] * 16)
    assert (status, document["detail"]["error_type"]) == (400, "max_tokens_exceeded")
    assert "1024" in document["detail"]["message"]
    assert "at most 16 images, not 17" in message(*ask(seeing, "x", images=[small] * 17))
    assert ask(seeing, "x", images=[small] * 12)[0] == 200


def test_a_state_full_of_placeholders_is_refused_before_it_takes_memory(seeing: Server) -> None:
    status, document = ask(seeing, "<image:1>" * 500_000, images=[encoded(PNG)])
    assert (status, document["detail"]["error_type"]) == (400, "max_tokens_exceeded")
    assert "35000000" in document["detail"]["message"]


def test_the_names_of_control_tokens_in_a_text_show_no_picture(seeing: Server) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|> <image:1>"
    status, document = ask(seeing, text)
    assert status == 200
    assert "image_tokens" not in document["usage"]
    status, document = ask(seeing, text, images=[encoded(PNG)])
    assert document["usage"]["image_tokens"] == 70


def test_health_says_that_pictures_are_taken_and_how_many_were(seeing: Server) -> None:
    before = json.loads(seeing.request("GET", "/health")[2])
    assert (before["images"], before["images_reason"]) == (True, "")
    new = encoded(save(drawing(seed=1234)))
    for _ in range(3):
        probabilities(seeing, "a new one: <image:1>", images=[new])
    after = json.loads(seeing.request("GET", "/health")[2])
    assert after["images_encoded"] == before["images_encoded"] + 1
    assert after["image_cache_bytes"] > before["image_cache_bytes"]


def test_without_its_tower_a_checkpoint_reads_text_and_says_why(vision_checkpoint: Path, tmp_path: Path) -> None:
    with Server("--model", str(vision_checkpoint), "--no-images") as server:
        assert "started with --no-images" in message(*ask(server, "x", images=[encoded(PNG)]))
        health = json.loads(server.request("GET", "/health")[2])
        assert (health["images"], health["images_reason"]) == (False, "the server was started with --no-images")
        text = probabilities(server, "words")
    with Server("--model", str(vision_checkpoint), "--backend", "transformers") as server:
        assert "--backend transformers reads text only" in message(*ask(server, "x", images=[encoded(PNG)]))
        assert_close(probabilities(server, "words"), text)
