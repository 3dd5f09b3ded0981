"""For a trainer with a loop of its own: inside `exact_training` its transformer computes the rollout's bits.

The trainer keeps its module (wrapped by accelerate, DDP or peft, or not), its micro-batches, its scheduler step and its
checkpointing. What must be alike on both sides stands in docs/exactness.md.
"""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily, family_for
from diffusion_rl.models.compiled import refuse_inexact_replay
from diffusion_rl.rollout.certification import cache_of, make_exact
from engine_control.errors import InvalidRequestError, NotExactError
from rl_kernels import AttentionPlan, exact_forward, exact_mode
from rl_kernels.mode import Choices

TEXT, MASK, LATENTS = "encoder_hidden_states", "encoder_hidden_states_mask", "hidden_states"  # a forward's parameters


def certified_family(pipeline: Any, defaults_folder: Path | None = None) -> ModelFamily:
    """The family of a trainer's own diffusers pipeline, certified on the transformer's device.

    On equal machines it makes the choices that a rollout engine makes there, and shares its verdict cache. Sets the
    pipeline's modules to eval. Attach adapters first: what is there is what is probed.

    Raises:
        NotExactError: an operation of this model can't be made exact on this device; the message names it.
        InvalidRequestError: no family serves pipelines of that class.
    """
    family = family_for(pipeline, defaults_folder)
    make_exact(family, "on", cache=cache_of(EngineConfig()))
    return family


@contextmanager
def exact_training(
    transformer: torch.nn.Module, family: ModelFamily, *, text_lengths: Sequence[int] | None = None
) -> Iterator[None]:
    """Inside, `transformer(...)` computes the rollout's bits at equal weights, whatever its batch.

    `family` is the rollout pipeline's (`pipeline.engine.family`) or a `certified_family` of the trainer's own pipeline.
    Call the module as diffusers does. A right-padded `encoder_hidden_states_mask` is taken for the rows' text lengths
    and attention runs on the true tokens alone; where padded text comes without a mask, `text_lengths` gives them, one
    number a row of every forward in the block. Autocast is off in the block, and for the forward anywhere in it.

    `backward()` may run inside or after the block: what gradient checkpointing computes again has the forward's bits
    either way. Re-entrant; everything is as before when the block ends, also by an exception. The calls of `family`
    itself (`replay`, a rollout) may run inside, and are not changed.

    Raises:
        InvalidRequestError: the module isn't the family's, or something about it would change bits: another dtype,
            dropout, compilation, checkpointing that isn't diffusers' own, or other choices in another block.
        NotExactError: the family isn't certified.
    """
    module = _denoiser(transformer, family)
    _refuse_other_bits(transformer, module, family)
    with (
        _exact_calls(module, family),
        exact_mode(choices=family.choices),
        _no_autocast(family),
    ):
        outer = _block.get()
        told = {} if outer is None else outer.text_lengths
        lengths = None if text_lengths is None else tuple(text_lengths)
        token = _block.set(_Block(_innermost_mode(), {**told, module: lengths}))
        try:
            yield
        finally:
            _block.reset(token)


@dataclass(frozen=True)
class _Block:
    """The innermost `exact_training` of this thread: the mode that it has entered, and what each module was told."""

    mode: object
    text_lengths: Mapping[torch.nn.Module, tuple[int, ...] | None]


_block: ContextVar[_Block | None] = ContextVar("innermost exact_training of this thread", default=None)
_lock = threading.Lock()


@dataclass(eq=False)
class _ExactForward:
    """What the module's `forward` is while any block is open: the one it had, in exact mode."""

    module: torch.nn.Module
    family: ModelFamily
    choices: Choices
    forward: Callable[..., Any]
    before: Callable[..., Any] | None  # the instance's attribute, if it had one
    holders: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, mode = _block.get(), _innermost_mode()
        if mode is not None and (block is None or mode is not block.mode):
            # In an exact mode that somebody else has entered, with a plan of their own: the family's `predict`.
            return self.forward(*args, **kwargs)
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs)
        plan = self._plan(bound.arguments, None if block is None else block.text_lengths.get(self.module))
        exactly = exact_forward(self.module, plan=plan, choices=self.choices, forwards=self.family.block_forwards)
        with _no_autocast(self.family), exactly:
            return self.forward(*bound.args[1:], **bound.kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the module that is made inside a block (a reference policy) gets the forward from before it."""
        return copy.deepcopy(self.forward if self.before is None else self.before, memo)

    def _plan(self, inputs: dict[str, Any], text_lengths: tuple[int, ...] | None) -> AttentionPlan | None:
        """The true tokens of the rows, if something tells them. Takes the mask away: it would pick another kernel."""
        planned = self.family.plan_of_call(inputs)
        if planned is not None:
            if text_lengths is not None:
                raise InvalidRequestError(
                    f"a {type(self.module).__name__} is called with prompts of their own lengths",
                    field="text_lengths",
                    value=str(text_lengths),
                    hint="Leave it out.",
                )
            return planned
        mask = inputs.get(MASK)
        if mask is not None:
            inputs[MASK] = None
        lengths = _lengths(mask) if text_lengths is None and mask is not None else text_lengths
        if lengths is None:
            return None
        rows, padded = inputs[TEXT].shape[:2]
        if len(lengths) != rows or not all(0 < n <= padded for n in lengths):
            raise InvalidRequestError(
                f"a forward of {rows} rows of {padded} text tokens needs as many lengths, each from 1 to {padded}",
                field="text_lengths",
                value=str(lengths),
                hint="With batched guidance both halves count: the lengths of the negative rows, then of the positive.",
            )
        tokens = _image_tokens(inputs[LATENTS], self.module)
        return AttentionPlan(lengths, padded, tokens, text_first=self.family.text_first)


def _lengths(mask: torch.Tensor) -> tuple[int, ...]:
    """How many true tokens each row of a mask `[rows, tokens]` has."""
    true = mask.bool()
    counts = true.sum(dim=1)
    if not torch.equal(true, torch.arange(true.shape[1], device=true.device) < counts[:, None]):
        raise InvalidRequestError(
            "a row's true tokens must stand before its padding", field=MASK, hint="Pad on the right, as diffusers does."
        )
    return tuple(counts.tolist())


def _image_tokens(latents: torch.Tensor, module: torch.nn.Module) -> int:
    """Tokens that the transformer makes of latents that are packed `[n, tokens, D]`, or a grid `[n, C, (F,) h, w]`."""
    if latents.dim() == 3:
        return latents.shape[1]
    sides: int | Sequence[int] = module.config.patch_size  # type: ignore[union-attr, assignment]
    patch = [sides] * len(latents.shape[2:]) if isinstance(sides, int) else sides
    return math.prod(length // side for length, side in zip(latents.shape[2:], patch, strict=True))


def _innermost_mode() -> object:
    """The exact mode that this thread has entered last and not left; None if it is in none."""
    modes = [m for m in torch.overrides._get_current_function_mode_stack() if hasattr(m, "choices")]
    return modes[-1] if modes else None


def _no_autocast(family: ModelFamily) -> torch.autocast:
    """The rollout has none."""
    return torch.autocast(family.device.type, enabled=False)


@contextmanager
def _exact_calls(module: torch.nn.Module, family: ModelFamily) -> Iterator[None]:
    """Inside, `module`'s forward is an `_ExactForward`. The last block to leave puts back what was there."""
    attributes = vars(module)
    with _lock:
        held = attributes.get("forward")
        if not isinstance(held, _ExactForward):
            # accelerate wraps a prepared module's forward in autocast, and keeps the module's own under this name.
            own = attributes.get("_original_forward", module.forward)
            before = attributes.get("forward")
            held = attributes["forward"] = _ExactForward(module, family, family.choices, own, before)
        elif held.choices != family.choices:
            raise InvalidRequestError(
                "another block holds this transformer with other choices",
                field="family",
                hint="Use one family for all blocks that may be open at once.",
            )
        held.holders += 1
    try:
        yield
    finally:
        with _lock:
            held.holders -= 1
            if held.holders == 0 and attributes.get("forward") is held:
                del attributes["forward"]
                if held.before is not None:
                    attributes["forward"] = held.before


def _denoiser(transformer: torch.nn.Module, family: ModelFamily) -> torch.nn.Module:
    """The diffusers module in the trainer's wrapper, or the module itself."""
    wanted = type(family.transformer)
    found = next((m for m in transformer.modules() if isinstance(m, wanted)), None)
    if found is None:
        raise InvalidRequestError(
            f"the family's transformer is a {wanted.__name__}, and there is none in what was given",
            field="transformer",
            value=type(transformer).__name__,
            hint="Give the transformer itself, or a wrapper that holds it.",
        )
    return found


def _refuse_other_bits(transformer: torch.nn.Module, module: torch.nn.Module, family: ModelFamily) -> None:
    """Refuses what can be seen to make the bits differ, before anything is computed."""
    if family.certificate is None or not family.choices.exact:
        raise NotExactError(
            "the family isn't certified, or runs without exact mode",
            field="family",
            hint="Use certified_family(pipeline), or the family of an engine that says deterministic.enabled.",
        )
    refuse_inexact_replay(family.runner, transformer)
    where = (module.dtype, module.device.type)  # type: ignore[union-attr]
    if where != (family.dtype, family.device.type):
        raise _other_bits(
            f"it is {where[0]} on {where[1]}, the rollout's is {family.dtype} on {family.device.type}",
            "Train it in the rollout's dtype (with master weights in the optimizer), or roll out in the trainer's.",
        )
    for part in transformer.modules():
        name = type(part).__name__
        if isinstance(part, torch.nn.Dropout) and part.training and part.p > 0:
            raise _other_bits(f"it has active dropout, p = {part.p}", "Set it to 0, or call eval() on those modules.")
        if name == "OptimizedModule" or part._compiled_call_impl is not None:
            raise _other_bits("it is compiled", "Give the module as it was before torch.compile.")
        if name == "CheckpointWrapper":
            raise _other_bits(
                "its checkpointing recomputes outside of exact mode", "Use diffusers' enable_gradient_checkpointing()."
            )


def _other_bits(reason: str, hint: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the transformer can't have the rollout's bits: {reason}", code="not_exact", field="transformer", hint=hint
    )
