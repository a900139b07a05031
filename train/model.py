"""The trained module: transformers' Qwen3.5 with the weights of wiring.py, and the pointer head.

Because of the wiring a prompt's scores follow from a few positions and from each token's embedding alone, so the
forward pass here computes no more than that. Its scores are those of transformers' forward (see check.py)."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batches import Batch, Ragged
from safetensors.torch import load_file, save_file
from tokenizer import CONTROL_TOKENS
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5RMSNorm,
)
from wiring import (
    HEAD_DIM,
    INSTRUCTION_HEADS,
    KEPT,
    KEY_DIM,
    MARK_HEAD,
    NUM_HEADS,
    OPTION_HEADS,
    ROTATED,
    SEGMENT_HEADS,
    SENTENCE_HEADS,
    channels,
    num_pooled,
)

POINTER_DIM = 128
HEAD_NAME = "head.safetensors"
SCALE = KEY_DIM**-0.5  # a delta net's output is so much of the sum of its values
LAYERS = {"d": "linear_attention", "f": "full_attention"}


def build_config(vocab_size: int, layers: str = "ddffd", hidden_size: int = 256, inner: int = 384) -> Qwen3_5TextConfig:
    """layers: d for a gated delta net, f for full attention."""
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_hidden_layers=len(layers),
        layer_types=[LAYERS[letter] for letter in layers],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        linear_num_key_heads=1,
        linear_num_value_heads=NUM_HEADS,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=HEAD_DIM,
        max_position_embeddings=16384,
        rms_norm_eps=1e-14,  # layer 1 reads what it has kept of a sentence, which is little
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": ROTATED / HEAD_DIM,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )


class RMSNorm(torch.autograd.Function):
    """weight * x / rms(x) over the last dimension, in a third of the passes over memory that autograd's own takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = (x * scale).mul_(weight)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        products = grad * unit
        of_weight = products.flatten(0, -2).sum(0)
        along = (products @ weight).div_(x.shape[-1])[..., None]
        return (grad * weight).addcmul_(unit, along, value=-1).mul_(scale), of_weight, None


def rms_norm(norm: Qwen3_5RMSNorm, x: Tensor) -> Tensor:
    normed: Tensor = RMSNorm.apply(x, 1.0 + norm.weight, norm.eps)
    return normed


def feed_forward(layer: Qwen3_5DecoderLayer, x: Tensor) -> Tensor:
    """x with the layer's MLP added."""
    normed, mlp = rms_norm(layer.post_attention_layernorm, x), layer.mlp
    added: Tensor = mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return x + added


def gated(net: Qwen3_5GatedDeltaNet, heads: slice, sums: Tensor, gate: Tensor, eps: float) -> Tensor:
    """sums (N, heads * HEAD_DIM): what the net's heads hold; gate the same. Returns what they add to the stream."""
    normed = RMSNorm.apply(sums.view(len(sums), sums.shape[1] // HEAD_DIM, HEAD_DIM), net.norm.weight, eps).flatten(1)
    return F.linear(normed * F.silu(gate), net.out_proj.weight[:, channels(heads)])


def value_rows(net: Qwen3_5GatedDeltaNet, heads: slice) -> slice:
    return slice(2 * KEY_DIM + heads.start * HEAD_DIM, 2 * KEY_DIM + heads.stop * HEAD_DIM)


class Pooling:
    """Layer 1's delta net for one batch: weighted sums over segments and sentences."""

    def __init__(self, layer: Qwen3_5DecoderLayer, num: int, embedded: Tensor, is_text: Tensor) -> None:
        """embedded (V, hidden) of the batch's vocabulary, of which the first `num` components are read; is_text (V, 1)."""
        self.net: Qwen3_5GatedDeltaNet = layer.linear_attn
        self.norm = layer.input_layernorm
        normed = rms_norm(self.norm, embedded)
        heads = slice(0, SENTENCE_HEADS.stop)
        values = F.linear(normed[:, :num], self.net.in_proj_qkv.weight[value_rows(self.net, heads), :num]) * is_text
        self.values = F.pad(values, (0, 0, 0, 1))  # the last row: no token
        logits = F.linear(normed, self.net.in_proj_b.weight[heads])
        self.write = F.pad(F.logsigmoid(logits), (0, 0, 0, 1), value=-1e4)
        self.keep = F.pad(F.logsigmoid(-logits), (0, 0, 0, 1))
        self.eps: float = layer.input_layernorm.eps

    def sums(self, heads: slice, places: Ragged, ends: Tensor, target: Tensor, count: int) -> Tensor:
        """Of the places' values, into (count, heads * HEAD_DIM); target (L,): `count` where a place has none."""
        filters = self.net.conv1d.weight[value_rows(self.net, heads), 0]
        own = F.embedding(places.tokens, self.values[:, channels(heads)])
        mixed = own[2:] * filters[:, -1] + own[1:-1] * filters[:, -2] + own[:-2] * filters[:, -3]  # from place 2 on
        kept = self.keep[:, heads][places.tokens].cumsum(0)
        weights = ((self.write[:, heads][places.tokens] + kept[ends] - kept).exp() * SCALE)[2:]
        weighted = (F.silu(mixed).view(len(mixed), mixed.shape[1] // HEAD_DIM, HEAD_DIM) * weights[..., None]).flatten(
            1
        )
        return mixed.new_zeros(count + 1, mixed.shape[-1]).index_add(0, target[2:], weighted)[:count]

    def read(self, heads: slice, sums: Tensor, ends: Tensor, eps: float) -> Tensor:
        """ends (N, hidden): the embeddings of the tokens where the sums are read."""
        gate = F.linear(rms_norm(self.norm, ends), self.net.in_proj_z.weight[channels(heads)])
        return ends + gated(self.net, heads, sums, gate, eps)

    def mark(self, x: Tensor, ends: Tensor) -> Tensor:
        """x with the component that says that the state is over."""
        heads = slice(MARK_HEAD, MARK_HEAD + 1)
        gate = F.linear(rms_norm(self.norm, ends), self.net.in_proj_z.weight[channels(heads)])
        return x + F.linear(F.silu(gate), self.net.out_proj.weight[:, channels(heads)])


def hand_on(net: Qwen3_5GatedDeltaNet, x: Tensor, batch: Batch, eps: float) -> Tensor:
    """A later delta net at the positions of the questions: x (Q + O + Q, hidden), normed. Returns what it adds."""
    num_rows, num_options = len(batch), len(batch.question)
    instructions, options, answers = torch.split_with_sizes(x, [num_rows, num_options, num_rows])
    told = F.silu(F.linear(instructions, net.in_proj_qkv.weight[value_rows(net, INSTRUCTION_HEADS)]))
    rows = torch.arange(num_rows, device=x.device)
    listeners = torch.cat([rows, batch.question, rows])
    gate = F.linear(x, net.in_proj_z.weight[channels(INSTRUCTION_HEADS)])
    added = gated(net, INSTRUCTION_HEADS, told.index_select(0, listeners), gate, eps)

    values = F.silu(F.linear(options, net.in_proj_qkv.weight[value_rows(net, OPTION_HEADS)]))
    logits = F.linear(options, net.in_proj_b.weight[OPTION_HEADS])
    kept = F.logsigmoid(-logits).cumsum(0)
    weights = (F.logsigmoid(logits) + kept[batch.last_option[batch.question]] - kept).exp() * SCALE
    weighted = (values.view(num_options, -1, HEAD_DIM) * weights[..., None]).flatten(1)
    sums = x.new_zeros(num_rows, values.shape[-1]).index_add(0, batch.question, weighted)
    gate = F.linear(answers, net.in_proj_z.weight[channels(OPTION_HEADS)])
    heard = gated(net, OPTION_HEADS, sums, gate, eps)
    return torch.cat([added[: num_rows + num_options], added[num_rows + num_options :] + heard])


def attend(attention: Qwen3_5Attention, x: Tensor, tokens: Tensor, batch: Batch, is_last: bool) -> Tensor:
    """Full attention of the positions x (P, hidden) over the state; tokens (V, hidden): the embeddings of the batch's
    vocabulary; both normed. Returns what it adds, of the questions' positions alone if no later layer asks for more."""
    num_keys, groups = attention.k_proj.out_features // HEAD_DIM, attention.num_key_value_groups
    first_summary = len(x) - batch.num_sentences - len(batch)
    asking = x[:first_summary] if is_last else x
    query, gate = attention.q_proj(asking).view(len(asking), -1, 2 * HEAD_DIM).chunk(2, dim=-1)
    query = rms_norm(attention.q_norm, query)

    def keys_values(of: Tensor) -> tuple[Tensor, Tensor]:
        key = rms_norm(attention.k_norm, attention.k_proj(of).view(len(of), -1, HEAD_DIM)).flatten(1)
        return key, attention.v_proj(of)

    sides = zip(keys_values(tokens), keys_values(x[first_summary:]), strict=True)
    key, value = (
        torch.cat([F.embedding(batch.keys, of_token), F.embedding(batch.summaries, of_summary)], dim=1)
        .view(len(batch), -1, num_keys, HEAD_DIM)
        .transpose(1, 2)
        for of_token, of_summary in sides
    )  # (Q, num_keys, T + N, HEAD_DIM)
    padded = F.pad(query.flatten(1), (0, 0, 0, len(x) + 1 - len(asking)))
    rows, longest = batch.asked.shape
    query = F.embedding(batch.asked, padded).view(rows, longest, num_keys, groups, HEAD_DIM).permute(0, 2, 3, 1, 4)
    scores = query.reshape(rows, num_keys, groups * longest, HEAD_DIM) @ key.transpose(-1, -2) * HEAD_DIM**-0.5
    scores = scores.view(rows, num_keys, groups, longest, -1).masked_fill(batch.hidden[:, None, None], -1e4)
    mixed = scores.softmax(-1).view(rows, num_keys, groups * longest, -1) @ value
    mixed = mixed.view(rows, num_keys * groups, longest, HEAD_DIM).transpose(1, 2).reshape(rows * longest, -1)
    mixed = mixed.index_select(0, batch.place[: len(asking)])
    return F.linear(mixed * gate.flatten(1).sigmoid(), attention.o_proj.weight)


class PointerModel(nn.Module):
    """A causal model and the two projections that score each option's position against the question's end."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.lm = Qwen3_5ForCausalLM(config)
        self.query = nn.Linear(config.hidden_size, POINTER_DIM, bias=False)
        self.key = nn.Linear(config.hidden_size, POINTER_DIM, bias=False)

    @property
    def device(self) -> torch.device:
        return self.query.weight.device

    def gather(self, batch: Batch, embedded: Tensor) -> Tensor:
        """The stream after layer 1 at every position: (P, hidden)."""
        layer = self.lm.model.layers[0]
        pooling = Pooling(
            layer, num_pooled(self.lm.config), embedded, (batch.vocabulary >= len(CONTROL_TOKENS))[:, None]
        )
        eps, sentence_eps = pooling.eps, pooling.eps / KEPT**2
        texts, states, count = batch.questions, batch.states, len(batch)
        end_state, answer = embedded[batch.controls[:1]], embedded[batch.controls[1:]]

        ends = embedded.index_select(0, batch.ends)
        sums = pooling.sums(SEGMENT_HEADS, texts, texts.ends, texts.segment, len(ends))
        asked = torch.cat([pooling.read(SEGMENT_HEADS, sums, ends, eps), answer])
        asked = feed_forward(layer, pooling.mark(asked, torch.cat([ends, answer])))
        answers = asked[-1:].expand(count, -1)

        ends = embedded.index_select(0, batch.sentence_tokens)
        sums = pooling.sums(SENTENCE_HEADS, states, batch.sentence_ends, batch.sentence_of, batch.num_sentences)
        sentences = pooling.read(SENTENCE_HEADS, sums, ends, sentence_eps)
        sums = pooling.sums(SEGMENT_HEADS, states, states.ends, states.segment, count)
        summaries = torch.cat([sentences, pooling.read(SEGMENT_HEADS, sums, end_state.expand(count, -1), eps)])
        texts_of = torch.cat([batch.instructions_of, batch.options_of])
        return torch.cat([asked.index_select(0, texts_of), answers, feed_forward(layer, summaries)])

    def forward(self, batch: Batch, more: Tensor | None = None) -> Tensor:
        """Returns scores of shape (Q, K), -inf where a row has fewer than K options. more (N, hidden): the embeddings
        of the token ids from the vocabulary's size on, such as those of pictures."""
        lm = self.lm.model
        table = lm.embed_tokens.weight
        embedded = F.embedding(batch.vocabulary, table if more is None else torch.cat([table, more]))
        x = self.gather(batch, embedded)
        kinds = lm.config.layer_types
        last_full = max(i for i, kind in enumerate(kinds) if kind == LAYERS["f"])
        num_asking = 2 * len(batch) + len(batch.question)
        for i, layer in enumerate(lm.layers[1:], start=1):
            normed = rms_norm(layer.input_layernorm, x)
            if kinds[i] == LAYERS["f"]:
                added = attend(
                    layer.self_attn, normed, rms_norm(layer.input_layernorm, embedded), batch, i == last_full
                )
                x = x[: len(added)] + added
            else:
                added = hand_on(layer.linear_attn, normed[:num_asking], batch, layer.input_layernorm.eps)
                x = torch.cat([x[:num_asking] + added, x[num_asking:]])
            x = feed_forward(layer, x)
        hidden = rms_norm(lm.norm, x)
        keys = F.pad(self.key(hidden[len(batch) : len(batch) + len(batch.question)]), (0, 0, 0, 1))
        queries = self.query(hidden[len(batch) + len(batch.question) :])
        scores: Tensor = (F.embedding(batch.options, keys) @ queries[..., None])[..., 0] * POINTER_DIM**-0.5
        return scores.masked_fill_(batch.options == len(batch.question), -torch.inf)


def save_model(model: PointerModel, model_dir: Path) -> None:
    """Writes config.json, model.safetensors (float16) and head.safetensors (float32)."""
    half = Qwen3_5ForCausalLM(model.lm.config).half()  # type: ignore[no-untyped-call]
    half.load_state_dict(model.lm.state_dict())
    half.save_pretrained(model_dir)
    (model_dir / "generation_config.json").unlink(missing_ok=True)  # it answers, it does not generate
    head = {"query.weight": model.query.weight.detach(), "key.weight": model.key.weight.detach()}
    save_file(head, model_dir / HEAD_NAME)


def load_model(model_dir: Path) -> PointerModel:
    """Reads what save_model wrote, in float32."""
    lm = Qwen3_5ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PointerModel(lm.config)
    model.lm = lm
    model.load_state_dict(load_file(model_dir / HEAD_NAME), strict=False)
    return model.eval()
