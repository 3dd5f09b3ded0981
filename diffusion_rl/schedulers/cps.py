"""Coefficients-preserving sampling (Flow-CPS, arXiv:2509.05952): the noise of x' keeps the schedule's own amount."""

from __future__ import annotations

import math

import torch

from diffusion_rl.schedulers.base import RolloutSchedulerMixin, StepTerms, exact_sqrt


class CPSSchedulerMixin(RolloutSchedulerMixin):
    """std = sigma' sin(eta pi / 2); the last step (sigma' = 0) has no variance. FlowGRPO scores it with `no_const`."""

    step_kind = "cps"

    @staticmethod
    def std(
        sigma: torch.Tensor, sigma_next: torch.Tensor, sigma_max: torch.Tensor, noise_level: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        std_dev_t = sigma_next * math.sin(noise_level * math.pi / 2)
        return std_dev_t, std_dev_t

    @staticmethod
    def prev_sample_mean(
        sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms, previous_x0: torch.Tensor | None
    ) -> torch.Tensor:
        v = model_output.float()
        x0 = sample - terms.sigma * v
        x1 = sample + v * (1 - terms.sigma)
        remaining = exact_sqrt((terms.sigma_next**2 - terms.std_dev_t**2).clamp(min=0))
        return x0 * (1 - terms.sigma_next) + x1 * remaining
