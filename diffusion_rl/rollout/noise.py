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
from functools import cache

import torch

from rl_kernels.staging import to_device

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
    """Philox4x32-10: key `[..., 2]` and counter `[..., 4]`, 32-bit words in int64 tensors; result `[..., 4]`.

    Both halves of a round are one operation: `even` holds words 0 and 2 of the counter, `odd` words 1 and 3.
    """
    increments, multipliers = _constants(key.device)
    keys = ((key + increments.reshape(_ROUNDS, *(1,) * (key.dim() - 1), 2)) & _MASK).movedim(-1, 1)  # [rounds, 2, ...]
    multipliers = multipliers.reshape(-1, *(1,) * (counter.dim() - 1))
    even, odd = counter[..., 0::2].movedim(-1, 0), counter[..., 1::2].movedim(-1, 0)
    for key_of_round in keys.unbind(0):
        product = even.flip(0).mul_(multipliers)
        even = (product >> 32).bitwise_and_(_MASK).bitwise_xor_(odd).bitwise_xor_(key_of_round)
        odd = product.bitwise_and_(_MASK)
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`(increments, multipliers)` on the device: what each round adds to the key `[rounds, 2]`, and the multipliers of
    words 2 and 0 `[2]`. Kept, for a GPU would have to be waited for to get them."""
    increments = torch.arange(_ROUNDS)[:, None] * torch.tensor(_WEYL)
    return increments.to(device), torch.tensor(_MULTIPLIERS[::-1], device=device)


def random_words(
    seeds: Sequence[int], stream: NoiseStream, steps: Sequence[int], count: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """`[n, count]` 32-bit words (int64), one row for each of n (seed, step) pairs."""
    blocks = math.ceil(count / 4)
    words = torch.tensor([[s & _MASK, (s >> 32) & _MASK, step] for s, step in zip(seeds, steps, strict=True)])
    words = to_device(words, torch.device(device)).unsqueeze(1)
    counter = torch.zeros(4, len(seeds), blocks, dtype=torch.int64, device=device)
    counter[0] = torch.arange(blocks, device=device)
    counter[1] = words[..., 2]
    counter[2] = int(stream)
    return philox(words[..., :2], counter.movedim(0, -1)).reshape(len(seeds), -1)[:, :count]


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
