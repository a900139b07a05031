"""Draws simple pictures and asks about them: what the starter's vision tower is trained and measured on.

    python train/drawings.py drawings.png       # a sheet of what it is trained on
    python train/drawings.py drawings.jsonl     # drawings that it never saw, with questions, for evaluate.py

A drawing is made from a seed alone. Each has the words that name what is to be seen, by kind, and questions whose
answers follow from how it was drawn.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

SIDE = 256
COLOURS = {
    "red": (214, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 210, 40),
    "orange": (245, 140, 30),
    "purple": (130, 50, 170),
    "pink": (245, 130, 180),
    "brown": (125, 80, 40),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COUNTS = ("one", "two", "three", "four", "five", "six")
PLACES = ("left", "right", "top", "bottom", "middle")
WORDS = (
    *("apple", "bread", "chair", "dog", "door", "fire", "fish", "flower", "hand", "horse", "house", "key", "lamp"),
    *("moon", "music", "paper", "phone", "rain", "river", "road", "ship", "shoe", "snow", "stone", "sun", "table"),
    *("train", "tree", "water", "window"),
)
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRENDS = ("rising", "falling")
VOCABULARY: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "count": COUNTS,
    "place": PLACES,
    "word": WORDS,
    "digit": DIGITS,
    "bar": tuple(COLOURS),
    "trend": TRENDS,
}
ASKING = {  # kind -> ways to ask for it
    "colour": ("What colour is it?", "Which colour does the drawing have?", "The colour of the shape"),
    "shape": ("What shape is it?", "Which shape is drawn?", "What is to be seen in the picture?"),
    "count": ("How many are there?", "How many shapes are drawn?", "The number of shapes"),
    "place": ("Where is it?", "In which part of the picture is the shape?", "The position of the shape"),
    "word": ("Which word is written there?", "What does the picture say?", "What is written?"),
    "digit": ("Which digit is it?", "What number is written there?"),
    "bar": ("Which bar is the highest?", "What colour has the largest bar?"),
    "trend": ("Is the line rising or falling?", "How does the chart develop?"),
}
AFFIRMING = {  # kind -> ways to ask whether it is so
    "colour": ("Is it {}?", "Is the shape {}?"),
    "shape": ("Is it a {}?", "Is there a {} in the picture?"),
    "count": ("Are there {}?", "Is the number of shapes {}?"),
    "place": ("Is it on the {}?", "Is the shape in the {} part?"),
    "word": ('Is the word "{}" written there?', "Does it say {}?"),
    "digit": ("Is it the digit {}?", "Is the number {}?"),
    "bar": ("Is the {} bar the highest?",),
    "trend": ("Is the line {}?",),
}
MAX_OPTIONS = 6
HELD_OUT = 1 << 40  # drawings from this seed on are never trained on


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a drawing."""

    kind: str  # a key of VOCABULARY
    instructions: str
    options: tuple[str, ...]  # of a choice; none for a yes/no question
    answer: int  # the right option; 0 is yes

    @property
    def type(self) -> str:
        return "choice" if self.options else "noul"


@dataclass(frozen=True, slots=True)
class Drawing:
    image: Image.Image  # RGB, SIDE x SIDE
    facts: dict[str, str]  # kind -> the word of VOCABULARY[kind] that is true

    def ask(self, rng: random.Random, kind: str) -> Asked:
        """A choice or a yes/no question, half and half."""
        true = self.facts[kind]
        others = [word for word in VOCABULARY[kind] if word != true]
        if rng.random() < 0.5:
            options = [true, *rng.sample(others, min(len(others), rng.randint(1, MAX_OPTIONS - 1)))]
            rng.shuffle(options)
            return Asked(kind, rng.choice(ASKING[kind]), tuple(options), options.index(true))
        is_so = rng.random() < 0.5
        named = true if is_so else rng.choice(others)
        return Asked(kind, rng.choice(AFFIRMING[kind]).format(named), (), 0 if is_so else 1)


def draw(seed: int) -> Drawing:
    rng = random.Random(seed)
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randint(225, 255) for _ in range(3)))
    maker = rng.choice((draw_one, draw_one, draw_several, draw_word, draw_digit, draw_bars, draw_line))
    return Drawing(image, maker(rng, ImageDraw.Draw(image)))


Maker = Callable[[random.Random, ImageDraw.ImageDraw], dict[str, str]]


def shaded(rng: random.Random, colour: str) -> tuple[int, ...]:
    return tuple(max(0, min(255, part + rng.randint(-14, 14))) for part in COLOURS[colour])


def draw_one(rng: random.Random, pen: ImageDraw.ImageDraw) -> dict[str, str]:
    colour, shape, place = (rng.choice(VOCABULARY[kind]) for kind in ("colour", "shape", "place"))
    x, y = {"left": (60, 128), "right": (196, 128), "top": (128, 60), "bottom": (128, 196), "middle": (128, 128)}[place]
    draw_shape(pen, shape, x + rng.randint(-12, 12), y + rng.randint(-12, 12), rng.randint(22, 46), shaded(rng, colour))
    return {"colour": colour, "shape": shape, "place": place}


def draw_several(rng: random.Random, pen: ImageDraw.ImageDraw) -> dict[str, str]:
    colour, shape, count = (rng.choice(VOCABULARY[kind]) for kind in ("colour", "shape", "count"))
    cells = rng.sample([(x, y) for x in (48, 128, 208) for y in (48, 128, 208)], COUNTS.index(count) + 1)
    for x, y in cells:
        draw_shape(pen, shape, x + rng.randint(-9, 9), y + rng.randint(-9, 9), rng.randint(18, 28), shaded(rng, colour))
    return {"colour": colour, "shape": shape, "count": count}


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, colour: tuple[int, ...]) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    third = radius // 3
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "ring":
        pen.ellipse(box, outline=colour, width=max(4, third))
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    elif shape == "cross":
        pen.rectangle((x - third, y - radius, x + third, y + radius), fill=colour)
        pen.rectangle((x - radius, y - third, x + radius, y + third), fill=colour)
    else:  # a star: two triangles over each other
        pen.polygon([(x, y - radius), (x - radius, y + radius // 2), (x + radius, y + radius // 2)], fill=colour)
        pen.polygon([(x, y + radius), (x - radius, y - radius // 2), (x + radius, y - radius // 2)], fill=colour)


def draw_word(rng: random.Random, pen: ImageDraw.ImageDraw) -> dict[str, str]:
    word = rng.choice(WORDS)
    write(rng, pen, word, rng.randint(44, 60))
    return {"word": word}


def draw_digit(rng: random.Random, pen: ImageDraw.ImageDraw) -> dict[str, str]:
    digit = rng.randrange(10)
    write(rng, pen, str(digit), rng.randint(110, 170))
    return {"digit": DIGITS[digit]}


def write(rng: random.Random, pen: ImageDraw.ImageDraw, text: str, size: int) -> None:
    font = ImageFont.load_default(size)
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    x = rng.uniform(4, max(5, SIDE - 4 - (right - left))) - left
    y = rng.uniform(60, max(61, SIDE - 60 - (bottom - top))) - top
    pen.text((x, y), text, font=font, fill=shaded(rng, rng.choice(("black", "blue", "red", "brown"))))


def draw_bars(rng: random.Random, pen: ImageDraw.ImageDraw) -> dict[str, str]:
    colours = rng.sample(sorted(COLOURS), rng.randint(2, 4))
    heights = sorted((rng.randint(30, 150) for _ in colours), reverse=True)
    heights[0] += 45
    bars = list(zip(colours, heights, strict=True))
    rng.shuffle(bars)
    step = 220 // len(bars)
    pen.line((14, 20, 14, 236, 246, 236), fill=(60, 60, 60), width=3)
    for index, (colour, height) in enumerate(bars):
        left = 24 + index * step
        pen.rectangle((left, 234 - height, left + step * 2 // 3, 234), fill=shaded(rng, colour))
    return {"bar": colours[0]}


def draw_line(rng: random.Random, pen: ImageDraw.ImageDraw) -> dict[str, str]:
    trend = rng.choice(TRENDS)
    levels = sorted((rng.randint(30, 220) for _ in range(6)), reverse=trend == "rising")
    levels[0], levels[-1] = (225, 30) if trend == "rising" else (30, 225)
    points = [(24 + 42 * index, level) for index, level in enumerate(levels)]
    pen.line((14, 20, 14, 236, 246, 236), fill=(60, 60, 60), width=3)
    pen.line(points, fill=shaded(rng, rng.choice(sorted(COLOURS))), width=rng.randint(4, 7))
    return {"trend": trend}


def held_out_rows(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Of `count` drawings a question about each fact, as evaluate.py reads them."""
    for seed in range(HELD_OUT + first, HELD_OUT + first + count):
        drawing, rng, png = draw(seed), random.Random(seed), io.BytesIO()
        drawing.image.save(png, "PNG")
        for kind in drawing.facts:
            asked = drawing.ask(rng, kind)
            criteria = dict.fromkeys(asked.options) or None
            yield {
                "dataset": kind,
                "state": "<image:1>",
                "images": [base64.b64encode(png.getvalue()).decode()],
                "question": {
                    "type": asked.type,
                    "instructions": asked.instructions,
                    "criteria": criteria,
                },
                "answer": asked.options[asked.answer] if criteria else asked.answer == 0,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a .png for a sheet, a .jsonl for held-out rows")
    parser.add_argument("--count", type=int, default=24, help="drawings (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first (default: %(default)s)")
    options = parser.parse_args()
    if options.count < 1 or options.out.suffix not in (".png", ".jsonl"):
        parser.error("one drawing at least, into a .png or a .jsonl")
    if options.out.suffix == ".jsonl":
        lines = [json.dumps(row) + "\n" for row in held_out_rows(options.seed, options.count)]
        options.out.write_text("".join(lines), encoding="utf-8")
        return
    columns = min(6, options.count)
    sheet = Image.new("RGB", (columns * SIDE, -(-options.count // columns) * SIDE))
    for place in range(options.count):
        drawing = draw(options.seed + place)
        sheet.paste(drawing.image, (place % columns * SIDE, place // columns * SIDE))
        print(options.seed + place, drawing.facts)
    sheet.save(options.out)


if __name__ == "__main__":
    main()
