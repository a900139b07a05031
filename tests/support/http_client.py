"""Raw sockets against a real server, and a decider without a model behind it. Run as a program it is such a server."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import server
from onepass.config import Config
from onepass.edge.handler import HttpServer
from onepass.edge.routes import ROUTES
from onepass.errors import ApiError, DeadlineExceeded, InvalidRequest, Loading, ShuttingDown, StartupError, WorkerDead
from onepass.status import Status
from tests.support.statuses import model_status, queue_status

CONTENT_TYPES = ("application/json", "text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8")
PATIENCE_S = 10.0  # a socket that says nothing for so long has failed the test


@dataclass
class FakeAnswered:
    body: bytes
    stages_ms: dict[str, float] = field(default_factory=lambda: {"queue": 1.25, "model": 2.5, "readout": 0.5})
    num_rows: int = 1
    num_tokens: int = 7


@dataclass(eq=False)
class FakePending:
    body: bytes
    content_type: str
    future: Future[bytes] = field(default_factory=Future)
    num_rows: int = 1
    num_tokens: int = 7
    stages_ms: dict[str, float] = field(default_factory=lambda: {"parse": 0.125, "render": 0.25})
    deadline: float = math.inf
    client: int = 0


class FakeDecider:
    """The surface of `decider.Decider`. Each request is one row; the worker answers with what it was sent.

    While `gate` is closed the worker holds the row it has begun. `told` receives what happens, in order.
    """

    def __init__(self, config: Config, *, is_loaded: bool = True) -> None:
        self.config = config
        self.ready, self.dead, self.gate = threading.Event(), threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self.told: queue.Queue[str] = queue.Queue()
        self.num_forwards = 0
        self.has_images = False
        self._is_loaded = is_loaded
        self._is_draining = False
        self._rows: queue.Queue[FakePending] = queue.Queue()
        self._idle = threading.Condition()
        self._open: list[FakePending] = []
        self.gate.set()

    def tell(self, text: str) -> None:
        self.told.put(text)

    def start(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()
        if self._is_loaded:
            self.ready.set()

    def _work(self) -> None:
        while True:
            pending = self._rows.get()
            with self._idle:
                is_wanted = not pending.future.done() and pending.future.set_running_or_notify_cancel()
            if is_wanted:
                self.num_forwards += 1
                self.tell("running")
                self.gate.wait()
                if not pending.future.done():
                    pending.future.set_result(pending.body)
            with self._idle:
                self._open.remove(pending)
                self._idle.notify_all()

    def die(self, failure: BaseException) -> None:
        self.failure = failure
        self.dead.set()

    def why_not_ready(self) -> ApiError | None:
        if self.dead.is_set():
            return WorkerDead("the worker is dead", retry_after_s=5)
        if self._is_draining:
            return ShuttingDown("the server is shutting down", retry_after_s=2)
        return None if self.ready.is_set() else Loading("the model is loading", retry_after_s=3)

    def submit(self, body: bytes, content_type: str, client: int) -> FakePending:
        error = self.why_not_ready()
        if error is not None:
            raise error
        try:
            document = json.loads(body)
        except ValueError:
            raise InvalidRequest.at((), "must be JSON in UTF-8", "json_invalid") from None
        if document == "boom":
            raise RuntimeError("a bug with a secret in its message")
        pending = FakePending(body, content_type, deadline=time.monotonic() + self.config.timeout_s, client=client)
        with self._idle:
            self._open.append(pending)
        self._rows.put(pending)
        self.tell("queued")
        return pending

    def cancel(self, pending: FakePending) -> None:
        pending.future.cancel()

    def expire(self, pending: FakePending) -> None:
        self.tell("expired")
        with self._idle:
            if not pending.future.running():
                pending.future.set_exception(DeadlineExceeded("too late", retry_after_s=1))

    def answer(self, pending: FakePending) -> FakeAnswered:
        return FakeAnswered(pending.future.result())

    def status(self) -> Status:
        loaded = model_status(images=self.has_images) if self.ready.is_set() else None
        return Status(error=self.why_not_ready(), model="fake", queue=queue_status(), loaded=loaded)

    def models(self) -> dict[str, object]:
        return {"models": [{"name": "fake"}], "object": "list", "data": []}

    def drain(self, timeout_s: float) -> bool:
        self._is_draining = True
        self.tell("draining")
        with self._idle:
            is_empty = self._idle.wait_for(lambda: not self._open, timeout_s)
        for pending in self._open:
            pending.future.set_exception(ShuttingDown("the server is shutting down", retry_after_s=1))
        return is_empty


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]  # lower-case names; a repeated one fails the parser
    body: bytes

    @property
    def error_type(self) -> str | None:
        detail = json.loads(self.body)["detail"]
        return detail.get("error_type") if isinstance(detail, dict) else None


def parse_response(data: bytes, *, is_head: bool = False) -> tuple[Response, bytes]:
    """The first response in `data` and what follows it. Fails on anything the contract does not promise."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    assert separator, data[:200]
    lines = head.decode("ascii").split("\r\n")
    status = re.fullmatch(r"HTTP/1\.1 (\d{3}) [A-Za-z -]+", lines[0])
    assert status, lines[0]
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(": ")
        assert colon, line
        assert name.lower() not in headers, line
        headers[name.lower()] = value
    if status[1] == "100":
        return Response(100, headers, b""), rest
    length = int(headers["content-length"])
    assert re.fullmatch(r"req_[0-9a-f]{32}", headers["x-typesafe-request-id"])
    assert headers["content-type"] in CONTENT_TYPES
    body = b"" if is_head else rest[:length]
    if not is_head:
        assert len(body) == length
        if headers["content-type"] == "application/json":
            json.loads(body)
    return Response(int(status[1]), headers, body), rest[len(body) :]


class Client:
    """One connection. `extra` of received bytes beyond the last response is kept."""

    def __init__(self, address: tuple[str, int] | str, tls: ssl.SSLContext | None = None) -> None:
        """`address`: (host, port), or the path of a Unix socket."""
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(PATIENCE_S)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address, PATIENCE_S)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost", suppress_ragged_eofs=False)
        self._received = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Client:
        self.socket.sendall(data)
        return self

    def read(self, *, is_head: bool = False) -> Response:
        """The next response, and not a byte more than has come."""
        while True:
            head, separator, rest = self._received.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            wanted = 0 if is_head or length is None else int(length[1])
            if separator and len(rest) >= wanted:
                response, self._received = parse_response(self._received, is_head=is_head)
                return response
            data = self.socket.recv(65536)
            assert data, f"closed after {self._received[:200]!r}"
            self._received += data

    def is_closed(self) -> bool:
        """Wait for the server to close, nothing more having been sent."""
        try:
            data = self._received or self.socket.recv(65536)
        except ConnectionError:
            data = b""
        assert not data, data[:200]
        return True

    def is_kept(self) -> bool:
        """Whether the connection serves another request, which also proves that nothing else was answered."""
        self.send(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        return self.read().body == b'{"status":"alive"}'


def post(body: bytes, *, path: str = "/v1/systemone", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode("latin-1") + body


def get(path: str, *, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode("latin-1")


@dataclass
class Running:
    """A server in this process, and what it was made of."""

    http: HttpServer
    decider: FakeDecider

    @property
    def address(self) -> Any:
        return self.http.config.uds or ("127.0.0.1", self.http.server_port)

    def connect(self, tls: ssl.SSLContext | None = None) -> Client:
        return Client(self.address, tls)

    def wait_for_no_connection(self) -> None:
        """Until every handler has ended."""
        assert self.http.connections.wait_none(PATIENCE_S)

    def wait_for_requests(self, count: int) -> None:
        """Until so many have sent their first byte and not got their answer."""
        self._wait_for(self.http.requests, count)

    def wait_for_connections(self, count: int) -> None:
        self._wait_for(self.http.connections, count)

    def wait_for_idle(self, count: int) -> None:
        """Until so many connections wait for a request."""
        self._wait_until(lambda: len(self.http._idle) == count)

    def _wait_for(self, counter: Any, count: int) -> None:
        self._wait_until(lambda: counter.value == count)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until
            time.sleep(0.002)

    def ask(self, request: bytes) -> Response:
        with self.connect() as client:
            return client.send(request).read(is_head=request.startswith(b"HEAD"))


@contextlib.contextmanager
def serve(
    prepare: Callable[[FakeDecider], None] = lambda _: None, *, is_loaded: bool = True, **settings: Any
) -> Iterator[Running]:
    config = Config(port=0, **settings)
    decider = FakeDecider(config, is_loaded=is_loaded)
    prepare(decider)
    http = HttpServer(config, cast(Any, decider), ROUTES)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    decider.start()
    try:
        yield Running(http, decider)
    finally:
        decider.gate.set()
        http.shutdown()
        thread.join()
        http.server_close()


class ToldDecider(FakeDecider):
    """In a process of its own: tells its story on stdout; its gate opens when stdin says so."""

    def tell(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def start(self) -> None:
        self.gate.clear()
        threading.Thread(target=self._obey, daemon=True).start()
        super().start()

    def _obey(self) -> None:
        for line in sys.stdin:
            if line == "open\n":
                self.gate.set()
            elif line == "die\n":
                self.die(RuntimeError("the device is lost"))
            elif line == "refuse\n":
                self.die(StartupError("the checkpoint has no weights"))


if __name__ == "__main__":
    sys.exit(server.main(sys.argv[1:], make_decider=cast(Any, ToldDecider)))
