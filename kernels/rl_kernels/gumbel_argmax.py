"""Draws from categorical distributions by Gumbel-max, with noise that is a function of (key, token) alone.

The largest of `log p + g`, with g standard Gumbel noise, is a draw from p (Maddison et al., 2014, "A* Sampling"). The
noise is counter-based: the halves of a 64-bit key of the row are mixed into two rounds of murmur3's 32-bit finaliser
over the token. So a row draws the same token alone and beside others.
"""

from __future__ import annotations

import torch

from rl_kernels.fused import UNIT, check_dtypes, launch, runs_on_triton, seen_by_modes

MASK = 0xFFFFFFFF
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 number that is
VECTOR = 64  # numbers; more than any CPU computes at once
ONE_THREADS = 32_768  # numbers that torch leaves to one thread
BLOCK = 4096  # GPU: tokens of a program


@seen_by_modes
def gumbel_argmax(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A draw from each row's softmax: scores fp32 `[N, V]` (-inf: never drawn), keys int64 `[N]`, result int64 `[N]`.

    Of equally large sums the lower token is taken. A GPU's logarithm rounds otherwise than a CPU's, so that the two may
    draw different tokens where two sums are nearly equal.

    Raises:
        ValueError: scores that aren't a matrix in fp32, or another number of keys.
    """
    check_dtypes("gumbel_argmax", scores=scores)
    if scores.dim() != 2 or scores.dtype != torch.float32 or keys.shape != scores.shape[:1]:
        raise ValueError(
            f"gumbel_argmax takes scores [N, V] in fp32 and keys [N], got {tuple(scores.shape)} in {scores.dtype} and "
            f"{tuple(keys.shape)}"
        )
    if not scores.numel() or not runs_on_triton(scores, UNIT):
        return (scores + gumbel_noise(keys, scores.shape[1])).argmax(-1)
    return _launch(scores.contiguous(), keys)


def gumbel_noise(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Standard Gumbel noise fp32 `[N, width]`: element (n, v) is a function of (keys[n], v).

    On a CPU rows are padded to whole vectors and computed in pieces that one thread takes, or of one row: at the ends
    of what a thread computes, the library's logarithm has other bits.
    """
    low, high = (keys & MASK)[:, None], (keys >> 32 & MASK)[:, None]
    whole = -(-width // VECTOR) * VECTOR
    tokens = torch.arange(whole, dtype=torch.int64, device=keys.device) * 0x9E3779B1 & MASK
    rows = len(keys) if keys.device.type != "cpu" else max(ONE_THREADS // whole, 1)
    found = [_noise(tokens, low[i : i + rows], high[i : i + rows]) for i in range(0, len(keys), rows)]
    return (found[0] if len(found) == 1 else torch.cat(found))[:, :width]


def _noise(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Of u in (0, 1) this is -log(-log(1 - u)): small u, which make large noise, have their full precision in fp32."""
    uniform = _finalised(_finalised(tokens ^ low) ^ high).add_(1).float().mul_(2.0**-32).clamp_max_(BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _finalised(x: torch.Tensor) -> torch.Tensor:
    """murmur3's fmix32 on 32 bits that are held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """The step of splitmix64 (Steele et al., 2014), of integers of 64 bits that wrap: int64, of x's shape."""
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The bits moved down, with zeros behind them."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _launch(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A program for each block of a row; the best of the blocks' bests is found afterwards."""
    from rl_kernels.jit.gumbel_argmax import gumbel_argmax as kernel

    rows, width = scores.shape
    blocks = -(-width // BLOCK)
    best = scores.new_empty(rows, blocks)
    tokens = torch.empty(rows, blocks, dtype=torch.int64, device=scores.device)
    launch(kernel, (rows, blocks), scores, keys.contiguous(), best, tokens, WIDTH=width, BLOCK=BLOCK, block=BLOCK)
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]
