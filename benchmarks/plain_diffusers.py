"""The baseline: a FlowGRPO-style rollout written on diffusers' public API alone, as a trainer would without a service.

Written from the formulas of Flow-SDE (arXiv:2505.05470), and meant to be as fast as such a loop gets without other
kernels: `torch.no_grad`, each prompt (and the negative one) encoded once a call and repeated for its group, both halves
of the guidance in one forward, one VAE decode for the whole batch, coefficients as Python numbers, and everything a
trainer needs kept: states, log-probs and pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Noise = Callable[[int, tuple[int, ...]], torch.Tensor]  # (step, shape) -> standard normal; step -1: the initial latent


@dataclass(frozen=True)
class PlainRollout:
    """pictures `[n, C, H, W]` fp32 in [0, 1] (None if not wanted), log_probs `[n, T]`, states `[n, T + 1, ...]`; on the
    CPU."""

    pictures: torch.Tensor | None
    log_probs: torch.Tensor
    states: torch.Tensor


def generator_noise(seed: int) -> Noise:
    """Noise as trainers draw it: from one generator, in the order in which it is asked for."""
    generator = torch.Generator().manual_seed(seed)
    return lambda step, shape: torch.randn(shape, generator=generator)


@torch.no_grad()
def plain_rollout(
    pipeline: Any,
    prompts: Sequence[str],
    *,
    group: int,
    steps: int,
    guidance_scale: float,
    noise_level: float,
    max_sequence_length: int,
    noise: Noise,
    decode: bool = True,
) -> PlainRollout:
    """Rolls out `group` samples of each prompt with a `StableDiffusion3Pipeline`, all in one batch."""
    text, pooled = _encoded(pipeline, prompts, group, max_sequence_length)
    transformer, scheduler = pipeline.transformer, pipeline.scheduler
    side = transformer.config.sample_size
    latents = noise(-1, (len(prompts) * group, transformer.config.in_channels, side, side)).to(transformer.device)
    scheduler.set_timesteps(steps, device=transformer.device)
    sigmas = scheduler.sigmas.tolist()
    states, log_probs = [latents], []
    for step, timestep in enumerate(scheduler.timesteps):
        velocity = transformer(
            hidden_states=torch.cat([latents] * 2).to(transformer.dtype),
            timestep=timestep.expand(2 * len(latents)),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        negative, positive = velocity.chunk(2)
        velocity = (negative + guidance_scale * (positive - negative)).float()
        drawn = noise(step, tuple(latents.shape)).to(latents.device)
        latents, log_prob = sde_step(latents, velocity, drawn, sigmas=sigmas, step=step, noise_level=noise_level)
        states.append(latents)
        log_probs.append(log_prob)
    pictures = _decoded(pipeline, latents).cpu() if decode else None
    return PlainRollout(pictures, torch.stack(log_probs, 1).cpu(), torch.stack(states, 1).cpu())


def sde_step(
    sample: torch.Tensor,
    velocity: torch.Tensor,
    noise: torch.Tensor,
    *,
    sigmas: Sequence[float],
    step: int,
    noise_level: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One Flow-SDE step of a batch: the next state, and its log-prob averaged over each sample's elements."""
    sigma, sigma_next = sigmas[step], sigmas[step + 1]
    dt = sigma_next - sigma
    std_dev_t = math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma))) * noise_level
    half_variance = std_dev_t**2 / (2 * sigma)
    mean = sample * (1 + half_variance * dt) + velocity * (1 + half_variance * (1 - sigma)) * dt
    deviation = std_dev_t * math.sqrt(-dt)
    prev_sample = mean + deviation * noise
    density = -((prev_sample - mean) ** 2) / (2 * deviation**2) - math.log(deviation) - 0.5 * math.log(2 * math.pi)
    return prev_sample, density.flatten(1).mean(1)


def _encoded(
    pipeline: Any, prompts: Sequence[str], group: int, max_sequence_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Text embeddings and pooled ones for both halves of the guidance, the negative half first."""
    positive, negative, pooled, negative_pooled = pipeline.encode_prompt(
        prompt=list(prompts),
        prompt_2=None,
        prompt_3=None,
        num_images_per_prompt=group,
        do_classifier_free_guidance=True,
        max_sequence_length=max_sequence_length,
    )
    return torch.cat([negative, positive]), torch.cat([negative_pooled, pooled])


def _decoded(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    vae = pipeline.vae
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    return (vae.decode(scaled, return_dict=False)[0].float() * 0.5 + 0.5).clamp(0, 1)
