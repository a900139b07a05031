"""This module names every way in which a request can fail, and what the client is told.

It knows nothing of HTTP framing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

MAX_SHOWN_CHARS = 64  # A client's own name in `loc` is cut to this many characters.
MAX_REPORTED_ERRORS = 20  # A request may hold 512 broken questions; nobody reads more than a screenful.


class StartupError(Exception):
    """The server cannot start. The message is one line that says why, and what is allowed."""


class ApiError(Exception):
    """The request gets no decision. Subclasses set `status` and `error_type`.

    `retry_after_s` becomes the `Retry-After` header. It is in whole seconds and below 30, since the official SDK gives
    up after 30 s.
    """

    status = 500
    error_type = "internal_error"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

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


class TooManyTokens(ApiError):
    """A prompt row is longer than the model can read."""

    status, error_type = 400, "max_tokens_exceeded"


class Unauthorized(ApiError):
    status, error_type = 401, "authentication_error"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class NotFound(ApiError):
    status, error_type = 404, "not_found"  # The type is for the log only; the body has the form of FastAPI's.

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
    """The schema forbids the request. The body has FastAPI's form: one entry for each broken field, and its `loc`
    begins at the body."""

    status, error_type = 422, "invalid_request"

    def __init__(self, errors: Sequence[tuple[tuple[str | int, ...], str, str]]) -> None:
        """`errors` holds (location below the body, message, type) triples."""
        super().__init__(
            "; ".join(f"{'.'.join(str(_shorten(place)) for place in loc)}: {msg}" for loc, msg, _ in errors[:1])
        )
        self.errors = errors

    @classmethod
    def at(cls, loc: tuple[str | int, ...], msg: str, kind: str = "value_error") -> InvalidRequest:
        return cls([(loc, msg, kind)])

    def detail(self) -> object:
        shown = self.errors[:MAX_REPORTED_ERRORS]
        return [{"loc": ["body", *map(_shorten, loc)], "msg": msg, "type": kind} for loc, msg, kind in shown]


def _shorten(place: str | int) -> str | int:
    is_long = isinstance(place, str) and len(place) > MAX_SHOWN_CHARS
    return f"{str(place)[:MAX_SHOWN_CHARS]}…" if is_long else place


class Overloaded(ApiError):
    """The queue is full."""

    status, error_type = 503, "overloaded_error"


class OutOfMemory(ApiError):
    """The model has too little memory for this row, even when the row runs alone."""

    status, error_type = 503, "overloaded_error"


class Loading(ApiError):
    status, error_type = 503, "loading"


class ShuttingDown(ApiError):
    status, error_type = 503, "shutting_down"


class DeadlineExceeded(ApiError):
    """The request waited in the queue for longer than `--timeout-s`."""

    status, error_type = 503, "deadline_exceeded"


class WorkerDead(ApiError):
    status, error_type = 503, "worker_dead"


class InternalError(ApiError):
    """The server itself is at fault. The message shows no internals."""


def explain(detail: object) -> str:
    """Return in one line what the `detail` of an error body says. The body may come from any server."""
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        first = detail[0]
        place = ".".join(map(str, first.get("loc", [])[1:]))
        # The message of this type already says the line and the column.
        where = "" if first.get("type") == "json_invalid" else place
        more = f" (and {len(detail) - 1} more)" if len(detail) > 1 else ""
        return f"{where}: {first.get('msg')}{more}" if where else f"{first.get('msg')}{more}"
    if isinstance(detail, dict) and "message" in detail:
        return str(detail["message"])
    return str(detail)
