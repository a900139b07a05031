"""Our forward against transformers' own model, on tiny random weights: what must be equal, and what must not be."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from onepass.forward import qwen3_5
from onepass.forward.fast_backend import flatten
from onepass.forward.loader import BadWeights, TensorReader, UnsupportedModel
from onepass.forward.prefix import Prefix
from onepass.forward.qwen3_5 import Spec, Weights, forward
from tests.support.no_sync import no_sync

TOLERANCE = 2e-5  # of the largest logit
DIFFERS = 0.05  # of the largest logit: what is wrong is wrong by this at least
WEIGHT_SCALE = 4.0  # near-uniform attention, which small random weights give, hides bugs
VOCAB = 97
FULL, LINEAR = "full_attention", "linear_attention"
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}


def tiny_config(**changes: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**(TINY | changes))


def make_model(seed: int = 0, **changes: Any) -> Qwen3_5ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(tiny_config(**changes)).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() >= 2:
            parameter.mul_(WEIGHT_SCALE)
        else:  # norms start at exactly 0 or 1, which hides a norm that is left out
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def load_weights(spec: Spec, tensors: TensorReader, dtype: torch.dtype = torch.float32, pack: bool = False) -> Weights:
    return qwen3_5.load_weights(spec, tensors, torch.device("cpu"), dtype, pack=pack)


def all_logits(weights: Weights, hidden: Tensor) -> Tensor:
    return F.linear(
        hidden.float() if hidden.dtype == torch.bfloat16 else hidden,
        weights.head.to(torch.promote_types(hidden.dtype, torch.float32)),
    )


class Pair:
    """A model of the library, and the same weights in our forward."""

    def __init__(self, model: Qwen3_5ForCausalLM, pack: bool = False) -> None:
        self.model = model
        self.spec = Spec.from_config(model.config)
        self.weights = load_weights(self.spec, model.state_dict(), dtype=model.dtype, pack=pack)

    def theirs(self, ids: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The library's logits (B, T, vocab)."""
        return self.model(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits

    def ours(self, ids: Tensor, positions: Tensor | None = None, read: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Our logits (B, R, vocab), of all positions unless told which."""
        start = kwargs["prefix"].valid.shape[1] if "prefix" in kwargs else 0
        order = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        positions = order + start if positions is None else positions
        read = order if read is None else read
        hidden, _ = forward(self.spec, self.weights, positions=positions, input_ids=ids, read=read, **kwargs)
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return all_logits(self.weights, hidden)

    def prefix(self, ids: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Prefix:
        start = kwargs["prefix"].valid.shape[1] if "prefix" in kwargs else 0
        positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1) + start if positions is None else positions
        kwargs |= {"positions": positions, "keep": ids.shape[1]}
        hidden, prefix = forward(self.spec, self.weights, input_ids=ids, **kwargs)
        assert prefix is not None
        assert hidden.shape[1] == 0
        return prefix


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(make_model())


@pytest.fixture(scope="module")
def pair64() -> Pair:
    return Pair(make_model().double())


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in largest logits."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def random_changes(rng: random.Random) -> dict[str, Any]:
    kv_heads, key_heads, num_layers = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 2, 3, 5])
    rotated = rng.choice([0.25, 0.5, 1.0])
    head_dim = rng.choice([16, 32])
    third = int(head_dim * rotated) // 2 // 3
    return {
        "hidden_size": rng.choice([32, 40, 64]),
        "num_hidden_layers": num_layers,
        "layer_types": [rng.choice([FULL, LINEAR]) for _ in range(num_layers)],
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * rng.choice([1, 2, 4]),
        "head_dim": head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([8, 16]),
        "linear_value_head_dim": rng.choice([8, 24]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-6, 1e-5]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice([1e4, 1e7]),
            "partial_rotary_factor": rotated,
            "mrope_section": [int(head_dim * rotated) // 2 - 2 * third, third, third],
        },
    }


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("seed", range(6))
def test_random_configurations_give_the_logits_of_transformers(seed: int, length: int):
    pair = Pair(make_model(seed, **random_changes(random.Random(f"{seed} {length}"))))
    ids = tokens(1 + seed % 3, length)
    assert distance(pair.ours(ids), pair.theirs(ids)) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 63, 130])
def test_packed_weights_give_the_logits_of_transformers(pair: Pair, length: int):
    packed = Pair(pair.model, pack=True)
    ids = tokens(2, length)
    assert packed.weights.layers[0].down.is_mkldnn
    assert distance(packed.ours(ids), pair.theirs(ids)) < TOLERANCE
    suffix = packed.ours(ids, prefix=packed.prefix(ids))
    assert distance(suffix, pair.theirs(torch.cat((ids, ids), dim=1))[:, length:]) < TOLERANCE


@pytest.mark.parametrize("length", [1, 64, 130])
def test_float64_weights_give_the_logits_of_transformers(pair64: Pair, length: int):
    ids = tokens(2, length)
    assert distance(pair64.ours(ids), pair64.theirs(ids)) < TOLERANCE / 4  # theirs is float32 inside the delta rule


def test_random_multimodal_positions_give_the_logits_of_transformers(pair: Pair):
    ids, positions = tokens(2, 70), torch.randint(0, 300, (3, 2, 70), generator=torch.Generator().manual_seed(3))
    assert distance(pair.ours(ids, positions), pair.theirs(ids, positions)) < TOLERANCE
    assert distance(pair.ours(ids), pair.theirs(ids, positions)) > DIFFERS


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair):
    ids = tokens(2, 130)
    half = Pair(make_model().bfloat16())
    reference = Pair(half.model.float()).theirs(ids)
    half.model.bfloat16()
    ours = (half.ours(ids) - reference).square().mean()
    theirs = (half.theirs(ids).float() - reference).square().mean()
    assert half.weights.dtype == torch.bfloat16
    assert ours < 1.2 * theirs


# Padding and batches


def right_padded(rows: list[Tensor], fill: int = 0) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.stack([torch.cat((row, row.new_full((width - len(row),), fill))) for row in rows])


ROWS = [tokens(n, seed=n) for n in (5, 64, 90)]


def test_right_padded_rows_without_a_mask_are_the_rows_alone(pair: Pair):
    for fill in (0, 7):
        padded = pair.ours(right_padded(ROWS, fill))
        for i, row in enumerate(ROWS):
            assert distance(padded[i, : len(row)], pair.theirs(row[None])[0]) < TOLERANCE


def test_left_padded_rows_with_a_mask_in_transformers_are_our_right_padded_rows(pair: Pair):
    width = max(len(row) for row in ROWS)
    ids = torch.stack([torch.cat((row.new_zeros(width - len(row)), row)) for row in ROWS])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in ROWS])
    theirs = pair.theirs(ids, (mask.cumsum(1) - 1).clamp(min=0), attention_mask=mask)
    ours = pair.ours(right_padded(ROWS))
    for i, row in enumerate(ROWS):
        assert distance(ours[i, : len(row)], theirs[i, width - len(row) :]) < TOLERANCE


def test_left_padding_without_a_mask_must_differ(pair: Pair):
    row = ROWS[0]
    ids = torch.cat((row.new_zeros(30), row))[None]
    positions = (torch.arange(len(row) + 30) - 30).clamp(min=0)[None]
    assert distance(pair.ours(ids, positions)[:, 30:], pair.theirs(row[None])) > DIFFERS


def test_packed_rows_told_apart_by_positions_alone_must_differ(pair: Pair):
    first, second = ROWS[0], ROWS[1]
    positions = torch.cat((torch.arange(len(first)), torch.arange(len(second))))[None]
    packed = pair.ours(torch.cat((first, second))[None], positions)
    assert distance(packed[:, len(first) :], pair.theirs(second[None])) > DIFFERS


def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(pair: Pair):
    ids, others = tokens(3, 70), tokens(3, 70, seed=9)
    others[1] = ids[1]
    batch = pair.ours(ids)
    assert torch.equal(batch[1], pair.ours(others)[1])
    assert distance(batch[1:2], pair.ours(ids[1:2])) < TOLERANCE


def test_eager_attention_without_a_mask_is_not_causal_in_transformers(pair: Pair):
    ids = tokens(1, 20)
    eager = make_model(attn_implementation="eager")
    no_mask = {FULL: None, LINEAR: None}
    theirs = eager(input_ids=ids, position_ids=torch.arange(20).expand(3, 1, -1), attention_mask=no_mask).logits
    assert distance(theirs, pair.ours(ids)) > DIFFERS


# Prefixes


@pytest.mark.parametrize("split", [1, 2, 3, 40, 64, 128, 129])
def test_a_prefix_and_its_suffix_are_the_whole_row(pair: Pair, split: int):
    ids = tokens(2, 130)
    suffix = pair.ours(ids[:, split:], prefix=pair.prefix(ids[:, :split]))
    assert distance(suffix, pair.theirs(ids)[:, split:]) < TOLERANCE


@pytest.mark.parametrize("split", [1, 40, 64])
def test_a_prefix_in_float64_is_exact(pair64: Pair, split: int):
    ids = tokens(2, 130)
    suffix = pair64.ours(ids[:, split:], prefix=pair64.prefix(ids[:, :split]))
    assert distance(suffix, pair64.ours(ids)[:, split:]) < 1e-12


def test_a_prefix_may_be_built_in_pieces(pair: Pair):
    ids = tokens(2, 90)
    prefix = pair.prefix(ids[:, 50:70], prefix=pair.prefix(ids[:, :50]))
    assert distance(pair.ours(ids[:, 70:], prefix=prefix), pair.theirs(ids)[:, 70:]) < TOLERANCE


@pytest.mark.parametrize("fork", ["one row for all", "select"])
def test_one_prefix_serves_seven_right_padded_suffixes(pair: Pair, fork: str):
    start, ends = tokens(1, 75), [tokens(n, seed=n) for n in (1, 2, 3, 8, 30, 64, 66)]
    prefix = pair.prefix(start)
    prefix = select(prefix, [0] * 7) if fork == "select" else prefix
    suffixes = pair.ours(right_padded(ends), prefix=prefix)
    for i, end in enumerate(ends):
        whole = pair.theirs(torch.cat((start, end[None]), dim=1))[0, 75:]
        assert distance(suffixes[i, : len(end)], whole) < TOLERANCE


@pytest.mark.parametrize(("keep", "length"), [(1, 2), (3, 9), (64, 70), (63, 200), (130, 131), (40, 170)])
@pytest.mark.parametrize("num_before", [0, 75])
def test_a_pass_keeps_what_its_first_tokens_leave_behind(pair: Pair, keep: int, length: int, num_before: int):
    """Beside the hidden states of all of them; both as from a pass of the beginning and one of the rest."""
    before = pair.prefix(tokens(1, num_before)) if num_before else None
    past: dict[str, Any] = {} if before is None else {"prefix": before}
    ids = tokens(2, length)
    order = torch.arange(length).expand(2, -1) + num_before
    hidden, kept = forward(
        pair.spec, pair.weights, positions=order, input_ids=ids, read=order - num_before, keep=keep, **past
    )
    apart = pair.prefix(ids[:, :keep], **past)
    assert kept is not None
    assert kept.num_tokens == apart.num_tokens == num_before + keep
    for mine, theirs in zip(kept.layers, apart.layers, strict=True):
        assert max(distance(one, other) for one, other in zip(mine, theirs, strict=True)) < TOLERANCE
    assert distance(pair.logits(hidden), pair.ours(ids, **past)) < TOLERANCE
    last = tokens(2, 9, seed=5)
    assert distance(pair.ours(last, prefix=kept), pair.ours(last, prefix=apart)) < TOLERANCE


@pytest.mark.parametrize("keep", [(5, 40, 69), (1, 1, 1), (64, 3, 64), (70, 20, 30)])
@pytest.mark.parametrize("num_before", [0, 75])
def test_rows_of_one_pass_may_keep_as_many_tokens_as_each_likes(pair: Pair, keep: tuple[int, ...], num_before: int):
    """What is kept of each, and its hidden states, are those of the row alone."""
    before = pair.prefix(tokens(1, num_before)) if num_before else None
    past: dict[str, Any] = {} if before is None else {"prefix": before}
    ids = tokens(3, 70, seed=3)
    order = torch.arange(70).expand(3, -1)
    hidden, kept = forward(
        pair.spec, pair.weights, positions=order + num_before, input_ids=ids, read=order, keep=keep, **past
    )
    assert kept is not None
    assert distance(pair.logits(hidden), pair.ours(ids, **past)) < TOLERANCE
    last = tokens(1, 9, seed=5)
    for index, count in enumerate(keep):
        row, apart = kept.row(index, num_before + count), pair.prefix(ids[index : index + 1, :count], **past)
        assert row.num_tokens == apart.num_tokens
        for mine, theirs in zip(row.layers, apart.layers, strict=True):
            assert max(distance(one, other) for one, other in zip(mine, theirs, strict=True)) < TOLERANCE
        assert distance(pair.ours(last, prefix=row), pair.ours(last, prefix=apart)) < TOLERANCE


PREFIX_ROWS = [tokens(n, seed=n) for n in (2, 40, 90)]


def select(prefix: Prefix, rows: list[int]) -> Prefix:
    """A prefix whose row i is rows[i] of this one."""
    layers = tuple((first[rows], second[rows]) for first, second in prefix.layers)
    return Prefix(layers, prefix.valid[rows])


def continue_padded(pair: Pair, prefix: Prefix, suffix: Tensor) -> list[float]:
    """The distance of each row of PREFIX_ROWS continued by its suffix from the whole row."""
    lengths = torch.tensor([len(row) for row in PREFIX_ROWS])
    positions = lengths[:, None] + torch.arange(suffix.shape[1])
    ours = pair.ours(suffix, positions, prefix=prefix)
    wholes = [torch.cat((row, suffix[i]))[None] for i, row in enumerate(PREFIX_ROWS)]
    return [distance(ours[i], pair.theirs(ids)[0, -suffix.shape[1] :]) for i, ids in enumerate(wholes)]


def test_right_padded_prefixes_with_their_lengths_can_be_continued(pair: Pair):
    lengths = torch.tensor([len(row) for row in PREFIX_ROWS])
    for fill in (0, 7):
        prefix = pair.prefix(right_padded(PREFIX_ROWS, fill), lengths=lengths)
        assert max(continue_padded(pair, prefix, tokens(3, 20))) < TOLERANCE


def test_right_padded_prefixes_without_their_lengths_must_differ(pair: Pair):
    short, middle, longest = continue_padded(pair, pair.prefix(right_padded(PREFIX_ROWS)), tokens(3, 20))
    assert min(short, middle) > DIFFERS
    assert longest < TOLERANCE


def test_padded_prefixes_continued_by_padded_pieces_can_be_continued_again(pair: Pair):
    firsts, seconds = PREFIX_ROWS, [tokens(n, seed=n) for n in (33, 1, 12)]
    starts = torch.tensor([len(row) for row in firsts])
    prefix = pair.prefix(right_padded(firsts), lengths=starts)
    pieces = right_padded(seconds)
    ends = torch.tensor([len(row) for row in seconds])
    prefix = pair.prefix(pieces, starts[:, None] + torch.arange(33), lengths=ends, prefix=prefix)
    last = tokens(3, 5)
    ours = pair.ours(last, (starts + ends)[:, None] + torch.arange(5), prefix=prefix)
    for i in range(3):
        whole = pair.theirs(torch.cat((firsts[i], seconds[i], last[i]))[None])[0, -5:]
        assert distance(ours[i], whole) < TOLERANCE


def test_an_image_prefix_with_its_own_positions_serves_text_suffixes(pair: Pair):
    grid = (
        torch.stack((torch.zeros(24), torch.arange(24) // 6, torch.arange(24) % 6)).long() + 4
    )  # 4 by 6 after 4 tokens
    start = torch.cat((torch.arange(4).expand(3, -1), grid, torch.arange(10, 13).expand(3, -1)), dim=1)[:, None]
    embeds = torch.randn(1, 31, TINY["hidden_size"], generator=torch.Generator().manual_seed(4)) * 0.1
    ends, after = tokens(2, 9), torch.arange(13, 22).expand(3, 2, -1)
    _, prefix = forward(pair.spec, pair.weights, positions=start, embeds=embeds, keep=31)
    assert prefix is not None
    ours = pair.ours(ends, after, prefix=prefix)
    whole = torch.cat((embeds.expand(2, -1, -1), pair.model.model.embed_tokens(ends)), dim=1)
    positions = torch.cat((start.expand(-1, 2, -1), after), dim=2)
    theirs = pair.model(inputs_embeds=whole, position_ids=positions, use_cache=False).logits[:, 31:]
    assert distance(ours, theirs) < TOLERANCE


def test_a_prefix_counts_its_bytes(pair: Pair):
    prefix = pair.prefix(tokens(2, 20))
    assert prefix.nbytes == sum(tensor.nbytes for tensor in flatten(prefix))
    first = prefix.layers[1]
    assert first[0].shape == first[1].shape == (2, 2, 20, 32)


def test_neither_embeddings_nor_prefixes_are_written_to(pair: Pair):
    embeds, prefix = torch.randn(2, 9, TINY["hidden_size"]), pair.prefix(tokens(1, 9))
    before = [tensor.clone() for tensor in (embeds, *flatten(prefix))]
    order = torch.arange(9).expand(2, -1)
    forward(pair.spec, pair.weights, positions=order + 9, embeds=embeds, read=order, prefix=prefix, keep=9)
    after = (embeds, *flatten(prefix))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# What is read


@pytest.mark.parametrize("last_layer", [FULL, LINEAR])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_only_the_positions_read_come_back_in_the_order_asked(last_layer: str, has_prefix: bool):
    pair = Pair(make_model(layer_types=[FULL, LINEAR, LINEAR, last_layer]))
    start, ids, read = tokens(1, 10), tokens(2, 40), torch.tensor([[39, 0, 5], [7, 7, 20]])
    kwargs = {"prefix": pair.prefix(start)} if has_prefix else {}
    every = pair.ours(ids, **kwargs)
    some = pair.ours(ids, read=read, **kwargs)
    expected = every.gather(1, read[..., None].expand(-1, -1, VOCAB))
    assert distance(some, expected) < TOLERANCE


# No host synchronisation


@pytest.mark.parametrize("pack", [False, True])
def test_no_pass_reads_a_value_on_the_host(pair: Pair, monkeypatch: pytest.MonkeyPatch, pack: bool):
    pair = Pair(pair.model, pack)
    ids, read, order = tokens(2, 70), torch.tensor([[3], [69]]), torch.arange(70).expand(2, -1)
    lengths = torch.tensor([70, 9])
    spec, weights, grid = pair.spec, pair.weights, order.expand(3, -1, -1)
    with no_sync(monkeypatch):
        forward(spec, weights, positions=order, input_ids=ids, read=read)
        _, prefix = forward(spec, weights, positions=grid, input_ids=ids, lengths=lengths, keep=70)
        assert prefix is not None
        fork = select(prefix, [1, 0])
        forward(spec, weights, positions=order + lengths[:, None], input_ids=ids, read=read, prefix=fork)


def test_the_check_for_host_reads_sees_one(monkeypatch: pytest.MonkeyPatch):
    for read in (lambda: torch.ones(1).item(), lambda: torch.ones(3).nonzero(), lambda: bool(torch.ones(1))):
        with pytest.raises(AssertionError), no_sync(monkeypatch):
            read()


# Loading


class FileReader:
    def __init__(self, file: Any) -> None:
        self.file = file

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self.file.get_tensor(name)


@pytest.mark.parametrize("body", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_load_from_safetensors_under_every_public_naming(tmp_path: Path, body: str, tied: bool):
    model = make_model(tie_word_embeddings=tied)
    names = {name: name.replace("model.", body, 1) for name in model.state_dict() if name.startswith("model.")}
    tensors = {names.get(name, name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        weights = load_weights(Spec.from_config(model.config), FileReader(file))
    ids, order = tokens(1, 9), torch.arange(9)[None]
    hidden, _ = forward(Spec.from_config(model.config), weights, positions=order, input_ids=ids, read=order)
    assert distance(all_logits(weights, hidden), model(input_ids=ids).logits) < TOLERANCE
    assert (weights.head is weights.embed) == tied


def test_a_checkpoint_that_says_tied_but_carries_a_head_of_its_own_uses_it():
    state = dict(make_model().state_dict())
    spec = Spec.from_config(
        TINY | {"model_type": "qwen3_5_text", "tie_word_embeddings": True, "linear_conv_kernel_dim": 4}
    )
    assert load_weights(spec, state).head is not load_weights(spec, state).embed
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    weights = load_weights(spec, state)
    assert weights.head is weights.embed


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in make_model().state_dict().items() if key != name}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without("model.layers.2.linear_attn.A_log"), "the checkpoint has no tensor model.layers.2.linear_attn.A_log"),
        (without("lm_head.weight"), "the checkpoint has no tensor lm_head.weight"),
        ({}, "the checkpoint has no tensor model.language_model.embed_tokens.weight"),
        (
            without("") | {"model.norm.weight": torch.ones(47)},
            "tensor model.norm.weight is torch.float32 (47,), expected a float of (48,)",
        ),
        (
            without("") | {"model.layers.1.mlp.down_proj.weight": torch.zeros(48, 80, dtype=torch.int8)},
            "tensor model.layers.1.mlp.down_proj.weight is torch.int8 (48, 80), expected a float of (48, 80)",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(state: dict[str, Tensor], message: str):
    with pytest.raises(BadWeights) as caught:
        load_weights(Spec.from_config(make_model().config), state)
    assert str(caught.value) == message


def test_loading_holds_one_source_tensor_at_a_time():
    state = make_model(hidden_size=128, intermediate_size=256).state_dict()
    alive, peak = [0], [0]

    class Reader:
        def keys(self) -> list[str]:
            return list(state)

        def __getitem__(self, name: str) -> Tensor:
            tensor = state[name].bfloat16()  # another dtype, so that nothing loaded is the source itself
            alive[0] += 1
            peak[0] = max(peak[0], alive[0])
            weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

    load_weights(Spec.from_config(tiny_config(hidden_size=128, intermediate_size=256)), Reader())
    assert peak[0] <= 3  # the embedding and the head stay as they are stored


def test_the_embedding_is_never_made_wider_than_it_is_stored():
    state = {name: tensor.bfloat16() for name, tensor in make_model().state_dict().items()}
    weights = load_weights(Spec.from_config(make_model().config), state, dtype=torch.float32)
    assert (weights.embed.dtype, weights.head.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    pair = Pair(make_model().bfloat16().float())
    ids, order = tokens(1, 20), torch.arange(20)[None]
    hidden, _ = forward(pair.spec, weights, positions=order, input_ids=ids, read=order)
    assert torch.equal(all_logits(weights, hidden), pair.ours(ids))


# Configurations


def test_a_spec_is_the_same_from_every_form_of_the_configuration():
    config = tiny_config()
    spec = Spec.from_config(config)
    assert Spec.from_config(config.to_dict()) == spec
    assert Spec.from_config({"model_type": "qwen3_5", "text_config": config.to_dict()}) == spec
    flat = config.to_dict()
    rope = flat.pop("rope_parameters")
    flat |= {"rope_theta": rope.pop("rope_theta"), "partial_rotary_factor": rope.pop("partial_rotary_factor")}
    assert Spec.from_config(flat | {"rope_scaling": rope}) == spec
    assert spec.layer_types == tuple(TINY["layer_types"])
    assert (spec.rotary_dim, spec.mrope_section, spec.tied) == (16, (3, 3, 2), False)


def test_layer_types_follow_from_the_interval_where_they_are_not_named():
    config = tiny_config().to_dict() | {"layer_types": None, "full_attention_interval": 3, "num_hidden_layers": 6}
    assert Spec.from_config(config).layer_types == (LINEAR, LINEAR, FULL) * 2


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": TINY["rope_parameters"] | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not covered"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not covered"),
        ({"attn_output_gate": False}, "attn_output_gate False is not covered"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type 'qwen3_5_moe_text' is not covered"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'present' is not covered"),
        (rope(rope_type="yarn"), "rope_type 'yarn' is not covered"),
        (rope(mrope_interleaved=False), "mrope_interleaved False is not covered"),
        ({"layer_types": [LINEAR, FULL, LINEAR, "sliding"]}, "layer type 'sliding' is not covered"),
        ({"layer_types": [LINEAR]}, "layer_types names 1 layers, num_hidden_layers 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"linear_num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 is not a whole number above zero"),
        ({"hidden_size": "48"}, "hidden_size '48' is not a whole number above zero"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not covered"),
        ({"head_dim": None}, "the configuration is malformed: "),
        (rope(partial_rotary_factor=0.1), "rotary dimensions 3, mrope_section (3, 3, 2)"),
        (rope(partial_rotary_factor=2), "rotary dimensions 64, mrope_section (3, 3, 2)"),
        (rope(mrope_section=[3, 3, -1]), "rotary dimensions 16, mrope_section (3, 3, -1)"),
        (rope(mrope_section=[8, 8]), "rotary dimensions 16, mrope_section (8, 8)"),
    ],
)
def test_what_is_not_computed_is_refused_in_one_line(changes: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModel) as caught:
        Spec.from_config(tiny_config().to_dict() | changes)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_size_that_is_not_said_is_named():
    config = tiny_config().to_dict()
    del config["linear_key_head_dim"]
    with pytest.raises(UnsupportedModel, match=r"^the configuration does not say linear_key_head_dim$"):
        Spec.from_config(config)


def test_weights_are_plain_tensors_that_need_no_gradient(pair: Pair):
    assert isinstance(pair.weights, Weights)
    assert not pair.ours(tokens(1, 3)).requires_grad
