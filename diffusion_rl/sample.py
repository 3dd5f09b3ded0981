"""What one gets: one `RolloutSample` for each sample of a request, in order. Tensors lie on the CPU and are nobody
else's: no reply shares memory with the engine's buffers. What all samples of a request share (schedules, embeddings)
is the same tensor object in each, so that an encoder may send it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

import torch

from diffusion_rl.batch import FIRST, Guidance, Size, size_of
from engine_control.errors import InvalidRequestError

MAX_STEPS = 2**20  # of one span of weight versions; far more than any request has
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

    def timestep(self, step: int) -> torch.Tensor:
        """That of a step whose state was kept. A service may have returned the timesteps of those alone."""
        whole = len(self.timesteps) == len(self.sigmas)
        return self.timesteps[step if whole else self.latent_step_indices.tolist().index(step)]


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
    """What the transformer was conditioned on, as keyword arguments of its forward, without a batch axis.

    guidance: the embedded guidance of a guidance-distilled transformer, None for others; the scale of classifier-free
    guidance is in `RolloutSample.guidance_scale`.
    """

    pos_cond_kwargs: Mapping[str, CondValue]
    neg_cond_kwargs: Mapping[str, CondValue] | None
    image_kwargs: Mapping[str, CondValue]
    guidance: float | None

    def prompt_fields(self) -> dict[str, torch.Tensor]:
        """The fields of a request that say these prompts as embeddings (`prompt_embeds` and what belongs to it, and the
        negative ones). In the place of the prompts that they were made of they give the same samples, bit for bit."""
        fields = _embeds_fields(self.pos_cond_kwargs, "")
        return fields if self.neg_cond_kwargs is None else fields | _embeds_fields(self.neg_cond_kwargs, "negative_")


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
class FinishReason:
    """`stop`: the sample has taken all its steps. `abort`: its request was aborted before that; the message says so."""

    type: Literal["stop", "abort"]
    message: str | None = None


STOP = FinishReason("stop")


@dataclass(frozen=True)
class ResumeState:
    """Where a sample stood when its request was aborted: with it a later request goes on to the bits that the sample
    would have had, for noise is a function of (seed, stream, step).

    latents `[...]`: the state before step `step`, fp32, or in the model's dtype if all steps are ODE steps.
    previous_x0 `[...]` fp32: of `affine` requests, from their first step on.
    weight_versions: one for each of the `step` steps taken.
    """

    seed: int
    step: int
    latents: torch.Tensor
    previous_x0: torch.Tensor | None
    weight_versions: tuple[str, ...]


@dataclass(frozen=True)
class RolloutSample:
    """One sample of a request. One that was aborted (see `rollout_return_partial`) has no output and no final latent.

    prompt: its text; empty if it came as token ids or as embeddings.
    finish_reason, num_steps_done: whether all T steps were taken, or how many.
    resume_state: what a request that goes on from here sends as `resume_from`; None: begin anew (or it is finished).
    generated_output: `[C, H, W]` (video `[C, F, H, W]`) in [0, 1] fp32, or uint8; None for `output_type="latent"`.
    generated_latents: the final latent, transformer layout, fp32, for `output_type` `latent` and `both`.
    rollout_log_probs: `[T]` fp32, 0 where the step has no variance or wasn't taken by this request; None for
        `rollout=false`. What was computed in a step is 0 there in the debug tensors too, and the trajectory has the
        states between the first and the last step that this request took.
    rollout_step_kinds: length T, what each step was; `ode` says that it has no variance, hence no log-prob.
    num_elements: elements of one latent, the count that `rollout_log_probs` is averaged over.
    sigma_max: the sigma that stands for 1 in the coefficients (`sigmas[1]`).
    guidance_scale: the scale of the classifier-free guidance that was applied (1: none). embedded_guidance: the number
        that a guidance-distilled transformer was told (None: it takes none).
    guidance_scale_2: the scale under the second transformer, of guided samples of pipelines that have two.
    cfg_normalization, cfg_truncation: those of the request, where they change something.
    rollout_step_transformers: length T, the name of the transformer that computes each step; None: there is but one.
    num_frames: of a video; None for pictures.
    weight_versions: for each step taken, in earlier requests too, the version that computed it.
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
    num_steps_done: int
    generator_device: str
    timings: Timings
    peak_memory_mb: float | None
    affine_coefficients: tuple[tuple[float, float, float, float], ...] | None = None
    finish_reason: FinishReason = STOP
    resume_state: ResumeState | None = None
    embedded_guidance: float | None = None
    guidance_scale_2: float | None = None
    cfg_normalization: float | None = None
    cfg_truncation: float | None = None
    rollout_step_transformers: tuple[str, ...] | None = None
    num_frames: int | None = None

    @property
    def size(self) -> Size:
        return size_of(self.height, self.width, self.num_frames)

    def transformer_of(self, step: int) -> str:
        """The name of the transformer that computes that step."""
        return FIRST if self.rollout_step_transformers is None else self.rollout_step_transformers[step]

    def guidance_scale_of(self, step: int) -> float:
        """The scale of classifier-free guidance at that step, of a sample that came with its trajectory."""
        assert self.dit_trajectory is not None
        truncation = 1.0 if self.cfg_truncation is None else self.cfg_truncation
        guidance = Guidance(self.guidance_scale, scale_2=self.guidance_scale_2, truncation=truncation)
        return guidance.scale_at(self.transformer_of(step), self.dit_trajectory.timestep(step))


def _embeds_fields(kwargs: Mapping[str, CondValue], sign: str) -> dict[str, torch.Tensor]:
    embeds, lengths = kwargs["encoder_hidden_states"], kwargs.get("caption_valid_lens")
    assert isinstance(embeds, torch.Tensor)
    if isinstance(lengths, list):  # what is behind was made by the transformer
        embeds = embeds[: lengths[0]]
    beside = {"prompt_embeds_mask": "encoder_hidden_states_mask", "pooled_prompt_embeds": "pooled_projections"}
    found = {name: kwargs.get(key) for name, key in beside.items()}
    return {f"{sign}{n}": t for n, t in {"prompt_embeds": embeds, **found}.items() if isinstance(t, torch.Tensor)}


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """One version a step, folded: `{"version", "start", "end"}` for each run of steps `[start, end)` of one version."""
    spans: list[dict[str, Any]] = []
    for version, run in groupby(versions):
        start = spans[-1]["end"] if spans else 0
        spans.append({"version": version, "start": start, "end": start + len(list(run))})
    return spans


def versions_of_steps(value: Sequence[Any]) -> tuple[str, ...]:
    """`version_spans` undone; one version a step is left as it is.

    Raises:
        ValueError: neither of the two.
    """
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    versions: list[str] = []
    for span in value:
        if not isinstance(span, Mapping) or set(span) != {"version", "start", "end"}:
            raise ValueError("a span is {version, start, end}")
        version, start, end = span["version"], span["start"], span["end"]
        if not isinstance(version, str) or type(start) is not int or type(end) is not int:
            raise ValueError("a span has a text and two whole numbers")
        if start != len(versions) or not start < end <= MAX_STEPS:
            raise ValueError(f"the span [{start}, {end}) does not follow step {len(versions)}")
        versions += [version] * (end - start)
    return tuple(versions)


def merge_resumed(partial: RolloutSample, resumed: RolloutSample) -> RolloutSample:
    """The one sample that an aborted one and its resumption are together: bit for bit the uninterrupted one, if both
    requests asked for the same. If the resumption was aborted too, so is the result, which can be merged again.

    Identity (request id, index) is the aborted one's; timings and evaluations are sums.

    Raises:
        InvalidRequestError: the second doesn't go on from where the first stopped, or one lacks what the other has.
    """
    start, steps = partial.num_steps_done, len(partial.rollout_step_kinds)
    same = ("seed", "prompt", "rollout_step_kinds", "rollout_step_transformers", "sde_type", "noise_level", "size")
    differing = [name for name in same if getattr(partial, name) != getattr(resumed, name)]
    if differing or resumed.weight_versions[:start] != partial.weight_versions:
        raise _unmergeable(f"differ in {differing[0] if differing else 'weight_versions before it'}", start)
    if partial.finish_reason.type != "abort" or resumed.num_steps_done < start:
        raise _unmergeable(f"have {start} and {resumed.num_steps_done} steps done", start)
    taken = (start > 0, resumed.num_steps_done > start)
    for name in ("rollout_log_probs", "rollout_debug_tensors", "dit_trajectory"):
        if all(taken) and (getattr(partial, name) is None) != (getattr(resumed, name) is None):
            raise _unmergeable(f"do not both have {name}", start)
    earlier = torch.arange(steps) < start
    timings = zip(vars(partial.timings).items(), vars(resumed.timings).values(), strict=True)
    peaks = [s.peak_memory_mb for s in (partial, resumed) if s.peak_memory_mb is not None]
    return replace(
        resumed,
        request_id=partial.request_id,
        sample_index=partial.sample_index,
        rollout_log_probs=_by_step(partial.rollout_log_probs, resumed.rollout_log_probs, earlier),
        rollout_debug_tensors=_merged_debug(partial.rollout_debug_tensors, resumed.rollout_debug_tensors, earlier),
        denoising_env=partial.denoising_env if resumed.denoising_env is None else resumed.denoising_env,
        dit_trajectory=_merged_trajectory(partial.dit_trajectory, resumed.dit_trajectory, steps),
        num_evaluations=partial.num_evaluations + resumed.num_evaluations,
        timings=Timings(**{name: one + other for (name, one), other in timings}),
        peak_memory_mb=max(peaks, default=None),
    )


def _unmergeable(why: str, start: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the two samples {why}, so they are not one",
        field="resumed",
        hint=f"Pass the aborted sample, and what a request with the same fields made of it from step {start} on.",
    )


def _by_step(one: torch.Tensor | None, other: torch.Tensor | None, earlier: torch.Tensor) -> torch.Tensor | None:
    """`[T, ...]`: the first at its steps, the second at the later ones. None stands for steps that nobody took."""
    if one is None or other is None:
        return other if one is None else one
    return torch.where(earlier.reshape(-1, *(1,) * (one.dim() - 1)), one, other)


def _merged_debug(
    one: RolloutDebugTensors | None, other: RolloutDebugTensors | None, earlier: torch.Tensor
) -> RolloutDebugTensors | None:
    if one is None or other is None:
        return other if one is None else one
    pairs = zip(vars(one).items(), vars(other).values(), strict=True)
    return RolloutDebugTensors(**{name: _by_step(a, b, earlier) for (name, a), b in pairs})


def _merged_trajectory(one: DiTTrajectory | None, other: DiTTrajectory | None, steps: int) -> DiTTrajectory | None:
    """The states of both, in order. A service may return the timesteps of those states alone; then so do we."""
    if one is None or other is None:
        return other if one is None else one
    states: dict[int, torch.Tensor] = {}
    clock: dict[int, torch.Tensor] = {}
    for part in (one, other):
        indices = part.latent_step_indices.tolist()
        states |= zip(indices, part.latents, strict=True)
        times = part.timesteps if len(part.timesteps) == len(indices) else part.timesteps[part.latent_step_indices]
        clock |= zip(indices, times, strict=True)
    if not states:
        return other
    kept = sorted(states)
    full = next((part.timesteps for part in (one, other) if len(part.timesteps) == steps + 1), None)
    return DiTTrajectory(
        latents=torch.stack([states[i] for i in kept]),
        latent_step_indices=torch.tensor(kept, dtype=torch.int64),
        timesteps=torch.stack([clock[i] for i in kept]) if full is None else full,
        sigmas=one.sigmas,
    )
