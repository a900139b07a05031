"""The report of an evaluation: one HTML file that needs no network. It computes no figure."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from onepass.decisions.evaluation import Figures
from onepass.decisions.statistics import Interval


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the accuracy differs from another server's on the same rows; positive: it is better here."""

    against: str
    num_rows: int
    difference: float
    interval: Interval
    p_value: float


def render(target: str, figures: Sequence[Figures], bad: Sequence[str], comparison: Comparison | None = None) -> str:
    """`target` is the name of who answered; `bad` says why rows are left out."""
    environment = Environment(
        loader=PackageLoader("onepass.decisions", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    template = environment.get_template("report.html")
    return template.render(target=target, figures=figures, bad=bad, comparison=comparison, date=date)
