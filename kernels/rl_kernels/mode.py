"""The switch: inside `exact_mode`, torch code of this thread runs on the row-invariant operations.

It works on any module, a stock diffusers pipeline and a trainer's wrapped transformer included, because it replaces
the functions that they all end in (`linear`, `scaled_dot_product_attention`, patch convolutions) and touches no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from rl_kernels.attention import AttentionPlan, attention
from rl_kernels.conv import conv2d, is_patch_conv, patch_conv
from rl_kernels.linear import IMPLEMENTATIONS, Linear
from rl_kernels.reduce import folded_mean
from rl_kernels.settings import exact_library_settings

Observer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], None]
_observer: ContextVar[Observer | None] = ContextVar("observer of exact mode", default=None)


@dataclass(frozen=True)
class Choices:
    """Which implementation serves which class of operation, as `certify` found it on this device.

    linear: by (K, N, dtype), a name of `linear.IMPLEMENTATIONS`; attention_per_sample: classes (heads, D, dtype) that
    are attended row by row. What isn't listed gets `default_linear`, and one call for all rows. exact=False leaves
    the process's library switches alone. folded_means: classes (K, dtype) whose mean over the last dimension is
    `reduce.folded_mean`. fused: `exact_forward` uses the fused forwards that it is given. uniform_blocks: paged
    attention computes prompts in the blocks of single tokens. grouped_experts: what all experts multiply is one product
    (`grouped_linear`).
    """

    linear: Mapping[tuple[int, int, torch.dtype], str] = field(default_factory=dict)
    attention_per_sample: frozenset[tuple[int, int, torch.dtype]] = frozenset()
    default_linear: str = "padded_rows"
    exact: bool = True
    fused: bool = False
    folded_means: frozenset[tuple[int, torch.dtype]] = frozenset()
    uniform_blocks: bool = False
    grouped_experts: bool = False


EXACT = Choices()
LIBRARY = Choices(default_linear="library", exact=False)


class _ExactMode(TorchFunctionMode):
    """Replaces a few functions and lets every other one through."""

    def __init__(self, plan: AttentionPlan | None, choices: Choices) -> None:
        super().__init__()
        self.plan = plan
        self.choices = choices
        self._observer = _observer.get()
        self._replaced: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
            F.linear: self._linear,
            F.scaled_dot_product_attention: self._attention,
            F.conv2d: partial(_convolution, self._linear, 2, conv2d),
            F.conv3d: partial(_convolution, self._linear, 3, F.conv3d),
        }
        if choices.folded_means:
            self._replaced[torch.Tensor.mean] = self._mean

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._observer is not None:
            self._observer(func, args, kwargs or {})
        replacement = self._replaced.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(*args, **_renamed(kwargs))

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        key = (weight.shape[1], weight.shape[0], weight.dtype)
        return IMPLEMENTATIONS[self.choices.linear.get(key, self.choices.default_linear)](x, weight, bias)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p:
            raise ValueError(f"exact mode has no attention dropout, got dropout_p={dropout_p}; call model.eval()")
        return attention(
            query,
            key,
            value,
            plan=self.plan,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            per_sample=(query.shape[1], query.shape[-1], query.dtype) in self.choices.attention_per_sample,
        )

    def _mean(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dim = args[0] if args else kwargs.get("dim")
        last = dim in (-1, x.dim() - 1, [-1], (-1,)) and len(args) <= 1 and kwargs.keys() <= {"dim", "keepdim"}
        if last and (x.shape[-1], x.dtype) in self.choices.folded_means:
            return folded_mean(x, keepdim=kwargs.get("keepdim", False))
        return torch.Tensor.mean(x, *args, **kwargs)


def _convolution(
    linear: Linear,
    dims: int,
    otherwise: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """A patch embedding in `dims` dimensions as a `linear` layer; any other convolution as it is."""
    pads = padding if isinstance(padding, str) else _each(padding, dims)
    strides, dilations = _each(stride, dims), _each(dilation, dims)
    if x.dim() == dims + 2 and is_patch_conv(weight, strides, pads, dilations, groups):
        return patch_conv(x, weight, bias, linear=linear)
    return otherwise(x, weight, bias, strides, pads, dilations, groups)


def _each(value: int | tuple[int, ...], count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _renamed(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """torch calls a linear layer's and a convolution's first argument `input`."""
    if not kwargs:
        return {}
    return {("x" if name == "input" else name): value for name, value in kwargs.items()}


@contextmanager
def exact_mode(plan: AttentionPlan | None = None, choices: Choices = EXACT) -> Iterator[None]:
    """Inside, row-wise results don't depend on the batch; attention follows `plan`, if one is given.

    Re-entrant: an inner mode replaces the outer one's plan and choices until it ends, and everything is left by
    `finally` whatever happens inside. The replaced functions are the calling thread's only; the library switches of
    `rl_kernels.settings` are the whole process's while any thread is inside (on a GPU).
    """
    with exact_library_settings() if choices.exact else nullcontext(), _ExactMode(plan, choices):
        yield


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Inside, `observer(function, args, kwargs)` sees every torch function that runs in an exact mode entered there."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def exact_mode_is_on() -> bool:
    """Whether the calling thread is inside `exact_mode`."""
    return any(isinstance(m, _ExactMode) for m in torch.overrides._get_current_function_mode_stack())
