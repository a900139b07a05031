"""What `pip install .` gives: the same decisions from any folder, and no names that collide with a program's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onepass import Config, Decider
from tests.support import ROOT

ASKED = ["ask", "I want my money back!", "--noul", "refund=Is a refund wanted?", "--json"]
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of this checkout is installed."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(folder), str(ROOT)], check=True, timeout=PATIENCE_S)
    return folder


def run(code: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Python in another folder, with these paths before all others."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ONEPASS_", "PYTHON"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return subprocess.run(
        [sys.executable, *code], cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_the_installed_command_answers_as_the_checkout_does(site: Path, tmp_path: Path) -> None:
    done = run(["-m", "onepass", *ASKED], tmp_path, site)
    assert done.returncode == 0, done.stderr
    with Decider(Config()) as decider:
        expected = decider.ask(
            "I want my money back!", {"refund": {"type": "noul", "instructions": "Is a refund wanted?"}}
        )
    assert json.loads(done.stdout)["answers"] == expected["answers"]


def test_the_console_script_is_there(site: Path, tmp_path: Path) -> None:
    done = run([str(site / "bin" / "onepass"), "--help"], tmp_path, site)
    assert (done.returncode, "ask" in done.stdout) == (0, True), done.stderr


def test_the_installed_starter_is_verified_by_its_manifest(site: Path, tmp_path: Path) -> None:
    code = (
        "from onepass.checkpoint import open_checkpoint; from onepass.config import Config\n"
        "found = open_checkpoint(Config(require_manifest=True)); print(found.name, found.is_verified, found.folder)"
    )
    done = run(["-c", code], tmp_path, site)
    assert done.stdout.split() == ["onepass-starter", "True", str(site / "onepass" / "model")], done.stderr


def test_a_program_may_have_modules_with_the_names_of_ours(site: Path, tmp_path: Path) -> None:
    for name in ("config", "errors", "metrics", "template", "prompt", "decider", "rows", "cache", "logs"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('this module of the program was imported')\n")
    code = "from onepass import Config, Decider, ApiError; print(Decider.__module__, Config().port)"
    done = run(["-c", code], tmp_path, tmp_path, site)
    assert done.stdout.split() == ["onepass.decider", "8017"], done.stderr


@pytest.mark.parametrize("name", ["engine", "batcher", "images"])
def test_a_module_in_front_of_one_that_lies_beside_the_package_is_named(site: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("mine = True\n")
    done = run(["-c", "from onepass import Decider"], tmp_path, tmp_path, site)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Onepass needs its own module")
    assert str(tmp_path / f"{name}.py") in last
