"""The conductor: `RolloutEngine.step()` admits, picks a batch, predicts, takes one step, records, and finishes.

One thread calls it (see `engine_control.step_loop`), so it holds no lock. Everything that touches the model runs inside
`exact_mode`, one prompt and one picture at a time and the denoising steps in batches, so that a sample's bits depend on
its request and the weights alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import diffusers
import torch
import transformers

from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily, load_family
from diffusion_rl.models.base import Conditioning, DenoiseBatch, PromptEmbeds
from diffusion_rl.params import RolloutParams, check_pixels, check_step_fields
from diffusion_rl.rollout.batcher import pick_batch
from diffusion_rl.rollout.certification import DECODE_TOGETHER, make_exact
from diffusion_rl.rollout.noise import NoiseStream, normal_noise
from diffusion_rl.rollout.queue import RequestQueue, RequestState, SampleState
from diffusion_rl.rollout.recorder import Recorder
from diffusion_rl.rollout.result import complete_group, finished_sample
from diffusion_rl.rollout.schedule import make_schedule
from diffusion_rl.rollout.transition import advance, round_to_storage
from diffusion_rl.sample import RolloutSample
from diffusion_rl.schedulers import step_kinds
from engine_control.engine import Finished
from engine_control.errors import EngineError, EngineFaultError, InvalidRequestError

logger = logging.getLogger(__name__)

INITIAL_WEIGHT_VERSION = "default"
WORK_BUDGET_S = 0.1  # how long text encoding, and decoding, may each hold up the next step when there is much of it


def build_engine(config: EngineConfig) -> RolloutEngine:
    """Loads the model that `config` names and returns an idle engine.

    Raises:
        InvalidRequestError: the model can't be loaded, or no family serves it.
        NotExactError: `config.deterministic` insists on exactness that can't be had.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = None if config.dtype == "auto" else _dtype(config.dtype)
    return RolloutEngine(load_family(config.model_path, dtype=dtype, device=device), config)


class RolloutEngine:
    """Advances the samples of many requests, one denoising step at a time: an `engine_control.engine.StepEngine`."""

    def __init__(self, family: ModelFamily, config: EngineConfig | None = None) -> None:
        """Certifies the family on its device (see `certification`), and is idle afterwards."""
        self.family = family
        self.config = config or EngineConfig()
        self.exactness = make_exact(family, self.config.deterministic)
        self.weight_version = INITIAL_WEIGHT_VERSION
        self._queue = RequestQueue(self.config.limits)
        self._prompts = PromptCache(family, self.config.prompt_cache_size)
        self._counts: Counter[str] = Counter()
        self._arrivals = 0

    def add_request(self, request_id: str, request: RolloutParams) -> None:
        """Checks the request against the model and queues it; see `StepEngine.add_request`."""
        self._queue.add(self._plan(request_id, request))
        self._arrivals += 1

    def check_request(self, request: RolloutParams) -> None:
        """Refuses what `add_request` would refuse for the request's own sake, and queues nothing."""
        self._plan("", request)

    def abort_request(self, request_id: str) -> bool:
        known = self._queue.remove(request_id)
        self._counts["requests_aborted"] += known
        return known

    def has_unfinished_requests(self) -> bool:
        return len(self._queue) > 0

    @torch.no_grad()
    def step(self) -> list[Finished[list[RolloutSample]]]:
        """One denoising step of one batch; beside it, text encoding and decoding for at most `WORK_BUDGET_S` each."""
        # The caller's autocast would change the bits.
        with self.family.exact(), torch.autocast(self.family.device.type, enabled=False):
            finished = self._admit()
            batch = pick_batch(self._queue.samples, self.config.max_batch_size)
            if batch:
                began = time.perf_counter()
                advance(batch, self._predict(batch))
                self._account(batch, time.perf_counter() - began)
            finished += self._finish()
        return finished

    def fail_unfinished(self, error: EngineError) -> list[Finished[list[RolloutSample]]]:
        return [self._failed(request_id, error) for request_id in self._queue.request_ids()]

    def stats(self) -> dict[str, float]:
        """Counts since the start, and what is in the engine now."""
        gauges = {
            "requests_in_engine": len(self._queue),
            "samples_waiting": self._queue.waiting_samples(),
            "samples_running": self._queue.running_samples(),
        }
        names = ("steps", "evaluations", "samples_finished", "requests_finished", "requests_failed", "requests_aborted")
        return {**{n: float(self._counts[n]) for n in names}, **{n: float(v) for n, v in gauges.items()}}

    def step_count(self, params: RolloutParams) -> int:
        """T, the number of steps that a request takes."""
        return _step_count(params, self.family.defaults.num_inference_steps)

    def remaining_evaluations(self) -> int:
        """Sample-steps that the requests in the engine still need, shared ones counted once for each sample."""
        return self._queue.remaining_evaluations()

    def describe(self) -> dict[str, object]:
        """What is loaded and how, for `/server_info` and `diffusion-rl doctor`."""
        family, defaults = self.family, self.family.defaults
        return {
            "model_path": self.config.model_path,
            "family": type(family).__module__.rsplit(".", 1)[-1],
            "pipeline_class": family.pipeline_class_name,
            "dtype": str(family.dtype).removeprefix("torch."),
            "device": str(family.device),
            "device_name": torch.cuda.get_device_name(family.device) if family.device.type == "cuda" else "cpu",
            "weight_version": self.weight_version,
            "attention_backend": "torch_sdpa",
            "deterministic": self.exactness.describe(),
            "parallel": {"tp_size": 1, "sp_degree": 1, "cfg_parallel_size": 1, "dp_size": 1},
            "step_kinds": step_kinds.names(),
            "max_batch_size": self.config.max_batch_size,
            "limits": vars(self.config.limits),
            "defaults": vars(defaults),
            "size_multiple": family.size_multiple,
            "threads": torch.get_num_threads(),
            "versions": {
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "transformers": transformers.__version__,
            },
        }

    def _plan(self, request_id: str, params: RolloutParams) -> RequestState:
        """All that a request is, before any model work; refuses what this model can't do."""
        params.validate(self.config.limits, step_kinds=step_kinds.names())
        family, defaults = self.family, self.family.defaults
        size = (params.height or defaults.height, params.width or defaults.width)
        check_pixels(size[1], size[0], self.config.limits)
        family.check_size(*size)
        steps = self.step_count(params)
        check_step_fields(params, steps)
        length = params.max_sequence_length or defaults.max_sequence_length
        scale, negative = family.guidance(params)
        family.check_prompt(params.prompt, "prompt", length)
        if negative is not None:
            family.check_prompt(negative, "negative_prompt", length)
        seeds = _seeds(params)
        return RequestState(
            request_id=request_id,
            params=params,
            schedule=make_schedule(family, params, steps=steps, size=size, seed=seeds[0]),
            size=size,
            seeds=seeds,
            guidance_scale=scale,
            negative_prompt=negative,
            max_sequence_length=length,
            arrival=self._arrivals,
        )

    def _admit(self) -> list[Finished[list[RolloutSample]]]:
        """Encodes the prompts of waiting requests and puts their samples in flight: enough to fill two batches.

        Returns the requests that failed at it.
        """
        failed: list[Finished[list[RolloutSample]]] = []
        began = time.perf_counter()
        waiting = self._queue.take_waiting()
        while len(self._queue.samples) < 2 * self.config.max_batch_size and not _spent(began):
            request = next(waiting, None)
            if request is None:
                break
            failed += self._isolated(request, self._encode_and_start)
        return failed

    def _encode_and_start(self, request: RequestState) -> None:
        request.admitted_at = began = time.perf_counter()
        length, negative = request.max_sequence_length, request.negative_prompt
        request.conditioning = Conditioning(
            positive=self._prompts.encode(request.params.prompt, length),
            negative=None if negative is None else self._prompts.encode(negative, length),
            guidance_scale=request.guidance_scale,
        )
        self._queue.samples += self._start(request)
        request.encode_s = time.perf_counter() - began

    def _isolated(
        self, request: RequestState, work: Callable[[RequestState], None]
    ) -> list[Finished[list[RolloutSample]]]:
        """Does one request's own work; whatever goes wrong in it ends that request alone, and is returned."""
        try:
            work(request)
        except EngineError as error:
            return [self._failed(request.request_id, error)]
        except torch.AcceleratorError:
            raise  # a broken device is everybody's
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            return [self._failed(request.request_id, EngineFaultError(f"{type(error).__name__}: {error}"))]
        return []

    def _start(self, request: RequestState) -> list[SampleState]:
        """The request's samples at step 0, or their common trunk if they have a deterministic prefix in common."""
        params, schedule, count = request.params, request.schedule, len(request.seeds)
        shared = params.init_same_noise and params.rollout_share_prefix and schedule.first_stochastic_step > 0
        groups = [tuple(range(count))] if shared else [(i,) for i in range(count)]
        seeds = [initial_noise_seed(params, request.seeds, members[0]) for members in groups]
        shape = self.family.initial_noise_shape(*request.size)
        noise = normal_noise(seeds, NoiseStream.INITIAL_LATENT, [0] * len(seeds), shape, self.family.device)
        latents = self.family.pack(noise)
        latents = latents.to(self.family.dtype) if schedule.ode_state else round_to_storage(latents, params)
        samples = []
        for members, latent in zip(groups, latents, strict=True):
            recorder = Recorder(params, schedule, tuple(latent.shape), latent.device)
            recorder.record_state(0, latent)
            samples.append(SampleState(request, members, latent, recorder))
        return samples

    def _predict(self, batch: list[SampleState]) -> torch.Tensor:
        """One forward for all samples of the batch: velocities after guidance `[n, ...]`."""
        first = batch[0].request
        timesteps = torch.stack([s.request.schedule.timesteps[s.step] for s in batch])
        latents = torch.stack([s.latents for s in batch]).to(self.family.dtype)
        conditioning = tuple(s.request.conditioning for s in batch if s.request.conditioning is not None)
        return self.family.predict(
            DenoiseBatch(latents, timesteps.to(self.family.device), conditioning, first.size[0], first.size[1])
        )

    def _account(self, batch: list[SampleState], seconds: float) -> None:
        """Counts the step, and splits trunks whose samples part here."""
        self._counts["steps"] += 1
        self._counts["evaluations"] += len(batch)
        for request in {id(s.request): s.request for s in batch}.values():
            request.denoise_s += seconds
        for sample in batch:
            sample.request.num_evaluations += 1
            sample.weight_versions += (self.weight_version,)
            if len(sample.members) > 1 and sample.step == sample.request.schedule.first_stochastic_step:
                self._queue.samples.remove(sample)
                self._queue.samples += _split(sample)

    def _finish(self) -> list[Finished[list[RolloutSample]]]:
        """Decodes samples that are at their end, and hands out the requests that are complete or failed at it."""
        finished: list[Finished[list[RolloutSample]]] = []
        began = time.perf_counter()
        while samples := self._queue.next_to_decode(self._decoded_at_once):
            pictures = self._pictures(samples)
            for sample, picture in zip(samples, pictures, strict=True):
                request = sample.request
                if sample not in self._queue.samples:  # its request failed at an earlier sample
                    continue
                finished += self._isolated(request, partial(self._hand_over, sample, picture))
                if len(request.results) == len(request.seeds):
                    self._queue.remove(request.request_id)
                    self._counts["requests_finished"] += 1
                    finished.append(Finished(request.request_id, result=complete_group(self.family, request)))
            if _spent(began):
                break
        return finished

    def _decoded_at_once(self, size: tuple[int, int]) -> int:
        """How many pictures of that size may be decoded together."""
        return DECODE_TOGETHER if size == self.family.decodes_together else 1

    def _pictures(self, samples: list[SampleState]) -> Sequence[torch.Tensor | None]:
        """Pictures of samples of one size that want one, decoded together; None where that must be done one by one."""
        if samples[0].request.params.output_type == "latent":
            return [None] * len(samples)
        began = time.perf_counter()
        try:
            pictures = self.family.decode(torch.stack([s.latents for s in samples]), *samples[0].request.size)
        except torch.AcceleratorError:
            raise  # a broken device is everybody's
        except Exception:
            logger.exception("decoding %d samples failed; trying each alone", len(samples))
            return [None] * len(samples)
        for sample in samples:
            sample.request.decode_s += (time.perf_counter() - began) / len(samples)
        return list(pictures.unbind(0))

    def _hand_over(self, sample: SampleState, picture: torch.Tensor | None, request: RequestState) -> None:
        """Keeps a sample's result. A picture that could not be decoded with others is decoded now, by itself."""
        if picture is None and request.params.output_type != "latent":
            picture = self.family.decode(sample.latents[None], *request.size)[0]
        request.results[sample.members[0]] = finished_sample(self.family, sample, picture)
        self._queue.samples.remove(sample)
        self._counts["samples_finished"] += 1

    def _failed(self, request_id: str, error: EngineError) -> Finished[list[RolloutSample]]:
        self._queue.remove(request_id)
        self._counts["requests_failed"] += 1
        return Finished(request_id, error=error)


@dataclass(frozen=True)
class _PromptKey:
    prompt: str
    max_sequence_length: int


class PromptCache:
    """Encoded prompts, the least recently used one dropped first. A refit of a text encoder must `clear` it."""

    def __init__(self, family: ModelFamily, size: int) -> None:
        self._family = family
        self._size = size
        self._entries: OrderedDict[_PromptKey, PromptEmbeds] = OrderedDict()

    def encode(self, prompt: str, max_sequence_length: int) -> PromptEmbeds:
        """The embeddings of a prompt, from the cache or from the text encoders; the same tensor for equal prompts."""
        key = _PromptKey(prompt, max_sequence_length)
        if key not in self._entries:
            self._entries[key] = self._family.encode_prompt(prompt, max_sequence_length)
        self._entries.move_to_end(key)
        embeds = self._entries[key]
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return embeds

    def clear(self) -> None:
        self._entries.clear()


def initial_noise_seed(params: RolloutParams, seeds: tuple[int, ...], index: int) -> int:
    """The seed of sample `index`'s initial latent."""
    first = seeds[0] if params.initial_noise_seed is None else params.initial_noise_seed
    if params.init_same_noise:
        return first
    return seeds[index] if params.initial_noise_seed is None else first + index


def _spent(began: float) -> bool:
    return time.perf_counter() - began > WORK_BUDGET_S


def _split(trunk: SampleState) -> list[SampleState]:
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


def _seeds(params: RolloutParams) -> tuple[int, ...]:
    if params.seeds is not None:
        return params.seeds
    if params.seed is None:
        raise InvalidRequestError(
            "the engine needs a seed", field="seed", hint="The service and RolloutPipeline choose one if you don't."
        )
    return tuple(params.seed + i for i in range(params.num_outputs_per_prompt))


def _step_count(params: RolloutParams, default: int) -> int:
    if params.sigmas is not None:
        return len(params.sigmas) - (params.sigmas[-1] == 0)
    return params.num_inference_steps or default


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise InvalidRequestError(
            f"unknown dtype {name!r}", field="dtype", value=name, hint=f"Known: auto, {', '.join(known)}."
        )
    return known[name]
