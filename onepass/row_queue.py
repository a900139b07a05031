"""The queue: rows that wait, whose turn it is, and which of them go into the next batch.

Knows nothing of the model or of HTTP: rows are whatever has `num_tokens` and a `key`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from onepass.errors import ApiError, DeadlineExceeded

GIANT_ROWS = 16  # a request with more gets short batches, so that others need not wait for it


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
    tokens_per_row: float = field(init=False)
    model_s: float = 0.0  # duration of the batches that it was part of
    is_settled: bool = False  # its outcome is known, and whoever set this resolves the future

    def __post_init__(self) -> None:
        self.tokens_per_row = sum(row.num_tokens for row in self.rows) / max(1, len(self.rows))

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
class QueuedRow:
    """A row of a ticket, taken into a batch."""

    ticket: Ticket
    index: int

    @property
    def row(self) -> RowLike:
        return self.ticket.rows[self.index]


class RowQueue:
    """Clients take turns, and within a client its requests, first come first served: a row each, but a request of few
    rows all of them, so that new ones do not come between. Not locked: the batcher does that."""

    def __init__(self, turn_rows: int = GIANT_ROWS) -> None:
        """turn_rows: how many are few."""
        self._turn_rows = turn_rows
        self._tickets: OrderedDict[Hashable, deque[Ticket]] = OrderedDict()  # by client, the next in turn first
        self._rows: Counter[Hashable] = Counter()  # that wait, by client
        self.num_rows = 0  # that wait

    @property
    def num_tokens(self) -> float:
        """That wait, about."""
        return sum(t.num_waiting * t.tokens_per_row for tickets in self._tickets.values() for t in tickets)

    def num_rows_of(self, client: Hashable) -> int:
        return self._rows[client]

    def num_tokens_before(self, num_rows: int, client: Hashable) -> float:
        """That would run before the last of `num_rows` more rows of this client: who asks less is done sooner."""
        own_turns = 1 if num_rows <= self._turn_rows else num_rows

        def taken(tickets: Iterable[Ticket], turns: int) -> tuple[int, float]:
            """(turns, tokens) of these, each having so many turns at the most."""
            num_turns, tokens = 0, 0.0
            for ticket in tickets:
                takes_all = self._takes_all(ticket)
                num_taken = ticket.num_waiting if takes_all else min(ticket.num_waiting, turns)
                num_turns += 1 if takes_all else num_taken
                tokens += ticket.tokens_per_row * num_taken
            return num_turns, tokens

        turns_before, tokens_before = taken(self._tickets.get(client, ()), own_turns)
        turns = turns_before + own_turns  # that the client has by then, one at a time with the others
        others = [taken(tickets, turns) for other, tickets in self._tickets.items() if other != client]
        return tokens_before + sum(tokens * min(1.0, turns / num_turns) for num_turns, tokens in others)

    def _takes_all(self, ticket: Ticket) -> bool:
        """In one turn."""
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
        """The next batch: turns are taken while rows and padded tokens fit; those of giants beyond their first, up to
        `few_rows`.

        Requests that are resolved, and those whose deadline passed before they started, leave the queue here and cost
        nothing. A row longer than `max_tokens` runs alone. A row that does not fit ends the batch, so that none is
        overtaken for ever.
        """
        batch: list[QueuedRow] = []
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
            batch.append(QueuedRow(ticket, ticket.next_row))
            ticket.started_at = ticket.started_at or now
            ticket.next_row += 1
            if not ticket.num_waiting or not self._takes_all(ticket):
                self._tickets.move_to_end(client)  # behind the others: its next turn comes after theirs
                tickets.rotate(-1)
            if not ticket.num_waiting:
                tickets.pop()
            self._count(client, -1)
        return batch


def too_late(retry_after_s: int) -> DeadlineExceeded:
    return DeadlineExceeded("the request waited in the queue for too long", retry_after_s=retry_after_s)
