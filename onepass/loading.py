"""A checkpoint made ready to decide: verified, loaded, warmed up. Worker thread only, and in its order."""

from __future__ import annotations

import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from onepass.checkpoint import Checkpoint, check_unchanged, find_checkpoint, set_hub_environment, verify
from onepass.config import Config
from onepass.errors import BadRequest, StartupError
from onepass.status import EngineStatus
from onepass.wire import pictures
from onepass.wire.request import Question, Request

if TYPE_CHECKING:
    # imported by `load`: transformers takes seconds, and must find the Hub settings made
    from images import Picture, PictureReader
    from onepass.prompt.prompter import Prompter
    from onepass.rows import Row

logger = logging.getLogger(__name__)

# What must be set before torch loads, unless it is set already.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # handler threads are the parallelism
    # OpenMP's threads spin while they wait for each other: with nothing set, a busy second core made a pass of 24 ms
    # take 740
    "GOMP_SPINCOUNT": "1000",
    # Nothing is compiled, but at its import torch makes a folder for that, from the temporary folder and the user's
    # name: a container may have neither. One that exists is not made.
    "TORCHINDUCTOR_CACHE_DIR": str(Path(__file__).resolve().parent),
    "FLA_FLASH_QLA": "0",  # flash-linear-attention would take another package's kernels wherever that is installed
}
WARM_UP_STATE = "The parcel arrived two days late and the box was open."
WARM_UP_PICTURE = (  # one grey pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="
)
WARM_UP_QUESTIONS = (
    Question("late", "noul", "Was the parcel late?", ("true", "false"), (None, None)),
    Question("topic", "choice", "What is it about?", ("delivery", "payment", "other"), (None, "Money", None)),
    Question("mood", "score", "How unhappy is the writer?", ("0", "1", "2"), ("Not", "Somewhat", "Very")),
)


class EngineLike(Protocol):
    """What a decider needs of an engine; `engine.Engine` is the real one."""

    def forward(self, rows: list[Row]) -> list[list[list[float]]]: ...

    def describe(self) -> EngineStatus: ...

    def keep_beginning(self, ids: bytes) -> bool: ...

    def reset_counts(self) -> None: ...

    def idle(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    checkpoint: Checkpoint
    prompter: Prompter
    engine: EngineLike
    reader: PictureReader | None = None
    no_images_reason: str = "the engine has no vision tower"  # why there is no reader


def set_environment(config: Config) -> None:
    """What the libraries look for once, when they are imported. Call before torch, transformers or the Hub's are."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    logger.info("environment: %s", " ".join(f"{name}={value}" for name, value in added.items()) or "as it was")
    set_hub_environment(config)


def load(config: Config) -> Loaded:
    """Verify, then load. Worker thread only. Raises `StartupError`."""
    set_environment(config)
    with ThreadPoolExecutor(1, "verify") as pool:  # hashing needs no interpreter, importing nothing else
        verifying = pool.submit(verify, find_checkpoint(config))
        from transformers import AutoTokenizer

        from engine import Engine
        from images import PictureReader
        from onepass.prompt.prompter import Prompter
        from onepass.prompt.template import DecisionFormat

        checkpoint = verifying.result()  # nothing of it is read before this
    decision = DecisionFormat.load(checkpoint.folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # the library raises whatever its parsers raise
        raise StartupError(
            f"{checkpoint.folder}: the tokenizer cannot be loaded: {str(err).splitlines()[0][:200]}"
        ) from err
    engine = Engine(checkpoint, config, decision.readout)
    check_unchanged(checkpoint)
    max_tokens = min(engine.max_tokens, config.max_prompt_tokens or engine.max_tokens)
    tower = engine.tower
    prompter = Prompter(
        tokenizer,
        decision,
        max_tokens=max_tokens,
        encoding=config.encoding,
        picture_tokens=tower.tokens if tower else None,
    )
    reader = PictureReader(tower.settings) if tower else None
    return Loaded(checkpoint, prompter, engine, reader, engine.no_images_reason)


def read_pictures(loaded: Loaded, request: Request, deadline: float) -> tuple[Request, list[Picture]]:
    """The request with marks where its pictures are shown, and these. Raises `BadRequest` or `DeadlineExceeded`."""
    if not request.has_images:
        return request, []
    if loaded.reader is None:
        raise BadRequest(f"this server reads text only ({loaded.no_images_reason}): send no images and no assets")
    sources = pictures.collect_pictures(request)
    marked = pictures.mark_pictures(request, sources)
    return marked, loaded.reader.read([(source.field, source.data) for source in sources], deadline)


def is_finite(row_scores: list[list[float]]) -> bool:
    return all(math.isfinite(score) for question in row_scores for score in question)


def warm_up(loaded: Loaded) -> dict[str, Any]:
    """Ask the same thing twice in every encoding. Raises `StartupError` if what comes back is not a number."""
    started = time.monotonic()
    is_same = True
    for ids in loaded.prompter.beginnings():
        loaded.engine.keep_beginning(ids)
    requests = [Request(WARM_UP_STATE, WARM_UP_QUESTIONS, encoding=encoding) for encoding in loaded.prompter.encodings]
    if loaded.reader is not None:
        requests.append(Request(WARM_UP_STATE, WARM_UP_QUESTIONS, images=[WARM_UP_PICTURE]))
    for request in requests:
        rows = loaded.prompter.render(*read_pictures(loaded, request, math.inf))
        first, second = loaded.engine.forward(rows), loaded.engine.forward(rows)
        is_same = is_same and first == second
        if not all(map(is_finite, first)):
            raise StartupError("the model's scores are not numbers; try --dtype float32")
    loaded.engine.reset_counts()  # rows are counted where requests wait, which these did not
    return {"same_answer_twice": is_same, "ms": round((time.monotonic() - started) * 1000, 1)}
