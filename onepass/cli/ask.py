"""The command `ask` makes one decision.

The state and the questions come from the command line, and the answer is shown as bars or as JSON.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onepass.cli.files import parse, read_file, read_questions_file
from onepass.config import API_KEY_VARIABLE, own_variables
from onepass.errors import StartupError, explain
from onepass.logs import printable
from onepass.wire import pictures
from onepass.wire.schema import parse_request

BAR_COLUMNS, MAX_LABEL_COLUMNS = 32, 40
SERVER_TIMEOUT_S = 120.0  # A server gives up sooner than this.
_PICTURE = re.compile(r"\bimage '([1-9][0-9]?)'")
_NAMED = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def read_state(text: str | None, *, is_json: bool) -> Any:
    """Return the state that the argument gives or names. Raises `StartupError`."""
    if text is None or text == "-":
        if text is None and sys.stdin is not None and sys.stdin.isatty():
            raise StartupError("there is no state: give a text, @FILE, or pipe one in")
        text, content = "-", read_file("-", "state")
    elif text.startswith("@") and not text.startswith("@@"):
        text, content = text[1:], read_file(text[1:], "state")
    else:
        text = text.removeprefix("@") if text.startswith("@@") else text
        return parse(text.encode("utf-8", "surrogateescape"), "the state") if is_json else text
    where = "standard input" if text == "-" else text
    if is_json:
        return parse(content, where)
    try:
        state = content.decode("utf-8")
    except UnicodeDecodeError as err:
        raise StartupError(f"state: {where} is not UTF-8 text (byte {err.start})") from None
    return state.removesuffix("\n").removesuffix("\r")  # Editors and echo add a line end to the last line.


def read_questions(asked: Sequence[tuple[str, Any]], path: str | None) -> dict[str, Any]:
    """Return the questions by id. Those of the file come first. Raises `StartupError`."""
    questions = dict(read_questions_file(path)[1]) if path else {}
    for kind, values in asked:
        text, criteria = (values, None) if kind == "noul" else values
        named = _NAMED.fullmatch(text)
        id_, instructions = named.groups() if named else (f"q{len(questions) + 1}", text)
        if id_ in questions:
            raise StartupError(f"--{kind}: there are two questions named {id_!r}")
        question: dict[str, Any] = {"type": kind, "instructions": instructions}
        if criteria is not None:
            question["criteria"] = read_criteria(kind, criteria)
        questions[id_] = question
    if not questions:
        raise StartupError("there is no question: ask with --noul, --choice, --score or --questions FILE")
    return questions


def read_criteria(kind: str, text: str) -> Any:
    """Turn `a,b=what b is`, or JSON, into the criteria of a request. Raises `StartupError`."""
    if text.lstrip()[:1] in ("{", "["):
        return parse(text.encode("utf-8", "surrogateescape"), f"--{kind}")
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise StartupError(f"--{kind} {text!r}: there is nothing between two commas; write a comma in a text as JSON")
    if kind == "score":
        return items
    options: dict[str, str | None] = {}
    for item in items:
        label, mark, description = item.partition("=")
        if label.strip() in options:
            raise StartupError(f"--{kind} {text!r}: the option {label.strip()!r} stands twice")
        options[label.strip()] = description.strip() if mark else None
    return options


def make_body(state: Any, questions: Mapping[str, Any], image_paths: Sequence[str] = ()) -> bytes:
    """Return the body of the request. All of it is checked before a model is loaded, except the content of pictures.

    Raises `ApiError` for a bad request, or `StartupError` for a file.
    """
    images = [base64.b64encode(read_file(path, "--image")).decode() for path in image_paths]
    body = json.dumps({"state": state, "questions": questions, **({"images": images} if images else {})}).encode()
    pictures.collect_pictures(parse_request(body))
    return body


def name_files(message: str, image_paths: Sequence[str]) -> str:
    """Return the message with the file names of pictures, since a request only numbers them."""

    def name(match: re.Match[str]) -> str:
        place = int(match[1]) - 1
        return f"--image {image_paths[place]}" if place < len(image_paths) else match[0]

    return _PICTURE.sub(name, message)


def make_server_request(url: str, body: bytes, environ: Mapping[str, str]) -> urllib.request.Request:
    """Return the request for a decision of the server at `url`, with the API key of the environment."""
    headers = {"Content-Type": "application/json"}
    if key := own_variables(environ).get(API_KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.Request(url.rstrip("/") + "/v1/systemone", body, headers)


def ask_server(url: str, body: bytes, environ: Mapping[str, str], image_paths: Sequence[str] = ()) -> bytes:
    """Return the answer of a running server. Raises `StartupError` for any other reply."""
    try:
        request = make_server_request(url, body, environ)
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as err:
        try:
            reason = name_files(explain(json.loads(err.read())["detail"]), image_paths)
        except (ValueError, LookupError, TypeError):
            reason = "that is no answer of a System One server"
        raise StartupError(f"--url {url}: {err.code}: {reason}") from None
    except (OSError, ValueError) as err:  # The connection is refused, the host is unknown, or this is no URL.
        raise StartupError(f"--url {url}: {getattr(err, 'reason', err)}") from None


def show(answer: bytes, questions: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(answer + b"\n")
        return
    document = json.loads(answer)
    console = Console(highlight=False)
    answers = document["answers"]
    widest = max(len(label) for given in answers.values() for label in shares(given))
    for id_, given in answers.items():
        console.print(head(id_, questions[id_], given))
        console.print(bars(given, min(widest, MAX_LABEL_COLUMNS)))
    usage = document["usage"]["input_tokens"]
    console.print(plain(f"{document['model']}, {usage} tokens, {document['x_latency_ms']:.0f} ms", style="dim"))


def plain(value: Any, style: str = "") -> Text:
    """Return a text of a request unchanged: without markup, and without characters that control a terminal."""
    return Text(printable(as_text(value)), style)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def head(id_: str, question: Mapping[str, Any], given: Mapping[str, Any]) -> Text:
    said = {
        "noul": lambda: f"{given['noul']:.1%} yes",
        "choice": lambda: f"{given['choice']}, confidence {given['confidence']:.2f}",
        "score": lambda: (
            f"{given['score']:.2f} of 0 to {len(given['legend']) - 1}, confidence {given['confidence']:.2f}"
        ),
    }[given["type"]]()
    asked = question.get("instructions") or ""
    return Text.assemble(plain(id_, "bold"), "  ", plain(asked), "  ", plain(said, "bold green"))


def shares(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the probabilities by the label that is shown beside each."""
    if given["type"] == "noul":
        return {"yes": given["noul"], "no": 1 - given["noul"]}
    legend = given.get("legend", {})
    return {f"{name}  {as_text(legend[name])}" if legend else name: p for name, p in given["probabilities"].items()}


def bars(given: Mapping[str, Any], label_columns: int) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1))
    table.add_column(min_width=label_columns)
    by_label = shares(given)
    most = max(by_label.values())
    for label, share in by_label.items():
        bar = ProgressBar(total=1, completed=share, width=BAR_COLUMNS, complete_style="green", finished_style="green")
        table.add_row(plain(label, "bold" if share == most else ""), bar, f"{share:.1%}")
    return table
