"""Noise as a function of (sample seed, stream, step) and of nothing else: not of the batch, the group, other steps, or
what ran before.

Counter-based: Philox4x32-10 (Salmon et al., SC 2011) with the whole 64-bit seed as its key, and (element block, step,
stream) as its counter; Box-Muller in float64, rounded once to fp32. The integers are the same on every device; the
normals may differ between devices in the last bit of a float64 logarithm, which the rounding to fp32 all but hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_ROW = 256  # normals are made in rows of this many, so that every element takes the same code path in any batch


class NoiseStream(IntEnum):
    """What a sample's noise is for. Streams of one seed share no number."""

    INITIAL_LATENT = 0
    STEP = 1
    BRANCH = 2
    WINDOW = 3


def philox(key: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: key `[..., 2]` and counter `[..., 4]`, 32-bit words in int64 tensors; result `[..., 4]`."""
    k0, k1 = key.unbind(-1)
    c0, c1, c2, c3 = counter.unbind(-1)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack([c0, c1, c2, c3], dim=-1)


def random_words(
    seeds: Sequence[int], stream: NoiseStream, steps: Sequence[int], count: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """`[n, count]` 32-bit words (int64), one row for each of n (seed, step) pairs."""
    blocks = math.ceil(count / 4)
    shape = (len(seeds), blocks)
    words = torch.tensor([[s & _MASK, (s >> 32) & _MASK, step] for s, step in zip(seeds, steps, strict=True)])
    words = words.to(device).unsqueeze(1)
    key = (words[..., 0].expand(shape), words[..., 1].expand(shape))
    block = torch.arange(blocks, device=device).expand(shape)
    counter = (block, words[..., 2].expand(shape), torch.full_like(block, int(stream)), torch.zeros_like(block))
    return philox(torch.stack(key, -1), torch.stack(counter, -1)).reshape(len(seeds), -1)[:, :count]


def normal_noise(
    seeds: Sequence[int],
    stream: NoiseStream,
    steps: Sequence[int],
    shape: Sequence[int],
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Standard normal noise, fp32 `[n, *shape]`: row i is a function of (seeds[i], stream, steps[i]) alone."""
    count = math.prod(shape)
    padded = _ROW * math.ceil(count / _ROW)
    words = random_words(seeds, stream, steps, padded, device).reshape(len(seeds), -1, 2)
    uniform = (words.double() + 0.5) * 2.0**-32
    radius = torch.sqrt(-2.0 * torch.log(uniform[..., 0].contiguous()))
    angle = (2.0 * math.pi) * uniform[..., 1].contiguous()
    normals = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)
    return normals.reshape(len(seeds), padded)[:, :count].float().reshape(len(seeds), *shape)


def uniform_integer(seed: int, stream: NoiseStream, step: int, bound: int) -> int:
    """A whole number in `[0, bound)` drawn from (seed, stream, step)."""
    return int(random_words([seed], stream, [step], 1)[0, 0]) * bound >> 32
