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

ID_BYTES = 4  # a token id is an int32

Readout = Literal["labels", "pointer", "linear"]


@dataclass(frozen=True, slots=True)
class Read:
    """The places where one question's answer is read in a row.

    With the readout `labels` it is one position, and `label_ids` are the options' tokens in the template's order; with
    `linear` likewise, and they are rows of the head. With
    `pointer` there is one position for each option, then the question's end, and no label.
    """

    positions: tuple[int, ...]
    label_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """The tokens that show a picture: `start`, then one `pad` for each of its embeddings, then `end`."""

    start: int
    pad: int
    end: int

    def ids(self, picture: Picture) -> array[int]:
        return array("i", [self.start, *[self.pad] * picture.num_tokens, self.end])


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture in a row."""

    start: int  # the place of the first of its embeddings
    picture: Picture


def pictures_from(pictures: Iterable[PlacedPicture], start: int) -> tuple[PlacedPicture, ...]:
    """The pictures from token `start` on, their places counted from that token."""
    return tuple(PlacedPicture(placed.start - start, placed.picture) for placed in pictures if placed.start >= start)


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as the model sees it."""

    input_ids: array[int]  # int32
    reads: tuple[Read, ...]  # one for each question, in the order of the request
    num_shared: int = 0  # leading tokens that other questions about the same state have too
    pictures: tuple[PlacedPicture, ...] = ()  # in order; none stands across the end of the shared tokens

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_image_tokens(self) -> int:
        return sum(placed.picture.num_tokens for placed in self.pictures)

    @property
    def key(self) -> Hashable:
        """Rows with the same key have the same scores."""
        seen = tuple((placed.start, placed.picture.digest) for placed in self.pictures)
        return self.input_ids.tobytes(), self.reads, seen

    def shared_ids(self) -> bytes:
        """The shared tokens, as int32."""
        return self.input_ids[: self.num_shared].tobytes()

    def shared_key(self) -> bytes:
        """Rows with the same shared key leave the same behind after their shared tokens."""
        shared = (placed.picture.digest for placed in self.pictures if placed.start < self.num_shared)
        return b"".join((self.shared_ids(), *shared))

    def shared_part(self) -> Row:
        """The shared tokens alone, as a row of which nothing is read."""
        pictures = tuple(placed for placed in self.pictures if placed.start < self.num_shared)
        return Row(self.input_ids[: self.num_shared], (), self.num_shared, pictures)

    def position(self, place: int) -> int:
        """The position that M-RoPE gives the token at `place`, which is not inside a picture. A picture counts as many
        positions as its longer side has tokens."""
        before = (placed.picture for placed in self.pictures if placed.start < place)
        return place - sum(picture.num_tokens - picture.span for picture in before)
