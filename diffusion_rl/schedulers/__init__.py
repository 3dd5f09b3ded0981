"""Step kinds: one file each, mixins over diffusers' flow-matching schedulers, by the file's name."""

from __future__ import annotations

from diffusion_rl.schedulers.base import RolloutSchedulerMixin
from engine_control.registry import Registry

step_kinds: Registry[RolloutSchedulerMixin] = Registry(
    "diffusion_rl.schedulers", RolloutSchedulerMixin, noun="rollout_sde_type"
)

__all__ = ["RolloutSchedulerMixin", "step_kinds"]
