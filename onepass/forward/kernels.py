"""The operations of a Qwen3.5 layer: products with weights, norms, rotary attention, causal convolution, gated delta
rule. It owns how each is computed on each device, and knows nothing of the model around them.

On the CPU, and on any device that is not CUDA, torch computes them. On CUDA flash-linear-attention computes the last
two and the gated norm. It is imported when the first CUDA tensor arrives, so that it cannot break a machine without
a GPU.
The CUDA branches follow its version 0.6.0 and have never run on a GPU. Its kernels, called as here in Triton's
interpreter on a CPU, gave the results of the torch code (docs/engine.md).

Nothing here reads a tensor on the host or allocates by a tensor's values, so each function can be part of a CUDA graph.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens that update the state together, as in flash-linear-attention
TILE = 16  # a chunk is a multiple of this
INVERSE_BASE = 8  # rows of the largest triangle inverted by its power series; with more rows its terms cancel badly
L2_EPS = 1e-6
PACK_TOKENS = 64  # for how many tokens oneDNN chooses its layout; any number can be multiplied


def pack_matrix(matrix: Tensor) -> Tensor:
    """A weight matrix (out, in) in oneDNN's own layout, for linear and add_linear_; unchanged where there is no such
    layout.

    No call has to rearrange it, which gains time when there are few tokens. In CPU time, with one thread and float32,
    a product takes 0.6 of the time of F.linear at 8 tokens, 0.85 at 64, the same at 300, and 1.06 at 1000. torch's own
    compiler emits these two operators on the CPU. They are not public, so every use of them is in this module."""
    if matrix.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return matrix
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, PACK_TOKENS)
        return packed
    except (AttributeError, RuntimeError):  # another torch, or a dtype that this CPU does not multiply
        return matrix


def linear(x: Tensor, matrix: Tensor) -> Tensor:
    """x (..., in) times the transpose of a matrix (out, in), which may be packed."""
    if matrix.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")
        return product
    return F.linear(x, matrix)


def add_linear_(total: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """total (tokens, out) += x (tokens, in) times the transpose of a matrix (out, in), which may be packed."""
    return total.add_(linear(x, matrix)) if matrix.is_mkldnn else total.addmm_(x, matrix.t())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) over the last dimension, in float32 at least; weight (D,) float32. Returns x's dtype."""
    if x.is_cuda:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return _unit_rms(x, eps).mul_(weight).to(x.dtype)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    """x / rms(x), a new tensor in float32 at least.

    By vector_norm, which makes no tensor of squares: half the time of F.rms_norm on the CPU."""
    compute = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute)
    return torch.mul(x, norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_())


def rotary_frequencies(theta: float, rotary_dim: int, sections: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """theta ** (-2 i / rotary_dim), (rotary_dim / 2,) float32, and the axis (time, height, width) of each frequency.

    The axes take turns (interleaved M-RoPE). The frequencies past 3 times a section's size follow time."""
    axes = torch.zeros(rotary_dim // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim), axes


def rotary_angles(positions: Tensor, frequencies: Tensor, axes: Tensor) -> Tensor:
    """positions (B, T), or (3, B, T) for time, height, width, times frequencies: (B, T, rotary_dim / 2) float32."""
    if positions.dim() == 2:
        return positions.unsqueeze(-1).float() * frequencies
    return positions.permute(1, 2, 0).index_select(-1, axes).float() * frequencies


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """rms_norm, then rotary positions. Dimension i turns with dimension i + half the rotated ones; the rest stay.

    x (B, T, heads, D); weight (D,); cos, sin (B, T, rotated / 2) float32. Returns x's shape and dtype."""
    y = rms_norm(x.to(weight.dtype), weight, eps)
    half, cos, sin = cos.shape[-1], cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = y[..., :half], y[..., half : 2 * half]
    turned = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(turned)
    return y.to(x.dtype)


def attention_mask(sees: Tensor, before: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The additive mask (B or 1, 1, T, P + S) of sees (B or 1, T, S) and before (B or 1, P), both bool. It is 0 where
    they are True and -inf elsewhere."""
    if before is not None:
        rows = max(before.shape[0], sees.shape[0])
        before = before.unsqueeze(1).expand(rows, sees.shape[1], -1)
        sees = torch.cat((before, sees.expand(rows, -1, -1)), dim=-1)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf")).unsqueeze(1)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(query key^T / sqrt(D) + mask) value. Each key head serves consecutive query heads.

    query (B, T, heads, D); key, value (B, kv_heads, S, D); mask (B or 1, 1, T, S), or None, which is causal and needs
    T = S. Returns (B, T, heads, D)."""
    if not query.shape[1]:  # nothing is read
        return query
    if mask is not None and query.is_cuda:  # the CUDA kernels that take a mask do not take fewer key heads
        group = query.shape[2] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    query, is_causal, grouped = query.transpose(1, 2), mask is None, key.shape[1] != query.shape[2]
    mixed = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def causal_conv_silu(x: Tensor, weight: Tensor, state: Tensor | None = None) -> Tensor:
    """Depthwise causal convolution over time, then SiLU.

    x (B, T, C), of any strides whose last is 1; weight (C, K); state (B or 1, K - 1, C), the inputs before x, or None
    for zeros. Returns (B, T, C), contiguous, in x's dtype."""
    channels, kernel = weight.shape
    if x.is_cuda:
        from fla.modules.causal_conv1d import causal_conv1d

        if state is not None:  # flash-linear-attention wants the last K inputs, channels first, and uses K - 1 of them
            state = F.pad(state.expand(x.shape[0], -1, -1).transpose(1, 2), (1, 0)).contiguous()
        y: Tensor = causal_conv1d(x, weight, initial_state=state, activation="silu")[0]
        return y
    before = x.new_zeros(x.shape[0], kernel - 1, channels) if state is None else state.expand(x.shape[0], -1, -1)
    padded = torch.cat((before, x), dim=1)
    # (B, T, C) is a channels-last image one pixel high, which oneDNN's depthwise kernel takes without a transpose, in
    # about half the time of conv1d
    image = padded.transpose(1, 2).unsqueeze(2)
    filters = weight.view(channels, 1, 1, kernel)
    y = F.conv2d(image, filters, groups=channels).squeeze(2).transpose(1, 2)
    return F.silu(y, inplace=True)


def last_inputs(x: Tensor, kernel: int, state: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """A copy (B, kernel - 1, C) of the last kernel - 1 inputs of each row: the state for what continues the row.

    x (B, T, C) and state are those of causal_conv_silu. lengths (B,) long: the tokens of each row before its padding.
    """
    before = x.new_zeros(x.shape[0], kernel - 1, x.shape[2]) if state is None else state.expand(x.shape[0], -1, -1)
    if lengths is None:
        return torch.cat((before, x[:, -(kernel - 1) :]), dim=1)[:, -(kernel - 1) :].contiguous()
    places = lengths.unsqueeze(1) + torch.arange(kernel - 1, device=x.device)
    return torch.cat((before, x), dim=1).gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x) * silu(gate) over the last dimension, computed in float32 at least.

    x, gate (..., D); weight (D,) in float32. Returns x's shape and the gate's dtype."""
    if x.is_cuda:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        y: Tensor = rms_norm_gated(x, gate, weight, None, activation="swish", eps=eps)
        return y
    return _unit_rms(x, eps).mul_(weight).mul_(F.silu(gate.to(weight.dtype))).to(gate.dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    want_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole rows (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", arXiv 2412.06464).

    For each token, in order: S = exp(decay) S; S = S + beta k (v - S^T k)^T; output = S^T q / sqrt(Dk), with q and k of
    unit length. query, key (B, T, Hk, Dk); value (B, T, Hv, Dv), each key head serving Hv / Hk consecutive value heads;
    decay (B, T, Hv), the logarithm of the factor, never positive; beta (B, T, Hv); state (B or 1, Hv, Dk, Dv) before
    the first token, None for zeros. Returns the output (B, T, Hv, Dv) in value's dtype and, if wanted, the state after
    the last token, float32 at least. A token with decay 0 and beta 0 leaves the state as it was."""
    if value.is_cuda:
        return _gated_delta_rule_cuda(query, key, value, decay, beta, state, want_state)
    batch, length, num_heads, value_dim = value.shape
    num_chunks, chunk = chunk_shape(length)
    keys, queries, value_beta, log_decay, beta = _chunked(query, key, value, decay, beta, num_chunks, chunk)
    total = log_decay.cumsum(-1)
    group = num_heads // key.shape[2]
    attention, inverse = _inside_chunks(keys, queries, total, beta, group)
    keys, queries = _per_value_head(keys, group), _per_value_head(queries, group)
    since_start = total.exp().unsqueeze(-1)
    until_end = (total[..., -1:] - total).exp_().unsqueeze(-1)
    output = value.new_empty(batch, num_chunks * chunk, num_heads, value_dim)
    if state is not None:
        state = state.to(keys.dtype).expand(batch, -1, -1, -1).reshape(batch * num_heads, -1, value_dim)
    for i in range(num_chunks):
        write = value_beta[i]
        if state is not None:  # the first chunk of a row without a past reads nothing
            write = torch.addcmul(write, keys[i] @ state, since_start[i] * beta[i].unsqueeze(-1), value=-1)
        write = inverse[i] @ write
        read = attention[i] @ write
        if state is not None:
            read.addcmul_(queries[i] @ state, since_start[i])
        rows = output[:, i * chunk : (i + 1) * chunk]
        rows.copy_(read.view(batch, num_heads, chunk, value_dim).transpose(1, 2))
        if want_state or i + 1 < num_chunks:
            added = keys[i].transpose(-1, -2) @ write.mul_(until_end[i])
            state = added if state is None else torch.addcmul(added, state, since_start[i, :, -1:])
    final = state.view(batch, num_heads, -1, value_dim) if want_state and state is not None else None
    return output[:, :length], final


def delta_rule_keeping(
    tokens: tuple[Tensor, ...], state: Tensor | None, keep: int, counts: Tensor | None, kept: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """gated_delta_rule's output for all tokens, and the state after the first `keep` tokens, or None if `keep` is 0.

    tokens: query, key, value, decay and beta as there, (B, T, ...) each. counts (B, T) bool: the tokens that change
    the state, or None for all. kept: the number of tokens of each row that change it, where other tokens follow them
    and the rows differ; the largest of these is `keep`."""
    first = tuple(part[:, :keep] for part in tokens) if keep else tokens
    if counts is not None:  # a token with beta 0 and decay 0 leaves the state as it was
        factor = counts[:, :keep].unsqueeze(-1)
        first = (*first[:3], first[3] * factor, first[4] * factor)
    output, state = gated_delta_rule(*first, state=state, want_state=keep > 0)
    length = tokens[0].shape[1]
    if not kept:
        if 0 < keep < length:
            output = torch.cat((output, gated_delta_rule(*(part[:, keep:] for part in tokens), state=state)[0]), dim=1)
        return output, state
    # What follows begins at another place in each row, so it is moved to the left, and its output is moved back
    places = [(slice(start, length), slice(0, length - start)) for start in kept]
    rest = tuple(part.new_zeros(len(part), length - min(kept), *part.shape[2:]) for part in tokens)
    for row, (after, moved) in enumerate(places):
        for part, whole in zip(rest, tokens, strict=True):
            part[row, moved] = whole[row, after]
    following, _ = gated_delta_rule(*rest, state=state)
    output = F.pad(output, (0, 0, 0, 0, 0, length - keep))
    for row, (after, moved) in enumerate(places):
        output[row, after] = following[row, moved]
    return output, state


def _inside_chunks(keys: Tensor, queries: Tensor, total: Tensor, beta: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """What each token of a chunk takes from those before it: attention, and the inverse that turns values into writes.

    keys, queries (chunks, B * Hk, C, Dk); total (chunks, B * Hv, C), the sums of log decay from the start of the chunk;
    beta the same shape. Both results are (chunks, B * Hv, C, C), lower triangular."""
    # exp(total_i - total_j) is what is left at i of what was written at j; above the diagonal it is 1, and masked below
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril_().exp_()
    overlap = _per_value_head(keys @ keys.transpose(-1, -2), group) * between
    system = overlap.mul_(beta.unsqueeze(-1)).tril_(-1)
    attention = between.mul_(_per_value_head(queries @ keys.transpose(-1, -2), group)).tril_()
    return attention, _invert_unit_lower(system)


def chunk_shape(length: int) -> tuple[int, int]:
    """The number of chunks that cover a row, and their tokens: the fewest chunks, with the least padding in them."""
    num_chunks = max(1, -(-length // CHUNK))
    tokens = -(-length // num_chunks)
    return num_chunks, max(TILE, -(-tokens // TILE) * TILE)


def _chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, num_chunks: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cut rows into chunks, (num_chunks, B * heads, chunk, D), or without D for decay and beta.

    Returns unit keys, unit queries over sqrt(Dk), value times beta, decay and beta, in float32 at least. Each is
    written once, into its place. The padding of the last chunk is zero, so it changes no state."""
    compute = torch.promote_types(value.dtype, torch.float32)
    query_scale = _inverse_norm(query, compute).mul_(key.shape[-1] ** -0.5)
    beta = beta.to(compute)
    return (
        _place(key, _inverse_norm(key, compute), num_chunks, chunk, compute),
        _place(query, query_scale, num_chunks, chunk, compute),
        _place(value, beta.unsqueeze(-1), num_chunks, chunk, compute),
        _place(decay.unsqueeze(-1), None, num_chunks, chunk, compute).squeeze(-1),
        _place(beta.unsqueeze(-1), None, num_chunks, chunk, compute).squeeze(-1),
    )


def _place(x: Tensor, scale: Tensor | None, num_chunks: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """x (B, T, H, D) times scale (B, T, H, 1), as (num_chunks, B * H, chunk, D), with zeros after the rows' ends."""
    batch, length, heads, dim = x.shape
    placed = torch.empty(num_chunks, batch, heads, chunk, dim, dtype=dtype, device=x.device)
    for i in range(num_chunks):
        part = slice(i * chunk, min(length, (i + 1) * chunk))
        rows = placed[i, :, :, : part.stop - part.start]
        if scale is None:
            rows.copy_(x[:, part].transpose(1, 2))
        else:
            torch.mul(x[:, part].transpose(1, 2), scale[:, part].transpose(1, 2), out=rows)
        placed[i, :, :, part.stop - part.start :].zero_()
    return placed.view(num_chunks, batch * heads, chunk, dim)


def _inverse_norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(sum of squares + eps) over the last dimension, kept as a dimension of size 1."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return norm.square_().add(L2_EPS).rsqrt_()


def _per_value_head(x: Tensor, group: int) -> Tensor:
    """(chunks, B * Hk, ...) repeated so that each key head stands before each of its value heads."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _invert_unit_lower(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular (..., n, n), by halves.

    [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]. Triangles of up to INVERSE_BASE rows are the finite series
    I - L + L^2 - ... = (I - L)(I + L^2)(I + L^4), where equal keys make terms no larger than about 20; at 16 rows
    they reach 3432, at 64 they overflow float32's digits."""
    size = lower.shape[-1]
    if size <= INVERSE_BASE or size % 2:
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
        inverse = eye - lower
        power, done = lower, 2
        while done < size:
            power = power @ power
            inverse = inverse @ (power + eye)
            done *= 2
        return inverse
    half = size // 2
    both = _invert_unit_lower(torch.stack((lower[..., :half, :half], lower[..., half:, half:])))
    inverse = lower.new_zeros(lower.shape)
    inverse[..., :half, :half] = both[0]
    inverse[..., half:, half:] = both[1]
    inverse[..., half:, :half] = (both[1] @ lower[..., half:, :half] @ both[0]).neg_()
    return inverse


def _gated_delta_rule_cuda(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, want_state: bool
) -> tuple[Tensor, Tensor | None]:
    """The chunked kernel of flash-linear-attention for dense rows. Without cu_seqlens it never reads on the host."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if state is not None:
        state = state.float().expand(value.shape[0], -1, -1, -1).contiguous()
    output, final = chunk_gated_delta_rule(
        query,
        key,
        value,
        g=decay.float(),
        beta=beta,
        initial_state=state,
        output_final_state=want_state,
        use_qk_l2norm_in_kernel=True,
    )
    return output, final
