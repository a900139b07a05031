"""This module owns the files of the command line tool: files that are read whole, and a batch's input and outputs.

Every line of a batch's output names the line that it answers, and carries a digest of that line, the questions and the
model. A later run continues from these lines alone: no state is kept anywhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from onepass.decider import Pending
from onepass.edge.framing import MAX_BODY_BYTES
from onepass.errors import ApiError, InvalidRequest, StartupError, explain
from onepass.wire.body import read_json
from onepass.wire.schema import parse_request

BOM = b"\xef\xbb\xbf"
SYNC_EVERY_S = 5.0  # A killed process loses nothing that was written, and a power cut loses at most this much.
MAX_SHOWN_ERRORS = 20  # This bounds the errors on stderr. The file has them all.
SUM_BYTES = 4
WHAT_WE_WRITE = b'{"line":'
_WRITTEN = re.compile(rb'\{"line":(\d{1,12}),"sum":"([0-9a-f]{8})",')


def read_file(path: str, what: str) -> bytes:
    """Return the content of the file without a byte-order mark. `-` is standard input. Raises `StartupError`."""
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except (OSError, AttributeError) as err:  # sys.stdin is None if it is closed.
        reason = getattr(err, "strerror", None) or "standard input is closed"
        raise StartupError(f"{what} {path} cannot be read: {reason}") from None
    return content.removeprefix(BOM)


def parse(content: bytes, where: str) -> Any:
    """Parse JSON as strictly as a request is parsed. Raises `StartupError`."""
    try:
        return read_json(content)
    except InvalidRequest as err:
        raise StartupError(f"{where}: {explain(err.detail())}".replace("the body must", "must")) from None


def read_questions_file(path: str) -> tuple[bytes, dict[str, Any]]:
    """Return the file's JSON unchanged and as an object, which is valid as a request's `questions`.

    Raises `StartupError`.
    """
    content = read_file(path, "--questions")
    value = parse(content, path)
    try:
        parse_request(b'{"state":"","questions":' + content + b"}")
    except ApiError as err:
        raise StartupError(f"{path}: {explain(err.detail())}") from None
    assert isinstance(value, dict)
    return content, value


@dataclass(frozen=True, slots=True)
class Files:
    input: IO[bytes]
    output: Answers
    errors: BadLines


@contextlib.contextmanager
def open_files(
    input_path: str, output_path: str, errors_path: str | None, complain: Callable[[str], None]
) -> Iterator[Files]:
    """Open the files. Every problem with them is found here, before a model is loaded. Raises `StartupError`.

    `complain` writes one line on stderr.
    """
    if errors_path is None and output_path != "-" and not is_stream(output_path):
        errors_path = str(Path(output_path).with_suffix("")) + ".errors.jsonl"
    with contextlib.ExitStack() as stack:
        if input_path != "-":
            source: IO[bytes] = stack.enter_context(open_file(input_path, os.O_RDONLY))
        elif sys.stdin is None:
            raise StartupError("standard input is closed")
        else:
            source = sys.stdin.buffer
        answers = Answers(output_path, source)
        stack.callback(answers.close)
        bad_lines = BadLines(errors_path, (source, answers.file), complain)
        stack.callback(bad_lines.close)
        yield Files(source, answers, bad_lines)


def open_file(path: str, flags: int) -> IO[bytes]:
    """Open the file. Raises `StartupError`."""
    try:
        if Path(path).is_dir():
            raise StartupError(f"{path} cannot be read: it is a folder")
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=-1 if not flags else 0)
    except OSError as err:
        raise StartupError(f"{path} cannot be {'written' if flags else 'read'}: {err.strerror}") from None


def is_stream(path: str) -> bool:
    """Return whether the path is a pipe or a device, from which nothing can be read back."""
    return os.path.exists(path) and not os.path.isfile(path)


def open_output(path: str, others: tuple[IO[bytes], ...]) -> IO[bytes]:
    """Open the output to continue it, for this process alone. Raises `StartupError`."""
    for other in others:
        if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(other.fileno())):
            raise StartupError(f"{path} cannot be written: it is the input or the output already")
    if is_stream(path):
        return open_file(path, os.O_WRONLY)
    file = open_file(path, os.O_RDWR | os.O_CREAT)
    problem = ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not WHAT_WE_WRITE.startswith(file.read(len(WHAT_WE_WRITE))):
            problem = "exists and is not from a run of this command; name another file"
        file.seek(0)
    except OSError:
        problem = "cannot be written: another run is writing it"
    if problem:
        file.close()
        raise StartupError(f"{path} {problem}")
    return file


class Answers:
    """This is the output: it knows the lines of earlier runs, and adds each new line with one write.

    Only the main thread uses it after it is made.
    """

    def __init__(self, path: str, source: IO[bytes]) -> None:
        self.path = path
        # This holds, by line number, the digest with which the line was answered, or 0. A million lines take 4 MB.
        self._sums = array("I")
        self.num_before = 0
        self._synced_at = time.monotonic()
        if path == "-":
            sys.stdout.flush()
            self.file: IO[bytes] = os.fdopen(1, "wb", buffering=0, closefd=False)
        else:
            self.file = open_output(path, (source,))
        self._is_regular = path != "-" and stat.S_ISREG(os.fstat(self.file.fileno()).st_mode)
        if self._is_regular:
            try:
                self._read_back()
            except StartupError:
                self.file.close()
                raise

    def _read_back(self) -> None:
        """Learn which lines are answered, and cut off the last line if it is incomplete. Raises `StartupError`."""
        end = 0
        with open(self.file.fileno(), "rb", closefd=False) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break  # The run that wrote this line was killed in the middle of the write.
                written = _WRITTEN.match(line)
                if written is None:
                    raise StartupError(f"{self.path}:{number} is not from a run of this command; name another file")
                self._note(int(written[1]), int(written[2], 16))
                end += len(line)
        self.num_before = sum(1 for digest in self._sums if digest)
        self.file.truncate(end)
        self.file.seek(end)

    def _note(self, number: int, digest: int) -> None:
        missing = number + 1 - len(self._sums)
        if missing > 0:
            self._sums.extend(array("I", bytes(missing * self._sums.itemsize)))
        self._sums[number] = digest

    def has(self, number: int, digest: int) -> bool:
        """Return whether the line is answered. Raises `StartupError` if a different line was answered then."""
        written = self._sums[number] if number < len(self._sums) else 0
        if written not in (0, digest):
            raise StartupError(
                f"{self.path} holds an answer to line {number} that was made from another line, other questions "
                "or another model; name another file"
            )
        return bool(written)

    def write(self, entry: Line, body: bytes) -> None:
        """Write the answer as one line. Raises `OSError`."""
        write_all(self.file, entry.head() + b"," + body[1:] + b"\n")
        now = time.monotonic()
        if self._is_regular and now - self._synced_at > SYNC_EVERY_S:
            os.fsync(self.file.fileno())
            self._synced_at = now

    def close(self) -> None:
        if self._is_regular:
            os.fsync(self.file.fileno())
        self.file.close()


class BadLines:
    """These are the lines that got no answer in this run, each with its reason. Only the main thread uses them."""

    def __init__(self, path: str | None, others: tuple[IO[bytes], ...], complain: Callable[[str], None]) -> None:
        self.path = path
        self.count = 0
        self._complain = complain
        self._file = None if path is None else open_output(path, others)
        self._is_regular = path is not None and not is_stream(path)

    def begin(self) -> None:
        """Remove the bad lines of the run before, since they are all tried again."""
        if self._file is not None and self._is_regular:
            self._file.truncate(0)

    def write(self, entry: Line, error: ApiError) -> None:
        """Report a bad line and write it with its reason. Raises `OSError`."""
        self.count += 1
        if self.count <= MAX_SHOWN_ERRORS + 1:
            with tqdm.external_write_mode(file=sys.stderr):
                is_shown = self.count <= MAX_SHOWN_ERRORS
                self._complain(f"line {entry.number}: {explain(error.detail())}" if is_shown else "and more bad lines")
        if self._file is not None:
            reason = {"status": error.status, "detail": error.detail()}
            text = None if entry.line is None else entry.line.decode("utf-8", "backslashreplace")
            line = {"line": entry.number, "error": reason, "input": text}
            write_all(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        if self._file is None or self.path is None:
            return
        is_empty = self._is_regular and not os.fstat(self._file.fileno()).st_size
        self._file.close()
        if is_empty:
            os.unlink(self.path)


def write_all(file: IO[bytes], content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


@dataclass(slots=True)
class Line:
    """This is one line of the input. The reader fills it and then hands it to the main thread."""

    number: int
    line: bytes | None  # It is None if the line is too long to be read.
    digest: int = 0
    id: str | int | None = None
    pending: Pending | None = None
    error: ApiError | None = None

    def head(self) -> bytes:
        given = b"" if self.id is None else b',"id":' + json.dumps(self.id, ensure_ascii=False).encode()
        return b'{"line":%d,"sum":"%08x"%s' % (self.number, self.digest, given)


def read_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number from 1, content) for every line that is not blank. If a line is too long, its content is None."""
    number = 0
    while line := file.readline(MAX_BODY_BYTES + 2):
        number += 1
        if len(line) > MAX_BODY_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, None
            continue
        line = line.removeprefix(BOM) if number == 1 else line
        if line := line.strip(b" \t\r\n"):
            yield number, line


def make_digest(line: bytes, seed: bytes) -> int:
    """Return a digest of the line, 32 bits. It is never 0, which is reserved for lines without an answer."""
    return int.from_bytes(hashlib.blake2b(line, digest_size=SUM_BYTES, key=seed).digest(), "big") or 1
