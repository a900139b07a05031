"""`python -m onepass ask --image`: the pictures of the command line, with and without a server, and what is said of bad ones."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from onepass import __main__ as onepass
from onepass.config import Config
from onepass.decider import Decider
from tests.support.live import Server
from tests.support.tool import Tool

ASKED = ("--choice", "q=What is it?", "a,b,c")
QUESTIONS = {"q": {"type": "choice", "instructions": "What is it?", "criteria": {"a": None, "b": None, "c": None}}}


@pytest.fixture(scope="module")
def decider(vision_checkpoint: Path) -> Iterator[Decider]:
    with Decider(Config(model=str(vision_checkpoint))) as decider:
        yield decider


@pytest.fixture
def tool(decider: Decider, capfdbinary: pytest.CaptureFixture[bytes]) -> Tool:
    return Tool(decider, capfdbinary)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs."""
    monkeypatch.chdir(tmp_path)
    Pillow.new("RGB", (64, 96), "red").save("red.png")
    Pillow.linear_gradient("L").save("grey.jpg")
    Path("text").write_text("no picture")
    Path("cut.png").write_bytes(Path("red.png").read_bytes()[:60])
    Path("nothing").touch()
    return tmp_path


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("state", ["words", "the second is <image:2>, not <image:1>"])
@pytest.mark.parametrize("is_served", [False, True])
def test_pictures_are_shown_as_in_a_request(
    state: str, is_served: bool, seeing: Server, tool: Tool, folder: Path
) -> None:
    flags = ("--url", seeing.url) if is_served else ()
    found: list[Any] = []
    for names in (("red.png", "grey.jpg"), ("grey.jpg", "red.png"), ("red.png",), ()):
        assert tool("ask", state, *ASKED, *(word for name in names for word in ("--image", name)), *flags) == 0
        request: dict[str, Any] = {"state": state, "questions": QUESTIONS}
        if names:
            request["images"] = [encoded(folder / name) for name in names]
        status, document = seeing.post(request)
        assert status == 200
        answer = json.loads(tool.out)
        assert answer["usage"] == document["usage"]
        assert answer["answers"]["q"]["probabilities"] == pytest.approx(
            document["answers"]["q"]["probabilities"], abs=2e-4
        )
        found.append(answer["answers"]["q"]["probabilities"])
    assert all(one != other for place, one in enumerate(found) for other in found[:place])


@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (["missing"], 2, "--image missing cannot be read: No such file or directory"),
        (["."], 2, "--image . cannot be read: Is a directory"),
        (["red.png", "nothing"], 1, "--image nothing is empty"),
        (["red.png"] * 17, 1, "a request may carry at most 16 images, not 17"),
        (["red.png", "text"], 1, "--image text is not a PNG, JPEG, WebP or GIF picture"),
        (["red.png", "grey.jpg", "cut.png"], 1, "--image cut.png is a broken or cut off PNG picture"),
    ],
)
def test_a_bad_picture_is_one_line_that_names_its_file(
    names: list[str], code: int, said: str, seeing: Server, tool: Tool, folder: Path
) -> None:
    flags = [word for name in names for word in ("--image", name)]
    assert tool("ask", "words", *ASKED, *flags) == code
    assert (tool.out, tool.err) == (b"", f"onepass: {said}\n")
    tool("ask", "words", *ASKED, *flags, "--url", seeing.url)
    assert tool.err.endswith(f"{said}\n")


def test_a_model_that_reads_text_only_says_so(labels_checkpoint: Path, tool: Tool, folder: Path) -> None:
    model = ("--model", str(labels_checkpoint))
    assert tool("ask", "words", *ASKED, "--image", "red.png", *model, open_decider=onepass.load_decider) == 1
    assert re.fullmatch(r"onepass: this server reads text only \(.*\): send no images and no assets\n", tool.err)
