"""Every page of docs/: commands and flags exist, Python runs, JSON is what it is said to be, links lead somewhere."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from onepass import __main__ as onepass
from onepass.cli import batch as tool_batch
from onepass.config import Config, _flags, flag_name
from onepass.decider import Decider
from onepass.decisions.labelled import read_row
from onepass.wire.schema import parse_request
from server import ROUTES
from tests.support.tool import ROOT, Tool
from tests.support.variables import VARIABLES

PAGES = sorted(ROOT.glob("docs/*.md"))
ALL_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^```([a-z]*)(?: (\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What the pages may call beside our own programs
FOREIGN = frozenset(
    [
        "cd",
        "cp",
        "curl",
        "docker",
        "git",
        "install",
        "journalctl",
        "kubectl",
        "openssl",
        "sha256sum",
        "sudo",
        "systemctl",
    ]
)
FOREIGN_FILES = {"blink.py"}  # of checkpoints
FOREIGN_FLAGS = frozenset(("--help", "--no", "--tmpfs", "--gpus", "--unix-socket"))  # `--no-…` stands for every switch


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(file name after the language, content) of the fenced blocks."""
    return [(name, text) for kind, name, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(block: str) -> Iterator[list[str]]:
    """The words of each command, those that pipes and `&&` join apart."""
    text = re.sub(r"(^|\s)#\s.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
    words: list[str] = []
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    for word in [*lexer, ";"]:
        if word and set(word) <= set("\n;&|"):
            if words:
                yield words
            words = []
        elif words or not re.fullmatch(r"\w+=.*", word):  # a variable before its command
            words.append(word)


def option_strings(parser: argparse.ArgumentParser) -> set[str]:
    """Of the parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= option_strings(command)
    return found


def flags_of(script: str) -> set[str]:
    if script == "onepass":
        return option_strings(onepass.make_parser())
    if script == "server.py":
        flags = {flag_name(item) for item in _flags()}
        return flags | {flag.replace("--", "--no-", 1) for flag in flags}
    return set(re.findall(r'"(--[a-z-]+)"', (ROOT / script).read_text()))


ALL_FLAGS = set().union(
    *(flags_of(path.relative_to(ROOT).as_posix()) for folder in ("", "bench/", "train/") for path in ROOT.glob(f"{folder}*.py")),
    flags_of("server.py"),
    flags_of("onepass"),
)  # fmt: skip


def check_python(words: list[str]) -> None:
    if words[:2] in (["-m", "venv"], ["-m", "pytest"]):
        return
    script, *arguments = words
    if script == "-m":
        script, *arguments = arguments
        assert script == "onepass", script
    else:
        assert (ROOT / script).is_file(), script
    given = {word.split("=")[0] for word in arguments if word.startswith("--")}
    assert given <= flags_of(script), f"{script} {given - flags_of(script)}"
    if script == "onepass":
        onepass.make_parser().parse_args(arguments)


def check_command(words: list[str]) -> None:
    while words[0] == "sudo":
        words = words[1:]
    program = Path(words[0]).name
    if program in ("python", "python3"):
        check_python(words[1:])
    elif program == "pip":
        assert words[1] == "install"
    else:
        assert program in FOREIGN, words
    if program == "docker" and words[1] == "run":
        (place,) = (place for place, word in enumerate(words) if word.startswith("onepass:"))
        check_python(words[place + 1 :] or ["server.py"])
    for word in words:
        if word.startswith(("deploy/", "requirements")):
            assert (ROOT / word).is_file(), word
        if word.startswith("http://127.0.0.1"):
            assert "/" + word.split("/", 3)[3] in ROUTES, word


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_commands_and_their_flags_exist(page: Path) -> None:
    assert {kind for kind, _, _ in FENCE.findall(page.read_text())} <= {
        "",
        "sh",
        "python",
        "json",
        "jsonl",
        "text",
        "yaml",
    }
    for _, block in blocks(page, "sh"):
        for words in commands(block):
            check_command(words)


def test_a_command_that_does_not_exist_is_found() -> None:
    found = list(commands("A=1 python x.py --a \\\n 'b c' && cd d  # why\nls | wc"))
    assert found == [["python", "x.py", "--a", "b c"], ["cd", "d"], ["ls"], ["wc"]]
    for wrong in ("python nothere.py", "python server.py --colour", "rm -rf x", "docker run onepass:1 server.py --x"):
        with pytest.raises(AssertionError):
            check_command(next(commands(wrong)))


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_flags_and_variables_in_the_text_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    spans = re.findall(r"`([^`\n]+)`", text)
    named = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", span)}
    assert named <= ALL_FLAGS | FOREIGN_FLAGS, named - ALL_FLAGS - FOREIGN_FLAGS
    variables = set(re.findall(r"ONEPASS_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8")))
    assert variables <= VARIABLES, variables - VARIABLES
    for span in spans:
        for name in re.findall(r"(?:^|\s)((?:bench|train|tests|deploy|docs)/[\w./-]+\w|\w+\.py)(?=$|\s|,)", span):
            assert name in FOREIGN_FILES or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert not target.startswith("http"), f"{target}: nobody checks that it is still there"
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_data_is_what_it_is_said_to_be(page: Path) -> None:
    for _, text in blocks(page, "json"):
        value = json.loads(text)
        if "state" in value:
            parse_request(text.encode())
    for _, text in blocks(page, "jsonl"):
        lines = [line.encode() for line in text.splitlines()]
        if all(b'"answer' in line for line in lines):  # labelled
            assert all(read_row(number, line).labels for number, line in enumerate(lines, start=1))
            continue
        has_questions = all(b'"questions"' in line for line in lines)
        questions = None if has_questions else b'{"q": {"type": "noul", "instructions": "?"}}'
        for line in lines:
            parse_request(tool_batch.read_request(line, questions)[1])
    for _, text in blocks(page, "yaml"):
        yaml.safe_load(text)


@pytest.fixture(scope="module")
def decider() -> Iterator[Decider]:
    with Decider(Config()) as decider:
        yield decider


def test_the_librarys_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Block after block, as one program."""
    page = ROOT / "docs" / "library.md"
    program = "\n".join(text for _, text in blocks(page, "python"))
    exec(compile(program, page.name, "exec"), {})
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert 0 < float(first) < 1
    assert set(eval(second)) == {"billing", "delivery"}
    assert all(isinstance(answer, bool) for answer in eval(third))
    assert fourth == (
        "422 questions.q.score.criteria: must be an array of 1 to 10 levels, low to high, each a string, an object or an "
        "array, not 0 levels"
    )


def test_the_tools_page_runs_as_it_stands(
    decider: Decider, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are written, its commands run one after the other, and each does what is said."""
    page = ROOT / "docs" / "command-line.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onepass.cli.bench.CALLERS", (1,))
    monkeypatch.setenv("ONEPASS_PORT", "0")  # another server may be on the default one
    tool = Tool(decider, capfdbinary)
    for language in ("json", "jsonl", "text"):
        for name, text in blocks(page, language):
            (tmp_path / name).write_text(text, encoding="utf-8")
    ran = []
    for _, block in blocks(page, "sh"):
        for words in commands(block):
            words = [word if word != "30" else "0" for word in words[3:]]  # bench need not take its time here
            assert tool(*words) == 0, tool.err
            ran.append(words[0])
    assert ran == ["ask", "ask", "batch", "batch", "evaluate", "doctor", "bench"]
    assert [answer["id"] for answer in map(json.loads, Path("answers.jsonl").read_text().splitlines())] == ["a1", "a2"]
    decided = [json.loads(line) for line in Path("decided.jsonl").read_text().splitlines()]
    assert [(answer["line"], answer.get("id")) for answer in decided] == [(1, 17), (2, None)]
    assert list(decided[0]["answers"]) == ["refund", "team"]


def test_exit_codes_are_as_said() -> None:
    table = (ROOT / "docs" / "command-line.md").read_text().split("| exit code")[1].split("\n\n")[0]
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    assert codes == {0, onepass.EXIT_FAILURE, onepass.EXIT_USAGE, onepass.EXIT_INTERRUPTED, onepass.EXIT_CLOSED_PIPE}


def test_every_page_is_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tracked = subprocess.run(["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.split():
        assert f"]({name})" in readme, name
