"""Onepass, a self-hosted System One server. A program imports `Decider`, `Config` and the errors from here.

The names are imported when they are first used: `python -m onepass doctor` has to run where nothing is installed yet.
The modules `engine`, `batcher` and `images` lie beside this package. A program that has a module of one of these names
in front of them gets an `ImportError` that says so.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onepass.config import Config
    from onepass.decider import Decider
    from onepass.errors import ApiError, StartupError

__all__ = ["ApiError", "Config", "Decider", "StartupError"]

HOMES = {
    "ApiError": "onepass.errors",
    "Config": "onepass.config",
    "Decider": "onepass.decider",
    "StartupError": "onepass.errors",
}
NEIGHBOURS = ("engine", "batcher", "images")
FOLDER = Path(__file__).resolve().parent.parent


def find_shipped(name: str) -> Path:
    """A file or folder that is shipped with us: inside this package once it is installed, beside it in a checkout."""
    inside = FOLDER / "onepass" / name
    return inside if inside.exists() else FOLDER / name


def check_neighbours() -> None:
    """Raise `ImportError` if another module would be imported in place of one that lies beside this package."""
    for name in NEIGHBOURS:
        spec = find_spec(name)
        expected = FOLDER / f"{name}.py"
        if spec is None or spec.origin is None or Path(spec.origin).resolve() != expected:
            found = spec.origin if spec else "nothing"
            raise ImportError(
                f"Onepass needs its own module {name!r} ({expected}), but Python finds {found}: rename that module, "
                f"or put {FOLDER} before it in PYTHONPATH"
            )


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'onepass' has no attribute {name!r}")
    check_neighbours()
    return getattr(import_module(HOMES[name]), name)
