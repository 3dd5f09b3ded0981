"""A finished sample on its way out: from the engine's message to `RolloutSample`, to a row of the reply, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import torch

from diffusion_rl.config import TimestepsForm
from diffusion_rl.params import RolloutParams
from diffusion_rl.sample import (
    DenoisingEnv,
    DiTTrajectory,
    FinishReason,
    ResumeState,
    RolloutDebugTensors,
    RolloutSample,
    Timings,
    version_spans,
    versions_of_steps,
)

Part = TypeVar(
    "Part", RolloutSample, RolloutDebugTensors, DenoisingEnv, DiTTrajectory, Timings, FinishReason, ResumeState
)
OPTIONAL_KEYS = (
    "generated_latents",
    "affine_coefficients",
    "guidance_scale_2",
    "cfg_normalization",
    "cfg_truncation",
    "rollout_step_transformers",
    "num_frames",
)  # a row has them only where they say something
TRAINING_KEYS = ("rollout_log_probs", "rollout_debug_tensors", "denoising_env", "dit_trajectory")


def sample_from_plain(plain: Mapping[str, Any]) -> RolloutSample:
    """The sample again, from the maps and lists that it is while it travels between processes or in a response."""
    values = dict(plain)
    debug, env, trajectory = (plain.get(name) for name in TRAINING_KEYS[1:])
    affine, resume = plain.get("affine_coefficients"), plain.get("resume_state")
    transformers = plain.get("rollout_step_transformers")
    values.update(
        generated_latents=plain.get("generated_latents"),
        rollout_log_probs=plain.get("rollout_log_probs"),
        rollout_debug_tensors=debug and _made(RolloutDebugTensors, debug),
        denoising_env=env and _made(DenoisingEnv, env),
        dit_trajectory=trajectory and _made(DiTTrajectory, trajectory),
        rollout_step_kinds=tuple(plain["rollout_step_kinds"]),
        rollout_step_transformers=None if transformers is None else tuple(transformers),
        weight_versions=versions_of_steps(plain["weight_versions"]),
        finish_reason=_made(FinishReason, plain["finish_reason"]),
        resume_state=resume and _made(ResumeState, _with_versions_of_steps(resume)),
        timings=_made(Timings, plain["timings"]),
        affine_coefficients=None if affine is None else tuple(tuple(row) for row in affine),
    )
    return _made(RolloutSample, values)


def resume_state_row(state: ResumeState) -> dict[str, Any]:
    """The state as it stands in a row, and in a request's `resume_from`."""
    own = {field.name: getattr(state, field.name) for field in fields(state)}
    return {**own, "weight_versions": version_spans(state.weight_versions)}


def _with_versions_of_steps(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain, "weight_versions": versions_of_steps(plain["weight_versions"])}


def _made(cls: type[Part], values: Mapping[str, Any]) -> Part:
    """An instance of a dataclass of `sample`; keys that it has no field for are a newer peer's, and dropped."""
    return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


def response_rows(
    samples: Sequence[RolloutSample], params: RolloutParams, *, timesteps: TimestepsForm
) -> list[dict[str, Any]]:
    """One row a sample, in order. Tensors that samples share are shared by the rows too.

    `seed` is the sample's own; `request_seed` is what the request said, or what was chosen for it: its `seed`, or the
    first of its `seeds` if it had only those. `weight_versions` is folded into spans over the steps. Evaluation rows
    (`rollout=false`) have none of the training keys.
    """
    filtered: dict[tuple[int, int], torch.Tensor] = {}
    return [_row(sample, params, filtered if timesteps == "filtered" else None) for sample in samples]


def _row(
    sample: RolloutSample, params: RolloutParams, filtered: dict[tuple[int, int], torch.Tensor] | None
) -> dict[str, Any]:
    row: dict[str, Any] = {field.name: getattr(sample, field.name) for field in fields(sample)}
    row["request_seed"] = params.seeds[0] if params.seed is None and params.seeds else params.seed
    row["sample_seed"] = sample.seed
    row["weight_versions"] = version_spans(sample.weight_versions)
    row["weight_version"] = sample.weight_versions[-1] if sample.weight_versions else None
    row["finish_reason"] = {name: value for name, value in asdict(sample.finish_reason).items() if value is not None}
    row["resume_state"] = None if sample.resume_state is None else resume_state_row(sample.resume_state)
    row["inference_time_s"] = sample.timings.inference_time_s
    row["timings"] = asdict(sample.timings)
    for name in OPTIONAL_KEYS:
        if row[name] is None:
            del row[name]
    if not params.rollout:
        return {name: value for name, value in row.items() if name not in TRAINING_KEYS}
    row["rollout_debug_tensors"] = _fields_of(sample.rollout_debug_tensors)
    row["denoising_env"] = _fields_of(sample.denoising_env)
    row["dit_trajectory"] = _fields_of(sample.dit_trajectory)
    if sample.dit_trajectory is not None and filtered is not None:
        row["dit_trajectory"]["timesteps"] = _returned_timesteps(sample.dit_trajectory, filtered)
    return row


def _fields_of(part: RolloutDebugTensors | DenoisingEnv | DiTTrajectory | None) -> dict[str, Any] | None:
    return None if part is None else {field.name: getattr(part, field.name) for field in fields(part)}


def _returned_timesteps(trajectory: DiTTrajectory, filtered: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    key = (id(trajectory.timesteps), id(trajectory.latent_step_indices))
    if key not in filtered:
        filtered[key] = trajectory.timesteps[trajectory.latent_step_indices]
    return filtered[key]
