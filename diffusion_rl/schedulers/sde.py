"""Flow-SDE (FlowGRPO, arXiv:2505.05470): std_dev_t = eta sqrt(sigma / (1 - sigma))."""

from __future__ import annotations

import torch

from diffusion_rl.schedulers.base import RolloutSchedulerMixin, StepTerms, exact_sqrt, is_one


def sde_mean(sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms) -> torch.Tensor:
    """x (1 + q^2 dt / 2 sigma) + v (1 + q^2 (1 - sigma) / 2 sigma) dt, q = std_dev_t, in FlowGRPO's operation order."""
    sigma, std_dev_t = terms.sigma, terms.std_dev_t
    dt = terms.sigma_next - sigma
    v = model_output.float()
    return sample * (1 + std_dev_t**2 / (2 * sigma) * dt) + v * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt


class SDESchedulerMixin(RolloutSchedulerMixin):
    """Every step is stochastic, the last one included; sigma = 1 is read as `sigmas[1]` in the deviation."""

    step_kind = "sde"

    @staticmethod
    def std(
        sigma: torch.Tensor, sigma_next: torch.Tensor, sigma_max: torch.Tensor, noise_level: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        std_dev_t = exact_sqrt(sigma / (1 - torch.where(is_one(sigma), sigma_max, sigma))) * noise_level
        return std_dev_t, std_dev_t * exact_sqrt(-1 * (sigma_next - sigma))

    @staticmethod
    def prev_sample_mean(
        sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms, previous_x0: torch.Tensor | None
    ) -> torch.Tensor:
        return sde_mean(sample, model_output, terms)
