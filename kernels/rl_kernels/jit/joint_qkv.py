"""Queries, keys and values of one stream, normed, rotated, and written to their places in the joint sequence."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(16)


@triton.jit
def _headwise(
    source: tl.tensor,
    weight: tl.tensor,
    rope: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
) -> tl.tensor:
    """The heads of one token `[HEADS, HEAD_DIM]` in fp32: RMS norm over HEAD_DIM, then the rotation of pairs."""
    x = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    column = tl.arange(0, HEAD_DIM)
    if NORM:
        mean_square = tl.sum(x * x, axis=1) * (1.0 / HEAD_DIM)
        x = x * tl.rsqrt(mean_square + EPS)[:, None] * tl.load(weight + column).to(tl.float32)[None, :]
    if ROPE:
        cos, sin = tl.split(tl.reshape(tl.load(rope + column), [HEAD_DIM // 2, 2]))
        even, odd = tl.split(tl.reshape(x, [HEADS, HEAD_DIM // 2, 2]))
        turned = tl.join(
            even * cos[None, :] - odd * sin[None, :],
            even * sin[None, :] + odd * cos[None, :],
        )
        x = tl.reshape(turned, [HEADS, HEAD_DIM])
    return x


@triton.jit(
    do_not_specialize=[
        "start",
        "joint_tokens",
        "query_batch",
        "query_token",
        "key_batch",
        "key_token",
        "value_batch",
        "value_token",
    ]
)
def joint_qkv(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    rope: tl.tensor,
    joint_query: tl.tensor,
    joint_key: tl.tensor,
    joint_value: tl.tensor,
    start: tl.tensor,
    joint_tokens: tl.tensor,
    query_batch: tl.tensor,
    query_token: tl.tensor,
    key_batch: tl.tensor,
    key_token: tl.tensor,
    value_batch: tl.tensor,
    value_token: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
) -> None:
    """Program (t, b, g) does the g-th HEADS heads of token t of sample b. Strides come in units of UNIT elements."""
    token, sample = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    place = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    inside = place < WIDTH
    turn = rope + token * HEAD_DIM
    target = (sample * joint_tokens + start + token) * WIDTH + place
    source = query + (sample * query_batch + token * query_token) * UNIT
    q = _headwise(source, query_weight, turn, place, inside, EPS, HEADS, HEAD_DIM, NORM, ROPE)
    tl.store(joint_query + target, q.to(joint_query.dtype.element_ty), mask=inside)
    source = key + (sample * key_batch + token * key_token) * UNIT
    k = _headwise(source, key_weight, turn, place, inside, EPS, HEADS, HEAD_DIM, NORM, ROPE)
    tl.store(joint_key + target, k.to(joint_key.dtype.element_ty), mask=inside)
    source = value + (sample * value_batch + token * value_token) * UNIT
    v = tl.load(source + place, mask=inside, other=0.0)
    tl.store(joint_value + target, v, mask=inside)
