"""What one step of a returned trajectory was, by the step's index: s is the step from state s to state s + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffusion_rl.rollout.replay import stochastic_steps
from diffusion_rl.sample import RolloutSample
from engine_control.errors import InvalidRequestError


@dataclass(frozen=True)
class Transition:
    """One stochastic step of one sample.

    before, after: states s and s + 1, fp32, the transformer's own layout, without a batch axis.
    timestep: what the transformer was told at state s. sigma, next_sigma: of states s and s + 1.
    log_prob: the density of `after` that the rollout reported, averaged over the elements of a state.
    """

    step: int
    before: torch.Tensor
    after: torch.Tensor
    timestep: torch.Tensor
    sigma: float
    next_sigma: float
    log_prob: torch.Tensor


def transition_of(sample: RolloutSample, step: int) -> Transition:
    """The transition of step `step`, whichever states the sample came with.

    Raises:
        InvalidRequestError: the step has no variance, or one of its two states wasn't returned.
    """
    chances = stochastic_steps(sample)
    trajectory, log_probs = sample.dit_trajectory, sample.rollout_log_probs
    if step not in chances or log_probs is None:
        raise InvalidRequestError(
            f"step {step} has no variance", field="step", value=step, hint=f"The sample's stochastic steps: {chances}."
        )
    slots = {} if trajectory is None else {s: i for i, s in enumerate(trajectory.latent_step_indices.tolist())}
    if trajectory is None or step not in slots or step + 1 not in slots:
        raise InvalidRequestError(
            f"step {step} goes from state {step} to {step + 1}, and the sample came with states {sorted(slots)}",
            field="step",
            value=step,
            hint="Roll out with rollout_return_dit_trajectory, and both states in rollout_return_step_indices.",
        )
    return Transition(
        step=step,
        before=trajectory.latents[slots[step]],
        after=trajectory.latents[slots[step + 1]],
        timestep=trajectory.timestep(step),
        sigma=float(trajectory.sigmas[step]),
        next_sigma=float(trajectory.sigmas[step + 1]),
        log_prob=log_probs[step],
    )


def transitions_of(sample: RolloutSample) -> list[Transition]:
    """The transitions of all stochastic steps, in order."""
    return [transition_of(sample, step) for step in stochastic_steps(sample)]


def importance_ratios(log_probs: torch.Tensor, samples: Sequence[RolloutSample], step: int) -> torch.Tensor:
    """exp(new - old) `[n]` of step `step`, for the samples' log-probs `[n]` under other weights (see `replay_step`).

    Exactly 1.0, every one, if the weights are the rollout's and both sides ran in exact mode.
    """
    old = torch.stack([transition_of(sample, step).log_prob for sample in samples])
    return torch.exp(log_probs - old.to(log_probs.device))
