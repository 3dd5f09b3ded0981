"""The deterministic Euler step, as diffusers' FlowMatchEulerDiscreteScheduler takes it."""

from __future__ import annotations

import torch

from diffusion_rl.schedulers.base import RolloutSchedulerMixin, StepTerms


class ODESchedulerMixin(RolloutSchedulerMixin):
    """mean = x + dt v: factors and product in v's dtype, added in fp32. No variance, so no log-prob.

    That is what the scheduler's `x + dt * v` does for a half-precision v, because its dt is a tensor without dimensions
    and such a tensor takes the other factor's dtype. Here dt has one number a sample, so the rounding is spelt out.
    """

    step_kind = "ode"

    @staticmethod
    def std(
        sigma: torch.Tensor, sigma_next: torch.Tensor, sigma_max: torch.Tensor, noise_level: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(sigma), torch.zeros_like(sigma)

    @staticmethod
    def prev_sample_mean(
        sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms, previous_x0: torch.Tensor | None
    ) -> torch.Tensor:
        dt = (terms.sigma_next - terms.sigma).to(model_output.dtype)
        return sample + (dt * model_output).float()
