"""Each kernel against the formula it computes, written out plainly; the CUDA branches against fakes of theirs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onepass.forward import kernels


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much where the cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def distance(ours: Tensor, expected: Tensor) -> float:
    assert ours.shape == expected.shape
    return ((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


# Gated delta rule


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is defined. Shapes as for kernels.gated_delta_rule."""
    group = v.shape[2] // k.shape[2]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=2) for x in (q / q.shape[-1] ** 0.5, k))
    state, outputs = state.clone(), []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        missing = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * missing)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state


def delta_inputs(batch: int, length: int, key_heads: int, value_heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, batch, length, key_heads, 16, dtype=dtype)
    v = torch.randn(batch, length, value_heads, 24, dtype=dtype)
    decay = -torch.rand(batch, length, value_heads, dtype=dtype) * 0.3
    return q, k, v, decay, torch.rand(batch, length, value_heads, dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 96, 128, 130, 200])
@pytest.mark.parametrize(("batch", "key_heads", "value_heads"), [(1, 1, 1), (2, 2, 6)])
@pytest.mark.parametrize("has_state", [False, True])
def test_chunks_compute_the_recurrence(length: int, batch: int, key_heads: int, value_heads: int, has_state: bool):
    inputs = delta_inputs(batch, length, key_heads, value_heads, torch.float64)
    state = torch.randn(batch, value_heads, 16, 24, dtype=torch.float64) * has_state
    expected, last = token_by_token(*inputs, state)
    output, final = kernels.gated_delta_rule(*inputs, state=state if has_state else None, want_state=True)
    assert final is not None
    assert distance(output, expected) < 1e-12
    assert distance(final, last) < 1e-12
    unwanted = kernels.gated_delta_rule(*inputs, state=state if has_state else None)
    assert unwanted[1] is None
    assert torch.equal(unwanted[0], output)


def test_float32_loses_nothing_to_equal_keys_that_never_decay():
    q, k, v, decay, beta = delta_inputs(1, 128, 1, 1, torch.float64)
    k = k[:, :1].expand(-1, 128, -1, -1)  # a repeated token: the triangle to invert is all ones
    expected, last = token_by_token(q, k, v, 0 * decay, 0 * beta + 1, torch.zeros(1, 1, 16, 24, dtype=torch.float64))
    output, final = kernels.gated_delta_rule(
        q.float(), k.float(), v.float(), 0 * decay.float(), 0 * beta.float() + 1, want_state=True
    )
    assert final is not None
    assert distance(output.double(), expected) < 1e-5
    assert distance(final.double(), last) < 1e-5


def test_a_decay_that_forgets_everything_leaves_finite_numbers():
    q, k, v, mild, beta = delta_inputs(1, 130, 2, 2, torch.float32)
    for decay in (mild - 200, torch.full_like(mild, -1e4), torch.where(torch.rand_like(mild) < 0.1, -1e4, 0.0)):
        expected, last = token_by_token(q, k, v, decay, beta, torch.zeros(1, 2, 16, 24))
        output, final = kernels.gated_delta_rule(q, k, v, decay, beta, want_state=True)
        assert final is not None
        assert distance(output, expected) < 1e-4
        assert distance(final, last) < 1e-4


def test_tokens_without_beta_and_decay_leave_the_state_as_it_was():
    inputs = delta_inputs(2, 100, 2, 2, torch.float64)
    real = (torch.arange(100) < 37).double()[None, :, None]
    _, final = kernels.gated_delta_rule(*inputs[:3], inputs[3] * real, inputs[4] * real, want_state=True)
    _, short = kernels.gated_delta_rule(*(x[:, :37] for x in inputs), want_state=True)
    assert final is not None
    assert short is not None
    assert distance(final, short) < 1e-12


def test_one_state_serves_all_rows_and_is_not_written_to():
    inputs, state = delta_inputs(3, 70, 2, 4, torch.float64), torch.randn(1, 4, 16, 24, dtype=torch.float64)
    before = state.clone()
    output, _ = kernels.gated_delta_rule(*inputs, state=state, want_state=True)
    expected, _ = kernels.gated_delta_rule(*inputs, state=state.repeat(3, 1, 1, 1))
    assert torch.equal(output, expected)
    assert torch.equal(state, before)


def test_bfloat16_rows_are_computed_in_float32_and_return_in_bfloat16():
    q, k, v, decay, beta = delta_inputs(1, 70, 2, 2, torch.float32)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    output, final = kernels.gated_delta_rule(q, k, v, decay, beta, want_state=True)
    expected, _ = kernels.gated_delta_rule(q.float(), k.float(), v.float(), decay, beta)
    assert final is not None
    assert (output.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(output, expected.bfloat16())


@given(st.integers(1, 100_000))
def test_chunks_cover_a_row_with_the_least_padding(length: int):
    num_chunks, chunk = kernels.chunk_shape(length)
    assert num_chunks == -(-length // kernels.CHUNK)
    assert chunk in range(kernels.TILE, kernels.CHUNK + 1, kernels.TILE)
    assert num_chunks * (chunk - kernels.TILE) < length <= num_chunks * chunk


@pytest.mark.parametrize("size", [1, 2, 8, 16, 32, 48, 64])
def test_a_unit_triangle_is_inverted(size: int):
    lower = torch.rand(3, 2, size, size, dtype=torch.float64).tril(-1)
    eye = torch.eye(size, dtype=torch.float64)
    assert ((eye + lower) @ kernels._invert_unit_lower(lower) - eye).abs().max() < 1e-9


# Convolution, norms, attention


def plain_conv(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    padded = torch.cat((before.expand(x.shape[0], -1, -1), x), dim=1).transpose(1, 2)
    return F.silu(F.conv1d(padded, weight[:, None], groups=weight.shape[0])).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 3, 50])
@pytest.mark.parametrize("kernel", [2, 4])
def test_the_convolution_continues_from_the_inputs_before(length: int, kernel: int):
    wide = torch.randn(2, length, 40)
    x, weight, before = wide[..., 3:27], torch.randn(24, kernel), torch.randn(2, kernel - 1, 24)
    zeros = torch.zeros(2, kernel - 1, 24)
    assert distance(kernels.causal_conv_silu(x, weight), plain_conv(x, weight, zeros)) < 1e-6
    assert distance(kernels.causal_conv_silu(x, weight, before), plain_conv(x, weight, before)) < 1e-6
    assert distance(kernels.causal_conv_silu(x, weight, before[:1]), plain_conv(x, weight, before[:1])) < 1e-6
    everything = torch.cat((before, x), dim=1)
    assert torch.equal(kernels.last_inputs(x, kernel, before), everything[:, 1 - kernel :])
    assert torch.equal(kernels.last_inputs(x, kernel), torch.cat((zeros, x), dim=1)[:, 1 - kernel :])


def test_the_last_inputs_of_a_padded_row_are_those_before_its_padding():
    x, before = torch.randn(3, 9, 5), torch.randn(3, 3, 5)
    last = kernels.last_inputs(x, 4, before, torch.tensor([9, 1, 5]))
    assert torch.equal(last[0], x[0, 6:9])
    assert torch.equal(last[1], torch.cat((before[1, 1:], x[1, :1])))
    assert torch.equal(last[2], x[2, 2:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_computed_in_float32(dtype: torch.dtype):
    x, gate, weight = torch.randn(5, 3, 16).to(dtype) * 50, torch.randn(5, 3, 16).to(dtype), torch.randn(16)
    wide = x.float()
    normed = weight * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = 1e-6 if dtype == torch.float32 else 5e-3
    assert distance(kernels.rms_norm(x, weight, 1e-6).float(), normed) < exact
    assert distance(kernels.gated_rms_norm(x, gate, weight, 1e-6).float(), normed * F.silu(gate.float())) < exact
    assert kernels.rms_norm(x, weight, 1e-6).dtype == kernels.gated_rms_norm(x, gate, weight, 1e-6).dtype == dtype


def test_rotation_turns_the_leading_dimensions_and_leaves_the_rest():
    x, weight, angles = torch.randn(2, 5, 3, 16), torch.randn(16), torch.randn(2, 5, 4)
    normed = kernels.rms_norm(x, weight, 1e-6)
    turned = kernels.norm_rotate(x, weight, angles.cos(), angles.sin(), 1e-6)
    complex_numbers = torch.complex(normed[..., :4], normed[..., 4:8]) * torch.exp(1j * angles[:, :, None])
    expected = torch.cat((complex_numbers.real, complex_numbers.imag, normed[..., 8:]), dim=-1)
    assert distance(turned, expected) < 1e-6


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_sees_what_the_mask_lets_it(kv_heads: int):
    q, (k, v) = torch.randn(2, 5, 6, 16), torch.randn(2, 2, kv_heads, 12, 16)
    mask = torch.randn(2, 1, 5, 12).masked_fill(torch.rand(2, 1, 5, 12) < 0.3, float("-inf"))
    wide_k, wide_v = (x.repeat_interleave(6 // kv_heads, dim=1) for x in (k, v))
    weights = (q.transpose(1, 2) @ wide_k.transpose(2, 3) / 4 + mask).softmax(-1)
    assert distance(kernels.attention(q, k, v, mask), (weights @ wide_v).transpose(1, 2)) < 1e-5
    causal = torch.full((1, 1, 5, 5), float("-inf")).triu(1)
    assert (
        distance(
            kernels.attention(q, k[:, :, :5], v[:, :, :5], None), kernels.attention(q, k[:, :, :5], v[:, :, :5], causal)
        )
        < 1e-5
    )
    assert kernels.attention(q[:, :0], k, v, mask).shape == (2, 0, 6, 16)


@pytest.mark.parametrize("tokens", [1, 3, 64, 300])
def test_packed_matrices_multiply_as_plain_ones_do(tokens: int):
    matrix, wide = torch.randn(40, 24), torch.randn(tokens, 50)
    packed, x, total = kernels.pack_matrix(matrix), wide[:, 5:29], torch.randn(tokens, 40)
    assert packed.is_mkldnn
    assert distance(kernels.linear(x, packed), x @ matrix.T) < 1e-6
    assert distance(kernels.linear(x[None], packed), (x @ matrix.T)[None]) < 1e-6
    for weight in (matrix, packed):
        sum_ = total.clone()
        assert kernels.add_linear_(sum_, x, weight) is sum_
        assert distance(sum_, total + x @ matrix.T) < 1e-6


def test_a_matrix_that_cannot_be_packed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch):
    double, matrix = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8)
    assert kernels.pack_matrix(double) is double
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert kernels.pack_matrix(matrix) is matrix


# The choice of kernels


def test_an_installed_flash_linear_attention_is_not_touched_without_a_gpu(tmp_path: Path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise RuntimeError('0 active drivers')\n")
    code = (
        "import torch, kernels\n"
        "q = torch.ones(1, 3, 1, 4)\n"
        "kernels.gated_delta_rule(q, q, q, -q[..., 0], q[..., 0])\n"
        "kernels.causal_conv_silu(torch.ones(1, 3, 4), torch.ones(4, 4))\n"
        "kernels.gated_rms_norm(q, q, torch.ones(4), 1e-6)\n"
        "try:\n    import fla\nexcept RuntimeError as err:\n    print(err)\n"
    )
    folder = Path(kernels.__file__).parent
    path = {"PYTHONPATH": f"{tmp_path}:{folder}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert done.stdout == "0 active drivers\n"


class FakeFla:
    """flash-linear-attention 0.6.0's three functions with its signatures, computed by our torch code."""

    def __init__(self) -> None:
        self.torch_rule = kernels.gated_delta_rule
        self.is_inside = False

    def rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        assert use_qk_l2norm_in_kernel
        assert scale is None  # 1 / sqrt(K)
        assert g.dtype == torch.float32
        assert initial_state is None or (initial_state.is_contiguous() and initial_state.shape[0] == q.shape[0])
        self.is_inside = True
        result = self.torch_rule(q, k, v, g, beta, state=initial_state, want_state=output_final_state)
        self.is_inside = False
        return result

    def conv(
        self, x: Tensor, weight: Tensor, bias: None = None, residual: None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, activation: str | None = None,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert activation == "silu"
        before = torch.zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
        if initial_state is not None:
            assert initial_state.shape == (x.shape[0], *weight.shape)
            before = initial_state[..., 1:].transpose(1, 2)
        return plain_conv(x, weight, before), None

    def norm(
        self, x: Tensor, g: Tensor, weight: Tensor, bias: None, activation: str = "swish", residual: None = None,
        prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        assert activation == "swish"
        return F.rms_norm(x, weight.shape, weight, eps) * F.silu(g)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeFla:
    """Every tensor says it is on CUDA, except inside the fakes."""
    fake = FakeFla()
    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": fake.rule},
        "fla.modules": {},
        "fla.modules.causal_conv1d": {"causal_conv1d": fake.conv},
        "fla.modules.norm": {},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": fake.norm},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: not fake.is_inside))
    return fake


def test_the_cuda_branches_compute_what_the_others_do(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    inputs, state = delta_inputs(2, 20, 2, 4, torch.float32), torch.randn(1, 4, 16, 24)
    x, weight, before = torch.randn(2, 20, 8), torch.randn(8, 4), torch.randn(1, 3, 8)
    q, (k, v), mask = torch.randn(2, 5, 6, 16), torch.randn(2, 2, 2, 12, 16), torch.randn(2, 1, 5, 12)
    calls = (
        lambda: kernels.gated_delta_rule(*inputs, state=state, want_state=True)[0],
        lambda: kernels.gated_delta_rule(*inputs, state=state, want_state=True)[1],
        lambda: kernels.gated_delta_rule(*inputs)[0],
        lambda: kernels.causal_conv_silu(x, weight),
        lambda: kernels.causal_conv_silu(x, weight, before),
        lambda: kernels.gated_rms_norm(x, 2 * x, weight[:, 0], 1e-6),
        lambda: kernels.rms_norm(x, weight[:, 0], 1e-6),
        lambda: kernels.attention(q, k, v, mask),
        lambda: kernels.attention(q, k[:, :, :5], v[:, :, :5], None),
    )
    expected = [call() for call in calls]
    request.getfixturevalue("fake_cuda")
    for call, plain in zip(calls, expected, strict=True):
        assert distance(call(), plain) < 1e-5
