"""Dance-SDE (DanceGRPO, arXiv:2505.07818): the Flow-SDE step with a constant deviation eta."""

from __future__ import annotations

import torch

from diffusion_rl.schedulers.base import RolloutSchedulerMixin, StepTerms, exact_sqrt
from diffusion_rl.schedulers.sde import sde_mean


class DanceSchedulerMixin(RolloutSchedulerMixin):
    """std_dev_t = eta at every sigma; finite at sigma = 1 as it stands."""

    step_kind = "dance"

    @staticmethod
    def std(
        sigma: torch.Tensor, sigma_next: torch.Tensor, sigma_max: torch.Tensor, noise_level: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        std_dev_t = torch.full_like(sigma, noise_level)
        return std_dev_t, std_dev_t * exact_sqrt(-1 * (sigma_next - sigma))

    @staticmethod
    def prev_sample_mean(
        sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms, previous_x0: torch.Tensor | None
    ) -> torch.Tensor:
        return sde_mean(sample, model_output, terms)
