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


class GroupResult:
    """The results of one request. What its samples share is made once, so that it is the same object in each."""

    def __init__(self, family: ModelFamily, request: RequestState) -> None:
        self._family = family
        self._request = request
        earlier = next(iter(request.results.values()), None)
        self._env = earlier.denoising_env if earlier is not None else self._denoising_env()
        trajectory = earlier.dit_trajectory if earlier is not None else None
        schedule = request.schedule
        self._clocks = (
            (schedule.timesteps, schedule.sigmas) if trajectory is None else (trajectory.timesteps, trajectory.sigmas)
        )

    def sample(self, state: SampleState) -> RolloutSample:
        """The finished sample: decoded, copied to the CPU, checked.

        Raises:
            NonFiniteOutputError: a latent or log-prob is NaN or infinite.
        """
        request, params, schedule = self._request, self._request.params, self._request.schedule
        final = state.latents.float()
        log_probs = None if state.recorder.log_probs is None else state.recorder.log_probs.cpu()
        self._refuse_non_finite(final, log_probs, state)
        began = time.perf_counter()
        picture = None if params.output_type == "latent" else self._decode(state)
        request.decode_s += time.perf_counter() - began
        return RolloutSample(
            request_id=request.request_id,
            prompt=params.prompt,
            sample_index=state.members[0],
            seed=state.seed,
            generated_output=picture,
            generated_latents=None if params.output_type == "image" else final.cpu().clone(),
            rollout_log_probs=log_probs,
            rollout_step_kinds=schedule.kinds,
            rollout_debug_tensors=state.recorder.debug_tensors(StepTerms.from_columns(schedule.columns).noise_std),
            denoising_env=self._env,
            dit_trajectory=state.recorder.trajectory(self._clocks),
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
            timings=Timings(0, 0, 0, 0, 0),
            peak_memory_mb=None,
            affine_coefficients=params.affine_coefficients,
        )

    def complete(self) -> list[RolloutSample]:
        """All samples of the request in order, with what is known only at its end."""
        request = self._request
        now = time.perf_counter()
        timings = Timings(
            queue_s=request.admitted_at - request.added_at,
            encode_s=request.encode_s,
            denoise_s=request.denoise_s,
            decode_s=request.decode_s,
            inference_time_s=now - request.admitted_at,
        )
        device = self._family.device
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        return [
            replace(
                request.results[index],
                num_evaluations=request.num_evaluations,
                timings=timings,
                peak_memory_mb=peak,
            )
            for index in range(len(request.seeds))
        ]

    def _decode(self, state: SampleState) -> torch.Tensor:
        picture = self._family.decode(state.latents, *self._request.size)
        if self._request.params.output_dtype == "uint8":
            picture = (picture * 255).round().to(torch.uint8)
        return picture.cpu()

    def _denoising_env(self) -> DenoisingEnv | None:
        request = self._request
        if not (request.params.rollout and request.params.rollout_return_denoising_env):
            return None
        assert request.conditioning is not None
        return self._family.denoising_env(request.conditioning, *request.size)

    def _refuse_non_finite(self, final: torch.Tensor, log_probs: torch.Tensor | None, state: SampleState) -> None:
        if torch.isfinite(final).all() and (log_probs is None or torch.isfinite(log_probs).all()):
            return
        raise NonFiniteOutputError(
            f"sample {state.members[0]} (seed {state.seed}) became NaN or infinite",
            field="prompt",
            value=self._request.params.prompt,
            hint="The weights, the dtype or an extreme guidance scale cause this; other requests are not affected.",
        )
