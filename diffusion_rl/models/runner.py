"""How one forward of a family's own transformer is run. Its bits are those of `eager`, except for `CompiledForward`,
which says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_kernels import AttentionPlan

Runner = Callable[[torch.nn.Module, AttentionPlan, dict[str, Any]], torch.Tensor]
"""`(transformer, plan, its arguments)` -> the velocities `[r, ...]`; called inside exact mode, without gradients."""


def eager(transformer: torch.nn.Module, plan: AttentionPlan, inputs: dict[str, Any]) -> torch.Tensor:
    """A plain call; rows that come as a list are stacked."""
    velocity: torch.Tensor | list[torch.Tensor] = transformer(**inputs, return_dict=False)[0]
    return torch.stack(velocity) if isinstance(velocity, list) else velocity
