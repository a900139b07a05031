"""A request in the form that every later step reads, and the limits of the contract. It imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_QUESTIONS = 512
MAX_OPTIONS = 255
MAX_LEVELS = 10
MAX_PICTURES = 16
FIRST_PICTURE = 0xD810  # the marks of pictures are lone surrogates, which no client can send

Text = str | dict[str, Any] | list[Any]


def picture_mark(index: int) -> str:
    """The character that stands in a text where picture `index` of the request is shown."""
    return chr(FIRST_PICTURE + index)


@dataclass(frozen=True, slots=True)
class Question:
    """One question in the form every later step reads: named options, each with its description."""

    id: str
    type: Literal["noul", "choice", "score"]
    instructions: Text | None
    options: tuple[str, ...]  # labels; "0".. for a score; "true", "false" for a noul
    descriptions: tuple[Text | None, ...]  # one an option


@dataclass(frozen=True, slots=True)
class Request:
    state: Text
    questions: tuple[Question, ...]
    model: str | None = None
    encoding: str | None = None
    images: Mapping[str, Any] | list[Any] | None = None
    assets: Mapping[str, Any] | None = None
    parts: Mapping[str, bytes] = field(default_factory=dict)
    tail: str = ""  # marks of pictures that no text names: they are shown after the state

    @property
    def has_images(self) -> bool:
        return bool(self.images or self.assets or self.parts)
