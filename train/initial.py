"""The model before its first step: tokens mean what a sentence encoder says they mean, and layer 1 takes their mean."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data import NOUL_NAMES
from tokenizer import CONTROL_TOKENS
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from wiring import (
    HEAD_DIM,
    NUM_CONTROL_COMPONENTS,
    RMS,
    SEEN,
    num_meaning,
    num_pooled,
    signal,
    signal_table,
    wire,
)

from model import PointerModel, value_rows

BATCH_ROWS = 512
WEIGHT_SCALE = 0.3
QUIET = 0.05  # times what a layer adds to the stream, at the start
SMOOTHING = 1e-3  # token share at which a token's weight is a half ("smooth inverse frequency")
COMPARED, LIKENESS = 100, 228  # components that are compared at the start; the one where the outcome is written
WEIGHT = 229  # the component that holds how telling a token is
MATCHED = 2 * HEAD_DIM  # the first components of an embedding, those that layer 1 hands on as they are


@torch.no_grad()
def embed_texts(encoder_dir: Path, texts: list[str]) -> Tensor:
    """Mean-pooled sentence embeddings of all-MiniLM-L6-v2, float32 of shape (len(texts), its width)."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(encoder_dir), AutoModel.from_pretrained(encoder_dir).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    pooled = torch.empty(len(texts), encoder.config.hidden_size)
    for start in range(0, len(texts), BATCH_ROWS):
        part = order[start : start + BATCH_ROWS]
        inputs = tokenizer([texts[i] for i in part], padding=True, truncation=True, max_length=256, return_tensors="pt")
        mask = inputs["attention_mask"][..., None]
        pooled[part] = (encoder(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
    return pooled


def token_meanings(encoder_dir: Path, tokenizer: PreTrainedTokenizerBase, counts: Tensor, width: int) -> Tensor:
    """(vocabulary, width): each token's text through the encoder, less the mean, in the directions that matter most."""
    texts = [str(tokenizer.decode([i])).strip() for i in range(len(counts))]
    name = hashlib.sha256("\n".join(texts).encode(errors="replace")).hexdigest()[:16]
    kept = encoder_dir / f"tokens-{name}.pt"  # two minutes of work, the same for every run
    if not kept.exists():
        torch.save(embed_texts(encoder_dir, texts), kept)
    embedded = F.normalize(torch.load(kept, weights_only=True), dim=-1)
    shares = counts / counts.sum()
    weights = SMOOTHING / (SMOOTHING + shares)
    embedded = embedded - (embedded * shares[:, None]).sum(0)
    _, _, directions = torch.linalg.svd(embedded * weights[:, None], full_matrices=False)
    reduced: Tensor = F.normalize(embedded @ directions[:width].T, dim=-1) * width**0.5 * RMS
    reduced[:, WEIGHT] = WEIGHT_SCALE * weights.log()
    # A little noise keeps apart the spellings of a word that the encoder does not tell apart (case, leading space).
    reduced += 0.1 * RMS * torch.randn_like(reduced)
    return reduced


@torch.no_grad()
def initialise(
    model: PointerModel, encoder_dir: Path, tokenizer: PreTrainedTokenizerBase, token_counts: Tensor
) -> None:
    config = model.lm.config
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5)
    for layer in model.lm.model.layers:
        mixer = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
        mixer.weight *= QUIET
        layer.mlp.down_proj.weight *= QUIET
    meanings = token_meanings(encoder_dir, tokenizer, token_counts, num_meaning(config))
    meanings[: len(CONTROL_TOKENS)] = 0
    start = num_pooled(config)
    meanings[: len(CONTROL_TOKENS), start:] = 0.3 * torch.randn(len(CONTROL_TOKENS), NUM_CONTROL_COMPONENTS)
    model.lm.model.embed_tokens.weight[:, : num_meaning(config)] = meanings
    pool_meaning(model)
    match_meaning(model)
    agree(model, tokenizer.convert_tokens_to_ids(list(NOUL_NAMES)))
    wire(model.lm, signal_table(tokenizer))


def pool_meaning(model: PointerModel) -> None:
    """Heads 0 and 1 of layer 1 hold the matched components, heads 2 and 3 their opposites: silu(x) - silu(-x) = x."""
    net = model.lm.model.layers[0].linear_attn
    net.conv1d.weight.normal_(std=0.1)
    net.conv1d.weight[..., -1] += 1
    net.in_proj_b.weight *= 0.1
    net.in_proj_b.weight[:, WEIGHT] = RMS / WEIGHT_SCALE  # the norm divides by about RMS
    values = net.in_proj_qkv.weight[value_rows(net, slice(0, 4))]
    values.zero_()
    values[:MATCHED, :MATCHED] = torch.eye(MATCHED)
    values[MATCHED:, :MATCHED] = -torch.eye(MATCHED)
    net.conv1d.weight[value_rows(net, slice(2, 4))] = net.conv1d.weight[value_rows(net, slice(0, 2))]
    net.in_proj_b.weight[2:4] = net.in_proj_b.weight[0:2]
    net.in_proj_z.weight[:] = 0.3
    net.out_proj.weight[:MATCHED, : 2 * MATCHED] += torch.cat([torch.eye(MATCHED), -torch.eye(MATCHED)], dim=1)


def match_meaning(model: PointerModel) -> None:
    """The first full attention and the MLP after it start as a measure of how far a text and the state are alike, and
    the pointer as that measure."""
    config = model.lm.config
    layer = next(layer for layer in model.lm.model.layers if hasattr(layer, "self_attn"))
    attention, mlp = layer.self_attn, layer.mlp
    query = attention.q_proj.weight.view(-1, 2, HEAD_DIM, config.hidden_size)
    key = attention.k_proj.weight.view(-1, HEAD_DIM, config.hidden_size)
    query[::2, 0], key[:, SEEN - 1] = 0, 0  # the first head of each group looks at the state's mean
    query[::2, 0, SEEN - 1, signal(config, "constant")] = 1
    key[:, SEEN - 1, signal(config, "end_state")] = 20
    attention.v_proj.weight.copy_(torch.eye(2 * HEAD_DIM, config.hidden_size))
    place = torch.arange(COMPARED)
    attention.o_proj.weight[MATCHED + place, place + HEAD_DIM * (place // HEAD_DIM)] += 1.5
    for sign in (1, -1):  # silu(x) y - silu(-x) y = x y
        units = place if sign > 0 else place + COMPARED
        mlp.gate_proj.weight[units] = 0
        mlp.gate_proj.weight[units, place] = sign
        mlp.up_proj.weight[units] = 0
        mlp.up_proj.weight[units, MATCHED + place] = sign
        mlp.down_proj.weight[LIKENESS, units] = 2 / COMPARED
    for projection in (model.query, model.key):
        projection.weight *= 0.1
    model.key.weight[-1, LIKENESS] = 6
    model.query.weight[-1, signal(config, "constant")] = 10


def agree(model: PointerModel, noul_tokens: Any) -> None:
    """In the last delta net the likeness of the instructions to the state counts for the option "yes"."""
    net = model.lm.model.layers[-1].linear_attn
    yes, no = F.normalize(model.lm.model.embed_tokens.weight[noul_tokens, :MATCHED], dim=-1)
    apart = F.normalize(yes - no, dim=0)
    for channel, sign in (0, 1), (1, -1):
        row = net.in_proj_qkv.weight[2 * net.key_dim + channel]
        row.zero_()
        row[LIKENESS] = 2 * sign
        net.in_proj_z.weight[channel] = 0
        net.in_proj_z.weight[channel, :MATCHED] = 0.3 * apart
        net.out_proj.weight[LIKENESS, channel] = 0.5 * sign
