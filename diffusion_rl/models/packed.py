"""What families have in common whose transformer takes squares of 2 x 2 latent pixels as tokens `[tokens, 4 C]`."""

from __future__ import annotations

import torch

from diffusion_rl.batch import Guidance
from diffusion_rl.models.base import ModelFamily, uniform_sigmas
from diffusion_rl.params import RolloutParams


class PackedLatentFamily(ModelFamily):
    """Text before image. Classifier-free guidance is `true_cfg_scale` and needs a negative prompt, as in diffusers:
    without one there is none."""

    text_first = True

    @property
    def size_multiple(self) -> int:
        return self.pipeline.vae_scale_factor * 2

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self._image_tokens(height, width), self.pipeline.transformer.config.in_channels

    def initial_noise_shape(self, height: int, width: int) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return self.pipeline.transformer.config.in_channels // 4, height // factor, width // factor

    def pack(self, noise: torch.Tensor) -> torch.Tensor:
        return self.pipeline._pack_latents(noise, *noise.shape)

    def unpack(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """`pack` undone, of the latents of a picture of that size."""
        return self.pipeline._unpack_latents(latents, height, width, self.pipeline.vae_scale_factor)

    def guidance(self, params: RolloutParams) -> Guidance:
        scale = self.defaults.guidance_scale if params.true_cfg_scale is None else params.true_cfg_scale
        negative = self.prompt(params, "negative_prompt")
        return Guidance(scale, negative) if scale > 1 and negative is not None else Guidance()

    def default_sigmas(self, steps: int) -> list[float] | None:
        return uniform_sigmas(steps)
