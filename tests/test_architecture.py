"""The layers: who may import whom, who may touch torch, how large a file may grow."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A module imports only from the lines above its own. The third-party packages are those it may name.
LAYERS: tuple[dict[str, set[str]], ...] = (
    {
        "errors": set(),
        "metrics": {"prometheus_client"},
    },
    {
        "config": set(),
        "body": {"python_multipart"},
        "framing": {"backports", "compression"},
        "plan": set(),
        "process": set(),
        "row_cache": set(),
        "row_queue": set(),
        "state_cache": set(),
        "tokens": {"tokenizers"},
        "kernels": {"torch", "fla"},
        "images": {"PIL", "numpy", "torch"},
        "graphs": {"torch"},
        "prefix": {"torch"},
        "weights": {"torch", "safetensors"},
    },
    {
        "wire": {"pydantic", "pydantic_core"},
        "access": set(),
        "stream": set(),
        "checkpoint": {"huggingface_hub", "tqdm"},
        "batcher": set(),
        "qwen3_5": {"torch"},
        "heads": {"torch", "safetensors"},
    },
    {
        "template": {"transformers", "jinja2", "huggingface_hub"},
        "readout": set(),
        "listener": set(),
        "assets": set(),
        "vision": {"torch"},
    },
    {
        "prompt": set(),
    },
    {
        "inputs": {"torch"},
        "tower": {"torch", "numpy"},
        "tuning": {"torch"},
    },
    {
        "fast": {"torch", "safetensors", "tqdm"},
        "library": {"torch", "safetensors", "transformers"},
    },
    {
        "engine": {"torch", "safetensors"},
    },
    {
        "loading": {"transformers"},
    },
    {
        "decider": set(),
    },
    {
        "handler": set(),
        "openapi": {"pydantic"},
        "page": set(),
    },
    {
        "routes": set(),
    },
    {
        "server": set(),
        "tool_files": {"tqdm"},
        "tool_bench": {"rich"},
        "tool_doctor": {"torch", "fla"},
    },
    {
        "tool_ask": {"rich"},
        "tool_batch": {"tqdm"},
    },
    {
        "onepass": set(),
    },
)
ALLOWED = {name: packages for layer in LAYERS for name, packages in layer.items()}
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(path.stem for path in ROOT.glob("*.py"))
MAX_LINES = 420
MAX_FUNCTION_LINES = 50


def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def imports(name: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - {"__future__"}


def test_every_module_has_its_layer() -> None:
    assert set(MODULES) == set(LEVEL)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_only(name: str) -> None:
    for imported in imports(name):
        if imported in LEVEL:
            assert LEVEL[imported] < LEVEL[name], f"{name} imports {imported}"
        else:
            assert imported in sys.stdlib_module_names or imported in ALLOWED[name], f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_no_module_shadows_the_standard_library(name: str) -> None:
    assert name not in sys.stdlib_module_names


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_of_a_size_to_be_read(name: str) -> None:
    module = tree(name)
    assert ast.get_docstring(module)
    assert len((ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name


def test_the_server_starts_without_the_heavy_packages() -> None:
    """It listens before torch and transformers are imported: they come with the model, in the worker thread."""
    import subprocess

    heavy = {"torch", "transformers", "huggingface_hub", "numpy"}
    code = f"import sys, server; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
