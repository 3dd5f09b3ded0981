"""Which experts a row goes to, where its copies stand among those of the same expert, and the sum of what they made."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def choose_experts(
    scores: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program n does row n: EACH times the greatest probability that is left, of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < EXPERTS
    score = tl.load(scores + row * EXPERTS + index, mask=inside, other=-float("inf")).to(tl.float32)
    exponential = tl.exp(score - tl.max(score, axis=0))
    probability = tl.div_rn(exponential, tl.sum(exponential, axis=0))
    left = tl.where(inside, tl.where(probability == probability, probability, 2.0), -1.0)  # NaN comes first
    chosen = index < 0
    total = 0.0
    for _ in tl.static_range(EACH):
        best = tl.min(tl.where(left == tl.max(left, axis=0), index, BLOCK), axis=0)
        total += tl.sum(tl.where(index == best, probability, 0.0), axis=0)
        chosen = chosen | (index == best)
        left = tl.where(index == best, -1.0, left)
    weight = tl.div_rn(probability, tl.zeros_like(probability) + total) if NORMALISED else probability
    place = row * EACH + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(experts + place, index, mask=chosen)
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=chosen)


@triton.jit(do_not_specialize=["places"])
def sort_places(
    experts: tl.tensor, order: tl.tensor, counts: tl.tensor, places: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Program e counts expert e's places, and writes them in order behind those of the experts before."""
    own = tl.program_id(0)
    lower, same = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        expert = tl.load(experts + place, mask=place < places, other=1 << 30)
        lower += (expert < own).to(tl.int32)
        same += (expert == own).to(tl.int32)
    tl.store(counts + own, tl.sum(same, axis=0))
    end = tl.sum(lower, axis=0)
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        found = (tl.load(experts + place, mask=place < places, other=1 << 30) == own).to(tl.int32)
        tl.store(order + end + tl.cumsum(found, axis=0) - 1, place, mask=found == 1)
        end += tl.sum(found, axis=0)


@triton.jit
def add_experts(
    computed: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (n, b) does the b-th BLOCK elements of row n; each product and each sum is rounded to the dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    kind = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(EACH):
        weight = tl.load(weights + row * EACH + i).to(tl.float32)
        y = tl.load(computed + (row * EACH + i) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        weighted = (y * weight).to(kind).to(tl.float32)
        total = weighted if i == 0 else (total + weighted).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(kind), mask=inside)
