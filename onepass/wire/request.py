"""This module holds a request in the form that every later step reads, and the limits of the contract.

It imports nothing else from this package.
"""

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
    """Return the character that marks the place in a text where picture `index` of the request is shown."""
    return chr(FIRST_PICTURE + index)


@dataclass(frozen=True, slots=True)
class Question:
    """This is one question in the form that every later step reads: named options, each with its description."""

    id: str
    type: Literal["noul", "choice", "score"]
    instructions: Text | None
    options: tuple[str, ...]  # A choice has its labels, a score has "0", "1" and so on, a noul has "true" and "false".
    descriptions: tuple[Text | None, ...]  # Each option has one description.


@dataclass(frozen=True, slots=True)
class Request:
    state: Text
    questions: tuple[Question, ...]
    model: str | None = None
    encoding: str | None = None
    images: Mapping[str, Any] | list[Any] | None = None
    assets: Mapping[str, Any] | None = None
    parts: Mapping[str, bytes] = field(default_factory=dict)
    tail: str = ""  # It holds the marks of pictures that no text names. They are shown after the state.

    @property
    def has_images(self) -> bool:
        return bool(self.images or self.assets or self.parts)
