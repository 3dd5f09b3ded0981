"""One iteration's training: rewards to advantages, then clipped updates of the policy on the tokens of the answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from .policy import Policy
from .rollouts import Answer, MismatchError
from .settings import Settings


@dataclass
class Trained:
    """What one iteration's training was. largest_gap, mean_gap: between the trainer's and the engine's log-probs of all
    tokens at equal weights, before the first optimizer step. taught: groups whose rewards differ."""

    tokens: int = 0
    largest_gap: float = 0.0
    mean_gap: float = 0.0
    taught: int = 0
    clipped: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)


def advantages_of(settings: Settings, iteration: int, rewards: torch.Tensor) -> torch.Tensor:
    """Rewards `[groups, members]`, after the control run's shuffle if that is asked for, minus their group's mean and
    divided by its deviation. A group of equal rewards teaches nothing: its advantages are exactly 0."""
    if settings.shuffle_rewards:
        generator = torch.Generator().manual_seed(settings.seed << 32 | iteration)
        rewards = rewards.flatten()[torch.randperm(rewards.numel(), generator=generator)].view_as(rewards)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    scaled = centred / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-4)
    equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal, 0.0, scaled)


def train(
    policy: Policy, settings: Settings, iteration: int, groups: Sequence[Sequence[Answer]], advantages: torch.Tensor
) -> Trained:
    """Updates the policy; each update sees its share of the groups that teach something once, in micro-batches.

    Raises:
        MismatchError: before the first optimizer step a log-prob was further from the engine's than the bound.
    """
    trained = Trained()
    _measure_gap(policy, settings, [answer for group in groups for answer in group], trained)
    rate = settings.lr * (1 - (iteration - 1) / settings.iterations if settings.decay else 1.0)
    policy.set_learning_rate(rate)
    teaching = [index for index, row in enumerate(advantages) if settings.kl > 0 or bool(row.any())]
    trained.taught = len(teaching)
    for share in torch.tensor(teaching, dtype=torch.long).tensor_split(settings.updates):
        if len(share):
            answers = [answer for index in share.tolist() for answer in groups[index]]
            _accumulate(policy, settings, answers, advantages[share].flatten(), trained)
            trained.gradient_norms.append(policy.step(settings.max_grad_norm))
    return trained


def clipped_loss(ratios: torch.Tensor, advantages: torch.Tensor, *, clip_range: float) -> torch.Tensor:
    """PPO's pessimistic loss of each token: -min(r A, clip(r, 1 - c, 1 + c) A)."""
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_range, 1 + clip_range) * advantages)


def reference_kl(log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of each token's KL to the reference: exp(d) - d - 1 for d = reference - policy, which is never
    negative and unbiased under the policy (Schulman, "Approximating KL divergence", 2020)."""
    difference = reference - log_probs
    return difference.exp() - difference - 1


@torch.no_grad()
def _measure_gap(policy: Policy, settings: Settings, answers: Sequence[Answer], trained: Trained) -> None:
    total = 0.0
    for part in _parts(len(answers), settings.micro_batch):
        log_probs, mask = policy.log_probs(answers[part], settings.temperature)
        gaps = (log_probs - _engine_log_probs(answers[part], mask)).abs() * mask
        trained.tokens += int(mask.sum())
        trained.largest_gap = max(trained.largest_gap, float(gaps.max()))
        total += float(gaps.sum())
    trained.mean_gap = total / trained.tokens
    if not trained.largest_gap <= settings.log_prob_bound:
        raise MismatchError(
            f"a token's log-prob is {trained.largest_gap:.2e} from the engine's, though both have the same weights; "
            f"at most {settings.log_prob_bound:g} is rounding"
        )


def _accumulate(
    policy: Policy, settings: Settings, answers: Sequence[Answer], advantages: torch.Tensor, trained: Trained
) -> None:
    """Adds the gradient of the mean loss over the answers' tokens."""
    tokens = sum(len(answer.output_ids) for answer in answers)
    for part in _parts(len(answers), settings.micro_batch):
        log_probs, mask = policy.log_probs(answers[part], settings.temperature)
        ratios = (log_probs - _engine_log_probs(answers[part], mask)).exp()
        loss = clipped_loss(ratios, advantages[part, None], clip_range=settings.clip_range)
        away = (ratios.detach() - 1).abs() > settings.clip_range
        trained.clipped.append(float((away * mask).sum() / mask.sum()))
        if policy.reference is not None:
            with torch.no_grad():
                base, _ = policy.log_probs(answers[part], settings.temperature, model=policy.reference)
            kl = reference_kl(log_probs, base)
            trained.kl.append(float((kl.detach() * mask).sum() / mask.sum()))
            loss = loss + settings.kl * kl
        ((loss * mask).sum() / tokens).backward()


def _engine_log_probs(answers: Sequence[Answer], mask: torch.Tensor) -> torch.Tensor:
    """What the engine said, padded as the trainer's."""
    padded = torch.zeros_like(mask)
    for i, answer in enumerate(answers):
        padded[i, : len(answer.log_probs)] = torch.tensor(answer.log_probs)
    return padded


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))
