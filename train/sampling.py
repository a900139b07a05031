"""Chooses what a run sees and in which order: the stream of rows, and which of them share a prompt."""

import json
import random
from collections import defaultdict
from dataclasses import replace

from data import IGNORED, Row, shuffle_options

INTENT_SETS = ("banking77", "clinc150", "hwu64", "snips", "stackoverflow_titles")
SIBLING_SHARE = 0.5  # of the rows whose state has other questions: these join the prompt
FOREIGN_SHARE = 0.06  # of all prompts: questions about other states stand in between, to be read past
LONG_SHARE = 0.002  # of all prompts: so many of those that the prompt has 1,000 to 2,000 tokens
MAX_JOINT, MAX_FOREIGN, NUM_LONG = 6, 4, 25  # questions


def state_key(row: Row) -> str:
    return json.dumps([row.dataset, row.state], ensure_ascii=False)


class Stream:
    """An endless order of rows that depends on the seed alone: the intent sets first, then all rows, epoch by epoch."""

    def __init__(self, rows: list[Row], num_intent_rows: int, seed: int) -> None:
        self.rows, self.seed, self.num_intent_rows = rows, seed, num_intent_rows
        self.intents = [row for row in rows if row.type == "choice" and row.dataset in INTENT_SETS]
        self.orders: dict[tuple[bool, int], list[int]] = {}
        self.by_state: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            self.by_state[state_key(row)].append(row)

    def row_at(self, position: int) -> Row:
        is_intent = position < self.num_intent_rows
        pool = self.intents if is_intent else self.rows
        position -= 0 if is_intent else self.num_intent_rows
        epoch, index = divmod(position, len(pool))
        if (is_intent, epoch) not in self.orders:
            order = list(range(len(pool)))
            random.Random(f"{self.seed}-{is_intent}-{epoch}").shuffle(order)
            self.orders = {(is_intent, epoch): order}
        return pool[self.orders[is_intent, epoch][index]]

    def take(self, start: int, count: int) -> list[Row]:
        return [self.row_at(position) for position in range(start, start + count)]


def sample_groups(rows: list[Row], stream: Stream, rng: random.Random) -> list[list[Row]]:
    """The questions of each prompt, options in a fresh order. All rows of a group have one state."""
    groups = []
    for row in rows:
        group = [row]
        siblings = [other for other in stream.by_state[state_key(row)] if other is not row]
        if siblings and rng.random() < SIBLING_SHARE:
            group += rng.sample(siblings, min(len(siblings), MAX_JOINT - 1))
        num_foreign = 0
        if rng.random() < FOREIGN_SHARE:
            num_foreign = rng.randint(1, MAX_FOREIGN)
        elif rng.random() < LONG_SHARE:
            num_foreign = NUM_LONG
        for other in rng.sample(rows, num_foreign):
            group.append(replace(other, state=row.state, answer=IGNORED))
        rng.shuffle(group)
        groups.append([shuffle_options(one, rng) for one in group])
    return groups
