"""`python -m onepass batch`: every line answered once, in order, whatever the file holds and however often it is stopped."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onepass import __main__ as onepass
from onepass.cli import batch as tool_batch
from onepass.cli import files as tool_files
from onepass.config import Config
from onepass.decider import Decider
from onepass.edge import framing
from tests import test_decider
from tests.support.tool import PATIENCE_S, Tool, start

QUESTIONS = {"late": {"type": "noul", "instructions": "Is it late?"}}


@pytest.fixture(scope="module")
def decider() -> Iterator[Decider]:
    """The real prompts of the starter, scores that are known: option i of a question gets i."""
    with test_decider.running() as running:
        yield running


@pytest.fixture
def tool(decider: Decider, capfdbinary: pytest.CaptureFixture[bytes]) -> Tool:
    return Tool(decider, capfdbinary)


def line(number: int, **fields: Any) -> str:
    return json.dumps({"state": f"Parcel {number} is late.", "questions": QUESTIONS, **fields}) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def numbers(path: Path) -> list[int]:
    return [answer["line"] for answer in read(path)]


def test_every_line_is_answered_in_order_with_its_id(tool: Tool, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = ["a", 7, "a", None, "é"]  # ids are the caller's: twice the same is no matter
    source.write_text("".join(line(n, **({} if id_ is None else {"id": id_})) for n, id_ in enumerate(ids)))
    assert tool("batch", source, "--output", output) == 0
    answers = read(output)
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5]
    assert [answer.get("id") for answer in answers] == ids
    assert list(answers[0]) == ["line", "sum", "id", "model", "answers", "usage", "x_latency_ms"]
    assert answers[0]["answers"] == json.loads(tool.decider.decide(line(0).encode()))["answers"]
    assert "5 lines answered" in tool.err
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_states_share_the_questions_of_a_file(tool: Tool, tmp_path: Path) -> None:
    source, output, questions = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "q.json"
    questions.write_bytes(b"\xef\xbb\xbf" + json.dumps(QUESTIONS).encode())
    states: list[Any] = [
        "a text",
        ["a", "list"],
        {"state": {"a": "mail"}, "id": 3},
        {"state": "x", "encoding": "joint"},
    ]
    source.write_text("\n".join(map(json.dumps, states)))
    assert tool("batch", source, "--output", output, "--questions", questions) == 0
    answers = read(output)
    assert [answer.get("id") for answer in answers] == [None, None, 3, None]
    for state, answer in zip(states, answers, strict=True):
        request = state if isinstance(state, dict) else {"state": state}
        alone = json.loads(tool.decider.decide(json.dumps({**request, "questions": QUESTIONS}).encode()))
        assert (answer["answers"], answer["usage"]) == (alone["answers"], alone["usage"])


BAD_LINES = {
    "not JSON": (b"not json", "the body must be JSON: Expecting value (column 1)"),
    "not UTF-8": (b'{"state": "\xff"}', "the body must be JSON in UTF-8 (column 12)"),
    "a mark that is not at the beginning of the file": (
        b"\xef\xbb\xbf" + line(1).encode(),
        "the body must not begin with a byte-order mark (column 1)",
    ),
    "no questions": (b'{"state": "x"}', "questions: is required and must be an object of 1 to 512 questions by id"),
    "a bad question": (
        line(1, questions={"q": {"type": "score", "criteria": {}}}).encode(),
        "questions.q.score.criteria: must be an array of 1 to 10 levels, low to high, each a string, an object or an array",
    ),
    "a question with a line end in its id": (
        line(1, questions={"q\n\x1b[2J": {"type": "noul"}}).encode(),
        "questions.q\\n\\x1b[2J.noul.instructions: a noul needs instructions, or criteria with a description of true or false",
    ),
    "an id that is none": (
        line(1, id=[1]).encode(),
        "id: must be a whole number or a string of at most 1024 characters",
    ),
    "a key twice": (b'{"state": "x", "state": "y", "questions": {}}', "state: must not stand twice"),
}


@pytest.mark.parametrize(("content", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_reported_by_number_and_kept_apart(
    content: bytes, message: str, tool: Tool, tmp_path: Path
) -> None:
    source, output, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    source.write_bytes(line(1).encode() + content.rstrip(b"\n") + b"\n" + line(3).encode())
    assert tool("batch", source, "--output", output) == 1
    assert tool.err.splitlines()[0] == f"onepass: line 2: {message}"
    assert tool.err.splitlines()[1].endswith(f"1 bad: see {errors}")
    assert len(tool.err.splitlines()) == 2
    assert numbers(output) == [1, 3]
    (kept,) = read(errors)
    assert kept["line"] == 2
    assert kept["error"]["status"] in (400, 422)
    assert kept["input"] == content.rstrip(b"\n").decode("utf-8", "backslashreplace")


def test_a_prompt_that_is_too_long_is_a_bad_line(tool: Tool, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line(1, state="word " * 1500))
    assert tool("batch", source) == 1
    assert re.match(r"onepass: line 1: the prompt has \d+ tokens; the limit is 1000\n", tool.err)


def test_lines_that_do_not_go_with_shared_questions(tool: Tool, tmp_path: Path) -> None:
    source, questions = tmp_path / "in.jsonl", tmp_path / "q.json"
    questions.write_text(json.dumps(QUESTIONS))
    source.write_text('{"text": "x"}\n7\n{"state": "x", "questions": {}}\n{"state": 1}\n{"state": "", "state": ""}\n')
    assert tool("batch", source, "--questions", questions) == 1
    assert tool.out == b""
    assert [text.partition(": ")[2] for text in tool.err.splitlines()[:5]] == [
        "line 1: the line must be a state (a string or an array) or an object with a state",
        "line 2: the line must be a state (a string or an array) or an object with a state",
        "line 3: questions: must not stand in a line where --questions gives them for all",
        "line 4: state: must be a string, an object or an array",
        "line 5: state: must not stand twice",
    ]


def test_a_mended_line_is_answered_the_next_time(tool: Tool, tmp_path: Path) -> None:
    source, output, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    source.write_text(line(1) + "{}\n" + line(3))
    assert tool("batch", source, "--output", output) == 1
    assert tool("batch", source, "--output", output) == 1  # still bad
    assert len(read(errors)) == 1
    source.write_text(line(1) + line(2) + line(3))
    assert tool("batch", source, "--output", output) == 0
    assert numbers(output) == [1, 3, 2]
    assert not errors.exists()


def test_line_ends_marks_and_blank_lines_do_not_matter(tool: Tool, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + line(1).replace("\n", "\r\n").encode() + b"\r\n  \n\n" + line(5)[:-1].encode())
    assert tool("batch", source) == 0
    assert [json.loads(text)["line"] for text in tool.out.splitlines()] == [1, 5]


def test_nothing_in_gives_nothing_out(tool: Tool, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"")
    assert tool("batch", source, "--output", output) == 0
    assert output.read_bytes() == b""
    assert "0 lines answered, 0 bad" in tool.err


def test_a_line_longer_than_a_request_may_be_is_passed_over(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_files, "MAX_BODY_BYTES", 300)
    monkeypatch.setattr(tool_batch, "MAX_BODY_BYTES", 300)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    just = line(2)
    source.write_text(line(1) + "x" * 5_000_000 + "\n" + just + " " * (301 - len(just)) + "\n" + "y" * 301)
    assert tool("batch", source, "--output", output) == 1
    assert numbers(output) == [1, 3]
    assert [(bad["line"], bad["input"]) for bad in read(tmp_path / "out.errors.jsonl")] == [(2, None), (5, None)]
    assert "line 2: the line is longer than 300 bytes" in tool.err
    assert framing.MAX_BODY_BYTES == 32 << 20


def test_only_the_first_bad_lines_are_shown_and_all_are_kept(tool: Tool, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("{}\n" * 50)
    assert tool("batch", source, "--output", output) == 1
    shown = tool.err.splitlines()
    assert len(shown) == tool_files.MAX_SHOWN_ERRORS + 2
    assert shown[-2] == "onepass: and more bad lines"
    assert numbers(tmp_path / "out.errors.jsonl") == list(range(1, 51))


@pytest.mark.parametrize("cut", [1, 20, 10_000])
def test_a_torn_last_line_is_done_again(cut: int, tool: Tool, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(map(line, range(1, 9))))
    assert tool("batch", source, "--output", output) == 0
    whole = output.read_bytes()
    with output.open("r+b") as file:
        file.truncate(max(3, len(whole) - cut))
    assert tool("batch", source, "--output", output) == 0
    assert numbers(output) == list(range(1, 9))
    assert [answer["answers"] for answer in read(output)] == [
        json.loads(text)["answers"] for text in whole.splitlines()
    ]


def test_a_finished_run_has_nothing_left_and_a_longer_file_goes_on(tool: Tool, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(1) + line(2))
    assert tool("batch", source, "--output", output) == 0
    before = output.read_bytes()
    assert tool("batch", source, "--output", output) == 0
    assert output.read_bytes() == before
    assert "0 lines answered, 2 were answered before, 0 bad" in tool.err
    with source.open("a") as file:
        file.write(line(3))
    assert tool("batch", source, "--output", output) == 0
    assert output.read_bytes().startswith(before)
    assert numbers(output) == [1, 2, 3]


def test_an_answer_to_another_line_or_other_questions_stops_before_anything_is_written(
    tool: Tool, tmp_path: Path
) -> None:
    source, output, questions = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "q.json"
    questions.write_text(json.dumps(QUESTIONS))
    source.write_text('"one"\n"two"\n')
    assert tool("batch", source, "--output", output, "--questions", questions) == 0
    before = output.read_bytes()
    message = f"onepass: {output} holds an answer to line 2 that was made from another line"
    source.write_text('"one"\n"other"\n"three"\n')
    assert tool("batch", source, "--output", output, "--questions", questions) == 2
    assert tool.err.startswith(message)
    source.write_text('"one"\n"two"\n')
    questions.write_text(json.dumps({"late": {"type": "noul", "instructions": "Is it early?"}}))
    assert tool("batch", source, "--output", output, "--questions", questions) == 2
    assert tool.err.startswith(message.replace("line 2", "line 1"))
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read: No such file or directory"),
        (["."], ". cannot be read: it is a folder"),
        (["in.jsonl", "--output", "no/where.jsonl"], "no/where.jsonl cannot be written: No such file or directory"),
        (["in.jsonl", "--output", "."], ". cannot be read: it is a folder"),
        (["in.jsonl", "--output", "in.jsonl"], "in.jsonl cannot be written: it is the input or the output already"),
        (["in.jsonl", "--output", "out", "--errors", "out"], "out cannot be written: it is the input or the output already"),
        (["in.jsonl", "--output", "mine.txt"], "mine.txt exists and is not from a run of this command; name another file"),
        (["in.jsonl", "--output", "ours-then-not"], "ours-then-not:2 is not from a run of this command; name another file"),
        (["in.jsonl", "--output", "out", "--errors", "mine.txt"], "mine.txt exists and is not from a run of this command; name another file"),
        (["in.jsonl", "--questions", "missing.json"], "--questions missing.json cannot be read: No such file or directory"),
        (["in.jsonl", "--questions", "mine.txt"], "mine.txt: must be JSON: Expecting value (column 1)"),
        (["in.jsonl", "--questions", "twice.json"], "twice.json: questions: must not name 'q' twice"),
        (["in.jsonl", "--questions", "score.json"], "score.json: questions.q.score.criteria: is required and must be an array of 1 to 10 levels, low to high, each a string, an object or an array"),
        (["in.jsonl", "--max-batch-rows", "0"], "--max-batch-rows must be from 1 to 4096, not 0"),
        (["in.jsonl", "--port", "1"], "unrecognized arguments: --port 1 (see --help)"),
        ([], "the following arguments are required: input (see --help)"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_and_no_model_is_loaded(
    arguments: list[str], message: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "in.jsonl": line(1),
        "mine.txt": "my diary",
        "ours-then-not": '{"line":1,"sum":"00000001","model":""}\nmy diary\n',
        "twice.json": '{"q": {"type": "noul", "instructions": "?"}, "q": {}}',
        "score.json": '{"q": {"type": "score"}}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert tool("batch", *arguments) == 2
    assert tool.err == f"onepass: {message}\n"
    assert tool.configs == []
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_a_terminal_sees_how_far_it_is(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(1) + "{}\n")
    assert tool("batch", source, "--output", output) == 1
    assert "/2" not in tool.err
    source.write_text(line(1) + "{}\n" + line(3))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert tool("batch", source, "--output", output) == 1
    assert " 1/3 [" in tool.err  # one was answered before
    assert " 3/3 [" in tool.err
    assert "\ronepass: line 2: state: is required" in tool.err  # a line of its own, above the bar


def test_two_runs_do_not_write_one_file(tool: Tool, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(1))
    with output.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert tool("batch", source, "--output", output) == 2
    assert tool.err == f"onepass: {output} cannot be written: another run is writing it\n"


class Gated(test_decider.FakeEngine):
    """Once closed, holds the worker until it is opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()  # for the warm-up

    def forward(self, rows: list[Any]) -> list[list[list[float]]]:
        assert self.gate.wait(PATIENCE_S)
        return super().forward(rows)


@pytest.mark.parametrize(("flags", "order"), [([], [1, 2]), (["--unordered"], [2, 1])])
def test_answers_come_in_order_or_as_they_are_done(
    flags: list[str], order: list[int], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source, output, engine = tmp_path / "in.jsonl", tmp_path / "out.jsonl", Gated()
    three = dict.fromkeys("abc", QUESTIONS["late"])
    source.write_text(line(1, questions=three) + line(2))
    with test_decider.running(engine, max_batch_rows=1) as decider, pytest.MonkeyPatch.context() as patch:
        engine.gate.clear()
        submit = decider.submit

        def open_after_the_last(body: bytes) -> Any:
            pending = submit(body)
            if b"Parcel 2" in body:
                engine.gate.set()
            return pending

        patch.setattr(decider, "submit", open_after_the_last)
        tool = Tool(decider, capfdbinary)
        assert tool("batch", source, "--output", output, *flags) == 0
    assert numbers(output) == order  # requests take turns: the first has three of them


def test_a_bounded_number_of_lines_is_in_flight(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(number % 10) for number in range(1500)))
    submit, answer = tool.decider.submit, tool.decider.answer
    num_submitted = num_answered = most = 0

    def count_in(body: bytes) -> Any:
        nonlocal num_submitted, most
        num_submitted += 1
        most = max(most, num_submitted - num_answered)
        return submit(body)

    def count_out(pending: Any) -> Any:
        nonlocal num_answered
        num_answered += 1
        return answer(pending)

    monkeypatch.setattr(tool.decider, "submit", count_in)
    monkeypatch.setattr(tool.decider, "answer", count_out)
    assert tool("batch", source, "--output", output) == 0
    assert numbers(output) == list(range(1, 1501))
    assert 32 < most <= tool_batch.BATCHES_AHEAD * Config().max_batch_rows + 1


def test_lines_wait_while_the_queue_is_full(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    many = {f"q{number}": QUESTIONS["late"] for number in range(400)}
    source.write_text("".join(line(number, questions=many) for number in range(5)))
    with test_decider.running(max_queued_rows=512, max_batch_rows=128) as decider:
        assert Tool(decider, capfdbinary)("batch", source, "--output", output, "--max-batch-rows", 128) == 0
    assert numbers(output) == [1, 2, 3, 4, 5]


class Failing(test_decider.FakeEngine):
    """Fails on the row of that many tokens."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, rows: list[Any]) -> list[list[list[float]]]:
        if any(len(row.input_ids) > 300 for row in rows):
            raise self.error
        return super().forward(rows)


def test_a_line_the_model_fails_on_does_not_stop_the_others(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(1) + line(2, state="word " * 400) + line(3))
    with test_decider.running(Failing(RuntimeError("no"))) as decider:
        assert Tool(decider, capfdbinary)("batch", source, "--output", output) == 1
    assert numbers(output) == [1, 3]
    (bad,) = read(tmp_path / "out.errors.jsonl")
    assert bad["error"]["detail"]["error_type"] == "internal_error"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_worker_ends_the_run_and_the_next_one_goes_on(
    tool: Tool, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    class Death(BaseException):
        pass

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(1) + line(2, state="word " * 400) + line(3))
    with test_decider.running(Failing(Death()), max_batch_rows=1) as decider:
        broken = Tool(decider, capfdbinary)
        assert broken("batch", source, "--output", output) == 1
    assert "the model's worker has stopped" in broken.err.splitlines()[-1]
    assert broken.err.endswith("the same command goes on from there\n")
    assert numbers(output) in ([], [1])
    assert tool("batch", source, "--output", output) == 0
    assert numbers(output) == [1, 2, 3]


def test_a_full_disk_is_said_in_one_line(tool: Tool, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line(1))
    assert tool("batch", source, "--output", "/dev/full") == 1
    assert tool.err == (
        "onepass: the output cannot be written: No space left on device: 0 lines answered, 0 bad; "
        "the same command goes on from there\n"
    )


def test_an_interruption_leaves_whole_lines_and_the_next_run_does_the_rest(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(map(line, range(1, 301))))
    write = tool_files.Answers.write

    def interrupt_at_100(answers: tool_files.Answers, entry: tool_files.Line, body: bytes) -> None:
        write(answers, entry, body)
        if entry.number == 100:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tool_files.Answers, "write", interrupt_at_100)
    assert tool("batch", source, "--output", output) == onepass.EXIT_INTERRUPTED
    assert tool.err.startswith("onepass: interrupted: ")
    monkeypatch.undo()
    assert numbers(output) == list(range(1, len(numbers(output)) + 1))
    assert 100 <= len(numbers(output)) < 300
    assert tool("batch", source, "--output", output) == 0
    assert numbers(output) == list(range(1, 301))


@pytest.mark.parametrize(("flags", "signum"), [([], signal.SIGKILL), (["--unordered"], signal.SIGTERM)])
def test_a_killed_run_on_the_shipped_model_is_gone_on_with(
    flags: list[str], signum: int, tool: Tool, tmp_path: Path
) -> None:
    """A bad line, reported when its turn comes, says how far the run is."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(number, id=f"row {number}") for number in range(1, 301)]
    lines[59] = "{}\n"
    source.write_text("".join(lines))
    with start("batch", str(source), "--output", str(output), *flags) as process:
        assert process.stderr is not None
        assert b"line 60" in process.stderr.readline()
        process.send_signal(signum)
        assert process.wait(PATIENCE_S) == (-signum if signum == signal.SIGKILL else onepass.EXIT_INTERRUPTED)
    done = output.read_bytes()
    assert done.endswith(b"\n") or not done
    if not flags:
        assert 59 <= done.count(b"\n") < 299
        output.write_bytes(done[:-30])  # as if the last write had been cut
        done = done[: done[:-1].rindex(b"\n") + 1]
    assert tool("batch", source, "--output", output, *flags) == 1
    assert tool.err.splitlines()[-1].endswith(f"1 bad: see {tmp_path / 'out.errors.jsonl'}")
    assert output.read_bytes().startswith(done)  # what was done is not done again
    answers = read(output)
    assert sorted(numbers(output)) == [number for number in range(1, 301) if number != 60]
    assert flags or numbers(output) == sorted(numbers(output))
    assert all(answer["id"] == f"row {answer['line']}" for answer in answers)


def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(map(line, range(200))))
    with source.open("rb") as stdin, start("batch", "-", stdin=stdin) as process:
        head = subprocess.run(
            ["head", "-n", "2"], stdin=process.stdout, capture_output=True, timeout=PATIENCE_S, check=True
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE_S) == onepass.EXIT_CLOSED_PIPE
    assert [json.loads(text)["line"] for text in head.stdout.splitlines()] == [1, 2]
