"""Every command that the README and the pages put beside a figure runs to its end, with the smallest sizes.

No figure is looked at: a busy machine prints others. A table must be printed, and nothing may fail.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.checkpoints import STARTER

PATIENCE_S = 300.0
# The programs in bench/ that are imported by others, and are no commands
LIBRARIES = {"shapes", "traffic"}
# Each command with its sizes, and what the last part of its output looks like
COMMANDS: dict[str, tuple[str, str]] = {
    "edge": ("bench/edge.py --rounds 1 --seconds 0.1", r"added at the median.*\n\n.*\n.*parse the head"),
    "forward": (
        "bench/forward.py --lengths 16 --rounds 1 --layers 4 --dtypes float32 bfloat16",
        r"\| bfloat16 \| 16 \|",
    ),
    "forward, one state": (
        "bench/forward.py --threads 1 --shared --rounds 1 --layers 4 --dtypes float32",
        r"state at hand",
    ),
    "forward, packed": (
        "bench/forward.py --lengths 16 --rounds 1 --layers 4 --pack --dtypes float32",
        r"\| float32 \| 16 \|",
    ),
    "determinism": ("bench/determinism.py --requests 4 --dtype float32 bfloat16", r"\| bfloat16, batch-invariant \|"),
    "device": ("bench/device.py --device cpu --layers 4 --shapes 0.8B --budget-s 5", r"0\.8B"),
    "load": ("bench/load.py --seconds 1 --only giant", r"beside a giant about new states"),
    "overload": ("bench/load.py --seconds 1 --seconds-over 1 --only open --capacity 10", r"2\.0 of capacity"),
    "memory": ("bench/memory.py --model {labels} --seconds 1", r"\| after it \|"),
    "pictures": ("bench/pictures.py --depth 1 --width 64 --rounds 1", r"the picture and the text kept"),
    "settings": ("bench/settings.py --rounds 1", r"max_batch_rows=64"),
    "starts": ("bench/starts.py --starts 1 --busy 1", r"\| 1 busy processes \| .*dtype float32"),
    "startup": ("bench/startup.py", r"\| warm-up \|"),
    "soak": ("bench/soak.py --minutes 0.1 --clients 2", r"nothing leaked, every count agrees"),
    "serve": ("bench/serve.py --peer {peer} --model {labels} --rounds 1 --seconds 0.3 --clients 1", r"\| 500 \|"),
    "evaluate": ("train/evaluate.py model tests/bench/rows.jsonl --limit 4", r"choice"),
    "drawings, a sheet": ("train/drawings.py {tmp}/sheet.png --count 2", r""),
    "drawings, rows": ("train/drawings.py {tmp}/rows.jsonl --count 2 --seed 5", r""),
}


def test_every_program_of_the_folder_is_run() -> None:
    programs = {path.stem for path in (ROOT / "bench").glob("*.py")} - LIBRARIES
    assert programs <= {command.split("/")[1].split(".")[0] for command, _ in COMMANDS.values()}


def test_every_command_beside_a_figure_is_run() -> None:
    """With other sizes, but with the same program."""
    run = {command.split()[0] for command, _ in COMMANDS.values()}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "model" / "README.md"]:
        named = set(re.findall(r"python3? ((?:bench|train)/\w+\.py)", page.read_text(encoding="utf-8")))
        assert named <= run | {"train/check.py"}, page.name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_well_and_prints_its_table(name: str, tmp_path: Path, labels_checkpoint: Path) -> None:
    command, pattern = COMMANDS[name]
    peer = shutil.which("transformers", path=str(Path(sys.executable).parent))
    words = command.format(labels=labels_checkpoint, peer=peer, tmp=tmp_path).split()
    environ = {key: value for key, value in os.environ.items() if not key.startswith("ONEPASS_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(pattern, done.stdout), done.stdout[-2000:]


def test_what_is_drawn_can_be_evaluated(tmp_path: Path) -> None:
    rows = tmp_path / "drawings.jsonl"
    for words in (["train/drawings.py", str(rows), "--count", "3"], ["train/evaluate.py", str(STARTER), str(rows)]):
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    assert "noul" in done.stdout


def test_the_check_of_the_training_ends_well(tmp_path: Path) -> None:
    rows = (ROOT / "tests" / "bench" / "rows.jsonl").read_bytes()
    (tmp_path / "decisions-dev.jsonl.gz").write_bytes(gzip.compress(rows))
    command = [sys.executable, "train/check.py", "--data", str(tmp_path), "--rows", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "largest difference of a score" in done.stdout
