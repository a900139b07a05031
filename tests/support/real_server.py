"""The real handler over the real decider, in this process, with an engine that tests steer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onepass.config import Config
from onepass.decider import Decider
from onepass.edge.handler import HttpServer
from onepass.edge.routes import ROUTES
from onepass.rows import Row
from tests.support.fake_engine import WAIT_S, FakeEngine, loaded


class HeldEngine(FakeEngine):
    """Runs nothing while `gate` is closed; before each batch `fail` may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.started = threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.fail: Callable[[list[Row]], None] = lambda _: None

    def forward(self, rows: list[Row]) -> list[list[list[float]]]:
        self.started.release()
        assert self.gate.wait(WAIT_S)
        self.fail(rows)
        return super().forward(rows)

    def hold(self) -> None:
        """What comes next is held; the count of started batches begins anew."""
        self.gate.clear()
        while self.started.acquire(blocking=False):
            pass

    def wait_started(self) -> None:
        assert self.started.acquire(timeout=WAIT_S)


@contextmanager
def serve(engine: Any = None, **settings: Any) -> Iterator[HttpServer]:
    config = Config(port=0, **settings)
    decider = Decider(config, load=lambda _: loaded(engine or FakeEngine()))
    http = HttpServer(config, decider, ROUTES)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    decider.start()
    decider.wait_ready(WAIT_S)
    try:
        yield http
    finally:
        if isinstance(engine, HeldEngine):
            engine.gate.set()
        decider.drain(WAIT_S)
        http.stop_receiving()
        http.shutdown()
        thread.join()
        http.server_close()
        assert http.connections.wait_none(WAIT_S)
