"""The server as a program of its own, around a decider that does as it is told."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

from tests.support import ROOT
from tests.support.http_client import PATIENCE_S

PROGRAM = ROOT / "tests" / "support" / "http_client.py"


class Program:
    """The running server. `told` reads its worker's story; its log is on stderr."""

    def __init__(self, *flags: str, ready: bool = True) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ONEPASS_")}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *(() if "--uds" in flags else ("--port", "0")), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        if ready:
            line = self.log_line("serving fake at")
            match = re.search(r"http://127\.0\.0\.1:(\d+): ", line)
            assert match, line
            self.address = ("127.0.0.1", int(match[1]))

    def log_line(self, wanted: str) -> str:
        assert self.process.stderr
        seen = []
        for line in self.process.stderr:
            if wanted in line:
                return line
            seen.append(line)
        raise AssertionError(f"no {wanted!r} in {seen}")

    def told(self, num_lines: int = 1) -> list[str]:
        assert self.process.stdout
        return [self.process.stdout.readline().strip() for _ in range(num_lines)]

    def order(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """(exit code, the rest of stderr)"""
        _, rest = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, rest


@contextlib.contextmanager
def run(*flags: str, ready: bool = True) -> Iterator[Program]:
    program = Program(*flags, ready=ready)
    watchdog = threading.Timer(2 * PATIENCE_S, program.process.kill)  # a pipe that says nothing would hang the test
    watchdog.start()
    try:
        yield program
    finally:
        watchdog.cancel()
        program.process.kill()
        program.process.communicate()
