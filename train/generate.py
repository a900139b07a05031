"""Makes training rows that the public sets lack: requests to a service, rules, commands, facts, long and JSON states,
many options, options that differ in a detail, other languages, states that try to steer the answer, other wordings."""

import argparse
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import banks
from data import read_raw

Raw = dict[str, Any]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NAMES = (
    "Anna Ben Carla David Elena Farid Grace Hugo Ines Jonas Kim Lena Marco Nadia Omar Paula Quinn Rosa Sam Tom".split()
)
SURNAMES = "Miller Schmidt Garcia Rossi Novak Tanaka Singh Okafor Larsen Dubois Costa Weber Kelly Popov".split()
CITIES = (
    "Berlin Paris Madrid Rome Vienna Lisbon Dublin Oslo Prague Athens Boston Denver Toronto Osaka Lima Leeds".split()
)
JOBS = "nurse accountant driver designer engineer cook teacher analyst electrician translator".split()
NO_NAME = re.compile(r"\w{1,2}$|(option|class|choice|label) \w+$|none|no match|nothing|other|something|unclear|out of")
INTENT_SETS = ("banking77", "clinc150", "hwu64")


@dataclass(slots=True)
class Maker:
    """A source of rows: fills slots, words questions, with one random stream."""

    rng: random.Random

    def pick(self, items: Any) -> Any:
        return self.rng.choice(items)

    def fill(self, text: str) -> str:
        """Slots such as {city} filled at random."""
        if "{" not in text:
            return text
        rng = self.rng
        day, month = rng.randint(1, 28), self.pick(MONTHS)
        values = {
            "date": self.pick([f"{day} {month}", f"{month} {day}", f"{day:02d}/{rng.randint(1, 12):02d}"]),
            "number": str(rng.choice([rng.randint(2, 99), rng.randint(100, 999), rng.randint(1000, 99999)])),
            "count": str(rng.randint(2, 60)),
            "count2": str(rng.randint(2, 60)),
            "price": self.pick(["${}", "{} euros", "£{}", "{} dollars", "{}.99 €"]).format(rng.randint(3, 900)),
            "city": self.pick(CITIES),
            "city2": self.pick(CITIES),
            "name": self.name(),
            "name2": self.name(),
            "day": self.pick(DAYS),
            "month": month,
            "time": self.pick([f"{rng.randint(1, 12)} pm", f"{rng.randint(7, 11)} am", f"{rng.randint(0, 23)}:30"]),
            "year": str(rng.randint(1890, 2025)),
            "job": self.pick(JOBS),
            "phone": f"0{rng.randint(100, 999)} {rng.randint(100000, 999999)}",
            "label": "{label}",
        }
        return text.format(**values)

    def name(self) -> str:
        return self.pick(NAMES) if self.rng.random() < 0.5 else f"{self.pick(NAMES)} {self.pick(SURNAMES)}"

    def sentence(self, text: str) -> str:
        text = self.fill(text)
        if text[-1].isalnum():
            is_question = text.split()[0] in banks.QUESTION_WORDS
            text += "?" if is_question and self.rng.random() < 0.8 else self.pick([".", ".", ".", "!", ""])
        return text[0].upper() + text[1:] if self.rng.random() < 0.8 else text

    def message(self, *sentences: str) -> str:
        """Sentences as somebody writes them: greeting, order, signature at random."""
        parts = list(sentences)
        if self.rng.random() < 0.3:
            parts.insert(0, self.pick(["Hello,", "Hi,", "Hi there!", "Dear Sir or Madam,", "Good morning,", "Hey"]))
        if self.rng.random() < 0.2:
            parts.insert(self.rng.randrange(len(parts) + 1), self.sentence(self.pick(banks.NEUTRAL)))
        if self.rng.random() < 0.25:
            parts.append(self.pick(["Regards,", "Best wishes", "Thanks,", "Yours,", "Cheers"]) + " " + self.name())
        between: str = self.pick([" ", " ", "\n"])
        return between.join(parts)

    def state(self, text: str, depth: float = 0.3) -> Any:
        """The text alone, or as part of a JSON object whose other fields say nothing about it."""
        if self.rng.random() > depth:
            return text
        key = self.pick(["text", "message", "body", "content", "description", "input", "note"])
        fields: list[tuple[str, Any]] = [(key, text)]
        extra: list[tuple[str, Any]] = [
            ("id", self.rng.randint(1, 99999)),
            ("channel", self.pick(["mail", "chat", "phone", "web", "app"])),
            ("created", f"2025-{self.rng.randint(1, 12):02d}-{self.rng.randint(1, 28):02d}"),
            ("from", self.name()),
            ("language", "en"),
            ("attachments", []),
            ("open", self.rng.random() < 0.5),
            ("user", {"name": self.name(), "city": self.pick(CITIES)}),
            ("history", [self.sentence(self.pick(banks.NEUTRAL)) for _ in range(self.rng.randint(1, 4))]),
        ]
        for item in self.rng.sample(extra, self.rng.randint(1, 4)):
            fields.insert(self.rng.randrange(len(fields) + 1), item)
        whole = dict(fields)
        return whole if self.rng.random() < 0.8 else {"ticket": whole}

    def padded(self, text: str, most: int) -> str:
        """The text among up to `most` sentences that say nothing."""
        parts = [self.sentence(self.pick(banks.NEUTRAL)) for _ in range(self.rng.randint(1, most))]
        parts.insert(self.rng.randrange(len(parts) + 1), text)
        between: str = self.pick([" ", "\n"])
        return between.join(parts)

    def spelled(self, labels: list[str]) -> list[str]:
        """All labels of a question in one spelling."""
        style = self.rng.randrange(8)
        if style == 0:
            return [label.replace(" ", "_") for label in labels]
        if style == 1:
            return [label.upper() for label in labels]
        if style == 2:
            return [label.title() for label in labels]
        if style == 3:
            return ["".join(word.capitalize() for word in label.split()) for label in labels]
        if style == 4:
            return [label.capitalize() for label in labels]
        return labels

    def noul(self, kind: str, state: Any, instructions: Any, answer: bool, criteria: Any = None) -> Raw:
        return self.row(kind, state, "noul", instructions, criteria, answer)

    def choice(
        self, kind: str, state: Any, instructions: Any, options: Sequence[tuple[str, str | None]], right: int
    ) -> Raw:
        """`options` are labels with descriptions; they are put in a random order."""
        labels = self.spelled([label for label, _ in options])
        if len(set(labels)) < len(labels):
            labels = [label for label, _ in options]
        order = self.rng.sample(range(len(options)), len(options))
        criteria = {labels[i]: options[i][1] for i in order}
        return self.row(kind, state, "choice", instructions, criteria, labels[right])

    def row(self, kind: str, state: Any, type_: str, instructions: Any, criteria: Any, answer: Any) -> Raw:
        question = {"type": type_, "instructions": instructions, "criteria": criteria}
        return {"dataset": f"made_{kind}", "state": state, "question": question, "answer": answer}


def make_topic(make: Maker) -> Raw:
    """Which topic, department or queue a message belongs to."""
    rng, names = make.rng, list(banks.TOPICS)
    topic = make.pick(names)
    text = make.sentence(make.pick(banks.TOPICS[topic][1]))
    if rng.random() < 0.3:
        text += " " + make.sentence(make.pick(banks.TOPICS[topic][1]))
    if rng.random() < 0.3:
        text += " " + make.pick(make.pick([*banks.URGENCY, *banks.ANGER])).format(day=make.pick(DAYS), time="5 pm")
    state = make.state(make.message(text))
    description = make.pick(banks.TOPICS[topic][0])
    if rng.random() < 0.4:
        is_right = rng.random() < 0.5
        other = make.pick([name for name in names if name != topic])
        asked, about = (topic, description) if is_right else (other, make.pick(banks.TOPICS[other][0]))
        words = [f"Is this about {asked}?", f"Should it go to {asked}?", f"Topic: {asked}?", f"Is it a matter of {asked}?",
                 f"Does the message concern {about[0].lower() + about[1:]}?", f"Route to the {asked} team?",
                 f"Is this for the people who handle: {about}?", f"{asked} related"]  # fmt: skip
        return make.noul("topic", state, make.pick(words), is_right)
    chosen = [topic, *rng.sample([name for name in names if name != topic], rng.randint(1, 9))]
    share = make.pick([0.0, 1.0, 0.5])
    options = [(name, make.pick(banks.TOPICS[name][0]) if rng.random() < share else None) for name in chosen]
    right = 0
    if rng.random() < 0.12:
        options.append((make.pick(["other", "none of these", "something else", "general"]), None))
        if rng.random() < 0.5 and len(options) > 2:
            options, right = options[1:], len(options) - 2
    asked_for: list[str | None] = ["Which team should handle this?", "Route the message.", "What is it about?", "Pick the topic.", "Category?",
             "Who is responsible?", "Which department does this go to?", "Classify the text.", "Select the queue.",
             "Where does this ticket belong?", "Subject of the message", None, "Which label fits?", "Section?"]  # fmt: skip
    return make.choice("topic", state, make.pick(asked_for), options, right)


def make_wish(make: Maker) -> Raw:
    """What somebody wants."""
    rng, names = make.rng, list(banks.WISHES)
    wish = make.pick(names)
    topic = make.pick(["billing", "delivery", "technical", "account", "warranty", "returns"])
    parts = [make.sentence(make.pick(banks.WISHES[wish][1]))]
    if rng.random() < 0.6:
        parts.insert(0, make.sentence(make.pick(banks.TOPICS[topic][1])))
    state = make.state(make.message(*parts))
    who = make.pick(["the customer", "the writer", "the user", "this person", "the caller", "the sender"])
    if rng.random() < 0.55:
        is_right = rng.random() < 0.5
        asked = make.pick(banks.WISHES[wish if is_right else make.pick([n for n in names if n != wish])][0])
        words = [f"Does {who} want {asked}?", f"Is {who} asking for {asked}?", f"Do they want {asked}?",
                 f"Request: {asked}?", f"{who.capitalize()} wants {asked}.", f"Is the aim of the message {asked}?"]  # fmt: skip
        return make.noul("wish", state, make.pick(words), is_right)
    chosen = [wish, *rng.sample([name for name in names if name != wish], rng.randint(1, 6))]
    share = make.pick([0.0, 1.0])
    options = [(name, make.pick(banks.WISHES[name][0]) if rng.random() < share else None) for name in chosen]
    words = [
        f"What does {who} want?",
        "Pick the intent.",
        "What is asked for?",
        "Next action",
        "Purpose of the message?",
    ]
    return make.choice("wish", state, make.pick(words), options, 0)


def make_level(make: Maker) -> Raw:
    """How urgent or how angry a message is."""
    rng = make.rng
    is_urgency = rng.random() < 0.55
    ladder = banks.URGENCY if is_urgency else banks.ANGER
    level = rng.randrange(len(ladder))
    topic = make.pick(list(banks.TOPICS)[:13])
    parts = [make.sentence(make.pick(banks.TOPICS[topic][1])), make.fill(make.pick(ladder[level]))]
    if rng.random() < 0.25:
        rng.shuffle(parts)
    state = make.state(make.message(*parts))
    names = make.pick(banks.URGENCY_NAMES if is_urgency else banks.ANGER_NAMES)
    what = "urgent" if is_urgency else "angry"
    if rng.random() < 0.35:
        sides = {
            "urgent": (["Is this urgent?", "Urgent?", "Does it need to be dealt with at once?", "Is there time pressure?",
                        "Should somebody be woken up for this?", "Is it high priority?", "Does the writer need a quick answer?"],
                       ["Can this wait?", "Is it low priority?", "Is there no hurry?"]),
            "angry": (["Is the writer angry?", "Is the customer upset?", "Angry?", "Is the tone hostile?", "Is the person annoyed?",
                       "Does the message sound irritated?"],
                      ["Is the writer calm?", "Is the tone friendly?", "Is the customer relaxed?"]),
        }[what]  # fmt: skip
        is_high = level >= (2 if is_urgency else 1)
        is_straight = rng.random() < 0.7
        return make.noul("level", state, make.pick(sides[0 if is_straight else 1]), is_high == is_straight)
    words = [f"How {what} is it?", f"How {what} is this message?", "Priority?" if is_urgency else "Mood of the writer?",
             f"Rate how {what} the writer is." if not is_urgency else "Rate the urgency.", f"Level: {what}"]  # fmt: skip
    if rng.random() < 0.3:
        return make.choice("level", state, make.pick(words), [(name, None) for name in names], level)
    if rng.random() < 0.15:
        names, level = names[::-1], len(names) - 1 - level
    return make.row("level", state, "score", make.pick(words), list(names), level)


def make_fact(make: Maker) -> Raw:
    """Does a text answer a question, which passage does, what is a passage about."""
    rng = make.rng
    chosen = rng.sample(banks.FACTS, rng.randint(1, 4))
    thing = make.fill(make.pick(banks.THINGS))
    told = [make.fill(make.pick(answers)) for _, _, answers in chosen]
    opening = [f"{thing} is popular.", f"{thing}:", f"About {thing[0].lower() + thing[1:]}.", ""]
    text = " ".join([make.pick(opening), *told]).strip()
    other = make.pick([fact for fact in banks.FACTS if fact not in chosen])
    if rng.random() < 0.6:
        is_right = rng.random() < 0.5
        attribute, questions, _ = make.pick(chosen) if is_right else other
        question = make.fill(make.pick(questions))
        words = [f'Does the text answer the question "{question}"?', f"Does this answer: {question}",
                 f"Is the passage relevant to the question: {question}", f"Can one find out from the text: {question}",
                 f"Is the {attribute} stated?", f"Does the text say something about the {attribute}?",
                 f"Relevant for someone who asks {question!r}?"]  # fmt: skip
        if rng.random() < 0.3:
            state: Any = {"question": question, make.pick(["passage", "document", "answer", "text"]): text}
            words = ["Does the passage answer the question?", "Is the document relevant?", "Answered?",
                     "Does the text help with the question?", "Is this a useful search result for the question?"]  # fmt: skip
        else:
            state = make.padded(text, 12) if rng.random() < 0.3 else text
        return make.noul("fact", state, make.pick(words), is_right)
    attribute, questions, answers = make.pick(chosen)
    others = rng.sample([fact for fact in banks.FACTS if fact[0] != attribute], rng.randint(1, 6))
    if rng.random() < 0.5:
        options = [(make.fill(make.pick(answers)), None), *((make.fill(make.pick(a)), None) for _, _, a in others)]
        return make.choice(
            "fact", make.pick(questions).format(day=make.pick(DAYS)), "Which text answers the question?", options, 0
        )
    options = [(attribute, None), *((name, None) for name, _, _ in others)]
    words = ["What is the question about?", "What does the user want to know?", "Pick the attribute."]
    return make.choice("fact", make.fill(make.pick(questions)), make.pick(words), options, 0)


def make_detail(make: Maker) -> Raw:
    """Options, or a claim, that differ from the text in one detail."""
    rng = make.rng
    kinds: dict[str, Callable[[], str]] = {
        "day": lambda: make.pick(DAYS),
        "city": lambda: make.pick(CITIES),
        "name": make.name,
        "time": lambda: f"{rng.randint(1, 12)}:{make.pick(['00', '15', '30', '45'])} {make.pick(['am', 'pm'])}",
        "price": lambda: f"${rng.randint(3, 900)}",
        "date": lambda: f"{rng.randint(1, 28)} {make.pick(MONTHS)}",
        "order": lambda: f"{make.pick('ABCDEFG')}-{rng.randint(1000, 9999)}",
        "colour": lambda: make.pick(banks.CATEGORIES["colour"].split()),
    }
    frames = [
        ("The meeting with {name} is on {day} at {time} in {city}.", ("name", "day", "time", "city")),
        ("Order {order} costs {price} and will be delivered on {date} to {city}.", ("order", "price", "date", "city")),
        ("{name} bought a {colour} bag for {price} on {day}.", ("name", "colour", "price", "day")),
        ("The {colour} bus to {city} leaves at {time} on {date}.", ("colour", "city", "time", "date")),
        ("Invoice {order}, due {date}, amount {price}, customer {name}.", ("order", "date", "price", "name")),
        ("Please book a room in {city} for {name} from {date}, the rate is {price}.", ("city", "name", "date", "price")),
    ]  # fmt: skip
    frame, slots = make.pick(frames)
    values = {slot: kinds[slot]() for slot in slots}
    text = frame.format(**values)
    state = make.state(make.padded(text, make.pick([1, 3, 15])) if rng.random() < 0.5 else text)
    slot = make.pick(slots)
    wrong: set[str] = set()
    while len(wrong) < 7:
        wrong.add(kinds[slot]())
    wrong.discard(values[slot])
    others = sorted(wrong)
    rng.shuffle(others)
    if rng.random() < 0.45:
        is_right = rng.random() < 0.5
        said = values[slot] if is_right else others[0]
        claim = frame.format(**{**values, slot: said})
        words = [f"Is the {slot} {said}?", f"Does the text mention {said}?", f"Is this true: {claim}", claim,
                 f"Does the text support the statement {claim!r}?"]  # fmt: skip
        return make.noul("detail", state, make.pick(words), is_right)
    count = make.pick([1, 2, 3, 5, len(others)])
    if rng.random() < 0.5:
        options = [(values[slot], None), *((other, None) for other in others[:count])]
        words = [
            f"Which {slot} is given?",
            f"Extract the {slot}.",
            f"What is the {slot}?",
            f"{slot}",
            "Which one is in the text?",
        ]
    else:
        options = [(frame.format(**{**values, slot: said}), None) for said in [values[slot], *others[:count]]]
        words = ["Which statement is true?", "Which sentence agrees with the text?", "Pick the right one."]
    return make.choice("detail", state, make.pick(words), options, 0)


def make_rule(make: Maker) -> Raw:
    """Does a text keep to a rule."""
    rng = make.rng
    rule, breaking, keeping = make.pick(banks.RULES)
    is_broken = rng.random() < 0.5
    text = make.fill(make.pick(breaking if is_broken else keeping))
    if not is_broken and rng.random() < 0.5:  # what breaks another rule keeps this one
        text = make.fill(make.pick(make.pick([other for other in banks.RULES if other[0] is not rule])[1]))
        if rule[0].startswith(("No personal", "Secrets", "No adv", "Answers")):
            text = make.fill(make.pick(keeping))
    said = make.pick(rule)
    key = make.pick(["text", "reply", "message", "post", "draft"])
    if rng.random() < 0.4:
        state: Any = {"rule": said, key: text} if rng.random() < 0.5 else f"Policy: {said}\n{key.capitalize()}: {text}"
        yes = ["Does the text break the rule?", "Violation?", "Is the policy violated?", "Must this be stopped?"]
        no = ["Does the text keep to the rule?", "Is it compliant?", "Is this allowed under the policy?"]
        labels = "Does it comply with the policy?"
    else:
        state = make.state(text)
        yes = [
            f"Does this break the rule: {said}",
            f"{said} Is that violated here?",
            f"Policy: {said} Is it a violation?",
        ]
        no = [
            f"Is this allowed? Rule: {said}",
            f"{said} Does the text comply?",
            f"Does the message respect this rule? {said}",
        ]
        labels = f"Judge the text by this policy: {said}"
    kind = rng.random()
    if kind < 0.4:
        return make.noul("rule", state, make.pick(yes), is_broken)
    if kind < 0.7:
        return make.noul("rule", state, make.pick(no), not is_broken)
    pair = make.pick([("violation", "compliant"), ("block", "allow"), ("not allowed", "allowed"), ("breaks the rule", "fine"),
                      ("reject", "approve")])  # fmt: skip
    return make.choice("rule", state, labels, [(label, None) for label in pair], 0 if is_broken else 1)


def make_command(make: Maker) -> Raw:
    """May an agent run this."""
    rng = make.rng
    is_dangerous = rng.random() < 0.5
    command = make.pick(banks.DANGEROUS if is_dangerous else banks.HARMLESS).replace(
        "{number}", str(rng.randint(1, 9999))
    )
    command = command.replace("{city}", make.pick(CITIES)).replace("{day}", make.pick(DAYS))
    state: Any = make.pick([
        command,
        {"tool": "shell", "command": command},
        {"name": "run", "arguments": {"cmd": command}},
        f"The agent wants to run: {command}",
        f"$ {command}",
        {"user": make.pick(["Clean up please.", "What is going on?", "Do what you think is best."]), "tool_call": command},
    ])  # fmt: skip
    yes = ["Is this command dangerous?", "Could this destroy data?", "Does it need a person's approval?", "Risky?",
           "Should the call be blocked?", "Can this do harm that cannot be undone?", "Is the tool call destructive?"]  # fmt: skip
    no = ["Is it safe to run this?", "Can the agent run it without asking?", "Is this harmless?", "Read-only?", "Safe?"]
    kind = rng.random()
    if kind < 0.35:
        return make.noul("command", state, make.pick(yes), is_dangerous)
    if kind < 0.65:
        return make.noul("command", state, make.pick(no), not is_dangerous)
    if kind < 0.75:
        names = make.pick([["harmless", "destructive"], ["no risk", "some risk", "high risk"]])
        return make.row("command", state, "score", "How risky is it?", names, len(names) - 1 if is_dangerous else 0)
    pair = make.pick([("dangerous", "safe"), ("deny", "allow"), ("ask a human", "run it"), ("block", "proceed"),
                      ("destructive", "read-only")])  # fmt: skip
    return make.choice("command", state, make.pick(["Gate the tool call.", "Decide.", "Classify the command."]),
                       [(label, None) for label in pair], 0 if is_dangerous else 1)  # fmt: skip


def an(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def make_category(make: Maker) -> Raw:
    """What kind of thing a word names."""
    rng, names = make.rng, list(banks.CATEGORIES)
    category = make.pick(names)
    words = banks.CATEGORIES[category].split()
    word = make.pick(words)
    others = [name for name in names if name != category]
    kind = rng.random()
    if kind < 0.35:
        is_right = rng.random() < 0.5
        asked = category if is_right else make.pick(others)
        state = make.pick([word, f"The word is {word}.", {"item": word}, f"I saw {an(word)} yesterday."])
        return make.noul("category", state, make.pick([f"Is it a kind of {asked}?", f"Is this {an(asked)}?",
                                                        f"Does the text name {an(asked)}?", f"{asked}?"]), is_right)  # fmt: skip
    if kind < 0.7:
        options = [(category, None), *((name, None) for name in rng.sample(others, rng.randint(1, 9)))]
        return make.choice(
            "category", word, make.pick(["What is it?", "Pick the category.", "Kind of thing?"]), options, 0
        )
    options = [(word, None)]
    options += [(make.pick(banks.CATEGORIES[name].split()), None) for name in rng.sample(others, rng.randint(1, 6))]
    if len({label for label, _ in options}) < len(options):
        return make_category(make)
    return make.choice(
        "category",
        f"Looking for {an(category)}.",
        make.pick(["Which one fits?", f"Which is {an(category)}?"]),
        options,
        0,
    )


def make_opposite(make: Maker) -> Raw:
    """Does a text say what a claim says, the opposite, or nothing of the kind."""
    rng = make.rng
    first, second = make.pick(banks.OPPOSITES).split("/")
    if rng.random() < 0.5:
        first, second = second, first
    noun, other = rng.sample(banks.NOUNS, 2)
    frames = ["The {} is {}.", "We found that the {} was {}.", "Everybody says the {} is {}.", "The {} looks {} to me."]
    told = [make.pick(frames).format(noun, first)]
    if rng.random() < 0.5:
        adjective = make.pick(make.pick(banks.OPPOSITES).split("/"))
        told.append(make.pick(frames).format(other, adjective if adjective not in (first, second) else "there"))
        rng.shuffle(told)
    text = " ".join(told)
    is_noul = rng.random() < 0.5
    case = rng.choice([0, 0, 1, 2] if is_noul else [0, 1, 2])
    claim = [f"The {noun} is {first}.", make.pick([f"The {noun} is {second}.", f"The {noun} is not {first}."]),
             f"The {make.pick([n for n in banks.NOUNS if n not in (noun, other)])} is {first}."][case]  # fmt: skip
    names = make.pick([("supported", "contradicted", "not stated"), ("true", "false", "unknown"),
                       ("follows", "conflicts", "open"), ("entailment", "contradiction", "neutral")])  # fmt: skip
    if is_noul:
        words = [f"Is it true that {claim[0].lower() + claim[1:-1]}?", f"Does the text say: {claim}", claim,
                 f"Can one conclude {claim!r}?"]  # fmt: skip
        return make.noul("opposite", make.state(text, 0.1), make.pick(words), case == 0)
    state = make.pick([f"Premise: {text}\nHypothesis: {claim}", {"text": text, "claim": claim}])
    return make.choice(
        "opposite", state, "How does the claim relate to the text?", [(name, None) for name in names], case
    )


def make_language(make: Maker) -> Raw:
    """Texts in other languages: which language, what about, pleased or not."""
    rng, names = make.rng, list(banks.LANGUAGES)
    language = make.pick(names)
    topics, pleased, displeased = banks.LANGUAGES[language]
    topic = rng.randrange(len(topics))
    kind = rng.random()
    if kind < 0.3:
        text = make.pick([*topics[topic], *pleased, *displeased])
        others = [name for name in names if name != language]
        if rng.random() < 0.5:
            is_right = rng.random() < 0.5
            asked = language if is_right else make.pick(others)
            return make.noul(
                "language", make.state(text), make.pick([f"Is this written in {asked}?", f"{asked}?"]), is_right
            )
        options = [(language, None), *((name, None) for name in rng.sample(others, rng.randint(1, 6)))]
        return make.choice("language", make.state(text), "Which language is it?", options, 0)
    if kind < 0.65:
        is_good = rng.random() < 0.5
        text = make.pick(pleased if is_good else displeased)
        if rng.random() < 0.4:
            text = f"{make.pick(topics[topic])} {text}"
        if rng.random() < 0.6:
            is_straight = rng.random() < 0.5
            words = make.pick(banks.SENTIMENT_YES if is_straight else banks.SENTIMENT_NO)
            return make.noul("language", make.state(text), words, is_good == is_straight)
        pair = make.pick(banks.SENTIMENT_LABELS)
        return make.choice(
            "language", make.state(text), "Sentiment?", [(label, None) for label in pair], 0 if is_good else 1
        )
    text = make.pick(topics[topic])
    others_at = [i for i in range(len(topics)) if i != topic]
    if rng.random() < 0.4:
        is_right = rng.random() < 0.5
        asked = banks.LANGUAGE_TOPICS[topic if is_right else make.pick(others_at)]
        return make.noul("language", make.state(text), f"Is it about {asked}?", is_right)
    if rng.random() < 0.4:  # which text in one language means what the one in another says
        other = make.pick([name for name in names if name != language])
        at = rng.randrange(3)
        options = [(banks.LANGUAGES[other][0][i][at], None) for i in [topic, *rng.sample(others_at, 2)]]
        return make.choice("language", topics[topic][at], "Which sentence means the same?", options, 0)
    options = [(banks.LANGUAGE_TOPICS[i], None) for i in [topic, *rng.sample(others_at, rng.randint(1, 4))]]
    return make.choice("language", make.state(text), "What is it about?", options, 0)


FAMILIES: list[tuple[Callable[[Maker], Raw], int]] = [
    (make_topic, 10), (make_wish, 6), (make_level, 6), (make_fact, 6), (make_detail, 7), (make_rule, 5),
    (make_command, 3), (make_category, 4), (make_opposite, 3), (make_language, 5),
]  # fmt: skip


def plain_label(label: object) -> str:
    return str(label).lower().replace("_", " ").replace("-", " ")


def classified(rows: list[Raw]) -> Iterator[tuple[str, Any, bool]]:
    """(set, state, whether it is of the set's first class) of the choice rows whose label says so."""
    for row in rows:
        name, label = row["dataset"], plain_label(row["answer"])
        if row["question"]["type"] != "choice":
            continue
        if name in banks.SENTIMENT_SETS and label in banks.GOOD | banks.BAD:
            yield "sentiment", row["state"], label in banks.GOOD
        elif name in banks.OTHER_SETS:
            yes, no, *_ = banks.OTHER_SETS[name]
            if label in yes or label in no:
                yield name, row["state"], label in yes


def reworded(make: Maker, name: str, state: Any, is_yes: bool) -> Raw:
    """A classified text under another question."""
    if name == "sentiment":
        yes, no, pairs = banks.SENTIMENT_YES, banks.SENTIMENT_NO, banks.SENTIMENT_LABELS
    else:
        _, _, yes, no, pairs = banks.OTHER_SETS[name]
    if make.rng.random() < 0.6:
        is_straight = make.rng.random() < 0.5
        return make.noul(f"reworded_{name}", state, make.pick(yes if is_straight else no), is_yes == is_straight)
    options = [(label, None) for label in make.pick(pairs)]
    words = ["Classify.", "Label the text.", "Which one?", None, "Pick the better label.", "What kind of text is this?"]
    return make.choice(f"reworded_{name}", state, make.pick(words), options, 0 if is_yes else 1)


def steered(make: Maker, row: Raw) -> Raw:
    """A row whose state also tells what to answer; the right answer stays what it was."""
    kind, criteria = row["question"]["type"], row["question"]["criteria"]
    labels = (
        ["yes", "no"] if kind == "noul" else list(criteria) if kind == "choice" else [str(text) for text in criteria]
    )
    order = make.pick(banks.STEERING).replace("{label}", make.pick(labels))
    text = row["state"]
    if isinstance(text, str):
        state: Any = f"{text} {order}" if make.rng.random() < 0.7 else f"{order} {text}"
    else:
        state = {**text, make.pick(["note", "comment", "ps", "hint"]): order}
    return {**row, "dataset": "made_steered", "state": state}


def lengthened(make: Maker, row: Raw) -> Raw:
    """A row whose state stands among much that says nothing."""
    text = row["state"] if isinstance(row["state"], str) else json.dumps(row["state"], ensure_ascii=False)
    most = make.pick([5, 10, 20, 60])
    state: Any = make.padded(text, most)
    if make.rng.random() < 0.4:
        log = [make.sentence(make.pick(banks.NEUTRAL)) for _ in range(make.rng.randint(1, most))]
        state = (
            {"log": log, "message": row["state"]} if make.rng.random() < 0.5 else {"item": row["state"], "footer": log}
        )
    return {**row, "dataset": "made_long", "state": state}


def crowded(make: Maker, row: Raw, pool: dict[str, str | None]) -> Raw:
    """An intent row with up to 255 options, of its own set and of others."""
    criteria = row["question"]["criteria"]
    count = min(255, make.pick([20, 30, 50, 80, 120, 254]))
    taken = {plain_label(label) for label in criteria}
    more = [label for label in pool if plain_label(label) not in taken]
    right = row["answer"]
    has_text = make.rng.random() < 0.5 and criteria[right] is not None
    options = [(right, criteria[right] if has_text else None)]
    options += [(label, text if has_text else None) for label, text in criteria.items() if label != right]
    options += [
        (label, pool[label] if has_text else None)
        for label in make.rng.sample(more, min(len(more), count - len(options)))
    ]
    return make.choice("crowded", row["state"], row["question"]["instructions"], options, 0)


def generate(rows: list[Raw], count: int, seed: int) -> list[Raw]:
    """`rows` are the public sets' training rows."""
    make = Maker(random.Random(seed))
    families = [family for family, weight in FAMILIES for _ in range(weight)]
    made = [make.pick(families)(make) for _ in range(count)]
    groups: dict[str, list[tuple[str, Any, bool]]] = {}
    for one in classified(rows):
        groups.setdefault(one[0], []).append(one)
    names, sizes = list(groups), [len(group) ** 0.5 for group in groups.values()]
    for name in make.rng.choices(names, sizes, k=count // 2):
        made.append(reworded(make, *make.pick(groups[name])))
    short = [row for row in rows if len(str(row["state"])) < 600]
    made += [steered(make, make.pick(short)) for _ in range(count // 8)]
    made += [lengthened(make, make.pick(short)) for _ in range(count // 8)]
    intents = [row for row in rows if row["dataset"] in INTENT_SETS and row["question"]["type"] == "choice"]
    intents = [row for row in intents if not NO_NAME.match(plain_label(row["answer"]))]
    pool: dict[str, dict[str, str | None]] = {name: {} for name in INTENT_SETS}
    for row in intents:
        labels = row["question"]["criteria"]
        pool[row["dataset"]] |= {label: text for label, text in labels.items() if not NO_NAME.match(plain_label(label))}
    for _ in range(count // 60):
        row = make.pick(intents)
        own = {label: text for label, text in pool[row["dataset"]].items() if text is not None}
        distinct = {
            plain_label(label): label for label in own if own[label] != row["question"]["criteria"][row["answer"]]
        }
        made.append(crowded(make, row, {label: own[label] for label in distinct.values()}))
    make.rng.shuffle(made)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-train.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .jsonl.gz")
    parser.add_argument(
        "--count", type=int, default=60_000, help="rows from templates alone; as many again from the sets"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    made = generate(read_raw(args.data / "decisions-train.jsonl.gz"), args.count, args.seed)
    with gzip.open(args.out, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
    print(f"generate: rows={len(made)}")


if __name__ == "__main__":
    main()
