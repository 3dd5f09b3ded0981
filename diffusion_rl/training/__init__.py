"""A trainer's arithmetic: seeds, transitions by index, group-wise advantages, the clipped objective and its KL."""

from diffusion_rl.training.objective import PolicyLoss, clipped_objective, gaussian_kl, group_advantages
from diffusion_rl.training.seeds import GroupKey, group_seed, iteration_generator
from diffusion_rl.training.transitions import Transition, importance_ratios, transition_of, transitions_of

__all__ = [
    "GroupKey",
    "PolicyLoss",
    "Transition",
    "clipped_objective",
    "gaussian_kl",
    "group_advantages",
    "group_seed",
    "importance_ratios",
    "iteration_generator",
    "transition_of",
    "transitions_of",
]
