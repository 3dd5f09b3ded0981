"""From the projections of one or two streams to the query, key and value of one attention, in one pass a stream.

Rounding rule: RMS norm and rotation in fp32, one rounding at the end to the projection's dtype; values are copied. The
twin is `reference.joint_qkv`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from rl_kernels import reference
from rl_kernels.fused import (
    check_dtypes,
    check_shape,
    differentiable,
    launch,
    readable,
    runs_on_triton,
    seen_by_modes,
    units,
)

BLOCK = 4096  # elements of a token that one program holds at most


class Stream(NamedTuple):
    """The projections of one stream `[B, T, H * D]`, and what is done to its queries and keys, head by head.

    query_weight and key_weight `[D]` are those of an RMS norm; both None: no norm. rope: complex64 `[T, D / 2]`, the
    numbers that the pairs of neighbouring elements are multiplied by; None: no rotation.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_weight: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    rope: torch.Tensor | None = None


@seen_by_modes
def joint_qkv(
    first: Stream, second: Stream | None = None, *, head_dim: int, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Joint query, key and value, each `[B, H, T1 + T2, D]`: the first stream's tokens, then the second's, if any.

    They are views of `[B, T1 + T2, H, D]` memory: what attention makes of them has that order too, so that its heads
    are merged again without a copy. A token's bits depend on its own row, H, D and the dtype alone.

    Raises:
        ValueError: shapes that don't fit, several dtypes or devices, or a dtype other than bf16, fp16 and fp32.
    """
    for name, stream in (("first", first), ("second", second)):
        if stream is not None:
            _check(name, stream, head_dim, first)
    inputs = (*first, *(second or ()))
    twin = partial(_twin, head_dim=head_dim, eps=eps)
    powers_of_two = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    if not powers_of_two or not runs_on_triton(first.query, head_dim) or not first.query.shape[0]:
        query, key, value = twin(*inputs)
    else:
        query, key, value = differentiable(partial(_launch, head_dim=head_dim, eps=eps), twin, inputs)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _check(name: str, stream: Stream, head_dim: int, first: Stream) -> None:
    query, operation = stream.query, "joint_qkv"
    if query.dim() != 3 or query.shape[-1] % head_dim:
        raise ValueError(f"{operation} takes {name}.query [B, T, H * {head_dim}], got {tuple(query.shape)}")
    expected = (first.query.shape[0], query.shape[1], first.query.shape[2])
    for field in ("query", "key", "value"):
        check_shape(operation, f"{name}.{field}", getattr(stream, field), expected)
    for field in ("query_weight", "key_weight"):
        weight = getattr(stream, field)
        if weight is not None:
            check_shape(operation, f"{name}.{field}", weight, (head_dim,))
    if (stream.query_weight is None) != (stream.key_weight is None):
        raise ValueError(f"{operation} norms both the query and the key of {name}, or neither: one weight is missing")
    if stream.rope is not None:
        check_shape(operation, f"{name}.rope", stream.rope, (query.shape[1], head_dim // 2))
        if stream.rope.dtype != torch.complex64:
            raise ValueError(f"{operation} takes {name}.rope of dtype torch.complex64, got {stream.rope.dtype}")
    check_dtypes(operation, first=first.query, **{k: v for k, v in stream._asdict().items() if k != "rope"})


def _streams(inputs: tuple[torch.Tensor | None, ...]) -> list[Stream]:
    size = len(Stream._fields)
    return [Stream(*inputs[i : i + size]) for i in range(0, len(inputs), size)]  # type: ignore[arg-type]


def _twin(*inputs: torch.Tensor | None, head_dim: int, eps: float) -> tuple[torch.Tensor, ...]:
    """In `[B, T, H, D]`."""
    joint = reference.joint_qkv(*_streams(inputs), head_dim=head_dim, eps=eps)
    return tuple(x.transpose(1, 2) for x in joint)


def _launch(*inputs: torch.Tensor | None, head_dim: int, eps: float) -> tuple[torch.Tensor, ...]:
    """In `[B, T, H, D]`: one launch a stream, each writing its tokens' places."""
    streams = _streams(inputs)
    samples, _, width = streams[0].query.shape
    total = sum(s.query.shape[1] for s in streams)
    shape = (samples, total, width // head_dim, head_dim)
    joint = tuple(streams[0].query.new_empty(shape) for _ in range(3))
    start = 0
    for stream in streams:
        if stream.query.shape[1]:
            _launch_stream(stream, joint, start, eps=eps)
        start += stream.query.shape[1]
    return joint


def _launch_stream(stream: Stream, joint: tuple[torch.Tensor, ...], start: int, *, eps: float) -> None:
    from rl_kernels.jit.joint_qkv import joint_qkv as kernel

    samples, total, heads, head_dim = joint[0].shape
    heads_at_once = min(1 << (heads - 1).bit_length(), max(BLOCK // head_dim, 1))
    query, key, value = readable(stream.query), readable(stream.key), readable(stream.value)
    tokens = query.shape[1]
    norm, rope = stream.query_weight is not None, query
    weights = [query if w is None else readable(w) for w in (stream.query_weight, stream.key_weight)]
    if stream.rope is not None:
        rope = readable(torch.view_as_real(stream.rope.resolve_conj()).flatten(1))
    launch(
        kernel,
        (tokens, samples, -(-heads // heads_at_once)),
        *(query, key, value, *weights, rope, *joint, start, total),
        *(units(x, dimension) for x in (query, key, value) for dimension in (0, 1)),
        EPS=eps,
        WIDTH=heads * head_dim,
        HEADS=heads_at_once,
        HEAD_DIM=head_dim,
        NORM=norm,
        ROPE=stream.rope is not None,
        block=heads_at_once * head_dim,
    )
