"""What a transformer is asked to compute: samples under their conditioning, and the rows of one of its forwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PromptEmbeds:
    """One encoded prompt without a batch axis and without padding: embeddings `[L, D]`, and pooled `[P]` or None."""

    prompt_embeds: torch.Tensor
    pooled: torch.Tensor | None = None


@dataclass(frozen=True)
class Conditioning:
    """What one sample is denoised under. negative is None when there is no guidance (guidance_scale is then 1)."""

    positive: PromptEmbeds
    negative: PromptEmbeds | None
    guidance_scale: float


@dataclass(frozen=True)
class DenoiseBatch:
    """n samples of one size and one guidance mode, each at its own step.

    latents `[n, ...]` in the transformer's dtype, timesteps `[n]` fp32 on the scheduler's scale (0..1000).
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    conditioning: tuple[Conditioning, ...]
    height: int
    width: int


@dataclass(frozen=True)
class Rows:
    """What one forward of the transformer computes: latents `[r, ...]`, timesteps `[r]`, and a prompt for each row."""

    latents: torch.Tensor
    timesteps: torch.Tensor
    prompts: tuple[PromptEmbeds, ...]
    height: int
    width: int
