"""The command `batch` reads JSON Lines and writes JSON Lines, with many lines in the queue at once.

It continues where an earlier run was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tqdm import tqdm

from onepass.cli.files import Answers, Files, Line, make_digest, read_lines, read_questions_file
from onepass.decider import Decider, Pending
from onepass.edge.framing import MAX_BODY_BYTES
from onepass.errors import (
    ApiError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    ShuttingDown,
    StartupError,
    WorkerDead,
)
from onepass.wire.body import RepeatedKeys, read_json

BATCHES_AHEAD = 4  # This many full batches of rows are in flight: the model never waits, and memory stays bounded.
MAX_BYTES_AHEAD = 64 << 20  # This bounds the lines in flight. A single line may have half of it.
MAX_ID_CHARS = 1024


@dataclass(slots=True)
class Report:
    """A report says what a run did, for the last line on stderr."""

    files: Files
    num_answered: int = 0
    seconds: float = 0.0
    is_interrupted: bool = False
    stopped_by: str = ""  # It says why lines were left, if any were.

    @property
    def num_bad(self) -> int:
        return self.files.errors.count

    def __str__(self) -> str:
        rate = f" ({self.num_answered / self.seconds:.1f} a second)" if self.num_answered else ""
        before = f", {self.files.output.num_before} were answered before" if self.files.output.num_before else ""
        where = f": see {self.files.errors.path}" if self.num_bad and self.files.errors.path else ""
        done = f"{self.num_answered} lines answered{rate}{before}, {self.num_bad} bad{where}"
        return f"{self.stopped_by}: {done}; the same command goes on from there" if self.stopped_by else done


def read_shared_questions(path: str | None) -> bytes | None:
    """Read the questions and check them once, so that a mistake gives one error and not one for each line.

    Raises `StartupError`.
    """
    return read_questions_file(path)[0] if path else None


def read_request(line: bytes, questions: bytes | None) -> tuple[str | int | None, bytes]:
    """Return the line's id, and the request that the line makes. Raises `InvalidRequest`."""
    value = read_json(line)
    id_ = value.get("id") if isinstance(value, dict) else None
    if isinstance(id_, (bool, float, dict, list)) or (isinstance(id_, str) and len(id_) > MAX_ID_CHARS):
        raise InvalidRequest.at(("id",), f"must be a whole number or a string of at most {MAX_ID_CHARS} characters")
    if questions is None:
        return id_, line
    if isinstance(value, RepeatedKeys):
        raise InvalidRequest.at((value.key,), "must not stand twice", "repeated_key")
    if isinstance(value, (str, list)):
        value = {"state": value}
    if not isinstance(value, dict) or "state" not in value:
        raise InvalidRequest.at((), "the line must be a state (a string or an array) or an object with a state")
    if "questions" in value:
        raise InvalidRequest.at(("questions",), "must not stand in a line where --questions gives them for all")
    fields = json.dumps({name: item for name, item in value.items() if name != "id"})
    return id_, fields.encode()[:-1] + b',"questions":' + questions + b"}"


class Window:
    """A window bounds the lines in flight. The reader's thread enters lines, and the main thread lets them leave."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows = self._bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def enter(self, num_bytes: int) -> None:
        """Wait while the window is full. Raises `ShuttingDown` when the window is closed."""
        with self._changed:
            self._wait_for(lambda: self._rows < self._max_rows and self._bytes < MAX_BYTES_AHEAD)
            self._bytes += num_bytes

    def add_rows(self, num_rows: int) -> None:
        with self._changed:
            self._rows += num_rows

    def leave(self, entry: Line) -> None:
        with self._changed:
            self._rows -= entry.pending.num_rows if entry.pending else 0
            self._bytes -= len(entry.line or b"")
            self._changed.notify()

    def wait_less(self) -> bool:
        """Wait until a line has left. Return False if no line is inside. Raises `ShuttingDown`."""
        with self._changed:
            before = self._rows
            if before:
                self._wait_for(lambda: self._rows < before)
            return before > 0

    def _wait_for(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._is_closed or is_so())
        if self._is_closed:
            raise ShuttingDown("the run has ended")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()


@dataclass(slots=True)
class Reader:
    """A reader turns lines into requests in the queue, as many as the window holds. It runs on its own thread."""

    decider: Decider
    lines: Iterator[tuple[int, bytes | None]]
    questions: bytes | None
    seed: bytes
    answers: Answers
    window: Window
    is_ordered: bool
    entries: queue.SimpleQueue[Line | None] = field(default_factory=queue.SimpleQueue)  # None means: it has ended.
    num_read: int = 0
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            for number, line in self.lines:
                entry = Line(number, line, make_digest(line or b"", self.seed))
                if not self.answers.has(number, entry.digest):
                    self.window.enter(len(line or b""))
                    self.num_read += 1
                    self._submit(entry)
        except OSError as err:
            self.failure = StartupError(f"the input cannot be read: {err.strerror}")
        except BaseException as err:  # The main thread raises it.
            self.failure = err
        self.entries.put(None)

    def _submit(self, entry: Line) -> None:
        try:
            if entry.line is None:
                raise RequestTooLarge(f"the line is longer than {MAX_BODY_BYTES} bytes")
            entry.id, body = read_request(entry.line, self.questions)
            entry.pending = self._queue(body)
        except (ShuttingDown, WorkerDead):
            raise
        except ApiError as err:
            entry.error = err
        if entry.pending is None:
            self.entries.put(entry)
        else:
            self.window.add_rows(entry.pending.num_rows)
            if self.is_ordered:
                self.entries.put(entry)
            else:
                entry.pending.future.add_done_callback(lambda _: self.entries.put(entry))

    def _queue(self, body: bytes) -> Pending:
        while True:
            try:
                return self.decider.submit(body)
            except Overloaded:  # The lines in flight fill the queue, since their rows were not known before.
                if not self.window.wait_less():
                    raise


def make_seed(decider: Decider, questions: bytes | None) -> bytes:
    """What an answer depends on beside its line."""
    facts = decider.status().document()
    model = [facts.get(name) for name in ("model", "revision", "digests", "encoding")]
    return hashlib.blake2b(json.dumps(model).encode() + (questions or b""), digest_size=32).digest()


def survey(files: Files, seed: bytes) -> int | None:
    """Count the lines, and check that no line that is already answered has changed. Return None for a pipe.

    Raises `StartupError` for a line that has changed.
    """
    if not (files.input.seekable() and stat.S_ISREG(os.fstat(files.input.fileno()).st_mode)):
        return None
    if not (files.output.num_before or sys.stderr.isatty()):  # Nobody would see the count.
        return None
    begin = files.input.tell()
    count = 0
    for number, line in read_lines(files.input):
        count += 1
        if files.output.num_before:
            files.output.has(number, make_digest(line or b"", seed))
    files.input.seek(begin)
    return count


def run(decider: Decider, files: Files, questions: bytes | None, *, is_ordered: bool) -> Report:
    """Answer every line that has no answer yet. Raises `StartupError` for files that do not belong together."""
    seed = make_seed(decider, questions)
    total = survey(files, seed)
    files.errors.begin()
    window = Window(BATCHES_AHEAD * decider.config.max_batch_rows)
    reader = Reader(decider, read_lines(files.input), questions, seed, files.output, window, is_ordered)
    report = Report(files)
    # The bar is hidden if the answers go to the same screen. With None, tqdm decides by itself.
    is_hidden = True if files.output.file.isatty() else None
    started = time.monotonic()
    threading.Thread(target=reader.run, name="reader", daemon=True).start()
    try:
        with tqdm(total=total, initial=files.output.num_before, unit="line", disable=is_hidden) as bar:
            for entry in take(reader):
                settle(decider, entry, report)
                window.leave(entry)
                bar.update()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        report.is_interrupted, report.stopped_by = True, "interrupted"
    except OSError as err:
        report.stopped_by = f"the output cannot be written: {err.strerror}"
    except (StartupError, ApiError) as err:
        report.stopped_by = str(err)
    finally:
        window.close()
    report.seconds = time.monotonic() - started
    return report


def take(reader: Reader) -> Iterator[Line]:
    """Yield the entries, in the order of lines or of completion, until everything that the reader read was given."""
    num_taken = 0
    has_ended = False
    while not has_ended or num_taken < reader.num_read:
        entry = reader.entries.get()
        if entry is not None:
            num_taken += 1
            yield entry
            continue
        has_ended = True
        if reader.failure is not None:
            raise reader.failure


def settle(decider: Decider, entry: Line, report: Report) -> None:
    """Write the answer, or the reason why there is none.

    Raises `WorkerDead` or `ShuttingDown`, after which no other line would get an answer.
    """
    error = entry.error
    if entry.pending is not None:
        try:
            answered = decider.answer(entry.pending)
        except (ShuttingDown, WorkerDead):
            raise
        except ApiError as err:
            error = err
        else:
            report.files.output.write(entry, answered.body)
            report.num_answered += 1
    if error is not None:
        report.files.errors.write(entry, error)
