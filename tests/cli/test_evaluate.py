"""`python -m onepass evaluate`: figures of labelled rows, gates, a report, and going on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepass.cli import evaluate as tool_evaluate
from onepass.decider import Decider
from onepass.errors import BadRequest, StartupError
from tests import test_decider
from tests.support.tool import Tool

OPTIONS = {"billing": None, "sales": None, "other": None}
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund wanted?"},
    "team": {"type": "choice", "instructions": "Which team?", "criteria": OPTIONS},
}


@pytest.fixture(scope="module")
def decider() -> Iterator[Decider]:
    """Scores that are known: the last option of a question gets the most."""
    with test_decider.running() as running:
        yield running


@pytest.fixture
def tool(decider: Decider, capfdbinary: pytest.CaptureFixture[bytes]) -> Tool:
    return Tool(decider, capfdbinary)


def line(number: int, **answers: Any) -> str:
    return json.dumps({"state": f"Ticket {number}", "questions": QUESTIONS, "answers": answers}) + "\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The choice is right in three rows of four."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line(n, team="other" if n % 4 else "sales") for n in range(8)))
    return path


class Counting:
    """Answers every request as `probabilities` says, and counts them."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[bytes] = []
        self._fails_at = fails_at

    def __call__(self, body: bytes) -> bytes:
        self.asked.append(body)
        if self._fails_at is not None and len(self.asked) >= self._fails_at:
            raise StartupError("the server is gone")
        shares = dict(zip(json.loads(body)["questions"]["team"]["criteria"], (0.2, 0.2, 0.6), strict=True))
        return json.dumps({"answers": {"refund": {"noul": 0.9}, "team": {"probabilities": shares}}}, indent=1).encode()


def test_the_figures_are_those_of_the_answers(tool: Tool, source: Path) -> None:
    assert tool("evaluate", source, "--json") == 0
    whole, of_question = json.loads(tool.out)["figures"]
    assert (whole["type"], whole["num_rows"], whole["accuracy"]) == ("all", 8, 0.75)
    assert whole["most_frequent"] == 0.75
    assert whole["chance"] == pytest.approx(1 / 3)
    answer = json.loads(tool.decider.decide(json.dumps({"state": "Ticket 1", "questions": QUESTIONS}).encode()))
    top = max(answer["answers"]["team"]["probabilities"].values())
    assert whole["calibration_error"] == pytest.approx(abs(top - 0.75))
    assert (of_question["name"], of_question["options"]) == ("Which team?", list(OPTIONS))
    assert of_question["confusion"] == [[0, 0, 0], [0, 0, 2], [0, 0, 6]]


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--min-accuracy", "0.75"], 0, ""),
        (["--min-accuracy", "0.76"], 1, "accuracy 0.7500 is below --min-accuracy 0.76"),
        (["--max-ece", "1"], 0, ""),
        (["--max-ece", "0"], 1, "is above --max-ece 0.0"),
        (["--min-accuracy", "2"], 2, "--min-accuracy"),
        (["--orders", "9"], 2, "--orders"),
    ],
)
def test_a_gate_decides_the_exit_code(tool: Tool, source: Path, flags: list[str], code: int, said: str) -> None:
    assert tool("evaluate", source, *flags) == code
    assert said in tool.err


def test_bad_rows_are_named_and_the_rest_is_used(tool: Tool, source: Path) -> None:
    with source.open("a") as file:
        file.write("nonsense\n" + line(9, team="nobody"))
    assert tool("evaluate", source) == 1
    assert "line 9: " in tool.err
    assert "line 10: answers.team" in tool.err.replace("body.", "")
    assert json.loads(tool.out)["figures"][0]["num_rows"] == 8


def test_a_file_without_labels_is_refused_before_the_model_is_loaded(tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(line(1))
    assert tool("evaluate", path) == 2
    assert "holds no labelled row" in tool.err
    assert not tool.configs


def test_the_report_stands_alone_and_obeys_no_text_of_the_rows(tool: Tool, source: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    source.write_text(source.read_text().replace("Which team?", "<script>alert(1)</script>"))
    assert tool("evaluate", source, "--report", report) == 0
    html = report.read_text()
    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html
    assert "http" not in html
    assert html.count("<svg") == 4
    assert "75.0%" in html


def test_a_stopped_run_goes_on_and_asks_nothing_twice(source: Path, tmp_path: Path) -> None:
    kept_at = str(tmp_path / "answers.jsonl")
    rows = tool_evaluate.read_rows(str(source))
    first = tool_evaluate.KeptAnswers(kept_at, "a model")
    with pytest.raises(StartupError, match="gone"):
        tool_evaluate.ask_all(rows, Counting(fails_at=4), first)
    first.close()
    num_kept = len(Path(kept_at).read_bytes().splitlines())
    with open(kept_at, "ab") as file:
        file.write(b'{"request":"half')  # killed in the middle of a write
    again, ask = tool_evaluate.KeptAnswers(kept_at, "a model"), Counting()
    cases = tool_evaluate.ask_all(rows, ask, again)
    again.close()
    assert (len(cases), len(ask.asked)) == (8, 8 - num_kept)
    assert len(Path(kept_at).read_bytes().splitlines()) == 8
    other = tool_evaluate.KeptAnswers(kept_at, "another model")
    assert other.get(rows.good[0].body) is None
    other.close()


def test_a_foreign_file_of_answers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Anna\n")
    with pytest.raises(StartupError, match="not from a run"):
        tool_evaluate.KeptAnswers(str(path), "a model")
    assert path.read_text() == "Dear Anna\n"


def test_a_full_disk_is_said_and_keeps_what_was_written(source: Path) -> None:
    rows = tool_evaluate.read_rows(str(source))
    kept = tool_evaluate.KeptAnswers("/dev/full", "a model")
    with pytest.raises(StartupError, match="No space left"):
        tool_evaluate.ask_all(rows, Counting(), kept)
    kept.close()


def test_a_refused_row_is_named_and_the_rest_is_used(source: Path) -> None:
    rows, ask = tool_evaluate.read_rows(str(source)), Counting()

    def refuse_one(body: bytes) -> bytes:
        if b"Ticket 2" in body:
            raise BadRequest("the prompt is too long")
        return ask(body)

    assert len(tool_evaluate.ask_all(rows, refuse_one, tool_evaluate.KeptAnswers(None, ""))) == 7
    assert rows.bad == ["line 3: the prompt is too long"]


def test_an_answer_that_hangs_on_the_order_is_counted_as_a_flip(source: Path) -> None:
    """The answers favour the last option, whichever it is."""
    rows, ask = tool_evaluate.read_rows(str(source)), Counting()
    cases = tool_evaluate.ask_all(rows, ask, tool_evaluate.KeptAnswers(None, ""), num_orders=3)
    assert len(ask.asked) == 3 * 8
    assert all(case.has_flipped for case in cases)
    orders = {tuple(json.loads(body)["questions"]["team"]["criteria"]) for body in ask.asked[:24]}
    assert orders == {("billing", "sales", "other"), ("other", "sales", "billing"), ("sales", "other", "billing")}


def test_two_servers_are_compared_on_the_same_rows(source: Path) -> None:
    rows = tool_evaluate.read_rows(str(source))
    here = tool_evaluate.ask_all(rows, Counting(), tool_evaluate.KeptAnswers(None, ""))

    def always_sales(body: bytes) -> bytes:
        return b'{"answers":{"team":{"probabilities":{"billing":0,"sales":1,"other":0}}}}'

    there = tool_evaluate.ask_all(rows, always_sales, tool_evaluate.KeptAnswers(None, ""))
    comparison = tool_evaluate.compare(here, there, "the other")
    assert comparison is not None
    assert (comparison.num_rows, comparison.difference) == (8, 0.5)
    assert np.isclose(comparison.p_value, 0.2890625)  # McNemar: 6 better, 2 worse
