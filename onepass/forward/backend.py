"""What the engine asks of whoever runs the model; it knows no architecture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from onepass.forward.buckets import Buckets
from onepass.forward.graphs import Graphs
from onepass.forward.plan import Pass
from onepass.forward.prefix import Prefix
from onepass.rows import Row

Scores = list[list[float]]  # of one row: for each question, a score for each option


class Backend(Protocol):
    """Runs passes. Worker thread only.

    The attributes tell the planner which passes can be run; `run` gets no others.
    """

    name: str  # as `--backend` has it
    max_tokens: int  # that a row may have
    shares_prefixes: bool  # passes may keep prefixes, and continue them
    buckets: Buckets  # the sizes to which passes are padded; with `pasts`, rows of a pass may continue several prefixes
    graphs: Graphs[Any, Any] | None

    def run(self, planned: Pass, rows: Sequence[Row], past: Sequence[Prefix]) -> tuple[list[Scores], list[Prefix]]:
        """Run one pass.

        rows: what the pass computes, as `planned.select` gives it. past: the prefix that each row continues, of one
        row each; empty if the rows are whole.

        Returns the scores of each row, raw and in float32 arithmetic, where the pass reads answers; and the prefix
        that the shared tokens of each row leave behind, of one row each, where the pass keeps them. Both are the
        caller's: later passes do not change them.
        """
        ...
