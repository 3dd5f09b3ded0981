"""A request's schedule: its sigmas and timesteps, which step is of which kind, and every step's coefficients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_rl.batch import Size
from diffusion_rl.models import ModelFamily
from diffusion_rl.params import RolloutParams, window_range
from diffusion_rl.rollout.noise import NoiseStream, uniform_integer
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.schedulers.base import StepTerms
from engine_control.errors import InvalidRequestError

ODE = "ode"


@dataclass(frozen=True)
class Schedule:
    """T steps, computed once and never again.

    sigmas, timesteps: `[T + 1]` fp32 on the CPU, as diffusers computes them; both end with 0.
    columns: `[T, fields]`, the steps' `StepTerms`, zero deviation where a step has no variance.
    mean_kinds: the step kind whose formula gives the mean, for each step.
    kinds: what is reported: the step kind where the step has variance, else `ode`.
    transformers: the name of the transformer that computes it, for each step.
    ode_state: no step has variance and all are Euler steps: the state then has the model's dtype, as in diffusers.
    """

    sigmas: torch.Tensor
    timesteps: torch.Tensor
    columns: torch.Tensor
    mean_kinds: tuple[str, ...]
    kinds: tuple[str, ...]
    transformers: tuple[str, ...]

    @property
    def steps(self) -> int:
        return len(self.kinds)

    @property
    def ode_state(self) -> bool:
        return all(kind == ODE for kind in self.mean_kinds)

    @property
    def sigma_max(self) -> float:
        return float(self.sigmas[min(1, self.steps)])

    @property
    def first_stochastic_step(self) -> int:
        """Index of the first step with variance; T if there is none."""
        return next((i for i, kind in enumerate(self.kinds) if kind != ODE), self.steps)


def make_schedule(family: ModelFamily, params: RolloutParams, *, steps: int, size: Size, seed: int) -> Schedule:
    """The schedule of a request of that many steps and that size; `seed` draws a window's start, if any."""
    kind = step_kinds.get(params.rollout_sde_type if params.rollout else ODE)
    scheduler = family.scheduler(kind, params.flow_shift)
    sigmas, timesteps = family.schedule(scheduler, params, steps, size)
    stochastic = _stochastic_steps(params, steps, seed)
    rows = params.affine_coefficients
    noisy = kind.schedule_terms(
        sigmas,
        noise_level=params.rollout_noise_level,
        coefficients=None if rows is None else torch.tensor(rows, dtype=torch.float64).float(),
    )
    still = step_kinds.get(ODE).schedule_terms(sigmas, noise_level=0.0)
    level_is_zero = params.rollout_noise_level == 0 and rows is None
    mean_kinds = tuple(kind.step_kind if i in stochastic and not level_is_zero else ODE for i in range(steps))
    chosen = torch.tensor([k != ODE for k in mean_kinds])
    columns = torch.where(chosen[:, None], noisy.columns(), still.columns())
    if not columns.isfinite().all():
        raise InvalidRequestError(
            "the steps' coefficients leave the range of fp32",
            field="rollout_noise_level" if rows is None else "affine_coefficients",
            value=params.rollout_noise_level,
            hint="Use a smaller noise level, or sigmas that are further apart.",
        )
    has_variance = StepTerms.from_columns(columns).noise_std > 0
    kinds = tuple(k if v else ODE for k, v in zip(mean_kinds, has_variance.tolist(), strict=True))
    return Schedule(sigmas, timesteps, columns, mean_kinds, kinds, family.step_transformers(timesteps[:-1]))


def replayed_columns(
    sigmas: torch.Tensor,
    *,
    sde_type: str,
    noise_level: float,
    coefficients: tuple[tuple[float, float, float, float], ...] | None,
) -> torch.Tensor:
    """The columns of a finished sample's schedule, from what it returned; exact at its stochastic steps, which replay
    scores."""
    rows = None if coefficients is None else torch.tensor(coefficients, dtype=torch.float64).float()
    return step_kinds.get(sde_type).schedule_terms(sigmas, noise_level=noise_level, coefficients=rows).columns()


def _stochastic_steps(params: RolloutParams, steps: int, seed: int) -> frozenset[int]:
    """The steps that the request makes stochastic: those it names, its window, or all."""
    if params.rollout_sde_step_indices is not None:
        return frozenset(params.rollout_sde_step_indices)
    if params.rollout_sde_window_size is None:
        return frozenset(range(steps))
    low, high = window_range(params, steps)
    size = params.rollout_sde_window_size
    start = low + uniform_integer(seed, NoiseStream.WINDOW, 0, high - low - size + 1)
    return frozenset(range(start, start + size))
