"""Exact mode for a whole model: with its fused forwards, and for what gradient checkpointing computes again.

Recomputation happens during `backward()`, outside the `with` block of the forward and, on a GPU, in another thread. So
the mode is carried by the checkpointed call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl_kernels.attention import AttentionPlan
from rl_kernels.mode import EXACT, Choices, exact_mode
from rl_kernels.replacing import Forward, Replacement, replaced_forwards, replacements


@dataclass(frozen=True)
class _ExactCall:
    """A block's forward that enters exact mode, and fused forwards, by itself, whoever calls it, and whenever."""

    function: Callable[..., Any]
    plan: AttentionPlan | None
    choices: Choices
    fused: tuple[Replacement, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with exact_mode(self.plan, self.choices), replaced_forwards(self.fused):
            return self.function(*args, **kwargs)


@contextmanager
def exact_forward(
    model: torch.nn.Module,
    plan: AttentionPlan | None = None,
    choices: Choices = EXACT,
    forwards: Mapping[type[torch.nn.Module], Forward] | None = None,
) -> Iterator[None]:
    """`exact_mode(plan, choices)` for a forward of `model`, and for what its gradient checkpointing recomputes later.

    forwards: a fused forward for a class of blocks, `function(module, *args, **kwargs)`. With `choices.fused` such
    blocks of `model` run it, in this thread and until the end (`rl_kernels.replacing`).

    Serves models that checkpoint through diffusers' `enable_gradient_checkpointing`; others are left as they are.
    """
    fused = replacements(model, forwards) if choices.fused and forwards else ()
    checkpointed = []
    if torch.is_grad_enabled():
        checkpointed = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    originals = {m: m._gradient_checkpointing_func for m in checkpointed if hasattr(m, "_gradient_checkpointing_func")}
    for module, checkpoint in originals.items():

        def exactly(function: Callable[..., Any], *args: Any, _checkpoint: Callable[..., Any] = checkpoint) -> Any:
            return _checkpoint(_ExactCall(function, plan, choices, fused), *args)

        module._gradient_checkpointing_func = exactly
    try:
        with exact_mode(plan, choices), replaced_forwards(fused):
            yield
    finally:
        for module, checkpoint in originals.items():
            module._gradient_checkpointing_func = checkpoint
