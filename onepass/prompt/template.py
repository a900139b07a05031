"""This module reads what a checkpoint says about its decisions, and writes prompts with the checkpoint's templates.

It knows nothing of tokens. Rendering a template takes longer than anything else that a handler thread does, and the
same questions are asked about many states. A template is therefore rendered once for a question, with a probe in the
place of the state, and each state is then inserted there. The start finds out whether a template allows that. If it
does not, it is rendered for every prompt.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub.errors import StrictDataclassError
from transformers.decision.configuration_utils import DecisionConfig
from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

from onepass.errors import BadRequest, StartupError
from onepass.prompt.tokens import PROBE
from onepass.rows import Readout
from onepass.wire.request import Question, Text

TEMPLATE_FILES = {
    "decision_template_per_question.jinja": "per_question",
    "decision_template_joint.jinja": "joint",
}
MAIN_TEMPLATE = "decision_template.jinja"
# Some chat templates print today's date. The same request must get the same answer tomorrow.
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
MAX_KEPT_QUESTIONS, MAX_KEPT_CHARS = 1024, 8192  # They take at most 8 MB, or 32 MB with wide characters.


@dataclass(frozen=True, slots=True)
class DecisionFormat:
    """This holds what `decision.json` and the templates of a checkpoint say."""

    # This maps an encoding to its Jinja source. If it is empty, the library's prompt is put into the chat template.
    templates: Mapping[str, str]
    default_encoding: str
    readout: Readout
    labels: Mapping[str, list[str]]
    temperature: Mapping[str, float]
    noul_options: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> DecisionFormat:
        """Read the checkpoint's files. Raises `StartupError` if a file is wrong or the files contradict each other."""
        path = folder / "decision.json"
        try:
            extra = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if not isinstance(extra, dict):
                raise StartupError(f"{path} must hold a JSON object")
            config = DecisionConfig.from_file(path if path.exists() else None)
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

    @classmethod
    def of_chat(cls) -> DecisionFormat:
        """Return the library's own prompt and settings, for a chat model that says nothing about decisions."""
        config = DecisionConfig.from_file(None)
        return cls({}, "per_question", "labels", config.labels, dict(config.temperature), tuple(config.noul_options))


def _load_templates(folder: Path) -> dict[str, str]:
    """Return the templates by encoding. The main template comes first, since its encoding is the default."""
    templates: dict[str, str] = {}
    for name in (MAIN_TEMPLATE, *TEMPLATE_FILES):
        path = folder / name
        if not path.exists():
            continue
        try:
            source = path.read_text(encoding="utf-8")
            is_joint = "questions" in _get_template_variables(source)
        except (ValueError, jinja2.TemplateError) as err:
            raise StartupError(f"{path} is not a template: {' '.join(str(err).split())}") from None
        encoding = TEMPLATE_FILES.get(name) or ("joint" if is_joint else "per_question")
        if encoding in templates:
            raise StartupError(f"{path}: {MAIN_TEMPLATE} is already the one for {encoding}")
        templates[encoding] = source
    return templates


class Writer:
    """A writer writes the text of prompts. After the start only its cache changes, and any thread may call it."""

    def __init__(
        self,
        tokenizer: Any,
        decision: DecisionFormat,
        fence: Callable[[Any], Any],
        label_names: Callable[[str, int], list[str]],
    ) -> None:
        """`fence` marks client text, and `label_names` gives the labels that templates print.

        Raises `StartupError` if the checkpoint has no template.
        """
        if not decision.templates and not tokenizer.chat_template:
            raise StartupError(f"the checkpoint has neither a {MAIN_TEMPLATE} nor a chat template")
        self._decision, self._fence, self._label_names = decision, fence, label_names
        self._chat_template = tokenizer.chat_template
        self._common = {  # The library's apply_chat_template gives these values to every template.
            **tokenizer.special_tokens_map,
            "add_generation_prompt": True,
            "enable_thinking": False,
            "tools": None,
            "documents": None,
            "strftime_now": TEMPLATE_DATE.strftime,
        }
        self._kept_halves = functools.lru_cache(MAX_KEPT_QUESTIONS)(self._halves)

    def is_separable(self, encoding: str, questions: tuple[Question, ...]) -> bool:
        """Return whether a prompt is the same when the state is inserted afterwards."""
        for state in ("", "a", 'b "<c>\n', {"text": ["a", None]}, ["a", {"b": 1.5}]):
            fenced = self._fence(state)
            text = self.state_text(encoding, fenced)
            filled = None if text is None else self._filled(encoding, text, questions)
            if filled is None or filled[0] != self.render(encoding, fenced, questions):
                return False
        return True

    def state_text(self, encoding: str, state: object) -> str | None:
        """Return the fenced state as the template writes it, or None if it cannot be separated from the other text."""
        if isinstance(state, str):
            return state
        halves = self._kept_halves(encoding, (_OTHER_QUESTION["noul"],))
        text = self.render(encoding, state, (_OTHER_QUESTION["noul"],))
        if halves is None or len(text) < sum(map(len, halves)):
            return None
        before, after = halves
        is_between = text.startswith(before) and text.endswith(after)
        return text[len(before) : len(text) - len(after)] if is_between else None

    def write(
        self, encoding: str, state: object, state_text: str | None, questions: tuple[Question, ...]
    ) -> tuple[str, int]:
        """Return the prompt with its fences, and the number of its first characters that do not depend on the question.

        `state_text` is the state as the template writes it. If it is None, the template writes the state. Raises
        `BadRequest`.
        """
        filled = None if state_text is None else self._filled(encoding, state_text, questions)
        if filled is not None:
            return filled
        text = self.render(encoding, state, questions)
        return text, num_shared_chars(text, self.render(encoding, state, (_other(questions),)))

    def _filled(self, encoding: str, state_text: str, questions: tuple[Question, ...]) -> tuple[str, int] | None:
        halves, other = self._find_halves(encoding, questions), self._kept_halves(encoding, (_other(questions),))
        if halves is None or other is None:
            return None
        before, after = halves
        text = before + state_text + after
        if before != other[0]:
            return text, num_shared_chars(before, other[0])
        return text, len(before) + len(state_text) + num_shared_chars(after, other[1])

    def _find_halves(self, encoding: str, questions: tuple[Question, ...]) -> tuple[str, str] | None:
        questions = tuple(replace(question, id="") for question in questions)
        if sum(_num_chars(question) for question in questions) <= MAX_KEPT_CHARS:
            return self._kept_halves(encoding, questions)
        return self._halves(encoding, questions)

    def _halves(self, encoding: str, questions: tuple[Question, ...]) -> tuple[str, str] | None:
        """Return the prompt before the state and after it, or None if the state does not appear exactly once."""
        parts = self.render(encoding, PROBE, questions).split(PROBE)
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def render(self, encoding: str, state: object, questions: tuple[Question, ...]) -> str:
        """Return the text that the template makes of the fenced `state` and the questions. Raises `BadRequest`."""
        inputs = [self._template_input(question) for question in questions]
        content = ""
        template = self._decision.templates.get(encoding)
        values: dict[str, Any] = {"state": state, "question": inputs[0], "questions": inputs}
        try:
            if template is None:
                content = _compile_jinja_template(_library_prompt()).render(values)
                template, values = self._chat_template, {}
            messages = [{"role": "user", "content": content}]
            text: str = _compile_jinja_template(template).render({**self._common, "messages": messages, **values})
            return text
        except jinja2.TemplateError as err:
            raise BadRequest(f"this checkpoint's template cannot write the request: {str(err)[:200]}") from err

    def _template_input(self, question: Question) -> dict[str, Any]:
        """Return a question in the library's form. Its id is left out, since the model never sees it."""
        options, descriptions = list(question.options), list(question.descriptions)
        if question.type == "noul":
            sides = dict(zip(question.options, question.descriptions, strict=True))
            options = list(self._decision.noul_options)
            descriptions = [sides[side] for side in options]
        return {
            "name": "",
            "type": question.type,
            "instructions": self._fence(question.instructions),
            "options": self._fence(options),
            "labels": self._label_names(question.type, len(options)),
            "descriptions": self._fence(descriptions),
        }


@functools.lru_cache(maxsize=1)
def _library_prompt() -> str:
    """Return the library's own prompt.

    Its module imports torchvision, which takes 1.2 s and 160 MB. A checkpoint with its own templates does not need it.
    """
    from transformers.decision.template_utils import DECISION_PROMPT

    return str(DECISION_PROMPT)


_OTHER_QUESTION = {
    "noul": Question("", "noul", "\x01", ("true", "false"), (None, None)),
    "choice": Question("", "choice", "\x02", ("\x02",), (None,)),
}


def num_shared_chars(a: str, b: str) -> int:
    """Return the length of the longest common beginning.

    The search halves the range, since comparing slices is fast and comparing single characters is slow.
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _other(questions: tuple[Question, ...]) -> Question:
    """Return a question of another type. A prompt shares as much text with it as with every other question."""
    return _OTHER_QUESTION["choice" if questions[0].type == "noul" else "noul"]


def _num_chars(question: Question) -> float:
    """Return the number of characters of all its texts. It is infinite if one is structured, since that is no key."""
    texts: tuple[Text | None, ...] = (question.instructions, *question.options, *question.descriptions)
    return sum(len(text or "") if text is None or isinstance(text, str) else float("inf") for text in texts)
