"""This module owns the JSON contract of a request, as types that validate it.

`parse_request` turns a body into a `Request`. Every error names the field, and what is allowed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from onepass.errors import InvalidRequest, shorten
from onepass.wire.body import RepeatedKeys, read_json, read_multipart
from onepass.wire.request import MAX_LEVELS, MAX_OPTIONS, MAX_PICTURES, MAX_QUESTIONS, Question, Request

NOUL_ALIASES = {"true": "true", "yes": "true", "false": "false", "no": "false"}
TEXT_ALLOWED = "a string, an object or an array"
OPTIONS_ALLOWED = f"an object of 1 to {MAX_OPTIONS} labels, each with a description (string, object or array) or null"
LEVELS_ALLOWED = f"an array of 1 to {MAX_LEVELS} levels, low to high, each a string, an object or an array"
SIDES_ALLOWED = (
    "null or an object with true and/or false (or yes and/or no), each a string, an object, an array or null"
)
QUESTIONS_ALLOWED = f"an object of 1 to {MAX_QUESTIONS} questions by id"
IMAGES_ALLOWED = "an object of pictures by name or an array of pictures"
ASSETS_ALLOWED = "an object of pictures by placeholder"
TYPE_ALLOWED = "'noul', 'choice' or 'score'"
QUESTION_ALLOWED = f"an object whose type is {TYPE_ALLOWED}"


def _must(allowed: str, kind: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "must be {allowed}", {"allowed": allowed})  # type: ignore[arg-type]


def _check_unique(value: object) -> None:
    if isinstance(value, RepeatedKeys):
        raise PydanticCustomError("repeated_key", "must not name {key} twice", {"key": repr(shorten(value.key))})


def _text(value: object) -> object:
    if not isinstance(value, (str, dict, list)):
        raise _must(TEXT_ALLOWED, "text_type")
    return value


def _sides(value: object) -> object:
    """Return the noul's criteria with `yes` renamed to `true` and `no` renamed to `false`."""
    _check_unique(value)
    if not isinstance(value, dict):
        raise _must(SIDES_ALLOWED, "noul_criteria")
    sides: dict[str, object] = {}
    for key, text in value.items():
        side = NOUL_ALIASES.get(key)
        if side is None or side in sides or not (text is None or isinstance(text, (str, dict, list))):
            raise _must(f"{SIDES_ALLOWED}; look at {shorten(key)!r}", "noul_criteria")
        sides[side] = text
    return sides


def _images(value: object) -> object:
    if not isinstance(value, (dict, list)):
        raise _must(IMAGES_ALLOWED, "images_type")
    return value


def _assets(value: object) -> object:
    if not isinstance(value, dict):
        raise _must(ASSETS_ALLOWED, "assets_type")
    return value


def _options(value: object) -> object:
    _check_unique(value)
    if not isinstance(value, dict):
        raise _must(OPTIONS_ALLOWED, "choice_criteria")
    if not 1 <= len(value) <= MAX_OPTIONS:
        raise _must(f"{OPTIONS_ALLOWED}, not {len(value)} labels", "choice_criteria")
    for label, text in value.items():
        if not (text is None or isinstance(text, (str, dict, list))):
            raise _must(f"{OPTIONS_ALLOWED}; look at {shorten(label)!r}", "choice_criteria")
    return value


def _levels(value: object) -> object:
    if not isinstance(value, list):
        raise _must(LEVELS_ALLOWED, "score_criteria")
    if not 1 <= len(value) <= MAX_LEVELS:
        raise _must(f"{LEVELS_ALLOWED}, not {len(value)} levels", "score_criteria")
    return value


def _questions(value: object) -> object:
    _check_unique(value)
    if not isinstance(value, dict):
        raise _must(QUESTIONS_ALLOWED, "questions_type")
    if not 1 <= len(value) <= MAX_QUESTIONS:
        raise _must(f"{QUESTIONS_ALLOWED}, not {len(value)}", "questions_length")
    return value


def _question_object(value: object) -> object:
    """Check the object from which the discriminator reads the question's type."""
    _check_unique(value)
    if not isinstance(value, dict):
        raise _must(QUESTION_ALLOWED, "question_object")
    return value


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


def _has(name: str, schema: Any) -> dict[str, Any]:
    return {"required": [name], "properties": {name: schema}}


_TEXT_TYPES = ["string", "object", "array"]
_NULLABLE_TEXT = {"type": [*_TEXT_TYPES, "null"]}
_SOME_TEXT = {"type": _TEXT_TYPES, "minLength": 1, "minProperties": 1, "minItems": 1}  # Each type has its own minimum.
_SOME_SIDE = {"type": "object", "anyOf": [_has(name, _SOME_TEXT) for name in NOUL_ALIASES]}
TextField = Annotated[Any, AfterValidator(_text), _schema(type=_TEXT_TYPES)]
Sides = Annotated[
    Any,
    AfterValidator(_sides),
    _schema(
        type="object",
        properties=dict.fromkeys(NOUL_ALIASES, _NULLABLE_TEXT),
        additionalProperties=False,
        allOf=[{"not": {"required": pair}} for pair in (["true", "yes"], ["false", "no"])],
    ),
]
Images = Annotated[
    Any,
    AfterValidator(_images),
    _schema(
        anyOf=[{"type": "object"}, {"type": "array"}],
        description=f"At most {MAX_PICTURES} pictures by name or in a list, each base64, a data: URL or an object with "
        "content_type and base64; shown where a text holds <image:NAME> or <image:N>, N from 1, else after the state.",
    ),
]
Assets = Annotated[
    Any,
    AfterValidator(_assets),
    _schema(
        type="object",
        description=f"At most {MAX_PICTURES} pictures by placeholder, each with type image and data_base64, or with "
        "the part of a multipart/form-data body that holds its bytes; shown where a text holds the placeholder.",
    ),
]
Options = Annotated[
    Any,
    AfterValidator(_options),
    _schema(type="object", additionalProperties=_NULLABLE_TEXT, minProperties=1, maxProperties=MAX_OPTIONS),
]
Levels = Annotated[
    list[TextField],
    BeforeValidator(_levels),
    _schema(type="array", items={"type": _TEXT_TYPES}, minItems=1, maxItems=MAX_LEVELS),
]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class Noul(_Model):
    """A yes/no question. It needs instructions, or criteria with a description of either side."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [_has("instructions", _SOME_TEXT), _has("criteria", _SOME_SIDE)]}
    )
    type: Literal["noul"]
    instructions: TextField | None = None
    criteria: Sides | None = None


class Choice(_Model):
    """One of named options."""

    type: Literal["choice"]
    instructions: TextField | None = None
    criteria: Options


class Score(_Model):
    """A place on an ordered scale."""

    type: Literal["score"]
    instructions: TextField | None = None
    criteria: Levels


def _question_type(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("noul", "choice", "score") else None


AnyQuestion = Annotated[
    Annotated[Noul, Tag("noul")] | Annotated[Choice, Tag("choice")] | Annotated[Score, Tag("score")],
    Discriminator(
        _question_type,
        custom_error_type="question_type",
        custom_error_message=f"must be {TYPE_ALLOWED}",
    ),
    BeforeValidator(_question_object),
]


class Body(_Model):
    """The body of `POST /v1/systemone`. Fields it does not name are ignored."""

    state: TextField
    questions: Annotated[dict[str, AnyQuestion], BeforeValidator(_questions)] = Field(
        json_schema_extra={"minProperties": 1, "maxProperties": MAX_QUESTIONS}
    )
    model: str | None = None
    encoding: Literal["joint", "per_question"] | None = None
    images: Images | None = None
    assets: Assets | None = None


_BODY = TypeAdapter(Body)
_ALLOWED = {  # These texts say what pydantic's own errors do not say.
    ("state",): TEXT_ALLOWED,
    ("questions",): QUESTIONS_ALLOWED,
    ("model",): "a string",
    ("encoding",): "'joint' or 'per_question'",
    ("choice", "criteria"): OPTIONS_ALLOWED,
    ("score", "criteria"): LEVELS_ALLOWED,
}


def parse_request(body: bytes, content_type: str = "application/json") -> Request:
    """Turn a decompressed `body` into a request. Raises `InvalidRequest`, or `BadRequest` for broken multipart."""
    parts: dict[str, bytes] = {}
    if content_type.lstrip()[:19].lower() == "multipart/form-data":
        body, parts = read_multipart(body, content_type)
    value = read_json(body)
    if not isinstance(value, dict):
        raise InvalidRequest.at((), "the body must be a JSON object with state and questions", "body_type")
    if isinstance(value, RepeatedKeys):
        raise InvalidRequest.at((value.key,), "must not stand twice", "repeated_key")
    try:
        parsed = _BODY.validate_python(value)
    except ValidationError as err:
        raise InvalidRequest([_explain(item) for item in err.errors(include_url=False, include_input=False)]) from None
    return Request(
        state=parsed.state,
        questions=tuple(_question(id_, question) for id_, question in parsed.questions.items()),
        model=parsed.model,
        encoding=parsed.encoding,
        images=parsed.images,
        assets=parsed.assets,
        parts=parts,
    )


def _explain(item: Mapping[str, Any]) -> tuple[tuple[str | int, ...], str, str]:
    """Return a pydantic error as (location, message, type). The message says what is allowed."""
    loc, kind = tuple(item["loc"]), item["type"]
    if kind == "question_type":
        loc = (*loc, "type")
    allowed = _ALLOWED.get(loc[-2:] if loc[0] == "questions" and len(loc) > 1 else loc[:1])
    if allowed and kind in ("missing", "dict_type", "list_type", "string_type", "literal_error"):
        return loc, f"{'is required and ' if kind == 'missing' else ''}must be {allowed}", kind
    return loc, item["msg"], kind


def _question(id_: str, question: Noul | Choice | Score) -> Question:
    if isinstance(question, Noul):
        sides = question.criteria or {}
        descriptions = (sides.get("true"), sides.get("false"))
        if not question.instructions and not any(descriptions):
            raise InvalidRequest.at(
                ("questions", id_, "noul", "instructions"),
                "a noul needs instructions, or criteria with a description of true or false",
                "noul_empty",
            )
        return Question(id_, "noul", question.instructions, ("true", "false"), descriptions)
    if isinstance(question, Choice):
        options = question.criteria
        return Question(id_, "choice", question.instructions, tuple(options), tuple(options.values()))
    levels = tuple(question.criteria)
    return Question(id_, "score", question.instructions, tuple(map(str, range(len(levels)))), levels)
