"""This module holds the queue: the rows that wait, whose turn it is, and which rows go into the next batch.

It knows nothing of the model and of HTTP: a row is anything that has `num_tokens` and a `key`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from onepass.errors import ApiError, DeadlineExceeded

GIANT_ROWS = 16  # A request with more rows gets short batches, so that others need not wait for it.


class RowLike(Protocol):
    @property
    def num_tokens(self) -> int: ...

    @property
    def key(self) -> Hashable:
        """Rows with the same key have the same result."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A ticket is one request in the queue. Any thread may make it; it changes only under the batcher's lock.

    `future` resolves to the results of `rows`, in order, or to an `ApiError`.
    """

    rows: Sequence[RowLike]
    deadline: float  # This is a value of time.monotonic(); the request does not start after it.
    queued_at: float
    client: Hashable = 0  # This client sent the request.
    future: Future[list[Any]] = field(default_factory=Future)
    results: dict[int, Any] = field(default_factory=dict)  # It maps the index of a row to the row's result.
    next_row: int = 0  # This is the index of the first row that has not started.
    started_at: float = 0.0
    tokens_per_row: float = field(init=False)
    model_s: float = 0.0  # This is the total time of the batches that contained a row of this request.
    is_settled: bool = False  # The outcome is known. The code that sets this also resolves the future.

    def __post_init__(self) -> None:
        self.tokens_per_row = sum(row.num_tokens for row in self.rows) / max(1, len(self.rows))

    @property
    def num_waiting(self) -> int:
        return len(self.rows) - self.next_row

    def resolve(self, outcome: list[Any] | ApiError) -> None:
        """Set the outcome, unless the caller has cancelled the request or one of its rows has already failed."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, ApiError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


@dataclass(frozen=True, slots=True)
class QueuedRow:
    """A queued row is a row of a ticket that has been taken into a batch."""

    ticket: Ticket
    index: int

    @property
    def row(self) -> RowLike:
        return self.ticket.rows[self.index]


class RowQueue:
    """Clients take turns, and the requests of one client take turns in the order in which they came.

    A giant request has more than `turn_rows` rows, and its turn is one row. The turn of any other request is all of its
    rows, so that newer requests do not come between them. The queue has no lock: the batcher calls it under its own.
    """

    def __init__(self, turn_rows: int = GIANT_ROWS) -> None:
        self._turn_rows = turn_rows
        self._tickets: OrderedDict[Hashable, deque[Ticket]] = OrderedDict()  # The client that is next comes first.
        self._rows: Counter[Hashable] = Counter()  # It counts the waiting rows of each client.
        self.num_rows = 0  # This counts all waiting rows.

    @property
    def num_tokens(self) -> float:
        """Estimate the tokens of the rows that wait."""
        return sum(t.num_waiting * t.tokens_per_row for tickets in self._tickets.values() for t in tickets)

    def num_rows_of(self, client: Hashable) -> int:
        return self._rows[client]

    def num_tokens_before(self, num_rows: int, client: Hashable) -> float:
        """Estimate the tokens computed before `num_rows` more rows of this client finish. Small requests wait less."""
        own_turns = 1 if num_rows <= self._turn_rows else num_rows

        def taken(tickets: Iterable[Ticket], turns: int) -> tuple[int, float]:
            """Return the turns and the tokens that these requests take, if each has at most `turns` turns."""
            num_turns, tokens = 0, 0.0
            for ticket in tickets:
                takes_all = self._takes_all(ticket)
                num_taken = ticket.num_waiting if takes_all else min(ticket.num_waiting, turns)
                num_turns += 1 if takes_all else num_taken
                tokens += ticket.tokens_per_row * num_taken
            return num_turns, tokens

        turns_before, tokens_before = taken(self._tickets.get(client, ()), own_turns)
        # The client takes this many turns until then, and each other client takes as many.
        turns = turns_before + own_turns
        others = [taken(tickets, turns) for other, tickets in self._tickets.items() if other != client]
        return tokens_before + sum(tokens * min(1.0, turns / num_turns) for num_turns, tokens in others)

    def _takes_all(self, ticket: Ticket) -> bool:
        """Return whether the request takes all its rows in one turn. A giant request does not."""
        return len(ticket.rows) <= self._turn_rows

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
    ) -> list[QueuedRow]:
        """Take the next batch. Turns are taken while the rows and the padded tokens fit. A giant request gets turns
        beyond its first only while the batch has fewer than `few_rows` rows.

        Requests that are resolved, and those whose deadline passed before they started, leave the queue here and cost
        nothing. A row that is longer than `max_tokens` runs alone. A row that does not fit ends the batch, so that
        later rows cannot overtake it again and again.
        """
        batch: list[QueuedRow] = []
        longest = 0
        members: set[int] = set()  # These requests have a row in the batch.
        while len(batch) < max_rows:
            is_full_for_giants = len(batch) >= (few_rows or max_rows)
            ticket = self._next_ticket(members if is_full_for_giants else set(), now, retry_after_s)
            if ticket is None:
                break
            longest = max(longest, ticket.rows[ticket.next_row].num_tokens)
            if batch and longest * (len(batch) + 1) > max_tokens:
                break
            members.add(id(ticket))
            batch.append(self._take_row(ticket, now))
        return batch

    def _next_ticket(self, passed_over: set[int], now: float, retry_after_s: int) -> Ticket | None:
        """Return the request that is next, or None. A giant request in `passed_over` lets the others go first."""
        passed: set[int] = set()
        while self._tickets:
            client, tickets = next(iter(self._tickets.items()))
            ticket = tickets[0]
            if ticket.deadline < now and not ticket.next_row:
                ticket.resolve(too_late(retry_after_s))
            if ticket.future.done():
                self.remove(ticket)
            elif self._takes_all(ticket) or id(ticket) not in passed_over:
                return ticket
            elif id(ticket) in passed:
                return None  # No other request has a row.
            else:
                passed.add(id(ticket))
                self._end_turn(client)
        return None

    def _take_row(self, ticket: Ticket, now: float) -> QueuedRow:
        """Take the next row of the request that is next in turn."""
        row = QueuedRow(ticket, ticket.next_row)
        ticket.started_at = ticket.started_at or now
        ticket.next_row += 1
        if not ticket.num_waiting or not self._takes_all(ticket):
            self._end_turn(ticket.client)
        if not ticket.num_waiting:
            self._tickets[ticket.client].pop()
        self._count(ticket.client, -1)
        return row

    def _end_turn(self, client: Hashable) -> None:
        """Move the client behind the other clients, and its first request behind its other requests."""
        self._tickets.move_to_end(client)
        self._tickets[client].rotate(-1)


def too_late(retry_after_s: int) -> DeadlineExceeded:
    return DeadlineExceeded(retry_after_s=retry_after_s)
