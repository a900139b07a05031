"""The text body of Qwen3.5 for decisions: one prefill pass, hidden states at chosen positions.

It owns the architecture: what a configuration means, which tensors it needs, and the forward. All of it is functions
over dataclasses of tensors, for any device, without module state. No value on the device is read on the host and no
shape depends on one, so a call can be captured in a CUDA graph. It knows nothing of files, tokens, scores and requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.forward import kernels
from onepass.forward.loader import TensorReader, UnsupportedModel, WeightLoader
from onepass.forward.prefix import Prefix, State

FULL, LINEAR = "full_attention", "linear_attention"
BODY_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class Spec:
    """The part of a Qwen3.5 text configuration on which the forward depends."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    eps: float
    rope_theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    mrope_section: tuple[int, int, int]  # frequencies that follow time, height, width
    layer_types: tuple[str, ...]
    tied: bool  # the LM head is the embedding

    @property
    def conv_channels(self) -> int:
        return (
            2 * self.linear_num_key_heads * self.linear_key_head_dim
            + self.linear_num_value_heads * self.linear_value_head_dim
        )

    @classmethod
    def from_config(cls, config: Any) -> "Spec":
        """From transformers' Qwen3_5Config or Qwen3_5TextConfig, or config.json as a dict. Raises UnsupportedModel."""
        whole = config if isinstance(config, Mapping) else config.to_dict()
        text = whole.get("text_config") or whole
        _refuse_what_we_do_not_compute(whole, text)
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        rope = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text} | rope
        try:
            spec = cls(
                **{field.name: text[field.name] for field in fields(cls)[:11]},
                eps=text.get("rms_norm_eps", 1e-6),
                rope_theta=rope["rope_theta"],
                rotary_dim=int(text["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
                mrope_section=tuple(rope.get("mrope_section", (11, 11, 10))),
                layer_types=_layer_types(text),
                tied=bool(whole.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
            )
        except KeyError as err:
            raise UnsupportedModel(f"the configuration does not say {err.args[0]}") from err
        except TypeError as err:
            raise UnsupportedModel(f"the configuration is malformed: {err}") from err
        _refuse_sizes_that_do_not_fit(spec)
        return spec


def _refuse_sizes_that_do_not_fit(spec: Spec) -> None:
    for name in (field.name for field in fields(spec) if field.type is int):
        size = getattr(spec, name)
        if type(size) is not int or size < 1:
            raise UnsupportedModel(f"{name} {size!r} is not a whole number above zero")
    for many, few in ("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"):
        if getattr(spec, many) % getattr(spec, few):
            raise UnsupportedModel(f"{many} {getattr(spec, many)} is not a multiple of {few} {getattr(spec, few)}")
    counts = [count for count in spec.mrope_section if type(count) is int and count >= 0]
    if spec.rotary_dim % 2 or spec.rotary_dim > spec.head_dim or len(counts) != 3:
        raise UnsupportedModel(f"rotary dimensions {spec.rotary_dim}, mrope_section {spec.mrope_section}")


def _refuse_what_we_do_not_compute(whole: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refusals = (
        *(("model_type", part.get("model_type"), part.get("model_type") in MODEL_TYPES) for part in (whole, text)),
        ("quantization_config", "present", not (whole.get("quantization_config") or text.get("quantization_config"))),
        ("hidden_act", text.get("hidden_act"), text.get("hidden_act", "silu") == "silu"),
        ("attention_bias", True, not text.get("attention_bias")),
        ("attn_output_gate", False, text.get("attn_output_gate", True)),
        ("linear_conv_kernel_dim", 1, text.get("linear_conv_kernel_dim") != 1),
        ("rope_type", rope_type, rope_type == "default"),
        ("mrope_interleaved", False, rope.get("mrope_interleaved", True)),
    )
    for name, value, is_covered in refusals:
        if not is_covered:
            raise UnsupportedModel(f"{name} {value!r} is not covered")


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    count, interval = text["num_hidden_layers"], text.get("full_attention_interval", 4)
    types = text.get("layer_types") or [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    if len(types) != count:
        raise UnsupportedModel(f"layer_types names {len(types)} layers, num_hidden_layers {count}")
    if unknown := set(types) - {FULL, LINEAR}:
        raise UnsupportedModel(f"layer type {min(unknown)!r} is not covered")
    return tuple(types)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qg: Tensor  # (heads 2 D, H): each head's query, then its output gate; the last layer needs them of few tokens
    kv: Tensor  # (2 kv_heads D, H): keys, values
    out: Tensor  # (H, heads D)
    q_norm: Tensor  # (D,) float32, 1 + the checkpoint's
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class LinearWeights:
    qkvzba: Tensor  # (conv_channels + value channels + 2 value heads, H): the convolved, the gate, beta, decay
    conv: Tensor  # (conv_channels, K)
    out: Tensor  # (H, value channels)
    rate: Tensor  # (value heads,) float32: -exp(A_log)
    dt_bias: Tensor  # (value heads,) float32
    norm: Tensor  # (linear_value_dim,) float32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    mixer: AttentionWeights | LinearWeights
    gate_up: Tensor  # (2 I, H)
    down: Tensor  # (H, I)
    input_norm: Tensor  # (H,) float32, 1 + the checkpoint's
    post_norm: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Tensor  # (vocab, H), as wide as the checkpoint has it: only rows of it are read
    head: Tensor  # (vocab, H), the same tensor if tied
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # (H,) float32, 1 + the checkpoint's
    frequencies: Tensor  # (rotary_dim / 2,) float32
    axes: Tensor  # (rotary_dim / 2,) which of time, height, width each frequency follows

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].down.dtype  # what the layers compute in


def load_weights(
    spec: Spec, tensors: TensorReader, device: torch.device, dtype: torch.dtype, *, pack: bool = False
) -> Weights:
    """Read a checkpoint by name and fuse what is multiplied by the same input. Raises BadWeights.

    pack: on the CPU, matrices are kept in the layout of kernels.pack_matrix, which serves rows of up to about 300
    tokens. The peak of memory is that of the weights and of their largest matrix."""
    loader = WeightLoader.of(tensors, device, dtype, pack=pack)
    body = next(
        (prefix for prefix in BODY_PREFIXES if f"{prefix}embed_tokens.weight" in loader.names), BODY_PREFIXES[0]
    )
    shape = (spec.vocab_size, spec.hidden_size)
    embed = loader.table(f"{body}embed_tokens.weight", *shape)
    head_name = next((name for name in HEAD_NAMES if name in loader.names), None)
    head = embed  # a checkpoint may say tied and still carry a head: the one it carries is the one it was trained with
    if head_name is not None or not spec.tied:
        head = loader.table(head_name or HEAD_NAMES[0], *shape)
        head = embed if spec.tied and torch.equal(head, embed) else head
    turns = kernels.rotary_frequencies(spec.rope_theta, spec.rotary_dim, spec.mrope_section)
    layers = tuple(_load_layer(spec, loader, f"{body}layers.{i}.", kind) for i, kind in enumerate(spec.layer_types))
    norm = loader.vector(f"{body}norm.weight", spec.hidden_size) + 1
    return Weights(embed, head, layers, norm, *(part.to(device) for part in turns))


def _load_layer(spec: Spec, loader: WeightLoader, name: str, kind: str) -> LayerWeights:
    mlp, inner = f"{name}mlp.", spec.intermediate_size
    return LayerWeights(
        mixer=(_load_attention if kind == FULL else _load_linear)(spec, loader, name),
        gate_up=loader.fused(spec.hidden_size, (f"{mlp}gate_proj.weight", inner), (f"{mlp}up_proj.weight", inner)),
        down=loader.fused(inner, (f"{mlp}down_proj.weight", spec.hidden_size)),
        input_norm=loader.vector(f"{name}input_layernorm.weight", spec.hidden_size) + 1,
        post_norm=loader.vector(f"{name}post_attention_layernorm.weight", spec.hidden_size) + 1,
    )


def _load_attention(spec: Spec, loader: WeightLoader, name: str) -> AttentionWeights:
    name = f"{name}self_attn."
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    return AttentionWeights(
        qg=loader.fused(spec.hidden_size, (f"{name}q_proj.weight", 2 * queries)),
        kv=loader.fused(spec.hidden_size, (f"{name}k_proj.weight", keys), (f"{name}v_proj.weight", keys)),
        out=loader.fused(queries, (f"{name}o_proj.weight", spec.hidden_size)),
        q_norm=loader.vector(f"{name}q_norm.weight", spec.head_dim) + 1,
        k_norm=loader.vector(f"{name}k_norm.weight", spec.head_dim) + 1,
    )


def _load_linear(spec: Spec, loader: WeightLoader, name: str) -> LinearWeights:
    name = f"{name}linear_attn."
    heads, values = spec.linear_num_value_heads, spec.linear_num_value_heads * spec.linear_value_head_dim
    filters = (spec.conv_channels, 1, spec.linear_conv_kernel_dim)
    rows = (("qkv", spec.conv_channels), ("z", values), ("b", heads), ("a", heads))
    return LinearWeights(
        qkvzba=loader.fused(spec.hidden_size, *((f"{name}in_proj_{part}.weight", size) for part, size in rows)),
        conv=loader.cast(f"{name}conv1d.weight", *filters).view(filters[0], filters[2]),
        out=loader.fused(values, (f"{name}out_proj.weight", spec.hidden_size)),
        rate=-loader.vector(f"{name}A_log", heads).exp(),
        dt_bias=loader.vector(f"{name}dt_bias", heads),
        norm=loader.vector(f"{name}norm.weight", spec.linear_value_head_dim),
    )


Mixed = tuple[Tensor, State | None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The positions of some tokens, and what these tokens attend to."""

    cos: Tensor  # (B, tokens, rotary_dim / 2) float32
    sin: Tensor
    mask: Tensor | None  # (B or 1, 1, tokens, P + T), added to attention's scores; None: causal and no prefix


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one pass share."""

    all: _Seen
    last: _Seen  # of the tokens that are read, for the last layer
    chosen: Tensor  # (B * R,) the places of these among the B * T tokens
    keep: int  # layers return what this many tokens of each row leave behind; 0: nothing
    lengths: Tensor | None  # (B,) how many of these tokens are not padding; None: it makes no difference
    real: Tensor  # (B, T) bool, False for padding
    kept: Sequence[int]  # the lengths, where several rows have tokens after them; else empty


def forward(
    spec: Spec,
    weights: Weights,
    *,
    positions: Tensor,
    input_ids: Tensor | None = None,
    embeds: Tensor | None = None,
    read: Tensor | None = None,
    lengths: Tensor | None = None,
    prefix: Prefix | None = None,
    keep: int | Sequence[int] = 0,
) -> tuple[Tensor, Prefix | None]:
    """One pass over right-padded rows. Returns their final-norm hidden states (B, R, H) at the positions that are read
    and, if `keep` asks for it, the prefix that the first `keep` of the T tokens leave behind.

    input_ids (B, T) long or embeds (B, T, H). positions (B, T), or (3, B, T) for time, height and width; they go on
    where the prefix ends. read (B, R) long, indices into T; None reads nothing. prefix: of B rows, or of one row that
    all B continue. keep: one number for all rows, or a number for each. lengths (B,) long: the tokens of each row that
    are not padding. They matter only to a prefix of all T tokens, of which padding would otherwise be a part; padding
    after the last token that is read changes nothing before it."""
    x = F.embedding(input_ids, weights.embed) if embeds is None and input_ids is not None else embeds
    assert x is not None
    batch, length, _ = x.shape
    # Layers add to x in place, so it must not be the caller's tensor
    x = x.to(weights.dtype, copy=embeds is not None).reshape(batch * length, spec.hidden_size)
    step = _plan(weights, positions, read, lengths if keep == length else None, prefix, keep)
    states: list[State | None] = []
    for i, layer in enumerate(weights.layers):
        is_last = i + 1 == len(weights.layers)
        normed = kernels.rms_norm(x, layer.input_norm, spec.eps).view(batch, length, -1)
        past = None if prefix is None else prefix.layers[i]
        if isinstance(layer.mixer, AttentionWeights):
            mixed, state = _attention(spec, layer.mixer, normed, step, past, is_last)
        else:
            mixed, state = _linear_attention(spec, layer.mixer, normed, step, past, is_last)
        states.append(state)
        if is_last:  # the mixer has returned only what is read, and nothing else of x is needed any more
            x = x.index_select(0, step.chosen)
        kernels.add_linear_(x, mixed, layer.mixer.out)
        normed = kernels.rms_norm(x, layer.post_norm, spec.eps)
        gate, up = kernels.linear(normed, layer.gate_up).chunk(2, dim=-1)
        kernels.add_linear_(x, F.silu(gate).mul_(up), layer.down)
    hidden = kernels.rms_norm(x, weights.norm, spec.eps).view(batch, -1, spec.hidden_size)
    if not step.keep:
        return hidden, None
    before = () if prefix is None else (prefix.valid.expand(batch, -1),)
    kept = tuple(state for state in states if state is not None)
    return hidden, Prefix(kept, torch.cat((*before, step.real[:, : step.keep]), dim=1))


def _plan(
    weights: Weights,
    positions: Tensor,
    read: Tensor | None,
    lengths: Tensor | None,
    prefix: Prefix | None,
    keep: int | Sequence[int],
) -> _Pass:
    batch, length = positions.shape[-2:]
    kept: Sequence[int] = ()
    if not isinstance(keep, int):
        kept, keep = keep, max(keep)
        lengths = torch.tensor(kept, device=positions.device)
    order = torch.arange(length, device=positions.device)
    read = order.new_empty(batch, 0) if read is None else read
    angles = kernels.rotary_angles(positions, weights.frequencies, weights.axes)
    chosen = (read + length * torch.arange(batch, device=order.device).unsqueeze(1)).flatten()
    at_read = angles.flatten(0, 1).index_select(0, chosen).view(batch, -1, angles.shape[-1])
    before = None if prefix is None else prefix.valid
    mask = None if before is None else kernels.attention_mask((order <= order[:, None])[None], before, weights.dtype)
    last_mask = kernels.attention_mask(order <= read.unsqueeze(-1), before, weights.dtype)
    real = order.expand(batch, -1) < (length if lengths is None else lengths.unsqueeze(1))
    whole, last = _Seen(angles.cos(), angles.sin(), mask), _Seen(at_read.cos(), at_read.sin(), last_mask)
    return _Pass(whole, last, chosen, keep, lengths, real, kept)


def _attention(spec: Spec, w: AttentionWeights, x: Tensor, step: _Pass, past: State | None, is_last: bool) -> Mixed:
    """From x (B, T, H), normed: (tokens, heads D), in the last layer only of the tokens that are read, and what is
    kept."""
    batch, _, hidden_size = x.shape
    seen, asking = step.all, x
    if is_last:
        seen, asking = step.last, x.view(-1, hidden_size).index_select(0, step.chosen).view(batch, -1, hidden_size)
    q_gate = kernels.linear(asking, w.qg).view(batch, -1, spec.num_attention_heads, 2, spec.head_dim)
    k_v = kernels.linear(x, w.kv).view(batch, -1, 2, spec.num_key_value_heads, spec.head_dim)
    q = kernels.norm_rotate(q_gate[..., 0, :], w.q_norm, seen.cos, seen.sin, spec.eps)
    k = kernels.norm_rotate(k_v[:, :, 0], w.k_norm, step.all.cos, step.all.sin, spec.eps).transpose(1, 2)
    v = k_v[:, :, 1].transpose(1, 2)
    if past is not None:
        k, v = (torch.cat((old.expand(batch, -1, -1, -1), new), dim=2) for old, new in zip(past, (k, v), strict=True))
    mixed = (kernels.attention(q, k, v, seen.mask) * q_gate[..., 1, :].sigmoid()).flatten(2).flatten(0, 1)
    if not step.keep:
        return mixed, None
    kept = k.shape[2] - x.shape[1] + step.keep
    return mixed, (k[:, :, :kept].contiguous(), v[:, :, :kept].contiguous())


def _linear_attention(spec: Spec, w: LinearWeights, x: Tensor, step: _Pass, past: State | None, is_last: bool) -> Mixed:
    """From x (B, T, H), normed: (tokens, value channels), in the last layer only of the tokens that are read, and what
    is kept."""
    batch, length, _ = x.shape
    heads, key_heads, key_dim = spec.linear_num_value_heads, spec.linear_num_key_heads, spec.linear_key_head_dim
    values = heads * spec.linear_value_head_dim
    qkv, z, b, a = torch.split(kernels.linear(x, w.qkvzba), [spec.conv_channels, values, heads, heads], dim=-1)
    beta = b.to(w.rate.dtype).sigmoid()
    decay = F.softplus(a.to(w.rate.dtype) + w.dt_bias).mul_(w.rate)
    conv, recurrent = (None, None) if past is None else past
    q_k, v = torch.split(kernels.causal_conv_silu(qkv, w.conv, conv), [spec.conv_channels - values, values], dim=-1)
    q, k = q_k.view(batch, length, 2, key_heads, key_dim).unbind(2)
    v = v.view(batch, length, heads, -1)
    counts = None if step.lengths is None else step.real
    core, recurrent = kernels.delta_rule_keeping((q, k, v, decay, beta), recurrent, step.keep, counts, step.kept)
    kept = None
    if recurrent is not None:
        kept = kernels.last_inputs(qkv[:, : step.keep], w.conv.shape[1], conv, step.lengths), recurrent
    core, z = core.flatten(0, 1), z.view(batch, length, heads, -1).flatten(0, 1)
    if is_last:
        core, z = core.index_select(0, step.chosen), z.index_select(0, step.chosen)
    return kernels.gated_rms_norm(core, z, w.norm, spec.eps).flatten(1), kept
