"""What all step kinds share: coefficients per step, the step itself, and its log-probability.

A step takes the state x at sigma to x' at sigma': x' = mean + noise_std * z. A step kind answers two questions about
it, `std` and `prev_sample_mean`; sampling, log-probs, recording and batching are then the same code for all kinds.

Coefficients are computed once for a whole schedule, on the CPU in fp32 (`StepTerms`, one row a step), in the operation
order of the formulas as published. A batch gathers one row a sample, so samples at different steps share a forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from rl_kernels import row_mean

SMALLEST_STD = 1e-18  # a smaller deviation has no variance that fp32 could hold: the step counts as deterministic
LOG_SQRT_TAU = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class StepTerms:
    """Numbers of a step, each a fp32 tensor `[n]`: of n steps of one schedule, or of one step for each of n samples.

    sigma, sigma_next: noise before and after the step.
    sigma_max: what stands for sigma where sigma is 1 (`sigmas[1]`).
    noise_level: eta.
    std_dev_t: the kind's own deviation, without the step length (as FlowGRPO reports it).
    noise_std: what multiplies the noise; 0 where the step has no variance.
    log_normalizer: log(noise_std) + log(sqrt(2 pi)); 0 where the step has no variance.
    a, b, c: an affine step's coefficients; 0 for the other kinds.
    """

    sigma: torch.Tensor
    sigma_next: torch.Tensor
    sigma_max: torch.Tensor
    noise_level: torch.Tensor
    std_dev_t: torch.Tensor
    noise_std: torch.Tensor
    log_normalizer: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    def columns(self) -> torch.Tensor:
        """All numbers as one matrix `[n, fields]`, so that one copy takes a batch's terms to a device."""
        return torch.stack([getattr(self, f.name) for f in fields(self)], dim=1)

    @classmethod
    def from_columns(cls, columns: torch.Tensor) -> StepTerms:
        """`columns` undone."""
        return cls(*columns.unbind(1))

    def over(self, sample: torch.Tensor) -> StepTerms:
        """The same numbers, shaped `[n, 1, ...]` so that they broadcast over `sample` `[n, ...]`."""
        shape = (-1,) + (1,) * (sample.dim() - 1)
        return replace(self, **{f.name: getattr(self, f.name).reshape(shape) for f in fields(self)})


@dataclass(frozen=True)
class StepOutput:
    """One step of n samples: next state, mean `[n, ...]`, and log-prob `[n]` (0 where the step has no variance)."""

    prev_sample: torch.Tensor
    prev_sample_mean: torch.Tensor
    log_prob: torch.Tensor


class RolloutSchedulerMixin:
    """Base of the step kinds. Mix it into a diffusers flow-matching scheduler, or use its static methods alone."""

    step_kind: ClassVar[str]
    needs_previous_x0: ClassVar[bool] = False

    @staticmethod
    def std(
        sigma: torch.Tensor, sigma_next: torch.Tensor, sigma_max: torch.Tensor, noise_level: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(std_dev_t, noise_std)`, each `[n]`, from fp32 sigmas `[n]`. noise_std is what multiplies the noise."""
        raise NotImplementedError

    @staticmethod
    def prev_sample_mean(
        sample: torch.Tensor, model_output: torch.Tensor, terms: StepTerms, previous_x0: torch.Tensor | None
    ) -> torch.Tensor:
        """Mean of the next state, fp32 `[n, ...]`, from the fp32 state, the velocity and `terms.over(sample)`."""
        raise NotImplementedError

    @classmethod
    def transition(
        cls,
        sample: torch.Tensor,
        model_output: torch.Tensor,
        terms: StepTerms,
        previous_x0: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The law of the next state: `(mean, noise_std)`, fp32, for `sample` and `model_output` `[n, ...]`.

        `terms` has one row a sample. previous_x0 `[n, ...]` is the prediction of the step before, for kinds that read
        it. Differentiable in `model_output`.
        """
        shaped = terms.over(sample)
        return cls.prev_sample_mean(sample.float(), model_output, shaped, previous_x0), shaped.noise_std

    @classmethod
    def schedule_terms(
        cls,
        sigmas: torch.Tensor,
        *,
        noise_level: float,
        coefficients: torch.Tensor | None = None,
    ) -> StepTerms:
        """Terms of all T steps of a schedule, from `sigmas` `[T + 1]` fp32 on the CPU; finite at every sigma.

        coefficients `[T, 4]` fp32 are an affine request's rows (a, b, c, s).
        """
        sigma, sigma_next = sigmas[:-1], sigmas[1:]
        sigma_max = sigmas[min(1, len(sigmas) - 1)].expand_as(sigma)
        std_dev_t, noise_std = cls.std(sigma, sigma_next, sigma_max, noise_level)
        abc = torch.zeros(len(sigma), 3)
        if coefficients is not None:
            abc, noise_std = coefficients[:, :3], coefficients[:, 3]
            std_dev_t = noise_std
        noise_std = torch.where(noise_std >= SMALLEST_STD, noise_std, 0.0)
        return StepTerms(
            sigma=sigma,
            sigma_next=sigma_next,
            sigma_max=sigma_max,
            noise_level=torch.full_like(sigma, noise_level),
            std_dev_t=std_dev_t,
            noise_std=noise_std,
            log_normalizer=_log_normalizer(noise_std),
            a=abc[:, 0],
            b=abc[:, 1],
            c=abc[:, 2],
        )

    def step_with_log_prob(
        self,
        model_output: torch.Tensor,
        step_index: int,
        sample: torch.Tensor,
        *,
        noise_level: float = 0.7,
        noise: torch.Tensor | None = None,
        prev_sample: torch.Tensor | None = None,
        no_const: bool = False,
    ) -> StepOutput:
        """One step of this scheduler's own schedule for a batch `[n, ...]`, all of whose samples stand at `step_index`.

        Draw `noise` yourself to sample, or pass the stored `prev_sample` to score it (differentiable in
        `model_output`). For use in a plain diffusers loop or a trainer.

        Raises:
            ValueError: neither, or both, of noise and prev_sample were given.
        """
        if (noise is None) == (prev_sample is None):
            raise ValueError("step_with_log_prob needs either `noise` (to sample) or `prev_sample` (to score)")
        sigmas: torch.Tensor = self.sigmas  # type: ignore[attr-defined]
        whole = self.schedule_terms(sigmas.cpu(), noise_level=noise_level).columns()
        terms = StepTerms.from_columns(whole[step_index].expand(len(sample), -1).to(sample.device))
        mean, noise_std = self.transition(sample, model_output, terms)
        if prev_sample is None:
            assert noise is not None
            prev_sample = mean + noise_std * noise
        return StepOutput(prev_sample, mean, log_prob(prev_sample, mean, terms, no_const=no_const))


def log_prob(
    prev_sample: torch.Tensor, prev_sample_mean: torch.Tensor, terms: StepTerms, *, no_const: bool
) -> torch.Tensor:
    """Log-probability `[n]` of the stored next state `[n, ...]`, averaged over its elements; fp32.

    The density of Normal(mean, noise_std) at prev_sample; with no_const `mean(-(x' - mean)^2)`. 0 for samples whose
    step has no variance. One fixed summation order (`row_mean`), so that a sample's value doesn't depend on the batch.
    The full latent is summed on whoever holds it: nothing here depends on ranks.
    """
    residual = -((prev_sample.detach() - prev_sample_mean) ** 2)
    stochastic = terms.noise_std > 0
    if no_const:
        return torch.where(stochastic, row_mean(residual), 0.0)
    variance = torch.where(stochastic, terms.over(prev_sample).noise_std.flatten() ** 2, 1.0)
    scaled = residual / (2 * variance).reshape((-1,) + (1,) * (residual.dim() - 1))
    return torch.where(stochastic, row_mean(scaled) - terms.log_normalizer, 0.0)


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded fp32 square root of fp32 numbers, as a GPU computes it.

    Some CPUs' vector libraries are off by one in the last place. Through float64 the result is right on all of them:
    a square root of a 24-bit number is never close enough to a rounding boundary for a float64 error to cross it.
    """
    return torch.sqrt(x.double()).float()


def is_one(sigma: torch.Tensor) -> torch.Tensor:
    """Where sigma counts as 1: some grids start at 0.999999, where 1 / (1 - sigma) would explode."""
    return torch.isclose(sigma, torch.ones_like(sigma), rtol=1e-5, atol=1e-8)


def _log_normalizer(noise_std: torch.Tensor) -> torch.Tensor:
    """log(s) + log(sqrt(2 pi)) of fp32 deviations, in float64, one number at a time: no vector width, no device."""
    return torch.tensor([math.log(s) + LOG_SQRT_TAU if s > 0 else 0.0 for s in noise_std.tolist()], dtype=torch.float32)
