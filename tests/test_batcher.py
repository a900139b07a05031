"""The queue and the worker: turns, limits, cancelling, faults, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import Batcher, adapt_rows
from onepass.errors import ApiError, DeadlineExceeded, InternalError, OutOfMemory, Overloaded, ShuttingDown, WorkerDead
from onepass.row_queue import GIANT_ROWS, RowQueue, Ticket

WAIT_S = 30  # nothing here takes this long; a hang ends as a failure


@dataclass(frozen=True)
class FakeRow:
    name: str
    num_tokens: int = 10
    same_as: str = ""  # rows that have this in common ask the same

    @property
    def key(self) -> object:
        return self.same_as or id(self)


@dataclass
class FakeModel:
    """Answers rows with their names; can be held, and fails on rows named `bad`."""

    batches: list[list[str]] = field(default_factory=list)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_held: bool = False

    def __call__(self, rows: list[FakeRow]) -> list[Any]:
        self.batches.append([row.name for row in rows])
        self.started.release()
        if self.is_held:
            assert self.gate.acquire(timeout=WAIT_S)
        if any(row.name == "bad" for row in rows):
            raise RuntimeError("the model fails")
        return [InternalError("not a number") if row.name == "nan" else row.name for row in rows]


@contextmanager
def running(model: Callable[[list[Any]], list[Any]], **limits: Any) -> Iterator[Batcher]:
    batcher = Batcher(model, **{"max_batch_rows": 4, "max_batch_tokens": 1000, "max_queued_rows": 20, **limits})
    worker = threading.Thread(target=batcher.work)
    worker.start()
    try:
        yield batcher
    finally:
        if isinstance(model, FakeModel):
            model.is_held = False
            model.gate.release(100)
        batcher.drain(WAIT_S)
        worker.join(WAIT_S)
        assert not worker.is_alive()


def rows(*names: str) -> list[FakeRow]:
    return [FakeRow(name) for name in names]


def result(ticket: Ticket) -> Any:
    return ticket.future.result(WAIT_S)


def take(
    queue: RowQueue, max_rows: int = 4, max_tokens: int = 1000, now: float = 0.0, few_rows: int | None = None
) -> list[str]:
    batch = queue.take_batch(max_rows=max_rows, max_tokens=max_tokens, now=now, few_rows=few_rows)
    return [entry.row.name for entry in batch]  # type: ignore[attr-defined]


def queue_of(*requests: list[FakeRow], clients: str = "") -> tuple[RowQueue, list[Ticket]]:
    """`clients`: whose each request is, a letter each."""
    whose = clients or "-" * len(requests)
    queue = RowQueue()
    tickets = [Ticket(request, 100.0, 0.0, client) for request, client in zip(requests, whose, strict=True)]
    for ticket in tickets:
        queue.append(ticket)
    return queue, tickets


def test_requests_take_turns_a_row_each_and_small_ones_all_they_have() -> None:
    queue = RowQueue(turn_rows=2)
    for request in rows("a1", "a2", "a3", "a4", "a5"), rows("b1"), rows("c1", "c2"), rows("d1", "d2"):
        queue.append(Ticket(request, 100.0, 0.0))
    assert take(queue) == ["a1", "b1", "c1", "c2"]
    assert take(queue, max_rows=1) == ["d1"]
    queue.append(Ticket(rows("e1"), 100.0, 0.0))
    assert take(queue) == ["d2", "a2", "e1", "a3"]
    assert take(queue) == ["a4", "a5"]
    assert queue.num_rows == 0


def test_a_giants_batches_are_short_and_others_may_be_whole() -> None:
    giant = [f"g{n}" for n in range(GIANT_ROWS + 1)]
    queue, _ = queue_of(rows(*giant), rows("b1", "b2", "b3"), rows("c1"), clients="xxy")

    assert take(queue, 8, few_rows=2) == ["g0", "c1", "b1", "b2", "b3"]
    assert [take(queue, 8, few_rows=2) for _ in range(8)] == [
        [giant[n], giant[n + 1]] for n in range(1, GIANT_ROWS + 1, 2)
    ]
    assert (take(queue, 8, few_rows=2), queue.num_rows) == ([], 0)


def test_clients_take_turns_before_their_requests_do() -> None:
    """One that sends many requests gets no more than one that sends a single one."""
    queue, _ = queue_of(rows("a1", "a2"), rows("b1"), rows("c1", "c2"), rows("d1", "d2"), clients="xxxy")
    assert take(queue, max_rows=8) == ["a1", "a2", "d1", "d2", "b1", "c1", "c2"]
    assert (queue.num_rows, queue.num_rows_of("x"), queue.num_rows_of("y")) == (0, 0, 0)


def test_the_token_budget_counts_padding() -> None:
    queue, _ = queue_of([FakeRow("a", 10)], [FakeRow("b", 60)], [FakeRow("c", 10)])
    assert take(queue, max_tokens=100) == ["a"]
    assert take(queue, max_tokens=120) == ["b", "c"]


def test_a_row_over_the_budget_runs_alone_and_is_not_overtaken() -> None:
    queue, _ = queue_of([FakeRow("a", 10)], [FakeRow("giant", 5000)], [FakeRow("c", 10)])
    assert [take(queue, max_tokens=100) for _ in range(3)] == [["a"], ["giant"], ["c"]]


def test_a_cancelled_or_late_request_costs_no_forward_pass() -> None:
    queue, (gone, late, live) = queue_of(rows("gone", "gone"), rows("late"), rows("live"))
    gone.future.cancel()
    late.deadline = 1.0
    assert take(queue, now=2.0) == ["live"]
    assert queue.num_rows == 0
    assert isinstance(late.future.exception(0), DeadlineExceeded)
    assert not live.future.done()


def test_a_request_that_has_started_is_finished_whatever_its_deadline() -> None:
    queue, (ticket,) = queue_of(rows("a", "b"))
    assert take(queue, max_rows=1) == ["a"]
    assert take(queue, now=1e9) == ["b"]
    assert not ticket.future.done()


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=GIANT_ROWS + 9), max_size=8),
    st.text("xyz", min_size=8, max_size=8),
    st.integers(1, 5),
    st.integers(1, 400),
    st.integers(1, 5),
)
def test_every_row_leaves_once_within_the_limits(
    lengths: list[list[int]], clients: str, max_rows: int, max_tokens: int, few_rows: int
) -> None:
    requests = [[FakeRow(f"{i}.{j}", n) for j, n in enumerate(request)] for i, request in enumerate(lengths)]
    queue, _ = queue_of(*requests, clients=clients[: len(requests)])
    left = {row.name: row.num_tokens for request in requests for row in request}
    while queue.num_rows:
        names = take(queue, max_rows=max_rows, max_tokens=max_tokens, few_rows=few_rows)
        assert 1 <= len(names) <= max_rows
        taken = [left.pop(name) for name in names]
        assert len(taken) == 1 or max(taken) * len(taken) <= max_tokens
    assert not left


def test_an_idle_worker_runs_the_first_request_at_once_and_the_rest_together() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        first = batcher.submit(rows("first"), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        others = [batcher.submit(rows(name), WAIT_S) for name in "abc"]
        model.gate.release(2)
        assert [result(ticket) for ticket in (first, *others)] == [["first"], ["a"], ["b"], ["c"]]
    assert model.batches == [["first"], ["a", "b", "c"]]


def test_results_come_back_in_the_order_of_the_rows() -> None:
    with running(FakeModel(), max_batch_rows=2) as batcher:
        assert result(batcher.submit(rows(*"abcde"), WAIT_S)) == list("abcde")


def test_a_giant_request_delays_a_small_one_by_at_most_one_batch() -> None:
    model = FakeModel(is_held=True)
    with running(model, max_batch_rows=2) as batcher:
        batcher.submit(rows(*["giant"] * 12), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        small = batcher.submit(rows("small"), WAIT_S)
        model.gate.release(2)
        result(small)
        assert "small" in model.batches[1]


@pytest.mark.parametrize(
    ("few", "num_rows", "seconds", "wanted"),
    [
        (32, 32, 0.4, 4),  # too long: as many as take 0.05 s
        (32, 1, 0.4, 1),  # one long row
        (4, 4, 0.05, 4),
        (4, 4, 0.03, 6),
        (4, 4, 0.001, 8),  # at most twice as many at a time
        (32, 32, 0.001, 32),
        (4, 16, 0.2, 4),
        (8, 3, 0.01, 8),  # no more waited
        (1, 1, 0.03, 1),
        (1, 1, 0.02, 2),
        (1, 1, 0.0, 2),
    ],
)
def test_a_batch_has_as_many_rows_as_its_time_allows(few: int, num_rows: int, seconds: float, wanted: int) -> None:
    assert adapt_rows(few, num_rows, seconds, 0.05, 32) == wanted


def test_a_giant_whose_rows_take_long_gets_few_of_them_into_a_batch() -> None:
    model = FakeModel()
    with running(model, max_batch_s=1e-9) as batcher:
        names = [f"g{n}" for n in range(GIANT_ROWS + 1)]
        assert result(batcher.submit(rows(*names), WAIT_S)) == names
        assert [len(batch) for batch in model.batches] == [4, *[1] * 13]
        assert result(batcher.submit(rows(*"abcd"), WAIT_S)) == list("abcd")
        assert model.batches[-1] == list("abcd")


def test_a_request_is_admitted_whole_or_refused_whole() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        batcher.submit(rows("running"), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        batcher.submit(rows(*["x"] * 15), WAIT_S)
        with pytest.raises(Overloaded) as caught:
            batcher.submit(rows(*["y"] * 6), WAIT_S)
        assert caught.value.retry_after_s is not None
        assert 1 <= caught.value.retry_after_s < 30
        assert batcher.describe().queued_rows == 15
        batcher.submit(rows(*["y"] * 5), WAIT_S)
        assert isinstance(batcher.why_refused(1), Overloaded)


def test_who_would_wait_too_long_is_refused_at_once_and_small_requests_wait_less() -> None:
    model = FakeModel(is_held=True)
    with running(model, max_wait_s=2.0, max_queued_rows=2000) as batcher:
        batcher.submit(rows("first"), WAIT_S)
        batcher._seconds_per_token = 0.01  # 0.1 s a row
        assert model.started.acquire(timeout=WAIT_S)
        batcher.submit(rows(*"abc"), WAIT_S)
        assert batcher.why_refused(500) is None  # all that waits is in the next batch
        batcher.submit(rows(*["giant"] * 500), WAIT_S)
        assert batcher.why_refused(1) is None  # takes turns with the giant
        assert batcher.why_refused(17) is None
        with pytest.raises(Overloaded, match=r"about 50\.3 s, at most 2 s is waited") as caught:
            batcher.submit(rows(*["x"] * 500), WAIT_S)
        assert caught.value.retry_after_s == 29
        for _ in range(17):
            batcher.submit(rows("y"), WAIT_S)
        with pytest.raises(Overloaded, match=r"would take about 2\.1 s") as caught:
            batcher.submit(rows("y"), WAIT_S)
        assert caught.value.retry_after_s == 1
        assert batcher.why_refused(1, "another client") is None  # takes turns with all of them together


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), max_size=8),
    st.sampled_from("abcd"),
    st.integers(1, 12),
)
def test_the_expected_wait_is_that_of_the_turns_taken(
    waiting: list[tuple[str, int]], client: str, num_rows: int
) -> None:
    queue, _ = queue_of(
        *([FakeRow(str(n)) for n in range(count)] for _, count in waiting), clients="".join(w for w, _ in waiting)
    )
    expected = queue.num_tokens_before(num_rows, client) / 10
    mine = Ticket([FakeRow("mine") for _ in range(num_rows)], 100.0, 0.0, client)
    queue.append(mine)
    num_before, num_waiting = 0, sum(count for _, count in waiting)
    while mine.num_waiting:
        (entry,) = queue.take_batch(max_rows=1, max_tokens=1000, now=0.0)
        num_before += entry.ticket is not mine
    others = {name for name, _ in waiting} - {client}
    # Exact among one's own; of the others a turn is not told from another, and these are of 1 to 12 rows
    if others:
        assert expected <= num_waiting
    else:
        assert num_before == expected


def test_one_client_cannot_fill_the_queue() -> None:
    model = FakeModel(is_held=True)
    with running(model, max_client_rows=10) as batcher:
        batcher.submit(rows("first"), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        held = batcher.submit(rows(*"abcdefgh"), WAIT_S, "greedy")
        with pytest.raises(Overloaded, match="8 rows of this API key wait, at most 10 may") as caught:
            batcher.submit(rows(*"ijk"), WAIT_S, "greedy")
        assert caught.value.retry_after_s
        assert 1 <= caught.value.retry_after_s < 30
        batcher.submit(rows(*"ij"), WAIT_S, "greedy")
        assert batcher.why_refused(1, "greedy")
        assert batcher.why_refused(1) is None  # the server is ready all the same
        batcher.submit(rows(*"0123456789"), WAIT_S, "modest")
        with pytest.raises(Overloaded, match="the queue is full"):
            batcher.submit(rows("k"), WAIT_S, "third")
        batcher.cancel(held)
        batcher.submit(rows(*"ijk"), WAIT_S, "greedy")


def test_cancelling_frees_its_place_at_once() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        batcher.submit(rows("running"), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        ticket = batcher.submit(rows(*["x"] * 20), WAIT_S)
        batcher.cancel(ticket)
        assert batcher.describe().queued_rows == 0
        with pytest.raises(CancelledError):
            result(ticket)
        batcher.submit(rows("next"), WAIT_S)
    assert model.batches == [["running"], ["next"]]


def test_a_request_expires_only_before_it_starts() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        started = batcher.submit(rows("started"), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        waiting = batcher.submit(rows("waiting"), WAIT_S)
        batcher.expire(started)
        batcher.expire(waiting)
        with pytest.raises(DeadlineExceeded):
            result(waiting)
        model.gate.release()
        assert result(started) == ["started"]
    assert model.batches == [["started"]]


def test_only_the_culprit_of_a_failed_batch_fails() -> None:
    model = FakeModel(is_held=True)
    with running(model, max_batch_rows=8) as batcher:
        first = batcher.submit(rows("first"), WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        tickets = [batcher.submit(rows(name), WAIT_S) for name in ("a", "b", "bad", "nan", "c")]
        model.is_held = False
        model.gate.release()
        assert [result(ticket) for ticket in (first, tickets[0], tickets[1], tickets[4])] == [
            ["first"],
            ["a"],
            ["b"],
            ["c"],
        ]
        for ticket in tickets[2:4]:
            with pytest.raises(InternalError):
                result(ticket)
        assert result(batcher.submit(rows("after"), WAIT_S)) == ["after"]


def test_one_failed_row_fails_its_request_and_spares_the_rest_of_it() -> None:
    model = FakeModel()
    with running(model, max_batch_rows=1) as batcher:
        with pytest.raises(InternalError):
            result(batcher.submit(rows("bad", "never"), WAIT_S))
    assert ["never"] not in model.batches


def test_a_model_that_forgets_a_row_fails_loudly() -> None:
    with running(lambda batch: []) as batcher, pytest.raises(InternalError):
        result(batcher.submit(rows("a"), WAIT_S))


def test_draining_finishes_what_is_queued_and_refuses_the_rest() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        tickets = [batcher.submit(rows(name), WAIT_S) for name in "abc"]
        assert model.started.acquire(timeout=WAIT_S)
        drained: list[bool] = []
        drainer = threading.Thread(target=lambda: drained.append(batcher.drain(WAIT_S)))
        drainer.start()
        while True:
            try:
                batcher.submit(rows("late"), WAIT_S)
            except ShuttingDown:
                break
        model.is_held = False
        model.gate.release(10)
        drainer.join(WAIT_S)
        assert drained == [True]
        assert [result(ticket) for ticket in tickets] == [["a"], ["b"], ["c"]]


def test_a_drain_that_runs_out_of_time_answers_everyone() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        tickets = [batcher.submit(rows(name), WAIT_S) for name in "ab"]
        assert model.started.acquire(timeout=WAIT_S)
        assert not batcher.drain(0)
        for ticket in tickets:
            with pytest.raises(ShuttingDown):
                result(ticket)


def test_a_dead_worker_leaves_no_future_open() -> None:
    def die(batch: list[Any]) -> list[Any]:
        raise SystemExit  # not an Exception: it ends the thread

    batcher = Batcher(die, max_batch_rows=4, max_batch_tokens=1000, max_queued_rows=20)
    tickets = [batcher.submit(rows(*"abcdef"), WAIT_S), batcher.submit(rows("g"), WAIT_S)]
    with pytest.raises(SystemExit):
        batcher.work()
    batcher.die()
    for ticket in tickets:
        with pytest.raises(WorkerDead):
            result(ticket)
    with pytest.raises(WorkerDead):
        batcher.submit(rows("x"), WAIT_S)


def test_a_window_lets_a_batch_grow_and_ends_early_when_it_is_full() -> None:
    model = FakeModel()
    with running(model, max_batch_rows=2, batch_window_s=WAIT_S) as batcher:
        tickets = [batcher.submit(rows(name), WAIT_S) for name in "ab"]
        assert [result(ticket) for ticket in tickets] == [["a"], ["b"]]
    assert model.batches == [["a", "b"]]


def test_callers_that_come_and_go_at_once_each_get_their_own() -> None:
    def call(batcher: Batcher, name: str, outcomes: list[Any]) -> None:
        for turn in range(30):
            ticket = batcher.submit(rows(f"{name}{turn}"), WAIT_S)
            if turn % 3 == 0:
                batcher.cancel(ticket)
            try:
                outcomes.append(result(ticket) == [f"{name}{turn}"])
            except (CancelledError, ApiError):
                outcomes.append(turn % 3 == 0)

    outcomes: list[Any] = []
    with running(FakeModel(), max_queued_rows=1000) as batcher:
        callers = [threading.Thread(target=call, args=(batcher, name, outcomes)) for name in "abcdefgh"]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(WAIT_S)
    assert len(outcomes) == 240
    assert all(outcomes)


def test_rows_that_ask_the_same_run_once() -> None:
    model = FakeModel(is_held=True)
    with running(model, max_kept_tokens=20) as batcher:
        first = batcher.submit([FakeRow("a", same_as="x")], WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        # While it runs: the same again, and something else twice
        again = [batcher.submit([FakeRow("a", same_as="x"), FakeRow("b", same_as="y")], WAIT_S) for _ in range(2)]
        model.gate.release(2)
        assert first.future.result(WAIT_S) == ["a"]
        assert [ticket.future.result(WAIT_S) for ticket in again] == [["a", "b"]] * 2
        assert model.batches == [["a"], ["b"]]
        assert batcher.num_repeated_rows == 3
        # And when it is over, until others have been asked for since
        assert result(batcher.submit([FakeRow("a", same_as="x")], WAIT_S)) == ["a"]
        assert batcher.num_repeated_rows == 4
        model.gate.release(2)
        assert result(batcher.submit([FakeRow("c", same_as="z")], WAIT_S)) == ["c"]
        assert result(batcher.submit([FakeRow("b", same_as="y")], WAIT_S)) == ["b"]
        assert model.batches == [["a"], ["b"], ["c"], ["b"]]


def test_a_request_whose_results_are_kept_waits_for_nothing() -> None:
    model = FakeModel()
    with running(model, max_kept_tokens=100) as batcher:
        asked = [FakeRow(name, same_as=name) for name in "abc"]
        assert result(batcher.submit(asked, WAIT_S)) == ["a", "b", "c"]
        model.is_held = True
        batcher.submit(rows("held"), WAIT_S)
        again = batcher.submit([FakeRow(name, same_as=name) for name in "cbaa"], WAIT_S)
        assert again.future.result(0) == ["c", "b", "a", "a"]
        assert again.started_at == again.queued_at
        assert (batcher.num_repeated_rows, batcher.num_repeated_tokens) == (4, 40)
        with pytest.raises(FutureTimeout):
            batcher.submit([FakeRow("a", same_as="a"), FakeRow("new")], WAIT_S).future.result(0.05)


def test_only_large_batches_tell_what_a_token_costs() -> None:
    """A small one takes long for each of its tokens, and a kept result no time at all."""
    model = FakeModel()
    with running(model, max_batch_rows=8, max_kept_tokens=1000) as batcher:
        result(batcher.submit([FakeRow("a", same_as="a")], WAIT_S))
        assert batcher._seconds_per_token == 0
        result(batcher.submit(rows(*"bcdefgh"), WAIT_S))
        of_large = batcher._seconds_per_token
        assert of_large > 0
        result(batcher.submit([FakeRow("a", same_as="a")] * 7 + [FakeRow("i")], WAIT_S))
        assert batcher._seconds_per_token == of_large


def test_with_nothing_kept_only_what_shares_a_batch_runs_once() -> None:
    model = FakeModel()
    with running(model) as batcher:
        for _ in range(2):
            asked = [FakeRow("a", same_as="x"), FakeRow("a", same_as="x")]
            assert result(batcher.submit(asked, WAIT_S)) == ["a", "a"]
        assert model.batches == [["a"], ["a"]]


def test_who_leaves_takes_no_answer_from_others_that_ask_the_same() -> None:
    model = FakeModel(is_held=True)
    with running(model) as batcher:
        batcher.submit([FakeRow("other")], WAIT_S)
        assert model.started.acquire(timeout=WAIT_S)
        leaver, stayer = (batcher.submit([FakeRow("a", same_as="x")], WAIT_S) for _ in range(2))
        batcher.cancel(leaver)
        model.gate.release(2)
        assert stayer.future.result(WAIT_S) == ["a"]


def test_a_failure_is_not_passed_on_to_those_who_waited() -> None:
    failures = iter([True])

    def run(rows: list[FakeRow]) -> list[Any]:
        started.set()
        assert go_on.wait(WAIT_S)
        return [InternalError("once") if next(failures, False) else row.name for row in rows]

    started, go_on = threading.Event(), threading.Event()
    with running(run) as batcher:
        first = batcher.submit([FakeRow("a", same_as="x")], WAIT_S)
        assert started.wait(WAIT_S)
        second = batcher.submit([FakeRow("a", same_as="x")], WAIT_S)
        go_on.set()
        with pytest.raises(InternalError):
            first.future.result(WAIT_S)
        assert second.future.result(WAIT_S) == ["a"]


def test_without_memory_a_batch_is_split_once_and_who_needs_too_much_alone_gets_503() -> None:
    sizes: list[int] = []

    def run(rows: list[FakeRow]) -> list[Any]:
        sizes.append(len(rows))
        if sum(row.num_tokens for row in rows) > 100:
            raise OutOfMemory("no memory", retry_after_s=1)
        return [row.name for row in rows]

    gate = threading.Event()
    with running(lambda rows: run(rows) if gate.wait(WAIT_S) else []) as batcher:
        tickets = [batcher.submit([FakeRow(str(n), tokens)], WAIT_S) for n, tokens in enumerate((10, 60, 60, 101))]
        gate.set()
        assert [ticket.future.result(WAIT_S) for ticket in tickets[:3]] == [["0"], ["1"], ["2"]]
        with pytest.raises(OutOfMemory) as caught:
            tickets[3].future.result(WAIT_S)
        assert caught.value.status == 503
        assert batcher.submit([FakeRow("next")], WAIT_S).future.result(WAIT_S) == ["next"]
    assert max(sizes) > 1
    assert sum(size > 1 for size in sizes) <= 1


def test_what_can_wait_is_done_while_nothing_is_queued() -> None:
    left = list(range(3))
    done = threading.Event()

    def idle() -> bool:
        left.pop()
        if not left:
            done.set()
        return bool(left)

    with running(FakeModel(), idle=idle) as batcher:
        assert done.wait(WAIT_S)
        assert batcher.submit([FakeRow("a")], WAIT_S).future.result(WAIT_S) == ["a"]
    assert not left
