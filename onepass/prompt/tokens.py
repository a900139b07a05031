"""This module keeps a tokenizer's control tokens apart from text, so that no text of a client can become one.

While a template runs, all text that could be part of a control token is fenced by lone surrogates, which no client can
send. The control tokens that the template itself wrote are then found by their text. Everything between them is
tokenised by a copy of the tokenizer that knows no control tokens at all.
"""

from __future__ import annotations

import functools
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from onepass.errors import BadRequest, StartupError
from onepass.wire.request import FIRST_PICTURE, MAX_PICTURES, picture_mark

MARK, SPLIT = "<|mark|>", "<|split|>"  # These sentinels of the library mean "read here" and "tokenise apart".
FENCE_OPEN, FENCE_CLOSE = "\ud800", "\ud801"
PROBE = "\ud802"  # It represents any client text while a template is checked.
MAX_KEPT_TEXTS, MAX_KEPT_CHARS = 8192, 256  # The kept texts take at most 40 MB.
_FENCE = re.compile(f"[{FENCE_OPEN}{FENCE_CLOSE}]")


def strip_fences(rendered: str) -> str:
    return _FENCE.sub("", rendered)


@dataclass(slots=True)
class Memo:
    """A memo holds the texts that the prompts of one request share, so that each is tokenised once."""

    texts: dict[str, array[int]] = field(default_factory=dict)
    # This maps a text to (the ids of its first characters, the number of these characters).
    starts: dict[str, tuple[array[int], int]] = field(default_factory=dict)


class Encoded(NamedTuple):
    """This is a prompt in tokens."""

    ids: array[int]
    marks: list[int]  # Each entry is the number of ids before one `<|mark|>`.
    num_shared: int  # This many first ids depend only on the first `num_shared_chars` characters.
    pictures: list[tuple[int, int]]  # Each entry is (where a shown picture begins in `ids`, the picture's index).


class ControlTokens:
    """This is the tokenizer with its control tokens kept apart from text."""

    def __init__(self, tokenizer: Any) -> None:
        added = {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items()}
        # Tokens such as Gemma's "\n\n" are ordinary text. They are in the added vocabulary only for speed.
        self._control = {content: id_ for content, id_ in added.items() if not content.isspace()}
        self._control_ids = frozenset(self._control.values())
        names = sorted([*self._control, MARK, SPLIT], key=len, reverse=True)
        picture = f"[{picture_mark(0)}-{picture_mark(MAX_PICTURES - 1)}]"
        self._pattern = re.compile("|".join((*map(re.escape, names), picture)))
        self._edges = frozenset(name[0] for name in names) | frozenset(name[-1] for name in names)
        self._names = names
        self._text = _text_tokenizer(tokenizer, self._control)
        # States differ, but the same questions are asked about them thousands of times.
        self._encode_kept = functools.lru_cache(MAX_KEPT_TEXTS)(self._encode_plain)
        self._check_exact(tokenizer)

    def fence(self, value: Any) -> Any:
        """Return `value` with a fence around every string that could hold, begin or end a control token's text."""
        if isinstance(value, str):
            return value if self._edges.isdisjoint(value) else FENCE_OPEN + value + FENCE_CLOSE
        if isinstance(value, dict):
            return {self.fence(key): self.fence(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.fence(item) for item in value]
        return value

    def keeps_apart(self, rendered: str) -> bool:
        """Return whether no text in the place of a `PROBE` can complete a control token, as in "<|" ~ text ~ "|>"."""
        for match in re.finditer(PROBE, rendered):
            before, after = rendered[: match.start()], rendered[match.end() :]
            for name in self._names:
                begins = (cut for cut in range(1, len(name)) if before.endswith(name[:cut]))
                if any(after.startswith(name[end:]) for cut in begins for end in range(cut, len(name))):
                    return False
        return True

    def encode(
        self, rendered: str, memo: Memo, num_shared_chars: int = 0, pictures: Sequence[array[int]] = ()
    ) -> Encoded:
        """Return a rendered prompt in ids. The ids in `pictures[i]` replace the mark of picture i."""
        text, fenced = _take_fences(rendered)
        shared_end = len(strip_fences(rendered[:num_shared_chars]))
        ids: array[int] = array("i")
        marks: list[int] = []
        shown: list[tuple[int, int]] = []
        start = num_shared = next_fenced = 0
        for match in (*self._pattern.finditer(text), None):
            end = match.start() if match else len(text)
            if start < shared_end < end:
                more, count = self._encode_cut(text[start:end], shared_end - start, memo)
                num_shared = len(ids) + count
                ids += more
            else:
                ids += self._encode_text(text[start:end], memo)
                num_shared = len(ids) if end <= shared_end else num_shared
            if match is None:
                break
            start, name = match.end(), match[0]
            while next_fenced < len(fenced) and fenced[next_fenced][1] <= match.start():
                next_fenced += 1  # Matches and fenced stretches are both in order, so one walk covers both.
            index = ord(name[0]) - FIRST_PICTURE
            if 0 <= index < MAX_PICTURES:
                shown.append((len(ids), index))
                ids += pictures[index]
            elif next_fenced < len(fenced) and fenced[next_fenced][0] < match.end():
                ids += self._encode_text(name, memo)  # A client wrote this text, or a part of it.
            elif name == MARK:
                marks.append(len(ids))
            elif name != SPLIT:
                ids.append(self._control[name])
            num_shared = len(ids) if start <= shared_end else num_shared
        return Encoded(ids, marks, num_shared, shown)

    def _encode_cut(self, text: str, cut: int, memo: Memo) -> tuple[array[int], int]:
        """Return the ids of `text`, and how many of them depend only on its first `cut` characters."""
        start = text[:cut]
        if start not in memo.starts:
            memo.starts[start] = self._encode_settled(start)
        known, num_chars = memo.starts[start]
        rest = self._text.encode(text[num_chars:], add_special_tokens=False).ids
        return known + self._checked(rest), len(known)

    def _encode_settled(self, start: str) -> tuple[array[int], int]:
        """Return the ids of those words of `start` that stay the same whatever follows, and their number of characters.

        Tokenizers work word by word. The last word may continue in the text that follows, and white space after it may
        join with more white space."""
        encoding = self._text.encode(start, add_special_tokens=False)
        words, offsets = encoding.word_ids, encoding.offsets
        last = next((place for place in reversed(range(len(words))) if start[slice(*offsets[place])].strip()), None)
        if last is None:
            return array("i"), 0
        first = words.index(words[last])
        return self._checked(encoding.ids[:first]), offsets[first][0]

    def _encode_text(self, text: str, memo: Memo) -> array[int]:
        if len(text) <= MAX_KEPT_CHARS:
            return self._encode_kept(text)
        ids = memo.texts.get(text)
        if ids is None:
            ids = memo.texts[text] = self._encode_plain(text)
        return ids

    def _encode_plain(self, text: str) -> array[int]:
        return self._checked(self._text.encode(text, add_special_tokens=False).ids if text else [])

    def _checked(self, ids: list[int]) -> array[int]:
        """Return the ids as an array. Raises `BadRequest` if the vocabulary spells a control token as plain text."""
        if not self._control_ids.isdisjoint(ids):
            raise BadRequest("the text spells out a control token of this model in a way it cannot read as text")
        return array("i", ids)

    def _check_exact(self, tokenizer: Any) -> None:
        """Check that this gives the same ids as the tokenizer itself, even though control tokens are taken out first.

        Raises `StartupError`.
        """
        name = next((name for name in self._control if name not in (MARK, SPLIT)), "")
        for probe in ("Ann's 12 cafés, \n\n  ok?", f"{name}Hello wörld {name} a\n{name}b", f"x{name}\ny"):
            expected = tokenizer.encode(probe, add_special_tokens=False)
            if list(self.encode(probe, Memo())[0]) != expected:
                raise StartupError(
                    "this kind of tokenizer is not supported: its control tokens change the text around them"
                )


def _take_fences(rendered: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without fences, and the (start, end) of each fenced stretch in it."""
    if FENCE_OPEN not in rendered:
        return rendered, []
    parts: list[str] = []
    fenced: list[tuple[int, int]] = []
    length = start = opened = 0
    is_open = False
    for match in _FENCE.finditer(rendered):
        parts.append(rendered[start : match.start()])
        length += match.start() - start
        start = match.end()
        if is_open:
            fenced.append((opened, length))
        is_open, opened = match[0] == FENCE_OPEN, length
    parts.append(rendered[start:])
    if is_open:  # A template cut off the closing fence. The rest of the text is still a client's.
        fenced.append((opened, length + len(rendered) - start))
    return "".join(parts), fenced


def _text_tokenizer(tokenizer: Any, control: Mapping[str, int]) -> Tokenizer:
    """Return a copy of the tokenizer that knows no control tokens and adds none. Threads may share it."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in control]
    spec.update(truncation=None, padding=None, post_processor=None)
    return Tokenizer.from_str(json.dumps(spec))
