"""A step whose coefficients stand in the request: multistep tails, and whatever is published next."""

from __future__ import annotations

import torch

from diffusion_rl.schedulers.base import RolloutSchedulerMixin, StepTerms


class AffineSchedulerMixin(RolloutSchedulerMixin):
    """mean = a x + b v + c x0_prev, deviation s, with (a, b, c, s) per step. x0_prev is 0 at the first step.

    Any Gaussian step is of this form (DDIM, DPM-Solver++ 2M, the stochastic kinds beside this file).
    """

    step_kind = "affine"
    needs_previous_x0 = True

    @staticmethod
    def std(
        sigma: torch.Tensor, sigma_next: torch.Tensor, sigma_max: torch.Tensor, noise_level: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(sigma), torch.zeros_like(sigma)

    @staticmethod
    def prev_sample_mean(
        sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms, previous_x0: torch.Tensor | None
    ) -> torch.Tensor:
        mean = terms.a * sample + terms.b * model_output.float()
        return mean if previous_x0 is None else mean + terms.c * previous_x0
