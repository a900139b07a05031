"""This module makes a whole decision in process: verify, load, validate, render, batch, answer.

It knows nothing of HTTP, which `server.py` adds. An example of its use:

with Decider(Config()) as decider:
    print(decider.ask("I want my money back!", {"refund": {"type": "noul", "instructions": "Is a refund wanted?"}}))
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batcher import Batcher
from onepass.config import Config
from onepass.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    InternalError,
    Loading,
    ShuttingDown,
    StartupError,
    WorkerDead,
)
from onepass.loading import Loaded, is_finite, load, read_pictures, warm_up
from onepass.row_queue import Ticket
from onepass.status import ModelStatus, Status
from onepass.wire import answer
from onepass.wire.answer import encode_response
from onepass.wire.request import Request
from onepass.wire.schema import parse_request

if TYPE_CHECKING:
    # `load` imports this later: transformers takes seconds to import, and must find the Hub settings made.
    from onepass.rows import Row

logger = logging.getLogger(__name__)

MODEL_ALIAS = "jev-latest"  # the official clients' default name
# JSON of nothing but brackets takes 50 times its size to read: few such at a time
LARGE_BODY_BYTES, MAX_LARGE_BODIES = 1 << 20, 2
KEPT_TOKENS = 1 << 19  # of rows whose results are kept: 10,000 short ones, 20 MB or so
LIMITS = (
    "max_batch_rows",
    "max_batch_tokens",
    "max_batch_ms",
    "max_queued_rows",
    "batch_window_ms",
    "max_wait_s",
    "timeout_s",
)


@dataclass(frozen=True, slots=True)
class Pending:
    """This is a request in the queue."""

    request: Request
    ticket: Ticket
    started_at: float
    stages_ms: dict[str, float]  # The keys are "parse" and "render".
    num_image_tokens: int | None = None  # This counts its tokens of pictures. It is None without pictures.

    @property
    def future(self) -> Future[list[Any]]:
        return self.ticket.future

    @property
    def deadline(self) -> float:
        return self.ticket.deadline

    @property
    def num_rows(self) -> int:
        return len(self.ticket.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.ticket.rows)


@dataclass(frozen=True, slots=True)
class Answered:
    body: bytes
    # The keys are "queue", "model" (the time of all batches that contained its rows) and "readout".
    stages_ms: dict[str, float]
    num_rows: int
    num_tokens: int


class Decider:
    """A decider owns the worker thread. Any thread may call its public methods."""

    def __init__(self, config: Config, load: Callable[[Config], Loaded] = load) -> None:
        self.config = config
        self.ready = threading.Event()  # It is set while requests are answered.
        self.dead = threading.Event()  # It is set if loading failed or the worker died.
        self.failure: BaseException | None = None  # This is the reason. A `StartupError` is one line for the user.
        self._settled = threading.Event()  # It is set after `ready` or `dead` was set.
        self._load = load
        self._loaded: Loaded | None = None
        self._is_draining = False
        self._load_s = 0.0
        self._warm_up: dict[str, Any] = {}
        self._has_several_clients = len(set(config.api_keys)) > 1
        self._batcher = Batcher(
            self._run,
            max_batch_rows=config.max_batch_rows,
            max_batch_tokens=config.max_batch_tokens,
            max_queued_rows=config.max_queued_rows,
            max_client_rows=config.max_key_rows if self._has_several_clients else None,
            batch_window_s=config.batch_window_ms / 1000,
            max_batch_s=config.max_batch_ms / 1000 or math.inf,
            max_wait_s=config.max_wait_s or math.inf,
            stall_s=config.timeout_s,  # A request that is queued after this time would miss its deadline.
            max_kept_tokens=KEPT_TOKENS if config.state_cache_mb else 0,
            idle=self._idle,
        )
        self._large_bodies = threading.BoundedSemaphore(MAX_LARGE_BODIES)
        self._worker = threading.Thread(target=self._work, name="worker", daemon=True)

    def start(self) -> None:
        """Start the worker thread, which loads the model and then serves. This returns at once."""
        self._worker.start()

    def close(self) -> None:
        """Admit no more requests, fail those that wait with `ShuttingDown`, and let the running batch end."""
        self.drain(0)
        if self._worker.is_alive():
            self._worker.join()

    def __enter__(self) -> Decider:
        """Load the model, and wait until questions are answered. Raises `StartupError`."""
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        started = time.monotonic()
        try:
            self._loaded = self._load(self.config)
            self._warm_up = warm_up(self._loaded)
            self._load_s = time.monotonic() - started
            gc.collect()
            # The libraries' million objects are never freed. Walking over them took 12% of a request's CPU time.
            gc.freeze()
            self.ready.set()
            self._settled.set()
            self._batcher.work()
            return
        except StartupError as err:
            self.failure = err
        except BaseException as err:  # Any error that ends this thread must end the server.
            logger.exception("the worker died")
            self.failure = err
        self.ready.clear()
        self.dead.set()  # This comes before any request fails, so that nobody is told that the model still loads.
        self._batcher.die()
        self._settled.set()

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the model is ready. Raises the error with which loading failed, or `TimeoutError`."""
        if not self._settled.wait(timeout_s):
            raise TimeoutError(f"the model was not ready after {timeout_s} s")
        if self.failure is not None:
            raise self.failure

    def _run(self, rows: list[Row]) -> list[Any]:
        """Run one batch. A row whose scores are not all finite fails alone."""
        assert self._loaded is not None
        scores = self._loaded.engine.forward(rows)
        return [
            row_scores if is_finite(row_scores) else InternalError("the model gave a score that is not a number")
            for row_scores in scores
        ]

    def _idle(self) -> bool:
        assert self._loaded is not None
        return self._loaded.engine.idle()

    def submit(self, body: bytes, content_type: str = "application/json", client: int = 0) -> Pending:
        """Validate, render and queue the request. Raises `ApiError` for every mistake that a client can make.

        `client` is the number of the client's key. Clients take turns, however many requests of each wait."""
        started_at = time.monotonic()
        if error := self.why_not_ready():
            raise error
        if error := self._batcher.why_refused(1, client):  # A request that will be refused is not read.
            raise error
        deadline = started_at + self.config.timeout_s
        with self._large_bodies if len(body) > LARGE_BODY_BYTES else nullcontext():
            request, rows, stages_ms = self._read(body, content_type, deadline)
        ticket = self._batcher.submit(rows, deadline - time.monotonic(), client)
        num_image_tokens = sum(row.num_image_tokens for row in rows) if request.has_images else None
        return Pending(request, ticket, started_at, stages_ms, num_image_tokens)

    def _read(self, body: bytes, content_type: str, deadline: float) -> tuple[Request, list[Row], dict[str, float]]:
        assert self._loaded is not None
        started = time.monotonic()
        request = parse_request(body, content_type)
        if self.config.strict_model and request.model not in (None, MODEL_ALIAS, self.model_name):
            raise BadRequest(f"model must be {self.model_name!r} or {MODEL_ALIAS!r} on this server")
        marked, pictures = read_pictures(self._loaded, request, deadline)
        parsed = time.monotonic()
        rows = self._loaded.prompter.render(marked, pictures)
        stages_ms = {"parse": (parsed - started) * 1000, "render": (time.monotonic() - parsed) * 1000}
        return request, rows, stages_ms  # The unmarked request is returned, since an answer repeats its levels.

    def cancel(self, pending: Pending) -> None:
        """Drop the request, since its caller has left."""
        self._batcher.cancel(pending.ticket)

    def expire(self, pending: Pending) -> None:
        """Fail the request, since its deadline has passed. A request that has started continues."""
        self._batcher.expire(pending.ticket)

    def answer(self, pending: Pending) -> Answered:
        """Wait for the answer and return it. Raises the `ApiError` with which the request failed."""
        ticket = pending.ticket
        try:
            results = ticket.future.result()
        except CancelledError:
            raise DeadlineExceeded("the request was given up") from None
        assert self._loaded is not None
        resolved = time.monotonic()
        decision = self._loaded.prompter.decision
        answers = {}
        scores = (question for row in results for question in row)
        for question, question_scores in zip(pending.request.questions, scores, strict=True):
            by_option = answer.probabilities(question_scores, decision.temperature.get(question.type, 1.0))
            if question.type == "noul":
                places = [decision.noul_options.index(option) for option in question.options]
                by_option = [by_option[place] for place in places]
            answers[question.id] = answer.answer(question, by_option)
        num_tokens = pending.num_tokens
        latency_ms = (time.monotonic() - pending.started_at) * 1000
        body = encode_response(
            model=self.model_name,
            answers=answers,
            input_tokens=num_tokens,
            latency_ms=latency_ms,
            image_tokens=pending.num_image_tokens,
        )
        stages_ms = {
            "queue": (ticket.started_at - ticket.queued_at) * 1000,
            "model": ticket.model_s * 1000,
            "readout": (time.monotonic() - resolved) * 1000,
        }
        return Answered(body, stages_ms, pending.num_rows, num_tokens)

    def decide(self, body: bytes) -> bytes:
        """Turn a request body into a response body, without a server. Raises `ApiError`."""
        return self.answer(self.submit(body)).body

    def ask(self, state: Any, questions: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """Return the answer to one request, as the server gives it. `fields` are the request's other fields.

        Raises `ApiError` for a request that the server would refuse, and `TypeError` for a value that JSON cannot hold.
        """
        body = json.dumps({"state": state, "questions": questions, **fields})
        answer: dict[str, Any] = json.loads(self.decide(body.encode()))
        return answer

    @property
    def model_name(self) -> str:
        return self._loaded.checkpoint.name if self._loaded else self.config.served_name

    def why_not_ready(self) -> ApiError | None:
        """Why a request sent now would not be answered."""
        if self.dead.is_set():
            return WorkerDead()
        if self._is_draining:
            return ShuttingDown()
        if not self.ready.is_set():
            return Loading()
        return None

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and finish the queued ones. Return whether all of them were answered in time."""
        self._is_draining = True
        return self._batcher.drain(timeout_s)

    def status(self) -> Status:
        """What this decider knows of itself now."""
        error = self.why_not_ready() or self._batcher.why_refused(1, None if self._has_several_clients else 0)
        loaded, config = self._loaded, self.config
        if loaded is None:
            name = config.served_name or Path(config.model).name
            return Status(error=error, model=name, queue=self._batcher.describe())
        return Status(
            error=error,
            model=loaded.checkpoint.name,
            queue=self._batcher.describe(),
            loaded=self._describe(loaded),
        )

    def _describe(self, loaded: Loaded) -> ModelStatus:
        prompter, checkpoint = loaded.prompter, loaded.checkpoint
        return ModelStatus(
            source=checkpoint.source,
            revision=checkpoint.revision,
            family=checkpoint.family.name,
            family_version=checkpoint.family.version,
            family_forced=checkpoint.family.is_forced,
            verified=checkpoint.is_verified,
            digests=checkpoint.digests,
            engine=loaded.engine.describe(),
            readout=prompter.decision.readout,
            encoding=prompter.encoding,
            encodings=prompter.encodings,
            images=loaded.reader is not None,
            images_reason="" if loaded.reader else loaded.no_images_reason,
            max_prompt_tokens=prompter.max_tokens,
            load_s=round(self._load_s, 3),
            warm_up=self._warm_up,
            hub_offline=os.environ.get("HF_HUB_OFFLINE") == "1",
            limits={name: getattr(self.config, name) for name in LIMITS},
            worker_alive=self._worker.is_alive(),
        )

    def models(self) -> dict[str, Any]:
        """Return the document of `GET /v1/models`, in the official form and in OpenAI's."""
        assert self._loaded is not None
        checkpoint = self._loaded.checkpoint
        created = checkpoint.created
        date = time.strftime("%Y-%m-%d", time.gmtime(created))
        text = f"{checkpoint.name}, served by Onepass"
        names = {checkpoint.name: text, MODEL_ALIAS: f"another name for {checkpoint.name}"}
        return {
            "models": [{"name": name, "description": text, "release_date": date} for name, text in names.items()],
            "object": "list",
            "data": [{"id": name, "object": "model", "created": created, "owned_by": "onepass"} for name in names],
        }
