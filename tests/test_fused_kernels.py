"""Every operation is what its twin says; a fused one rounds once and has the gradients of the separate ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_kernels import AttentionPlan, attention, exact_mode, linear, patch_conv, reference, row_mean, row_sum
from rl_kernels.fused import differentiable
from rl_kernels.gated_residual import gated_residual, gated_residual_norm
from rl_kernels.gelu_linear import gelu_linear
from rl_kernels.joint_qkv import Stream, joint_qkv
from rl_kernels.mode import observing
from rl_kernels.modulated_norm import modulated_norm, modulated_norm_pair
from rl_kernels.norms import layer_norm, log_softmax, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def close(actual: torch.Tensor, expected: torch.Tensor, *, factor: float = 1.0) -> None:
    tolerance = factor * TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# --- the library operations and their twins -------------------------------------------------------------------------


@dtypes
def test_each_operation_of_the_library_is_what_its_twin_says(dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*s).to(dtype) for s in ((2, 7, 64), (64, 64), (64,)))
    close(linear(x, w / 8, b), reference.linear(x, w / 8, b), factor=4)
    close(gelu_linear(x, w / 8, b), reference.gelu_linear(x, w / 8, b), factor=4)
    close(layer_norm(x, w[0], b), reference.layer_norm(x, w[0], b), factor=4)
    close(rms_norm(x, w[0]), reference.rms_norm(x, w[0]))
    close(layer_norm(x), reference.layer_norm(x))
    close(rms_norm(x), reference.rms_norm(x))
    torch.testing.assert_close(log_softmax(x), reference.log_softmax(x), atol=1e-5, rtol=1e-5)
    picture, patch = torch.randn(2, 16, 8, 8).to(dtype), torch.randn(64, 16, 2, 2).to(dtype) / 8
    close(patch_conv(picture, patch, b), reference.patch_conv(picture, patch, b), factor=4)
    for ours, twin in ((row_sum, reference.row_sum), (row_mean, reference.row_mean)):
        torch.testing.assert_close(ours(x.float()), twin(x.float()), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("text_first", [True, False])
@dtypes
def test_attention_under_a_plan_is_what_its_twin_says(dtype: torch.dtype, text_first: bool) -> None:
    plan = AttentionPlan((3, 5, 1), 5, 8, text_first)
    q, k, v = (torch.randn(3, 2, 13, 16).to(dtype) for _ in range(3))
    ours, twin = attention(q, k, v, plan=plan), reference.attention(q, k, v, plan=plan)
    close(ours, twin, factor=2)
    assert torch.equal(ours == 0, twin == 0)
    close(attention(q, k, v), reference.attention(q, k, v), factor=2)


# --- the fused operations -------------------------------------------------------------------------------------------


def vectors(samples: int, width: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Chunks of one wide projection, as a block makes them: rows of it are contiguous, the chunks aren't."""
    return torch.randn(samples, count * width).to(dtype).chunk(count, dim=1)


def a_stream(tokens: int, *, norm: bool = True, rope: bool = False, dtype: torch.dtype = torch.float32) -> Stream:
    """Two samples of three heads of 16."""
    query, key, value = (torch.randn(2, tokens, 48).to(dtype) for _ in range(3))
    weights = (torch.randn(16).to(dtype), torch.randn(16).to(dtype)) if norm else (None, None)
    turns = torch.polar(torch.ones(tokens, 8), torch.randn(tokens, 8)) if rope else None
    return Stream(query, key, value, *weights, turns)


def eager_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


def eager_heads(x: torch.Tensor, weight: torch.Tensor | None, rope: torch.Tensor | None) -> torch.Tensor:
    heads = x.view(2, -1, 3, 16)
    if weight is not None:
        heads = F.rms_norm(heads, (16,), weight, 1e-6)
    if rope is not None:
        pairs = torch.view_as_complex(heads.reshape(*heads.shape[:-1], 8, 2))
        heads = torch.view_as_real(pairs * rope[:, None]).flatten(3)
    return heads.transpose(1, 2)


def eager_joint(*streams: Stream) -> tuple[torch.Tensor, ...]:
    parts = [
        (eager_heads(s.query, s.query_weight, s.rope), eager_heads(s.key, s.key_weight, s.rope), s.value)
        for s in streams
    ]
    values = [eager_heads(v, None, None) for _, _, v in parts]
    return torch.cat([p[0] for p in parts], 2), torch.cat([p[1] for p in parts], 2), torch.cat(values, 2)


def test_a_modulated_norm_is_the_norm_scaled_and_shifted() -> None:
    x, (scale, shift, scale_2, shift_2) = torch.randn(3, 5, 64), vectors(3, 64, 4)
    close(modulated_norm(x, scale, shift), eager_norm(x, scale, shift))
    one, two = modulated_norm_pair(x, (scale, shift), (scale_2, shift_2))
    assert torch.equal(one, modulated_norm(x, scale, shift))
    assert torch.equal(two, modulated_norm(x, scale_2, shift_2))


def test_a_gated_residual_goes_straight_on_to_the_next_norm() -> None:
    x, y, (gate, scale, shift) = torch.randn(3, 5, 64), torch.randn(3, 5, 64), vectors(3, 64, 3)
    assert torch.equal(gated_residual(x, y, gate), x + gate[:, None] * y)
    total, normed = gated_residual_norm(x, y, gate, scale=scale, shift=shift)
    assert torch.equal(total, gated_residual(x, y, gate))
    assert torch.equal(normed, modulated_norm(total, scale, shift))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_the_joint_query_key_and_value_are_the_streams_one_after_the_other(norm: bool, rope: bool) -> None:
    first, second = a_stream(4, norm=norm, rope=rope), a_stream(7, norm=norm, rope=rope)
    for streams in ((first, second), (second, first), (first,)):
        for ours, expected in zip(joint_qkv(*streams, head_dim=16), eager_joint(*streams), strict=True):
            close(ours, expected)
            assert ours.transpose(1, 2).is_contiguous()  # so that the heads of the result merge without a copy


@dtypes
def test_a_fused_operation_rounds_once(dtype: torch.dtype) -> None:
    x, y, (a, b, c) = torch.randn(2, 5, 64).to(dtype), torch.randn(2, 5, 64).to(dtype), vectors(2, 64, 3, dtype)
    wide = [v.float() for v in (x, y, a, b, c)]
    assert torch.equal(modulated_norm(x, a, b), modulated_norm(wide[0], wide[2], wide[3]).to(dtype))
    assert torch.equal(gated_residual(x, y, a), gated_residual(wide[0], wide[1], wide[2]).to(dtype))
    total, normed = gated_residual_norm(x, y, a, scale=b, shift=c)
    assert torch.equal(normed, modulated_norm(total.float(), wide[3], wide[4]).to(dtype))
    stream = a_stream(5, rope=True, dtype=dtype)
    widened = Stream(*(t.float() for t in stream[:5] if t is not None), stream.rope)
    for half, full in zip(joint_qkv(stream, head_dim=16), joint_qkv(widened, head_dim=16), strict=True):
        assert torch.equal(half, full.to(dtype))


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, (scale, shift) = torch.randn(2, 5, 64), vectors(2, 64, 2)
    with pytest.raises(ValueError, match=r"modulated_norm takes scale of shape \(2, 64\), got \(1, 64\)"):
        modulated_norm(x, scale[:1], shift)
    with pytest.raises(ValueError, match=r"modulated_norm takes tensors of one dtype .* torch.bfloat16"):
        modulated_norm(x, scale.bfloat16(), shift)
    with pytest.raises(ValueError, match=r"gated_residual takes y of shape \(2, 5, 64\), got \(2, 4, 64\)"):
        gated_residual(x, x[:, :4], scale)
    stream = a_stream(4)
    with pytest.raises(ValueError, match=r"joint_qkv takes first.query \[B, T, H \* 20\]"):
        joint_qkv(stream, head_dim=20)
    with pytest.raises(ValueError, match=r"of second, or neither: one weight is missing"):
        joint_qkv(stream, stream._replace(key_weight=None), head_dim=16)
    with pytest.raises(ValueError, match=r"second.rope of shape \(4, 8\), got \(3, 8\)"):
        joint_qkv(stream, stream._replace(rope=torch.ones(3, 8, dtype=torch.complex64)), head_dim=16)


def gradients(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of a weighted sum of all outputs, with respect to each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weighted = [(y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs]
    return list(torch.autograd.grad(torch.stack(weighted).sum(), leaves))


def eager_gated_norm(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor, *norm: torch.Tensor) -> tuple[Any, ...]:
    total = x + g[:, None] * y
    return total, eager_norm(total, *norm)


def test_gradients_are_those_of_the_separate_operations() -> None:
    x, y, (a, b, c, d) = torch.randn(2, 5, 64), torch.randn(2, 5, 64), vectors(2, 64, 4)
    first, second = a_stream(4, rope=True), a_stream(7)
    cases: list[tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]] = [
        (modulated_norm, eager_norm, [x, a, b]),
        (
            lambda x, a, b, c, d: modulated_norm_pair(x, (a, b), (c, d)),
            lambda x, a, b, c, d: (eager_norm(x, a, b), eager_norm(x, c, d)),
            [x, a, b, c, d],
        ),
        (gated_residual, lambda x, y, g: x + g[:, None] * y, [x, y, a]),
        (lambda x, y, g, s, t: gated_residual_norm(x, y, g, scale=s, shift=t), eager_gated_norm, [x, y, a, b, c]),
        (
            lambda *t: joint_qkv(Stream(*t[:5], first.rope), Stream(*t[5:]), head_dim=16),
            lambda *t: eager_joint(Stream(*t[:5], first.rope), Stream(*t[5:])),
            [t for t in (*first[:5], *second[:5]) if t is not None],
        ),
    ]
    for ours, eager, inputs in cases:
        for mine, theirs in zip(gradients(ours, inputs), gradients(eager, inputs), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_kernel_gets_its_twins_gradients_for_the_inputs_that_need_them() -> None:
    x, y, gate = (
        torch.randn(2, 5, 64, requires_grad=True),
        torch.randn(2, 5, 64),
        torch.randn(2, 64, requires_grad=True),
    )

    def twin(x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, absent: None) -> tuple[torch.Tensor, ...]:
        total = x + gate[:, None] * y
        return total, total.square()

    def kernel(*inputs: Any) -> tuple[torch.Tensor, ...]:  # as Triton: autograd can't see into it
        return tuple(z.detach().clone() for z in twin(*inputs))

    for used in (slice(0, 1), slice(1, 2), slice(0, 2)):
        outputs = differentiable(kernel, twin, (x, y, gate, None))[used]
        mine = torch.autograd.grad(sum(z.sum() for z in outputs), (x, gate))
        theirs = torch.autograd.grad(sum(z.sum() for z in twin(x, y, gate, None)[used]), (x, gate))
        assert all(torch.equal(m, t) for m, t in zip(mine, theirs, strict=True))
    with torch.no_grad():
        assert not differentiable(kernel, twin, (x, y, gate, None))[0].requires_grad


def test_certification_sees_a_fused_operation_as_one_call_with_its_arguments() -> None:
    seen: list[tuple[Any, Any]] = []
    x, (scale, shift) = torch.randn(2, 5, 64), vectors(2, 64, 2)
    with observing(lambda function, args, kwargs: seen.append((function, args))), exact_mode():
        modulated_norm(x, scale, shift)
        joint_qkv(a_stream(4), head_dim=16)
    names = [getattr(function, "__name__", "") for function, _ in seen]
    assert [n for n in names if n in ("modulated_norm", "joint_qkv")] == ["modulated_norm", "joint_qkv"]
    assert "layer_norm" not in names
    assert dict(seen)[modulated_norm][0] is x


def test_importing_the_kernels_never_loads_triton() -> None:
    root = Path(__file__).resolve().parents[1]
    code = (
        "import sys, rl_kernels, rl_kernels.modulated_norm, rl_kernels.gated_residual, rl_kernels.joint_qkv\n"
        "import diffusion_rl.models.fused_blocks\n"
        "assert 'rl_kernels.jit' not in sys.modules and 'triton.language' not in sys.modules"
    )
    environment = {"PYTHONPATH": f"{root}:{root / 'kernels'}", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environment)
