"""What goes wrong while it serves: the model, the worker, clients, the clock, the disk, signals, descriptors.

Each time: nothing hangs, every admitted request is answered, readiness tells the truth, and the next request is right.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onepass.edge.handler import HttpServer
from onepass.errors import OutOfMemory
from onepass.rows import Row
from tests.support import ROOT
from tests.support.checkpoints import STARTER
from tests.support.fake_engine import body
from tests.support.http_client import PATIENCE_S, Client, get, post
from tests.support.live import Server
from tests.support.real_server import HeldEngine, serve

NOUL = {"type": "noul", "instructions": "Is the customer asking for a refund?"}
RESET = b"\1\0\0\0\0\0\0\0"  # SO_LINGER on, of 0 s: closing sends a reset


def connect(server: HttpServer) -> Client:
    return Client(("127.0.0.1", server.server_port))


def ask(server: HttpServer, request: bytes) -> tuple[int, dict[str, Any]]:
    with connect(server) as client:
        response = client.send(request).read()
        return response.status, json.loads(response.body)


def is_right(server: HttpServer) -> bool:
    """Whether a request is answered as the engine's scores have it."""
    status, document = ask(server, post(body()))
    return status == 200 and document["answers"]["c"]["choice"] == "c"


def readiness(server: HttpServer) -> tuple[int, str]:
    """What it says now, without waiting for it to find out."""
    status, document = ask(server, get("/readyz"))
    return status, document["status"]


# The model


def together(server: HttpServer, engine: HeldEngine, states: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """One request a state, all in one batch; what became of each."""
    engine.hold()
    with contextlib.ExitStack() as clients:
        first = clients.enter_context(connect(server)).send(post(body("first")))
        engine.wait_started()
        waiting = [clients.enter_context(connect(server)).send(post(body(state))) for state in states]
        until = time.monotonic() + PATIENCE_S
        while ask(server, get("/health"))[1]["queued_rows"] < 3 * len(states):
            assert time.monotonic() < until
        engine.gate.set()
        assert first.read().status == 200
        responses = [client.read() for client in waiting]
    return [(response.status, json.loads(response.body)) for response in responses]


def raising(error: Callable[[], Exception], is_hit: Callable[[list[Row]], bool]) -> Callable[[list[Row]], None]:
    def fail(rows: list[Row]) -> None:
        if is_hit(rows):
            raise error()

    return fail


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (lambda: RuntimeError("a secret of the device"), 500, "internal_error"),
        (lambda: OutOfMemory("no memory", retry_after_s=1), 503, "overloaded_error"),
        (lambda: MemoryError(), 500, "internal_error"),  # beside the engine, which makes OutOfMemory of its own
    ],
)
def test_one_bad_row_of_eight_requests_fails_alone(error: Any, status: int, kind: str) -> None:
    engine = HeldEngine()
    with serve(engine, max_batch_ms=0) as server:
        longest = len("a long state that is the culprit ") * 3
        engine.fail = raising(error, lambda rows: any(row.num_tokens > longest for row in rows))
        outcomes = together(server, engine, ["x"] * 3 + ["a long state that is the culprit " * 40] + ["y"] * 4)
        assert [outcome[0] for outcome in outcomes] == [200] * 3 + [status] + [200] * 4
        assert outcomes[3][1]["detail"]["error_type"] == kind
        assert "secret" not in json.dumps(outcomes[3][1])
        assert readiness(server) == (200, "ready")
        assert is_right(server)


@pytest.mark.parametrize("error", [lambda: RuntimeError("lost"), lambda: OutOfMemory("none", retry_after_s=1)])
def test_a_batch_that_fails_as_a_whole_is_answered_row_by_row(error: Any) -> None:
    engine = HeldEngine()
    with serve(engine, max_batch_ms=0) as server:
        engine.fail = raising(error, lambda rows: len(rows) > 1)
        assert [status for status, _ in together(server, engine, list("abcdefgh"))] == [200] * 8
        assert is_right(server)


def test_a_model_that_fails_on_everything_fails_each_request_and_goes_on() -> None:
    engine = HeldEngine()
    with serve(engine) as server:
        engine.fail = raising(lambda: RuntimeError("lost"), lambda rows: True)
        for _ in range(3):
            assert ask(server, post(body()))[0] == 500
        engine.fail = lambda _: None
        assert is_right(server)


def test_a_model_that_does_not_return_fails_readiness_and_who_waits() -> None:
    engine = HeldEngine()
    with serve(engine, timeout_s=0.3) as server, connect(server) as stuck, connect(server) as waiting:
        engine.hold()
        stuck.send(post(body("a")))
        engine.wait_started()
        assert readiness(server) == (200, "ready")
        response = waiting.send(post(body("b"))).read()
        assert (response.status, response.error_type) == (503, "deadline_exceeded")
        assert readiness(server) == (503, "overloaded_error")
        status, document = ask(server, post(body("c")))
        assert (status, document["detail"]["error_type"]) == (503, "overloaded_error")
        assert "one batch" in document["detail"]["message"]
        engine.gate.set()
        assert stuck.read().status == 200
        assert readiness(server) == (200, "ready")
        assert is_right(server)


# The worker


class Killed(BaseException):
    """What no `except Exception` catches."""


def test_a_worker_that_dies_answers_everyone_and_fails_readiness() -> None:
    engine = HeldEngine()
    with serve(engine) as server, contextlib.ExitStack() as clients:
        engine.hold()
        running = clients.enter_context(connect(server)).send(post(body("running")))
        engine.wait_started()
        queued = [clients.enter_context(connect(server)).send(post(body(str(n)))) for n in range(5)]
        until = time.monotonic() + PATIENCE_S
        while ask(server, get("/health"))[1]["queued_rows"] < 15:
            assert time.monotonic() < until

        def die(_: object) -> None:
            raise Killed

        engine.fail = die
        engine.gate.set()
        for client in (running, *queued):
            response = client.read()
            assert (response.status, response.error_type) == (503, "worker_dead")
        assert readiness(server) == (503, "worker_dead")
        assert ask(server, get("/livez"))[0] == 503
        assert ask(server, post(body()))[1]["detail"]["error_type"] == "worker_dead"


# Clients


def leave(client: Client, *, is_reset: bool) -> None:
    if is_reset:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.socket.close()


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("stage", ["connected", "head", "body", "chunk", "queued", "running", "answered"])
def test_a_client_may_leave_at_every_stage(stage: str, is_reset: bool, caplog: pytest.LogCaptureFixture) -> None:
    whole = post(body("gone"))
    sent = {
        "connected": b"",
        "head": whole[:20],
        "body": whole[:-5],
        "chunk": post(b"", headers="").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"5\r\nab",
    }
    engine = HeldEngine()
    with serve(engine) as server:
        engine.hold()
        client = connect(server)
        if stage in ("queued", "running", "answered"):
            if stage == "queued":
                first = connect(server).send(post(body("first")))
                engine.wait_started()
            client.send(whole)
            if stage == "queued":
                until = time.monotonic() + PATIENCE_S
                while not ask(server, get("/health"))[1]["queued_rows"]:
                    assert time.monotonic() < until
            else:
                engine.wait_started()
            if stage == "answered":
                engine.gate.set()
                while not server.requests.wait_none(0.01):
                    pass
            leave(client, is_reset=is_reset)
            if stage == "queued":
                until = time.monotonic() + PATIENCE_S
                while ask(server, get("/health"))[1]["queued_rows"]:
                    assert time.monotonic() < until
                engine.gate.set()
                assert first.read().status == 200
                first.socket.close()
            engine.gate.set()
        else:
            client.send(sent[stage])
            leave(client, is_reset=is_reset)
            engine.gate.set()
        assert server.connections.wait_none(PATIENCE_S)
        assert is_right(server)
        assert not [record for record in caplog.records if record.exc_info]


# The clock


def test_a_clock_that_jumps_disturbs_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HeldEngine()
    with serve(engine) as server, connect(server) as client:
        engine.hold()
        client.send(post(body()))
        engine.wait_started()
        real = time.time
        for jump in (1e8, -1e8):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            assert readiness(server) == (200, "ready")
        engine.gate.set()
        assert client.read().status == 200
        assert is_right(server)


def test_durations_are_taken_from_a_clock_that_does_not_jump() -> None:
    """`time.time` is for dates alone: that of a response and that of a log line."""
    users = {}
    for path in [*ROOT.glob("*.py"), *(ROOT / "onepass").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("time", "time.time", "datetime.now")
            if is_call:
                users[path.name] = users.get(path.name, 0) + 1
    assert users == {"framing.py": 1}


# The disk, signals, descriptors: the program itself


def test_a_checkpoint_that_is_deleted_changes_no_answer(tmp_path: Path) -> None:
    copy = shutil.copytree(STARTER, tmp_path / "copy")
    with Server("--model", str(copy)) as server:
        before = server.ask("I want my money back.", NOUL)
        shutil.rmtree(copy)
        assert server.ask("I want my money back.", NOUL) == before
        assert server.ask("Something that was not asked before.", NOUL)["type"] == "noul"


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    path = str(tmp_path / "onepass.sock")
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "http_client.py"), "--uds", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=write_fd,
    )
    os.close(write_fd)
    try:
        with open(read_fd) as log:
            assert any("serving fake" in line for line in log)
        for _ in range(3):  # its log is a pipe that nobody reads now
            with Client(path) as client:
                assert client.send(get("/health")).read().status == 200
                assert client.send(get("/nope")).read().status == 404
        program.terminate()
        assert program.wait(PATIENCE_S) == 0
    finally:
        program.kill()
        program.communicate()


class Load:
    """Clients that ask over and over; `outcomes` are statuses, and errors of the connection by name."""

    def __init__(self, server: Server, num_clients: int) -> None:
        self._server = server
        self._stop = threading.Event()
        self.outcomes: list[int | str] = []
        self.answered = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            content = json.dumps({"state": f"{number} {count}", "questions": {"q": NOUL}}).encode()
            try:
                status, _, answer = self._server.request("POST", "/v1/systemone", content)
                assert json.loads(answer)
                self.outcomes.append(status)
                self.answered.release()
            except OSError as err:
                self.outcomes.append(type(err).__name__)
                self._stop.wait(0.01)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_under_load_sigterm_answers_all_it_has_begun_and_the_port_is_free_at_once() -> None:
    with Server() as server:
        load = Load(server, 8)
        for _ in range(16):
            assert load.answered.acquire(timeout=60)
        assert server.stop() == 0
        load.stop()
        server.wait_log_end()
        answers = [outcome for outcome in load.outcomes if isinstance(outcome, int)]
        assert set(answers) <= {200, 503}
        assert len(answers) == sum("method=POST" in line for line in server.log)  # each that was read was answered
        assert set(load.outcomes) - set(answers) <= {"ConnectionRefusedError", "ConnectionResetError"}
        assert not [line for line in server.log if "Traceback" in line]


def test_under_load_sigkill_hangs_no_client_and_the_next_server_takes_the_port() -> None:
    with Server() as server:
        load = Load(server, 8)
        for _ in range(16):
            assert load.answered.acquire(timeout=60)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(PATIENCE_S)
        load.stop()
        with Server("--port", str(server.port)) as again:
            assert again.ask("I want my money back.", NOUL)["type"] == "noul"


def test_with_no_descriptor_left_it_refuses_keeps_answering_and_recovers(tmp_path: Path) -> None:
    limit = 64

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    path = str(tmp_path / "onepass.sock")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "http_client.py"), "--uds", path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lower,
    ) as program:
        try:
            assert program.stderr is not None
            assert program.stdin is not None
            for line in program.stderr:
                if "serving fake" in line:
                    break
            threading.Thread(target=program.stderr.read, daemon=True).start()
            program.stdin.write("open\n")
            program.stdin.flush()
            with Client(path) as early:
                assert early.send(post(b"1")).read().body == b"1"
                crowd = [Client(path).send(get("/livez")) for _ in range(limit)]
                statuses = [client.read().status for client in crowd]
                assert statuses[0] == 200
                assert statuses[-1] == 503
                assert early.send(post(b"2")).read().body == b"2"
                assert early.send(get("/health")).read().status == 200
                for client in crowd:
                    client.socket.close()
            until = time.monotonic() + PATIENCE_S
            while True:
                with Client(path) as client:
                    if client.send(post(b"3")).read().status == 200:
                        break
                assert time.monotonic() < until
            program.terminate()
            assert program.wait(PATIENCE_S) == 0
        finally:
            program.kill()
