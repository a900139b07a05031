"""The server as a user starts it: a child process on a free port, with the shipped model unless told otherwise."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import ROOT

PATIENCE_S = 120.0  # loading on a busy machine; nothing waits this long otherwise


class Server:
    """`with Server("--encoding", "joint") as server: server.ask({...})`"""

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        wait: bool = True,
        command: Sequence[str] = ("server.py", "--port", "0"),
        cwd: Path = ROOT,
    ) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ONEPASS_")}
        clean["ONEPASS_DTYPE"] = os.environ.get("ONEPASS_DTYPE", "auto")
        self.process = subprocess.Popen(
            [sys.executable, *command, *flags],
            cwd=cwd,
            env={**clean, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read_log, daemon=True).start()
        self.port = int(self.wait_log(r"at http://127\.0\.0\.1:(\d+)")[1])
        self.url = f"http://127.0.0.1:{self.port}"
        if wait:
            self.wait_log(r"serving ")

    def _read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put("")

    def wait_log(self, pattern: str) -> re.Match[str]:
        """The first new log line that matches."""
        until = time.monotonic() + PATIENCE_S
        while line := self._lines.get(timeout=max(0.0, until - time.monotonic())):
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"the server ended without {pattern!r}:\n{''.join(self.log)}")

    def wait_log_end(self) -> None:
        """Until all that a server which has ended logged is in `log`."""
        while self._lines.get(timeout=PATIENCE_S):
            pass

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and document of a decision; `body` may be bytes to be sent as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _, answer = self.request("POST", "/v1/systemone", content, **headers)
        return status, json.loads(answer)

    def ask(self, state: Any, question: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The answer to one question, which must be given."""
        status, document = self.post({"state": state, "questions": {"q": question}, **fields})
        assert status == 200, document
        answer: dict[str, Any] = document["answers"]["q"]
        return answer

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
