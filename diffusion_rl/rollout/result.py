"""From a sample at its last step, or at its abort, to what the caller gets."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from diffusion_rl.models import ModelFamily
from diffusion_rl.rollout.queue import RequestState, SampleState
from diffusion_rl.rollout.samples import latent_shape
from diffusion_rl.sample import DenoisingEnv, DiTTrajectory, FinishReason, ResumeState, RolloutSample, Timings
from diffusion_rl.schedulers.base import StepTerms
from diffusion_rl.transfer import HostCopies
from engine_control.errors import NonFiniteOutputError

UNKNOWN_YET = Timings(0.0, 0.0, 0.0, 0.0, 0.0)


def finished_sample(
    family: ModelFamily, state: SampleState, picture: torch.Tensor | None, copies: HostCopies
) -> tuple[RolloutSample, torch.Tensor]:
    """The sample, on its way to the CPU by `copies`, and whether it is finite (a bool, for `check_finite`).

    What is known only at the request's end is still missing.

    picture `[C, H, W]` is its decoded latent, None where only the latent was asked for.

    What the samples of a request share (schedules, conditioning) is the same object in each.
    """
    params = state.request.params
    sample = _sample_so_far(family, state.request, state.members[0], state, copies)
    final = None if params.output_type == "image" else copies.copy(state.latents.float())
    output = None if picture is None else copies.copy(_output(picture, params.output_dtype))
    finite = copies.copy(_finite(state, *(() if picture is None else (picture,))))
    return replace(sample, generated_output=output, generated_latents=final), finite


def unfinished_sample(
    family: ModelFamily, request: RequestState, index: int, state: SampleState | None
) -> RolloutSample:
    """An aborted sample as far as it is; without a state it waits, and has taken the steps of earlier requests alone.

    Raises:
        NonFiniteOutputError: a latent or a log-prob is NaN or infinite.
    """
    copies = HostCopies(family.device)
    so_far = _sample_so_far(family, request, index, state, copies)
    copies.landing().wait()
    if state is not None:
        check_finite(state, _finite(state))
    resume = request.resume_from[index] if state is None else _resume_state(state)
    message = "the request was aborted" + (" while it waited" if state is None else "")
    return replace(
        so_far,
        finish_reason=FinishReason("abort", message),
        resume_state=resume,
    )


def complete_group(
    family: ModelFamily, request: RequestState, unfinished: Mapping[int, RolloutSample] | None = None
) -> list[RolloutSample]:
    """All samples of a request in order, each with what is known only now: the finished ones, and those given."""
    now, begun = time.perf_counter(), request.admitted_at > 0
    timings = Timings(
        queue_s=(request.admitted_at if begun else now) - request.added_at,
        encode_s=request.encode_s,
        denoise_s=request.denoise_s,
        decode_s=request.decode_s,
        inference_time_s=now - request.admitted_at if begun else 0.0,
    )
    on_gpu = family.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(family.device) / 2**20 if on_gpu else None
    results = {**request.results, **(unfinished or {})}
    return [
        replace(
            results[index],
            num_evaluations=request.num_evaluations,
            timings=timings,
            peak_memory_mb=peak,
        )
        for index in range(len(request.seeds))
    ]


def _sample_so_far(
    family: ModelFamily, request: RequestState, index: int, state: SampleState | None, copies: HostCopies
) -> RolloutSample:
    """What has been recorded of a sample, without output and final latent; it is on its way to the CPU."""
    params, schedule, size = request.params, request.schedule, request.size
    log_probs = torch.zeros(schedule.steps) if params.rollout else None
    debug, trajectory, env = None, None, None
    if state is not None:
        recorder = state.recorder
        log_probs = None if recorder.log_probs is None else copies.take(recorder.log_probs)
        debug = recorder.debug_tensors(StepTerms.from_columns(schedule.columns).noise_std, copies)
        trajectory = recorder.trajectory((schedule.timesteps, schedule.sigmas), state.step, copies)
        env = denoising_env(family, request)
    elif params.rollout and params.rollout_return_dit_trajectory:
        nothing = torch.empty(0, *latent_shape(family, size)), torch.empty(0, dtype=torch.int64)
        trajectory = DiTTrajectory(*nothing, schedule.timesteps, schedule.sigmas)
    return RolloutSample(
        request_id=request.request_id,
        prompt=params.prompt or "",
        sample_index=index,
        seed=request.seeds[index],
        generated_output=None,
        generated_latents=None,
        rollout_log_probs=log_probs,
        rollout_step_kinds=schedule.kinds,
        rollout_step_transformers=schedule.transformers if len(family.transformers) > 1 else None,
        rollout_debug_tensors=debug,
        denoising_env=env,
        dit_trajectory=trajectory,
        sigma_max=schedule.sigma_max,
        num_elements=math.prod(latent_shape(family, size)),
        noise_level=params.rollout_noise_level,
        log_prob_no_const=params.rollout_log_prob_no_const,
        sde_type=params.rollout_sde_type if params.rollout else "ode",
        guidance_scale=request.guidance.scale,
        guidance_scale_2=request.guidance.scale_2,
        embedded_guidance=request.guidance.embedded,
        cfg_normalization=request.guidance.normalization or None,
        cfg_truncation=request.guidance.truncation if request.guidance.truncation < 1 else None,
        height=size[0],
        width=size[1],
        num_frames=size[2] if len(size) > 2 else None,
        weight_versions=_versions(request, index, state),
        num_evaluations=0,
        num_steps_done=len(_versions(request, index, state)),
        generator_device=family.device.type,
        timings=UNKNOWN_YET,
        peak_memory_mb=None,
        affine_coefficients=params.affine_coefficients,
    )


def _versions(request: RequestState, index: int, state: SampleState | None) -> tuple[str, ...]:
    """Of all steps that a sample has taken, in earlier requests too."""
    if state is not None:
        return state.weight_versions
    given = request.resume_from[index]
    return () if given is None else given.weight_versions


def _resume_state(state: SampleState) -> ResumeState:
    affine = state.request.params.affine_coefficients is not None  # others have an x0 only if batched beside such
    x0 = state.previous_x0 if affine else None
    return ResumeState(
        seed=state.seed,
        step=state.step,
        latents=state.latents.to("cpu", copy=True),
        previous_x0=None if x0 is None else x0.to("cpu", copy=True),
        weight_versions=state.weight_versions,
    )


def _output(picture: torch.Tensor, dtype: str) -> torch.Tensor:
    """The picture as the request wants it."""
    return (picture * 255).round().to(torch.uint8) if dtype == "uint8" else picture


def denoising_env(family: ModelFamily, request: RequestState) -> DenoisingEnv | None:
    """The request's conditioning on the CPU if it wants that, made once and the same object for all of its samples."""
    if not (request.params.rollout and request.params.rollout_return_denoising_env):
        return None
    if request.denoising_env is None:
        assert request.conditioning is not None
        request.denoising_env = family.denoising_env(request.conditioning, *request.size)
    return request.denoising_env


def _finite(state: SampleState, *outputs: torch.Tensor) -> torch.Tensor:
    """Whether the sample's latent, its log-probs and these outputs are finite: a bool, where they are."""
    recorded = () if state.recorder.log_probs is None else (state.recorder.log_probs,)
    return torch.stack([torch.isfinite(x).all() for x in (state.latents, *recorded, *outputs)]).all()


def check_finite(state: SampleState, finite: torch.Tensor) -> None:
    """
    Raises:
        NonFiniteOutputError: `finite` says that a latent, a log-prob or the picture is NaN or infinite.
    """
    if finite:
        return
    raise NonFiniteOutputError(
        f"sample {state.members[0]} (seed {state.seed}) became NaN or infinite",
        field="prompt",
        value=state.request.params.prompt,
        hint="The weights, the dtype or an extreme guidance scale cause this; other requests are not affected.",
    )
