"""From a sample at its last step to what the caller gets."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from diffusion_rl.models import ModelFamily
from diffusion_rl.rollout.queue import RequestState, SampleState
from diffusion_rl.sample import DenoisingEnv, RolloutSample, Timings
from diffusion_rl.schedulers.base import StepTerms
from engine_control.errors import NonFiniteOutputError

UNKNOWN_YET = Timings(0.0, 0.0, 0.0, 0.0, 0.0)


def finished_sample(family: ModelFamily, state: SampleState, picture: torch.Tensor | None) -> RolloutSample:
    """The sample copied to the CPU and checked; what is known only at the request's end is still missing.

    picture `[C, H, W]` is its decoded latent, None where only the latent was asked for.

    What the samples of a request share (schedules, conditioning) is the same object in each.

    Raises:
        NonFiniteOutputError: a latent, a log-prob or the picture is NaN or infinite.
    """
    request, params, schedule, recorder = state.request, state.request.params, state.request.schedule, state.recorder
    final = state.latents.float()
    log_probs = None if recorder.log_probs is None else recorder.log_probs.cpu()
    _refuse_non_finite(state, final, log_probs)
    return RolloutSample(
        request_id=request.request_id,
        prompt=params.prompt,
        sample_index=state.members[0],
        seed=state.seed,
        generated_output=None if picture is None else _output(state, picture),
        generated_latents=None if params.output_type == "image" else final.to("cpu", copy=True),
        rollout_log_probs=log_probs,
        rollout_step_kinds=schedule.kinds,
        rollout_debug_tensors=recorder.debug_tensors(StepTerms.from_columns(schedule.columns).noise_std),
        denoising_env=_denoising_env(family, request),
        dit_trajectory=recorder.trajectory((schedule.timesteps, schedule.sigmas)),
        sigma_max=schedule.sigma_max,
        num_elements=final.numel(),
        noise_level=params.rollout_noise_level,
        log_prob_no_const=params.rollout_log_prob_no_const,
        sde_type=params.rollout_sde_type if params.rollout else "ode",
        guidance_scale=request.guidance_scale,
        height=request.size[0],
        width=request.size[1],
        weight_versions=state.weight_versions,
        num_evaluations=0,
        generator_device=final.device.type,
        timings=UNKNOWN_YET,
        peak_memory_mb=None,
        affine_coefficients=params.affine_coefficients,
    )


def complete_group(family: ModelFamily, request: RequestState) -> list[RolloutSample]:
    """All samples of a request in order, each with what is known only now."""
    timings = Timings(
        queue_s=request.admitted_at - request.added_at,
        encode_s=request.encode_s,
        denoise_s=request.denoise_s,
        decode_s=request.decode_s,
        inference_time_s=time.perf_counter() - request.admitted_at,
    )
    on_gpu = family.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(family.device) / 2**20 if on_gpu else None
    return [
        replace(
            request.results[index],
            num_evaluations=request.num_evaluations,
            timings=timings,
            peak_memory_mb=peak,
        )
        for index in range(len(request.seeds))
    ]


def _output(state: SampleState, picture: torch.Tensor) -> torch.Tensor:
    """The picture as the request wants it, on the CPU, in memory of its own."""
    _refuse_non_finite(state, picture)
    if state.request.params.output_dtype == "uint8":
        picture = (picture * 255).round().to(torch.uint8)
    return picture.to("cpu", copy=True)


def _denoising_env(family: ModelFamily, request: RequestState) -> DenoisingEnv | None:
    """The request's conditioning, made at its first sample and the same object for all of them."""
    if not (request.params.rollout and request.params.rollout_return_denoising_env):
        return None
    if request.denoising_env is None:
        assert request.conditioning is not None
        request.denoising_env = family.denoising_env(request.conditioning, *request.size)
    return request.denoising_env


def _refuse_non_finite(state: SampleState, output: torch.Tensor, log_probs: torch.Tensor | None = None) -> None:
    if torch.isfinite(output).all() and (log_probs is None or torch.isfinite(log_probs).all()):
        return
    raise NonFiniteOutputError(
        f"sample {state.members[0]} (seed {state.seed}) became NaN or infinite",
        field="prompt",
        value=state.request.params.prompt,
        hint="The weights, the dtype or an extreme guidance scale cause this; other requests are not affected.",
    )
