"""The README and the pages say what is so: examples, flags, errors, places and Python are checked here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onepass import errors
from onepass.config import _flags, flag_name
from onepass.errors import ApiError
from tests.support import ROOT
from tests.support.live import Server

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_README_LINES = 150  # an entry page is read in two minutes; the rest has pages of its own


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def section(page: str, title: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.split(r"^## ", text.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def assert_close(shown: Any, given: Any, path: str = "") -> None:
    if isinstance(shown, dict):
        assert list(shown) == list(given), path
        for key in shown:
            assert_close(shown[key], given[key], f"{path}.{key}")
    elif isinstance(shown, float) and path != ".x_latency_ms":
        assert given == pytest.approx(shown, abs=1e-5), path
    elif path != ".x_latency_ms":
        assert shown == given, path


def test_curl_gives_what_the_readme_shows(live: Server) -> None:
    command = next(block for block in blocks("sh") if block.startswith("curl")).replace(
        "http://127.0.0.1:8017", live.url
    )
    given = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
    assert_close(json.loads(blocks("json")[0]), json.loads(given))


def test_the_picture_gets_the_answer_that_the_readme_shows(tmp_path: Path) -> None:
    block = next(block for block in blocks("sh") if "--image" in block)
    command = block.replace(".venv/bin/python", sys.executable).replace("drawing.png", str(tmp_path / "drawing.png"))
    given = subprocess.run(["bash", "-ec", command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(given.stdout.splitlines()[-1])
    assert_close(json.loads(blocks("json")[1]), answer)
    assert answer["answers"]["colour"]["choice"] == "green"
    assert answer["answers"]["circle"]["noul"] > 0.5


def test_the_example_makes_sense() -> None:
    answers = json.loads(blocks("json")[0])["answers"]
    assert answers["team"]["choice"] == "billing"
    assert answers["refund"]["noul"] > 0.5


def test_the_python_runs(live: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("python"):
        exec(compile(block.replace("http://127.0.0.1:8017", live.url), "README.md", "exec"), {})
    assert 0 <= float(capsys.readouterr().out) <= 1


def test_every_flag_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", section("docs/settings.md", "Flags"), re.MULTILINE))
    assert list(rows) == [flag_name(item) for item in _flags()]
    for item in _flags():
        default = "`model/`" if item.name == "model" else "" if item.default in ("", False) else f"`{item.default}`"
        assert rows[flag_name(item)] == default


def test_every_error_is_listed_and_no_other() -> None:
    text = section("docs/api.md", "Errors")
    listed = {int(status) for row in re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) for status in row.split(",")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ApiError)]
    assert listed == {kind.status for kind in kinds}
    without_type = {404, 405, 422}
    for kind in kinds:
        assert kind.status in without_type or f"`{kind.error_type}`" in text, kind


def test_every_package_and_every_program_has_its_line_on_the_page_of_the_architecture() -> None:
    rooms = section("docs/architecture.md", "Rooms")
    packages = {f"onepass/{path.name}/" for path in (ROOT / "onepass").iterdir() if (path / "__init__.py").exists()}
    for name in packages | {path.name for path in ROOT.glob("*.py")}:
        assert f"`{name}`" in rooms, name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


def test_the_two_commands_are_what_ci_does() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [block for block in blocks("sh") if "pip install" in block]
    assert "-r requirements.txt && .venv/bin/python server.py" in commands[0]
    assert "-r requirements-dev.txt && .venv/bin/python -m pytest" in commands[1]
    assert "requirements-dev.txt" in ci
    assert "-m pytest" in ci


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
