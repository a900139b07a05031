"""Trains the checkpoint: intent sets first, where matching is learnt, then every set. Resumes from its run folder."""

import argparse
import ctypes
import json
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads: spinning threads starve whoever shares the cores

import torch
import torch.nn.functional as F
from data import Batch, Prompt, Renderer, Row, iter_batches, read_rows
from evaluate import score_prompts, summarise
from initial import initialise
from sampling import INTENT_SETS, Stream, sample_groups

from model import PointerModel, build_config

WINDOW_ROWS = 2048  # rows drawn, rendered, sorted by length and batched together; a run stops and resumes between two
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.98), 0.05, 1.0
WARM_UP_ROWS = 2048
COUNTED_ROWS = 8000  # whose tokens are counted, to tell the frequent from the telling ones
DECAY_SHARE = 0.25  # of all rows
EVAL_EVERY = 4  # windows
EVAL_ROWS = 600  # dev rows, the same ones every time
UNIT = {"noul": 1.0, "choice": 1.0, "score": 1.0}  # temperatures of a model in training


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does; saved beside it. Only `rows` may change when a run is resumed: it moves the final decay."""

    rows: int  # questions drawn in all
    intent_rows: int  # the first ones come from the intent sets alone
    lr: float
    batch_tokens: int
    seed: int

    def lr_at(self, num_rows: int) -> float:
        """Warm-up, then constant, then down to nothing over the last quarter."""
        warm_up = min(1.0, (num_rows + WINDOW_ROWS / 2) / WARM_UP_ROWS)
        left = max(0.0, self.rows - num_rows - WINDOW_ROWS / 2) / (DECAY_SHARE * self.rows)
        return self.lr * min(warm_up, left, 1.0)


def make_optimizer(model: PointerModel) -> torch.optim.AdamW:
    """No weight decay on norms, biases, decays and the embeddings, which start from a meaning worth keeping."""
    decayed = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    kept = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed_tokens" in name]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def draw_window(stream: Stream, index: int, plan: Plan, renderer: Renderer) -> list[Batch]:
    rng = random.Random(f"{plan.seed}-{index}")
    rows = stream.take(index * WINDOW_ROWS, WINDOW_ROWS)
    prompts = [renderer.render(group) for group in sample_groups(rows, stream, rng)]
    batches = list(iter_batches(prompts, plan.batch_tokens, renderer.pad_id))
    rng.shuffle(batches)
    return batches


def train_window(
    model: PointerModel, optimizer: torch.optim.AdamW, batches: list[Batch], lr: float
) -> tuple[float, int]:
    """Returns the mean loss and the number of tokens, padding included."""
    losses: list[float] = []
    num_tokens = 0
    for group in optimizer.param_groups:
        group["lr"] = lr
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.answers)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        losses.append(loss.item())
        num_tokens += batch.input_ids.numel()
    return sum(losses) / len(losses), num_tokens


def dev_accuracy(model: PointerModel, prompts: list[Prompt], pad_id: int) -> dict[str, float]:
    """Accuracy on the choice rows of the intent sets, then per type."""
    scored = score_prompts(model, prompts, pad_id)
    parts = {"intents": [one for one in scored if one.row.type == "choice" and one.row.dataset in INTENT_SETS]}
    for kind in UNIT:
        parts[kind] = [one for one in scored if one.row.type == kind]
    return {name: round(summarise(part, UNIT)["accuracy"], 3) for name, part in parts.items()}


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: giving it back costs a tenth of the time in page faults."""
    m_mmap_threshold, m_trim_threshold, m_top_pad, m_arena_max = -3, -1, -2, -8
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(m_arena_max, 1)
    libc.mallopt(m_mmap_threshold, 32 << 20)  # the most it accepts
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 256 << 20)


def count_tokens(renderer: Renderer, rows: list[Row], seed: int) -> torch.Tensor:
    sample = random.Random(seed).sample(rows, COUNTED_ROWS)
    token_ids = [token for row in sample for token in renderer.render([row]).input_ids]
    return torch.bincount(torch.tensor(token_ids), minlength=renderer.vocab_size)


def save_run(run_dir: Path, model: PointerModel, optimizer: torch.optim.AdamW, window: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "window": window}
    torch.save(state, run_dir / "next.pt")
    (run_dir / "next.pt").replace(run_dir / "last.pt")  # a stop while writing leaves the old one whole


def run(plan: Plan, data_dir: Path, model_dir: Path, run_dir: Path, encoder_dir: Path) -> None:
    renderer = Renderer(model_dir)
    stream = Stream(read_rows(data_dir, "train"), plan.intent_rows, plan.seed)
    dev_rows = random.Random(plan.seed).sample(read_rows(data_dir, "dev"), EVAL_ROWS)
    dev = [renderer.render([row]) for row in dev_rows]
    torch.manual_seed(plan.seed)
    model = PointerModel(build_config(renderer.vocab_size, renderer.pad_id))
    first, last = 0, run_dir / "last.pt"
    optimizer = make_optimizer(model)
    if last.exists():
        state = torch.load(last, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["window"]
    else:
        initialise(model, encoder_dir, renderer.tokenizer, count_tokens(renderer, stream.rows, plan.seed))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "plan.json").write_text(json.dumps(asdict(plan), indent=2) + "\n")
    for window in range(first, plan.rows // WINDOW_ROWS):
        began = time.monotonic()
        lr = plan.lr_at(window * WINDOW_ROWS)
        loss, num_tokens = train_window(model, optimizer, draw_window(stream, window, plan, renderer), lr)
        speed = num_tokens / (time.monotonic() - began)
        print(f"rows={(window + 1) * WINDOW_ROWS} loss={loss:.4f} lr={lr:.2e} tokens_per_s={speed:.0f}", flush=True)
        if (window + 1) % EVAL_EVERY == 0:
            print(f"dev: rows={(window + 1) * WINDOW_ROWS} {dev_accuracy(model, dev, renderer.pad_id)}", flush=True)
        save_run(run_dir, model, optimizer, window + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-{train,dev,test}.jsonl.gz")
    parser.add_argument("--run", type=Path, required=True, help="folder of this run; resumes if it holds last.pt")
    parser.add_argument("--model", type=Path, default=Path("model"), help="tokenizer, templates (default: model)")
    parser.add_argument("--encoder", type=Path, required=True, help="folder of all-MiniLM-L6-v2, read at the start")
    parser.add_argument("--rows", type=int, default=38_912, help="questions to draw in all (default: 38912)")
    parser.add_argument("--intent-rows", type=int, default=18_432, help="first, intents alone (default: 18432)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="most tokens of a batch (default: 2048)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and sampling (default: 0)")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_float32_matmul_precision("medium")  # picks the faster library on AMD; float32 accuracy there
    plan = Plan(args.rows, args.intent_rows, args.lr, args.batch_tokens, args.seed)
    run(plan, args.data, args.model, args.run, args.encoder)


if __name__ == "__main__":
    main()
