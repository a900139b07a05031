"""The model before its first step: tokens start from meaning, layers 1 and 2 from a crude matcher of option and state.

Layer 1 keeps a running mean of the token embeddings since the last `<|option|>` and puts it where an option ends; one
of its heads marks all tokens after the first question's start. Layer 2 keeps a running mean of the tokens not marked,
the state's, and puts it where a question ends. The pointer starts as the likeness of the two. All of it is trained on
from there; from random weights the same skill took tens of thousands of rows to appear."""

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizer import CONTROL_TOKENS
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from model import PointerModel

BATCH_ROWS = 512
RMS = 0.3  # of an embedding's components: large beside one optimiser step, about as large as a layer's first outputs
QUIET = 0.3  # times transformers' random weights, for all that is not wired here
SMOOTHING = 1e-3  # token share at which a token's weight is a half ("smooth inverse frequency")
MATCHED = 128  # the first components of an embedding, those matched
# The last components of an embedding are signals, not meaning.
CONSTANT, WEIGHT, IS_OPTION, IS_QUESTION, IS_OPTION_END, IS_QUESTION_END, PAST_STATE = range(249, 256)
SIGNALS = {
    "<|option|>": IS_OPTION,
    "<|noul|>": IS_QUESTION,
    "<|choice|>": IS_QUESTION,
    "<|score|>": IS_QUESTION,
    "<|end_option|>": IS_OPTION_END,
    "<|answer|>": IS_QUESTION_END,
}


@torch.no_grad()
def embed_texts(encoder_dir: Path, texts: list[str]) -> Tensor:
    """Mean-pooled sentence embeddings of all-MiniLM-L6-v2, float32 of shape (len(texts), its width)."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(encoder_dir), AutoModel.from_pretrained(encoder_dir).eval()
    pooled = []
    for start in range(0, len(texts), BATCH_ROWS):
        inputs = tokenizer(texts[start : start + BATCH_ROWS], padding=True, return_tensors="pt")
        mask = inputs["attention_mask"][..., None]
        pooled.append((encoder(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(pooled)


def initial_embeddings(
    encoder_dir: Path, tokenizer: PreTrainedTokenizerBase, token_counts: Tensor, width: int
) -> Tensor:
    """One row per token, float32 of shape (len(token_counts), width): meaning, then the signals."""
    texts = [str(tokenizer.decode([i])).strip() for i in range(len(token_counts))]
    embedded = F.normalize(embed_texts(encoder_dir, texts), dim=-1)
    shares = token_counts / token_counts.sum()
    weights = SMOOTHING / (SMOOTHING + shares)
    embedded = embedded - (embedded * shares[:, None]).sum(0)
    _, _, directions = torch.linalg.svd(embedded * weights[:, None], full_matrices=False)
    reduced = F.normalize(embedded @ directions[:CONSTANT].T, dim=-1) * CONSTANT**0.5 * RMS
    # A little noise keeps apart the spellings of a word that the encoder does not tell apart (case, leading space).
    reduced = reduced + 0.1 * RMS * torch.randn_like(reduced)
    table = torch.zeros(len(token_counts), width)
    table[:, :CONSTANT] = reduced
    table[:, WEIGHT] = 2 * weights - 1
    for token in CONTROL_TOKENS:
        row = table[tokenizer.convert_tokens_to_ids(token)]
        row.normal_(std=0.03)
        if token in SIGNALS:
            row[SIGNALS[token]] = 1.0
    table[:, CONSTANT] = 1.0
    return table


def wire_memory(net: Qwen3_5GatedDeltaNet, *, write: dict[int, float], forget: dict[int, float], read: int) -> None:
    """Heads 0 and 1 keep a mean of the matched components: written, forgotten and read as the signals say."""
    dim, keys = net.head_k_dim, net.key_dim
    for head in range(2):
        start = head * dim
        for offset in (0, keys):  # every query and every key is one and the same direction
            net.in_proj_qkv.weight[offset + start, CONSTANT] = 1.0
        net.in_proj_qkv.weight[2 * keys + start :][range(dim), range(start, start + dim)] += 0.2
        net.in_proj_z.weight[range(start, start + dim), read] = 0.3
        net.out_proj.weight[range(start, start + dim), range(start, start + dim)] += 0.1
        net.in_proj_a.weight[head] = 0.0
        net.in_proj_b.weight[head] = 0.0
        for signal, weight in write.items():
            net.in_proj_b.weight[head, signal] = weight
        for signal, weight in forget.items():
            net.in_proj_a.weight[head, signal] = weight
        net.dt_bias[head], net.A_log[head] = -7.0, 0.0


def wire_mark(net: Qwen3_5GatedDeltaNet) -> None:
    """Head 2 remembers whether a question has begun and says so in the component PAST_STATE."""
    start, keys = 2 * net.head_k_dim, net.key_dim
    for offset in (0, keys, 2 * keys):
        net.in_proj_qkv.weight[offset + start : offset + start + net.head_k_dim] = 0.0
        net.in_proj_qkv.weight[offset + start, CONSTANT] = 1.0
    net.in_proj_z.weight[start, CONSTANT] = 0.5
    net.out_proj.weight[:, start : start + net.head_k_dim] = 0.0
    net.out_proj.weight[PAST_STATE, start] = 0.03
    net.in_proj_a.weight[2] = 0.0
    net.in_proj_b.weight[2] = 0.0
    net.in_proj_b.weight[2, CONSTANT], net.in_proj_b.weight[2, IS_QUESTION] = -5.0, 8.0
    net.dt_bias[2], net.A_log[2] = -7.0, 0.0


@torch.no_grad()
def initialise(
    model: PointerModel, encoder_dir: Path, tokenizer: PreTrainedTokenizerBase, token_counts: Tensor
) -> None:
    layers = model.lm.model.layers
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.weight *= QUIET
        elif isinstance(module, nn.Conv1d):
            module.weight.normal_(std=0.05)
            module.weight[..., -1] += 1.0  # each token sees mostly itself
        elif isinstance(module, Qwen3_5GatedDeltaNet):
            # transformers starts with decays that forget nearly all within one token; these last 1 to 1,000 tokens
            step = torch.empty(module.num_v_heads).uniform_(-6.9, -2.3).exp()
            module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
            module.A_log.uniform_(1, 16).log_()
    wire_memory(
        layers[0].linear_attn, write={CONSTANT: -0.85, WEIGHT: 0.6}, forget={IS_OPTION: 2.0}, read=IS_OPTION_END
    )
    wire_mark(layers[0].linear_attn)
    wire_memory(
        layers[1].linear_attn,
        write={CONSTANT: -0.95, WEIGHT: 0.6, PAST_STATE: -12.0},
        forget={},
        read=IS_QUESTION_END,
    )
    for projection in (model.query, model.key):
        projection.weight.normal_(std=0.005)
        projection.weight[:, :MATCHED] += 0.7 * torch.eye(MATCHED)
    width = model.lm.config.hidden_size
    model.lm.model.embed_tokens.weight.copy_(initial_embeddings(encoder_dir, tokenizer, token_counts, width))
