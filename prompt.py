"""A `Request` to prompt `Row`s: template, labels and the places where answers are read; knows nothing of the model."""

from __future__ import annotations

import datetime
import json
import string
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import jinja2
from huggingface_hub.errors import StrictDataclassError
from transformers.decision import DECISION_PROMPT, DecisionConfig
from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

from errors import ApiError, BadRequest, InvalidRequest, StartupError, TooManyTokens
from tokens import FENCE_CLOSE, FENCE_OPEN, PROBE, ControlTokens, strip_fences
from wire import MAX_LEVELS, MAX_OPTIONS, Question, Request

TEMPLATE_FILES = {
    "per_question": "decision_template_per_question.jinja",
    "joint": "decision_template_joint.jinja",
}
MAIN_TEMPLATE = "decision_template.jinja"
# Some chat templates print today's date. The same request must get the same answer tomorrow.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
LONG_CHARS_PER_TOKEN = 16  # ordinary text has 3 to 6
MAX_CUT_TOKENS = 256  # what cutting a text can add to its count

Readout = Literal["labels", "pointer"]


@dataclass(frozen=True, slots=True)
class Read:
    """Where one question's answer is read in a row."""

    positions: tuple[int, ...]  # labels: the one position; pointer: one an option, then the question's end
    label_ids: tuple[int, ...]  # labels: the options' tokens, in template order; pointer: none


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt as the model sees it."""

    input_ids: array[int]
    reads: tuple[Read, ...]  # one a question, in the order of the request
    num_shared: int = 0  # leading tokens that other questions about the same state have too

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class DecisionFormat:
    """What `decision.json` and the templates of a checkpoint say."""

    templates: Mapping[str, str]  # encoding -> Jinja source; empty: the library's prompt in the chat template
    default_encoding: str
    readout: Readout
    labels: Mapping[str, list[str]]
    temperature: Mapping[str, float]
    noul_options: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> DecisionFormat:
        """Raises `StartupError` where the files contradict each other."""
        path = folder / "decision.json"
        try:
            config = DecisionConfig.from_file(path if path.exists() else None)
            extra = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (ValueError, TypeError, AttributeError, StrictDataclassError) as err:
            raise StartupError(f"{path}: {' '.join(str(err).split())}") from None
        if config.adapter:
            raise StartupError(f"{path} names an adapter; merge it into the weights first")
        templates = _load_templates(folder)
        readout = extra.get("readout", "labels")
        if readout not in ("labels", "pointer"):
            raise StartupError(f"{path}: readout must be 'labels' or 'pointer', not {readout!r}")
        if readout == "pointer" and not templates:
            raise StartupError(f"{path}: readout 'pointer' needs a {MAIN_TEMPLATE}")
        encoding = extra.get("encoding") or next(iter(templates), "per_question")
        if encoding not in (templates or ("per_question",)):
            raise StartupError(f"{path}: encoding {encoding!r} has no template; there is {', '.join(templates)}")
        for kind, value in config.temperature.items():
            if not 0 < value < float("inf"):
                raise StartupError(f"{path}: temperature.{kind} must be above 0, not {value}")
        temperature = {kind: float(value) for kind, value in config.temperature.items()}
        return cls(templates, encoding, readout, config.labels, temperature, tuple(config.noul_options))


def _load_templates(folder: Path) -> dict[str, str]:
    """The main template first: its encoding is the default."""
    templates: dict[str, str] = {}
    main = folder / MAIN_TEMPLATE
    if main.exists():
        source = main.read_text(encoding="utf-8")
        templates["joint" if "questions" in _get_template_variables(source) else "per_question"] = source
    for encoding, name in TEMPLATE_FILES.items():
        if (folder / name).exists():
            if encoding in templates:
                raise StartupError(f"{folder / name}: {MAIN_TEMPLATE} is already the one for {encoding}")
            templates[encoding] = (folder / name).read_text(encoding="utf-8")
    return templates


class Prompter:
    """Renders requests. Immutable after the start, so any thread may call `render`."""

    def __init__(self, tokenizer: Any, decision: DecisionFormat, *, max_tokens: int, encoding: str = "auto") -> None:
        """`tokenizer` is a fast tokenizer of transformers. Raises `StartupError` if prompts cannot be made with it."""
        self.decision = decision
        self.max_tokens = max_tokens
        self.encodings = tuple(decision.templates) or ("per_question",)
        self.encoding = decision.default_encoding if encoding == "auto" else encoding
        if self.encoding not in self.encodings:
            raise StartupError(f"--encoding {encoding}: this checkpoint does {', '.join(self.encodings)} only")
        self._tokens = ControlTokens(tokenizer)
        self._labels = Labels(tokenizer, decision)
        if not decision.templates and not tokenizer.chat_template:
            raise StartupError(f"the checkpoint has neither a {MAIN_TEMPLATE} nor a chat template")
        self._chat_template = tokenizer.chat_template
        self._common = {  # what the library's apply_chat_template gives every template
            **tokenizer.special_tokens_map,
            "add_generation_prompt": True,
            "enable_thinking": False,
            "tools": None,
            "documents": None,
            "strftime_now": TEMPLATE_DATE.strftime,
        }
        self._check_templates()

    def render(self, request: Request) -> list[Row]:
        """One row a question, or one for all. Raises `InvalidRequest`, `TooManyTokens` or `BadRequest`."""
        encoding = request.encoding or self.encoding
        if encoding not in self.encodings:
            raise InvalidRequest.at(
                ("encoding",), f"must be {' or '.join(map(repr, self.encodings))} for this model", "literal_error"
            )
        self._labels.check_counts(request.questions)
        state = self._tokens.fence(request.state)
        memo: dict[str, array[int]] = {}  # the questions of a request share most of their text
        if encoding == "joint":
            return [self._row(encoding, state, request.questions, memo)]
        others: dict[str, str] = {}  # the prompts of a question of another type, to see how far all agree
        rows = []
        for question in request.questions:
            kind = "choice" if question.type == "noul" else "noul"
            if kind not in others:
                others[kind] = self._render_text(encoding, state, (_OTHER_QUESTION[kind],))
            rows.append(self._row(encoding, state, (question,), memo, others[kind]))
        return rows

    def _row(
        self,
        encoding: str,
        state: object,
        questions: tuple[Question, ...],
        memo: dict[str, array[int]],
        other_text: str = "",
    ) -> Row:
        """`other_text` is the prompt of another question about the same state, to see how far the two agree."""
        text = self._render_text(encoding, state, questions)
        limit = self.max_tokens
        if len(text) > limit * LONG_CHARS_PER_TOKEN:  # do not tokenise 32 MiB to say that they are too many
            count = len(self._tokens.encode(text[: limit * LONG_CHARS_PER_TOKEN], {})[0])
            if count > limit + MAX_CUT_TOKENS:
                raise TooManyTokens(f"the prompt has over {count} tokens; the limit is {limit}")
        input_ids, marks, num_shared = self._tokens.encode(text, memo, num_shared_chars(text, other_text))
        if len(input_ids) > limit:
            raise TooManyTokens(f"the prompt has {len(input_ids)} tokens; the limit is {limit}")
        reads = self._reads(questions, marks or [len(input_ids)])
        return Row(input_ids, reads, min(num_shared, reads[0].positions[0]))

    def _render_text(self, encoding: str, state: object, questions: tuple[Question, ...]) -> str:
        inputs = [self._template_input(question) for question in questions]
        content = ""
        template = self.decision.templates.get(encoding)
        values: dict[str, Any] = {"state": state, "question": inputs[0], "questions": inputs}
        try:
            if template is None:
                content = _compile_jinja_template(DECISION_PROMPT).render(values)
                template, values = self._chat_template, {}
            messages = [{"role": "user", "content": content}]
            text: str = _compile_jinja_template(template).render({**self._common, "messages": messages, **values})
            return text
        except jinja2.TemplateError as err:
            raise BadRequest(f"this checkpoint's template cannot write the request: {str(err)[:200]}") from err

    def _template_input(self, question: Question) -> dict[str, Any]:
        """The library's form of a question. Its id is left out: the model never sees it."""
        options, descriptions = list(question.options), list(question.descriptions)
        if question.type == "noul":
            sides = dict(zip(question.options, question.descriptions, strict=True))
            options = list(self.decision.noul_options)
            descriptions = [sides[side] for side in options]
        return {
            "name": "",
            "type": question.type,
            "instructions": self._tokens.fence(question.instructions),
            "options": self._tokens.fence(options),
            "labels": self._labels.names(question.type, len(options)),
            "descriptions": self._tokens.fence(descriptions),
        }

    def _reads(self, questions: tuple[Question, ...], marks: list[int]) -> tuple[Read, ...]:
        """`marks` are the numbers of tokens before each sentinel; what is read is the token before it."""
        if self.decision.readout == "labels":
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
        """Every template must mark each question's answer, and write client text whole and apart.

        Raises `StartupError`.
        """
        for encoding in self.encodings:
            for part in [slice(None)] if encoding == "joint" else [slice(0, 1), slice(1, 2), slice(2, 3)]:
                try:
                    self._row(encoding, {"text": "a"}, _sample_questions("a")[part], {})
                    plain, fenced, probed = (
                        self._render_text(encoding, text, _sample_questions(text)[part])
                        for text in ("a", FENCE_OPEN + "a" + FENCE_CLOSE, PROBE)
                    )
                except (ApiError, ValueError) as err:
                    raise StartupError(f"the {encoding} template does not work: {err}") from None
                if strip_fences(fenced) != plain or not self._tokens.keeps_apart(probed):
                    raise StartupError(
                        f"the {encoding} template rewrites client text or builds control tokens around it"
                    )


_OTHER_QUESTION = {
    "noul": Question("", "noul", "\x01", ("true", "false"), (None, None)),
    "choice": Question("", "choice", "\x02", ("\x02",), (None,)),
}


def num_shared_chars(a: str, b: str) -> int:
    """The length of the longest common beginning, by halving: slices compare fast, characters one by one do not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _sample_questions(text: str) -> tuple[Question, ...]:
    """One of each type, made of `text`."""
    return (
        Question("a", "noul", text, ("true", "false"), (text, None)),
        Question("b", "choice", text, (text, "other"), (None, text)),
        Question("c", "score", text, ("0", "1"), (text, text)),
    )


class Labels:
    """The label tokens of each question type (readout `labels`), checked once at the start."""

    def __init__(self, tokenizer: Any, decision: DecisionFormat) -> None:
        self._is_read = decision.readout == "labels"
        self._names: dict[str, list[str]] = {}
        self._ids: dict[str, tuple[int, ...]] = {}
        for kind, default, most in (
            ("noul", ("Yes", "No"), 2),
            ("choice", _letters(), MAX_OPTIONS),
            ("score", string.ascii_uppercase, MAX_LEVELS),
        ):
            given = decision.labels.get(kind)
            names, ids = _single_tokens(tokenizer, given or default, most)
            if not self._is_read:  # shown by some templates, never read
                names = list(given or default)[:most]
            elif given and len(ids) < min(len(given), most):
                raise StartupError(f"decision.json: labels.{kind} must be distinct single tokens of the tokenizer")
            elif len(ids) < 2:
                raise StartupError(f"the tokenizer has no single tokens for the labels of a {kind} question")
            self._names[kind], self._ids[kind] = names, ids

    def check_counts(self, questions: Iterable[Question]) -> None:
        """Raises `InvalidRequest` for a question with more options than there are labels."""
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
    """A to Z as in the library, then AA to ZZ."""
    yield from string.ascii_uppercase
    yield from map("".join, product(string.ascii_uppercase, repeat=2))


def _single_tokens(tokenizer: Any, names: Iterable[str], most: int) -> tuple[list[str], tuple[int, ...]]:
    """Those of `names` that are one token, each token once, and their ids; `most` at the most."""
    found: dict[int, str] = {}
    for name in names:
        ids = tokenizer(name, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            found.setdefault(ids[0], name)
        if len(found) == most:
            break
    return list(found.values()), tuple(found)
