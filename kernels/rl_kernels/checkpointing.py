"""Gradient checkpointing inside exact mode: what backward computes again must be what forward computed.

Recomputation happens during `backward()`, outside the `with` block of the forward and, on a GPU, in another thread. So
the mode is carried by the checkpointed call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl_kernels.attention import AttentionPlan
from rl_kernels.mode import EXACT, Choices, exact_mode


@dataclass(frozen=True)
class _ExactCall:
    """A block's forward that enters exact mode by itself, whoever calls it, and whenever."""

    function: Callable[..., Any]
    plan: AttentionPlan | None
    choices: Choices

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with exact_mode(self.plan, self.choices):
            return self.function(*args, **kwargs)


@contextmanager
def exact_forward(
    model: torch.nn.Module, plan: AttentionPlan | None = None, choices: Choices = EXACT
) -> Iterator[None]:
    """`exact_mode(plan, choices)` for a forward of `model`, and for what its gradient checkpointing recomputes later.

    Serves models that checkpoint through diffusers' `enable_gradient_checkpointing`; others are left as they are.
    """
    checkpointed = []
    if torch.is_grad_enabled():
        checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    originals = {m: m._gradient_checkpointing_func for m in checkpointed if hasattr(m, "_gradient_checkpointing_func")}
    for module, checkpoint in originals.items():

        def exactly(function: Callable[..., Any], *args: Any, _checkpoint: Callable[..., Any] = checkpoint) -> Any:
            return _checkpoint(_ExactCall(function, plan, choices), *args)

        module._gradient_checkpointing_func = exactly
    try:
        with exact_mode(plan, choices):
            yield
    finally:
        for module, checkpoint in originals.items():
            module._gradient_checkpointing_func = checkpoint
