"""One epoch's training: rewards to advantages, then clipped updates of the policy on the returned transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from diffusion_rl.rollout.replay import replay_step
from diffusion_rl.sample import RolloutSample
from diffusion_rl.training import (
    clipped_objective,
    gaussian_kl,
    group_advantages,
    importance_ratios,
    iteration_generator,
)

from .policy import Policy
from .rollouts import Plan
from .settings import Settings


class NotExactError(AssertionError):
    """An importance ratio was not exactly 1.0 though both sides had the same weights."""


@dataclass
class Trained:
    """What one epoch's training was. The ratios are those of before its first optimizer step, and of all its samples
    that the first step uses (with one update an epoch: of all)."""

    ratios: int = 0
    exactly_one: int = 0
    largest_gap: float = 0.0
    clipped: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)


def advantages_of(settings: Settings, plan: Plan, rewards: torch.Tensor) -> torch.Tensor:
    """Advantages `[groups, members]`, after the control run's shuffle if that is asked for."""
    if settings.shuffle_rewards:
        generator = iteration_generator(settings.seed, plan.epoch, "shuffle")
        rewards = torch.stack([row[torch.randperm(len(row), generator=generator)] for row in rewards])
    return group_advantages(rewards, scale=settings.advantage_scale)


def train(
    policy: Policy, settings: Settings, plan: Plan, groups: Sequence[Sequence[RolloutSample]], advantages: torch.Tensor
) -> Trained:
    """Updates the policy; each update sees its share of the groups once, in micro-batches.

    Raises:
        NotExactError: before the first optimizer step a ratio wasn't exactly 1.0 (not with an adapter that is merged
            on the other side: its gap is in `largest_gap`).
    """
    trained = Trained()
    policy.set_learning_rate(settings.lr * (1 - (plan.epoch - 1) / settings.epochs if settings.decay else 1.0))
    for number, share in enumerate(torch.arange(len(groups)).tensor_split(settings.updates)):
        samples = [sample for index in share.tolist() for sample in groups[index]]
        wanted = advantages[share].flatten()
        for start in range(0, len(samples), settings.micro_batch):
            part = slice(start, start + settings.micro_batch)
            weight = len(samples[part]) / len(samples) / len(plan.sde_steps)
            for step in plan.sde_steps:
                _accumulate(policy, settings, samples[part], wanted[part], (step, weight, number == 0), trained)
        if number == 0:
            _require_exactness(policy, plan, trained)
        trained.gradient_norms.append(policy.step(settings.max_grad_norm))
    return trained


def _accumulate(
    policy: Policy,
    settings: Settings,
    samples: Sequence[RolloutSample],
    advantages: torch.Tensor,
    place: tuple[int, float, bool],
    trained: Trained,
) -> None:
    """Adds the gradient of one step of some samples; `place` is the step, its weight, and whether nothing has changed
    since the rollout."""
    step, weight, unchanged = place
    scored = replay_step(policy.family, samples, step, transformer=policy.transformer)
    ratios = importance_ratios(scored.log_probs, samples, step)
    if unchanged:
        gaps = (ratios.detach() - 1).abs()
        trained.ratios += len(gaps)
        trained.exactly_one += int((gaps == 0).sum())
        trained.largest_gap = max(trained.largest_gap, float(gaps.max()))
    objective = clipped_objective(ratios, advantages, clip_range=settings.clip_range)
    trained.clipped.append(objective.clipped)
    loss = objective.loss
    if settings.kl > 0:
        with policy.reference() as reference, torch.no_grad():
            base = replay_step(policy.family, samples, step, transformer=reference)
        kl = gaussian_kl(scored.prev_sample_means, base.prev_sample_means, scored.noise_stds).mean()
        trained.kl.append(float(kl.detach()))
        loss = loss + settings.kl * kl
    (weight * loss).backward()


def _require_exactness(policy: Policy, plan: Plan, trained: Trained) -> None:
    if trained.exactly_one != trained.ratios and not (policy.lora and plan.epoch > 1):
        raise NotExactError(
            f"epoch {plan.epoch}: {trained.ratios - trained.exactly_one} of {trained.ratios} importance ratios are not "
            f"exactly 1.0 (largest gap {trained.largest_gap:.2e}), though the engine has the trainer's weights"
        )
