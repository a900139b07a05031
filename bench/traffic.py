"""A server in a process of its own, and a client for many connections at once: what load.py and soak.py share."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve import PATIENCE_S, WORDS, answers_get, free_port

ROOT = Path(__file__).resolve().parent.parent
ENVIRON = {**os.environ, "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "1000"}
KINDS: list[dict[str, Any]] = [
    {"type": "noul", "instructions": "Is it urgent?"},
    {"type": "choice", "instructions": "Who takes it?", "criteria": {"billing": "Money", "other": None}},
    {"type": "score", "instructions": "How angry is it?", "criteria": ["calm", "cross", "furious"]},
]


@dataclass(frozen=True)
class Target:
    port: int
    pid: int

    def status(self, name: str) -> int:
        """A number of /proc/PID/status: VmRSS (kB), VmHWM (kB), Threads."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextmanager
def started(*flags: str, log: Path) -> Iterator[Target]:
    port = free_port()
    command = [sys.executable, "server.py", "--port", str(port), *flags]
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, env=ENVIRON, stdout=out, stderr=out) as process:
        try:
            until = time.monotonic() + PATIENCE_S
            while not answers_get(port, "/health"):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the server did not come up: {log.read_text()[-500:]}")
                time.sleep(0.3)
            yield Target(port, process.pid)
        finally:
            process.terminate()


def make_body(rng: random.Random, num_words: int, num_questions: int, *, has_new_state: bool = True) -> bytes:
    """A request that no other is the same as, about a state that no other has either."""
    words = rng if has_new_state else random.Random(2)
    state = f"case {words.getrandbits(40)}: {' '.join(words.choices(WORDS, k=num_words))}"
    number = rng.getrandbits(40)
    questions = {
        str(n): {**KINDS[n % 3], "instructions": f"{number}: {KINDS[n % 3]['instructions']} {n}"}
        for n in range(num_questions)
    }
    return json.dumps({"state": state, "questions": questions}).encode()


def make_message(body: bytes, *, path: str = "/v1/systemone", fields: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{fields}\r\n".encode() + body


class Connections:
    """Kept-alive connections, one for each request that is under way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, message: bytes) -> tuple[int, bytes]:
        """(status, body). Raises OSError or asyncio.IncompleteReadError."""
        while self._free and self._free[-1][0].at_eof():  # closed by the server, unused for long
            self._free.pop()[1].close()
        reader, writer = self._free.pop() if self._free else await self.open()
        writer.write(message)
        status, is_kept, content = await read_response(reader)
        if is_kept:
            self._free.append((reader, writer))
        else:
            writer.close()
        return status, content

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()
        self._free.clear()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bool, bytes]:
    """(status, whether the connection is kept, body)"""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    return int(head.split(" ")[1]), "connection: keep-alive" in head, await reader.readexactly(length)
