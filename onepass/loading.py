"""This module makes a checkpoint ready to decide: it verifies it, loads it and warms it up.

Only the worker thread calls it, except for `read_pictures`, which any thread may call.
"""

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
from onepass.families import load_decision
from onepass.families.markers import CHAT, Family
from onepass.status import EngineStatus
from onepass.wire import pictures
from onepass.wire.request import Question, Request

if TYPE_CHECKING:
    # `load` imports these later: transformers takes seconds to import, and must find the Hub settings made.
    from images import Picture, PictureReader
    from onepass.prompt.prompter import Prompter
    from onepass.rows import Row

logger = logging.getLogger(__name__)

# These variables must be set before torch loads, unless they are set already.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # The handler threads already run in parallel.
    # OpenMP's threads spin while they wait for each other. Without this setting, a pass of 24 ms took 740 ms when a
    # second core was busy.
    "GOMP_SPINCOUNT": "1000",
    # Nothing is compiled. But when torch is imported, it makes a folder for compiled code from the temporary folder and
    # the user's name, and a container may have neither. It does not make a folder that exists.
    "TORCHINDUCTOR_CACHE_DIR": str(Path(__file__).resolve().parent),
    "FLA_FLASH_QLA": "0",  # flash-linear-attention must not use the kernels of another package that is installed.
}
WARM_UP_STATE = "The parcel arrived two days late and the box was open."
WARM_UP_PICTURE = (  # This is one grey pixel.
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="
)
WARM_UP_QUESTIONS = (  # of two options each: a checkpoint may have no more labels
    Question("late", "noul", "Was the parcel late?", ("true", "false"), (None, None)),
    Question("topic", "choice", "What is it about?", ("delivery", "payment"), (None, "Money")),
    Question("mood", "score", "How unhappy is the writer?", ("0", "1"), ("Not", "Very")),
)


class EngineLike(Protocol):
    """This is what a decider needs from an engine. `engine.Engine` is the real one."""

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
    no_images_reason: str = "the engine has no vision tower"  # It says why there is no reader.


def set_environment(config: Config) -> None:
    """Set the variables that libraries read once, at import. Call this before torch, transformers or the Hub's ones."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    logger.info("environment: %s", " ".join(f"{name}={value}" for name, value in added.items()) or "as it was")
    set_hub_environment(config)


def load(config: Config) -> Loaded:
    """Verify the checkpoint, then load it. Only the worker thread calls this. Raises `StartupError`."""
    set_environment(config)
    with ThreadPoolExecutor(1, "verify") as pool:  # Hashing needs no interpreter lock, so imports run beside it.
        verifying = pool.submit(verify, find_checkpoint(config))
        from transformers import AutoTokenizer

        from engine import Engine
        from images import PictureReader
        from onepass.prompt.prompter import Prompter

        checkpoint = verifying.result()  # No library reads the checkpoint before this.
    log_family(checkpoint.family)
    decision = load_decision(checkpoint.folder, checkpoint.family.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except Exception as err:  # The library raises any error that its parsers raise.
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


def log_family(family: Family) -> None:
    if family.name == CHAT and family.is_forced:
        logger.warning("family: chat, since --family says so; what its authors may have meant is passed over")
    else:
        logger.info("family: %s%s", family.name, f" {family.version}" if family.version else "")


def read_pictures(loaded: Loaded, request: Request, deadline: float) -> tuple[Request, list[Picture]]:
    """Return the request with marks where its pictures are shown, and the pictures. Any thread may call this.

    Raises `BadRequest`, `DeadlineExceeded`, or `Overloaded` if too many pictures wait.
    """
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
    """Ask the same questions twice in every encoding. Raises `StartupError` if a score is not a number."""
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
    loaded.engine.reset_counts()  # The batcher counts rows, and these rows did not pass through it.
    return {"same_answer_twice": is_same, "ms": round((time.monotonic() - started) * 1000, 1)}
