"""Trains the starter: rows in, a run folder out. Stop it at any time; started again with the same flags it goes on."""

import argparse
import ctypes
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch loads: spinning threads starve whoever shares the cores

import numpy as np
import torch
import torch.nn.functional as F
from batches import Batcher
from data import TYPES, Row, Rows, Segments, number_rows, parse_row, read_raw, read_rows, shuffled
from initial import initialise
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from wiring import free_entries, is_boundary, signal_table, wire

from model import HEAD_NAME, PointerModel, build_config, load_model

WINDOW_BATCHES = 64  # batches drawn together and cut by length; a run stops and resumes between two windows
BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.98), 0.05, 1.0
EVAL_EVERY, TABLE_EVERY = 4, 16  # windows
EVAL_BATCH = 256  # rows
INTENT_SETS = ("banking77", "clinc150", "hwu64", "snips", "stackoverflow_titles")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does; saved beside it. Only `epochs` may change when a run is resumed: it moves the decay."""

    epochs: float
    batch_rows: int
    lr: float
    embedding_lr: float
    drop: float
    bare: float
    layers: str
    hidden: int
    inner: int
    warm_rows: int
    seed: int
    hold_out: tuple[str, ...]

    def lr_at(self, share: float) -> float:
        """Of the peak, by the share of the run that is done: a short warm-up, flat, then down over the second half."""
        return min(1.0, share * 50 + 0.02, (1.0 - share) * 2 + 0.01)


class Corpus:
    """The rows of a run as segments: training rows and dev rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train: list[Row], dev: list[Row], model_dir: Path) -> None:
        self.tokenizer = tokenizer
        segments = Segments(Tokenizer.from_file(str(model_dir / "tokenizer.json")))
        self.train, self.dev = number_rows(train, segments), number_rows(dev, segments)
        segments.numbers.clear()
        boundary = is_boundary(tokenizer).numpy()
        self.train_batcher = Batcher(self.train, segments, boundary)
        self.dev_batcher = Batcher(self.dev, segments, boundary)
        self.signals = signal_table(tokenizer)

    def draw(self, plan: Plan, window: int) -> np.ndarray:
        """The rows of a window: first, as many as `warm_rows`, of the intent sets; then of all, epoch by epoch."""
        size = WINDOW_BATCHES * plan.batch_rows
        if (window + 1) * size <= plan.warm_rows:
            sets = [i for i, name in enumerate(self.train.names) if name in INTENT_SETS]
            intents = np.flatnonzero(np.isin(self.train.dataset, sets))
            return np.asarray(intents[shuffled(len(intents), f"{plan.seed}-{window}")[:size]])
        epoch, start = divmod(window * size, len(self.train))
        orders = [shuffled(len(self.train), f"{plan.seed}-{e}") for e in (epoch, epoch + 1)]
        return np.concatenate(orders)[start : start + size]

    def token_counts(self) -> Tensor:
        segments = self.train_batcher.segments
        return torch.bincount(torch.from_numpy(segments.tokens.astype(np.int64)), minlength=len(self.tokenizer))


def make_optimizer(model: PointerModel) -> torch.optim.AdamW:
    """No weight decay on norms, biases, decays and the embeddings, which start from a meaning worth keeping."""
    embedding = model.lm.model.embed_tokens.weight
    others = [p for p in model.parameters() if p is not embedding]
    groups = [
        {"params": [p for p in others if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in others if p.dim() != 2], "weight_decay": 0.0},
        {"params": [embedding], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def distance(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the targets (Q, K), which may be a teacher's; scores (Q, K) are -inf where there is no option."""
    log_shares = scores.log_softmax(-1).masked_fill(targets == 0, 0.0)  # 0 * -inf would be nan
    return -(targets * log_shares).sum(-1).mean()


def train_window(
    model: PointerModel, optimizer: torch.optim.AdamW, corpus: Corpus, plan: Plan, window: int, num_windows: int
) -> dict[str, float]:
    """Returns figures for the log."""
    began, num_rows, losses = time.monotonic(), 0, []
    signals = corpus.signals.to(model.device)
    free = free_entries(model.lm, signals)
    rng = np.random.default_rng([plan.seed, window])
    numbers = corpus.draw(plan, window)
    batches = corpus.train_batcher.slices(numbers, plan.batch_rows)
    rng.shuffle(batches)
    for i, numbers in enumerate(batches):
        scale = plan.lr_at((window + i / len(batches)) / num_windows)
        for group in optimizer.param_groups:
            is_embedding = group is optimizer.param_groups[-1]
            group["lr"] = (plan.embedding_lr if is_embedding else plan.lr) * scale
        batch = corpus.train_batcher.batch(numbers, rng, plan.drop, plan.bare).to(model.device)
        optimizer.zero_grad()
        loss = distance(model(batch), batch.targets)
        torch.autograd.backward(loss)
        for name, mask in free.items():
            gradient = model.lm.get_parameter(name).grad
            if gradient is not None:
                gradient.mul_(mask)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        wire(model.lm, signals)
        losses.append(loss.item())
        num_rows += len(batch)
    return {
        "loss": sum(losses) / len(losses),
        "lr": plan.lr * scale,
        "rows_per_s": num_rows / (time.monotonic() - began),
    }


@torch.no_grad()
def dev_scores(model: PointerModel, batcher: Batcher) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Batches of (numbers of the rows, their scores (Q, K), their answers (Q,))."""
    for batch in batcher.batches(np.arange(len(batcher.rows)), EVAL_BATCH):
        yield batch.rows, model(batch.to(model.device)).cpu(), batch.answers


def right_answers(model: PointerModel, batcher: Batcher) -> tuple[np.ndarray, float]:
    """Whether each row's best option is the right one, (N,) bool, and the mean loss."""
    right, losses = np.zeros(len(batcher.rows), bool), 0.0
    for numbers, scores, answers in dev_scores(model, batcher):
        right[numbers] = (scores.argmax(-1) == answers).numpy()
        losses += F.cross_entropy(scores, answers, reduction="sum").item()
    return right, losses / len(right)


def dev_table(rows: Rows, right: np.ndarray) -> str:
    """Accuracy per set and type, in one line a set."""
    lines = []
    for number, name in enumerate(rows.names):
        cells = []
        for kind in range(len(TYPES)):
            chosen = (rows.dataset == number) & (rows.type == kind)
            cells.append(f"{right[chosen].mean():6.2f}" if chosen.any() else "     -")
        lines.append(f"  {name:22s} {' '.join(cells)}")
    return "\n".join(lines)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory: giving it back costs a tenth of the time in page faults."""
    m_mmap_threshold, m_trim_threshold, m_top_pad, m_arena_max = -3, -1, -2, -8
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(m_arena_max, 1)
    libc.mallopt(m_mmap_threshold, 32 << 20)  # the most it accepts
    libc.mallopt(m_trim_threshold, 2**31 - 1)
    libc.mallopt(m_top_pad, 256 << 20)


def save_run(run_dir: Path, model: PointerModel, optimizer: torch.optim.AdamW, window: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "window": window}
    torch.save(state, run_dir / "next.pt")
    (run_dir / "next.pt").replace(run_dir / "last.pt")  # a stop while writing leaves the old one whole


def run(plan: Plan, corpus: Corpus, run_dir: Path, begin_at: Path, device: torch.device) -> None:
    """begin_at: a checkpoint to go on from, if it has a pointer head, or else the folder of the sentence encoder."""
    torch.manual_seed(plan.seed)
    is_trained = (begin_at / HEAD_NAME).exists()
    model = PointerModel(build_config(len(corpus.tokenizer), plan.layers, plan.hidden, plan.inner))
    if is_trained:
        model = load_model(begin_at).train()
    first, last = 0, run_dir / "last.pt"
    optimizer = make_optimizer(model.to(device))
    if last.exists():
        state = torch.load(last, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["window"]
    elif not is_trained:
        initialise(model.to("cpu"), begin_at, corpus.tokenizer, corpus.token_counts())
    model.to(device)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "plan.json").write_text(json.dumps(asdict(plan), indent=2) + "\n")
    num_windows = round(plan.epochs * len(corpus.train) / (WINDOW_BATCHES * plan.batch_rows))
    for window in range(first, num_windows):
        figures = train_window(model, optimizer, corpus, plan, window, num_windows)
        is_last = window + 1 == num_windows
        if (window + 1) % EVAL_EVERY == 0 or is_last:
            right, figures["dev_loss"] = right_answers(model, corpus.dev_batcher)
            figures |= {name: right[corpus.dev.type == kind].mean() for kind, name in enumerate(TYPES)}
        text = " ".join(f"{name}={value:.4g}" for name, value in figures.items())
        print(f"{time.strftime('%H:%M:%S')} window={window + 1}/{num_windows} {text}", flush=True)
        if (window + 1) % TABLE_EVERY == 0 or is_last:
            print(dev_table(corpus.dev, right), flush=True)
        save_run(run_dir, model, optimizer, window + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of decisions-{train,dev}.jsonl.gz")
    parser.add_argument("--extra", type=Path, nargs="*", default=[], help="more training rows: .jsonl or .jsonl.gz")
    parser.add_argument("--run", type=Path, required=True, help="folder of this run; resumes if it holds last.pt")
    parser.add_argument("--model", type=Path, default=Path("model"), help="folder of the tokenizer (default: model)")
    begin = parser.add_mutually_exclusive_group(required=True)
    begin.add_argument("--encoder", type=Path, help="folder of all-MiniLM-L6-v2, from whose meanings a run begins")
    begin.add_argument("--begin-at", type=Path, help="checkpoint folder from whose weights a run begins instead")
    parser.add_argument("--epochs", type=float, default=4.0, help="passes over the rows (default: 4)")
    parser.add_argument("--batch-rows", type=int, default=128, help="rows of a batch (default: 128)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    parser.add_argument("--embedding-lr", type=float, default=1e-3, help="the same for the embeddings (default: 0.001)")
    parser.add_argument("--drop", type=float, default=0.1, help="share of text tokens left out (default: 0.1)")
    parser.add_argument("--bare", type=float, default=0.1, help="share of rows without descriptions (default: 0.1)")
    parser.add_argument("--layers", default="ddffd", help="d: gated delta net, f: full attention (default: ddffd)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the residual stream (default: 256)")
    parser.add_argument("--inner", type=int, default=384, help="width of the MLPs (default: 384)")
    parser.add_argument("--warm-rows", type=int, default=32768, help="first, intents alone (default: 32768)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and sampling (default: 0)")
    parser.add_argument("--hold-out", nargs="*", default=[], help="sets to leave out of training, to try generality")
    parser.add_argument("--device", default="cpu", help="torch's name of where to train (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="torch's (default: 1)")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    names = (
        "epochs",
        "batch_rows",
        "lr",
        "embedding_lr",
        "drop",
        "bare",
        "layers",
        "hidden",
        "inner",
        "warm_rows",
        "seed",
    )
    plan = Plan(**{name: getattr(args, name) for name in names}, hold_out=tuple(args.hold_out))
    train = read_rows(args.data, "train") + [parse_row(raw) for path in args.extra for raw in read_raw(path)]
    train = [row for row in train if row.dataset not in plan.hold_out]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    corpus = Corpus(tokenizer, train, read_rows(args.data, "dev"), args.model)
    run(plan, corpus, args.run, args.begin_at or args.encoder, torch.device(args.device))


if __name__ == "__main__":
    main()
