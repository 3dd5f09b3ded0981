"""Reads `resume_from`: where the samples of a request go on that was aborted with `rollout_return_partial`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import ResumeState, versions_of_steps
from engine_control.errors import InvalidRequestError

KEYS = tuple(field.name for field in fields(ResumeState))
HINT = "Send the resume_state of the aborted sample as it came, with the fields of its request."


def read_resume_states(
    params: RolloutParams, seeds: tuple[int, ...], *, steps: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[ResumeState | None, ...]:
    """One entry a sample; None begins at the initial noise. shape and dtype are those of one sample's state.

    Raises:
        InvalidRequestError: an entry is no state of such a sample. Nothing has been computed.
    """
    if params.resume_from is None:
        return (None,) * len(seeds)
    read = []
    for index, (entry, seed) in enumerate(zip(params.resume_from, seeds, strict=True)):
        state = None if entry is None else _read(entry, index, seed)
        if state is not None:
            if not 0 <= state.step <= steps:
                raise _refused(index, f"step {state.step} is outside 0..{steps}", state.step)
            if state.seed != seed:
                raise _refused(index, f"it is of seed {state.seed}, the sample's seed is {seed}", state.seed)
            if len(state.weight_versions) != state.step:
                done = len(state.weight_versions)
                raise _refused(index, f"weight_versions speak of {done} steps, {state.step} were taken", done)
            _check_tensor(state.latents, index, "latents", shape, dtype)
            if (state.previous_x0 is not None) != (params.affine_coefficients is not None and state.step > 0):
                raise _refused(index, "previous_x0 belongs to affine samples that have taken a step", None)
            if state.previous_x0 is not None:
                _check_tensor(state.previous_x0, index, "previous_x0", shape, torch.float32)
        read.append(state)
    return tuple(read)


def _read(entry: Any, index: int, seed: int) -> ResumeState:
    """The entry with the types that it should have."""
    if isinstance(entry, ResumeState):
        entry = {name: getattr(entry, name) for name in KEYS}
    if not isinstance(entry, Mapping):
        raise _refused(index, "must be an object or null", type(entry).__name__)
    values = {"seed": seed, **entry}
    wrong = set(values) ^ set(KEYS)
    if wrong:
        raise _refused(index, f"keys that are missing or unknown: {', '.join(sorted(map(str, wrong)))[:200]}", None)
    for name in ("seed", "step"):
        if type(values[name]) is not int:
            raise _refused(index, f"{name} must be a whole number", type(values[name]).__name__)
    for name in ("latents", "previous_x0"):
        if not isinstance(values[name], torch.Tensor) and (name == "latents" or values[name] is not None):
            raise _refused(index, f"{name} must be a tensor", type(values[name]).__name__)
    try:
        versions = versions_of_steps(values["weight_versions"])
    except (TypeError, ValueError) as error:
        raise _refused(index, f"weight_versions: {error}", None) from error
    return ResumeState(**{**values, "weight_versions": versions})


def _check_tensor(tensor: torch.Tensor, index: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise _refused(index, f"{name} has the wrong shape; it should be {list(shape)}", list(tensor.shape))
    if tensor.dtype != dtype:
        raise _refused(index, f"{name} has the wrong dtype; it should be {dtype}", str(tensor.dtype))
    if not torch.isfinite(tensor).all():
        raise _refused(index, f"{name} is NaN or infinite somewhere", None)


def _refused(index: int, what: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"entry {index}: {what}", field="resume_from", value=value, hint=HINT)
