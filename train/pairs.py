"""Makes minimal pairs: two rows that differ in little and have different answers, so that only reading tells them apart.

Each grammar knows the truth of what it writes. It returns two rows that share their question or their state. Owns
the grammars of facts; what the words in them are, is in pair_banks.py. Knows no model and none of the public sets."""

import argparse
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import banks
import pair_banks
from generate import CITIES, DAYS, MONTHS, Maker, Raw

Pair = tuple[Raw, Raw]
State = Any  # a text, or an object of JSON


def yes_no(make: Maker, kind: str, true: State, false: State, question: str, reverse: str | None = None) -> Pair:
    """`question` holds of the state `true` and not of `false`; `reverse` asks for the contrary."""
    if reverse is not None and make.rng.random() < 0.4:
        return make.noul(kind, false, reverse, True), make.noul(kind, true, reverse, False)
    return make.noul(kind, true, question, True), make.noul(kind, false, question, False)


def which(make: Maker, kind: str, states: tuple[State, State], question: str, names: list[str]) -> Pair:
    """names[0] is right for the first state, names[1] for the second; any others are wrong for both."""
    options = [(name, None) for name in names]
    return (make.choice(kind, states[0], question, options, 0), make.choice(kind, states[1], question, options, 1))


def dressed(make: Maker, first: str, second: str) -> tuple[State, State]:
    """Two texts in the same surroundings: alone, among sentences that say nothing, or as a field of an object."""
    kind = make.rng.random()
    if kind < 0.45:
        return first, second
    before = [make.sentence(make.pick(banks.NEUTRAL)) for _ in range(make.rng.randint(0, 3))]
    after = [make.sentence(make.pick(banks.NEUTRAL)) for _ in range(make.rng.randint(0, 3))]
    whole = [" ".join([*before, text, *after]) for text in (first, second)]
    if kind < 0.75:
        return whole[0], whole[1]
    key, number = make.pick(["text", "message", "note", "body", "document"]), make.rng.randint(100, 9999)
    return {"id": number, key: whole[0]}, {"id": number, key: whole[1]}


def filled(make: Maker, first: str, second: str) -> tuple[str, str]:
    """Two texts whose slots of one name hold the same."""
    one, other = make.fill(f"{first}\0{second}").split("\0")
    return one, other


def people(make: Maker, count: int = 2) -> list[str]:
    """Names of different people."""
    found: set[str] = set()
    while len(found) < count:
        found.add(make.name())
    return make.rng.sample(sorted(found), count)


def near(make: Maker, value: int) -> int:
    """Another number that looks like this one: two digits swapped, one changed, or a little more or less."""
    digits = list(str(value))
    while True:
        kind, changed = make.rng.randrange(3), list(digits)
        at = make.rng.randrange(len(digits))
        if kind == 0 and len(digits) > 1:
            other = make.rng.randrange(len(digits))
            changed[at], changed[other] = changed[other], changed[at]
        elif kind == 1:
            changed[at] = str(make.rng.randrange(10))
        else:
            changed = list(str(max(1, value + make.pick([-10, -2, -1, 1, 2, 10]))))
        if changed != digits and changed[0] != "0":
            return int("".join(changed))


def pair_negation(make: Maker) -> Pair:
    """Something is so, or it is not."""
    yes, no, question, reverse = make.pick(pair_banks.NEGATIONS)
    true, false = dressed(make, *filled(make, make.pick(yes), make.pick(no)))
    if make.rng.random() < 0.25:
        return which(make, "negation", (true, false), make.pick(["Answer: ", ""]) + question, ["yes", "no"])
    return yes_no(make, "negation", true, false, question, reverse)


def pair_roles(make: Maker) -> Pair:
    """Who does it, and to whom."""
    a, b = people(make)
    past, plain, participle = make.pick(pair_banks.DEEDS)
    day = make.pick(DAYS)
    frames = [
        f"{{0}} {past} {{1}} on {day}.",
        f"On {day} {{1}} was {participle} by {{0}}.",
        f"It was {{0}} who {past} {{1}}.",
    ]
    frame = make.pick(frames)
    states = dressed(make, frame.format(a, b), frame.format(b, a))
    kind = make.rng.randrange(3)
    if kind == 0:
        return yes_no(make, "roles", *states, make.pick([f"Did {a} {plain} {b}?", f"{a} {past} {b}.", f"Was {b} {participle} by {a}?"]),
                      f"Did {b} {plain} {a}?")  # fmt: skip
    if kind == 1:
        return which(make, "roles", states, make.pick([f"Who {past} somebody?", f"Who {past} the other?"]), [a, b])
    return which(make, "roles", states, make.pick([f"Who was {participle}?", f"Whom did the other {plain}?"]), [b, a])


def pair_route(make: Maker) -> Pair:
    """From one place to another."""
    a, b, other = make.rng.sample(CITIES, 3)
    frame = make.fill(make.pick(pair_banks.ROUTES)).replace("<from>", "{0}").replace("<to>", "{1}")
    states = dressed(make, frame.format(a, b), frame.format(b, a))
    if make.rng.random() < 0.25:
        states = {"origin": a, "destination": b}, {"origin": b, "destination": a}
    kind = make.rng.randrange(3)
    if kind == 0:
        return yes_no(make, "route", *states, make.pick([f"Is {b} the destination?", f"Does it go to {b}?", f"It starts in {a}."]),
                      make.pick([f"Is {a} the destination?", f"Does it start in {b}?"]))  # fmt: skip
    if kind == 1:
        return which(
            make,
            "route",
            states,
            make.pick(["Where does it go to?", "Destination?", "Which city is the goal?"]),
            [b, a, other],
        )
    return which(
        make,
        "route",
        states,
        make.pick(["Where does it start?", "Which city is the origin?", "From where?"]),
        [a, b, other],
    )


def pair_number(make: Maker) -> Pair:
    """A number, and one that looks like it."""
    value = make.rng.choice([make.rng.randint(11, 99), make.rng.randint(100, 999), make.rng.randint(1000, 99999)])
    wrong = near(make, value)
    frame, what = make.pick(pair_banks.AMOUNTS)
    frame = make.fill(frame).replace("<n>", "{0}")
    states = dressed(make, frame.format(value), frame.format(wrong))
    if make.rng.random() < 0.5:
        claim = frame.format(value)
        return yes_no(make, "number", *states, make.pick([f"Is {what} {value}?", claim, f"Does the text say that {what} is {value}?"]),
                      make.pick([f"Is {what} something else than {value}?", f"Is {what} {wrong}?"]))  # fmt: skip
    names = [str(value), str(wrong)]
    others = {str(near(make, value)) for _ in range(make.rng.randint(0, 3))} - set(names)
    unit = make.pick(["it is {}", "{} in all", "No. {}"])
    return which(make, "number", states, make.pick([f"What is {what}?", f"Which number is {what}?"]),
                 [unit.format(name) for name in [*names, *sorted(others)]])  # fmt: skip


def pair_threshold(make: Maker) -> Pair:
    """More or less than a limit, in a rule or in a question."""
    limit = make.pick([5, 10, 14, 18, 20, 21, 30, 48, 50, 60, 90, 100, 120, 250, 500])
    above, below = (
        limit + make.rng.randint(1, max(2, limit // 2)),
        max(1, limit - make.rng.randint(1, max(2, limit // 2))),
    )
    rule, case, kept, broken = make.pick(pair_banks.LIMITS)
    said, case = rule.replace("<n>", str(limit)), make.fill(case)
    allowed, forbidden = case.replace("<n>", str(below)), case.replace("<n>", str(above))
    if make.rng.random() < 0.5:
        states: tuple[State, State] = {"rule": said, "case": allowed}, {"rule": said, "case": forbidden}
        return yes_no(make, "threshold", *states, make.pick(["Is the rule kept?", "Is this allowed?", "Within the limit?", kept]),
                      make.pick(["Is the rule broken?", "Is the limit exceeded?", broken]))  # fmt: skip
    texts = dressed(make, allowed, forbidden)
    if make.rng.random() < 0.4:
        labels = make.pick(
            [
                ("allowed", "not allowed"),
                ("within the limit", "over the limit"),
                ("approve", "reject"),
                ("ok", "violation"),
            ]
        )
        return which(
            make,
            "threshold",
            texts,
            make.pick([f"{said} Decide.", f"Rule: {said}", f"Apply this rule: {said}"]),
            list(labels),
        )
    return yes_no(make, "threshold", *texts, f"{said} {make.pick([kept, 'Is this allowed?', 'Does it comply?'])}",
                  f"{said} {make.pick([broken, 'Is that broken?'])}")  # fmt: skip


def pair_date(make: Maker) -> Pair:
    """Before or after a date."""
    month, year = make.rng.randrange(12), make.rng.randint(2019, 2027)
    due = make.rng.randint(6, 22)
    early, late = due - make.rng.randint(1, 5), due + make.rng.randint(1, 6)
    style = make.pick(["{d} {m} {y}", "{m} {d}, {y}", "{y}-{n:02d}-{d:02d}", "{d} {m}"])

    def written(day: int) -> str:
        return str(style.format(d=day, m=MONTHS[month], y=year, n=month + 1))

    frame, question, reverse = make.pick(pair_banks.DEADLINES)
    frame = frame.replace("<due>", written(due)).replace("<done>", "{0}")
    states = dressed(make, frame.format(written(early)), frame.format(written(late)))
    if make.rng.random() < 0.25:
        fields = {"due": written(due), "received": written(early)}, {"due": written(due), "received": written(late)}
        return yes_no(make, "date", *fields, "Was it received in time?", "Was it received too late?")
    if make.rng.random() < 0.3:
        return which(make, "date", states, make.pick(["In time or late?", "Was the date met?"]), ["in time", "late"])
    return yes_no(make, "date", *states, question, reverse)


def pair_unit(make: Maker) -> Pair:
    """The same number with another unit."""
    group = make.pick(pair_banks.UNITS)
    first, second = make.rng.sample(group, 2)
    value, thing = make.rng.randint(2, 90), make.pick(banks.NOUNS)
    frame = make.pick(
        [
            f"The {thing} takes {{0}}.",
            f"We measured {{0}} at the {thing}.",
            f"It says {{0}} on the {thing}.",
            f"The limit for the {thing} is {{0}}.",
        ]
    )
    a, b = f"{value} {first}", f"{value} {second}"
    states = dressed(make, frame.format(a), frame.format(b))
    if make.rng.random() < 0.5:
        return yes_no(make, "unit", *states, make.pick([f"Is it {a}?", frame.format(a)]), f"Is it {b}?")
    names = [first, second, *(name for name in group if name not in (first, second))]
    return which(make, "unit", states, make.pick(["Which unit is given?", "In what is it measured?"]), names)


def pair_things(make: Maker) -> Pair:
    """Two things, each with a property: which has which."""
    a, b = make.rng.sample(banks.NOUNS, 2)
    first, second = make.pick(banks.OPPOSITES).split("/")
    frame = make.pick(["The {0} is {2} and the {1} is {3}.", "The {1} is {3}. The {0} is {2}.", "While the {0} is {2}, the {1} is {3}.",
                       "The {0}: {2}. The {1}: {3}."])  # fmt: skip
    states = dressed(make, frame.format(a, b, first, second), frame.format(a, b, second, first))
    if make.rng.random() < 0.25:
        states = {a: first, b: second}, {a: second, b: first}
    kind = make.rng.randrange(3)
    if kind == 0:
        return yes_no(
            make,
            "things",
            *states,
            make.pick([f"Is the {a} {first}?", f"The {b} is {second}."]),
            f"Is the {a} {second}?",
        )
    if kind == 1:
        return which(make, "things", states, make.pick([f"Which one is {first}?", f"What is {first}?"]), [a, b])
    return which(make, "things", states, make.pick([f"How is the {a}?", f"What is said of the {a}?"]), [first, second])


def pair_order(make: Maker) -> Pair:
    """What comes first, and what after it."""
    a, b = make.rng.sample(pair_banks.STEPS, 2)
    frame = make.pick(
        [
            "First we {0}, then we {1}.",
            "Before we {1}, we {0}.",
            "After we {0}, we {1}.",
            "1. {0}\n2. {1}",
            "We {0} and only later {1}.",
        ]
    )
    states = dressed(make, frame.format(a, b), frame.format(b, a))
    if make.rng.random() < 0.5:
        return yes_no(make, "order", *states, make.pick([f"Is the first thing to {a}?", f'Does "{a}" come before "{b}"?']),
                      f'Does "{b}" come before "{a}"?')  # fmt: skip
    return which(make, "order", states, *make.pick([("What comes first?", [a, b]), ("What comes last?", [b, a])]))


def pair_contrast(make: Maker) -> Pair:
    """One thing is wanted and the other is named only to be refused."""
    a, b = make.rng.sample(pair_banks.WANTED, 2)
    frame = make.pick(pair_banks.CONTRASTS)
    told, swapped = frame.format(a[0], b[0]), frame.format(b[0], a[0])
    states = dressed(make, told[0].upper() + told[1:], swapped[0].upper() + swapped[1:])
    if make.rng.random() < 0.55:
        who = make.pick(["the customer", "the writer", "the user", "this person"])
        return yes_no(make, "contrast", *states, make.pick([f"Does {who} want {a[0]}?", f"Is {a[0]} what {who} asks for?", f"Wants {a[0]}."]),
                      f"Does {who} want {b[0]}?")  # fmt: skip
    others = [one for one in pair_banks.WANTED if one not in (a, b)]
    names = [make.pick(one[1]) for one in [a, b, *make.rng.sample(others, make.rng.randint(0, 3))]]
    return which(
        make,
        "contrast",
        states,
        make.pick(["What is asked for?", "Pick the wish.", "Intent?", "What does the writer want?"]),
        names,
    )


def pair_field(make: Maker) -> Pair:
    """A field of an object, among fields that say other things."""
    name, values, asked = make.pick(pair_banks.FIELDS)
    right, wrong = make.rng.sample(values, 2)
    fields: dict[str, Any] = {"id": make.rng.randint(100, 99999), "customer": make.name(), "city": make.pick(CITIES),
                              "items": make.rng.randint(1, 20), "created": f"2026-{make.rng.randint(1, 12):02d}-{make.rng.randint(1, 28):02d}"}  # fmt: skip
    kept = dict(make.rng.sample(sorted(fields.items()), make.rng.randint(1, 5)))
    if make.rng.random() < 0.3:
        kept[f"previous_{name}"] = make.pick([value for value in values if value not in (right, wrong)] or [wrong])
    at = make.rng.randint(0, len(kept))

    def state(value: Any) -> State:
        items = list(kept.items())
        items.insert(at, (name, value))
        return {"order": dict(items)} if is_nested else dict(items)

    is_nested = make.rng.random() < 0.25
    said = [json.dumps(value) if isinstance(value, bool) else str(value) for value in values]
    of = dict(zip(map(str, values), said, strict=True))
    if make.rng.random() < 0.55:
        return yes_no(make, "field", state(right), state(wrong), make.pick([f"Is {asked} {of[str(right)]}?", f"{name} is {of[str(right)]}."]),
                      f"Is {asked} {of[str(wrong)]}?")  # fmt: skip
    names = [of[str(right)], of[str(wrong)], *(text for text in said if text not in (of[str(right)], of[str(wrong)]))]
    return which(
        make, "field", (state(right), state(wrong)), make.pick([f"What is {asked}?", f"Which value has {name}?"]), names
    )


def pair_answered(make: Maker) -> Pair:
    """Does the text answer the question, or speak of something else about the same thing."""
    asked, other, more = make.rng.sample(banks.FACTS, 3)
    thing = make.fill(make.pick(banks.THINGS))
    question, right, wrong, also = (make.fill(make.pick(texts)) for texts in (asked[1], asked[2], other[2], more[2]))
    order = make.rng.random() < 0.5
    texts = [
        " ".join([f"About {thing[0].lower() + thing[1:]}.", *([also, said] if order else [said, also])])
        for said in (right, wrong)
    ]
    if make.rng.random() < 0.4:
        first, second = ({"question": question, "passage": text} for text in texts)
        return yes_no(make, "answered", first, second, make.pick(["Does the passage answer the question?", "Is the question answered?"]),
                      make.pick(["Does the question stay open?", "Is the answer missing?"]))  # fmt: skip
    return yes_no(make, "answered", texts[0], texts[1], make.pick([f'Does the text answer the question "{question}"?', f"Is the {asked[0]} stated?"]),
                  f"Does the text leave out the {asked[0]}?")  # fmt: skip


def pair_level(make: Maker) -> Pair:
    """The same sentence with another degree, on an ordered scale."""
    words, levels, question = make.pick(pair_banks.LADDERS)
    low, high = sorted(make.rng.sample(range(len(levels)), 2))
    frame = make.pick(words["frames"])
    first, second = (frame.replace("<x>", make.pick(words[str(at)])) for at in (low, high))
    states = dressed(make, *filled(make, first, second))
    shown, right = list(levels), (low, high)
    if make.rng.random() < 0.15:
        shown, right = shown[::-1], (len(levels) - 1 - low, len(levels) - 1 - high)
    if make.rng.random() < 0.2:
        options = [shown[right[0]], shown[right[1]], *(name for i, name in enumerate(shown) if i not in right)]
        return which(make, "level", states, question, options)
    lower, higher = (
        make.row("level", state, "score", question, shown, at) for state, at in zip(states, right, strict=True)
    )
    return lower, higher


GRAMMARS: list[tuple[Callable[[Maker], Pair], int]] = [
    (pair_negation, 8), (pair_roles, 4), (pair_route, 4), (pair_number, 5), (pair_threshold, 6), (pair_date, 4), (pair_unit, 2),
    (pair_things, 4), (pair_order, 3), (pair_contrast, 6), (pair_field, 6), (pair_answered, 5), (pair_level, 9),
]  # fmt: skip


def make_pairs(count: int, seed: int) -> list[Pair]:
    """`count` pairs, each of a grammar drawn by its weight. The same seed makes the same pairs."""
    make = Maker(random.Random(seed))
    grammars, weights = zip(*GRAMMARS, strict=True)
    return [grammar(make) for grammar in make.rng.choices(grammars, weights, k=count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file to write, .jsonl.gz")
    parser.add_argument("--count", type=int, default=50_000, help="pairs (default: 50000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with gzip.open(args.out, "wt", encoding="utf-8") as out:
        for pair in make_pairs(args.count, args.seed):
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in pair)
    print(f"pairs: rows={2 * args.count}")


if __name__ == "__main__":
    main()
