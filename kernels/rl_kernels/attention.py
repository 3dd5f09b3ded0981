"""Attention on each row's true tokens, although the batch is padded.

Text is padded to the batch's longest for the row-wise operations, whose rows don't see each other. Here, and only here,
tokens do: so rows of equal length are attended together, without their padding, in one call a length. No padding token
ever enters a softmax or a sum, and no mask picks another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F

from rl_kernels.copies import joined, memory_order


@dataclass(frozen=True)
class Padding:
    """Where the rows of one sequence have padding: row b at tokens [ends[b], resumes), and nowhere else."""

    ends: tuple[int, ...]
    resumes: int

    @property
    def absent(self) -> bool:
        """No row has padding: one plain call serves all."""
        return all(end == self.resumes for end in self.ends)

    def rows_by_end(self) -> dict[int, list[int]]:
        """Where the padding begins -> the rows in which it begins there, in row order."""
        groups: dict[int, list[int]] = {}
        for row, end in enumerate(self.ends):
            groups.setdefault(end, []).append(row)
        return groups

    def keep(self, x: torch.Tensor, end: int) -> torch.Tensor:
        """x `[..., tokens, D]` of rows whose padding begins at `end`, without it."""
        if end == self.resumes:
            return x
        if self.resumes == x.shape[-2]:
            return x[..., :end, :]
        return joined([x[..., :end, :], x[..., self.resumes :, :]], dim=-2)

    def restore(self, x: torch.Tensor, end: int) -> torch.Tensor:
        """`keep` undone: zeros where the padding was."""
        short = self.resumes - end
        if short == 0:
            return x
        padding = x.new_zeros(()).expand(*x.shape[:-2], short, x.shape[-1])
        return joined([x[..., :end, :], padding, x[..., end:, :]], dim=-2)


@dataclass(frozen=True)
class AttentionPlan:
    """Which tokens of a joint text-and-image sequence are real, row by row.

    A joint sequence has `padded_text` text tokens and `image_tokens` image tokens, text first or image first; row b's
    real text is its first `text_lengths[b]` tokens. Sequences of another length (an image-only attention) are left
    alone, but for one that a transformer marks as padded by a mask of its own: then text alone is known as well.

    In a cross-attention, all image tokens attend to the text. Whoever pads texts of several lengths for one leaves them
    another number of tokens than the image's, which would look like the image alone.
    """

    text_lengths: tuple[int, ...]
    padded_text: int
    image_tokens: int
    text_first: bool

    @cached_property
    def joint(self) -> Padding:
        """The padding of a joint sequence."""
        if self.text_first:
            return Padding(self.text_lengths, self.padded_text)
        return Padding(tuple(self.image_tokens + n for n in self.text_lengths), self.image_tokens + self.padded_text)

    def padding(self, tokens: int, rows: int, *, masked: bool) -> Padding | None:
        """The padding of a sequence of that many tokens in that many rows; None if the plan doesn't speak of it."""
        if rows != len(self.text_lengths):
            return None
        if tokens == self.padded_text + self.image_tokens:
            return self.joint
        return self.text if masked and tokens == self.padded_text else None

    @cached_property
    def text(self) -> Padding:
        """The padding of a sequence of text alone."""
        return Padding(self.text_lengths, self.padded_text)

    def crossing(self, query_tokens: int, key_tokens: int, rows: int) -> Padding | None:
        """The padding of the keys where image tokens attend to text; None if it is no such attention."""
        crosses = (query_tokens, key_tokens, rows) == (self.image_tokens, self.padded_text, len(self.text_lengths))
        return self.text if crosses else None


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

    Row b of the result has the same bits alone and beside rows of any other length; padding tokens get zeros. A mask
    `[B, 1, 1, tokens]` of booleans that hides the last tokens of some rows says what a plan says: it is read (which
    waits for the device) where no plan speaks of the sequence, and taken at the plan's word where one does. On a device
    whose library call depends on the batch, `per_sample` calls it once a row.
    """

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if per_sample and len(q) > 1 and mask is None:
            return torch.cat([attend(*(x[i : i + 1] for x in (q, k, v))) for i in range(len(q))])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    padding = _padding(query, key, plan, attn_mask)
    if padding is None:
        return attend(query, key, value, attn_mask)
    if padding.absent:
        return attend(query, key, value)
    crosses = query.shape[-2] != key.shape[-2]

    def attend_true(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, end: int) -> torch.Tensor:
        k, v = padding.keep(k, end), padding.keep(v, end)
        return attend(q, k, v) if crosses else padding.restore(attend(padding.keep(q, end), k, v), end)

    groups = padding.rows_by_end()
    if len(groups) == 1:
        (end,) = groups
        return attend_true(query, key, value, end)
    parts = [attend_true(_rows(query, rows), _rows(key, rows), _rows(value, rows), end) for end, rows in groups.items()]
    order = [row for of_length in groups.values() for row in of_length]
    return _rows(joined(parts, dim=0), sorted(range(len(order)), key=order.__getitem__))


def _rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Those rows of x, in its memory order; a view if they follow each other."""
    start, end = rows[0], rows[-1] + 1
    if list(rows) == list(range(start, end)):
        return x[start:end]
    order = memory_order(x)
    chosen = x.permute(order).index_select(order.index(0), _indices(tuple(rows), x.device))
    return chosen.permute(sorted(range(x.dim()), key=order.__getitem__))


def _padding(
    query: torch.Tensor, key: torch.Tensor, plan: AttentionPlan | None, attn_mask: torch.Tensor | None
) -> Padding | None:
    """What is known of the sequence's padding; None: it is attended as it is, under its mask."""
    rows, tokens = query.shape[0], query.shape[-2]
    if attn_mask is None:
        if plan is None:
            return None
        keys = key.shape[-2]
        return plan.padding(tokens, rows, masked=False) if keys == tokens else plan.crossing(tokens, keys, rows)
    hides_keys = attn_mask.dtype == torch.bool and attn_mask.shape == (rows, 1, 1, tokens)
    if not hides_keys or key.shape[-2] != tokens:
        return None
    planned = None if plan is None else plan.padding(tokens, rows, masked=True)
    return _read(attn_mask[:, 0, 0]) if planned is None else planned


def _read(mask: torch.Tensor) -> Padding | None:
    """The padding at the end of rows that a mask `[B, tokens]` says; None if it says anything else."""
    counts = mask.sum(dim=1)
    at_the_end = mask == (torch.arange(mask.shape[1], device=mask.device) < counts[:, None])
    ends = tuple(counts.tolist())
    return Padding(ends, mask.shape[1]) if bool(at_the_end.all()) and all(ends) else None


@lru_cache(maxsize=1024)
def _indices(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Row numbers on the device. Kept, so that a step doesn't wait for a copy from the host at every attention."""
    return torch.tensor(rows, device=device)
