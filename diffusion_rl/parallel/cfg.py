"""Classifier-free guidance needs two velocities for each sample. How its forwards are arranged changes no bit.

Rows of a forward don't see each other, so the negative rows may share a forward with the positive ones, have one of
their own, or be computed by other ranks. What follows is the same arithmetic in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from diffusion_rl.batch import Conditioning, Rows
from engine_control.groups import RankGroup
from rl_kernels.staging import to_device

Forward = Callable[[Rows], torch.Tensor]
GuidancePass = Callable[[Forward, Rows, Rows], tuple[torch.Tensor, torch.Tensor]]
"""`(forward, negative rows, positive rows)` -> their velocities. Both rows hold the same latents, timesteps
and embedded guidance."""


def batched(forward: Forward, negative: Rows, positive: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of all rows, negative ones first: the fastest on one device."""
    together = replace(
        positive,
        latents=torch.cat([negative.latents, positive.latents]),
        timesteps=torch.cat([negative.timesteps, positive.timesteps]),
        prompts=negative.prompts + positive.prompts,
        guidance=None if positive.guidance is None else torch.cat([positive.guidance, positive.guidance]),
        images=negative.images + positive.images,
    )
    first, second = forward(together).chunk(2)
    return first, second


def split(forward: Forward, negative: Rows, positive: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Two forwards, one after the other: half the activations."""
    return forward(negative), forward(positive)


PASSES: dict[str, GuidancePass] = {"batched": batched, "split": split}


def guidance_scales(conditioning: Sequence[Conditioning]) -> torch.Tensor:
    """Each sample's scale `[n]`, fp32, on the CPU."""
    return torch.tensor([c.guidance_scale for c in conditioning], dtype=torch.float32)


def combine_guidance(negative: torch.Tensor, positive: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """n + s (p - n) with each sample's own scale `[n]` (fp32), rounded where a scalar product in the model's dtype
    would round."""
    scales = to_device(scales, negative.device).reshape((-1,) + (1,) * (negative.dim() - 1))
    return negative + (scales * (positive - negative).float()).to(negative.dtype)


NEGATIVE, POSITIVE = 0, 1  # a rank's place in the group says which rows are its own


@dataclass(frozen=True)
class CfgParallel:
    """A guidance pass over a group of two: afterwards both hold both velocities, and combine them in the same order."""

    group: RankGroup

    def __call__(self, forward: Forward, negative: Rows, positive: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        own = forward(negative if self.group.rank == NEGATIVE else positive)
        both = self.group.all_gather(own)
        return both[NEGATIVE], both[POSITIVE]
