"""The decision in process: what happens around the model, with an engine whose scores are known."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onepass.config import Config
from onepass.decider import Decider
from onepass.errors import (
    ApiError,
    BadRequest,
    InternalError,
    InvalidRequest,
    Loading,
    Overloaded,
    ShuttingDown,
    StartupError,
    WorkerDead,
)
from onepass.loading import Loaded
from onepass.rows import Row
from tests.support import ROOT
from tests.support.fake_engine import WAIT_S, FakeEngine, body, loaded


@contextmanager
def running(engine: Any = None, **settings: Any) -> Iterator[Decider]:
    decider = Decider(Config(**settings), load=lambda _: loaded(engine or FakeEngine()))
    decider.start()
    decider.wait_ready(WAIT_S)
    try:
        yield decider
    finally:
        decider.drain(WAIT_S)


@pytest.mark.parametrize("encoding", ["joint", "per_question"])
def test_scores_become_answers_with_the_checkpoints_temperature_and_noul_order(encoding: str) -> None:
    with running() as decider:
        document = json.loads(decider.decide(body(encoding=encoding)))
        assert decider._loaded is not None
        temperature = decider._loaded.prompter.decision.temperature
    answers = document["answers"]
    assert list(answers) == ["n", "c", "s"]
    # The starter shows "true" first, so it has score 0 and "false" score 1.
    assert answers["n"]["noul"] == pytest.approx(1 / (1 + math.exp(1 / temperature["noul"])))
    assert answers["c"]["choice"] == "c"
    weights = [math.exp(score / temperature["choice"]) for score in range(3)]
    assert list(answers["c"]["probabilities"].values()) == pytest.approx([weight / sum(weights) for weight in weights])
    assert document["usage"]["output_tokens"] == 0


def test_tokens_are_counted_once_for_each_row_they_stand_in() -> None:
    with running() as decider:
        used = [
            json.loads(decider.decide(body("word " * n, encoding="per_question")))["usage"]["input_tokens"]
            for n in (10, 20)
        ]
        joint = [
            json.loads(decider.decide(body("word " * n, encoding="joint")))["usage"]["input_tokens"] for n in (10, 20)
        ]
    assert used[1] - used[0] == 3 * (joint[1] - joint[0])


def test_what_a_client_can_get_wrong_costs_no_forward_pass() -> None:
    engine = FakeEngine()
    with running(engine) as decider:
        before = engine.num_calls
        for content, error in (
            (b"{", InvalidRequest),
            (body(state=5), InvalidRequest),
            (body("word " * 5000), ApiError),
            (body(images=["aGk="]), BadRequest),
            (body(assets={"@a": {}}), BadRequest),
        ):
            with pytest.raises(error):
                decider.decide(content)
        assert engine.num_calls == before


def test_multipart_is_read_and_its_pictures_are_refused() -> None:
    def form(*parts: tuple[str, bytes]) -> bytes:
        return b"".join(
            f'--X\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + content + b"\r\n" for name, content in parts
        ) + b"--X--\r\n"  # fmt: skip

    with running() as decider:
        pending = decider.submit(form(("request", body())), "Multipart/Form-Data; boundary=X")
        assert json.loads(decider.answer(pending).body)["answers"]["c"]["choice"] == "c"
        with pytest.raises(BadRequest, match="reads text only"):
            decider.submit(form(("request", body()), ("asset-0", b"png")), "multipart/form-data; boundary=X")


def test_a_score_that_is_no_number_fails_its_own_request_alone() -> None:
    class Poisoned(FakeEngine):
        def forward(self, rows: list[Row]) -> list[list[list[float]]]:
            return [
                [[math.nan] * len(question) for question in scores] if row.num_tokens > 300 else scores
                for row, scores in zip(rows, super().forward(rows), strict=True)
            ]

    with running(Poisoned()) as decider:
        bad, good = decider.submit(body("word " * 400)), decider.submit(body())
        with pytest.raises(InternalError, match="not a number"):
            decider.answer(bad)
        assert decider.answer(good).num_rows == 3


def test_it_says_why_it_is_not_ready() -> None:
    gate = threading.Event()

    def load(_: Config) -> Loaded:
        assert gate.wait(WAIT_S)
        return loaded(FakeEngine())

    decider = Decider(Config(), load=load)
    decider.start()
    assert isinstance(decider.why_not_ready(), Loading)
    status = decider.status()
    error, document = status.error, status.document()
    assert isinstance(error, Loading)
    assert document == {"status": "loading", "reason": "the model is loading", "model": "model"}
    with pytest.raises(Loading):
        decider.submit(body())
    gate.set()
    decider.wait_ready(WAIT_S)
    assert decider.why_not_ready() is None
    assert decider.drain(WAIT_S)
    assert isinstance(decider.why_not_ready(), ShuttingDown)
    with pytest.raises(ShuttingDown):
        decider.submit(body())


def test_a_load_that_fails_is_told_to_whoever_waits() -> None:
    def load(_: Config) -> Loaded:
        raise StartupError("no such model")

    decider = Decider(Config(), load=load)
    decider.start()
    with pytest.raises(StartupError, match="no such model"):
        decider.wait_ready(WAIT_S)
    assert decider.dead.is_set()
    assert isinstance(decider.why_not_ready(), WorkerDead)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_fails_readiness_and_every_request() -> None:
    class Deadly(FakeEngine):
        def forward(self, rows: list[Row]) -> list[list[list[float]]]:
            if self.num_calls >= 4:  # the warm-up has passed
                raise SystemExit
            return super().forward(rows)

    with running(Deadly()) as decider:
        pending = decider.submit(body())
        with pytest.raises(WorkerDead):
            decider.answer(pending)
        assert decider.dead.wait(WAIT_S)
        status = decider.status()
        error, document = status.error, status.document()
        assert isinstance(error, WorkerDead)
        assert document["status"] == "worker_dead"
        with pytest.raises(WorkerDead):
            decider.submit(body())


def test_a_full_queue_is_refused_before_the_request_is_read() -> None:
    gate = threading.Event()

    class Held(FakeEngine):
        def forward(self, rows: list[Row]) -> list[list[list[float]]]:
            assert self.num_calls < 4 or gate.wait(WAIT_S)
            return super().forward(rows)

    many = json.dumps(
        {"state": "", "questions": {str(n): {"type": "noul", "instructions": "?"} for n in range(512)}}
    ).encode()
    with running(Held(), max_queued_rows=512, max_batch_rows=1) as decider:
        first = [decider.submit(many)]
        with pytest.raises(Overloaded):
            first.append(decider.submit(many))
        while True:  # the first row of it may have started, which makes room for one
            try:
                decider.submit(
                    json.dumps({"state": "", "questions": {"q": {"type": "noul", "instructions": "?"}}}).encode()
                )
            except Overloaded:
                break
        with pytest.raises(Overloaded):
            decider.submit(b"not even JSON")
        status = decider.status()
        error, document = status.error, status.document()
        assert isinstance(error, Overloaded)
        assert document["status"] == "overloaded_error"
        gate.set()
        assert decider.answer(first[0]).num_rows == 512


class HeldEngine(FakeEngine):
    """Runs nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def forward(self, rows: list[Row]) -> list[list[list[float]]]:
        self.started.set()
        assert self.gate.wait(WAIT_S)
        return super().forward(rows)


@pytest.mark.parametrize(("keys", "num_admitted"), [(("a", "b"), 4), (("a", "a"), 5), (("a",), 5), ((), 5)])
def test_where_there_are_several_keys_one_fills_only_its_part_of_the_queue(
    keys: tuple[str, ...], num_admitted: int
) -> None:
    engine = HeldEngine()
    questions = {str(n): {"type": "noul", "instructions": f"{n}?"} for n in range(128)}
    many = json.dumps({"state": "x", "questions": questions, "encoding": "per_question"}).encode()
    with running(engine, api_keys=keys, max_key_rows=512, max_queued_rows=640) as decider:
        engine.gate.clear()
        engine.started.clear()
        decider.submit(body())  # its rows are in the model, and no longer wait
        assert engine.started.wait(WAIT_S)
        for _ in range(num_admitted):
            decider.submit(many)
        with pytest.raises(Overloaded):
            decider.submit(many)
        if num_admitted == 4:
            decider.submit(many, client=1)
        engine.gate.set()


def test_health_tells_what_is_served_and_how() -> None:
    with running(served_name="mine") as decider:
        status = decider.status()
        error, document = status.error, status.document()
    assert error is None
    assert document["status"] == "ready"
    assert document["verified"] is True
    assert document["warm_up"]["same_answer_twice"] is True
    assert document["hub_offline"] is True
    assert document["encodings"] == ("per_question", "joint")
    assert document["images"] is False
    assert document["worker_alive"] is True
    assert document["limits"]["max_batch_rows"] == 32
    assert {"onepass", "python", "torch", "transformers"} <= set(document["versions"])
    json.dumps(document)


def test_it_starts_where_nothing_can_be_written_and_the_user_has_no_name() -> None:
    code = (
        "import builtins, getpass, io, os, tempfile\n"
        "def refuse(*args, **kwargs): raise PermissionError(30, 'Read-only file system')\n"
        "def nobody(): raise KeyError('getpwuid(): uid not found')\n"
        "tempfile._get_default_tempdir = os.mkdir = refuse; getpass.getuser = nobody\n"
        "plain_open = builtins.open\n"
        "def read_only(file, mode='r', *args, **kwargs):\n"
        "    return refuse() if set(mode) & set('wax+') else plain_open(file, mode, *args, **kwargs)\n"
        "builtins.open = io.open = read_only\n"
        "from onepass import Config, Decider\n"
        "decider = Decider(Config()); decider.start(); decider.wait_ready(); decider.drain(10)"
    )
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_folder_is_served_with_the_hub_offline_and_no_telemetry() -> None:
    """In a process of its own, whose environment does not say so already."""
    code = (
        "import json, sys; from onepass import Config, Decider\n"
        "decider = Decider(Config()); decider.start(); decider.wait_ready()\n"
        "import huggingface_hub.constants as hub; print(json.dumps([hub.HF_HUB_OFFLINE, decider.status().document()['hub_offline']]))\n"
        "decider.drain(10)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [True, True]


def test_a_decider_opens_and_closes_like_a_file() -> None:
    questions = {"q": {"type": "noul", "instructions": "?"}}
    with Decider(Config(), load=lambda _: loaded(FakeEngine())) as decider:
        answer = decider.ask({"a": "é"}, questions, encoding="joint")
        request = json.dumps({"state": {"a": "é"}, "questions": questions, "encoding": "joint"}).encode()
        assert answer["answers"] == json.loads(decider.decide(request))["answers"]
        with pytest.raises(InvalidRequest, match="NaN is not JSON"):
            decider.ask({"a": math.nan}, questions)
        with pytest.raises(TypeError):
            decider.ask({"a": {1, 2}}, questions)
    assert not decider._worker.is_alive()
    with pytest.raises(ShuttingDown):
        decider.ask("x", questions)


def test_closing_fails_what_waits_and_lets_the_running_batch_end() -> None:
    begun, gate = threading.Event(), threading.Event()

    class Held(FakeEngine):
        def forward(self, rows: list[Row]) -> list[list[list[float]]]:
            if self.num_calls >= num_warm_up:
                begun.set()
                assert gate.wait(WAIT_S)
            return super().forward(rows)

    engine = Held()
    num_warm_up = 10**9
    with Decider(Config(max_batch_rows=1), load=lambda _: loaded(engine)) as decider:
        num_warm_up = engine.num_calls
        first, second = decider.submit(body()), decider.submit(body())
        assert begun.wait(WAIT_S)
        closing = threading.Thread(target=decider.close)
        closing.start()
        for pending in (first, second):
            with pytest.raises(ShuttingDown):
                decider.answer(pending)
        assert decider._worker.is_alive()
        gate.set()
        closing.join(WAIT_S)
        assert not decider._worker.is_alive()


def test_a_decider_that_cannot_load_does_not_open() -> None:
    def fail(_: Config) -> Loaded:
        raise StartupError("no")

    with pytest.raises(StartupError, match="no"):
        Decider(Config(), load=fail).__enter__()


def test_the_shipped_model_is_served_without_the_packages_that_it_does_not_use() -> None:
    """Each of them costs time and memory at the start."""
    unused = ("torchvision", "torch._dynamo", "transformers.image_utils")
    code = (
        "import sys; from onepass import Config, Decider\n"
        "decider = Decider(Config()); decider.start(); decider.wait_ready()\n"
        f"print([name for name in {unused} if name in sys.modules]); decider.drain(10)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
