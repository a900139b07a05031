"""The text body of Qwen3.5 for decisions: one prefill pass, hidden states at chosen positions, option scores from them.

Owns the architecture: what a configuration means, which tensors it needs, and the forward. Functions over frozen
dataclasses of tensors, for any device; no module state, no generation, no loss. No value on the device is read on the
host and no shape depends on one: a call can be captured in a CUDA graph. It knows no files, tokens or requests.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

FULL, LINEAR = "full_attention", "linear_attention"
BODY_PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


class UnsupportedModel(ValueError):
    """The configuration asks for something this forward does not compute. The message is one line."""


class BadWeights(ValueError):
    """A tensor is missing or has another shape than the configuration says. The message is one line."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What of a Qwen3.5 text configuration the forward depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int  # of one head
    linear_value_dim: int
    conv_kernel: int
    eps: float
    rope_theta: float
    rotary_dim: int  # leading dimensions of a head that are rotated
    mrope_section: tuple[int, int, int]  # frequencies that follow time, height, width
    layer_types: tuple[str, ...]
    tied: bool  # the LM head is the embedding

    @property
    def conv_channels(self) -> int:
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim

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
                vocab_size=text["vocab_size"],
                hidden_size=text["hidden_size"],
                intermediate_size=text["intermediate_size"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text["head_dim"],
                linear_key_heads=text["linear_num_key_heads"],
                linear_value_heads=text["linear_num_value_heads"],
                linear_key_dim=text["linear_key_head_dim"],
                linear_value_dim=text["linear_value_head_dim"],
                conv_kernel=text["linear_conv_kernel_dim"],
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
    for many, few in (("num_heads", "num_kv_heads"), ("linear_value_heads", "linear_key_heads")):
        if getattr(spec, many) % getattr(spec, few):
            raise UnsupportedModel(f"{many} {getattr(spec, many)} is not a multiple of {few} {getattr(spec, few)}")
    if spec.conv_kernel < 2:
        raise UnsupportedModel("conv_kernel 1 is not covered")
    counts = [count for count in spec.mrope_section if type(count) is int and count >= 0]
    if spec.rotary_dim % 2 or spec.rotary_dim > spec.head_dim or len(counts) != 3:
        raise UnsupportedModel(f"rotary dimensions {spec.rotary_dim}, mrope_section {spec.mrope_section}")


def _refuse_what_we_do_not_compute(whole: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refusals = (
        ("model_type", text.get("model_type"), text.get("model_type") in ("qwen3_5", "qwen3_5_text")),
        ("quantization_config", "present", not (whole.get("quantization_config") or text.get("quantization_config"))),
        ("hidden_act", text.get("hidden_act"), text.get("hidden_act", "silu") == "silu"),
        ("attention_bias", True, not text.get("attention_bias")),
        ("attn_output_gate", False, text.get("attn_output_gate", True)),
        ("mlp_only_layers", text.get("mlp_only_layers"), not text.get("mlp_only_layers")),
        ("num_experts", text.get("num_experts"), not text.get("num_experts")),
        ("rope_type", rope_type, rope_type == "default"),
        ("mrope_interleaved", False, rope.get("mrope_interleaved", True)),
    )
    for name, value, is_covered in refusals:
        if not is_covered:
            raise UnsupportedModel(f"{name} {value!r} is not covered")


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    count = text["num_hidden_layers"]
    interval = text.get("full_attention_interval", 4)
    types = text.get("layer_types") or [LINEAR if (i + 1) % interval else FULL for i in range(count)]
    if len(types) != count:
        raise UnsupportedModel(f"layer_types names {len(types)} layers, num_hidden_layers {count}")
    for layer_type in types:
        if layer_type not in (FULL, LINEAR):
            raise UnsupportedModel(f"layer type {layer_type!r} is not covered")
    return tuple(types)


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    qg: Tensor  # (2 heads D, H): queries, output gates; apart from kv, for the last layer needs them of few tokens
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
        """What the layers compute in."""
        return self.layers[0].down.dtype


class TensorReader(Protocol):
    """A checkpoint by tensor name: a dict, or something that reads each tensor from disk when asked.

    A tensor that needs no change is kept as it comes: one mapped from a file stays mapped."""

    def keys(self) -> Iterable[str]: ...
    def __getitem__(self, name: str, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Loader:
    tensors: TensorReader
    names: frozenset[str]
    device: torch.device
    dtype: torch.dtype
    pack: bool

    def read(self, name: str, *shape: int) -> Tensor:
        if name not in self.names:
            raise BadWeights(f"the checkpoint has no tensor {name}")
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.element_size() < 2:
            raise BadWeights(f"tensor {name} is {tensor.dtype} {tuple(tensor.shape)}, expected a float of {shape}")
        return tensor

    def vector(self, name: str, size: int) -> Tensor:
        return self.read(name, size).to(self.device, torch.promote_types(self.dtype, torch.float32))

    def matrix(self, name: str, *shape: int) -> Tensor:
        return self.packed(self.read(name, *shape).to(self.device, self.dtype))

    def filters(self, name: str, channels: int, width: int) -> Tensor:
        return self.read(name, channels, 1, width).squeeze(1).to(self.device, self.dtype, copy=True).contiguous()

    def packed(self, matrix: Tensor) -> Tensor:
        return kernels.pack_matrix(matrix) if self.pack else matrix

    def table(self, name: str, *shape: int) -> Tensor:
        """A matrix whose rows are looked up one by one: never made wider than it is stored."""
        tensor = self.read(name, *shape)
        return tensor.to(self.device, tensor.dtype if tensor.element_size() <= self.dtype.itemsize else self.dtype)

    def fused(self, columns: int, parts: Iterable[tuple[str, int]]) -> Tensor:
        """The named matrices one below the other, each source dropped before the next is read."""
        parts = tuple(parts)
        whole = torch.empty(sum(rows for _, rows in parts), columns, dtype=self.dtype, device=self.device)
        start = 0
        for name, rows in parts:
            whole[start : start + rows] = self.read(name, rows, columns)
            start += rows
        return self.packed(whole)

    def deinterleaved(self, name: str, heads: int, dim: int, columns: int) -> Tensor:
        """The query projection, which has each head's query and gate in turn, as all queries and then all gates."""
        whole = torch.empty(2, heads, dim, columns, dtype=self.dtype, device=self.device)
        whole.copy_(self.read(name, 2 * heads * dim, columns).view(heads, 2, dim, columns).transpose(0, 1))
        return self.packed(whole.view(-1, columns))


def load_weights(
    spec: Spec,
    tensors: TensorReader,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = False,
) -> Weights:
    """Read a checkpoint by name and fuse what is multiplied by the same input. Raises BadWeights.

    pack: on the CPU keep matrices in the layout of kernels.pack_matrix, for rows of up to about 300 tokens.
    Holds one source tensor at a time beside what it has built, so the peak is the weights and their largest matrix."""
    names = frozenset(tensors.keys())
    loader = _Loader(tensors, names, torch.device(device), dtype, pack)
    body = next((prefix for prefix in BODY_PREFIXES if f"{prefix}embed_tokens.weight" in names), BODY_PREFIXES[0])
    shape = (spec.vocab_size, spec.hidden_size)
    embed = loader.table(f"{body}embed_tokens.weight", *shape)
    head_name = next((name for name in HEAD_NAMES if name in names), None)
    head = embed  # a checkpoint may say tied and still carry a head: the one it carries is the one it was trained with
    if head_name is not None or not spec.tied:
        head = loader.table(head_name or HEAD_NAMES[0], *shape)
        head = embed if spec.tied and torch.equal(head, embed) else head
    steps = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    axes = torch.zeros(spec.rotary_dim // 2, dtype=torch.long)
    for axis in (1, 2):  # frequencies go time, height, width in turn; those past 3 * section follow time
        axes[axis : 3 * spec.mrope_section[axis] : 3] = axis
    return Weights(
        embed=embed,
        head=head,
        layers=tuple(_load_layer(spec, loader, f"{body}layers.{i}.", kind) for i, kind in enumerate(spec.layer_types)),
        norm=loader.vector(f"{body}norm.weight", spec.hidden_size) + 1,
        frequencies=(1.0 / spec.rope_theta**steps).to(device),
        axes=axes.to(device),
    )


def _load_layer(spec: Spec, loader: _Loader, name: str, kind: str) -> LayerWeights:
    mlp, inner = f"{name}mlp.", spec.intermediate_size
    return LayerWeights(
        mixer=(_load_attention if kind == FULL else _load_linear)(spec, loader, name),
        gate_up=loader.fused(spec.hidden_size, ((f"{mlp}{part}_proj.weight", inner) for part in ("gate", "up"))),
        down=loader.matrix(f"{mlp}down_proj.weight", spec.hidden_size, inner),
        input_norm=loader.vector(f"{name}input_layernorm.weight", spec.hidden_size) + 1,
        post_norm=loader.vector(f"{name}post_attention_layernorm.weight", spec.hidden_size) + 1,
    )


def _load_attention(spec: Spec, loader: _Loader, name: str) -> AttentionWeights:
    name = f"{name}self_attn."
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return AttentionWeights(
        qg=loader.deinterleaved(f"{name}q_proj.weight", spec.num_heads, spec.head_dim, spec.hidden_size),
        kv=loader.fused(spec.hidden_size, ((f"{name}k_proj.weight", keys), (f"{name}v_proj.weight", keys))),
        out=loader.matrix(f"{name}o_proj.weight", spec.hidden_size, queries),
        q_norm=loader.vector(f"{name}q_norm.weight", spec.head_dim) + 1,
        k_norm=loader.vector(f"{name}k_norm.weight", spec.head_dim) + 1,
    )


def _load_linear(spec: Spec, loader: _Loader, name: str) -> LinearWeights:
    name = f"{name}linear_attn."
    heads, values = spec.linear_value_heads, spec.linear_value_heads * spec.linear_value_dim
    rows = (("qkv", spec.conv_channels), ("z", values), ("b", heads), ("a", heads))
    return LinearWeights(
        qkvzba=loader.fused(spec.hidden_size, ((f"{name}in_proj_{part}.weight", size) for part, size in rows)),
        conv=loader.filters(f"{name}conv1d.weight", spec.conv_channels, spec.conv_kernel),
        out=loader.matrix(f"{name}out_proj.weight", spec.hidden_size, values),
        rate=-loader.vector(f"{name}A_log", heads).exp(),
        dt_bias=loader.vector(f"{name}dt_bias", heads),
        norm=loader.vector(f"{name}norm.weight", spec.linear_value_dim),
    )


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: Tensor  # (B, kv_heads, P, D), rotated
    value: Tensor


@dataclass(frozen=True, slots=True)
class LinearState:
    conv: Tensor  # (B, K - 1, conv_channels): the last inputs of the convolution
    recurrent: Tensor  # (B, value heads, Dk, Dv), float32 at least


@dataclass(frozen=True, slots=True)
class Prefix:
    """What rows leave behind for rows that continue them. Never changed once made, so any number may share it."""

    layers: tuple[KeyValue | LinearState, ...]
    valid: Tensor  # (B, P) bool, which positions of the keys and values are not padding

    def map(self, change: Callable[[Tensor], Tensor]) -> "Prefix":
        """The same prefix with every tensor changed: copied, moved, rows of it chosen."""
        layers = tuple(
            KeyValue(change(layer.key), change(layer.value))
            if isinstance(layer, KeyValue)
            else LinearState(change(layer.conv), change(layer.recurrent))
            for layer in self.layers
        )
        return Prefix(layers, change(self.valid))

    def select(self, rows: Tensor) -> "Prefix":
        """Fork: row i of the result continues row rows[i]. rows (B,) long."""
        return self.map(lambda tensor: tensor.index_select(0, rows))

    @property
    def nbytes(self) -> int:
        states = ((x.key, x.value) if isinstance(x, KeyValue) else (x.conv, x.recurrent) for x in self.layers)
        return self.valid.nbytes + sum(tensor.nbytes for pair in states for tensor in pair)


@dataclass(frozen=True, slots=True)
class _Sight:
    """Where some tokens stand and what they see."""

    cos: Tensor  # (B, tokens, 1, rotary_dim / 2) float32
    sin: Tensor
    mask: Tensor | None  # (B or 1, 1, tokens, P + T), added to attention's scores; None: causal and no prefix


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one forward share."""

    all: _Sight
    last: _Sight  # of the tokens that are read, for the last layer
    chosen: Tensor  # (B * R,) where these are among B * T tokens
    lengths: Tensor | None  # (B,); None: no padding, or nobody to mind it
    real: Tensor  # (B, T) bool, what is not padding
    keep: bool  # layers return what they leave behind


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
    want_prefix: bool = False,
) -> tuple[Tensor, Prefix | None]:
    """One pass over right-padded rows. Returns their final-norm hidden states (B, R, H) at the positions read and, if
    wanted, the prefix that the rows are to others.

    input_ids (B, T) long or embeds (B, T, H); positions (B, T), or (3, B, T) for time, height and width, going on where
    the prefix's end; read (B, R) long, indices into T, None for none; prefix of B rows, or of one that all B continue.
    Padding after the last token read changes nothing before it. lengths (B,) long, the tokens of each row that are not
    padding, matter to want_prefix alone: without them all T tokens of every row become part of the prefix."""
    x = F.embedding(input_ids, weights.embed) if embeds is None and input_ids is not None else embeds
    assert x is not None
    batch, length, _ = x.shape
    # Layers add to x in place, so it must not be the caller's tensor
    x = x.to(weights.dtype, copy=embeds is not None).reshape(batch * length, spec.hidden_size)
    step = _plan(weights, x, positions, read, lengths if want_prefix else None, prefix, want_prefix)
    states: list[Any] = []
    for i, layer in enumerate(weights.layers):
        is_last = i + 1 == len(weights.layers)
        normed = kernels.rms_norm(x, layer.input_norm, spec.eps).view(batch, length, -1)
        past: Any = None if prefix is None else prefix.layers[i]
        mix: Any = _attention if isinstance(layer.mixer, AttentionWeights) else _linear_attention
        mixed, state = mix(spec, layer.mixer, normed, step, past, is_last)
        states.append(state)
        if is_last:  # the mixer has returned only what is read, and nothing else of x is needed any more
            x = x.index_select(0, step.chosen)
        kernels.add_linear_(x, mixed, layer.mixer.out)
        normed = kernels.rms_norm(x, layer.post_norm, spec.eps)
        gate, up = kernels.linear(normed, layer.gate_up).chunk(2, dim=-1)
        kernels.add_linear_(x, F.silu(gate).mul_(up), layer.down)
    hidden = kernels.rms_norm(x, weights.norm, spec.eps).view(batch, -1, spec.hidden_size)
    if not want_prefix:
        return hidden, None
    before = () if prefix is None else (prefix.valid.expand(batch, -1),)
    return hidden, Prefix(tuple(states), torch.cat((*before, step.real), dim=1))


def _plan(
    weights: Weights,
    x: Tensor,
    positions: Tensor,
    read: Tensor | None,
    lengths: Tensor | None,
    prefix: Prefix | None,
    keep: bool,
) -> _Pass:
    batch, length = positions.shape[-2:]
    order = torch.arange(length, device=x.device)
    if read is None:
        read = order.new_empty(batch, 0)
    if positions.dim() == 3:  # each frequency turns with one of the three
        angles = positions.permute(1, 2, 0).index_select(-1, weights.axes).float() * weights.frequencies
    else:
        angles = positions.unsqueeze(-1).float() * weights.frequencies
    chosen = (read + length * torch.arange(batch, device=x.device).unsqueeze(1)).flatten()
    at_read = angles.flatten(0, 1).index_select(0, chosen).view(batch, -1, angles.shape[-1])
    mask = None if prefix is None else _mask((order <= order.unsqueeze(-1)).unsqueeze(0), prefix, x.dtype)
    real = order.expand(batch, -1) < (length if lengths is None else lengths.unsqueeze(1))
    return _Pass(
        all=_Sight(angles.cos().unsqueeze(2), angles.sin().unsqueeze(2), mask),
        last=_Sight(
            at_read.cos().unsqueeze(2), at_read.sin().unsqueeze(2), _mask(order <= read.unsqueeze(-1), prefix, x.dtype)
        ),
        chosen=chosen,
        lengths=lengths,
        real=real,
        keep=keep,
    )


def _mask(sees: Tensor, prefix: Prefix | None, dtype: torch.dtype) -> Tensor:
    """sees (B or 1, tokens, T) bool, and the prefix but its padding, as (B or 1, 1, tokens, P + T) of 0 and -inf."""
    if prefix is not None:
        rows = max(prefix.valid.shape[0], sees.shape[0])
        before = prefix.valid.unsqueeze(1).expand(rows, sees.shape[1], -1)
        sees = torch.cat((before, sees.expand(rows, -1, -1)), dim=-1)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf")).unsqueeze(1)


def _attention(
    spec: Spec, w: AttentionWeights, x: Tensor, step: _Pass, past: KeyValue | None, is_last: bool
) -> tuple[Tensor, KeyValue | None]:
    """x (B, T, H), normed, to (tokens, heads D), in the last layer only of those read; and what is kept."""
    batch, _, hidden_size = x.shape
    sight, asking = step.all, x
    if is_last:
        sight, asking = step.last, x.view(-1, hidden_size).index_select(0, step.chosen).view(batch, -1, hidden_size)
    q, gate = torch.split(kernels.linear(asking, w.qg), spec.num_heads * spec.head_dim, dim=-1)
    k, v = torch.split(kernels.linear(x, w.kv), spec.num_kv_heads * spec.head_dim, dim=-1)
    q = kernels.norm_rotate(_heads(q, spec.num_heads), w.q_norm, sight.cos, sight.sin, spec.eps)
    k = kernels.norm_rotate(_heads(k, spec.num_kv_heads), w.k_norm, step.all.cos, step.all.sin, spec.eps)
    k, v = k.transpose(1, 2), _heads(v, spec.num_kv_heads).transpose(1, 2)
    if past is not None:
        k = torch.cat((past.key.expand(batch, -1, -1, -1), k), dim=2)
        v = torch.cat((past.value.expand(batch, -1, -1, -1), v), dim=2)
    kept = KeyValue(k.contiguous(), v.contiguous()) if step.keep else None
    mixed = kernels.attention(q, k, v, sight.mask).flatten(2) * gate.sigmoid()
    return mixed.flatten(0, 1), kept


def _linear_attention(
    spec: Spec, w: LinearWeights, x: Tensor, step: _Pass, past: LinearState | None, is_last: bool
) -> tuple[Tensor, LinearState | None]:
    """x (B, T, H), normed, to (tokens, value channels), in the last layer only of those read; and what is kept."""
    keys, values = spec.linear_key_heads * spec.linear_key_dim, spec.linear_value_heads * spec.linear_value_dim
    sizes = [spec.conv_channels, values, spec.linear_value_heads, spec.linear_value_heads]
    qkv, z, b, a = torch.split(kernels.linear(x, w.qkvzba), sizes, dim=-1)
    beta = b.to(w.rate.dtype).sigmoid()
    decay = F.softplus(a.to(w.rate.dtype) + w.dt_bias).mul_(w.rate)
    if step.lengths is not None:  # a token with beta 0 and decay 0 leaves the state as it was
        beta, decay = beta * step.real.unsqueeze(-1), decay * step.real.unsqueeze(-1)
    conv, recurrent = (None, None) if past is None else (past.conv, past.recurrent)
    q, k, v = torch.split(kernels.causal_conv_silu(qkv, w.conv, conv), [keys, keys, values], dim=-1)
    q, k = (_heads(part, spec.linear_key_heads) for part in (q, k))
    v = _heads(v, spec.linear_value_heads)
    core, recurrent = kernels.gated_delta_rule(q, k, v, decay, beta, state=recurrent, want_state=step.keep)
    kept = None
    if step.keep and recurrent is not None:
        kept = LinearState(kernels.last_inputs(qkv, spec.conv_kernel, conv, step.lengths), recurrent)
    core, z = core.flatten(0, 1), _heads(z, spec.linear_value_heads).flatten(0, 1)
    if is_last:
        core, z = core.index_select(0, step.chosen), z.index_select(0, step.chosen)
    return kernels.gated_rms_norm(core, z, w.norm, spec.eps).flatten(1), kept


def _heads(x: Tensor, count: int) -> Tensor:
    return x.view(*x.shape[:-1], count, x.shape[-1] // count)


def label_scores(weights: Weights, hidden: Tensor, label_ids: Tensor) -> Tensor:
    """Next-token logits of some tokens: hidden (B, R, H), label_ids (B, R, L) long, to (B, R, L) float32.

    Products and sums, not a matrix product, so that no setting of the matrix products' precision touches the scores."""
    compute = torch.promote_types(hidden.dtype, torch.float32)
    rows = F.embedding(label_ids, weights.head).to(compute)
    return rows.mul_(hidden.to(compute).unsqueeze(-2)).sum(-1)


class PointerHead(Protocol):
    """query.weight and key.weight of a pointer head, (k, H) float32 both."""

    @property
    def query(self) -> Tensor: ...
    @property
    def key(self) -> Tensor: ...


def pointer_scores(head: PointerHead, options: Tensor, end: Tensor) -> Tensor:
    """(Wk h_i) . (Wq h_end) / sqrt(k): hidden states of options (B, N, H) and of the end (B, H), to (B, N) float32."""
    query = F.linear(end.float(), head.query).mul_(head.query.shape[0] ** -0.5)
    return options.float().mul(torch.mm(query, head.key).unsqueeze(1)).sum(-1)
