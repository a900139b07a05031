"""One request and its answer: the head, the body, the record for the log, and whether the connection lasts.

A route takes an `Exchange` and returns a `Reply`. This module knows nothing of what the routes mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from onepass.decider import Decider
from onepass.edge import framing
from onepass.edge.listener import InFlight
from onepass.edge.metrics import Metrics, Record
from onepass.edge.stream import Stream
from onepass.errors import ApiError, ClientLeft, Overloaded

MAX_HELD_BODY_BYTES = 256 << 20  # eight of the largest bodies; without a limit every connection could hold 64 MiB


@dataclass(frozen=True, slots=True)
class Reply:
    """What a route answers. The handler adds the headers that every answer has."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


def as_json(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(), status, headers or {})


def as_reply(error: ApiError) -> Reply:
    return Reply(error.body(), error.status, error.headers())


class Exchange:
    """One request on its connection. Only the connection's own thread uses it.

    `must_close` says whether the connection ends after the answer. It is true until the whole request has been read,
    so an error on the way never leaves half a request for the next one to begin with.
    """

    def __init__(self, stream: Stream, decider: Decider, metrics: Metrics, held_bytes: InFlight) -> None:
        """`held_bytes` counts the bodies of all exchanges that are in memory."""
        self.decider = decider
        self.metrics = metrics
        self.record = Record(f"req_{os.urandom(16).hex()}", time.monotonic())
        self.head: framing.Head | None = None
        self.client = 0  # the number of the client's key
        self.must_close = True
        self._stream = stream
        self._held_bytes = held_bytes

    def read_head(self) -> framing.Head:
        """The head of the request. Raises an `ApiError`, or `Disconnected`."""
        raw_head = b""
        try:
            raw_head = self._stream.read_head()
        finally:
            if (raw_head or self._stream.peek(5)).startswith(b"HEAD "):
                self.record.method = "HEAD"  # the refusal of a HEAD request has no body either
        self.head = framing.parse_head(raw_head)
        return self.head

    def note_read(self) -> None:
        """The whole request has been read, so the connection lasts if the client wants that."""
        assert self.head is not None
        self.must_close = not self.head.keeps_alive

    @contextlib.contextmanager
    def read_body(self) -> Iterator[bytes]:
        """The decompressed body, which counts among the bodies in memory until the block ends.

        Raises an `ApiError`, or `Disconnected`.
        """
        head = self.head
        assert head is not None
        encoding = framing.body_encoding(head.headers)
        with contextlib.ExitStack() as held:
            self._hold(head.length or 0, held)
            body = self._stream.read_body(head)
            self.note_read()
            if head.length is None:
                self._hold(len(body), held)
            content = framing.decompress(body, encoding)
            if content is not body:
                self._hold(len(content), held)
            self.record.stages_ms["read"] = (time.monotonic() - self.record.started) * 1e3
            yield content

    def _hold(self, num_bytes: int, held: contextlib.ExitStack) -> None:
        """Count a body among those in memory until `held` closes. Raises `Overloaded` if they are too many."""
        num_bytes = min(num_bytes, framing.MAX_BODY_BYTES)
        if not self._held_bytes.enter(MAX_HELD_BODY_BYTES, num_bytes):
            raise Overloaded("too many large requests arrive at once", retry_after_s=1)
        held.callback(self._held_bytes.leave, num_bytes)

    def wait(self, future: Future[Any], deadline: float | None) -> bool:
        """Wait until `future` is done or the deadline has passed. Returns whether it is done.

        Raises `ClientLeft` as soon as the client closes its side of the connection.
        """
        if not self._stream.wait(future, deadline):
            self.close()
            raise ClientLeft
        return future.done()

    def close(self) -> None:
        """End the connection after this answer."""
        self.must_close = True
