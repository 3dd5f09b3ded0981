"""A request's way to samples in flight, and one step of a batch of them: what every rank does in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from diffusion_rl.batch import Conditioning, DenoiseBatch, Size
from diffusion_rl.models import ModelFamily
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.params import (
    Limits,
    RolloutParams,
    check_frames,
    check_latent_elements,
    check_pixels,
    check_step_fields,
)
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.rollout.prompt_cache import PromptCache
from diffusion_rl.rollout.queue import RequestState, SampleState
from diffusion_rl.rollout.recorder import Recorder
from diffusion_rl.rollout.resume import read_resume_states
from diffusion_rl.rollout.schedule import make_schedule
from diffusion_rl.rollout.transition import advance, round_to_storage
from diffusion_rl.sample import ResumeState
from diffusion_rl.schedulers import step_kinds
from engine_control.errors import InvalidRequestError
from rl_kernels.staging import to_device


def plan_request(
    family: ModelFamily, limits: Limits, request_id: str, params: RolloutParams, *, arrival: int
) -> RequestState:
    """All that a request is, before any model work; refuses what this model can't do."""
    params.validate(limits, step_kinds=step_kinds.names())
    defaults = family.defaults
    family.check_fields(params)
    pictures = family.given_pictures(params, max_pixels=limits.max_image_pixels)
    size = family.size(params)
    check_pixels(size[1], size[0], limits)
    for num_frames in size[2:]:
        check_frames(num_frames, limits)
    family.check_size(*size)
    check_latent_elements(math.prod(latent_shape(family, size)), limits)
    steps = step_count(params, defaults.num_inference_steps)
    check_step_fields(params, steps)
    length = params.max_sequence_length or defaults.max_sequence_length
    prompt, guidance = family.prompt(params), family.guidance(params)
    assert prompt is not None  # `validate` has seen to it
    family.check_prompt(prompt, "prompt", length)
    if guidance.negative_prompt is not None:
        family.check_prompt(guidance.negative_prompt, "negative_prompt", length)
    seeds = _seeds(params)
    schedule = make_schedule(family, params, steps=steps, size=size, seed=request_seed(params, seeds))
    dtype = family.velocity_dtype if schedule.ode_state else torch.float32
    resume_from = read_resume_states(params, seeds, steps=steps, shape=latent_shape(family, size), dtype=dtype)
    return RequestState(
        request_id=request_id,
        params=params,
        schedule=schedule,
        size=size,
        seeds=seeds,
        prompt=prompt,
        guidance=guidance,
        max_sequence_length=length,
        arrival=arrival,
        resume_from=resume_from,
        pictures=pictures,
        image_shapes=() if pictures is None else family.image_shapes(pictures),
    )


def condition(request: RequestState, prompts: PromptCache) -> None:
    """Encodes the request's prompts and pictures; afterwards it has its conditioning."""
    length, guidance = request.max_sequence_length, request.guidance
    negative = guidance.negative_prompt
    request.conditioning = Conditioning(
        positive=prompts.encode(request.prompt, length),
        negative=None if negative is None else prompts.encode(negative, length),
        guidance_scale=guidance.scale,
        embedded_guidance=guidance.embedded,
        cfg_normalization=guidance.normalization,
        image=None if request.pictures is None else prompts.encode_pictures(request.pictures),
    )


def start_samples(family: ModelFamily, request: RequestState) -> list[SampleState]:
    """The request's samples at step 0, or their common trunk if they have a deterministic prefix in common. Those of a
    resumed request share nothing, and begin where they stood."""
    params, schedule, count = request.params, request.schedule, len(request.seeds)
    resumed = [_resumed(family, request, i, state) for i, state in enumerate(request.resume_from) if state is not None]
    shared = params.init_same_noise and params.rollout_share_prefix and schedule.first_stochastic_step > 0
    fresh = [i for i, state in enumerate(request.resume_from) if state is None]
    groups = [tuple(range(count))] if shared and params.resume_from is None else [(i,) for i in fresh]
    if not groups:
        return resumed
    seeds = [initial_noise_seed(params, request.seeds, members[0]) for members in groups]
    shape = family.initial_noise_shape(*request.size)
    noise = normal_noise(seeds, NoiseStream.INITIAL_LATENT, [0] * len(seeds), shape, family.device)
    latents = family.pack(noise)
    latents = latents.to(family.velocity_dtype) if schedule.ode_state else round_to_storage(latents, params)
    samples = []
    for members, latent in zip(groups, latents, strict=True):
        recorder = Recorder(params, schedule, tuple(latent.shape), latent.device)
        recorder.record_state(0, latent)
        samples.append(SampleState(request, members, latent, recorder))
    return samples + resumed


def _resumed(family: ModelFamily, request: RequestState, index: int, state: ResumeState) -> SampleState:
    """The sample where it stood, in memory of its own."""
    latents = state.latents.to(family.device, copy=True)
    before = None if state.previous_x0 is None else state.previous_x0.to(family.device, copy=True)
    recorder = Recorder(request.params, request.schedule, tuple(latents.shape), latents.device, first_state=state.step)
    recorder.record_state(state.step, latents)
    return SampleState(
        request=request,
        members=(index,),
        latents=latents,
        recorder=recorder,
        weight_versions=state.weight_versions,
        step=state.step,
        previous_x0=before,
    )


def advance_batch(family: ModelFamily, batch: Sequence[SampleState], arrangement: Arrangement) -> None:
    """One step of every sample: one prediction for all of them, then each sample's own transition."""
    first = batch[0].request
    timesteps = torch.stack([s.request.schedule.timesteps[s.step] for s in batch])
    latents = torch.stack([s.latents for s in batch]).to(family.dtype)
    conditioning = tuple(s.request.conditioning_at(s.step) for s in batch)
    transformer = first.schedule.transformers[batch[0].step]
    timesteps = to_device(timesteps, family.device)
    inputs = DenoiseBatch(latents, timesteps, conditioning, *first.size, transformer=transformer)
    advance(batch, family.predict(inputs, arrangement=arrangement))


def parts_here(sample: SampleState) -> bool:
    """Whether a sample is a trunk whose members part after the step that it has just been taken to."""
    return len(sample.members) > 1 and sample.step == sample.request.schedule.first_stochastic_step


def split(trunk: SampleState) -> list[SampleState]:
    """One sample for each member of the trunk, each with memory of its own."""
    return [
        SampleState(
            request=trunk.request,
            members=(member,),
            latents=trunk.latents,
            recorder=trunk.recorder.fork(),
            weight_versions=trunk.weight_versions,
            step=trunk.step,
            previous_x0=trunk.previous_x0,
        )
        for member in trunk.members
    ]


def latent_shape(family: ModelFamily, size: Size) -> tuple[int, ...]:
    """Of one sample's state, for a picture or video of that size."""
    return tuple(family.pack(torch.empty(1, *family.initial_noise_shape(*size), device="meta")).shape[1:])


def request_seed(params: RolloutParams, seeds: tuple[int, ...]) -> int:
    """What all samples have in common is drawn from this: the request's `seed`, or the first of its `seeds`."""
    return seeds[0] if params.seed is None else params.seed


def initial_noise_seed(params: RolloutParams, seeds: tuple[int, ...], index: int) -> int:
    """The seed of sample `index`'s initial latent."""
    first = request_seed(params, seeds) if params.initial_noise_seed is None else params.initial_noise_seed
    if params.init_same_noise:
        return first
    return seeds[index] if params.initial_noise_seed is None else first + index


def step_count(params: RolloutParams, default: int) -> int:
    """T, the number of steps that a request takes."""
    if params.sigmas is not None:
        return len(params.sigmas) - (params.sigmas[-1] == 0)
    return params.num_inference_steps or default


def _seeds(params: RolloutParams) -> tuple[int, ...]:
    if params.seeds is not None:
        return params.seeds
    if params.seed is None:
        raise InvalidRequestError(
            "the engine needs a seed", field="seed", hint="The service and RolloutPipeline choose one if you don't."
        )
    return tuple(params.seed + i for i in range(params.num_outputs_per_prompt))
