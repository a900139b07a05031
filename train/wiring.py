"""Which weights are fixed, and to what: they make a Qwen3.5 in which ordinary tokens do nothing but stand there.

The last components of an embedding are signals. By them
- layer 1, a gated delta net whose keys are all one direction, is a weighted mean over the tokens of a segment (the
  state, the instructions, one option) or of a sentence of the state, read at the control token or mark that ends it;
- the residual stream of every other token stays its embedding: its gates are shut;
- full attention sees the state alone: its tokens and what was read at the ends of its sentences;
- the later delta nets hand the instructions on to the options, and the options, as a weighted sum, to the answer.
So a prompt costs a few positions instead of all its tokens (model.py), an option never sees another option, a question
never another question, and the order of the options changes nothing beyond rounding.

`wire` puts these weights back after every optimiser step."""

import math
from copy import deepcopy

import torch
from tokenizer import BOUNDARY, CONTROL_TOKENS
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet

SIGNALS = (
    "constant",  # 1 everywhere
    "ordinary",  # 1 at tokens where nothing is read
    "start",  # <|state|>, <|question|>, <|option|>: what was gathered is forgotten
    "question",  # <|question|>: what an earlier question left is forgotten
    "sentence",  # marks that end a sentence or a JSON field
    "end_state",
    "end_instructions",
    "end_option",
    "answer",
    "past_state",  # written by layer 1: 1 or so from the first <|question|> on
)
CONTROL_SIGNALS = {
    "<|state|>": ("ordinary", "start"),
    "<|end_state|>": ("end_state",),
    "<|question|>": ("ordinary", "start", "question"),
    "<|noul|>": ("end_instructions",),
    "<|choice|>": ("end_instructions",),
    "<|score|>": ("end_instructions",),
    "<|option|>": ("ordinary", "start"),
    "<|end_option|>": ("end_option",),
    "<|answer|>": ("answer",),
}
NUM_CONTROL_COMPONENTS = 16  # of the meaning, before the signals: the only ones of control tokens, unread by layer 1
SEGMENT_HEADS, SENTENCE_HEADS, MARK_HEAD = slice(0, 5), slice(5, 7), 7  # of layer 1
INSTRUCTION_HEADS, OPTION_HEADS = slice(0, 4), slice(4, 8)  # of later delta nets
NUM_HEADS, HEAD_DIM, KEY_DIM = 8, 64, 16  # of delta nets
ROTATED = 8  # dimensions of an attention head that position turns: left out
SEEN = HEAD_DIM - 1  # the dimension of an attention head by which everything but the state is hidden
SHUT = -300.0  # against anything learned, however large the stream has grown
RMS = 0.3  # of an embedding's meaning at the start; of those that end a sentence always, so that they all forget alike
KEPT = 1e-4  # of a sentence, after the mark that ends it


def signal(config: Qwen3_5TextConfig, name: str) -> int:
    """The component of the residual stream that holds this signal."""
    return config.hidden_size - len(SIGNALS) + SIGNALS.index(name)


def num_meaning(config: Qwen3_5TextConfig) -> int:
    return config.hidden_size - len(SIGNALS)


def num_pooled(config: Qwen3_5TextConfig) -> int:
    """Components that layer 1 reads of a token."""
    return num_meaning(config) - NUM_CONTROL_COMPONENTS


def channels(heads: slice) -> slice:
    return slice(heads.start * HEAD_DIM, heads.stop * HEAD_DIM)


def is_boundary(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """(vocabulary,) bool: tokens that end a sentence or a field."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=True)
    return torch.tensor([bool(BOUNDARY.search(text)) for text in texts])


@torch.no_grad()
def wire(lm: Qwen3_5ForCausalLM, signals: Tensor) -> None:
    """signals: (vocabulary, len(SIGNALS)), see `signal_table`."""
    config, embedding = lm.config, lm.model.embed_tokens.weight
    meaning = num_meaning(config)
    embedding[:, meaning:] = signals
    ends = signals[:, SIGNALS.index("sentence")] > 0
    embedding[ends, :meaning] *= RMS * meaning**0.5 / embedding[ends, :meaning].norm(dim=1, keepdim=True)
    embedding[: len(CONTROL_TOKENS), : num_pooled(config)] = 0
    for i, layer in enumerate(lm.model.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[meaning:] = 0
        layer.mlp.gate_proj.weight[:, signal(config, "ordinary")] = SHUT
        layer.mlp.down_proj.weight[meaning:] = 0
        if hasattr(layer, "self_attn"):
            wire_attention(config, layer.self_attn)
        else:
            wire_keys(config, layer.linear_attn)
            (wire_pooling if i == 0 else wire_question)(config, layer.linear_attn)


def free_entries(lm: Qwen3_5ForCausalLM, signals: Tensor) -> dict[str, Tensor]:
    """For each parameter that is wired in part, by name: 1.0 where it is free, 0.0 where it is wired."""
    blank = deepcopy(lm)
    for parameter in blank.parameters():
        parameter.data.fill_(torch.nan)
    wire(blank, signals)
    is_free = {name: parameter.detach().isnan() for name, parameter in blank.named_parameters()}
    return {name: mask.float() for name, mask in is_free.items() if not mask.all()}


def signal_table(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    table = torch.zeros(len(tokenizer), len(SIGNALS))
    table[:, SIGNALS.index("constant")] = 1
    boundary = is_boundary(tokenizer)
    table[:, SIGNALS.index("sentence")] = boundary.float()
    table[:, SIGNALS.index("ordinary")] = 1 - boundary.float()
    for token, names in CONTROL_SIGNALS.items():
        row = table[tokenizer.convert_tokens_to_ids(token)]
        row[SIGNALS.index("ordinary")] = 0
        for name in names:
            row[SIGNALS.index(name)] = 1
    return table


def wire_attention(config: Qwen3_5TextConfig, attention: Qwen3_5Attention) -> None:
    """Nothing turned by position; tokens past the state hidden; gates shut at ordinary tokens."""
    meaning = num_meaning(config)
    query_gate = attention.q_proj.weight.view(-1, 2, HEAD_DIM, config.hidden_size)
    key = attention.k_proj.weight.view(-1, HEAD_DIM, config.hidden_size)
    for weight in (query_gate[:, 0], key):
        weight[:, :ROTATED] = 0
        weight[:, SEEN] = 0
    query_gate[:, 0, SEEN, signal(config, "constant")] = 0.5
    key[:, SEEN, signal(config, "past_state")] = -200
    attention.q_norm.weight[SEEN], attention.k_norm.weight[SEEN] = 20, 1000
    query_gate[:, 1, :, signal(config, "ordinary")] = SHUT
    attention.o_proj.weight[meaning:] = 0


def wire_keys(config: Qwen3_5TextConfig, net: Qwen3_5GatedDeltaNet) -> None:
    """One key and query for all tokens; no signal is written; values look at nothing else than said below."""
    keys = 2 * net.key_dim
    net.in_proj_qkv.weight[:keys] = 0
    for row in (0, net.key_dim):
        net.in_proj_qkv.weight[row, signal(config, "constant")] = 1
    net.conv1d.weight[:keys] = 0
    net.conv1d.weight[:keys, :, -1] = 1
    net.in_proj_a.weight.zero_()
    net.A_log.zero_()
    net.out_proj.weight[num_meaning(config) :] = 0


def wire_pooling(config: Qwen3_5TextConfig, net: Qwen3_5GatedDeltaNet) -> None:
    """Layer 1: means over segments and sentences, and the mark of what comes after the state."""
    at = {name: signal(config, name) for name in SIGNALS}
    segment, sentence = channels(SEGMENT_HEADS), channels(SENTENCE_HEADS)
    mark = channels(slice(MARK_HEAD, MARK_HEAD + 1))
    values, filters = net.in_proj_qkv.weight[2 * net.key_dim :], net.conv1d.weight[2 * net.key_dim :, 0]
    values[:, num_pooled(config) :] = 0
    filters[:, 0] = 0  # would reach into the segment before
    net.dt_bias[:] = -20
    net.in_proj_a.weight[:, at["start"]] = 200
    net.dt_bias[SENTENCE_HEADS] = -10
    normed = (config.hidden_size / (RMS**2 * num_meaning(config) + 2)) ** 0.5  # what the norm makes of a signal of 1
    net.in_proj_a.weight[SENTENCE_HEADS, at["sentence"]] = (10 - math.log(KEPT)) / normed
    net.in_proj_b.weight[:, num_pooled(config) :] = 0
    net.in_proj_b.weight[:, at["constant"]] = -1.5
    net.in_proj_b.weight[:, at["start"]] = SHUT
    net.in_proj_b.weight[SENTENCE_HEADS, at["sentence"]] = SHUT
    free = {name: net.in_proj_z.weight[:, at[name]].clone() for name in SIGNALS}
    net.in_proj_z.weight.zero_()
    for name in ("end_state", "end_instructions", "end_option"):
        net.in_proj_z.weight[segment, at[name]] = free[name][segment]
    net.in_proj_z.weight[sentence, at["sentence"]] = free["sentence"][sentence]
    values[mark] = 0
    values[mark, at["question"]] = 1
    filters[mark] = 0
    filters[mark, -1] = 1
    net.in_proj_a.weight[MARK_HEAD] = 0
    net.in_proj_b.weight[MARK_HEAD] = 0
    net.in_proj_b.weight[MARK_HEAD, at["constant"]] = SHUT
    net.in_proj_b.weight[MARK_HEAD, at["question"]] = -2 * SHUT
    net.in_proj_z.weight[mark, at["constant"]] = 1
    net.out_proj.weight[:, mark] = 0
    net.out_proj.weight[at["past_state"], mark] = 0.5 / HEAD_DIM
    net.norm.weight[:] = 1


def wire_question(config: Qwen3_5TextConfig, net: Qwen3_5GatedDeltaNet) -> None:
    """Later delta nets: the instructions for the options and the answer, the options for the answer."""
    at = {name: signal(config, name) for name in SIGNALS}
    filters = net.conv1d.weight[2 * net.key_dim :, 0]
    filters[:] = 0
    filters[:, -1] = 1
    net.dt_bias[:] = -20
    net.in_proj_a.weight[:, at["question"]] = 200
    elsewhere = {"ordinary", "sentence", "end_state", "end_instructions", "end_option", "answer"}
    net.in_proj_b.weight[INSTRUCTION_HEADS] = 0
    net.in_proj_b.weight[OPTION_HEADS, num_meaning(config) :] = 0
    net.in_proj_b.weight[
        OPTION_HEADS, at["constant"]
    ] = -5  # little, so that the first options count as much as the last
    for heads, name in (INSTRUCTION_HEADS, "end_instructions"), (OPTION_HEADS, "end_option"):
        for other in elsewhere - {name}:
            net.in_proj_b.weight[heads, at[other]] = 10 * SHUT
    net.in_proj_b.weight[INSTRUCTION_HEADS, at["end_instructions"]] = -10 * SHUT
    net.in_proj_z.weight[:, at["ordinary"]] = SHUT
    net.in_proj_z.weight[channels(OPTION_HEADS), at["end_option"]] = 10 * SHUT
