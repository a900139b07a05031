"""Plans the passes that answer rows: which rows run together, and which shared beginnings are computed once.

Pure: it sees tokens, the keys of what is kept, costs and limits. It knows nothing of tensors, requests and queues.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onepass.forward.batches import CostModel, Limits, first_fit, plan_batches
from onepass.rows import ID_BYTES, Row, pictures_from

MAX_PAST_TOKENS = 1 << 16  # tokens before the rows of one pass: keys and values are laid out for each row
MAX_NEW_PREFIXES = 64  # computed before the rows that continue them, where one pass continues several prefixes


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the model over several rows.

    A row is computed from its start, after the prefix that it continues, to its end; where answers are not read, to
    the end of its shared tokens. Either all rows of a pass continue a prefix or none does, and all or none are kept.
    """

    rows: tuple[int, ...]  # indices into the rows that were planned
    starts: tuple[int, ...]  # of each row, the number of tokens that come before what is computed
    past_keys: tuple[bytes, ...]  # of each row, the key of the prefix it continues; empty: the rows are whole
    keep_keys: tuple[bytes, ...]  # of each row, the key under which its shared tokens are kept; empty: none are
    reads: bool  # whether answers are read
    num_rows: int  # padding included
    width: int  # tokens to which each row is padded

    def select(self, rows: Sequence[Row]) -> list[Row]:
        """What this pass computes of all rows that were planned."""
        return [rows[index] if self.reads else rows[index].shared_part() for index in self.rows]

    def count_tokens(self, rows: Sequence[Row]) -> int:
        """The tokens that this pass computes, padding excluded. `rows` are those of `select`."""
        return sum(row.num_tokens for row in rows) - sum(self.starts)


class Keys(Protocol):
    """A cache, as a planner sees it."""

    def __contains__(self, key: bytes, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """The keys of the prefixes that are at hand."""

    keys: Keys = frozenset[bytes]()
    pinned: Collection[bytes] = ()  # those kept for good, of text alone: each key is its tokens

    def find_pinned(self, ids: bytes) -> bytes | None:
        """The longest pinned key with which `ids` begins."""
        return max((key for key in self.pinned if ids.startswith(key)), key=len, default=None)

    def __contains__(self, key: bytes) -> bool:
        return key in self.pinned or key in self.keys


@dataclass(frozen=True, slots=True)
class PrefixTokens:
    """The first tokens of a row, which are computed apart from the rest."""

    key: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Planner:
    """How rows become passes; the same rows, with the same prefixes at hand, give the same passes.

    `past_sizes` are the lengths to which the prefixes before the rows of one pass are padded. Without them all rows of
    a pass continue one and the same prefix, which is not copied for them.
    """

    cost: CostModel
    limits: Limits  # of passes over whole rows and over prefixes
    suffix_limits: Limits  # of passes over rows that continue a prefix
    shares: bool  # whether a prefix can be computed apart from the rows that continue it
    min_shared_tokens: int = 1  # a row that shares fewer is computed whole, unless a pinned prefix is at hand
    past_sizes: tuple[int, ...] = ()

    def plan(self, rows: Sequence[Row], kept: Kept) -> list[Pass]:
        """The passes that answer each row exactly once, in the order in which they run."""
        prefixes = {i: prefix for i, row in enumerate(rows) if (prefix := self.find_prefix(row, kept)) is not None}
        passes = self._plan_whole(rows, [index for index in range(len(rows)) if index not in prefixes])
        members_of: dict[bytes, list[int]] = {}
        for index, prefix in prefixes.items():
            members_of.setdefault(prefix.key, []).append(index)
        if self._reads_and_keeps:
            alone = [key for key, members in members_of.items() if len(members) == 1 and key not in kept]
            passes += self._plan_reading_prefixes(rows, {members_of.pop(key)[0]: key for key in alone}, kept)
        keys, step = list(members_of), MAX_NEW_PREFIXES if self.past_sizes else 1
        for start in range(0, len(keys), step):
            together = keys[start : start + step]
            passes += self._plan_prefixes(rows, {members_of[key][0]: key for key in together if key not in kept}, kept)
            members = sorted(index for key in together for index in members_of[key])
            passes += self._plan_suffixes(rows, {index: prefixes[index] for index in members})
        return passes

    @property
    def _reads_and_keeps(self) -> bool:
        """Whether a new prefix with one row is computed in the same pass as the row. It is not if answers have to be
        the same to the bit, and not with graphs, whose passes do the one or the other."""
        return not self.past_sizes and self.limits.max_rows > 1

    def find_prefix(self, row: Row, kept: Kept) -> PrefixTokens | None:
        """The first tokens of the row that are computed apart, or None.

        They are computed apart for any row whose shared tokens are many enough, whatever else is asked, so that its
        answers are the same however often and with whatever they are asked. A row that shares fewer tokens may still
        begin with a pinned prefix, which is the template's own."""
        if not self.shares:
            return None
        if row.num_shared >= self.min_shared_tokens:
            return PrefixTokens(row.shared_key(), row.num_shared)
        pinned = kept.find_pinned(row.shared_ids())
        return None if pinned is None else PrefixTokens(pinned, len(pinned) // ID_BYTES)

    def plan_prefix(self, row: Row) -> Pass:
        """The pass that computes the shared tokens of one row and keeps them."""
        return Pass((0,), (0,), (), (row.shared_key(),), False, *self.limits.bucket(1, row.num_shared))

    def _plan_whole(self, rows: Sequence[Row], chosen: list[int]) -> list[Pass]:
        lengths, shows = [rows[i].num_tokens for i in chosen], [bool(rows[i].pictures) for i in chosen]
        return [
            Pass(take(chosen, batch.rows), (0,) * len(batch.rows), (), (), True, batch.num_rows, batch.width)
            for batch in plan_batches(lengths, self.cost, self.limits, shows)
        ]

    def _plan_prefixes(self, rows: Sequence[Row], key_of: Mapping[int, bytes], kept: Kept) -> Iterable[Pass]:
        """Passes that compute the prefixes with these keys, each from one row that begins with it. A prefix that is
        computed alone continues the pinned one with which it begins."""
        chosen = list(key_of)
        parts = [rows[i].shared_part() for i in chosen]
        lengths, shows = [part.num_tokens for part in parts], [bool(part.pictures) for part in parts]
        for batch in plan_batches(lengths, self.cost, self.limits, shows):
            members = take(chosen, batch.rows)
            keys = tuple(key_of[index] for index in members)
            past = kept.find_pinned(rows[members[0]].shared_ids()) if len(members) == 1 else None
            if past is None:
                yield Pass(members, (0,) * len(members), (), keys, False, batch.num_rows, batch.width)
            else:
                start = len(past) // ID_BYTES
                size = self.limits.bucket(1, lengths[batch.rows[0]] - start)
                yield Pass(members, (start,), (past,), keys, False, *size)

    def _plan_reading_prefixes(self, rows: Sequence[Row], key_of: Mapping[int, bytes], kept: Kept) -> Iterable[Pass]:
        """Passes over rows, each the only one with a new prefix, that read answers and keep the prefixes as well."""
        chosen = list(key_of)
        pasts = [kept.find_pinned(rows[i].shared_ids()) for i in chosen]
        starts = [0 if past is None else len(past) // ID_BYTES for past in pasts]
        lengths = [rows[i].num_tokens - start for i, start in zip(chosen, starts, strict=True)]
        groups = [(past, bool(rows[i].pictures)) for i, past in zip(chosen, pasts, strict=True)]
        for batch in plan_batches(lengths, self.cost, self.limits, groups):
            members, past = take(chosen, batch.rows), pasts[batch.rows[0]]
            past_keys = () if past is None else (past,) * len(members)
            keys = tuple(key_of[index] for index in members)
            yield Pass(members, take(starts, batch.rows), past_keys, keys, True, batch.num_rows, batch.width)

    def _plan_suffixes(self, rows: Sequence[Row], prefixes: Mapping[int, PrefixTokens]) -> Iterable[Pass]:
        """Passes over rows that continue a prefix which is at hand when they run."""
        chosen = list(prefixes)
        lengths = [rows[i].num_tokens - prefixes[i].num_tokens for i in chosen]
        groups: list[Hashable] = [self._suffix_group(rows[i], prefixes[i]) for i in chosen]
        for batch in plan_batches(lengths, self.cost, self.suffix_limits, groups):
            longest = max(rows[chosen[place]].num_tokens for place in batch.rows)
            most = max(1, MAX_PAST_TOKENS // longest)
            for start in range(0, len(batch.rows), most):
                places = batch.rows[start : start + most]
                members = take(chosen, places)
                starts = tuple(prefixes[index].num_tokens for index in members)
                size = self.suffix_limits.bucket(len(places), max(lengths[place] for place in places))
                yield Pass(members, starts, tuple(prefixes[index].key for index in members), (), True, *size)

    def _suffix_group(self, row: Row, prefix: PrefixTokens) -> Hashable:
        """Rows of one group may share a pass: those of one prefix, or of prefixes of like length where a pass has a
        place for the prefix of each row. Rows that show pictures after their prefix run apart."""
        if not self.past_sizes:
            return prefix.key
        shows = bool(pictures_from(row.pictures, prefix.num_tokens))
        return first_fit(self.past_sizes, prefix.num_tokens), shows


def take(values: Sequence[int], places: Iterable[int]) -> tuple[int, ...]:
    return tuple(values[place] for place in places)
