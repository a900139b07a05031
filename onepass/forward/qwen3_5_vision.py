"""The vision tower of Qwen3.5: patches of pictures to embeddings that stand in a prompt like those of words.

It owns the tower's architecture: what a configuration means, which tensors it needs, and the forward. All of it is
functions over dataclasses of tensors, without module state. What depends on a picture's size (interpolated positions,
rotary angles) is made once for each size, beside the forward. The forward reads no value on the host and has no shape
that depends on one, so a call can be captured in a CUDA graph. It knows nothing of files, pixels and prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.forward.loader import TensorReader, UnsupportedModel, WeightLoader

PREFIXES = ("model.visual.", "visual.")
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Spec:
    """The part of a Qwen3.5 vision configuration on which the forward depends."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    spatial_merge_size: int  # patches a side that become one token
    temporal_patch_size: int  # times that a picture's frame is repeated
    in_channels: int
    out_hidden_size: int
    num_position_embeddings: int  # of a square grid
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged(self) -> int:
        """Patches that become one token."""
        return self.spatial_merge_size**2

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Spec":
        """From config.json's vision_config. Raises UnsupportedModel, one line."""
        rope = config.get("rope_parameters") or {}
        if config.get("deepstack_visual_indexes"):
            raise UnsupportedModel("the vision tower feeds several layers (deepstack_visual_indexes)")
        if config.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
            raise UnsupportedModel(f"the vision tower's hidden_act is {config['hidden_act']!r}")
        if rope.get("rope_type", "axial") not in ("axial", "default"):
            raise UnsupportedModel(f"the vision tower's rope_type is {rope['rope_type']!r}")
        try:
            sizes = {field.name: config[field.name] for field in fields(cls)[:-1]}
        except KeyError as err:
            raise UnsupportedModel(f"vision_config does not say {err.args[0]}") from err
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise UnsupportedModel(f"vision_config: {name} {size!r} is not a whole number above zero")
        spec = cls(**sizes, rope_theta=float(rope.get("rope_theta", 10000.0)))
        if spec.hidden_size % spec.num_heads or spec.head_dim % 4:
            raise UnsupportedModel(f"vision_config: {spec.hidden_size} over {spec.num_heads} heads")
        if int(spec.num_position_embeddings**0.5) ** 2 != spec.num_position_embeddings or spec.in_channels != 3:
            raise UnsupportedModel("vision_config: positions must be a square, channels 3")
        return spec


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix and its bias, or a norm's scale and shift."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class BlockWeights:
    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True, slots=True)
class Weights:
    patch: Affine  # (H, channels * patch * patch): the frames are the same, so their weights are added up
    positions: Tensor  # (side, side, H) float32
    blocks: tuple[BlockWeights, ...]
    merge_norm: Affine
    merge_fc1: Affine
    merge_fc2: Affine

    @property
    def dtype(self) -> torch.dtype:
        return self.patch.weight.dtype


def has_weights(tensors: TensorReader) -> bool:
    return any(f"{prefix}patch_embed.proj.weight" in tensors.keys() for prefix in PREFIXES)  # noqa: SIM118


def load_weights(spec: Spec, tensors: TensorReader, device: torch.device, dtype: torch.dtype) -> Weights:
    """Read a checkpoint by name. Raises BadWeights."""
    loader = WeightLoader.of(tensors, device, dtype)
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}patch_embed.proj.weight" in loader.names), PREFIXES[0])

    def affine(name: str, *shape: int) -> Affine:
        return Affine(loader.cast(f"{prefix}{name}.weight", *shape), loader.cast(f"{prefix}{name}.bias", shape[0]))

    hidden, inner, merged = spec.hidden_size, spec.intermediate_size, spec.hidden_size * spec.merged
    side = int(spec.num_position_embeddings**0.5)
    kernel_shape = (hidden, spec.in_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    kernel = loader.read(f"{prefix}patch_embed.proj.weight", *kernel_shape)
    frames = kernel.to(loader.wide_dtype).sum(2).flatten(1)
    blocks = tuple(
        BlockWeights(
            norm1=affine(f"{name}norm1", hidden),
            qkv=affine(f"{name}attn.qkv", 3 * hidden, hidden),
            proj=affine(f"{name}attn.proj", hidden, hidden),
            norm2=affine(f"{name}norm2", hidden),
            fc1=affine(f"{name}mlp.linear_fc1", inner, hidden),
            fc2=affine(f"{name}mlp.linear_fc2", hidden, inner),
        )
        for name in (f"blocks.{i}." for i in range(spec.depth))
    )
    return Weights(
        patch=Affine(frames.to(device, dtype), loader.cast(f"{prefix}patch_embed.proj.bias", hidden)),
        positions=loader.read(f"{prefix}pos_embed.weight", side * side, hidden)
        .to(device, loader.wide_dtype)
        .view(side, side, hidden),
        blocks=blocks,
        merge_norm=affine("merger.norm", hidden),
        merge_fc1=affine("merger.linear_fc1", merged, merged),
        merge_fc2=affine("merger.linear_fc2", spec.out_hidden_size, merged),
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """The tables that all pictures of one size share. Patches are in the order in which they merge."""

    positions: Tensor  # (P, H), in the tower's dtype
    cos: Tensor  # (P, head_dim / 2) float32
    sin: Tensor


def make_grid(spec: Spec, weights: Weights, height: int, width: int) -> Grid:
    """The tables of pictures of height x width patches: learned positions, interpolated between the corners, and rotary
    angles."""
    side, merge = weights.positions.shape[0], spec.spatial_merge_size
    rows, columns = (_stretch(size, side, weights.positions) for size in (height, width))
    positions = torch.einsum("hs,stc,wt->hwc", rows, weights.positions, columns)
    device, dtype = positions.device, positions.dtype
    order = torch.arange(0, spec.head_dim // 2, 2, device=device, dtype=dtype) / (spec.head_dim // 2)
    frequencies = spec.rope_theta**-order
    turns = [torch.arange(size, device=device)[:, None] * frequencies for size in (height, width)]
    angles = torch.cat(
        (turns[0][:, None].expand(-1, width, -1), turns[1][None].expand(height, -1, -1)), dim=-1
    )  # (h, w, head_dim / 2)

    def in_merge_order(table: Tensor) -> Tensor:
        blocks = table.reshape(height // merge, merge, width // merge, merge, -1)
        return blocks.transpose(1, 2).reshape(height * width, -1)

    angles = in_merge_order(angles)
    return Grid(in_merge_order(positions).to(weights.dtype), angles.cos(), angles.sin())


def _stretch(size: int, side: int, like: Tensor) -> Tensor:
    """(size, side): the weights that interpolate `side` values linearly to `size`. The first and last values stay."""
    places = torch.linspace(0, side - 1, size, device=like.device, dtype=like.dtype)
    distance = (places[:, None] - torch.arange(side, device=like.device, dtype=like.dtype)).abs()
    return (1 - distance).clamp_(min=0)


def forward(
    spec: Spec,
    weights: Weights,
    patches: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor | None = None,
) -> Tensor:
    """Turn pictures of P patches each into (B, P / merged, out_hidden) embeddings.

    patches (B, P, channels * patch * patch), normalised. positions (B or 1, P, H), cos and sin (B or 1, P, half a head)
    are those of Grid. Pictures of different sizes are padded at the end with anything finite, and lengths (B,) says how
    many patches of each are real; the embeddings of these come first."""
    x = F.linear(patches.to(weights.dtype), weights.patch.weight, weights.patch.bias) + positions
    batch, num_patches, _ = x.shape
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    mask = None
    if lengths is not None:
        mask = (torch.arange(num_patches, device=x.device) < lengths[:, None])[:, None, None]
    for block in weights.blocks:
        qkv = _linear(_norm(x, block.norm1), block.qkv).view(batch, num_patches, 3, spec.num_heads, spec.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        x = x + _linear(mixed.transpose(1, 2).flatten(2), block.proj)
        x = x + _linear(F.gelu(_linear(_norm(x, block.norm2), block.fc1), approximate="tanh"), block.fc2)
    x = _norm(x, weights.merge_norm).view(batch, num_patches // spec.merged, -1)
    return _linear(F.gelu(_linear(x, weights.merge_fc1)), weights.merge_fc2)


def _linear(x: Tensor, affine: Affine) -> Tensor:
    return F.linear(x, affine.weight, affine.bias)


def _norm(x: Tensor, affine: Affine) -> Tensor:
    return F.layer_norm(x, affine.bias.shape, affine.weight, affine.bias, LAYER_NORM_EPS)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dimension i turns with dimension i + half. x (B, heads, P, D); cos, sin (B or 1, 1, P, D / 2) float32."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
