"""The trainer's half: re-scores returned trajectories under any weights, with autograd, by the rollout's own code.

At unchanged weights the log-probs are the rollout's, bit for bit, so that an importance ratio is exactly 1.0 before the
first optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from diffusion_rl.batch import DenoiseBatch
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.base import image_shapes
from diffusion_rl.models.compiled import refuse_inexact_replay
from diffusion_rl.models.offload import refuse_offloaded_gradients
from diffusion_rl.parallel.tensor import refuse_other_degree
from diffusion_rl.rollout.schedule import ODE, replayed_columns
from diffusion_rl.sample import DenoisingEnv, RolloutSample
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.schedulers.base import StepTerms, log_prob
from engine_control.errors import InvalidRequestError

Transformers: TypeAlias = torch.nn.Module | Mapping[str, torch.nn.Module] | None


@dataclass(frozen=True)
class ReplayStep:
    """One step of n samples re-scored: log_probs `[n]` and means `[n, ...]` carry gradients; noise_stds `[n]` don't."""

    step: int
    log_probs: torch.Tensor
    prev_sample_means: torch.Tensor
    model_outputs: torch.Tensor
    noise_stds: torch.Tensor


def stochastic_steps(sample: RolloutSample) -> list[int]:
    """The steps of a sample that have a log-prob."""
    return [i for i, kind in enumerate(sample.rollout_step_kinds) if kind != ODE]


def replay_step(
    family: ModelFamily,
    samples: Sequence[RolloutSample],
    step: int,
    *,
    transformer: Transformers = None,
) -> ReplayStep:
    """Re-scores step `step` of samples of one size and guidance mode, in one forward of the transformer that computed
    it.

    The samples need `rollout_return_dit_trajectory` (with states `step` and `step + 1`) and
    `rollout_return_denoising_env`. `transformer` is the trainer's (possibly wrapped) module, or its modules by their
    names in the pipeline, where that has two; None is the family's own.

    Raises:
        InvalidRequestError: something that is needed was not returned, the step has no variance, the rollout was
            compiled and this forward would have other bits, or the transformer's blocks are offloaded and gradients are
            recorded, or its weights are split over another number of ranks than the family's.
    """
    names = {s.transformer_of(step) for s in samples}
    module = _module(family, transformer, min(names))
    refuse_inexact_replay(family.runner, module)
    refuse_other_degree(family.tensor, module)
    refuse_offloaded_gradients(module or family.transformers[min(names)])
    states = [_states(s, step) for s in samples]
    kinds = {s.rollout_step_kinds[step] for s in samples}
    no_const = {s.log_prob_no_const for s in samples}
    shapes = {(s.size, image_shapes(_env(s)), _env(s).neg_cond_kwargs is None) for s in samples}
    if any(len(found) > 1 for found in (kinds, no_const, shapes, names)):
        raise InvalidRequestError(
            "samples that are replayed together must agree in size, pictures' sizes, guidance mode, step kind, "
            "transformer and log-prob form",
            field="samples",
            value=sorted(kinds),
            hint="Group them first; any grouping gives the same bits.",
        )
    kind = step_kinds.get(kinds.pop())
    device, dtype = family.device, family.dtype
    current = torch.stack([s[0] for s in states]).to(device)
    stored = torch.stack([s[1] for s in states]).to(device)
    columns = torch.stack([_columns(s, step) for s in samples]).to(device)
    terms = StepTerms.from_columns(columns)
    conditioning = tuple(
        family.conditioning_from_env(_env(s), s.guidance_scale_of(step), s.cfg_normalization or 0.0) for s in samples
    )
    timesteps = torch.stack([s.dit_trajectory.timestep(step) for s in samples if s.dit_trajectory is not None])
    size, name = samples[0].size, names.pop()
    batch = DenoiseBatch(current.to(dtype), timesteps.to(device), conditioning, *size, transformer=name)
    with torch.autocast(device.type, enabled=False):  # the caller's autocast would change the bits
        velocity = family.predict(batch, module)
    previous_x0 = torch.stack([_previous_x0(s, step) for s in samples]).to(device) if kind.needs_previous_x0 else None
    mean, noise_std = kind.transition(current, velocity, terms, previous_x0)
    return ReplayStep(
        step=step,
        log_probs=log_prob(stored, mean, terms, no_const=no_const.pop()),
        prev_sample_means=mean,
        model_outputs=velocity,
        noise_stds=noise_std.flatten(),
    )


def replay(
    family: ModelFamily,
    samples: Sequence[RolloutSample],
    *,
    transformer: Transformers = None,
    steps: Sequence[int] | None = None,
) -> torch.Tensor:
    """Log-probs `[n, len(steps)]` of n samples that share their stochastic steps; steps None: all of those.

    With gradients enabled the graph of all steps is held; for a smaller one call `replay_step` and `backward` a step at
    a time.
    """
    if not samples:
        raise InvalidRequestError("there is nothing to replay", field="samples", hint="Pass at least one sample.")
    chosen = stochastic_steps(samples[0]) if steps is None else list(steps)
    if not chosen:
        raise InvalidRequestError(
            "the samples have no stochastic step", field="steps", value=[], hint="Roll out with a stochastic step kind."
        )
    return torch.stack([replay_step(family, samples, s, transformer=transformer).log_probs for s in chosen], dim=1)


def _module(family: ModelFamily, transformer: Transformers, name: str) -> torch.nn.Module | None:
    """The trainer's module of that name; None: the family's own."""
    if not isinstance(transformer, Mapping):
        if transformer is not None and len(family.transformers) > 1:
            raise InvalidRequestError(
                f"which of the pipeline's {len(family.transformers)} transformers is it?",
                field="transformer",
                value=type(transformer).__name__,
                hint=f"Pass a mapping with the keys {', '.join(family.transformers)}.",
            )
        return transformer
    if name not in transformer:
        raise InvalidRequestError(
            f"the step is one of {name}, which was not given",
            field="transformer",
            value=sorted(transformer),
            hint=f"Pass a mapping with the keys {', '.join(family.transformers)}.",
        )
    return transformer[name]


def _states(sample: RolloutSample, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before the step and the one after it."""
    if not 0 <= step < len(sample.rollout_step_kinds) or sample.rollout_step_kinds[step] == ODE:
        raise InvalidRequestError(
            f"step {step} has no variance, so it has no log-prob",
            field="steps",
            value=step,
            hint=f"Stochastic steps of this sample: {stochastic_steps(sample)}.",
        )
    if sample.dit_trajectory is None:
        raise _missing("dit_trajectory", "rollout_return_dit_trajectory")
    slots = {state: slot for slot, state in enumerate(sample.dit_trajectory.latent_step_indices.tolist())}
    if step not in slots or step + 1 not in slots:
        raise InvalidRequestError(
            f"replaying step {step} needs states {step} and {step + 1}",
            field="rollout_return_step_indices",
            value=sorted(slots),
            hint="Return both states of every step that is trained on, or all of them.",
        )
    latents = sample.dit_trajectory.latents
    return latents[slots[step]], latents[slots[step + 1]]


def _columns(sample: RolloutSample, step: int) -> torch.Tensor:
    assert sample.dit_trajectory is not None
    columns = replayed_columns(
        sample.dit_trajectory.sigmas,
        sde_type=sample.sde_type,
        noise_level=sample.noise_level,
        coefficients=sample.affine_coefficients,
    )
    return columns[step]


def _previous_x0(sample: RolloutSample, step: int) -> torch.Tensor:
    """The prediction that the rollout made one step earlier, from its recorded model output."""
    current, _ = _states(sample, step)
    if step == 0 or sample.affine_coefficients is None or sample.affine_coefficients[step][2] == 0:
        return torch.zeros_like(current)
    debug, trajectory = sample.rollout_debug_tensors, sample.dit_trajectory
    assert trajectory is not None
    slots = trajectory.latent_step_indices.tolist()
    if debug is None or step - 1 not in slots:
        raise _missing("the step before (its model output and state)", "rollout_debug_mode")
    before = trajectory.latents[slots.index(step - 1)]
    return before - trajectory.sigmas[step - 1] * debug.rollout_model_outputs[step - 1]


def _env(sample: RolloutSample) -> DenoisingEnv:
    if sample.denoising_env is None:
        raise _missing("denoising_env", "rollout_return_denoising_env")
    return sample.denoising_env


def _missing(what: str, field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the sample came without {what}", field="samples", value=None, hint=f"Roll out with {field}=true."
    )
