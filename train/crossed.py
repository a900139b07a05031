"""Makes questions without end: texts of the training sets under the questions of other sets and under made option sets,
and words of WordNet under their meanings.

What is crossed has no known answer: its `answer` is null until teacher.py labels it. What WordNet says is known. Owns
the crossing and the reading of WordNet's files; the sets of options are in option_sets.py."""

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import read_raw
from generate import Maker, Raw
from option_sets import NOUL_QUESTIONS, OPTION_SETS, SCALES

MAX_STATE_CHARACTERS = 700
# WordNet's files of nouns (lexicographer files) whose words name things people know
KNOWN_FILES = {
    "05": "animal",
    "06": "object",
    "08": "part of the body",
    "13": "food",
    "17": "natural thing",
    "18": "person",
    "20": "plant",
}


def from_option_set(make: Maker, state: Any) -> Raw:
    """A question with 2 to 12 options of one made set, each under one of its names."""
    questions, options = OPTION_SETS[make.pick(sorted(OPTION_SETS))]
    chosen = make.rng.sample(sorted(options), min(len(options), make.rng.randint(2, 12)))
    share = make.pick([0.0, 0.0, 0.5, 1.0])
    names = make.spelled([make.pick(names.split("/")) for names in chosen])
    described = [(options[names] or None) if make.rng.random() < share else None for names in chosen]
    criteria = dict(zip(names, described, strict=True))
    if len(criteria) < len(chosen):  # two options share a name in this spelling
        return from_option_set(make, state)
    return make.row("crossed_options", state, "choice", make.pick(questions), criteria, None)


def from_other_row(make: Maker, state: Any, rows: list[Raw]) -> Raw:
    """The question of another row, as it stands there."""
    question = make.pick(rows)["question"]
    return make.row("crossed_sets", state, question["type"], question["instructions"], question["criteria"], None)


def from_plain_question(make: Maker, state: Any) -> Raw:
    """A yes/no question, or a scale, that fits any text."""
    if make.rng.random() < 0.6:
        return make.row("crossed_plain", state, "noul", make.pick(NOUL_QUESTIONS), None, None)
    question, levels = make.pick(SCALES)
    return make.row("crossed_plain", state, "score", question, levels, None)


def crossed(rows: list[Raw], count: int, seed: int) -> Iterator[Raw]:
    """`count` rows without answers, whose states are those of `rows`."""
    make = Maker(random.Random(seed))
    short = [row for row in rows if len(str(row["state"])) <= MAX_STATE_CHARACTERS]
    for _ in range(count):
        state, kind = make.pick(short)["state"], make.rng.random()
        if kind < 0.5:
            yield from_option_set(make, state)
        elif kind < 0.8:
            yield from_other_row(make, state, rows)
        else:
            yield from_plain_question(make, state)


@dataclass(frozen=True, slots=True)
class Synset:
    """One meaning of nouns in WordNet."""

    file: str  # number of the lexicographer file
    words: tuple[str, ...]  # no names of persons, places or species, which begin with a capital
    broader: tuple[str, ...]  # offsets of what it is a kind of
    gloss: str  # its definition, without the examples


def read_nouns(path: Path) -> dict[str, Synset]:
    """By its offset every synset of WordNet's data.noun; see wndb(5WN) for the format."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue  # the licence
        fields, _, gloss = line.partition(" | ")
        offset, file, _, count, *rest = fields.split()
        words = rest[: 2 * int(count, 16) : 2]
        pointers = rest[2 * int(count, 16) + 1 :]
        broader = [target for symbol, target in zip(pointers[::4], pointers[1::4], strict=True) if symbol == "@"]
        definition = gloss.split('; "')[0].strip()
        found[offset] = Synset(
            file, tuple(word.replace("_", " ") for word in words if word.islower()), tuple(broader), definition
        )
    return found


class Words:
    """Questions about what words mean, with answers from WordNet."""

    def __init__(self, nouns: dict[str, Synset]) -> None:
        self.nouns = nouns
        self.siblings: dict[str, list[str]] = {}
        for offset, one in nouns.items():
            if one.words and one.file in KNOWN_FILES and len(one.gloss) > 20:
                for broad in one.broader:
                    self.siblings.setdefault(broad, []).append(offset)
        self.groups = [broad for broad, narrow in sorted(self.siblings.items()) if len(narrow) >= 3]
        if not self.groups:
            raise ValueError("these files hold no group of three related nouns")

    def ask(self, make: Maker) -> Raw:
        """Which word is meant, what kind of thing a word names, which definition fits, which word means the same."""
        broad = make.pick(self.groups)
        offsets = make.rng.sample(self.siblings[broad], min(len(self.siblings[broad]), make.rng.randint(3, 6)))
        if make.rng.random() < 0.5:  # words that have little to do with the right one
            offsets[1:] = [make.pick(self.siblings[make.pick(self.groups)]) for _ in offsets[1:]]
        right, *others = (self.nouns[offset] for offset in offsets)
        others = [one for one in others if not set(one.words) & set(right.words) and one.gloss != right.gloss]
        word, kind = make.pick(right.words), make.rng.random()
        if kind < 0.35:
            questions = ["Which word is defined?", "What is described?", "Pick the word."]
            return self.choice(make, right.gloss, questions, [word, *(make.pick(one.words) for one in others)])
        if kind < 0.6:
            return self.choice(
                make,
                word,
                ["What does it mean?", "Which definition fits?"],
                [right.gloss, *(one.gloss for one in others)],
            )
        if kind < 0.8 or len(right.words) == 1:
            names = [name for number, name in KNOWN_FILES.items() if number != right.file]
            shown = [KNOWN_FILES[right.file], *make.rng.sample(names, make.rng.randint(1, len(names)))]
            return self.choice(
                make, make.pick([word, f"{word}: {right.gloss}"]), ["What kind of thing is it?", "Category?"], shown
            )
        same, other = make.rng.sample(right.words, 2)
        return self.choice(
            make,
            same,
            ["Which word means the same?", "Find the synonym."],
            [other, *(make.pick(one.words) for one in others)],
        )

    def choice(self, make: Maker, state: str, questions: list[str], names: list[str]) -> Raw:
        """names[0] is right; a name that stands twice, or looks like a whole number, is asked of another word."""
        if len({name.lower() for name in names}) < max(2, len(names)) or any(name.isdigit() for name in names):
            return self.ask(make)
        order = make.rng.sample(names, len(names))
        return make.row("wordnet", state, "choice", make.pick(questions), dict.fromkeys(order), names[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-train.jsonl.gz")
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's data.noun, for words under their meanings")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write, .jsonl.gz; to be labelled by teacher.py"
    )
    parser.add_argument(
        "--words-out", type=Path, help="file to write, .jsonl.gz, of WordNet's rows, which have answers"
    )
    parser.add_argument(
        "--count", type=int, default=200_000, help="rows to cross, and rows of WordNet (default: 200000)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.wordnet is None) != (args.words_out is None):
        parser.error("--wordnet and --words-out go together")
    write(args.out, crossed(read_raw(args.data / "decisions-train.jsonl.gz"), args.count, args.seed))
    if args.wordnet:
        words, make = Words(read_nouns(args.wordnet / "data.noun")), Maker(random.Random(args.seed))
        write(args.words_out, (words.ask(make) for _ in range(args.count)))


def write(path: Path, rows: Iterator[Raw]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"crossed: {path.name} is written")


if __name__ == "__main__":
    main()
