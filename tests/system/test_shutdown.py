"""Start and stop of the whole program, in a process of its own whose worker is steered through its pipes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys

import pytest

from onepass.edge.metrics import STAGES
from tests.support import ROOT
from tests.support.http_client import PATIENCE_S, Client, get, post
from tests.support.program import PROGRAM, run


def test_what_is_queued_is_finished_and_new_work_refused_after_sigterm() -> None:
    with run() as program, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(program.address)).send(post(b"%d" % number)) for number in range(4)]
        assert sorted(program.told(5)) == ["queued"] * 4 + ["running"]
        kept = stack.enter_context(Client(program.address))
        assert kept.send(get("/health")).read().status == 200
        program.process.send_signal(signal.SIGTERM)
        assert program.told() == ["draining"]
        for request in (post(b"{}"), get("/health"), get("/v1/models")):
            with Client(program.address) as late:
                response = late.send(request).read()
                assert (response.status, response.error_type) == (503, "shutting_down")
                assert late.is_closed()
        assert kept.send(get("/livez")).read().status == 200
        assert kept.is_closed()
        program.order("open")
        assert sorted(client.read().body for client in clients) == [b"0", b"1", b"2", b"3"]
        code, log = program.end()
        assert code == 0
        assert "all work is finished" in log
        assert "Traceback" not in log


def test_work_that_does_not_end_is_left_after_the_drain_time() -> None:
    with run("--drain-s", "0.2") as program, Client(program.address) as client:
        client.send(post(b"{}"))
        assert sorted(program.told(2)) == ["queued", "running"]
        program.process.send_signal(signal.SIGINT)
        code, log = program.end()
        assert code == 0
        assert "some work was not finished" in log
        assert client.read().error_type == "shutting_down"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(signum: signal.Signals) -> None:
    with run() as program, Client(program.address) as client:
        client.send(post(b"{}"))
        assert sorted(program.told(2)) == ["queued", "running"]
        program.process.send_signal(signal.SIGTERM)
        assert program.told() == ["draining"]
        program.process.send_signal(signum)
        assert program.end()[0] == 128 + signum


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_that_another_thread_receives_is_not_lost(num_signals: int) -> None:
    """Nor one that comes just before the main thread begins to wait: neither interrupts its wait."""
    code = (
        "from onepass import logs as process; import signal, threading\n"
        "stop = process.StopSignal()\n"
        "def send():\n"
        f"    for _ in range({num_signals}):\n"
        "        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "threading.Timer(0.2, send).start()\n"
        "stop.wait()\n"
        f"threading.Event().wait({num_signals - 1} * 60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == (0 if num_signals == 1 else 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /v1/systemone HTTP/1.1\r\nHo",
        b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 300_000,
        b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_a_request_that_has_not_arrived_is_told_of_the_end(begun: bytes) -> None:
    with run() as program, Client(program.address) as client, Client(program.address) as idle:
        assert idle.send(get("/livez")).read().status == 200
        client.send(begun)
        program.process.send_signal(signal.SIGTERM)
        response = client.read()
        assert (response.status, response.error_type) == (503, "shutting_down")
        assert client.is_closed()
        assert idle.is_closed()
        client.socket.close()
        assert program.end()[0] == 0


def test_it_stops_while_nothing_happens() -> None:
    with run() as program, Client(program.address) as idle:
        assert idle.send(get("/livez")).read().status == 200
        program.process.send_signal(signal.SIGTERM)
        assert program.end()[0] == 0
        assert idle.is_closed()


def test_it_stops_as_process_1() -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    with contextlib.suppress(OSError):
        if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
            check_process_1(unshare)
            return
    pytest.skip("this system does not let us make a PID namespace")


def check_process_1(unshare: list[str]) -> None:
    """The child of unshare is process 1 in its namespace, which has no default action for a signal."""
    script = (
        "import os, runpy, signal, sys; assert os.getpid() == 1;"
        f"sys.argv = ['x', '--port', '0']; sys.path[:0] = [{str(PROGRAM.parent)!r}, {str(ROOT)!r}];"
        "import http_client as h, threading;"
        "start = h.ToldDecider.start;"
        "h.ToldDecider.start = lambda self: (start(self), os.kill(1, signal.SIGTERM));"
        "sys.exit(h.server.main(['--port', '0'], make_decider=h.ToldDecider))"
    )
    done = subprocess.run([*unshare, sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, "all work is finished" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("refuse", "onepass: the checkpoint has no weights"),
        ("die", "the worker died of RuntimeError; the process ends"),
    ],
)
def test_a_dead_worker_ends_the_process_with_its_reason(order: str, said: str) -> None:
    with run() as program:
        program.order(order)
        code, log = program.end()
        assert code == 1
        assert said in log
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--port", "70000"], 2, "onepass: --port must be from 0 to 65535"),
        (["--no-such-flag"], 2, "onepass: unrecognized arguments: --no-such-flag"),
        (["--host", "192.0.2.1"], 1, "onepass: cannot listen on 192.0.2.1 port 0"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(flags: list[str], code: int, said: str) -> None:
    with run(*flags, ready=False) as program:
        returned, log = program.end()
        assert (returned, log.count("\n")) == (code, 1)
        assert log.startswith(said)


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with run("--port", str(port), ready=False) as program:
            assert program.end() == (1, f"onepass: cannot listen on 127.0.0.1 port {port}: Address already in use\n")


def test_with_json_every_line_of_the_log_is_an_object() -> None:
    with run("--log-json") as program, Client(program.address) as client:
        program.order("open")
        answered = client.send(post(b"{}")).read()
        failed = client.send(post(b'"boom"')).read()
        assert client.is_closed()
        program.process.send_signal(signal.SIGTERM)
        log = [json.loads(line) for line in program.end()[1].splitlines()]
    found = {line["id"]: line for line in log if line["message"] == "request"}
    fields = found[answered.headers["x-typesafe-request-id"]]
    assert (fields["status"], fields["rows"], fields["tokens"], fields["error"]) == (200, 1, 7, "-")
    assert all(isinstance(fields[f"{stage}_ms"], float) for stage in (*STAGES, "total"))
    assert found[failed.headers["x-typesafe-request-id"]]["error"] == "internal_error"
    (reason,) = (line for line in log if "traceback" in line)
    assert reason["id"] == failed.headers["x-typesafe-request-id"]
    assert reason["traceback"].startswith("Traceback")


def test_a_signal_that_another_thread_takes_wakes_the_main_thread_too() -> None:
    """As does one that comes just before the main thread begins to wait: Python's own handler would run too late."""
    code = (
        "from onepass import logs as process; import signal, threading\n"
        "stop = process.StopSignal()\n"
        "def signal_this_thread():\n"
        "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "threading.Timer(0.3, signal_this_thread).start()\n"
        "stop.wait()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE_S, check=True)
