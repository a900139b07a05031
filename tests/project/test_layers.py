"""The layers of the house: who may import whom, who may touch torch, how large a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

TOP = ("server", "engine", "batcher", "images")
PACKAGE = sorted((ROOT / "onepass").rglob("*.py"))
FILES = [*(ROOT / f"{name}.py" for name in TOP), *PACKAGE]
MAX_LINES = 400
MAX_FUNCTION_LINES = 50
# What a module may import of ours, by the room it stands in; "" are the modules of `onepass/` itself.
MAY_NOT_IMPORT = {
    "wire": {"prompt", "families", "forward", "edge", "cli", "scale", "engine", "batcher", "decider", "loading"},
    "prompt": {"families", "forward", "edge", "cli", "scale", "engine", "batcher", "decider", "loading"},
    "forward": {"edge", "cli", "scale", "engine", "batcher", "decider", "loading"},
    "families": {"forward", "edge", "cli", "scale", "engine", "batcher", "decider", "loading"},
    "edge": {"prompt", "families", "forward", "engine", "batcher", "images", "loading", "cli", "scale"},
    "engine": {"edge", "cli", "scale", "batcher", "decider", "loading"},
    "batcher": {"wire", "prompt", "families", "forward", "edge", "cli", "scale", "engine", "decider", "loading"},
    "images": {"wire", "prompt", "families", "forward", "edge", "cli", "scale", "engine", "batcher", "decider"},
    "decisions": {"prompt", "families", "forward", "edge", "cli", "scale", "engine", "batcher", "decider", "loading"},
    "": {"edge", "cli", "scale"},
}
PROGRAMS = {"server", "cli", "scale"}
MAY_IMPORT_TORCH = {"forward", "engine", "images"}
TORCH_EXCEPTIONS = {"onepass/cli/doctor.py"}  # it asks whether torch sees a device


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The package in which a module stands, or its own name at the top; "" for the modules of `onepass/` itself."""
    parts = module.split(".")
    if parts[0] != "onepass":
        return parts[0]
    return parts[1] if len(parts) > 1 and (ROOT / "onepass" / parts[1]).is_dir() else ""


def imports(path: Path) -> Iterator[str]:
    """The full name of every module that the file imports, at its top or later."""
    modules = {name_of(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in inner if name in modules]
            yield from found or [node.module]


def rooms_imported(path: Path) -> set[str]:
    names = {name for name in imports(path) if name.split(".")[0] in ("onepass", *TOP)}
    return {room_of(name) or name.split(".")[-1] for name in names}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_import_runs_upward(path: Path) -> None:
    room = room_of(name_of(path))
    if path.name == "__main__.py" or path == ROOT / "onepass" / "__init__.py":
        return
    forbidden = MAY_NOT_IMPORT.get(room, set())
    assert not rooms_imported(path) & forbidden


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_imports_a_program(path: Path) -> None:
    if path.name != "__main__.py" and room_of(name_of(path)) not in PROGRAMS:
        assert not rooms_imported(path) & PROGRAMS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_forward_and_the_engine_import_torch(path: Path) -> None:
    if room_of(name_of(path)) not in MAY_IMPORT_TORCH and str(path.relative_to(ROOT)) not in TORCH_EXCEPTIONS:
        assert "torch" not in {name.split(".")[0] for name in imports(path)}


def test_the_modules_of_the_product_import_one_another_without_a_circle() -> None:
    """At the top of a file; what a function imports later may wait for it."""
    graph = {name_of(path): set[str]() for path in FILES}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    target = name if name in graph else node.module
                    if target in graph:
                        graph[name_of(path)].add(target)
    while leaves := {name for name, needed in graph.items() if not needed & graph.keys()}:
        graph = {name: needed for name, needed in graph.items() if name not in leaves}
    assert not graph


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_has_a_name_of_the_standard_library(path: Path) -> None:
    parts = name_of(path).split(".")
    assert not {parts[0]} & sys.stdlib_module_names
    assert not {part for part in parts[1:2] if (ROOT / "onepass" / part).is_dir()} & sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_are_of_a_size_to_be_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    assert ast.get_docstring(module)
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name


def test_only_the_files_of_the_owner_stand_at_the_top() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == set(TOP)


def test_the_server_starts_without_the_heavy_packages() -> None:
    """It listens before torch and transformers are imported: they come with the model, in the worker thread."""
    heavy = {"torch", "transformers", "huggingface_hub", "numpy"}
    code = f"import sys, server; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_no_test_imports_a_test() -> None:
    """What several tests share is in `tests/support/`."""
    for path in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in modules if name.split(".")[-1].startswith("test_")], path


def test_no_helper_of_the_tests_has_a_name_of_the_standard_library() -> None:
    """A program that runs from its folder would import it in place of the library's."""
    names = {path.stem for path in (ROOT / "tests" / "support").glob("*.py")}
    assert not names & sys.stdlib_module_names
