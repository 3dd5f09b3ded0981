"""What every operation of this package means, in plain torch: one function each, by the operation's name.

A twin computes in fp32 and rounds once, at the end, to its input's dtype. Tests compare each operation with its twin;
the fused operations also run on it where no kernel does, and take their gradients from it. A twin says nothing about
speed, and nothing about bits beyond its rounding rule.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from rl_kernels.attention import AttentionPlan
    from rl_kernels.grouped_linear import ExpertMatrices
    from rl_kernels.joint_qkv import Stream
    from rl_kernels.routing import Places

SHORTEST = 1e-12  # a vector that is normalised counts as at least so long, as `F.normalize` has it


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`."""
    product = x.float() @ weight.float().T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def gelu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`: GELU by its tanh approximation."""
    product = x.float() @ weight.float().T + bias.float()
    return F.gelu(product, approximate="tanh").to(x.dtype)


def grouped_linear(x: torch.Tensor, matrices: ExpertMatrices, places: Places) -> torch.Tensor:
    """x `[places, K]` in the order of places, result `[places, N]`, each at its place."""
    products = x.new_empty(len(x), matrices.weight.shape[1])
    products[places.order.long()] = torch.cat(_of_experts(x, matrices, places)).to(x.dtype)
    return products


def gated_grouped_linear(x: torch.Tensor, matrices: ExpertMatrices, places: Places) -> torch.Tensor:
    """x `[rows, K]`, result `[places, F]` in the order of places; products, silu and their product are rounded."""
    gathered = x[places.order.long() // places.each]
    gate, up = torch.cat(_of_experts(gathered, matrices, places)).to(x.dtype).chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype) * up


def _of_experts(x: torch.Tensor, matrices: ExpertMatrices, places: Places) -> list[torch.Tensor]:
    """The products in fp32 of each expert's rows, which stand one behind the other."""
    weight = matrices.weight.float()
    weight = weight if matrices.scales is None else weight * matrices.scales.unsqueeze(-1)
    parts = zip(x.float().split(places.counts.tolist()), weight, strict=True)
    return [part @ matrix.T for part, matrix in parts]


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, plan: AttentionPlan | None = None
) -> torch.Tensor:
    """`[B, heads, tokens, D]`: each row by itself over its real tokens; zeros at its padding."""
    rows = []
    for row, (q, k, v) in enumerate(zip(query.float(), key.float(), value.float(), strict=True)):
        real = torch.arange(q.shape[-2], device=q.device)
        if plan is not None and plan.padding(query.shape[-2], len(query), masked=False) is not None:
            padded, length = plan.padded_text, plan.text_lengths[row]
            text = real < padded if plan.text_first else real >= plan.image_tokens
            position = real if plan.text_first else real - plan.image_tokens
            real = real[~text | (position < length)]
        scores = q[:, real] @ k[:, real].transpose(-1, -2) / math.sqrt(q.shape[-1])
        out = torch.zeros_like(q)
        out[:, real] = torch.softmax(scores, dim=-1) @ v[:, real]
        rows.append(out)
    return torch.stack(rows).to(query.dtype)


def patch_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x `[B, C, H, W]`, weight `[N, C, p, q]`, result `[B, N, H // p, W // q]`."""
    wide = None if bias is None else bias.float()
    return F.conv2d(x.float(), weight.float(), wide, stride=tuple(weight.shape[2:])).to(x.dtype)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """x `[B, ...]`, result `[B]`, added up in fp64."""
    return x.double().flatten(1).sum(-1).to(x.dtype)


def row_mean(x: torch.Tensor) -> torch.Tensor:
    """x `[B, ...]`, result `[B]`, added up in fp64."""
    return x.double().flatten(1).mean(-1).to(x.dtype)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """x `[..., N]`, result fp32: x - log(sum(exp(x))) over the last dimension."""
    shifted = x.float() - x.float().amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, eps: float = 1e-6
) -> torch.Tensor:
    """x `[..., D]`: (x - mean) / sqrt(variance + eps) over D, times weight `[D]`, plus bias `[D]`."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return _affine(normed, weight, bias).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """x `[..., D]`: x / sqrt(mean of squares + eps) over D, times weight `[D]`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _affine(normed, weight, None).to(x.dtype)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    silu: bool = False,
) -> torch.Tensor:
    """x `[B, C, ...]`, weight and bias `[C]`: the library's group norm, then x * sigmoid(x) if `silu`."""
    normed = F.group_norm(x.float(), groups, _float(weight), _float(bias), eps)
    return (F.silu(normed) if silu else normed).to(x.dtype)


def channel_norm(
    x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None = None, *, silu: bool = False
) -> torch.Tensor:
    """x `[B, C, ...]`, gamma and bias `[C]`: x / |x| * sqrt(C) * gamma + bias over C, then x * sigmoid(x) if `silu`."""
    shape = (-1,) + (1,) * (x.dim() - 2)
    normed = F.normalize(x.float(), dim=1, eps=SHORTEST) * (x.shape[1] ** 0.5 * gamma.float().reshape(shape))
    normed = normed if bias is None else normed + bias.float().reshape(shape)
    return (F.silu(normed) if silu else normed).to(x.dtype)


def modulated_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
    """x `[B, T, D]`, scale and shift `[B, D]`: layer_norm(x) * (1 + scale) + shift."""
    normed = layer_norm(x.float(), eps=eps)
    return (normed * (1 + scale.float())[:, None] + shift.float()[:, None]).to(x.dtype)


def gated_residual(residual: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """residual and y `[B, T, D]`, gate `[B, D]`: residual + gate * y."""
    return (residual.float() + gate.float()[:, None] * y.float()).to(residual.dtype)


def gated_residual_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    *,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated residual, rounded, and the modulated norm of what was rounded."""
    total = gated_residual(residual, y, gate)
    return total, modulated_norm(total, scale, shift, eps=eps)


def rotate_pairs(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x `[B, T, H, D]`, rope complex `[T, D / 2]`: (x_2i + j x_2i+1) * rope_i, without a complex product."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = rope.real[:, None], rope.imag[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def joint_qkv(
    first: Stream, second: Stream | None = None, *, head_dim: int, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Joint query, key and value `[B, H, T, D]`: the first stream's tokens, then the second's."""

    def heads(x: torch.Tensor, weight: torch.Tensor | None, rope: torch.Tensor | None) -> torch.Tensor:
        wide = x.unflatten(-1, (-1, head_dim)).float()
        if weight is not None:
            wide = rms_norm(wide, weight.float(), eps=eps)
        if rope is not None:
            wide = rotate_pairs(wide, rope)
        return wide.to(x.dtype)

    streams = [first] if second is None else [first, second]
    query = torch.cat([heads(s.query, s.query_weight, s.rope) for s in streams], dim=1)
    key = torch.cat([heads(s.key, s.key_weight, s.rope) for s in streams], dim=1)
    value = torch.cat([heads(s.value, None, None) for s in streams], dim=1)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight.float()
    return x if bias is None else x + bias.float()


def _float(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float()
