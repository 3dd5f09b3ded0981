"""Attention on each row's true tokens, although the batch is padded.

Text is padded to the batch's longest for the row-wise operations, whose rows don't see each other. Here, and only here,
tokens do: so rows of equal length are attended together, without their padding, in one call a length. No padding token
ever enters a softmax or a sum, and no mask picks another kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class AttentionPlan:
    """Which tokens of a joint text-and-image sequence are real, row by row.

    A joint sequence has `padded_text` text tokens and `image_tokens` image tokens, text first or image first; row b's
    real text is its first `text_lengths[b]` tokens. Sequences of another length (an image-only attention) are left
    alone.
    """

    text_lengths: tuple[int, ...]
    padded_text: int
    image_tokens: int
    text_first: bool

    @property
    def uniform(self) -> bool:
        """No row has padding: one plain call serves all."""
        return all(n == self.padded_text for n in self.text_lengths)

    def covers(self, tokens: int, rows: int) -> bool:
        """Whether a sequence of that many tokens, in a batch of that many rows, is the one this plan speaks of."""
        return tokens == self.padded_text + self.image_tokens and rows == len(self.text_lengths)

    def rows_by_length(self) -> dict[int, list[int]]:
        """Text length -> the rows that have it, in row order."""
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(self.text_lengths):
            groups.setdefault(length, []).append(row)
        return groups

    def keep(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """x `[..., tokens, D]` without the padding of rows whose text has `length` tokens."""
        if length == self.padded_text:
            return x
        if self.text_first:
            return torch.cat([x[..., :length, :], x[..., self.padded_text :, :]], dim=-2)
        return x[..., : self.image_tokens + length, :]

    def restore(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """`keep` undone: zeros where the padding was."""
        short = self.padded_text - length
        if short == 0:
            return x
        if self.text_first:
            padding = x.new_zeros(*x.shape[:-2], short, x.shape[-1])
            return torch.cat([x[..., :length, :], padding, x[..., length:, :]], dim=-2)
        return F.pad(x, (0, 0, 0, short))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    plan: AttentionPlan | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    per_sample: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention over `[B, heads, tokens, D]`; with a plan, over each row's real tokens only.

    Row b of the result has the same bits alone and beside rows of any other length; padding tokens get zeros. On a
    device whose library call depends on the batch, `per_sample` calls it once a row.
    """

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if per_sample and len(q) > 1 and attn_mask is None:
            return torch.cat([attend(*(x[i : i + 1] for x in (q, k, v))) for i in range(len(q))])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    tokens = query.shape[-2]
    if plan is None or plan.uniform or attn_mask is not None or not plan.covers(tokens, query.shape[0]):
        return attend(query, key, value)
    groups = plan.rows_by_length()
    if len(groups) == 1:
        (length,) = groups
        return plan.restore(attend(*(plan.keep(x, length) for x in (query, key, value))), length)
    parts = []
    for length, rows in groups.items():
        chosen = _indices(tuple(rows), query.device)
        parts.append(plan.restore(attend(*(plan.keep(x[chosen], length) for x in (query, key, value))), length))
    order = [row for rows in groups.values() for row in rows]
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(parts)[_indices(tuple(back), query.device)]


@lru_cache(maxsize=1024)
def _indices(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Row numbers on the device. Kept, so that a step doesn't wait for a copy from the host at every attention."""
    return torch.tensor(rows, device=device)
