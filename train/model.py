"""The trained module: transformers' Qwen3.5 weights under a forward pass for quick training on a CPU, and the head.

The numbers are those of transformers' own forward (see check.py); the work it saves: no padding mask, one product for
all projections of a layer, a delta rule with few temporaries, and the last layer only at the positions read."""

from pathlib import Path

import torch
import torch.nn.functional as F
from data import IGNORED, PAD_MULTIPLE, Batch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
    Qwen3_5RMSNorm,
    apply_rotary_pos_emb,
)

CHUNK = PAD_MULTIPLE  # most prompts have 40 to 120 tokens, and transformers' 64 would pad them to twice that
HEAD_DIM = 128  # of the pointer


def build_config(vocab_size: int, pad_token_id: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=16384,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=True,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of unit lower triangular matrices (..., n, n); the diagonal and what is above it are not read."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, matrix: Tensor) -> Tensor:
        eye = torch.eye(matrix.shape[-1]).expand_as(matrix)
        inverse: Tensor = torch.linalg.solve_triangular(matrix, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        transposed = inverse.transpose(-1, -2)
        result: Tensor = -(transposed @ grad @ transposed).tril_(-1)
        return result


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The chunked gated delta rule, for as many key heads as value heads.

    `query`, `key`, `value`: (chunks, B, H, CHUNK, d), query and key normalised; `decay` (log, per token) and `beta`:
    (chunks, B, H, CHUNK, 1). Returns (chunks, B, H, CHUNK, d)."""
    decay = decay.cumsum(-2)
    pairwise = (decay - decay.transpose(-1, -2)).masked_fill(torch.ones(CHUNK, CHUNK).triu(1).bool(), -torch.inf).exp()
    key_t = key.transpose(-1, -2)
    inverse = UnitLowerInverse.apply((key @ key_t) * pairwise * beta) * beta.transpose(-1, -2)
    intra = (query @ key_t) * pairwise
    since_start, until_end = decay.exp(), (decay[..., -1:, :] - decay).exp()
    chunk_decay = since_start[..., -1:, :]

    parts = zip(query, key, key_t, value, inverse, intra, since_start, until_end, chunk_decay, strict=True)
    outputs, state = [], None
    for q, k, k_t, v, inv, within, since, until, whole in parts:
        if state is None:
            new = inv @ v
            outputs.append(within @ new)
            state = k_t @ (new * until)
        else:
            new = inv @ (v - (k @ state) * since)
            outputs.append(torch.addcmul(within @ new, q @ state, since))
            state = torch.addcmul(k_t @ (new * until), state, whole)
    return torch.stack(outputs)


def normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def rms_norm(norm: Qwen3_5RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], 1.0 + norm.weight, norm.eps)


def feed_forward(mlp: Qwen3_5MLP, x: Tensor) -> Tensor:
    gate, up = F.linear(x, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, mlp.down_proj.weight)


def delta_net(net: Qwen3_5GatedDeltaNet, x: Tensor) -> Tensor:
    """x: (B, T, hidden), T a multiple of CHUNK."""
    batch, length, _ = x.shape
    heads, dim, chunks = net.num_v_heads, net.head_v_dim, length // CHUNK
    weights = [net.in_proj_qkv.weight, net.in_proj_z.weight, net.in_proj_b.weight, net.in_proj_a.weight]
    sizes = [len(weight) for weight in weights]
    qkv, z, b, a = torch.split_with_sizes(F.linear(x, torch.cat(weights)), sizes, dim=-1)
    # As a channels-last 2-D convolution: half the time of the 1-D one
    padded = F.pad(qkv, (0, 0, net.conv_kernel_size - 1, 0)).transpose(1, 2)[:, :, None]
    qkv = F.silu(F.conv2d(padded, net.conv1d.weight[:, :, None], groups=net.conv_dim)[:, :, 0].transpose(1, 2))
    query, key, value = qkv.reshape(batch, chunks, CHUNK, 3, heads, dim).permute(3, 1, 0, 4, 2, 5).contiguous()
    decay = -net.A_log.exp() * F.softplus(a + net.dt_bias)
    decay, beta = (y.reshape(batch, chunks, CHUNK, heads, 1).permute(1, 0, 3, 2, 4) for y in (decay, b.sigmoid()))
    out = gated_delta_rule(normalise(query) * dim**-0.5, normalise(key), value, decay, beta)
    out = out.permute(1, 0, 3, 2, 4).reshape(batch, length, heads, dim)
    out = F.rms_norm(out, (dim,), net.norm.weight, net.norm.variance_epsilon).flatten(2)
    return F.linear(out * F.silu(z), net.out_proj.weight)


def attention_at(attention: Qwen3_5Attention, x: Tensor, reads: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Attention whose queries stand at `reads` (B, R) only. Returns (B, R, hidden)."""
    batch, num_reads = reads.shape
    dim, (cos, sin) = attention.head_dim, rope
    at_reads = x.gather(1, reads[..., None].expand(-1, -1, x.shape[-1]))
    query, gate = attention.q_proj(at_reads).view(batch, num_reads, -1, 2 * dim).chunk(2, dim=-1)
    query = rms_norm(attention.q_norm, query).transpose(1, 2)
    key = rms_norm(attention.k_norm, attention.k_proj(x).unflatten(-1, (-1, dim))).transpose(1, 2)
    value = attention.v_proj(x).unflatten(-1, (-1, dim)).transpose(1, 2)
    key, _ = apply_rotary_pos_emb(key, key, cos, sin)  # type: ignore[no-untyped-call]
    query, _ = apply_rotary_pos_emb(query, query, cos[0, reads], sin[0, reads])  # type: ignore[no-untyped-call]
    is_seen = torch.arange(x.shape[1]) <= reads[:, None, :, None]  # (B, 1, R, T)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=is_seen, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid(), attention.o_proj.weight)


class PointerModel(nn.Module):
    """A causal model and the two projections that score each option's position against the question's end."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.lm = Qwen3_5ForCausalLM(config)
        self.query = nn.Linear(config.hidden_size, HEAD_DIM, bias=False)
        self.key = nn.Linear(config.hidden_size, HEAD_DIM, bias=False)

    def hidden_states(self, input_ids: Tensor, reads: Tensor) -> Tensor:
        """The last hidden states at `reads`: (B, R, hidden). `input_ids` are padded to a multiple of CHUNK."""
        lm = self.lm.model
        x = lm.embed_tokens(input_ids)
        *layers, last = lm.layers
        for layer in layers:
            x = x + delta_net(layer.linear_attn, rms_norm(layer.input_layernorm, x))
            x = x + feed_forward(layer.mlp, rms_norm(layer.post_attention_layernorm, x))
        rope = lm.rotary_emb(x, torch.arange(x.shape[1])[None])
        out = attention_at(last.self_attn, rms_norm(last.input_layernorm, x), reads, rope)
        x = x.gather(1, reads[..., None].expand_as(out)) + out
        x = x + feed_forward(last.mlp, rms_norm(last.post_attention_layernorm, x))
        return rms_norm(lm.norm, x)

    def forward(self, batch: Batch) -> Tensor:
        """Returns scores of shape (Q, N), -inf where a question has fewer than N options."""
        hidden = self.hidden_states(batch.input_ids, batch.reads).flatten(0, 1)
        keys = self.key(hidden[batch.options.clamp(min=0)])  # (Q, N, k)
        queries = self.query(hidden[batch.ends])  # (Q, k)
        scores: Tensor = torch.einsum("qnk,qk->qn", keys, queries) * HEAD_DIM**-0.5
        return scores.masked_fill(batch.options == IGNORED, -torch.inf)


def save_model(model: PointerModel, model_dir: Path) -> None:
    """Writes config.json, model.safetensors (float16) and head.safetensors (float32)."""
    half = Qwen3_5ForCausalLM(model.lm.config).half()  # type: ignore[no-untyped-call]
    half.load_state_dict(model.lm.state_dict())
    half.save_pretrained(model_dir)
    (model_dir / "generation_config.json").unlink(missing_ok=True)  # it answers, it does not generate
    head = {"query.weight": model.query.weight.detach(), "key.weight": model.key.weight.detach()}
    save_file(head, model_dir / "head.safetensors")


def load_model(model_dir: Path) -> PointerModel:
    """Reads what save_model wrote, in float32."""
    lm = Qwen3_5ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PointerModel(lm.config)
    model.lm = lm
    model.load_state_dict(load_file(model_dir / "head.safetensors"), strict=False)
    return model.eval()
