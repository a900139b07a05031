"""The prompt rows that every layer speaks of: tokens, pictures, and the positions where answers are read.

It imports nothing of ours and no tensor library.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from images import Picture  # a server of text only never loads it

ID_BYTES = 4  # of a token id, int32

Readout = Literal["labels", "pointer"]


@dataclass(frozen=True, slots=True)
class Read:
    """Where one question's answer is read in a row."""

    positions: tuple[int, ...]  # labels: the one position; pointer: one an option, then the question's end
    label_ids: tuple[int, ...]  # labels: the options' tokens, in template order; pointer: none


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """How a checkpoint shows a picture: `start`, then one `pad` for each of its embeddings, then `end`."""

    start: int
    pad: int
    end: int

    def ids(self, picture: Picture) -> array[int]:
        return array("i", [self.start, *[self.pad] * picture.num_tokens, self.end])


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a row."""

    start: int  # where its embeddings begin
    picture: Picture


@dataclass(frozen=True, slots=True)
class PrefixTokens:
    """The first tokens of rows, and what is to be seen in their pictures."""

    ids: bytes  # int32
    pictures: tuple[PlacedPicture, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def key(self) -> bytes:
        """Beginnings with the same key leave the same behind."""
        return b"".join((self.ids, *(shown.picture.digest for shown in self.pictures)))

    def after(self, num_tokens: int) -> PrefixTokens:
        """Without its first tokens, among which is no picture."""
        return PrefixTokens(self.ids[num_tokens * ID_BYTES :], pictures_from(self.pictures, num_tokens))


def pictures_from(pictures: Iterable[PlacedPicture], start: int) -> tuple[PlacedPicture, ...]:
    """Those from token `start` on, counted from there."""
    return tuple(PlacedPicture(shown.start - start, shown.picture) for shown in pictures if shown.start >= start)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as the model sees it."""

    input_ids: array[int]
    reads: tuple[Read, ...]  # one a question, in the order of the request
    num_shared: int = 0  # leading tokens that other questions about the same state have too
    pictures: tuple[PlacedPicture, ...] = ()  # in order; none stands across the end of the shared tokens

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_image_tokens(self) -> int:
        return sum(shown.picture.num_tokens for shown in self.pictures)

    @property
    def key(self) -> Hashable:
        """Rows with the same key have the same scores."""
        seen = tuple((shown.start, shown.picture.digest) for shown in self.pictures)
        return self.input_ids.tobytes(), self.reads, seen

    def beginning(self) -> PrefixTokens:
        """Its `num_shared` first tokens."""
        pictures = tuple(shown for shown in self.pictures if shown.start < self.num_shared)
        return PrefixTokens(self.input_ids[: self.num_shared].tobytes(), pictures)

    def position(self, place: int) -> int:
        """Where M-RoPE has the token at `place`, which is not inside a picture: a picture takes up its longer side."""
        before = (shown.picture for shown in self.pictures if shown.start < place)
        return place - sum(picture.num_tokens - picture.span for picture in before)
