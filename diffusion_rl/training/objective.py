"""FlowGRPO's objective: advantages within a group, the clipped importance ratio, and the KL to a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine_control.errors import InvalidRequestError

Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class PolicyLoss:
    """loss: to be minimised, a scalar with gradients. clipped: the fraction of ratios whose gradient the clip took."""

    loss: torch.Tensor
    clipped: float


def group_advantages(rewards: torch.Tensor, *, scale: Scale = "group", eps: float = 1e-4) -> torch.Tensor:
    """Rewards `[groups, members]` minus their group's mean, divided by a standard deviation + eps.

    scale: `group`, each group's own deviation (GRPO); `batch`, one for all, that of the centred rewards, so that groups
    in which little differs count for little; `none`, nothing is divided. Deviations are the population's (over members,
    not members - 1). A group whose rewards are equal teaches nothing: its advantages are exactly 0.

    Raises:
        InvalidRequestError: the rewards aren't groups, a group has one member, or a reward isn't finite.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise InvalidRequestError(
            "rewards are [groups, members], two members or more",
            field="rewards",
            value=list(rewards.shape),
            hint="Roll out at least two samples a prompt; one has nothing to be compared with.",
        )
    if not bool(torch.isfinite(rewards).all()):
        raise InvalidRequestError("a reward is NaN or infinite", field="rewards", hint="Look at the reward function.")
    exact = rewards.double()
    centred = exact - exact.mean(dim=1, keepdim=True)
    equal = (exact == exact[:, :1]).all(dim=1, keepdim=True)  # a mean may be off by a rounding
    squares = {"group": centred.pow(2).mean(dim=1, keepdim=True), "batch": centred.pow(2).mean()}
    divisor = 1.0 if scale == "none" else squares[scale].sqrt() + eps
    return torch.where(equal, 0.0, centred / divisor).float()


def clipped_objective(ratios: torch.Tensor, advantages: torch.Tensor, *, clip_range: float) -> PolicyLoss:
    """PPO's pessimistic objective for ratios and advantages `[n]`: -mean(min(r A, clip(r, 1 - c, 1 + c) A)).

    Log-probs here are means over the D elements of a state, so that the ratio is the D-th root of the densities' ratio
    and its clip range is narrow (1e-4 in FlowGRPO). At ratios of 1 the gradient is plain REINFORCE's.
    """
    bounded = ratios.clamp(1 - clip_range, 1 + clip_range)
    loss = -torch.minimum(ratios * advantages, bounded * advantages).mean()
    away = ((ratios > 1 + clip_range) & (advantages > 0)) | ((ratios < 1 - clip_range) & (advantages < 0))
    return PolicyLoss(loss, float(away.float().mean()))


def gaussian_kl(means: torch.Tensor, reference_means: torch.Tensor, noise_stds: torch.Tensor) -> torch.Tensor:
    """KL `[n]` between two steps with means `[n, ...]` and the same deviations `[n]`, averaged over elements as
    log-probs are: mean((mean - reference)^2) / (2 std^2)."""
    squares = (means - reference_means).pow(2).flatten(1).mean(dim=1)
    return squares / (2 * noise_stds.pow(2))
