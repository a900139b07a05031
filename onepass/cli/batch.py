"""`batch`: JSON Lines in, JSON Lines out, many lines in the queue at once; goes on where an earlier run was stopped."""

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

BATCHES_AHEAD = 4  # rows in flight, in full batches: the model never waits, and memory stays what it is
MAX_BYTES_AHEAD = 64 << 20  # lines in flight; a single line may be half of it
MAX_ID_CHARS = 1024


@dataclass(slots=True)
class Report:
    """What a run did, for the last line on stderr."""

    files: Files
    num_answered: int = 0
    seconds: float = 0.0
    is_interrupted: bool = False
    stopped_by: str = ""  # why lines were left, if any were

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
    """Checked once, so that a mistake in them is one error and not one a line. Raises `StartupError`."""
    return read_questions_file(path)[0] if path else None


def read_request(line: bytes, questions: bytes | None) -> tuple[str | int | None, bytes]:
    """The line's id and the request that it makes. Raises `InvalidRequest`."""
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
    """Bounds what is in flight. The reader enters, the main thread leaves."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._rows = self._bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def enter(self, num_bytes: int) -> None:
        """Waits while it is full. Raises `ShuttingDown` once it is closed."""
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
        """Waits until something has left; False if there is nothing that could. Raises `ShuttingDown`."""
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
    """Its own thread: lines to requests in the queue, as many as the window holds."""

    decider: Decider
    lines: Iterator[tuple[int, bytes | None]]
    questions: bytes | None
    seed: bytes
    answers: Answers
    window: Window
    is_ordered: bool
    entries: queue.SimpleQueue[Line | None] = field(default_factory=queue.SimpleQueue)  # None: the reader has ended
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
        except BaseException as err:  # the main thread raises it
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
            except Overloaded:  # by what is in flight: its rows were not known before
                if not self.window.wait_less():
                    raise


def make_seed(decider: Decider, questions: bytes | None) -> bytes:
    """What an answer depends on beside its line."""
    facts = decider.status().document()
    model = [facts.get(name) for name in ("model", "revision", "digests", "encoding")]
    return hashlib.blake2b(json.dumps(model).encode() + (questions or b""), digest_size=32).digest()


def survey(files: Files, seed: bytes) -> int | None:
    """How many lines there are, once none of those already answered is another now. None for a pipe.

    Raises `StartupError`.
    """
    if not (files.input.seekable() and stat.S_ISREG(os.fstat(files.input.fileno()).st_mode)):
        return None
    if not (files.output.num_before or sys.stderr.isatty()):  # nobody would see it
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
    is_hidden = True if files.output.file.isatty() else None  # answers and a bar on one screen; None: tqdm looks itself
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
    """The entries, in order of lines or of completion, until all that the reader has read were given."""
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
    """Write the answer, or why there is none. Raises `WorkerDead` or `ShuttingDown`: no other line would get one."""
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
