"""The formats in which decision checkpoints are published: which one a folder has, and whether it can be served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onepass.prompt.template import DecisionFormat


def load_decision(folder: Path, family: str) -> DecisionFormat:
    """What the files of the family say of its decisions. Raises `StartupError`."""
    from onepass.families import markers, readout
    from onepass.prompt.template import DecisionFormat

    if family == markers.CHAT:
        return DecisionFormat.of_chat()
    if family == markers.READOUT:
        return readout.load(folder)
    return DecisionFormat.load(folder)
