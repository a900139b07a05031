"""This module is the loop of the one worker thread. It decides which requests are admitted to the queue, when a batch
runs, and what happens to each row.

It knows nothing of the model and of HTTP: `run` is any function that answers a list of rows.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from onepass.cache import LruCache
from onepass.errors import ApiError, InternalError, Overloaded, ShuttingDown, WorkerDead
from onepass.row_queue import GIANT_ROWS, QueuedRow, RowLike, RowQueue, Ticket, too_late
from onepass.status import QueueStatus

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 29  # The official SDK gives up after 30 s in all.
RATE_SMOOTHING = 0.2  # This is the weight of the newest batch in the measured rate.
# A batch with at least this share of the maximum rows or tokens shows what a token costs in a full batch.
LARGE_SHARE = 0.25


def adapt_rows(few: int, num_rows: int, seconds: float, max_seconds: float, max_rows: int) -> int:
    """Estimate how many rows take `max_seconds`, from the rows and the seconds of the last batch.

    A request that arrives while a batch runs waits for the batch to end. A batch that holds the rows of one giant
    request must therefore be short. A batch in which many requests have their turn may be long: all of them wait for
    it, and it is the cheapest way to serve them.
    """
    if seconds <= max_seconds and num_rows < few:
        return few  # The batch had fewer rows and was fast enough, so it gives no new information.
    times = min(2.0, max_seconds / seconds) if seconds else 2.0
    return max(1, min(max_rows, int(num_rows * times)))


class Batcher:
    """A batcher takes rows and gives results. Only the worker thread calls `work`; any thread may call the rest."""

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
        max_wait_s: float = math.inf,
        max_kept_tokens: int = 0,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        """`run` answers a batch with one result for each row. A result that is an `ApiError` fails only its own
        request. Other results are kept for the next time that the same row is asked, up to the results of rows that
        have `max_kept_tokens` tokens in all.

        A giant request gets only its turn in a batch if more rows would make the batch take longer than `max_batch_s`.
        While a batch takes longer than `stall_s`, no request is admitted. A request that would wait for longer than
        `max_wait_s` is not admitted either, unless one batch takes all waiting rows.

        `idle` does a small part of the work that can wait, while nothing is queued. It returns whether more is left."""
        self._run, self._idle = run, idle
        self._max_rows, self._max_tokens = max_batch_rows, max_batch_tokens
        self._max_queued_rows, self._window_s = max_queued_rows, batch_window_s
        self._max_client_rows = max_queued_rows if max_client_rows is None else max_client_rows
        self._queue = RowQueue(min(GIANT_ROWS, max_batch_rows))
        self._changed = threading.Condition()  # Its lock is an RLock.
        self._max_batch_s, self._stall_s, self._max_wait_s = max_batch_s, stall_s, max_wait_s
        self._few_rows = max_batch_rows  # This is the estimated number of rows that take `max_batch_s`.
        self._is_draining = self._is_dead = False
        self._running: list[QueuedRow] = []  # The model computes this batch now.
        # Each result is kept with its row's number of tokens, which stands for the result's size: every option has at
        # least one token.
        self._kept: LruCache[Hashable, tuple[int, Any]] = LruCache(max_kept_tokens, lambda kept: kept[0])
        self._has_idle_work = True
        self._seconds_per_token = 0.0  # It is measured on large batches only, since a full queue makes large batches.
        self.num_batches = self.num_rows = 0
        # The entries count the batches of up to 1, 2, 4, 8... rows.
        self.batch_rows = [0] * ((max_batch_rows - 1).bit_length() + 1)
        # These rows are answered by the run of another row with the same key, which ran earlier or in the same batch.
        self.num_repeated_rows = 0
        self.num_repeated_tokens = 0  # This counts the tokens of those rows.
        self.beat_at = time.monotonic()  # The worker last looked for a batch at this time.

    def submit(self, rows: Sequence[RowLike], timeout_s: float, client: Hashable = 0) -> Ticket:
        """Queue all `rows`, or none of them. If all their results are kept, the ticket is resolved at once.

        Raises `Overloaded`, `ShuttingDown` or `WorkerDead`."""
        now = time.monotonic()
        ticket = Ticket(rows, now + timeout_s, now, client)
        keys = [row.key for row in rows]
        with self._changed:
            if self._is_dead:
                raise WorkerDead
            if self._is_draining:
                raise ShuttingDown
            kept = self._find_kept(keys)
            has_all = len(kept) == len(set(keys))
            if has_all:
                self._count_repeated(rows, ran=())
                ticket.started_at, ticket.is_settled = now, True
            elif error := self.why_refused(len(rows), client):
                raise error
            else:
                self._queue.append(ticket)
                self._changed.notify_all()
        if has_all:
            ticket.resolve([kept[key] for key in keys])
        return ticket

    def _find_kept(self, keys: Sequence[Hashable]) -> dict[Hashable, Any]:
        """Return the results that are kept for these keys. The caller holds `self._changed`."""
        return {key: result for key, (_, result) in self._kept.find(keys).items()}

    def _count_repeated(self, asked: Collection[RowLike], ran: Collection[RowLike]) -> None:
        """Count the rows that were asked but did not run. The caller holds `self._changed`."""
        self.num_repeated_rows += len(asked) - len(ran)
        self.num_repeated_tokens += sum(row.num_tokens for row in asked) - sum(row.num_tokens for row in ran)

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request whose caller has left. Rows that have not started do not run; other results are dropped."""
        with self._changed:
            if ticket.future.cancel():
                self._queue.remove(ticket)
                self._changed.notify_all()  # A drain may wait for an empty queue.

    def expire(self, ticket: Ticket) -> None:
        """Fail a request whose deadline has passed, unless one of its rows has started."""
        with self._changed:
            if not ticket.next_row:
                self._queue.remove(ticket)
                ticket.resolve(too_late(self._retry_after_s()))
                self._changed.notify_all()

    def why_refused(self, num_rows: int, client: Hashable = None) -> Overloaded | None:
        """Return why `num_rows` more rows of this client would not be admitted, or None if they would be. The default
        client has no waiting rows."""
        with self._changed:
            waiting, of_client = self._queue.num_rows, self._queue.num_rows_of(client)
            if waiting + num_rows > self._max_queued_rows:
                said = f"the queue is full: {waiting} rows wait, at most {self._max_queued_rows} may"
                return Overloaded(said, retry_after_s=self._retry_after_s())
            if of_client + num_rows > self._max_client_rows:
                said = f"{of_client} rows of this API key wait, at most {self._max_client_rows} may"
                return Overloaded(said, retry_after_s=self._retry_after_s())
            if waiting >= self._max_rows:
                wait_s = self._queue.num_tokens_before(num_rows, client) * self._seconds_per_token
                if wait_s > self._max_wait_s:
                    said = f"the answer would take about {wait_s:.3g} s, at most {self._max_wait_s:g} s is waited"
                    return Overloaded(said, retry_after_s=self._retry_after_s(wait_s - self._max_wait_s))
            if self._running and (age_s := time.monotonic() - self.beat_at) > self._stall_s:
                said = f"the model has been at one batch for {age_s:.0f} s"
                return Overloaded(said, retry_after_s=MAX_RETRY_AFTER_S)
        return None

    def describe(self) -> QueueStatus:
        """The queue's part of `/health`. The age of the worker's beat is 0 while it has nothing to do."""
        is_busy = self._running or self._queue.num_rows
        return QueueStatus(
            queued_rows=self._queue.num_rows,
            batches=self.num_batches,
            rows=self.num_rows,
            batch_rows=list(self.batch_rows),
            worker_beat_age_s=round(time.monotonic() - self.beat_at, 3) if is_busy else 0.0,
            repeated_rows=self.num_repeated_rows,
            tokens_repeated=self.num_repeated_tokens,
        )

    def _retry_after_s(self, wait_s: float | None = None) -> int:
        """Return the seconds after which a client should try again.

        `wait_s` is the time until there is room. Without it, this is the time until all waiting rows have run.
        """
        if wait_s is None:
            wait_s = self._queue.num_tokens * self._seconds_per_token
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))

    def work(self) -> None:
        """Serve until the batcher is drained. Only the worker thread calls this."""
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            if batch:
                self._serve(batch)
            else:
                self._has_idle_work = self._idle()

    def _next_batch(self) -> list[QueuedRow] | None:
        """Wait for a batch. The batch is empty while there is idle work to do, and None at the end."""
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
                        retry_after_s=self._retry_after_s(),
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
        """Wait for more rows for as long as `--batch-window-ms` allows, while the batch has room for them."""
        while 0 < self._queue.num_rows < self._max_rows and not self._is_draining:
            left = self._queue.first_queued_at() + self._window_s - time.monotonic()
            if left <= 0:
                return
            self._changed.wait(left)

    def _serve(self, batch: list[QueuedRow]) -> None:
        started = time.monotonic()
        results, ran = self._run_each_once(batch)
        seconds = time.monotonic() - started
        logger.debug("batch: rows=%d ms=%.1f", len(batch), seconds * 1e3)
        self.num_batches += 1
        self.num_rows += len(batch)
        self.batch_rows[(len(batch) - 1).bit_length()] += 1
        self._few_rows = adapt_rows(self._few_rows, len(ran), seconds, self._max_batch_s, self._max_rows)
        num_tokens = sum(row.num_tokens for row in ran)
        if len(ran) >= LARGE_SHARE * self._max_rows or num_tokens >= LARGE_SHARE * self._max_tokens:
            weight = RATE_SMOOTHING if self._seconds_per_token else 1.0
            self._seconds_per_token += (seconds / num_tokens - self._seconds_per_token) * weight
        settled: list[tuple[Ticket, list[Any] | ApiError]] = []
        with self._changed:
            for ticket in {id(entry.ticket): entry.ticket for entry in batch}.values():
                ticket.model_s += seconds
            for entry, result in zip(batch, results, strict=True):
                outcome = self._note(entry.ticket, entry.index, result)
                if outcome is not None and not entry.ticket.is_settled:
                    entry.ticket.is_settled = True
                    settled.append((entry.ticket, outcome))
        for ticket, outcome in settled:  # This runs outside the lock, since the threads it wakes may need the lock.
            ticket.resolve(outcome)

    def _note(self, ticket: Ticket, index: int, result: Any) -> list[Any] | ApiError | None:
        """Note the result of one row. Return the outcome of its request if this result settles it."""
        ticket.results[index] = result
        if isinstance(result, ApiError):
            self._queue.remove(ticket)
            return result
        if len(ticket.results) == len(ticket.rows):
            return [ticket.results[row] for row in range(len(ticket.rows))]
        return None

    def _run_each_once(self, batch: list[QueuedRow]) -> tuple[list[Any], list[RowLike]]:
        """Return the results in order, and the rows that ran.

        One row of each key runs. A row whose result is kept does not run.
        """
        keys = [entry.row.key for entry in batch]
        with self._changed:
            results = self._find_kept(keys)
        to_run = {key: entry.row for key, entry in zip(keys, batch, strict=True) if key not in results}
        found = self._run_or_isolate(list(to_run.values()))
        with self._changed:
            for key, result in zip(to_run, found, strict=True):
                results[key] = result
                if not isinstance(result, ApiError):
                    self._kept.put(key, (to_run[key].num_tokens, result))
            self._count_repeated([entry.row for entry in batch], to_run.values())
        return [results[key] for key in keys], list(to_run.values())

    def _run_or_isolate(self, rows: list[RowLike]) -> list[Any]:
        """Run a batch. If it fails or runs out of memory, run it again row by row, so that only the bad row fails."""
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
        """Admit no more requests and let the worker end. Return whether all queued requests were answered in time.

        Requests that are left after `timeout_s` fail with `ShuttingDown`.
        """
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()
            is_empty = self._changed.wait_for(
                lambda: self._is_dead or not (self._queue.num_rows or self._running), timeout_s
            )
            self._fail_all(ShuttingDown())
        return is_empty

    def die(self) -> None:
        """Fail all waiting requests and admit no more, since the worker has stopped."""
        with self._changed:
            self._is_dead = True
            self._fail_all(WorkerDead())
            self._changed.notify_all()

    def _fail_all(self, error: ApiError) -> None:
        for ticket in [*self._queue.clear(), *(entry.ticket for entry in self._running)]:
            if not ticket.is_settled:
                ticket.is_settled = True
                ticket.resolve(error)
