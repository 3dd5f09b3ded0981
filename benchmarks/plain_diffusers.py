"""The baseline: a FlowGRPO-style rollout written on diffusers' public API alone, as a trainer would without a service.

Written from the formulas of Flow-SDE (arXiv:2505.05470), and meant to be as fast as such a loop gets without other
kernels: `torch.no_grad`, each prompt (and the negative one) encoded once a call and repeated for its group, one VAE
decode for the whole batch, coefficients as Python numbers, and everything a trainer needs kept: states, log-probs and
pictures. Both halves of the guidance run in one forward where their texts have one length (Stable Diffusion 3), else
one after the other, as in diffusers' own pipeline (Qwen-Image).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Noise = Callable[[int, tuple[int, ...]], torch.Tensor]  # (step, shape) -> standard normal; step -1: the initial latent


@dataclass(frozen=True)
class PlainRollout:
    """pictures `[n, C, H, W]` fp32 in [0, 1] (None if not wanted), log_probs `[n, T]`, states `[n, T + 1, ...]`; on the
    CPU."""

    pictures: torch.Tensor | None
    log_probs: torch.Tensor
    states: torch.Tensor


class PlainModel(Protocol):
    """A stock pipeline under the conditioning of a batch, as the loop sees it."""

    transformer: torch.nn.Module
    latents_shape: tuple[int, ...]  # of the batch, as the transformer takes it

    def schedule(self, steps: int) -> tuple[list[float], torch.Tensor]:
        """The sigmas `[T + 1]` and the timesteps `[T]`, the latter on the transformer's device."""

    def velocity(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """The guided velocity, fp32, of a whole batch at one timestep (a scalar tensor)."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The batch's pictures, fp32 `[n, C, H, W]` in [0, 1]."""


def generator_noise(seed: int) -> Noise:
    """Noise as trainers draw it: from one generator, in the order in which it is asked for."""
    generator = torch.Generator().manual_seed(seed)
    return lambda step, shape: torch.randn(shape, generator=generator)


def device_noise(seed: int, device: torch.device) -> Noise:
    """The same from a generator of the device, without a copy from the host."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda step, shape: torch.randn(shape, generator=generator, device=device)


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
    with torch.no_grad():
        text, pooled = _encoded(pipeline, prompts, group, max_sequence_length)
    side = pipeline.transformer.config.sample_size
    model = PlainSD3(pipeline, text, pooled, guidance_scale, (side, side))
    return roll_out(model, steps=steps, noise_level=noise_level, noise=noise, decode=decode)


@torch.no_grad()
def roll_out(model: PlainModel, *, steps: int, noise_level: float, noise: Noise, decode: bool = True) -> PlainRollout:
    """Rolls out the model's batch."""
    latents = noise(-1, model.latents_shape).to(model.transformer.device)
    sigmas, timesteps = model.schedule(steps)
    states, log_probs = [latents], []
    for step, timestep in enumerate(timesteps):
        velocity = model.velocity(latents, timestep)
        drawn = noise(step, tuple(latents.shape)).to(latents.device)
        latents, log_prob = sde_step(latents, velocity, drawn, sigmas=sigmas, step=step, noise_level=noise_level)
        states.append(latents)
        log_probs.append(log_prob)
    pictures = model.decode(latents).cpu() if decode else None
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


class PlainSD3:
    """A `StableDiffusion3Pipeline`. text `[2n, L, D]` and pooled `[2n, P]` have the negative half first; grid is the
    latent's height and width."""

    def __init__(
        self, pipeline: Any, text: torch.Tensor, pooled: torch.Tensor, guidance_scale: float, grid: tuple[int, int]
    ) -> None:
        self.transformer = pipeline.transformer
        self.latents_shape = (len(text) // 2, self.transformer.config.in_channels, *grid)
        self._pipeline, self._text, self._pooled, self._scale = pipeline, text, pooled, guidance_scale

    def schedule(self, steps: int) -> tuple[list[float], torch.Tensor]:
        scheduler = self._pipeline.scheduler
        scheduler.set_timesteps(steps, device=self.transformer.device)
        return scheduler.sigmas.tolist(), scheduler.timesteps

    def velocity(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        velocity = self.transformer(
            hidden_states=torch.cat([latents] * 2).to(self.transformer.dtype),
            timestep=timestep.expand(2 * len(latents)),
            encoder_hidden_states=self._text,
            pooled_projections=self._pooled,
            return_dict=False,
        )[0]
        negative, positive = velocity.chunk(2)
        return (negative + self._scale * (positive - negative)).float()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self._pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return (vae.decode(scaled, return_dict=False)[0].float() * 0.5 + 0.5).clamp(0, 1)


class PlainQwenImage:
    """A `QwenImagePipeline`. positive and negative `[n, L, D]`, each of its own length; size is the picture's height
    and width."""

    def __init__(
        self,
        pipeline: Any,
        positive: torch.Tensor,
        negative: torch.Tensor,
        guidance_scale: float,
        size: tuple[int, int],
    ) -> None:
        self.transformer = pipeline.transformer
        self._grid = tuple(pixels // (2 * pipeline.vae_scale_factor) for pixels in size)
        self.latents_shape = (len(positive), math.prod(self._grid), self.transformer.config.in_channels)
        self._pipeline, self._scale, self._size = pipeline, guidance_scale, size
        self._positive, self._negative = positive, negative

    def schedule(self, steps: int) -> tuple[list[float], torch.Tensor]:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        scheduler = self._pipeline.scheduler
        config, tokens = scheduler.config, math.prod(self._grid)
        names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        mu = calculate_shift(tokens, *(config[name] for name in names))
        sigmas = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=sigmas, mu=mu, device=self.transformer.device)
        return scheduler.sigmas.tolist(), scheduler.timesteps

    def velocity(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        given = latents.to(self.transformer.dtype)
        positive, negative = (self._forward(given, timestep, text) for text in (self._positive, self._negative))
        combined = negative + self._scale * (positive - negative)
        rescale = torch.norm(positive, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True)
        return (combined * rescale).float()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        pipeline, vae = self._pipeline, self._pipeline.vae
        grid = pipeline._unpack_latents(latents, *self._size, pipeline.vae_scale_factor).to(vae.dtype)
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1).to(grid)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (vae.decode(grid * std + mean, return_dict=False)[0][:, :, 0].float() * 0.5 + 0.5).clamp(0, 1)

    def _forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        velocity: torch.Tensor = self.transformer(
            hidden_states=latents,
            timestep=timestep.expand(len(latents)).to(latents.dtype) / 1000,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, *self._grid)]] * len(latents),
            return_dict=False,
        )[0]
        return velocity


def compiled_blocks(transformer: Any) -> Callable[[], AbstractContextManager[None]]:
    """A context inside which the transformer's blocks run through torch.compile (regional compilation, shapes fixed),
    each compiled at its first call. Outside they run as they did before."""
    blocks = list(transformer.transformer_blocks)
    eager = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block.compile(dynamic=False)
    compiled = [block._compiled_call_impl for block in blocks]

    def switch(implementations: list[Any]) -> None:
        for block, implementation in zip(blocks, implementations, strict=True):
            block._compiled_call_impl = implementation

    @contextmanager
    def inside() -> Iterator[None]:
        switch(compiled)
        try:
            yield
        finally:
            switch(eager)

    switch(eager)
    return inside


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
