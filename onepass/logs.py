"""What the process asks of the system: signals, log lines on stderr, file descriptors; knows nothing of HTTP."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import threading
import time

logger = logging.getLogger(__name__)


class LineFormatter(logging.Formatter):
    """For people: `time level logger: message`, then the record's `fields` as `name=value`.

    No text from outside can start a line of its own; tracebacks keep theirs.
    """

    _second = (0, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        now = int(record.created)
        second, text = self._second
        if now != second:
            text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
            self._second = (now, text)
        return f"{text}.{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        fields = getattr(record, "fields", None)
        if fields:
            shown = [f"{k}={v:.2f}" if type(v) is float else f"{k}={v}" for k, v in fields.items()]
            line = f"{line}: {' '.join(shown)}"
        return printable(line)


def printable(text: str) -> str:
    """The text in one line: what would end it, or make a terminal do something, as an escape."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


class JsonFormatter(logging.Formatter):
    """For machines: one object a line, the record's `fields` in it, a traceback in `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document: dict[str, object] = {
            "time": f"{time_text}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in getattr(record, "fields", {}).items():
            document[name] = round(value, 3) if type(value) is float else value
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document)  # ASCII: nothing in it can end the line


class LineHandler(logging.Handler):
    """One write a line to stderr and no lock: a handler thread in the write would hold up all the others."""

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(2, (self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)


class StopSignal:
    """What the main thread waits for: SIGTERM, SIGINT, or the end of the worker. A second signal ends the process.

    Signals come through a pipe to a thread of their own. The main thread cannot be relied on: a signal that the system
    delivers to another thread does not interrupt what it waits for.
    """

    def __init__(self) -> None:
        """Main thread only, as Python has it."""
        self._given = threading.Event()
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)  # also needed as PID 1, which has no default action
        threading.Thread(target=self._listen, args=(read_fd,), name="signals", daemon=True).start()

    def _listen(self, read_fd: int) -> None:
        os.read(read_fd, 1)
        self.give()
        os._exit(128 + os.read(read_fd, 1)[0])

    def give(self) -> None:
        self._given.set()

    def wait(self) -> None:
        self._given.wait()


def set_up_logging(*, is_verbose: bool, as_json: bool = False) -> None:
    # What no line shows is not looked up: it made half the cost of one
    logging._srcfile = None  # type: ignore[attr-defined]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = LineHandler()
    text = LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=logging.DEBUG if is_verbose else logging.INFO, handlers=[handler])
    for name in ("filelock", "httpcore", "httpx", "urllib3", "PIL", "python_multipart"):
        logging.getLogger(name).setLevel(logging.WARNING)


def allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS: unlimited is not a number it takes
            logger.warning("files: at most %d may be open", soft)
