"""This module turns a `Request` into prompt `Row`s: template, labels, and the places where answers are read.

It knows nothing of the model.
"""

from __future__ import annotations

import json
import string
from array import array
from collections.abc import Iterable, Sequence
from itertools import product, takewhile
from typing import TYPE_CHECKING, Any

from onepass.errors import ApiError, BadRequest, InvalidRequest, StartupError, TooManyTokens, shorten
from onepass.prompt.template import DecisionFormat, Writer
from onepass.prompt.tokens import FENCE_CLOSE, FENCE_OPEN, PROBE, ControlTokens, Memo, strip_fences
from onepass.rows import PictureTokens, PlacedPicture, Read, Row
from onepass.wire.request import MAX_LEVELS, MAX_OPTIONS, Question, Request, picture_mark

if TYPE_CHECKING:
    from images import Picture  # A server that reads text only never loads this module.

LONG_CHARS_PER_TOKEN = 16  # Ordinary text has 3 to 6.
VARIED_STATES = ("a", "Z", "\n", "7", "", {"key": "value"})  # The text that their prompts share is the template's.
MAX_CUT_TOKENS = 256  # A cut can add at most this many tokens to the count of a text.


class Prompter:
    """A prompter renders requests. It does not change after the start, so any thread may call `render`."""

    def __init__(
        self,
        tokenizer: Any,
        decision: DecisionFormat,
        *,
        max_tokens: int,
        encoding: str = "auto",
        picture_tokens: PictureTokens | None = None,
    ) -> None:
        """`tokenizer` is a fast tokenizer of transformers. Raises `StartupError` if prompts cannot be made with it."""
        self.decision = decision
        self._picture_tokens = picture_tokens
        self.max_tokens = max_tokens
        self.encodings = tuple(decision.templates) or ("per_question",)
        self.encoding = decision.default_encoding if encoding == "auto" else encoding
        if self.encoding not in self.encodings:
            raise StartupError(f"--encoding {encoding}: this checkpoint does {', '.join(self.encodings)} only")
        self._tokens = ControlTokens(tokenizer)
        self._labels = Labels(tokenizer, decision)
        self._separable = set(self.encodings)  # Their prompts are the same when the state is inserted afterwards.
        self._writer = Writer(tokenizer, decision, self._tokens.fence, self._labels.names)
        self._check_templates()

    def render(self, request: Request, pictures: Sequence[Picture] = ()) -> list[Row]:
        """Return one row for each question, or one for all. Picture i is shown where the request has its mark.

        Raises `InvalidRequest`, `TooManyTokens` or `BadRequest`.
        """
        encoding = request.encoding or self.encoding
        if encoding not in self.encodings:
            raise InvalidRequest.at(
                ("encoding",), f"must be {' or '.join(map(repr, self.encodings))} for this model", "literal_error"
            )
        self._labels.check_counts(request.questions)
        state = self._tokens.fence(request.state)
        state_text = self._writer.state_text(encoding, state) if encoding in self._separable else None
        if request.tail:
            state = _with_tail(state if state_text is None else state_text, request.tail)
            state_text = None if state_text is None else state
        memo = Memo()  # The questions of a request share most of their text.
        groups = [request.questions] if encoding == "joint" else [(question,) for question in request.questions]
        rows = []
        for group in groups:
            try:
                rows.append(self._row(*self._writer.write(encoding, state, state_text, group), group, memo, pictures))
            except (TooManyTokens, BadRequest) as err:
                if len(groups) == 1:  # what is wrong is in the prompt, and there is but one
                    raise
                raise err.within(f"question {shorten(group[0].id)!r}") from None
        return rows

    def beginnings(self) -> list[bytes]:
        """Return, for each encoding, the tokens (int32) with which every prompt starts, whatever the request is."""
        found = []
        for encoding in self.encodings:
            requests = (Request(state, _sample_questions("b"), encoding=encoding) for state in VARIED_STATES)
            rows = [row for request in requests for row in self.render(request)]
            places = zip(*(row.input_ids[: row.num_shared] for row in rows), strict=False)  # The shortest row ends it.
            same = takewhile(lambda tokens: len(set(tokens)) == 1, places)
            found.append(array("i", [tokens[0] for tokens in same]).tobytes())
        return found

    def _row(
        self,
        text: str,
        num_shared_chars: int,
        questions: tuple[Question, ...],
        memo: Memo,
        pictures: Sequence[Picture] = (),
    ) -> Row:
        limit = self.max_tokens
        num_image_tokens = sum(
            text.count(picture_mark(index)) * picture.num_tokens for index, picture in enumerate(pictures)
        )
        if num_image_tokens > limit:
            raise TooManyTokens(f"the pictures of one prompt take {num_image_tokens} tokens; the limit is {limit}")
        picture_ids = [self._picture_tokens.ids(picture) for picture in pictures] if self._picture_tokens else []
        if len(text) > limit * LONG_CHARS_PER_TOKEN:  # A text of 32 MiB is not tokenised only to be refused.
            count = len(self._tokens.encode(text[: limit * LONG_CHARS_PER_TOKEN], Memo(), 0, picture_ids).ids)
            if count > limit + MAX_CUT_TOKENS:
                raise TooManyTokens(f"the prompt has over {count} tokens; the limit is {limit}")
        input_ids, marks, num_shared, shown = self._tokens.encode(text, memo, num_shared_chars, picture_ids)
        if len(input_ids) > limit:
            raise TooManyTokens(f"the prompt has {len(input_ids)} tokens; the limit is {limit}")
        reads = self._reads(questions, marks or [len(input_ids)])
        places = tuple(PlacedPicture(start + 1, pictures[index]) for start, index in shown)
        return Row(input_ids, reads, min(num_shared, reads[0].positions[0]), places)

    def _reads(self, questions: tuple[Question, ...], marks: list[int]) -> tuple[Read, ...]:
        """Return what is read for each question. `marks` holds the number of tokens before each sentinel, and the token
        before a sentinel is read."""
        if self.decision.readout != "pointer":
            return tuple(
                Read((mark - 1,), self._labels.ids(question.type, len(question.options)))
                for question, mark in zip(questions, marks, strict=True)
            )
        reads, start = [], 0
        for question in questions:
            end = start + len(question.options) + 1
            reads.append(Read(tuple(mark - 1 for mark in marks[start:end]), ()))
            start = end
        if start != len(marks):
            raise ValueError(f"the template wrote {len(marks)} marks where {start} are read")
        return tuple(reads)

    def _check_templates(self) -> None:
        """Check that every template marks each question's answer, and keeps client text complete and separate.

        Raises `StartupError`.
        """
        for encoding in self.encodings:
            for part in [slice(None)] if encoding == "joint" else [slice(0, 1), slice(1, 2), slice(2, 3)]:
                questions = _sample_questions("a")[part]
                try:
                    self._row(self._writer.render(encoding, {"text": "a"}, questions), 0, questions, Memo())
                    plain, fenced, probed = (
                        self._writer.render(encoding, text, _sample_questions(text)[part])
                        for text in ("a", FENCE_OPEN + "a" + FENCE_CLOSE, PROBE)
                    )
                    if not self._writer.is_separable(encoding, questions):
                        self._separable.discard(encoding)
                except (ApiError, ValueError) as err:
                    raise StartupError(f"no {encoding} prompt can be made: {err}") from None
                if strip_fences(fenced) != plain or not self._tokens.keeps_apart(probed):
                    raise StartupError(
                        f"the {encoding} template rewrites client text or builds control tokens around it"
                    )


def _with_tail(state: Any, tail: str) -> str:
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False, separators=(",", ":"))
    return f"{text}\n{tail}" if text else tail


def _sample_questions(text: str) -> tuple[Question, ...]:
    """Return one question of each type, made of `text`."""
    return (
        Question("a", "noul", text, ("true", "false"), (text, None)),
        Question("b", "choice", text, (text, "other"), (None, text)),
        Question("c", "score", text, ("0", "1"), (text, text)),
    )


class Labels:
    """The labels of each question type, checked once at the start: tokens for the readout `labels`, the rows of the
    head in order for `linear`."""

    def __init__(self, tokenizer: Any, decision: DecisionFormat) -> None:
        self._is_read = decision.readout != "pointer"
        self._names: dict[str, list[str]] = {}
        self._ids: dict[str, tuple[int, ...]] = {}
        for kind, default, most in (
            ("noul", ("Yes", "No"), 2),
            ("choice", _letters(), MAX_OPTIONS),
            ("score", string.ascii_uppercase, MAX_LEVELS),
        ):
            given = decision.labels.get(kind)
            if decision.readout == "linear":
                self._names[kind] = list(given or ())[:most]
                self._ids[kind] = tuple(range(len(self._names[kind])))
                continue
            names, ids = _single_tokens(tokenizer, given or default, most)
            if not self._is_read:  # shown by some templates, never read
                names = list(given or default)[:most]
            elif given and len(ids) < min(len(given), most):
                raise StartupError(f"decision.json: labels.{kind} must be distinct single tokens of the tokenizer")
            elif len(ids) < 2:
                raise StartupError(f"the tokenizer has no single tokens for the labels of a {kind} question")
            self._names[kind], self._ids[kind] = names, ids

    def check_counts(self, questions: Iterable[Question]) -> None:
        """Check each question. Raises `InvalidRequest` for a question with more options than there are labels."""
        for question in questions if self._is_read else ():
            most = len(self._ids[question.type])
            if len(question.options) > most:
                raise InvalidRequest.at(
                    ("questions", question.id, question.type, "criteria"),
                    f"must have at most {most} options for this model, not {len(question.options)}",
                    "too_many_options",
                )

    def names(self, kind: str, count: int) -> list[str]:
        return self._names[kind][:count]

    def ids(self, kind: str, count: int) -> tuple[int, ...]:
        return self._ids[kind][:count]


def _letters() -> Iterable[str]:
    """Yield A to Z, as the library does, then AA to ZZ."""
    yield from string.ascii_uppercase
    yield from map("".join, product(string.ascii_uppercase, repeat=2))


def _single_tokens(tokenizer: Any, names: Iterable[str], most: int) -> tuple[list[str], tuple[int, ...]]:
    """Return those of `names` that are one token, and their ids: each token once, and at most `most` of them."""
    found: dict[int, str] = {}
    for name in names:
        ids = tokenizer(name, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            found.setdefault(ids[0], name)
        if len(found) == most:
            break
    return list(found.values()), tuple(found)
