"""Puts a training run into the checkpoint folder: weights, head, temperatures fitted on dev, checksums."""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

import torch
from data import TYPES, read_rows
from transformers import AutoTokenizer
from wiring import wire

from model import PointerModel, build_config, load_model, save_model
from train import Corpus, Plan, dev_scores

SUMS_NAME = "SHA256SUMS"


def write_sums(model_dir: Path) -> None:
    """Writes SHA256SUMS beside the checkpoint folder, one line a file, as `sha256sum model/*` would."""
    files = sorted(path for path in model_dir.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {model_dir.name}/{path.name}\n" for path in files]
    (model_dir.parent / SUMS_NAME).write_text("".join(lines), encoding="utf-8")


def fit_temperatures(model: PointerModel, corpus: Corpus) -> dict[str, float]:
    """Per question type, the temperature of the least loss on the dev rows, on a grid of 2% steps."""
    grid = 1.02 ** torch.arange(-60.0, 101.0)
    losses = {kind: torch.zeros(len(grid)) for kind in TYPES}
    for numbers, scores, answers in dev_scores(model, corpus.dev_batcher):
        for i, kind in enumerate(TYPES):
            of_kind = torch.from_numpy(corpus.dev.type[numbers] == i)
            scaled = scores[of_kind][None] / grid[:, None, None]
            chosen = scaled.gather(2, answers[of_kind].expand(len(grid), -1)[..., None])[..., 0]
            losses[kind] += (scaled.logsumexp(-1) - chosen).sum(-1)
    return {kind: round(float(grid[loss.argmin()]), 3) for kind, loss in losses.items()}


def export(run_dir: Path, data_dir: Path, model_dir: Path) -> None:
    """The tokenizer and the templates are already in `model_dir`, since training read them there."""
    plan = Plan(**json.loads((run_dir / "plan.json").read_text(encoding="utf-8")))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = PointerModel(build_config(len(tokenizer), plan.layers, plan.hidden, plan.inner))
    model.load_state_dict(torch.load(run_dir / "last.pt", weights_only=True)["model"])
    with tempfile.TemporaryDirectory(dir=model_dir.parent, prefix=".export-") as name:
        staged = Path(name)
        dev = read_rows(data_dir, "dev")
        corpus = Corpus(tokenizer, dev[:1], dev, model_dir)
        wire(model.lm, corpus.signals)
        save_model(model, staged)
        temperatures = fit_temperatures(load_model(staged), corpus)
        settings = json.loads((model_dir / "decision.json").read_text(encoding="utf-8"))
        settings["temperature"] = temperatures
        (staged / "decision.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for path in staged.iterdir():
            path.chmod(0o644)
            path.replace(model_dir / path.name)
    print(f"export: temperature={temperatures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of decisions-dev.jsonl.gz")
    parser.add_argument("--run", type=Path, help="folder of the training run; without it, only the sums are written")
    parser.add_argument("--model", type=Path, default=Path("model"), help="checkpoint folder (default: model)")
    args = parser.parse_args()
    if args.run and not args.data:
        parser.error("--run needs --data, to fit the temperatures")
    if args.run:
        export(args.run, args.data, args.model)
    write_sums(args.model.resolve())


if __name__ == "__main__":
    main()
