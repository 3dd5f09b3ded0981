"""Digests: of a tensor, of all that a sample consists of, and of a model's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from diffusion_rl.sample import CondValue, DenoisingEnv, RolloutSample
from engine_control.wire import tensor_bytes

if TYPE_CHECKING:
    from diffusion_rl.pipeline import RolloutPipeline


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs in a sample's making: its name, and its step (None: the sample as a whole).

    `state` of step i is x before step i, and that of step T the final one.
    """

    tensor: str
    step: int | None = None

    def __str__(self) -> str:
        return self.tensor if self.step is None else f"{self.tensor} of step {self.step}"


@dataclass(frozen=True)
class TensorPrint:
    """One tensor's place, and its digest; the tensor itself where it is at hand, which plays no part in equality."""

    place: Place
    sha256: str
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes. Tells 0.0 from -0.0; the device plays no part."""
    shape = ",".join(str(size) for size in tensor.shape)
    sha = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]".encode())
    sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def prints_of(sample: RolloutSample) -> tuple[TensorPrint, ...]:
    """All that the sample holds, in the order in which it was computed: the first that differs is the cause."""
    found: dict[int, str] = {}  # samples of one request share tensors, and a tensor is digested once

    def made(place: Place, value: CondValue) -> TensorPrint:
        if not isinstance(value, torch.Tensor):
            return TensorPrint(place, hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
        if id(value) not in found:
            found[id(value)] = digest(value)
        return TensorPrint(place, found[id(value)], value)

    return tuple(made(place, value) for place, value in _values(sample))


def weights_digests(pipeline: RolloutPipeline) -> dict[str, str]:
    """One digest a module of the model (`transformer`, `vae`, ...), of its parameters' and buffers' names and bits."""
    digests = {}
    for name, module in sorted(pipeline.engine.family.pipeline.components.items()):
        if isinstance(module, torch.nn.Module):
            sha = hashlib.sha256()
            for key, tensor in sorted(module.state_dict().items()):
                sha.update(f"{key}={digest(tensor)};".encode())
            digests[name] = sha.hexdigest()
    return digests


def _values(sample: RolloutSample) -> Iterator[tuple[Place, CondValue]]:
    yield from _conditioning(sample.denoising_env)
    trajectory, debug, log_probs = sample.dit_trajectory, sample.rollout_debug_tensors, sample.rollout_log_probs
    states: dict[int, torch.Tensor] = {}
    if trajectory is not None:
        yield Place("sigmas"), trajectory.sigmas
        yield Place("timesteps"), trajectory.timesteps
        states = dict(zip(trajectory.latent_step_indices.tolist(), trajectory.latents, strict=True))
    if debug is not None:
        yield Place("noise_stds"), debug.rollout_noise_std_devs
    if 0 in states:
        yield Place("state", 0), states[0]
    for step in range(len(sample.rollout_step_kinds)):
        if debug is not None:
            yield Place("model_output", step), debug.rollout_model_outputs[step]
            yield Place("mean", step), debug.rollout_prev_sample_means[step]
            yield Place("noise", step), debug.rollout_variance_noises[step]
        if step + 1 in states:
            yield Place("state", step + 1), states[step + 1]
        if log_probs is not None:
            yield Place("log_prob", step), log_probs[step]
    if sample.generated_latents is not None:
        yield Place("final_latents"), sample.generated_latents
    if sample.generated_output is not None:
        yield Place("picture"), sample.generated_output


def _conditioning(env: DenoisingEnv | None) -> Iterator[tuple[Place, CondValue]]:
    if env is None:
        return
    parts: dict[str, Mapping[str, CondValue] | None] = {
        "positive": env.pos_cond_kwargs,
        "negative": env.neg_cond_kwargs,
        "image": env.image_kwargs,
    }
    for part, kwargs in parts.items():
        for name, value in sorted((kwargs or {}).items()):
            if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
                for index, item in enumerate(value):
                    yield Place(f"{part}.{name}.{index}"), item  # type: ignore[misc]
            else:
                yield Place(f"{part}.{name}"), value
