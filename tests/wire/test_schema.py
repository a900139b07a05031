"""Requests: what validates, and what every refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onepass.errors import ApiError, InvalidRequest
from onepass.wire.answer import encode_response
from onepass.wire.request import Question
from onepass.wire.schema import parse_request

NOUL = {"type": "noul", "instructions": "Is it?"}


def body(question: Any = NOUL, **fields: Any) -> bytes:
    return json.dumps({"state": "x", "questions": {"q": question}, **fields}).encode()


def refusal(content: bytes) -> dict[str, Any]:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(content)
    detail: list[dict[str, Any]] = json.loads(caught.value.body())["detail"]
    assert all(set(item) == {"loc", "msg", "type"} and item["loc"][0] == "body" for item in detail)
    return detail[0]


@pytest.mark.parametrize("state", ["", "text", {}, [], {"a": [1, None]}, ["x"]])
def test_a_state_is_text_or_structure(state: Any) -> None:
    assert parse_request(json.dumps({"state": state, "questions": {"q": NOUL}}).encode()).state == state


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (NOUL, Question("q", "noul", "Is it?", ("true", "false"), (None, None))),
        (
            {"type": "noul", "criteria": {"yes": "a", "no": None}},
            Question("q", "noul", None, ("true", "false"), ("a", None)),
        ),
        ({"type": "noul", "criteria": {"false": ["b"]}}, Question("q", "noul", None, ("true", "false"), (None, ["b"]))),
        ({**NOUL, "criteria": None, "extra": 1}, Question("q", "noul", "Is it?", ("true", "false"), (None, None))),
        (
            {"type": "choice", "criteria": {"b": None, "a": {"x": 1}}},
            Question("q", "choice", None, ("b", "a"), (None, {"x": 1})),
        ),
        ({"type": "choice", "instructions": None, "criteria": {"": ""}}, Question("q", "choice", None, ("",), ("",))),
        (
            {"type": "score", "instructions": {"a": 1}, "criteria": ["l", ["m"]]},
            Question("q", "score", {"a": 1}, ("0", "1"), ("l", ["m"])),
        ),
    ],
)
def test_questions_become_named_options_with_descriptions(question: Any, expected: Question) -> None:
    assert parse_request(body(question)).questions == (expected,)


@pytest.mark.parametrize(
    ("content", "loc", "says"),
    [
        (b"null", [], "JSON object"),
        (b"[]", [], "JSON object"),
        (b"3", [], "JSON object"),
        (b"{}", ["state"], "is required and must be a string, an object or an array"),
        (body(state=None), ["state"], "a string, an object or an array"),
        (body(state=5), ["state"], "a string, an object or an array"),
        (body(state=True), ["state"], "a string, an object or an array"),
        (b'{"state": "x"}', ["questions"], "is required and must be an object of 1 to 512"),
        (b'{"state": "x", "questions": {}}', ["questions"], "1 to 512 questions by id, not 0"),
        (b'{"state": "x", "questions": []}', ["questions"], "an object of 1 to 512"),
        (b'{"state": "x", "questions": null}', ["questions"], "an object of 1 to 512"),
        (json.dumps({"state": "", "questions": {str(n): NOUL for n in range(513)}}).encode(), ["questions"], "not 513"),
        (body({"type": "boolean"}), ["questions", "q", "type"], "'noul', 'choice' or 'score'"),
        (body({"instructions": "?"}), ["questions", "q", "type"], "'noul', 'choice' or 'score'"),
        (body({"type": ["noul"]}), ["questions", "q", "type"], "'noul', 'choice' or 'score'"),
        *((body(wrong), ["questions", "q"], "must be an object whose type is 'noul', 'choice' or 'score'") for wrong in (5, None, "noul", [], True)),
        (b'{"state": "", "questions": {"q": {"type": "noul", "type": "score"}}}', ["questions", "q"], "'type' twice"),
        (body({"type": "noul"}), ["questions", "q", "noul", "instructions"], "needs instructions, or criteria"),
        (body({"type": "noul", "instructions": ""}), ["questions", "q", "noul", "instructions"], "needs instructions"),
        (body({"type": "noul", "instructions": 5}), ["questions", "q", "noul", "instructions"], "a string, an object"),
        (body({**NOUL, "criteria": "x"}), ["questions", "q", "noul", "criteria"], "true and/or false (or yes and/or no)"),
        (body({**NOUL, "criteria": {"maybe": "x"}}), ["questions", "q", "noul", "criteria"], "look at 'maybe'"),
        (body({**NOUL, "criteria": {"yes": "x", "true": "y"}}), ["questions", "q", "noul", "criteria"], "true and/or false"),
        (body({**NOUL, "criteria": {"yes": 1}}), ["questions", "q", "noul", "criteria"], "an array or null"),
        (body({"type": "choice"}), ["questions", "q", "choice", "criteria"], "is required and must be an object of 1 to 255"),
        (body({"type": "choice", "criteria": None}), ["questions", "q", "choice", "criteria"], "an object of 1 to 255"),
        (body({"type": "choice", "criteria": {}}), ["questions", "q", "choice", "criteria"], "not 0 labels"),
        (body({"type": "choice", "criteria": ["a"]}), ["questions", "q", "choice", "criteria"], "an object of 1 to 255"),
        (body({"type": "choice", "criteria": {"a": 1}}), ["questions", "q", "choice", "criteria"], "look at 'a'"),
        (body({"type": "choice", "criteria": {str(n): None for n in range(256)}}), ["questions", "q", "choice", "criteria"], "not 256"),
        (body({"type": "score"}), ["questions", "q", "score", "criteria"], "is required and must be an array of 1 to 10"),
        (body({"type": "score", "criteria": {"0": "a"}}), ["questions", "q", "score", "criteria"], "an array of 1 to 10"),
        (body({"type": "score", "criteria": []}), ["questions", "q", "score", "criteria"], "not 0 levels"),
        (body({"type": "score", "criteria": ["x"] * 11}), ["questions", "q", "score", "criteria"], "not 11 levels"),
        (body({"type": "score", "criteria": ["a", None]}), ["questions", "q", "score", "criteria", 1], "a string, an object"),
        (body(model=3), ["model"], "a string"),
        (body(encoding="both"), ["encoding"], "'joint' or 'per_question'"),
        (body(images="x"), ["images"], "an object of pictures by name or an array"),
        (body(assets=[]), ["assets"], "an object of pictures by placeholder"),
        (b'{"state": "x", "state": "y", "questions": {}}', ["state"], "twice"),
        (b'{"state": "", "questions": {"q": {"type": "noul", "instructions": "a"}, "q": {"type": "noul"}}}', ["questions"], "'q' twice"),
        (b'{"state": "", "questions": {"q": {"type": "choice", "criteria": {"a": null, "a": null}}}}', ["questions", "q", "choice", "criteria"], "'a' twice"),
        (b'{"state": "", "questions": {"q": {"type": "noul", "criteria": {"yes": "a", "yes": "b"}}}}', ["questions", "q", "noul", "criteria"], "'yes' twice"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_and_what_is_allowed(content: bytes, loc: list[str | int], says: str) -> None:
    first = refusal(content)
    assert first["loc"] == ["body", *loc]
    assert says in json.dumps(first, ensure_ascii=False)[:200] + first["msg"]


@pytest.mark.parametrize("count", [1, 2, 255])
def test_the_limits_themselves_are_allowed(count: int) -> None:
    options = {f"option {n}": None for n in range(count)}
    assert parse_request(body({"type": "choice", "criteria": options})).questions[0].options == tuple(options)
    levels = [f"level {n}" for n in range(min(count, 10))]
    assert len(parse_request(body({"type": "score", "criteria": levels})).questions[0].options) == len(levels)
    assert (
        len(
            parse_request(json.dumps({"state": "", "questions": {str(n): NOUL for n in range(512)}}).encode()).questions
        )
        == 512
    )


def test_many_errors_are_cut_to_a_screenful() -> None:
    content = json.dumps({"state": "", "questions": {str(n): {"type": "x" * 1000} for n in range(500)}}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_request(content)
    assert len(json.loads(caught.value.body())["detail"]) == 20
    assert len(caught.value.body()) < 10_000


def test_a_giant_name_is_not_repeated_in_the_errors_about_it() -> None:
    name = "i" * 1_000_000
    for content in (
        json.dumps({"state": "", "questions": {name: {"type": "score", "criteria": [None] * 10}}}).encode(),
        b'{"' + name.encode() + b'": 1, "' + name.encode() + b'": 2}',
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse_request(content)
        assert len(caught.value.body()) < 10_000


def test_names_come_back_byte_for_byte_and_in_order() -> None:
    names = [
        "toString",
        "__proto__",
        "constructor",
        "10",
        "2",
        "é",
        "e\u0301",
        "🙂",
        "مرحبا",
        "",
        " ",
        "organ",
        "organism",
    ]
    request = parse_request(body({"type": "choice", "criteria": dict.fromkeys(names)}))
    assert list(request.questions[0].options) == names


def test_an_answer_is_json_with_full_floats() -> None:
    content = encode_response(model="m", answers={"ü": {"noul": 1 / 3}}, input_tokens=5, latency_ms=1.23456)
    assert json.loads(content) == {
        "model": "m",
        "answers": {"ü": {"noul": 1 / 3}},
        "usage": {"input_tokens": 5, "output_tokens": 0},
        "x_latency_ms": 1.235,
    }
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_response(model="m", answers={"q": {"noul": float("nan")}}, input_tokens=5, latency_ms=1)


def test_every_error_body_is_json_of_the_contracts_shape() -> None:
    for kind in ApiError.__subclasses__():
        if kind.__init__ is ApiError.__init__:
            detail = json.loads(kind("why \ud800", retry_after_s=3).body())["detail"]
            assert detail["message"].startswith("why")
            assert detail["error_type"] == kind.error_type
            assert 400 <= kind.status < 600
