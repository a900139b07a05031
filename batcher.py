"""The queue and the one worker thread: which rows go into the next batch, and what becomes of each.

Knows nothing of the model or of HTTP: rows are whatever has `num_tokens` and a `key`, and `run` is whatever answers a
list of them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from errors import ApiError, DeadlineExceeded, InternalError, Overloaded, ShuttingDown, WorkerDead
from row_cache import RowCache

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 29  # the official SDK gives up after 30 s in all
GIANT_ROWS = 16  # a request with more gets short batches, so that others need not wait for it
RATE_SMOOTHING = 0.2  # weight of the newest batch in the measured rate


class RowLike(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def key(self) -> Hashable:
        """Rows with the same key have the same result."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the queue. Made by any thread, changed under the batcher's lock alone.

    `future` resolves to the results of `rows`, in order, or to an `ApiError`.
    """

    rows: Sequence[RowLike]
    deadline: float  # time.monotonic() after which it does not start
    queued_at: float
    client: Hashable = 0  # whose it is
    future: Future[list[Any]] = field(default_factory=Future)
    results: dict[int, Any] = field(default_factory=dict)  # row -> result
    next_row: int = 0  # the rows before it have started
    started_at: float = 0.0
    model_s: float = 0.0  # duration of the batches that it was part of
    is_settled: bool = False  # its outcome is known, and whoever set this resolves the future

    @property
    def num_waiting(self) -> int:
        return len(self.rows) - self.next_row

    def resolve(self, outcome: list[Any] | ApiError) -> None:
        """Set the outcome, unless the caller has cancelled or one row has failed before."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, ApiError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a ticket, taken into a batch."""

    ticket: Ticket
    index: int

    @property
    def row(self) -> RowLike:
        return self.ticket.rows[self.index]


class RowQueue:
    """Clients take turns, and within a client its requests, first come first served, a row each. Not locked: the
    batcher does that."""

    def __init__(self) -> None:
        self._tickets: OrderedDict[Hashable, deque[Ticket]] = OrderedDict()  # by client, the next in turn first
        self._rows: Counter[Hashable] = Counter()  # that wait, by client
        self.num_rows = 0  # that wait

    def num_rows_of(self, client: Hashable) -> int:
        return self._rows[client]

    def append(self, ticket: Ticket) -> None:
        self._tickets.setdefault(ticket.client, deque()).append(ticket)
        self._count(ticket.client, ticket.num_waiting)

    def remove(self, ticket: Ticket) -> None:
        tickets = self._tickets.get(ticket.client, ())
        if ticket in tickets:
            assert isinstance(tickets, deque)
            tickets.remove(ticket)
            self._count(ticket.client, -ticket.num_waiting)

    def _count(self, client: Hashable, num_rows: int) -> None:
        self.num_rows += num_rows
        self._rows[client] += num_rows
        if not self._tickets[client]:
            del self._tickets[client], self._rows[client]

    def clear(self) -> list[Ticket]:
        tickets = [ticket for of_client in self._tickets.values() for ticket in of_client]
        self._tickets.clear()
        self._rows.clear()
        self.num_rows = 0
        return tickets

    def first_queued_at(self) -> float:
        return min(tickets[0].queued_at for tickets in self._tickets.values())

    def take_batch(
        self, *, max_rows: int, max_tokens: int, now: float, few_rows: int | None = None, retry_after_s: int = 1
    ) -> list[Entry]:
        """The next batch: turns are taken while rows and padded tokens fit; those of giants beyond their first, up to
        `few_rows`.

        Requests that are resolved, and those whose deadline passed before they started, leave the queue here and cost
        nothing. A row longer than `max_tokens` runs alone. A row that does not fit ends the batch, so that none is
        overtaken for ever.
        """
        batch: list[Entry] = []
        longest = 0
        members: set[int] = set()
        passed: set[int] = set()  # who let the others go first since the last row was taken
        while self._tickets and len(batch) < max_rows:
            client, tickets = next(iter(self._tickets.items()))
            ticket = tickets[0]
            if ticket.deadline < now and not ticket.next_row:
                ticket.resolve(too_late(retry_after_s))
            if ticket.future.done():
                self.remove(ticket)
                continue
            is_giant = len(ticket.rows) > GIANT_ROWS and id(ticket) in members
            if is_giant and len(batch) >= (few_rows or max_rows):
                if id(ticket) in passed:
                    break  # nobody else has a row
                passed.add(id(ticket))
                self._tickets.move_to_end(client)
                tickets.rotate(-1)
                continue
            longest = max(longest, ticket.rows[ticket.next_row].num_tokens)
            if batch and longest * (len(batch) + 1) > max_tokens:
                break
            members.add(id(ticket))
            passed.clear()
            batch.append(Entry(ticket, ticket.next_row))
            ticket.started_at = ticket.started_at or now
            ticket.next_row += 1
            self._tickets.move_to_end(client)  # behind the others: its next turn comes after theirs
            tickets.rotate(-1)
            if not ticket.num_waiting:
                tickets.pop()
            self._count(client, -1)
        return batch


def too_late(retry_after_s: int) -> DeadlineExceeded:
    return DeadlineExceeded("the request waited in the queue for too long", retry_after_s=retry_after_s)


def adapt_rows(few: int, num_rows: int, seconds: float, max_seconds: float, max_rows: int) -> int:
    """How many rows take `max_seconds`, by what the last batch took.

    Whoever comes while a batch runs waits for its end, so that one made of a giant request's rows has to be short. One
    in which many requests have their turn may be long: they all wait for it, and it is the cheapest way to serve them.
    """
    if seconds <= max_seconds and num_rows < few:
        return few  # it had fewer: no news
    times = min(2.0, max_seconds / seconds) if seconds else 2.0
    return max(1, min(max_rows, int(num_rows * times)))


class Batcher:
    """Rows in, results out. `submit`, `load` and `drain` belong to any thread; `work` to the worker thread."""

    def __init__(
        self,
        run: Callable[[list[Any]], list[Any]],
        *,
        max_batch_rows: int,
        max_batch_tokens: int,
        max_queued_rows: int,
        max_client_rows: int | None = None,
        batch_window_s: float = 0.0,
        max_batch_s: float = math.inf,
        stall_s: float = math.inf,
        max_kept_tokens: int = 0,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`run` answers a batch, one result a row, a result that is an `ApiError` failing its request alone; the others
        are kept for when the row is asked for again, those of `max_kept_tokens`. A giant request gets no more of a
        batch than its turn where that would take longer than `max_batch_s`. While one takes longer than `stall_s`,
        nothing is admitted.

        `idle` does a little of what can wait, while nothing is queued; it returns whether more is left."""
        self._run, self._idle = run, idle
        self._max_rows, self._max_tokens = max_batch_rows, max_batch_tokens
        self._max_queued_rows, self._window_s = max_queued_rows, batch_window_s
        self._max_client_rows = max_queued_rows if max_client_rows is None else max_client_rows
        self._queue = RowQueue()
        self._changed = threading.Condition()
        self._max_batch_s, self._stall_s = max_batch_s, stall_s
        self._few_rows = max_batch_rows  # how many take `max_batch_s`
        self._is_draining = self._is_dead = False
        self._running: list[Entry] = []  # the batch in the model
        self._kept = RowCache(max_kept_tokens)
        self._has_idle_work = True
        self._seconds_per_row = 0.0
        self.num_batches = self.num_rows = 0
        self.batch_rows = [0] * ((max_batch_rows - 1).bit_length() + 1)  # batches of up to 1, 2, 4, 8... rows
        self.num_repeated_rows = 0  # answered by an earlier run, or that of another row with the same key
        self.beat_at = time.monotonic()  # when the worker last came round

    def submit(self, rows: Sequence[RowLike], timeout_s: float, client: Hashable = 0) -> Ticket:
        """Queue all `rows` or none. Raises `Overloaded`, `ShuttingDown` or `WorkerDead`."""
        now = time.monotonic()
        ticket = Ticket(rows, now + timeout_s, now, client)
        with self._changed:
            if self._is_dead:
                raise WorkerDead("the model's worker has stopped; the server must be restarted", retry_after_s=5)
            if self._is_draining:
                raise ShuttingDown("the server is shutting down", retry_after_s=1)
            if error := self.find_overload(len(rows), client):
                raise error
            self._queue.append(ticket)
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """The caller is gone: rows that have not started cost no forward pass, the result of others is dropped."""
        with self._changed:
            if ticket.future.cancel():
                self._queue.remove(ticket)
                self._changed.notify_all()  # a drain may wait for an empty queue

    def expire(self, ticket: Ticket) -> None:
        """The deadline passed: fail the request unless a row of it has started."""
        with self._changed:
            if not ticket.next_row:
                self._queue.remove(ticket)
                ticket.resolve(too_late(self._retry_after_s(self._queue.num_rows)))
                self._changed.notify_all()

    def find_overload(self, num_rows: int, client: Hashable = None) -> Overloaded | None:
        """Why `num_rows` more would not be admitted, of this client or of whoever has none waiting."""
        waiting, of_client = self._queue.num_rows, self._queue.num_rows_of(client)
        if waiting + num_rows > self._max_queued_rows:
            said = f"the queue is full: {waiting} rows wait, at most {self._max_queued_rows} may"
            return Overloaded(said, retry_after_s=self._retry_after_s(waiting))
        if of_client + num_rows > self._max_client_rows:
            said = f"{of_client} rows of this API key wait, at most {self._max_client_rows} may"
            return Overloaded(said, retry_after_s=self._retry_after_s(waiting))
        if self._running and (age_s := time.monotonic() - self.beat_at) > self._stall_s:
            return Overloaded(f"the model has been at one batch for {age_s:.0f} s", retry_after_s=MAX_RETRY_AFTER_S)
        return None

    def describe(self) -> dict[str, Any]:
        """The queue's part of `/health`. The beat's age is 0 while the worker has nothing to do."""
        is_busy = self._running or self._queue.num_rows
        return {
            "queued_rows": self._queue.num_rows,
            "batches": self.num_batches,
            "rows": self.num_rows,
            "batch_rows": list(self.batch_rows),
            "worker_beat_age_s": round(time.monotonic() - self.beat_at, 3) if is_busy else 0.0,
            "repeated_rows": self.num_repeated_rows,
        }

    def _retry_after_s(self, waiting: int) -> int:
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(waiting * self._seconds_per_row)))

    def work(self) -> None:
        """Serve until drained. Worker thread only."""
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            if batch:
                self._serve(batch)
            else:
                self._has_idle_work = self._idle()

    def _next_batch(self) -> list[Entry] | None:
        """Waits for one; empty while there is something else to do, None at the end."""
        with self._changed:
            self._running = []
            self._changed.notify_all()
            while True:
                self.beat_at = time.monotonic()
                if self._queue.num_rows:
                    self._wait_window()
                    batch = self._queue.take_batch(
                        max_rows=self._max_rows,
                        few_rows=self._few_rows,
                        max_tokens=self._max_tokens,
                        now=time.monotonic(),
                        retry_after_s=self._retry_after_s(self._queue.num_rows),
                    )
                    if batch:
                        self._running = batch
                        return batch
                elif self._is_draining:
                    return None
                elif self._has_idle_work:
                    return []
                else:
                    self._changed.wait()

    def _wait_window(self) -> None:
        """`--batch-window-ms`: give more work the time to arrive, while there is room for it."""
        while 0 < self._queue.num_rows < self._max_rows and not self._is_draining:
            left = self._queue.first_queued_at() + self._window_s - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _serve(self, batch: list[Entry]) -> None:
        started = time.monotonic()
        results, num_run = self._run_each_once(batch)
        seconds = time.monotonic() - started
        logger.debug("batch: rows=%d ms=%.1f", len(batch), seconds * 1e3)
        self.num_batches += 1
        self.num_rows += len(batch)
        self.batch_rows[(len(batch) - 1).bit_length()] += 1
        self._few_rows = adapt_rows(self._few_rows, num_run, seconds, self._max_batch_s, self._max_rows)
        per_row = seconds / len(batch)
        self._seconds_per_row += (per_row - self._seconds_per_row) * (RATE_SMOOTHING if self._seconds_per_row else 1.0)
        settled: list[tuple[Ticket, list[Any] | ApiError]] = []
        with self._changed:
            for ticket in {id(entry.ticket): entry.ticket for entry in batch}.values():
                ticket.model_s += seconds
            for entry, result in zip(batch, results, strict=True):
                outcome = self._note(entry.ticket, entry.index, result)
                if outcome is not None and not entry.ticket.is_settled:
                    entry.ticket.is_settled = True
                    settled.append((entry.ticket, outcome))
        for ticket, outcome in settled:  # outside the lock: those who wait are woken here, and they may want it
            ticket.resolve(outcome)

    def _note(self, ticket: Ticket, index: int, result: Any) -> list[Any] | ApiError | None:
        """The outcome of the request, if this result settles it."""
        ticket.results[index] = result
        if isinstance(result, ApiError):
            self._queue.remove(ticket)
            return result
        if len(ticket.results) == len(ticket.rows):
            return [ticket.results[row] for row in range(len(ticket.rows))]
        return None

    def _run_each_once(self, batch: list[Entry]) -> tuple[list[Any], int]:
        """Results in order, and how many rows ran: of those with the same key one, and none whose result is kept."""
        keys = [entry.row.key for entry in batch]
        results = self._kept.find(keys)
        to_run = {key: entry.row for key, entry in zip(keys, batch, strict=True) if key not in results}
        for key, result in zip(to_run, self._run_or_isolate(list(to_run.values())), strict=True):
            results[key] = result
            if not isinstance(result, ApiError):
                self._kept.put(key, to_run[key].num_tokens, result)
        self.num_repeated_rows += len(batch) - len(to_run)
        return [results[key] for key in keys], len(to_run)

    def _run_or_isolate(self, rows: list[RowLike]) -> list[Any]:
        """A batch that fails, or has no memory, is run again row by row, so that only the culprit fails."""
        if not rows:
            return []
        try:
            results = self._run(rows)
            if len(results) != len(rows):
                raise RuntimeError(f"{len(rows)} rows gave {len(results)} results")
            return results
        except ApiError as err:
            logger.error("batch failed: rows=%d tokens=%d: %s", len(rows), sum(r.num_tokens for r in rows), err.message)
            if len(rows) == 1:
                return [err]
        except Exception:
            logger.exception("batch failed: rows=%d", len(rows))
            if len(rows) == 1:
                return [InternalError("the model failed on this request")]
        return [result for row in rows for result in self._run_or_isolate([row])]

    def drain(self, timeout_s: float) -> bool:
        """Admit nothing more and let the worker end; True if all that was queued was answered in time.

        What is left then fails with `ShuttingDown`.
        """
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()
            is_empty = self._changed.wait_for(
                lambda: self._is_dead or not (self._queue.num_rows or self._running), timeout_s
            )
            self._fail_all(ShuttingDown("the server is shutting down", retry_after_s=1))
        return is_empty

    def die(self) -> None:
        """The worker is gone: fail all that waits, admit nothing more."""
        with self._changed:
            self._is_dead = True
            self._fail_all(WorkerDead("the model's worker has stopped", retry_after_s=5))
            self._changed.notify_all()

    def _fail_all(self, error: ApiError) -> None:
        for ticket in [*self._queue.clear(), *(entry.ticket for entry in self._running)]:
            if not ticket.is_settled:
                ticket.is_settled = True
                ticket.resolve(error)
