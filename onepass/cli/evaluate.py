"""`evaluate`: asks labelled rows of a model or a server, keeps the answers for going on, and says how good they are."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from onepass.cli.ask import make_server_request, plain
from onepass.cli.files import open_file, read_lines
from onepass.decisions.evaluation import Case, Figures, cases_of, evaluate, reordered
from onepass.decisions.labelled import LabelledRow, read_row
from onepass.decisions.report import Comparison, render
from onepass.decisions.statistics import paired_difference
from onepass.errors import ApiError, BadRequest, RequestTooLarge, StartupError, explain

Ask = Callable[[bytes], bytes]

NUM_CALLERS = 8  # requests in flight: the server batches them
SERVER_TIMEOUT_S = 120.0
MAX_TRIES = 5  # of a request that a busy server turns away
MAX_PAUSE_S = 30.0
REFUSALS = frozenset((400, 413, 422))  # the row's own fault; any other status is the server's, and ends the run


@dataclass(slots=True)
class Rows:
    """The good rows of a file, and why the others are left out."""

    good: list[LabelledRow] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    @property
    def num_labels(self) -> int:
        return sum(len(row.labels) for row in self.good)


def read_rows(path: str) -> Rows:
    """Raises `StartupError` for a file that cannot be read or holds no label."""
    rows = Rows()
    with open_file("/dev/stdin" if path == "-" else path, 0) as file:
        for number, line in read_lines(file):
            try:
                if line is None:
                    raise RequestTooLarge("the line is too long")
                rows.good.append(read_row(number, line))
            except ApiError as err:
                rows.bad.append(f"line {number}: {explain(err.detail())}")
    if not rows.num_labels:
        raise StartupError(f"{path} holds no labelled row{f'; {rows.bad[0]}' if rows.bad else ''}")
    return rows


class KeptAnswers:
    """A file of the answers so far, so that a run goes on where it was stopped. Main thread only.

    A line is kept under the digest of who was asked and what: another model or another row is asked anew."""

    def __init__(self, path: str | None, target: str) -> None:
        self._path, self._target = path, target
        self._kept: dict[str, bytes] = {}
        self._file = None
        if path is None:
            return
        if Path(path).is_file():  # nothing can be read back of a pipe or a device
            self._read(Path(path))
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        except OSError as err:
            raise StartupError(f"{path} cannot be written: {err.strerror}") from None

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].splitlines():
            try:
                entry = json.loads(line)
                self._kept[entry["request"]] = json.dumps(entry["response"]).encode()
            except (ValueError, LookupError, TypeError):
                raise StartupError(f"{path} is not from a run of this command; name another file") from None
        if whole < len(content):  # of a run that was killed in the middle of a write
            with path.open("r+b") as file:
                file.truncate(whole)

    def digest(self, body: bytes) -> str:
        return hashlib.sha256(self._target.encode() + b"\0" + body).hexdigest()[:32]

    def get(self, body: bytes) -> bytes | None:
        return self._kept.get(self.digest(body))

    def add(self, body: bytes, response: bytes) -> None:
        """Raises `StartupError` when the disk is full; what was written before stays good."""
        if self._file is None:
            return
        line = b'{"request":"%s","response":%s}\n' % (self.digest(body).encode(), response)
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as err:
            raise StartupError(f"{self._path} cannot be written: {err.strerror}; the same command goes on") from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def server_at(url: str, environ: Mapping[str, str]) -> Ask:
    """Asks the server at the address. Its errors: `BadRequest` for the row's fault, `StartupError` for its own."""

    def ask(body: bytes) -> bytes:
        for number in range(1, MAX_TRIES + 1):
            try:
                request = make_server_request(url, body, environ)
                with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as response:
                    answer: bytes = response.read()
                    return answer
            except urllib.error.HTTPError as err:
                with err:
                    if err.code in (429, 503) and number < MAX_TRIES:
                        time.sleep(pause_before_retry(err.headers.get("Retry-After"), number))
                        continue
                    reason = reason_of(err.read())
                if err.code in REFUSALS:
                    raise BadRequest(reason) from None
                raise StartupError(f"{url}: {err.code}: {reason}") from None
            except (OSError, ValueError, http.client.HTTPException) as err:
                raise StartupError(f"{url}: {getattr(err, 'reason', err)}") from None
        raise AssertionError("the last try returns or raises")

    return ask


def pause_before_retry(asked: str | None, number: int) -> float:
    """Seconds: what the server asks for, else longer every time."""
    return min(float(asked), MAX_PAUSE_S) if asked and asked.isdecimal() else min(2.0**number, MAX_PAUSE_S)


def reason_of(body: bytes) -> str:
    try:
        return explain(json.loads(body)["detail"])
    except (ValueError, LookupError, TypeError):
        return "that is no answer of a System One server"


def ask_all(rows: Rows, ask: Ask, kept: KeptAnswers, num_orders: int = 1) -> list[Case]:
    """The cases in the order of the rows; a row that is refused joins `rows.bad`. Raises `StartupError`."""
    cases: list[Case] = []
    labelled = [row for row in rows.good if row.labels]
    with ThreadPoolExecutor(NUM_CALLERS) as pool, tqdm(total=len(labelled), unit=" rows", disable=None) as bar:
        for start in range(0, len(labelled), NUM_CALLERS * 4):
            part = labelled[start : start + NUM_CALLERS * 4]
            bodies = [[row.body, *(reordered(row.body, order) for order in range(1, num_orders))] for row in part]
            missing = list(dict.fromkeys(body for of_row in bodies for body in of_row if kept.get(body) is None))
            found: dict[bytes, bytes | ApiError] = {}
            for body, result in zip(missing, pool.map(lambda body: attempt(ask, body), missing), strict=True):
                found[body] = result
                if isinstance(result, bytes):
                    kept.add(body, result)
            for row, of_row in zip(part, bodies, strict=True):
                results = [kept.get(body) or found[body] for body in of_row]
                cases.extend(join(row, results, rows))
                bar.update()
    return cases


def attempt(ask: Ask, body: bytes) -> bytes | ApiError:
    try:
        return json.dumps(json.loads(ask(body)), ensure_ascii=False).encode()  # on one line, whoever wrote it
    except ApiError as err:
        return err
    except ValueError:
        return BadRequest("the response is not JSON")


def join(row: LabelledRow, results: Sequence[bytes | ApiError], rows: Rows) -> Iterator[Case]:
    """The row's cases; a reason in `rows.bad` in place of them if it was refused."""
    refused = next((result for result in results if isinstance(result, ApiError)), None)
    if refused is not None:
        rows.bad.append(f"line {row.number}: {explain(refused.detail())}")
        return
    responses = [result for result in results if isinstance(result, bytes)]
    try:
        yield from cases_of(row, responses[0], responses[1:])
    except ValueError as err:
        rows.bad.append(f"line {row.number}: {err}")


def show(found: Sequence[Figures]) -> None:
    """A table on standard output, a line for all, each type and each question."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "rows", "accuracy", "95% interval", "most frequent", "Brier", "ECE", "coverage at 5% error"):
        table.add_column(heading, justify="left" if not heading else "right")
    for item in found:
        low, high = item.accuracy_interval
        table.add_row(
            plain(item.name),
            str(item.num_rows),
            f"{item.accuracy:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{item.most_frequent:.1%}",
            f"{item.brier:.3f}",
            f"{item.calibration_error:.3f}",
            f"{item.coverage['0.05']:.1%}",
        )
    Console(highlight=False).print(table)


def missed_gates(whole: Figures, min_accuracy: float | None, max_ece: float | None) -> list[str]:
    """Why a gate is shut, a sentence each."""
    missed = []
    if min_accuracy is not None and whole.accuracy < min_accuracy:
        missed.append(f"accuracy {whole.accuracy:.4f} is below --min-accuracy {min_accuracy}")
    if max_ece is not None and whole.calibration_error > max_ece:
        missed.append(f"ECE {whole.calibration_error:.4f} is above --max-ece {max_ece}")
    return missed


def compare(cases: Sequence[Case], there: Sequence[Case], against: str) -> Comparison | None:
    """On the labelled questions that both answered; None if there is none."""
    by_place = {(case.line, case.question.id): case.is_right for case in there}
    pairs = [(case.is_right, by_place[place]) for case in cases if (place := (case.line, case.question.id)) in by_place]
    if not pairs:
        return None
    both = np.array(pairs)
    difference, interval, p_value = paired_difference(both[:, 0], both[:, 1])
    return Comparison(against, len(pairs), difference, interval, p_value)


def run(arguments: argparse.Namespace, rows: Rows, ask: Ask, name: str, target: str | None = None) -> list[str]:
    """Ask, show and write the report. Returns why a gate is shut. Raises `StartupError`."""
    kept = KeptAnswers(arguments.answers, target or name)
    try:
        cases = ask_all(rows, ask, kept, arguments.orders)
    finally:
        kept.close()
    comparison = None
    if arguments.against:
        there = ask_all(rows, server_at(arguments.against, os.environ), KeptAnswers(None, arguments.against))
        comparison = compare(cases, there, arguments.against)
    found = evaluate(cases)
    if not found:
        raise StartupError(f"no row got an answer; {rows.bad[0]}")
    if arguments.json or not sys.stdout.isatty():
        document: dict[str, Any] = {"target": name, "figures": list(map(dataclasses.asdict, found)), "bad": rows.bad}
        document["comparison"] = comparison and dataclasses.asdict(comparison)
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    else:
        show(found)
    if arguments.report:
        try:
            Path(arguments.report).write_text(render(name, found, rows.bad, comparison), encoding="utf-8")
        except OSError as err:
            raise StartupError(f"{arguments.report} cannot be written: {err.strerror}") from None
    return missed_gates(found[0], arguments.min_accuracy, arguments.max_ece)
