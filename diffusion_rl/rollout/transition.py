"""One step of a batch whose samples stand at different steps, of different kinds: mean, noise, next state, log-prob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.rollout.queue import SampleState
from diffusion_rl.rollout.schedule import ODE
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.schedulers.base import StepTerms, log_prob
from rl_kernels.staging import to_device

_STORAGE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepGroup:
    """Samples of a batch whose step is computed by the same operations: mean, scoring, and rounding of the state."""

    kind: str
    no_const: bool
    storage: torch.dtype


def step_group(sample: SampleState, model_dtype: torch.dtype) -> StepGroup:
    """Which group a sample's next step belongs to. An ODE request's state has the model's dtype, as in diffusers."""
    schedule, params = sample.request.schedule, sample.request.params
    storage = model_dtype if schedule.ode_state else _STORAGE[params.rollout_latents_dtype]
    return StepGroup(schedule.mean_kinds[sample.step], params.rollout_log_prob_no_const, storage)


def advance(batch: Sequence[SampleState], model_outputs: torch.Tensor) -> None:
    """Takes each sample one step further, given its velocity `[n, ...]`, and records what was asked for.

    Within a group every operation is elementwise with the sample's own coefficients, or sums within a sample, so a
    sample's bits don't depend on its group.
    """
    groups: dict[StepGroup, list[int]] = {}
    for row, sample in enumerate(batch):
        groups.setdefault(step_group(sample, model_outputs.dtype), []).append(row)
    for group, rows in groups.items():
        # Not by a list as an index: it would be copied to the device, and waited for.
        outputs = model_outputs if len(rows) == len(batch) else torch.stack([model_outputs[r] for r in rows])
        _advance_group(group, [batch[r] for r in rows], outputs)


def _advance_group(group: StepGroup, samples: list[SampleState], model_outputs: torch.Tensor) -> None:
    columns = torch.stack([s.request.schedule.columns[s.step] for s in samples])
    terms = StepTerms.from_columns(to_device(columns, model_outputs.device))
    state = torch.stack([s.latents for s in samples]).float()
    step_kind = step_kinds.get(group.kind)
    previous_x0 = _previous_x0(samples) if step_kind.needs_previous_x0 else None
    mean, noise_std = step_kind.transition(state, model_outputs, terms, previous_x0)
    noise = _draw_noise(samples, tuple(mean.shape[1:]), model_outputs.device)
    prev_sample = mean if noise is None else mean + noise_std * noise
    latents = prev_sample.to(group.storage)
    prev_sample = latents.float()  # what is stored is what is scored, and what the next step reads
    log_probs = log_prob(prev_sample, mean, terms, no_const=group.no_const)
    x0 = state - terms.over(state).sigma * model_outputs.float() if _wants_x0(samples) else None
    for row, sample in enumerate(samples):
        stochastic = sample.request.schedule.kinds[sample.step] != ODE
        sample.recorder.record_step(
            sample.step,
            log_probs[row],
            noise[row] if noise is not None and stochastic else None,
            mean[row],
            model_outputs[row],
        )
        sample.step += 1
        sample.recorder.record_state(sample.step, prev_sample[row])
        sample.latents = latents[row] if sample.request.schedule.ode_state else prev_sample[row]
        sample.previous_x0 = None if x0 is None else x0[row]


def _draw_noise(samples: list[SampleState], shape: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    """Each sample's own noise of this step; None if no sample's step has variance."""
    if all(s.request.schedule.kinds[s.step] == ODE for s in samples):
        return None
    return normal_noise([s.seed for s in samples], NoiseStream.STEP, [s.step for s in samples], shape, device)


def round_to_storage(latents: torch.Tensor, params: RolloutParams) -> torch.Tensor:
    """An fp32 state, rounded to the dtype in which the request wants its states stored; fp32 again."""
    return latents.to(_STORAGE[params.rollout_latents_dtype]).float()


def _wants_x0(samples: list[SampleState]) -> bool:
    return any(s.request.params.affine_coefficients is not None for s in samples)


def _previous_x0(samples: list[SampleState]) -> torch.Tensor:
    return torch.stack([torch.zeros_like(s.latents) if s.previous_x0 is None else s.previous_x0 for s in samples])
