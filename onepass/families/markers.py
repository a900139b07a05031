"""Which family a checkpoint folder belongs to, by the files and fields that mark it; nothing is served by guess.

Reads names of files and small JSON files. It loads no weights and runs no code, and knows nothing of prompts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.errors import StartupError

AUTO, DECISION, CHAT, READOUT = "auto", "decision", "chat", "readout"
SERVED = (DECISION, READOUT, CHAT)
HEADS = {READOUT: "readout.safetensors"}  # that a served family reads
LIBRARY_FILES = (
    "decision.json",
    "decision_template.jinja",
    "decision_template_joint.jinja",
    "decision_template_per_question.jinja",
)
# Each of these files marks a family. A later file of the same family says nothing new.
MARKERS = {
    "head.pt": "kev",
    "strands_decider_config.json": "strands",
    "hobson_config.json": "strands",
    "slot_head.pt": "strands",
    "judge_config.json": "jev",
    "jevk5_config.json": "jevk5",
    "decider_config.json": "decider",
    "decision_config.json": "readout",
    "readout.safetensors": "readout",
    "blink.py": "blink",
    "opendecider.json": "opendecider",
    "lev_release.json": "lev",
    "joint_head_config.json": "joint-head",
    "joint_head.safetensors": "joint-head",
    "joint.safetensors": "joint-head",
    "schema_config.json": "schema",
    "score_bias.json": "score-bias",
}
TITLES = {
    "kev": "kev (a pointer head in a pickle, often with a LoRA)",
    "strands": "Strands Decider (a pointer head and a LoRA)",
    "jev": "JEV (a linear head and a LoRA)",
    "jevk5": "JevK5",
    "decider": "decider",
    "readout": "pplx-decider and d3 (linear readouts)",
    "blink": "blink",
    "onejev": "OneJev (also: Qev)",
    "intern": "Intern-Decision",
    "opendecider": "opendecider",
    "lev": "lev",
    "joint-head": "joint decision heads",
    "schema": "schema decision models",
    "score-bias": "models with a score bias",
}
# Where a family's files say its version: (file, field).
VERSIONS = {
    "decider": ("decider_config.json", "version"),
    "readout": ("decision_config.json", "prompt"),
    "onejev": ("calibration.json", "prompt_version"),
    "lev": ("lev_release.json", "version"),
    "opendecider": ("opendecider.json", "version"),
}
DECISION_TOKEN = re.compile(rb'"(<|\\u003[cC])decision(>|\\u003[eE])"')
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
_EXTRA = re.compile(
    r"adapter_config\.json|adapter_model\..+|.+\.pt"
    r"|.*(head|readout|joint|adapter|lora|probe|classifier|verbali[sz]er).*\.(safetensors|bin|pth|npz)",
    re.IGNORECASE,
)
_NO_NEXT_TOKEN = re.compile(r"(?s:.*)(Classification|Decision|Reward|QuestionAnswering|MaskedLM|(?<!LMHead)Model)")
CHAT_RISK = "to serve it as a plain chat model all the same, whose answers are not its authors', give --family chat"


@dataclass(frozen=True, slots=True)
class Family:
    """In whose format a checkpoint is read."""

    name: str
    version: str = ""  # as the checkpoint's files name it
    is_forced: bool = False  # `--family` said so, whatever the files mark


UNMARKED = Family(CHAT)


class FamilyRefused(StartupError):
    """The checkpoint would be read in a way that its authors did not mean. The message is one line, whatever names of
    files and values stand in it."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def identify(folder: Path, asked: str = AUTO) -> Family:
    """The family of the checkpoint in `folder`; `asked` is what `--family` says.

    Raises `FamilyRefused`, one line, for a family that is not covered and for extra heads and adapters that are not
    known: it names the file, and what to do.
    """
    if asked != AUTO:
        return _forced(folder, asked)
    marks = dict(_marks(folder))  # family -> the file or field that marks it
    is_library = any((folder / name).is_file() for name in LIBRARY_FILES)
    if len(marks) > 1 or (marks and is_library):
        seen = [*marks.values(), *[name for name in LIBRARY_FILES if (folder / name).is_file()][:1]]
        advice = f"; give --family {DECISION} or --family {CHAT}" if is_library else f"; {CHAT_RISK}"
        raise FamilyRefused(f"{folder} has marks of several families: {', '.join(seen)}{advice}")
    for name, mark in marks.items():
        if name in SERVED:
            _check_extras(folder, HEADS[name], CHAT_RISK)
            return Family(name, _version(folder, name))
        raise FamilyRefused(_not_covered(folder, name, mark))
    if is_library:
        head = "head.safetensors" if _reads_head(folder) else ""
        _check_extras(folder, head, f"to serve the checkpoint without it, give --family {DECISION}")
        return Family(DECISION)
    _check_extras(folder, "", CHAT_RISK)
    if (folder / "calibration.json").is_file():
        raise FamilyRefused(f"{folder}: calibration.json is of no family that is known; {CHAT_RISK}")
    _check_configuration(folder)
    return Family(CHAT)


def _forced(folder: Path, asked: str) -> Family:
    if asked == DECISION and not any((folder / name).is_file() for name in LIBRARY_FILES):
        raise FamilyRefused(f"--family {asked}: {folder} has none of {', '.join(LIBRARY_FILES[:2])}")
    if asked in SERVED:
        return Family(asked, is_forced=True)
    if asked in TITLES:
        raise FamilyRefused(f"--family {asked}: the format of {TITLES[asked]} is not served")
    raise FamilyRefused(f"--family must be one of {', '.join((AUTO, *SERVED))}, not {asked!r}")


def _not_covered(folder: Path, name: str, mark: str) -> str:
    version = _version(folder, name)
    shown = f" {version}" if version else ""
    missing = "its prompt and its readout are not built in"
    advice = f"use its authors' server; {CHAT_RISK}"
    if not (folder / "config.json").is_file():
        missing += ", and its base model is not in the folder"
        advice = "use its authors' server, or a checkpoint in the library's decision format"
    return f"{folder}: {mark} marks the family {TITLES[name]}{shown}, which is not served: {missing}; {advice}"


def _marks(folder: Path) -> Iterator[tuple[str, str]]:
    """(family, what marks it), each family at least once; the first mark in the table is shown."""
    found: dict[str, str] = {}
    for file, family in MARKERS.items():
        if os.path.lexists(folder / file):
            found.setdefault(family, file)
    calibration = folder / "calibration.json"
    if calibration.is_file():
        contents = read_object(calibration)
        if "prompt_version" in contents:
            found.setdefault("onejev", f"calibration.json (prompt_version {str(contents['prompt_version'])[:80]!r})")
    if any(_has_decision_token(folder / name) for name in TOKENIZER_FILES):
        found.setdefault("intern", "the token <decision>")
    yield from found.items()


def _has_decision_token(path: Path) -> bool:
    """Whether the file names the token. A vocabulary of ordinary words has no such word in one piece."""
    try:
        return DECISION_TOKEN.search(path.read_bytes()) is not None
    except OSError:
        return False


def _check_extras(folder: Path, head: str, advice: str) -> None:
    """Raises `FamilyRefused` for a file that holds a part of the model which would be left out: any but `head`."""
    known = {*_listed_weights(folder), head}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(root, name).relative_to(folder).as_posix()
            if _EXTRA.fullmatch(name) and path not in known:
                raise FamilyRefused(
                    f"{folder}: {path} is a head or an adapter of no family that is known, and would be left out: "
                    f"merge it into the weights, or remove it; {advice}"
                )


def _listed_weights(folder: Path) -> set[str]:
    """The files of the weights' index: parts of the model, whatever they are called."""
    index = folder / "model.safetensors.index.json"
    try:
        listed = read_object(index).get("weight_map") if index.is_file() else None
    except StartupError:  # whoever loads the weights says so
        listed = None
    return {name for name in listed.values() if isinstance(name, str)} if isinstance(listed, dict) else set()


def _reads_head(folder: Path) -> bool:
    path = folder / "decision.json"
    return path.is_file() and read_object(path).get("readout") == "pointer"


def _check_configuration(folder: Path) -> None:
    """Raises `FamilyRefused` for a model that gives no next token, or whose configuration speaks of decisions."""
    path = folder / "config.json"
    if not path.is_file():
        return  # whoever looks for a checkpoint says so
    contents = read_object(path)
    text = contents.get("text_config")
    if "decision_format" in contents or (isinstance(text, dict) and "decision_format" in text):
        raise FamilyRefused(f"{path}: decision_format is of no family that is known; {CHAT_RISK}")
    architectures = contents.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if names and all(map(_NO_NEXT_TOKEN.fullmatch, names)):
        raise FamilyRefused(
            f"{path}: {names[0][:80]} gives no next token, and no file says how it decides; {CHAT_RISK}"
        )


def _version(folder: Path, name: str) -> str:
    file, field = VERSIONS.get(name, ("", ""))
    path = folder / file
    found = read_object(path).get(field) if file and path.is_file() else None
    return " ".join(str(found).split())[:80] if isinstance(found, (str, int, float)) else ""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. Raises `StartupError`."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        contents = None
    if not isinstance(contents, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return contents
