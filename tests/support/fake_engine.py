"""An engine whose scores are known, a checkpoint loaded around it, and a request for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer

from onepass.checkpoint import open_checkpoint
from onepass.config import Config
from onepass.loading import Loaded
from onepass.prompt.prompter import Prompter
from onepass.prompt.template import DecisionFormat
from onepass.rows import Row
from onepass.status import EngineStatus
from tests.support.checkpoints import STARTER
from tests.support.statuses import engine_status

WAIT_S = 30


class FakeEngine:
    """Option i of a question gets score i, whatever was asked."""

    def __init__(self, score: Callable[[int], float] = float) -> None:
        self.score = score
        self.num_calls = 0

    def forward(self, rows: list[Row]) -> list[list[list[float]]]:
        self.num_calls += 1
        return [[[self.score(place) for place in range(len(read.positions) - 1)] for read in row.reads] for row in rows]

    def describe(self) -> EngineStatus:
        return engine_status()

    def keep_beginning(self, ids: bytes) -> bool:
        return False

    def reset_counts(self) -> None:
        pass

    def idle(self) -> bool:
        return False


def loaded(engine: Any) -> Loaded:
    prompter = Prompter(AutoTokenizer.from_pretrained(STARTER), DecisionFormat.load(STARTER), max_tokens=1000)
    return Loaded(open_checkpoint(Config()), prompter, engine)


def body(state: Any = "x", **fields: Any) -> bytes:
    questions = {
        "n": {"type": "noul", "instructions": "?"},
        "c": {"type": "choice", "criteria": {"a": None, "b": None, "c": None}},
        "s": {"type": "score", "criteria": ["low", "high"]},
    }
    return json.dumps({"state": state, "questions": questions, **fields}).encode()
