"""The command line beside the server: `ask`, `batch`, `doctor` and `bench`, in process, over `onepass/decider.py`.

Reads the command line and says what went wrong. Each command's work is in its own `tool_*.py`, imported when it is
called for: `doctor` must run where nothing is installed yet.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said before what an older Python cannot read
    sys.exit(f"onepass: Python 3.11 or newer is needed; this is {sys.version.split()[0]} at {sys.executable}")

import argparse
import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onepass.config import Config, Parser, add_flags, read_config
from onepass.errors import ApiError, BadRequest, StartupError, explain
from onepass.logs import printable, set_up_logging

if TYPE_CHECKING:
    from onepass.decider import Decider

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 1, 2, 130, 141  # the last two as a shell says them
MAX_SECONDS = 3600  # that `bench` measures; with 0 each cell takes the fewest requests
# The settings that mean nothing in a process of one's own; all others are flags of every command
HTTP_SETTINGS = frozenset(
    (
        "host",
        "port",
        "uds",
        "uds_mode",
        "tls_cert",
        "tls_key",
        "strict_model",
        "api_key_file",
        "allowed_origins",
        "batch_window_ms",
        "max_queued_rows",
        "max_key_rows",
        "max_connections",
        "max_wait_s",
        "timeout_s",
        "read_timeout_s",
        "idle_timeout_s",
        "drain_s",
        "log_json",
    )
)
MODEL_SETTINGS = frozenset(item.name for item in dataclasses.fields(Config)) - HTTP_SETTINGS
QUEUE_PATIENCE_S = 3600.0  # a line of a batch may wait for those before it: nobody has hung up

OpenDecider = Callable[[Config], "Decider"]


class AddQuestion(argparse.Action):
    """Keeps the questions of all three kinds in the order in which they were asked."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        given = [*getattr(namespace, self.dest), ((option or "").lstrip("-"), values)]
        setattr(namespace, self.dest, given)


def make_parser() -> Parser:
    parser = Parser(
        prog="onepass",
        description="Decisions without a server, with the engine of the server.",
        epilog="`python -m onepass COMMAND --help` says more.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, add, run, text in (
        ("ask", add_ask, ask, "ask questions about one state"),
        ("batch", add_batch, batch, "answer a file of requests, a line each (JSON Lines)"),
        ("doctor", add_doctor, doctor, "check what the server needs and say what to do"),
        ("bench", add_bench, bench, "measure this machine"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        add(command)
        command.set_defaults(run=run)
        settings = command.add_argument_group("settings of server.py, each a variable too, such as ONEPASS_MODEL")
        add_flags(settings, None if name == "doctor" else MODEL_SETTINGS)
    return parser


def add_ask(command: argparse.ArgumentParser) -> None:
    command.add_argument("state", nargs="?", help="what the questions are about: a text, @FILE, or - (standard input)")
    command.add_argument("--state-json", action="store_true", help="the state is JSON, not a text")
    command.add_argument(
        "--noul", dest="asked", action=AddQuestion, metavar="TEXT", help='a yes/no question, such as "Is it spam?"'
    )
    command.add_argument(
        "--choice",
        dest="asked",
        action=AddQuestion,
        nargs=2,
        metavar=("TEXT", "OPTIONS"),
        help="which of the options: one,two=description,three, or the criteria as JSON",
    )
    command.add_argument(
        "--score",
        dest="asked",
        action=AddQuestion,
        nargs=2,
        metavar=("TEXT", "LEVELS"),
        help="how much: low,middle,high, or the criteria as JSON",
    )
    command.add_argument("--questions", metavar="FILE", help="questions as in a request: an object by id, JSON")
    command.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="a picture, for a model that sees; again for more; shown where the state has <image:N>, else after it",
    )
    command.add_argument("--json", action="store_true", help="print JSON; the default where the output is no terminal")
    command.add_argument("--url", help="ask the server there (its key from ONEPASS_API_KEY) and load no model")
    command.set_defaults(asked=())


def add_batch(command: argparse.ArgumentParser) -> None:
    command.add_argument("input", help="JSON Lines: a request a line, or with --questions a state; - is standard input")
    command.add_argument(
        "--output", default="-", metavar="FILE", help="where answers go; one that exists is continued (default: -)"
    )
    command.add_argument("--questions", metavar="FILE", help="questions for all lines: an object by id, JSON")
    command.add_argument(
        "--errors", metavar="FILE", help="where bad lines go (default: beside --output, OUT.errors.jsonl)"
    )
    command.add_argument("--unordered", action="store_true", help="write answers as they come, not in the lines' order")


def add_doctor(command: argparse.ArgumentParser) -> None:
    command.add_argument("--no-load", dest="load", action="store_false", help="do not load the model and ask it")
    command.add_argument("--json", action="store_true", help="print JSON")


def seconds(text: str) -> float:
    """argparse's type of a time to measure."""
    value = float(text)
    if not 0 <= value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SECONDS} seconds, not {text}")
    return value


def add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument("--seconds", type=seconds, default=60.0, help="time to measure, in all (default: 60)")
    command.add_argument("--json", action="store_true", help="print JSON; the default where the output is no terminal")


def ask(arguments: argparse.Namespace, open_decider: OpenDecider) -> int:
    from onepass.cli import ask as tool_ask

    questions = tool_ask.read_questions(arguments.asked, arguments.questions)
    state = tool_ask.read_state(arguments.state, is_json=arguments.state_json)
    try:
        body = tool_ask.make_body(state, questions, arguments.image)
        if arguments.url:
            answer = tool_ask.ask_server(arguments.url, body, os.environ, arguments.image)
        else:
            with open_decider(settings(arguments)) as decider:
                answer = decider.decide(body)
    except BadRequest as err:
        raise BadRequest(tool_ask.name_files(err.message, arguments.image)) from None
    tool_ask.show(answer, questions, as_json=arguments.json or not sys.stdout.isatty())
    return 0


def batch(arguments: argparse.Namespace, open_decider: OpenDecider) -> int:
    from onepass.cli import batch as tool_batch
    from onepass.cli import files as tool_files

    questions = tool_batch.read_shared_questions(arguments.questions)
    config = dataclasses.replace(settings(arguments), timeout_s=QUEUE_PATIENCE_S, max_wait_s=QUEUE_PATIENCE_S)
    with tool_files.open_files(arguments.input, arguments.output, arguments.errors, complain) as files:
        with open_decider(config) as decider:
            report = tool_batch.run(decider, files, questions, is_ordered=not arguments.unordered)
    complain(str(report))
    if report.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if report.num_bad or report.stopped_by else 0


def doctor(arguments: argparse.Namespace, open_decider: OpenDecider) -> int:
    from onepass.cli import doctor as tool_doctor

    set_up_log(is_verbose=False)
    checks = tool_doctor.run(lambda: read_config(vars(arguments)), open_decider if arguments.load else None)
    tool_doctor.show(checks, as_json=arguments.json)
    return EXIT_FAILURE if any(check.status == "fail" for check in checks) else 0


def bench(arguments: argparse.Namespace, open_decider: OpenDecider) -> int:
    from onepass.cli import bench as tool_bench

    with open_decider(settings(arguments)) as decider:
        measured = tool_bench.Measured.of(decider)
        try:
            measured.run(decider, arguments.seconds)
        finally:  # what was measured before an interruption too
            tool_bench.show(measured, as_json=arguments.json or not sys.stdout.isatty())
    return 0


def settings(arguments: argparse.Namespace) -> Config:
    config = read_config(vars(arguments), names=MODEL_SETTINGS)
    set_up_log(is_verbose=config.verbose)
    return config


def set_up_log(*, is_verbose: bool) -> None:
    """As the server's, without what it says when all is well."""
    set_up_logging(is_verbose=is_verbose)
    if not is_verbose:
        logging.getLogger().setLevel(logging.WARNING)


def load_decider(config: Config) -> Decider:
    from onepass.decider import Decider

    return Decider(config)


def complain(text: str) -> None:
    """One line on stderr, whatever `text` holds."""
    try:
        os.write(2, f"onepass: {printable(text)}\n".encode())
    except OSError:  # nobody reads it; the exit code says it too
        return


def main(argv: Sequence[str], open_decider: OpenDecider = load_decider) -> int:
    """Run one command. Returns the exit code."""
    if sys.stdout is None:  # its number may belong to another file by now
        complain("standard output is closed")
        return EXIT_USAGE
    try:
        arguments = make_parser().parse_args(argv)
        code: int = arguments.run(arguments, open_decider)
        sys.stdout.flush()
        return code
    except StartupError as err:
        complain(str(err))
        return EXIT_USAGE
    except ApiError as err:
        complain(explain(err.detail()))
        return EXIT_FAILURE
    except ImportError as err:
        complain(f"{err}: python -m pip install -r requirements.txt (`python -m onepass doctor` checks the rest)")
        return EXIT_USAGE
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still holds goes nowhere, and without a complaint
        return EXIT_CLOSED_PIPE
    except OSError as err:
        complain(f"standard output cannot be written: {err.strerror}")
        return EXIT_FAILURE


def run_as_program() -> None:
    """The console script `onepass`, and `python -m onepass`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    exit_code = main(sys.argv[1:])
    os._exit(exit_code)  # a worker still inside a C++ call would abort the interpreter's own way out


if __name__ == "__main__":
    run_as_program()
