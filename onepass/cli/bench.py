"""The command `bench` measures the latency and throughput of this machine and model, in process, in about a minute."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from onepass.decider import Decider
from onepass.errors import ApiError, explain

SENTENCE = "The parcel arrived two days late, the box was open, and one of the three cups was broken. "
STATES = {"short": SENTENCE * 2, "long": SENTENCE * 40}
QUESTIONS: dict[str, dict[str, Any]] = {
    "refund": {"type": "noul", "instructions": "Does the writer want a refund?"},
    "team": {"type": "choice", "instructions": "Who should answer?", "criteria": dict.fromkeys(("billing", "parcels"))},
    "anger": {"type": "score", "instructions": "How angry is the writer?", "criteria": ["Calm", "Annoyed", "Furious"]},
    "late": {"type": "noul", "instructions": "Was the parcel late?"},
    "topic": {"type": "choice", "criteria": {"delivery": "Parcels", "payment": "Money", "other": None}},
    "damage": {"type": "score", "instructions": "How bad is the damage?", "criteria": ["None", "Some", "Total"]},
}
QUESTION_COUNTS = (1, 6)
CALLERS = (1, 4, 16)
MIN_REQUESTS = 3  # A caller makes at least this many requests, even on a slow machine.


@dataclass(frozen=True, slots=True)
class Result:
    """This is one row of the table. Callers ask again as soon as they are answered, each time with a new state."""

    state: str
    questions: int
    callers: int
    tokens: int = 0  # This counts the tokens of one request.
    requests: int = 0
    requests_per_s: float = 0.0
    questions_per_s: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    failed: str = ""  # It says why there is nothing to measure.


@dataclass(slots=True)
class Measured:
    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, decider: Decider) -> Measured:
        facts = decider.status().document()
        names = ("model", "backend", "device", "dtype", "kernels", "threads", "encoding", "versions")
        return cls({name: facts.get(name) for name in names})

    def run(self, decider: Decider, seconds: float) -> None:
        """Fill `results`, one after the other. The results that exist stay if this is interrupted."""
        cells = list(itertools.product(STATES, QUESTION_COUNTS, CALLERS))
        numbers = itertools.count()
        for state, num_questions, num_callers in cells:
            bodies = requests(state, num_questions, numbers)
            result = Result(state, num_questions, num_callers)
            self.results.append(measure(decider, bodies, result, seconds / len(cells)))


def requests(state: str, num_questions: int, numbers: Iterator[int]) -> Iterator[bytes]:
    """Yield request bodies. Each state begins with a new number, so that no state has been computed before."""
    questions = dict(itertools.islice(QUESTIONS.items(), num_questions))
    for number in numbers:
        yield json.dumps({"state": f"{number}: {STATES[state]}", "questions": questions}).encode()


def measure(decider: Decider, bodies: Iterator[bytes], planned: Result, seconds: float) -> Result:
    """Run the requests, and return `planned` with its figures filled in."""
    try:
        first = decider.submit(next(bodies))
        decider.answer(first)
    except ApiError as err:
        return replace(planned, failed=explain(err.detail()))
    lock = threading.Lock()
    waits: list[float] = []
    failures: list[ApiError] = []
    started = time.perf_counter()

    def call() -> None:
        count = 0
        while not failures and (count < MIN_REQUESTS or time.perf_counter() - started < seconds):
            with lock:
                body = next(bodies)
            begun = time.perf_counter()
            try:
                decider.decide(body)
            except ApiError as err:
                failures.append(err)
                return
            waits.append(time.perf_counter() - begun)
            count += 1

    callers = [threading.Thread(target=call, daemon=True) for _ in range(planned.callers)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    if failures:
        return replace(planned, failed=explain(failures[0].detail()))
    rate = len(waits) / (time.perf_counter() - started)
    p50, p95 = statistics.median(waits), statistics.quantiles(waits, n=20, method="inclusive")[-1]
    return replace(
        planned,
        tokens=first.num_tokens,
        requests=len(waits),
        requests_per_s=round(rate, 2),
        questions_per_s=round(rate * planned.questions, 2),
        p50_ms=round(p50 * 1e3, 2),
        p95_ms=round(p95 * 1e3, 2),
    )


def show(measured: Measured, *, as_json: bool) -> None:
    if as_json:
        document = {**measured.facts, "results": [asdict(result) for result in measured.results]}
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
        return
    facts = measured.facts
    table = Table(title=f"{facts['model']} on {facts['device']}, {facts['dtype']}, backend {facts['backend']}")
    for heading in ("state", "questions", "callers", "tokens", "requests/s", "questions/s", "p50 ms", "p95 ms"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for result in measured.results:
        place = (result.state, str(result.questions), str(result.callers), str(result.tokens))
        figures = (result.requests_per_s, result.questions_per_s, result.p50_ms, result.p95_ms)
        table.add_row(*place, *([result.failed] if result.failed else [f"{figure:.1f}" for figure in figures]))
    Console().print(table)
