"""Requests and samples between admission and reply: who waits, who is in flight, who was aborted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from diffusion_rl.batch import Conditioning, Guidance, ImageShapes, Pictures, Prompt, Size
from diffusion_rl.params import Limits, RolloutParams
from diffusion_rl.rollout.recorder import Recorder
from diffusion_rl.rollout.schedule import Schedule
from diffusion_rl.sample import DenoisingEnv, ResumeState, RolloutSample
from engine_control.errors import InvalidRequestError, QueueFullError


@dataclass
class RequestState:
    """One request in the engine. The engine's thread alone touches it."""

    request_id: str
    params: RolloutParams
    schedule: Schedule
    size: Size
    seeds: tuple[int, ...]
    prompt: Prompt
    guidance: Guidance
    max_sequence_length: int
    arrival: int
    resume_from: tuple[ResumeState | None, ...]
    pictures: Pictures | None = None
    image_shapes: ImageShapes = ()
    conditioning: Conditioning | None = None
    denoising_env: DenoisingEnv | None = None
    results: dict[int, RolloutSample] = field(default_factory=dict)
    added_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    num_evaluations: int = 0

    def conditioning_at(self, step: int) -> Conditioning:
        """What its samples are denoised under at that step, once its prompts are encoded."""
        assert self.conditioning is not None
        scale = self.guidance.scale_at(self.schedule.transformers[step], self.schedule.timesteps[step])
        return replace(self.conditioning, guidance_scale=scale)


@dataclass(eq=False)
class SampleState:
    """One sample in flight, or, before its first stochastic step, the common trunk of several (`members`).

    latents `[...]` is the state at `step`, fp32 unless the schedule has `ode_state`. departed: it has taken all its
    steps, and its result is on its way to the host.
    """

    request: RequestState
    members: tuple[int, ...]
    latents: torch.Tensor
    recorder: Recorder
    weight_versions: tuple[str, ...] = ()
    step: int = 0
    previous_x0: torch.Tensor | None = None
    departed: bool = False

    @property
    def seed(self) -> int:
        return self.request.seeds[self.members[0]]


class RequestQueue:
    """Waiting requests, the most urgent (then the oldest) first, and the samples in flight."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[str, RequestState] = {}
        self._running: dict[str, RequestState] = {}
        self.samples: list[SampleState] = []

    def add(self, request: RequestState) -> None:
        """Afterwards the request waits for admission.

        Raises:
            InvalidRequestError: its id is in the engine already.
            QueueFullError: too many samples are in the engine.
        """
        if request.request_id in self._waiting or request.request_id in self._running:
            raise InvalidRequestError(
                "a request of this id is in the engine already",
                code="duplicate_request_id",
                field="rid",
                value=request.request_id,
                hint="Leave the id out, or make it unique.",
            )
        held = self.waiting_samples() + self.running_samples()
        if held + request.params.num_outputs_per_prompt > self._limits.max_queued_samples:
            raise QueueFullError(
                f"{held} samples are in the engine, at most {self._limits.max_queued_samples} are held",
                field="num_outputs_per_prompt",
                value=request.params.num_outputs_per_prompt,
                hint="Retry when some have finished.",
            )
        self._waiting[request.request_id] = request

    def take_waiting(self) -> Iterator[RequestState]:
        """Moves waiting requests to running, in order of urgency, and yields each, for as long as the caller asks."""
        for request in sorted(self._waiting.values(), key=lambda r: (-r.params.priority, r.arrival)):
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            yield request

    def next_to_decode(self, at_once: Callable[[Size], int]) -> list[SampleState]:
        """The first sample that has taken all its steps, and more like it: `at_once(its size)` in all, at most."""
        at_end = [s for s in self.samples if s.step == s.request.schedule.steps and not s.departed]

        def kind(sample: SampleState) -> tuple[object, ...]:
            return sample.request.size, sample.request.params.output_type == "latent", sample.latents.dtype

        alike = [s for s in at_end if kind(s) == kind(at_end[0])]
        return alike[: at_once(alike[0].request.size)] if alike else []

    def remove(self, request_id: str) -> bool:
        """Drops a request and its samples; False if it isn't here."""
        known = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        self.samples = [s for s in self.samples if s.request.request_id != request_id]
        return known is not None

    def retract(self, request_id: str) -> None:
        """A request that has begun waits again, as if it had just been added; what it had computed is dropped."""
        request = self._running.pop(request_id)
        self.samples = [s for s in self.samples if s.request is not request]
        request.results.clear()
        request.conditioning = request.denoising_env = None
        self._waiting[request_id] = request

    def find(self, request_id: str) -> RequestState | None:
        """The request, if it waits or has begun."""
        return self._waiting.get(request_id) or self._running.get(request_id)

    def request_ids(self) -> list[str]:
        return [*self._waiting, *self._running]

    def running_ids(self) -> list[str]:
        """Of the requests that have begun."""
        return list(self._running)

    def waiting_samples(self) -> int:
        return sum(r.params.num_outputs_per_prompt for r in self._waiting.values())

    def running_samples(self) -> int:
        return sum(r.params.num_outputs_per_prompt - len(r.results) for r in self._running.values())

    def remaining_evaluations(self) -> int:
        """Sample-steps still to be taken, those of a trunk counted once for each of its members."""
        waiting = 0
        for request in self._waiting.values():
            done = sum(state.step for state in request.resume_from if state is not None)
            waiting += request.params.num_outputs_per_prompt * request.schedule.steps - done
        return waiting + sum(len(s.members) * (s.request.schedule.steps - s.step) for s in self.samples)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)
