"""This module makes the OpenAPI 3.1 document from the types that validate requests and from the errors.

It knows nothing of sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from onepass.edge.framing import MAX_BODY_BYTES
from onepass.errors import ApiError
from onepass.status import VERSION
from onepass.wire import schema

REFERENCE = "#/components/schemas/{model}"
Probability = Annotated[float, Field(ge=0, le=1)]
Object = dict[str, Any]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NoulAnswer(_Model):
    """The probability of yes."""

    type: Literal["noul"]
    noul: Probability


class ChoiceAnswer(_Model):
    """The most probable label, and the probability of each."""

    type: Literal["choice"]
    choice: str
    confidence: Probability
    probabilities: dict[str, Probability]


class ScoreAnswer(_Model):
    """The mean level, counted from 0, and the probability of each."""

    type: Literal["score"]
    score: Annotated[float, Field(ge=0, le=schema.MAX_LEVELS - 1)]
    confidence: Probability
    legend: dict[str, str | Object | list[Any]]
    probabilities: dict[str, Probability]


class Usage(_Model):
    input_tokens: Annotated[int, Field(ge=0)]
    output_tokens: Literal[0]
    image_tokens: Annotated[int, Field(ge=0, description="There when images are.")] = 0


class Decision(_Model):
    """One answer a question, in the order of the request."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: Usage
    x_latency_ms: Annotated[float, Field(ge=0)]


class ModelName(_Model):
    name: str
    description: str
    release_date: str


class ModelObject(_Model):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Model):
    """What is served, in the official form and in OpenAI's."""

    models: list[ModelName]
    object: Literal["list"]
    data: list[ModelObject]


class Alive(_Model):
    status: Literal["alive"]


class Health(_Model):
    """What is served, how, and how busy it is."""

    model_config = ConfigDict(extra="allow")
    status: str
    model: str


class Unready(Health):
    detail: Object


class InvalidField(_Model):
    loc: Annotated[list[str | int], Field(description="From `body` down to the field.")]
    msg: str
    type: str


class InvalidRequest(_Model):
    """Which fields are wrong, and what is allowed there."""

    detail: Annotated[list[InvalidField], Field(min_length=1)]


class PlainError(_Model):
    detail: str


ANSWERS = (schema.Body, Decision, Models, Alive, Health, Unready, InvalidRequest, PlainError)
EXAMPLES: dict[str, Object] = {  # These are requests that may be sent.
    "support": {
        "state": "I was charged twice for my order and want a refund.",
        "questions": {
            "refund": {"type": "noul", "instructions": "Does the customer want a refund?"},
            "team": {
                "type": "choice",
                "instructions": "Which team should handle this?",
                "criteria": {"billing": "Payments, invoices and refunds", "delivery": "Parcels", "account": None},
            },
            "anger": {
                "type": "score",
                "instructions": "How angry is the customer?",
                "criteria": ["Calm", "Annoyed", "Furious"],
            },
        },
    },
    "structured": {
        "state": {"subject": "Invoice 1182", "lines": [{"item": "Cup", "pieces": 3, "broken": True}]},
        "questions": {
            "damaged": {"type": "noul", "criteria": {"yes": "Something arrived broken", "no": "All is in order"}}
        },
        "encoding": "per_question",
    },
}
TEXTS = {
    400: "The request cannot be served as it is.",
    401: "The API key is missing or wrong.",
    404: "No such path.",
    405: "The path has other methods.",
    408: "The request did not arrive in time.",
    411: "A body without a length.",
    413: "The body is too large, before or after decompression.",
    415: "An unknown Content-Encoding.",
    422: "The schema forbids it.",
    431: "The head is too large.",
    500: "The server's fault.",
    503: "Not now; see Retry-After.",
}
EVERYWHERE = (400, 408, 431, 500)  # A request of any kind may be broken or late.


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def error_kinds() -> dict[int, list[type[ApiError]]]:
    """Return every way to fail, by status."""
    kinds: dict[int, list[type[ApiError]]] = {}
    todo = list(ApiError.__subclasses__())
    for kind in todo:
        todo += kind.__subclasses__()
        kinds.setdefault(kind.status, []).append(kind)
    return dict(sorted(kinds.items()))


def _schemas() -> Object:
    _, definitions = models_json_schema(
        [(kind, "validation" if kind is schema.Body else "serialization") for kind in ANSWERS],
        ref_template=REFERENCE,
        schema_generator=_Untitled,
    )
    schemas: Object = definitions["$defs"]
    for one in schemas.values():
        one.pop("title", None)
    return schemas


def _error_schema(status: int, kinds: Iterable[type[ApiError]]) -> Object:
    if status in (404, 405, 422):
        return _reference("InvalidRequest" if status == 422 else "PlainError")
    detail = {
        "type": "object",
        "properties": {
            "error_type": {"enum": sorted({kind.error_type for kind in kinds})},
            "message": {"type": "string"},
        },
        "required": ["error_type", "message"],
        "additionalProperties": False,
    }
    return {"type": "object", "properties": {"detail": detail}, "required": ["detail"]}


def _errors() -> Object:
    """Return `components.responses`: one for each status that is an error."""
    headers = {
        401: {"WWW-Authenticate": _header("Always Bearer.")},
        405: {"Allow": _header("The methods of the path.")},
        503: {"Retry-After": _header("In whole seconds, below 30.", "integer")},
    }
    return {
        f"Error{status}": _response(TEXTS[status], _error_schema(status, kinds), headers.get(status, {}))
        for status, kinds in error_kinds().items()
    }


def _reference(name: str, kind: str = "schemas") -> Object:
    return {"$ref": f"#/components/{kind}/{name}"}


def _header(text: str, kind: str = "string") -> Object:
    return {"description": text, "schema": {"type": kind}}


def _response(
    text: str, schema: Object, headers: Object | None = None, content_type: str = "application/json"
) -> Object:
    request_id = {"x-typesafe-request-id": _header("`req_` and 32 hexadecimal digits; also in the log.")}
    return {
        "description": text,
        "headers": request_id | (headers or {}),
        "content": {content_type: {"schema": schema}},
    }


def _operation(summary: str, answer: Object, statuses: Iterable[int] = (), *, needs_key: bool = False) -> Object:
    errors = sorted({*EVERYWHERE, *statuses, *([401] if needs_key else [])})
    responses = {"200": answer} | {str(status): _reference(f"Error{status}", "responses") for status in errors}
    security: list[Object] = [{"key": []}, {}] if needs_key else []
    return {"summary": summary, "responses": responses, "security": security}


def _decide() -> Object:
    times = {"Server-Timing": _header("Stages of the request and their `total`, `dur` in milliseconds.")}
    operation = _operation(
        "Answer typed questions about a state",
        _response("An answer to each question.", _reference("Decision"), times),
        (411, 413, 415, 422, 503),
        needs_key=True,
    )
    examples = {name: {"value": value} for name, value in EXAMPLES.items()}
    return operation | {
        "operationId": "decide",
        "requestBody": {
            "required": True,
            "description": f"At most {MAX_BODY_BYTES >> 20} MiB; `Content-Encoding` may be gzip or zstd.",
            "content": {"application/json": {"schema": _reference("Body"), "examples": examples}},
        },
    }


def _alias(item: Object, path: str) -> Object:
    """Return the path item of an alias. It has no operation id, since each id may appear only once."""
    return {
        method: {key: value for key, value in operation.items() if key != "operationId"}
        | {"summary": f"{operation['summary']}; another name of {path}"}
        for method, operation in item.items()
    }


def document(aliases: Iterable[tuple[str, str]] = ()) -> Object:
    """Return the whole document. `aliases` holds pairs of (another name of a path, the path)."""
    paths = _paths()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Onepass", "version": VERSION, "description": "Decisions from one forward pass."},
        "paths": paths | {alias: _alias(paths[path], path) for alias, path in aliases},
        "components": {
            "schemas": _schemas(),
            "responses": _errors(),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "If the server was started with a key."}
            },
        },
    }


def _paths() -> Object:
    unready = _response(TEXTS[503], _reference("Unready"), {"Retry-After": _header("In whole seconds.", "integer")})
    health = _operation("Readiness", _response("A request sent now is answered.", _reference("Health")))
    health["responses"]["503"] = unready
    text = {"type": "string"}
    models = _response("Its names.", _reference("Models"))
    return {
        "/v1/systemone": {"post": _decide()},
        "/v1/models": {"get": _operation("What is served", models, (503,), needs_key=True)},
        "/health": {"get": health},
        "/livez": {"get": _operation("Liveness", _response("Leave it running.", _reference("Alive")), (503,))},
        "/metrics": {"get": _operation("Figures for Prometheus", _response("Text.", text, None, "text/plain"))},
        "/": {"get": _operation("The playground", _response("A page.", text, None, "text/html"))},
        "/openapi.json": {"get": _operation("This document", _response("It.", {"type": "object"}))},
    }


@lru_cache(maxsize=1)
def encoded(aliases: tuple[tuple[str, str], ...] = ()) -> bytes:
    return json.dumps(document(aliases), ensure_ascii=False, separators=(",", ":")).encode()
