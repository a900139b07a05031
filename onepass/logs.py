"""This module owns what the process asks of the system: signals, log lines on stderr, and file descriptors.

It knows nothing of HTTP.
"""

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
    """This formatter writes lines for people: `time level logger: message`, then the record's `fields` as `name=value`.

    No text from outside can start a line of its own. Tracebacks keep their lines.
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
    """Return the text in one line. A character that would end the line or control a terminal becomes an escape."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


class JsonFormatter(logging.Formatter):
    """This formatter writes lines for machines: one JSON object for each record, which holds the record's `fields`.

    A traceback is in `traceback`.
    """

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
        return json.dumps(document)  # The text is ASCII, so nothing in it can end the line.


class LineHandler(logging.Handler):
    """This handler writes each line to stderr with one write and without a lock.

    With a lock, a handler thread that is inside the write would delay all the others.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(2, (self.format(record) + "\n").encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)


class StopSignal:
    """The main thread waits for this: SIGTERM, SIGINT, or the end of the worker. A second signal ends the process.

    Signals come through a pipe to a thread of their own. The main thread cannot handle them reliably: a signal that the
    system delivers to another thread does not interrupt the main thread's wait.
    """

    def __init__(self) -> None:
        """Take over the signals. Only the main thread may call this, since Python requires it."""
        self._given = threading.Event()
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)  # PID 1 needs this too, since it has no default action.
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
    # Facts that no line shows are not looked up. The look-ups were half the cost of a line.
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
        except (OSError, ValueError):  # macOS does not accept "unlimited" here.
            logger.warning("files: at most %d may be open", soft)
