"""What one gets: one `RolloutSample` for each sample of a request, in order. Tensors lie on the CPU and are nobody
else's: no reply shares memory with the engine's buffers. What all samples of a request share (schedules, embeddings)
is the same tensor object in each, so that an encoder may send it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

CondValue: TypeAlias = torch.Tensor | list[int] | list[list[int]] | list[torch.Tensor] | float | int | str | None


@dataclass(frozen=True)
class DiTTrajectory:
    """The states that were asked for, in the transformer's own (packed) layout, as the transformer consumed them.

    latents `[n, ...]` fp32; latent_step_indices `[n]` int64: state i is x before step i, state T the final one;
    timesteps `[T + 1]` fp32, the last one 0; sigmas `[T + 1]` fp32.
    """

    latents: torch.Tensor
    latent_step_indices: torch.Tensor
    timesteps: torch.Tensor
    sigmas: torch.Tensor


@dataclass(frozen=True)
class RolloutDebugTensors:
    """Per step, fp32: the noise `[T, ...]` (zeros where the step has no variance), the mean of the next state
    `[T, ...]`, the standard deviation `[T, 1]`, and the model's output after guidance `[T, ...]`."""

    rollout_variance_noises: torch.Tensor
    rollout_prev_sample_means: torch.Tensor
    rollout_noise_std_devs: torch.Tensor
    rollout_model_outputs: torch.Tensor


@dataclass(frozen=True)
class DenoisingEnv:
    """What the transformer was conditioned on, as keyword arguments of its forward, without a batch axis."""

    pos_cond_kwargs: Mapping[str, CondValue]
    neg_cond_kwargs: Mapping[str, CondValue] | None
    image_kwargs: Mapping[str, CondValue]
    guidance: float | None


@dataclass(frozen=True)
class Timings:
    """Seconds: waiting in the queue, encoding text, in denoising steps (shared with the samples batched beside it),
    decoding; and from admission to the reply."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    inference_time_s: float


@dataclass(frozen=True)
class RolloutSample:
    """One sample of a request.

    generated_output: `[C, H, W]` (video `[C, F, H, W]`) in [0, 1] fp32, or uint8; None for `output_type="latent"`.
    generated_latents: the final latent, transformer layout, fp32, for `output_type` `latent` and `both`.
    rollout_log_probs: `[T]` fp32, 0 where the step has no variance; None for `rollout=false`.
    rollout_step_kinds: length T, what each step was; `ode` says that it has no variance, hence no log-prob.
    num_elements: elements of one latent, the count that `rollout_log_probs` is averaged over.
    sigma_max: the sigma that stands for 1 in the coefficients (`sigmas[1]`).
    guidance_scale: the guidance that was applied (1: none).
    num_evaluations: sample-steps computed for the whole request; smaller than K x T when a prefix was shared.
    """

    request_id: str
    prompt: str
    sample_index: int
    seed: int
    generated_output: torch.Tensor | None
    generated_latents: torch.Tensor | None
    rollout_log_probs: torch.Tensor | None
    rollout_step_kinds: tuple[str, ...]
    rollout_debug_tensors: RolloutDebugTensors | None
    denoising_env: DenoisingEnv | None
    dit_trajectory: DiTTrajectory | None
    sigma_max: float
    num_elements: int
    noise_level: float
    log_prob_no_const: bool
    sde_type: str
    guidance_scale: float
    height: int
    width: int
    weight_versions: tuple[str, ...]
    num_evaluations: int
    generator_device: str
    timings: Timings
    peak_memory_mb: float | None
    affine_coefficients: tuple[tuple[float, float, float, float], ...] | None = None
