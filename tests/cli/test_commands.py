"""`python -m onepass ask`, `doctor` and `bench`, and what all commands share."""

from __future__ import annotations

import json
import os
import pty
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from onepass import __main__ as onepass
from onepass.cli import bench as tool_bench
from onepass.cli import doctor as tool_doctor
from onepass.config import Config
from onepass.decider import Decider
from onepass.errors import StartupError, explain
from tests.support.live import Server
from tests.support.tool import PATIENCE_S, ROOT, Tool, clean_environment, start

ASKED = ("--noul", "refund=Does the customer want a refund?", "--choice", "Which team?", "billing=Money, parcels")
STATE = "I was charged twice and want a refund."
REQUEST = {
    "state": STATE,
    "questions": {
        "refund": {"type": "noul", "instructions": "Does the customer want a refund?"},
        "q2": {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "Money", "parcels": None}},
    },
}


@pytest.fixture(scope="module")
def decider() -> Iterator[Decider]:
    with Decider(Config()) as decider:
        yield decider


@pytest.fixture
def tool(decider: Decider, capfdbinary: pytest.CaptureFixture[bytes]) -> Tool:
    return Tool(decider, capfdbinary)


def answers(document: bytes) -> Any:
    return json.loads(document)["answers"]


def test_ask_answers_as_the_server_does(live: Server, tmp_path: Path) -> None:
    """A process of its own, its output piped; the state from a file, whose last line end is not part of it."""
    state = tmp_path / "state.txt"
    state.write_text(STATE + "\n")
    with start("ask", f"@{state}", *ASKED) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, b"")
    status, served = live.post(REQUEST)
    assert status == 200
    assert answers(out) == served["answers"]


def test_a_running_server_is_asked_and_a_terminal_sees_bars(live: Server) -> None:
    leader, follower = pty.openpty()
    with start("ask", STATE, *ASKED, "--url", live.url, stdout=follower) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 65536):
                shown += chunk
        except OSError:  # Linux's way to say that the other side is closed
            os.close(leader)
        assert process.wait(PATIENCE_S) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    served = live.post(REQUEST)[1]["answers"]
    assert "refund  Does the customer want a refund?" in text
    assert f"{served['refund']['noul']:.1%} yes" in text
    assert re.search(rf"billing\s+━.*{served['q2']['probabilities']['billing']:.1%}", text)
    assert "onepass-starter, " in text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{live}", "--url {live}: 401: the API key is missing or wrong; send it as: Authorization: Bearer KEY"),
        ("http://127.0.0.1:1", "--url http://127.0.0.1:1: [Errno 111] Connection refused"),
        ("nonsense", "--url nonsense: unknown url type: 'nonsense/v1/systemone'"),
        ("{live}/health", "--url {live}/health: 404: Not Found"),
    ],
)
def test_a_server_that_gives_no_answer_is_one_line(url: str, message: str, locked: Server, tool: Tool) -> None:
    assert tool("ask", STATE, *ASKED, "--url", url.format(live=locked.url)) == 2
    assert tool.err == f"onepass: {message.format(live=locked.url)}\n"


def test_the_key_for_a_server_comes_from_the_environment(
    locked: Server, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEPASS_API_KEY", "sesame")
    assert tool("ask", STATE, *ASKED, "--url", locked.url + "/") == 0
    assert list(answers(tool.out)) == ["refund", "q2"]


def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stdin"
    path.write_bytes(content)
    monkeypatch.setattr(sys, "stdin", path.open(encoding="utf-8"))


@pytest.mark.parametrize(
    ("arguments", "content", "state"),
    [
        (["text"], b"", "text"),
        (["@@home"], b"", "@home"),
        ([], b"\xef\xbb\xbfpiped\r\n", "piped"),
        (["-"], b"two\n\n", "two\n"),
        (["@file"], b"", "é"),
        (["--state-json", '{"a": 1.0}'], b"", {"a": 1.0}),
        (["--state-json"], b'["x"]\n', ["x"]),
    ],
)
def test_where_a_state_comes_from(
    arguments: list[str], content: bytes, state: Any, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("é\n", encoding="utf-8")
    stdin(monkeypatch, tmp_path, content)
    try:
        assert tool("ask", *arguments, "--noul", "q=Is it?") == 0
    finally:
        sys.stdin.close()
    asked = tool.decider.ask(state, {"q": {"type": "noul", "instructions": "Is it?"}})
    assert answers(tool.out) == asked["answers"]


def test_questions_of_every_kind_and_way_in(tool: Tool, tmp_path: Path) -> None:
    file = tmp_path / "questions.json"
    questions: dict[str, Any] = {"first": {"type": "noul", "instructions": "Is it x=1?", "criteria": {"yes": "It is"}}}
    file.write_text(json.dumps(questions))
    flags = ("--score", "How bad?", "low, high", "--noul", "Is it x=1?", "--choice", "c=", '{"a,b": null, "c": ["d"]}')
    assert tool("ask", "x", "--questions", file, *flags, "--encoding", "joint") == 0
    questions["q2"] = {"type": "score", "instructions": "How bad?", "criteria": ["low", "high"]}
    questions["q3"] = {"type": "noul", "instructions": "Is it x=1?"}
    questions["c"] = {"type": "choice", "instructions": "", "criteria": {"a,b": None, "c": ["d"]}}
    assert tool.configs[0].encoding == "joint"
    assert answers(tool.out) == tool.decider.ask("x", questions)["answers"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["x"], 2, "there is no question: ask with --noul, --choice, --score or --questions FILE"),
        (["x", "--choice", "Which?", "a,,b"], 2, "--choice 'a,,b': there is nothing between two commas; write a comma in a text as JSON"),
        (["x", "--choice", "Which?", "a,a=b"], 2, "--choice 'a,a=b': the option 'a' stands twice"),
        (["x", "--choice", "Which?", "{"], 2, "--choice: must be JSON: Expecting property name enclosed in double quotes (column 2)"),
        (["x", "--choice", "Which?", "[]"], 1, "questions.q1.choice.criteria: must be an object of 1 to 255 labels, each with a description (string, object or array) or null"),
        (["x", "--score", "How?", ",".join("abcdefghijk")], 1, "questions.q1.score.criteria: must be an array of 1 to 10 levels, low to high, each a string, an object or an array, not 11 levels"),
        (["x", "--noul", "a=A?", "--noul", "a=B?"], 2, "--noul: there are two questions named 'a'"),
        (["x", "--noul", ""], 1, "questions.q1.noul.instructions: a noul needs instructions, or criteria with a description of true or false"),
        (["x", "--noul", "?", "--score", "?", "{}", "--choice", "?", "[]"], 1, "questions.q2.score.criteria: must be an array of 1 to 10 levels, low to high, each a string, an object or an array (and 1 more)"),
        (["x\udcff", "--noul", "?"], 1, "state: must not hold a lone surrogate"),
        (["@missing", "--noul", "?"], 2, "state missing cannot be read: No such file or directory"),
        (["@.", "--noul", "?"], 2, "state . cannot be read: Is a directory"),
        (["@latin", "--noul", "?"], 2, "state: latin is not UTF-8 text (byte 1)"),
        (["@latin", "--noul", "?", "--state-json"], 2, "latin: must be JSON in UTF-8 (column 2)"),
        (["--state-json", "{", "--noul", "?"], 2, "the state: must be JSON: Expecting property name enclosed in double quotes (column 2)"),
        (["--state-json", "1", "--noul", "?"], 1, "state: must be a string, an object or an array"),
        (["x", "--noul", "?", "--questions", "missing"], 2, "--questions missing cannot be read: No such file or directory"),
        (["x", "--noul"], 2, "argument --noul: expected one argument (see --help)"),
        (["x", "--noul", "?", "--dtype", "int8"], 2, "--dtype must be one of auto, float32, bfloat16, float16, not 'int8'"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_the_field(
    arguments: list[str], code: int, message: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"a\xe9")
    assert tool("ask", *arguments) == code
    assert (tool.out, tool.err) == (b"", f"onepass: {message}\n")


def test_what_an_error_body_says_is_one_line_whoever_wrote_it() -> None:
    assert explain([{"loc": ["body"], "msg": "no", "type": "x"}]) == "no"
    assert explain({"error_type": "x", "message": "no"}) == "no"
    assert explain("Not Found") == "Not Found"
    assert explain({"error": "x"}) == "{'error': 'x'}"


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path, tool: Tool) -> None:
    for command in (["ask", "x", "--noul", "?"], ["bench"]):
        assert tool(*command, "--model", str(tmp_path), open_decider=onepass.load_decider) == 2
        assert tool.err == f"onepass: --model {tmp_path} is not a checkpoint: it has no config.json\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), onepass.EXIT_INTERRUPTED, "onepass: interrupted\n"),
        (ImportError("No module named 'x'"), 2, "onepass: No module named 'x': python -m pip install -r requirements.txt"),
    ],
)  # fmt: skip
def test_what_stops_a_command_is_said_without_a_traceback(
    error: BaseException, code: int, text: str, tool: Tool
) -> None:
    def fail(_: Config) -> Any:
        raise error

    assert tool("ask", "x", "--noul", "?", open_decider=fail) == code
    assert tool.err.startswith(text)
    assert "Traceback" not in tool.err


def test_a_closed_output_is_said_before_anything_is_done(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert tool("ask", "x", "--noul", "?") == 2
    assert tool.err == "onepass: standard output is closed\n"


def test_a_full_disk_behind_the_output_is_said_in_one_line() -> None:
    with open("/dev/full", "wb") as full, start("doctor", "--no-load", stdout=full) as process:
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b"onepass: standard output cannot be written: No space left on device\n"


def test_labels_cannot_give_a_terminal_orders(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert tool("ask", "x", "--choice", "\x1b[2J[bold]?", "\x1b]0;title\x07,[red]b") == 0
    shown = tool.out.decode()
    assert "\\x1b[2J[bold]?" in shown
    assert "\\x1b]0;title\\x07" in shown
    assert "[red]b" in shown
    assert not re.search(r"\x1b(?!\[[0-9;]*m)", shown)


def test_an_old_python_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"onepass: Python 3\.11 or newer is needed; this is "):
        runpy.run_path(str(ROOT / "onepass" / "__main__.py"))


def doctor(tool: Tool, *flags: str) -> dict[str, dict[str, str]]:
    code = tool("doctor", "--json", *flags)
    checks = {check["name"]: check for check in json.loads(tool.out)}
    assert code == (1 if any(check["status"] == "fail" for check in checks.values()) else 0)
    for check in checks.values():
        assert bool(check["advice"]) == (check["status"] in ("warn", "fail")), check
    return checks


def test_a_sound_machine_gets_a_clean_bill(tool: Tool) -> None:
    checks = doctor(tool, "--port", "0", "--device", "cpu")
    assert {name: check["status"] for name, check in checks.items()} == dict.fromkeys(
        ("python", "packages", "settings", "port 0", "key", "open files", "device", "dtype", "checkpoint", "memory", "answer"),
        "ok",
    )  # fmt: skip
    assert re.search(r"\d+ files are as its manifest says", checks["checkpoint"]["found"])
    assert "million weights" in checks["memory"]["found"]


def test_the_table_names_every_check_and_what_to_do(tool: Tool) -> None:
    assert tool("doctor", "--no-load", "--port", "0", "--host", "203.0.113.1") == 1
    lines = tool.out.decode().splitlines()
    assert any(re.match(r"ok +checkpoint +onepass-starter", line) for line in lines)
    failed = next(number for number, line in enumerate(lines) if line.startswith("fail"))
    assert lines[failed].endswith("port 0      203.0.113.1:0: Cannot assign requested address")
    assert lines[failed + 1].strip() == "-> give an address of this machine as --host; 0.0.0.0 listens on all"


def test_a_port_that_is_taken(tool: Tool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        checks = doctor(tool, "--no-load", "--port", str(port))
    assert checks[f"port {port}"]["status"] == "fail"
    assert "Address already in use" in checks[f"port {port}"]["found"]
    assert checks["checkpoint"]["status"] == "ok"


def test_a_variable_of_kubernetes_is_recognised(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_PORT", "tcp://10.0.0.1:80")
    checks = doctor(tool, "--no-load", "--host", "203.0.113.1")
    assert checks["settings"]["status"] == "warn"
    assert "enableServiceLinks: false" in checks["settings"]["advice"]
    assert "port 8017" in checks
    monkeypatch.setenv("ONEPASS_PORT", "x")
    assert "change the flag" in doctor(tool)["settings"]["advice"]


def test_a_mistyped_variable_is_said_by_every_command(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_API_KEYS", "sesame")
    said = "the environment variable ONEPASS_API_KEYS is no setting; did you mean ONEPASS_API_KEY?"
    assert doctor(tool)["settings"]["found"] == said
    for command in (["ask", "x", "--noul", "?"], ["ask", "x", "--noul", "?", "--url", "http://127.0.0.1:1"], ["bench"]):
        assert tool(*command) == 2
        assert tool.err == f"onepass: {said}\n"


def test_the_place_of_a_unix_socket_is_looked_at(tool: Tool, tmp_path: Path) -> None:
    path = tmp_path / "onepass.sock"

    def look(at: Path) -> tuple[str, str]:
        check = doctor(tool, "--no-load", "--uds", str(at))["socket"]
        return check["status"], check["found"]

    assert look(path) == ("ok", f"{path} is free")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert look(path) == ("ok", f"{path} is stale")
        server.listen()
        assert look(path) == ("fail", f"{path}: a process listens there")
    path.unlink()
    path.write_text("precious")
    assert look(path) == ("fail", f"{path} is there and is not a socket")
    assert look(tmp_path / "no" / "x.sock") == ("fail", f"{tmp_path}/no/x.sock: no socket can be made in {tmp_path}/no")
    assert look(tmp_path / ("x" * 120))[0] == "fail"


def test_a_server_open_to_all_is_warned_of(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor(tool, "--no-load", "--port", "0", "--host", "0.0.0.0")["key"]["status"] == "warn"
    monkeypatch.setenv("ONEPASS_API_KEY", "sesame")
    assert doctor(tool, "--no-load", "--port", "0", "--host", "0.0.0.0")["key"]["status"] == "ok"


def test_checkpoints_that_cannot_be_served(tool: Tool, tmp_path: Path, chat_checkpoint: Path) -> None:
    def look(model: object) -> dict[str, dict[str, str]]:
        return doctor(tool, "--port", "0", "--device", "cpu", "--model", str(model))

    checks = look(tmp_path)
    assert checks["checkpoint"]["found"].endswith("is not a checkpoint: it has no config.json")
    assert checks["answer"]["status"] == "skip"
    assert look("org/never-heard-of")["checkpoint"]["status"] == "skip"
    checks = doctor(tool, "--no-load", "--port", "0", "--model", str(chat_checkpoint))
    assert checks["checkpoint"]["status"] == "warn"
    assert "no manifest" in checks["checkpoint"]["found"]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"no")
    checks = look(tmp_path)
    assert checks["memory"]["status"] == "fail"
    assert checks["answer"]["status"] == "skip"
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert "config.json could be loaded but is not listed" in look(tmp_path)["checkpoint"]["found"]


def test_a_model_that_does_not_fit_is_not_loaded(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_doctor, "available_bytes", lambda: 100 << 20)
    checks = doctor(tool, "--port", "0", "--device", "cpu")
    assert checks["memory"]["status"] == "fail"
    assert checks["answer"]["status"] == "skip"
    assert tool.configs == []


def test_a_model_that_does_not_answer(tool: Tool) -> None:
    def fail(_: Config) -> Any:
        raise StartupError("the model's scores are not numbers; try --dtype float32")

    assert tool("doctor", "--json", "--port", "0", "--device", "cpu", open_decider=fail) == 1
    (answer,) = (check for check in json.loads(tool.out) if check["name"] == "answer")
    assert answer["found"] == "the model's scores are not numbers; try --dtype float32"


def test_a_device_that_is_not_there(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    checks = doctor(tool, "--port", "0", "--device", "cuda")
    assert checks["device"]["status"] == "fail"
    assert checks["answer"]["status"] == "skip"


def test_a_cpu_that_emulates_bfloat16_is_warned_of(tool: Tool, tmp_path: Path) -> None:
    flags = tmp_path / "cpuinfo"
    flags.write_text("flags\t: sse avx2 avx512_bf16 f16c\n")
    assert tool_doctor.has_bfloat16(flags)
    flags.write_text("flags\t: sse avx2 avx512f\n")
    assert not tool_doctor.has_bfloat16(flags)
    expected = "ok" if tool_doctor.has_bfloat16(Path("/proc/cpuinfo")) else "warn"
    assert (
        doctor(tool, "--no-load", "--port", "0", "--device", "cpu", "--dtype", "bfloat16")["dtype"]["status"]
        == expected
    )


def test_kernels_that_do_not_import_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    check = tool_doctor.check_kernels()
    assert check.status == "fail"
    assert "requirements-cuda.txt" in check.advice


def test_packages_that_are_missing_or_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_doctor, "find_shipped", lambda name: tmp_path / name)
    (tmp_path / "r.txt").write_text(
        '# why\n-r other.txt\nnever-heard-of==1.0\ntorch==1.0\npytest[x]==2;python_version<"3.0"\n'
    )
    everything, missing, other = tool_doctor.check_packages("r.txt")
    assert everything.found == "0 of r.txt are there in the tested version"
    assert (missing.name, missing.status, missing.found) == ("package never-heard-of", "fail", "missing; 1.0 is needed")
    assert (other.name, other.status) == ("package torch", "warn")
    assert other.advice == "python -m pip install -r r.txt"


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-cuda.txt"])
def test_every_requirement_can_be_read(file: str) -> None:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    assert len(list(tool_doctor.read_requirements(ROOT / file))) >= len(lines) - 1  # one is for an older Python


def test_doctor_runs_where_no_package_is_installed() -> None:
    command = [sys.executable, "-S", "-m", "onepass", "doctor"]
    found = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert found.returncode == 1
    assert found.stderr == ""
    assert re.search(
        r"fail +package torch +missing; .* is needed\n +-> python -m pip install -r requirements.txt", found.stdout
    )
    assert re.search(r"skip +model +not looked at: packages are missing", found.stdout)


def test_bench_measures_every_cell(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_bench, "CALLERS", (1, 3))
    assert tool("bench", "--seconds", "0.1") == 0
    document = json.loads(tool.out)
    assert document["model"] == "onepass-starter"
    cells = [(cell["state"], cell["questions"], cell["callers"]) for cell in document["results"]]
    assert cells == [
        (state, questions, callers) for state in ("short", "long") for questions in (1, 6) for callers in (1, 3)
    ]
    for cell in document["results"]:
        assert cell["requests"] >= cell["callers"] * tool_bench.MIN_REQUESTS
        assert 0 < cell["p50_ms"] <= cell["p95_ms"]
        assert cell["requests_per_s"] > 0
        assert cell["questions_per_s"] == pytest.approx(cell["requests_per_s"] * cell["questions"], rel=0.01)
        assert not cell["failed"]


def test_bench_shows_what_it_measured_before_it_was_interrupted(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_: Any, bodies: Iterator[bytes], planned: tool_bench.Result, __: float) -> tool_bench.Result:
        if planned.callers == 16:
            raise KeyboardInterrupt
        return tool_bench.replace(planned, p50_ms=12.34)

    monkeypatch.setattr(tool_bench, "measure", measure)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert tool("bench") == onepass.EXIT_INTERRUPTED
    shown = tool.out.decode()
    assert "onepass-starter on cpu" in shown
    assert shown.count("12.3") == 2


@pytest.mark.parametrize("seconds", ["-5", "nan", "3601", "x"])
def test_bench_takes_a_sane_time(tool: Tool, seconds: str) -> None:
    assert tool("bench", "--seconds", seconds) == onepass.EXIT_USAGE
    assert "--seconds" in tool.err


def test_bench_says_why_a_cell_cannot_be_measured(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_bench, "CALLERS", (1,))
    with Decider(Config(max_prompt_tokens=300)) as decider:
        tool = Tool(decider, capfdbinary)
        assert tool("bench", "--seconds", "0") == 0
    failed = {cell["state"]: cell["failed"] for cell in json.loads(tool.out)["results"]}
    assert failed["short"] == ""
    assert re.fullmatch(r"question 'refund': the prompt has \d+ tokens; the limit is 300", failed["long"])


def test_the_settings_left_out_are_settings() -> None:
    assert {item.name for item in fields(Config)} >= onepass.HTTP_SETTINGS
    assert {"model", "dtype", "verbose"} <= onepass.MODEL_SETTINGS
