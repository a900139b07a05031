"""Prompt rows of many lengths, for tests of the engine and of captured graphs."""

from __future__ import annotations

import json
import random
from typing import Any

from onepass.loading import Loaded
from onepass.rows import Row
from onepass.wire.schema import parse_request


def rows_of(loaded: Loaded, seed: int = 0, count: int = 6) -> list[Row]:
    """Rows of many lengths, questions of every type, in both encodings."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for n in range(count):
        words = rng.choices(["parcel", "late", "refund", "invoice", "café", "42", "\n"], k=rng.choice([0, 3, 20, 70]))
        options = {f"option {i}": rng.choice([None, "what it means"]) for i in range(rng.randint(1, 6))}
        questions = {
            "a": {"type": "noul", "instructions": "Is it late?"},
            "b": {"type": "choice", "instructions": "Which?", "criteria": options},
            "c": {"type": "score", "criteria": ["low", "mid", "high"]},
        }
        body = {"state": " ".join(words), "questions": questions, "encoding": loaded.prompter.encodings[n % 2]}
        rows += loaded.prompter.render(parse_request(json.dumps(body).encode()))
    return rows


def about(loaded: Loaded, num_words: int, seed: int = 0, count: int = 6, encoding: str = "per_question") -> list[Row]:
    """Rows of several questions about one long state."""
    rng = random.Random(seed)
    state = " ".join(rng.choices(["parcel", "late", "refund", "invoice", "café", "42"], k=num_words))
    kinds: list[dict[str, Any]] = [
        {"type": "noul"},
        {"type": "choice", "criteria": {"a": "what", "b": None}},
        {"type": "score", "criteria": ["low", "mid", "high"]},
    ]
    questions = {str(n): {"instructions": f"Is it {'really ' * n}so?", **kinds[n % 3]} for n in range(count)}
    body = {"state": state, "questions": questions, "encoding": encoding}
    return loaded.prompter.render(parse_request(json.dumps(body).encode()))
