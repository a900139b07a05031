"""pplx-decider and d3: one linear row for each answer code, over the state of the prompt's last token.

Turns `decision_config.json` into the decision that the library's format gives. The prompt is the library's own template
for these models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from onepass.errors import StartupError
from onepass.families.markers import HEADS, READOUT, read_object
from onepass.prompt.template import DecisionFormat
from onepass.wire.request import MAX_OPTIONS

CONFIG_FILE, HEAD_FILE = "decision_config.json", HEADS[READOUT]
PROMPTS = ("pplx", "d3")
TYPES = ("noul", "choice", "score")
# A request brings its pictures in fields of its own: a part of a state must not write a picture's tokens.
PICTURE_TOKENS = '{{ "<|vision_start|><|image_pad|><|vision_end|>" }}'
NO_PICTURES = '{{ raise_exception("a part of the state is an image; send images in the field images") }}'


def load(folder: Path) -> DecisionFormat:
    """Raises `StartupError`, one line, for a variant that this server does not compute."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise StartupError(f"{path} is missing; without it no code of the readout is known")
    config = read_object(path)
    for field, served in (("attention_mode", ("causal",)), ("pooling", ("last",)), ("prompt", PROMPTS)):
        found = config.get(field, served[0])
        if found not in served:
            raise StartupError(f"{path}: {field} {found!r} is not served; only {' and '.join(served)} is")
    codes = _codes(path, config)
    _check_rows(folder / HEAD_FILE, len(codes))
    template = _template(config.get("prompt", PROMPTS[0]))
    return DecisionFormat(
        templates={"per_question": template},
        default_encoding="per_question",
        readout="linear",
        labels=dict.fromkeys(TYPES, codes),
        temperature=dict.fromkeys(TYPES, _temperature(path, config)),
        noul_options=("false", "true"),
    )


def _codes(path: Path, config: dict[str, Any]) -> list[str]:
    codes = config.get("codes")
    is_list = isinstance(codes, list) and all(isinstance(code, str) and code for code in codes)
    if not is_list or not 2 <= len(codes or ()) <= MAX_OPTIONS or len(set(codes or ())) != len(codes or ()):
        raise StartupError(f"{path}: codes must be a list of 2 to {MAX_OPTIONS} distinct texts")
    return list(codes or ())


def _check_rows(path: Path, num_codes: int) -> None:
    """Raises `StartupError` unless the readout has a row for every code."""
    if not path.is_file():
        raise StartupError(f"{path} is missing; the family's answers are read with it")
    try:
        with safe_open(path, framework="numpy") as file:
            shape = file.get_slice("weight").get_shape()
    except SafetensorError as err:
        raise StartupError(f"{path} cannot be read: {err}") from None
    if len(shape) != 2 or shape[0] < num_codes:
        raise StartupError(f"{path}: weight must have a row for each of the {num_codes} codes, not {shape}")


def _temperature(path: Path, config: dict[str, Any]) -> float:
    value = config.get("temperature", 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise StartupError(f"{path}: temperature must be a number above 0, not {value!r}")
    return float(value)


def _template(name: str) -> str:
    from transformers.models.jev.configuration_jev import DECIDER_PROMPTS, DECIDER_TEMPLATE

    if PICTURE_TOKENS not in DECIDER_TEMPLATE:
        raise StartupError("the library's template for this family is another than the one that was tested")
    texts: dict[str, str | None] = dict(DECIDER_PROMPTS[name])  # type: ignore[call-overload] # it has no annotation
    settings = "".join(
        f"{{%- set {key} = {'none' if text is None else json.dumps(text)} -%}}\n" for key, text in texts.items()
    )
    return settings + DECIDER_TEMPLATE.replace(PICTURE_TOKENS, NO_PICTURES)
