"""The command line tool as the tests run it: in this process with a decider that is loaded already, or as a child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from onepass import __main__ as onepass
from onepass.config import Config
from onepass.decider import Decider
from tests.support import ROOT

PATIENCE_S = 120.0


def clean_environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ONEPASS_")} | variables


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """A child process of its own, whose output is read through pipes unless told otherwise."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": clean_environment()}
    return subprocess.Popen([sys.executable, "-m", "onepass", *arguments], cwd=ROOT, **(pipes | options))


class Tool:
    """`tool("ask", …)` runs a command here; `out` and `err` are what it printed."""

    def __init__(self, decider: Decider, capture: pytest.CaptureFixture[bytes]) -> None:
        self.decider, self._capture = decider, capture
        self.configs: list[Config] = []
        self.out = b""
        self.err = ""

    def __call__(self, *arguments: str, open_decider: Callable[[Config], Any] | None = None) -> int:
        self._capture.readouterr()
        code = onepass.main([str(argument) for argument in arguments], open_decider or self._open)
        self.out, err = self._capture.readouterr()
        self.err = err.decode()
        return code

    def _open(self, config: Config) -> AbstractContextManager[Decider]:
        self.configs.append(config)
        return nullcontext(self.decider)
