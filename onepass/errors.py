"""Every way in which a request can fail, and what the client is told. It knows nothing of HTTP framing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Self

MAX_SHOWN_CHARS = 64  # of a client's own name in `loc`
MAX_NAME_SHOWN = 40  # of a client's own name in a message
MAX_REPORTED_ERRORS = 20  # a request may hold 512 broken questions; nobody reads more than a screenful


class StartupError(Exception):
    """The server cannot start; the message is one line that says why and what is allowed."""


def shorten(name: str, max_chars: int = MAX_NAME_SHOWN) -> str:
    """A name that a client chose, as an error repeats it: at most `max_chars` characters, then an ellipsis."""
    return name if len(name) <= max_chars else f"{name[:max_chars]}…"


class ApiError(Exception):
    """A request that gets no decision. Each subclass fixes `status` and `error_type`, and some the message too.

    `retry_after_s` becomes the `Retry-After` header. It counts whole seconds and stays below 30, after which the
    official SDK gives up.
    """

    status = 500
    error_type = "internal_error"
    default_message = ""
    default_retry_after_s: int | None = None

    def __init__(self, message: str = "", *, retry_after_s: int | None = None) -> None:
        self.message = message or self.default_message
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        super().__init__(self.message)

    def within(self, place: str) -> Self:
        """This error, whose message now begins with the place in the request that it is about."""
        self.message = f"{place}: {self.message}"
        self.args = (self.message,)
        return self

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def detail(self) -> object:
        return {"error_type": self.error_type, "message": self.message}

    def body(self) -> bytes:
        return json.dumps({"detail": self.detail()}, ensure_ascii=False, separators=(",", ":")).encode(
            "utf-8", "replace"
        )


class BadRequest(ApiError):
    status, error_type = 400, "api_usage_error"


class ClientLeft(ApiError):
    """The client closed its side of the connection before the answer. A client that still reads gets a usage error."""

    status, error_type = 400, "client_left"  # the name for the log and the metrics

    def __init__(self) -> None:
        super().__init__("the client closed its side of the connection before the answer")

    def detail(self) -> object:
        return {"error_type": BadRequest.error_type, "message": self.message}


class TooManyTokens(ApiError):
    """A prompt row longer than the model reads."""

    status, error_type = 400, "max_tokens_exceeded"


class Unauthorized(ApiError):
    status, error_type = 401, "authentication_error"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class NotFound(ApiError):
    status, error_type = 404, "not_found"  # for the log; the body is FastAPI's

    def __init__(self) -> None:
        super().__init__("Not Found")

    def detail(self) -> object:
        return self.message


class MethodNotAllowed(ApiError):
    status, error_type = 405, "method_not_allowed"

    def __init__(self, allowed: Sequence[str]) -> None:
        super().__init__("Method Not Allowed")
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"Allow": ", ".join(self.allowed)}

    def detail(self) -> object:
        return self.message


class RequestTimeout(ApiError):
    status, error_type = 408, "request_timeout"


class LengthRequired(ApiError):
    status, error_type = 411, "api_usage_error"


class RequestTooLarge(ApiError):
    status, error_type = 413, "request_too_large"


class UnsupportedEncoding(ApiError):
    status, error_type = 415, "unsupported_encoding"


class HeadersTooLarge(ApiError):
    status, error_type = 431, "api_usage_error"


class InvalidRequest(ApiError):
    """What the schema forbids, in FastAPI's form: one entry for each broken field, with `loc` from the body down."""

    status, error_type = 422, "invalid_request"

    def __init__(self, errors: Sequence[tuple[tuple[str | int, ...], str, str]]) -> None:
        """`errors` holds (location below the body, message, type) triples."""
        super().__init__(
            "; ".join(f"{'.'.join(str(_shorten_place(place)) for place in loc)}: {msg}" for loc, msg, _ in errors[:1])
        )
        self.errors = errors

    @classmethod
    def at(cls, loc: tuple[str | int, ...], msg: str, kind: str = "value_error") -> InvalidRequest:
        return cls([(loc, msg, kind)])

    def detail(self) -> object:
        shown = self.errors[:MAX_REPORTED_ERRORS]
        return [{"loc": ["body", *map(_shorten_place, loc)], "msg": msg, "type": kind} for loc, msg, kind in shown]


def _shorten_place(place: str | int) -> str | int:
    return shorten(place, MAX_SHOWN_CHARS) if isinstance(place, str) else place


class Overloaded(ApiError):
    """The queue is full."""

    status, error_type = 503, "overloaded_error"


class OutOfMemory(ApiError):
    """The model has no memory for this row, even alone."""

    status, error_type = 503, "overloaded_error"


class Loading(ApiError):
    status, error_type = 503, "loading"
    default_message, default_retry_after_s = "the model is loading", 2


class ShuttingDown(ApiError):
    status, error_type = 503, "shutting_down"
    default_message, default_retry_after_s = "the server is shutting down", 1


class DeadlineExceeded(ApiError):
    """The request waited in the queue for longer than `--timeout-s`."""

    status, error_type = 503, "deadline_exceeded"
    default_message, default_retry_after_s = "the request waited in the queue for too long", 1


class WorkerDead(ApiError):
    """The thread that owns the model has ended, and the process ends with it."""

    status, error_type = 503, "worker_dead"
    default_message = "the model's worker has stopped; the server must be restarted"
    default_retry_after_s = 5


class InternalError(ApiError):
    """Only a fault of ours is one. The message holds no internals."""


def explain(detail: object) -> str:
    """What the `detail` of an error body says, in one line. The body may come from any server."""
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        first = detail[0]
        place = ".".join(map(str, first.get("loc", [])[1:]))
        where = "" if first.get("type") == "json_invalid" else place  # the message says the line and the column
        more = f" (and {len(detail) - 1} more)" if len(detail) > 1 else ""
        return f"{where}: {first.get('msg')}{more}" if where else f"{first.get('msg')}{more}"
    if isinstance(detail, dict) and "message" in detail:
        return str(detail["message"])
    return str(detail)
