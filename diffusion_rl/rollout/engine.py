"""The conductor: `RolloutEngine.step()` admits, picks a batch, predicts, takes one step, records, and finishes.

One thread calls it (see `engine_control.step_loop`), so it holds no lock. It launches work and waits for it as late as
it can: a step while the one before still computes, and what leaves (decoding, copies to the host) beside the steps of
others. Everything that touches the model runs inside
`exact_mode`, one prompt and one picture at a time and the denoising steps in batches, so that a sample's bits depend on
its request and the weights alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import diffusers
import torch
import transformers

from diffusion_rl.batch import Size
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.compiled import CompiledForward
from diffusion_rl.models.offload import describe_offloads
from diffusion_rl.models.runner import eager
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.parallel.ranks import NoRanks, OnDeath, Ranks
from diffusion_rl.params import RolloutParams
from diffusion_rl.rollout.batcher import pick_batch
from diffusion_rl.rollout.certification import DECODE_TOGETHER, cache_of, make_exact
from diffusion_rl.rollout.compilation import compile_family, compiled_rows
from diffusion_rl.rollout.decisions import Add, Admit, Advance, Remove, Retire, Retract, digest, keys
from diffusion_rl.rollout.decoding import choose_decoding
from diffusion_rl.rollout.in_flight import Departure, Departures, StepsInFlight
from diffusion_rl.rollout.prompt_cache import PromptCache
from diffusion_rl.rollout.queue import RequestQueue, RequestState, SampleState
from diffusion_rl.rollout.rank_weights import RankWeights, rank_settings
from diffusion_rl.rollout.result import (
    check_finite,
    complete_group,
    denoising_env,
    finished_sample,
    unfinished_sample,
)
from diffusion_rl.rollout.runners import choose_runner
from diffusion_rl.rollout.samples import (
    advance_batch,
    condition,
    parts_here,
    plan_request,
    split,
    start_samples,
    step_count,
)
from diffusion_rl.rollout.startup import offload_as_configured, one_rank, start_ranks
from diffusion_rl.sample import RolloutSample
from diffusion_rl.schedulers import step_kinds
from diffusion_rl.transfer import HostCopies, Moment
from engine_control.control import Control
from engine_control.engine import Finished
from engine_control.errors import EngineDiedError, EngineError, EngineFaultError
from engine_control.rank import Outcome, RankCommand, RankControl
from engine_control.step_loop import StepLoop
from rl_kernels.certify import Exactness

logger = logging.getLogger(__name__)

COUNTED = (
    "steps",
    "evaluations",
    "samples_finished",
    "requests_finished",
    "requests_failed",
    "requests_aborted",
    "requests_retracted",
)
DEPARTURES_AHEAD = 8  # samples whose decoding may be launched beyond what has arrived
WORK_BUDGET_S = 0.1  # how long text encoding, and decoding, may each hold up the next step when there is much of it


def build_engine(config: EngineConfig, *, on_death: OnDeath | None = None) -> RolloutEngine:
    """Loads the model that `config` names, on as many ranks as it asks for, and returns an idle engine.

    Raises:
        InvalidRequestError: the model can't be loaded, no family serves it, or the layout doesn't fit it.
        NotExactError: `config.deterministic` insists on exactness that can't be had.
        EngineDiedError: another rank could not start.
    """
    family, exactness, ranks = start_ranks(config, on_death=on_death)
    return RolloutEngine(family, config, exactness=exactness, ranks=ranks)


class RolloutEngine:
    """Advances the samples of many requests, one denoising step at a time: an `engine_control.engine.StepEngine`."""

    def __init__(
        self,
        family: ModelFamily,
        config: EngineConfig | None = None,
        *,
        exactness: Exactness | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Is idle afterwards. Certifies the family on its device (see `certification`) unless that was done.

        `on_sample` may be set to hear of each sample that is done, with its request's id, before its request is. What
        is known only at the request's end is missing; its tensors are those of the result.
        """
        self.family = family
        self.config = config or EngineConfig()
        offload_as_configured(family, self.config)
        self.exactness = exactness or make_exact(family, self.config.deterministic, cache=cache_of(self.config))
        self.ranks: Ranks = ranks or NoRanks(one_rank(family, self.config))
        if not self.ranks.arrangement.splits_forward:  # ranks that share a forward have chosen together
            family.runner = eager  # whatever another engine chose for it
            self.exactness = self._choose_runner(self.exactness)
        graphs, cache = self.config.cuda_graphs, cache_of(self.config)
        self.exactness = choose_decoding(family, self.exactness, cuda_graphs=graphs, cache=cache)
        self.weight_version = self.config.weight_version
        self._queue = RequestQueue(self.config.limits)
        self._prompts = PromptCache(family, self.config.prompt_cache_size)
        self.weights = RankWeights(family, self._prompts, self.config, self.ranks.arrangement)
        self._rank = RankControl(self.weights, rank_settings(self.config, 0), adapters=self.weights.adapters)
        self._steps = StepsInFlight()
        self._departures = Departures()
        self._copies = HostCopies(family.device)
        self.on_sample: Callable[[str, RolloutSample], None] = lambda request_id, sample: None
        self._held = False
        self._counts: Counter[str] = Counter()
        self._arrivals = 0

    def add_request(self, request_id: str, request: RolloutParams) -> None:
        """Checks the request against the model and queues it; see `StepEngine.add_request`."""
        self._queue.add(self._plan(request_id, request))
        self.ranks.announce(Add(request_id, request))
        self._arrivals += 1

    def check_request(self, request: RolloutParams) -> None:
        """Refuses what `add_request` would refuse for the request's own sake, and queues nothing."""
        self._plan("", request)

    def abort_request(self, request_id: str) -> bool:
        known = self._remove(request_id)
        self._counts["requests_aborted"] += known
        return known

    @torch.no_grad()
    def partial_result(self, request_id: str) -> list[RolloutSample] | None:
        """As `StepEngine`. What is handed out of samples in flight has the same bits on all ranks, as at their end; the
        others drop them by that."""
        request = self._queue.find(request_id)
        if request is None or not request.params.rollout_return_partial:
            return None
        held = [sample for sample in self._queue.samples if sample.request is request]
        if here := [sample for sample in held if not sample.departed]:
            self.ranks.agree(Retire(keys(here)), [partial(digest, sample) for sample in here])
        parts = [part for sample in held for part in (split(sample) if len(sample.members) > 1 else [sample])]
        states = {part.members[0]: part for part in parts}
        unfinished = [index for index in range(len(request.seeds)) if index not in request.results]
        with self.family.exact(), torch.autocast(self.family.device.type, enabled=False):
            made = {i: unfinished_sample(self.family, request, i, states.get(i)) for i in unfinished}
        return complete_group(self.family, request, made)

    def has_unfinished_requests(self) -> bool:
        return bool(self._queue.running_ids()) if self._held else len(self._queue) > 0

    def hold_admission(self, held: bool) -> None:
        self._held = held

    def request_ids(self) -> list[str]:
        return self._queue.request_ids()

    def running_requests(self) -> list[str]:
        return self._queue.running_ids()

    def retract_requests(self) -> int:
        retracted = self._queue.running_ids()
        for request_id in retracted:
            self._queue.retract(request_id)
            self._departures.drop(request_id)
            self.ranks.announce(Retract(request_id))
        self._counts["requests_retracted"] += len(retracted)
        return len(retracted)

    def everywhere(self, command: RankCommand) -> list[Outcome]:
        return self.ranks.everywhere(command, lambda: self._rank.carry_out(command))

    def flush_needs_idle(self) -> bool:
        return False  # a request that has begun holds its own conditioning

    @torch.no_grad()
    def step(self) -> list[Finished[list[RolloutSample]]]:
        """One denoising step of one batch; beside it, text encoding and decoding for at most `WORK_BUDGET_S` each."""
        # The caller's autocast would change the bits.
        with self.family.exact(), torch.autocast(self.family.device.type, enabled=False):
            finished = self._admit()
            batch = pick_batch(self._queue.samples, self.config.max_batch_size)
            if batch:
                self._steps.settle(ahead=1)  # a younger request's first step should not wait for many of these
                began = Moment(self.family.device)
                self.ranks.announce(Advance(keys(batch)))
                adapted = self.weights.adapters.active(batch[0].request.params.lora_name)
                with self.ranks.together(), adapted:
                    advance_batch(self.family, batch, self.ranks.arrangement)
                self._account(batch, began)
            finished += self._finish(idle=not batch)
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
        return {**{n: float(self._counts[n]) for n in COUNTED}, **{n: float(v) for n, v in gauges.items()}}

    def step_count(self, params: RolloutParams) -> int:
        """T, the number of steps that a request takes."""
        return step_count(params, self.family.defaults.num_inference_steps)

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
            "lora_adapters": self.weights.adapters.describe(),
            "attention_backend": "torch_sdpa",
            "deterministic": self.exactness.describe(),
            "torch_compile": self._describe_compiled(),
            "dit_layerwise_offload": describe_offloads(family.transformers.values()),
            "parallel": self._describe_parallel(),
            "step_kinds": step_kinds.names(),
            "max_batch_size": self.config.max_batch_size,
            "limits": vars(self.config.limits),
            "defaults": vars(defaults),
            "size_multiple": family.size_multiple,
            "frame_multiple": family.frame_multiple,
            "transformers": list(family.transformers),
            "most_pictures": family.most_pictures,
            "text_encoders": list(family.text_encoders(defaults.max_sequence_length)),
            "prompt_embeds_width": family.text_width,
            "pooled_prompt_embeds_width": family.pooled_width,
            "threads": torch.get_num_threads(),
            "versions": {
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "transformers": transformers.__version__,
            },
        }

    def controlled_by(self, loop: StepLoop[RolloutParams, list[RolloutSample]]) -> Control:
        """The control layer of this engine; afterwards the loop knows its commands."""
        settings = rank_settings(self.config, 0)
        return Control(self, self.weights.target, loop, self.config.control, world_size=settings.world_size)

    def close(self) -> None:
        """Closes transports, and ends the other ranks, if there are any. The engine takes no step afterwards."""
        self._rank.close()
        self.weights.memory.close()
        self.ranks.close()

    def _choose_runner(self, exactness: Exactness) -> Exactness:
        config = self.config
        if not config.torch_compile:
            return choose_runner(self.family, exactness, cuda_graphs=config.cuda_graphs)
        rows = compiled_rows(config.torch_compile_rows, config.max_batch_size)
        return compile_family(self.family, exactness, rows=rows, wanted=config.deterministic)

    def _describe_compiled(self) -> dict[str, object] | None:
        runner = self.family.runner
        return runner.describe() if isinstance(runner, CompiledForward) else None

    def _describe_parallel(self) -> dict[str, object]:
        layout = layout_of(self.config.parallel)
        return {
            "tp_size": layout.tp_size,
            "sp_degree": layout.sp_degree,
            "ulysses_degree": layout.sp_degree,
            "ring_degree": 1,
            "cfg_parallel_size": layout.cfg_degree,
            "dp_size": 1,
            "guidance": "parallel" if layout.cfg_degree > 1 else self.config.parallel.guidance,
            "ranks": self.ranks.describe(),
        }

    def _plan(self, request_id: str, params: RolloutParams) -> RequestState:
        request = plan_request(self.family, self.config.limits, request_id, params, arrival=self._arrivals)
        self.weights.adapters.check(params.lora_name)
        return request

    def _admit(self) -> list[Finished[list[RolloutSample]]]:
        """Encodes the prompts of waiting requests and puts their samples in flight: enough to fill two batches.

        Returns the requests that failed at it.
        """
        failed: list[Finished[list[RolloutSample]]] = []
        began = time.perf_counter()
        waiting = self._queue.take_waiting()
        while not self._held and len(self._queue.samples) < 2 * self.config.max_batch_size and not _spent(began):
            request = next(waiting, None)
            if request is None:
                break
            failed += self._isolated(request, self._encode_and_start)
        return failed

    def _encode_and_start(self, request: RequestState) -> None:
        self.weights.adapters.check(request.params.lora_name)  # it may have been unloaded since
        request.admitted_at = began = time.perf_counter()
        self.ranks.announce(Admit(request.request_id))
        condition(request, self._prompts)
        denoising_env(self.family, request)  # by now, so that no sample waits for it at its end
        self._queue.samples += start_samples(self.family, request)
        request.encode_s = time.perf_counter() - began

    def _isolated(
        self, request: RequestState, work: Callable[[RequestState], None]
    ) -> list[Finished[list[RolloutSample]]]:
        """Does one request's own work; whatever goes wrong in it ends that request alone, and is returned."""
        try:
            work(request)
        except EngineDiedError:
            raise  # so is a dead rank
        except EngineError as error:
            return [self._failed(request.request_id, error)]
        except torch.AcceleratorError:
            raise  # a broken device is everybody's
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            return [self._failed(request.request_id, EngineFaultError(f"{type(error).__name__}: {error}"))]
        return []

    def _account(self, batch: list[SampleState], began: Moment) -> None:
        """Counts the step that was launched since then, and splits trunks whose samples part here."""
        self._counts["steps"] += 1
        self._counts["evaluations"] += len(batch)
        requests = {id(s.request): s.request for s in batch}
        self._steps.add(tuple(requests.values()), began, Moment(self.family.device))
        for sample in batch:
            sample.request.num_evaluations += 1
            name = sample.request.params.lora_name
            sample.weight_versions += (self.weights.adapters.version(self.weight_version, name),)
            if parts_here(sample):
                self._queue.samples.remove(sample)
                self._queue.samples += split(sample)

    def _finish(self, *, idle: bool) -> list[Finished[list[RolloutSample]]]:
        """Has samples that are at their end decoded and copied, and hands out the requests that are complete or failed
        at it. With `idle`, when there was no step to take, it waits for a sample to arrive."""
        finished: list[Finished[list[RolloutSample]]] = []
        began = time.perf_counter()
        while samples := self._queue.next_to_decode(self._decoded_at_once):
            self.ranks.agree(Retire(keys(samples)), [partial(digest, s) for s in samples])
            decoding = Moment(self.family.device)
            pictures = self._pictures(samples)
            spent = (decoding, Moment(self.family.device), len(samples))
            for sample, picture in zip(samples, pictures, strict=True):
                if sample in self._queue.samples:  # its request did not fail at an earlier sample
                    finished += self._isolated(sample.request, partial(self._depart, sample, picture, spent))
            while len(self._departures) > DEPARTURES_AHEAD:
                finished += self._arrive(wait=True)
            if _spent(began):
                break
        return finished + self._arrive(wait=idle)

    def _decoded_at_once(self, size: Size) -> int:
        """How many pictures of that size may be decoded together."""
        return DECODE_TOGETHER if size == self.family.decodes_together else 1

    def _pictures(self, samples: list[SampleState]) -> Sequence[torch.Tensor | None]:
        """Pictures of samples of one size that want one, decoded together; None where that must be done one by one."""
        if samples[0].request.params.output_type == "latent":
            return [None] * len(samples)
        try:
            pictures = self.family.pictures(torch.stack([s.latents for s in samples]), *samples[0].request.size)
        except torch.AcceleratorError:
            raise  # a broken device is everybody's
        except Exception:
            logger.exception("decoding %d samples failed; trying each alone", len(samples))
            return [None] * len(samples)
        return list(pictures.unbind(0))

    def _depart(
        self,
        sample: SampleState,
        picture: torch.Tensor | None,
        decoding: tuple[Moment, Moment, int],
        request: RequestState,
    ) -> None:
        """Begins to copy a sample's result. A picture that couldn't be decoded with others is decoded now, alone."""
        if picture is None and request.params.output_type != "latent":
            picture = self.family.pictures(sample.latents[None], *request.size)[0]
        result, finite = finished_sample(self.family, sample, picture, self._copies)
        self._departures.add(Departure(sample, result, finite, self._copies.landing(), decoding))

    def _arrive(self, *, wait: bool) -> list[Finished[list[RolloutSample]]]:
        """Keeps results that have landed on the host, and hands out requests that are complete or failed by them."""
        finished: list[Finished[list[RolloutSample]]] = []
        for departure in self._departures.arrived(wait=wait):
            request = departure.sample.request
            finished += self._isolated(request, partial(self._keep, departure))
            if len(request.results) == len(request.seeds):
                self._steps.settle()
                self._remove(request.request_id)
                self._counts["requests_finished"] += 1
                finished.append(Finished(request.request_id, result=complete_group(self.family, request)))
        return finished

    def _keep(self, departure: Departure, request: RequestState) -> None:
        check_finite(departure.sample, departure.finite)
        began, ended, count = departure.decoding
        request.decode_s += ended.seconds_since(began) / count
        request.results[departure.sample.members[0]] = departure.result
        self.on_sample(request.request_id, departure.result)
        self._queue.samples.remove(departure.sample)
        self._counts["samples_finished"] += 1

    def _failed(self, request_id: str, error: EngineError) -> Finished[list[RolloutSample]]:
        self._remove(request_id)
        self._counts["requests_failed"] += 1
        return Finished(request_id, error=error)

    def _remove(self, request_id: str) -> bool:
        """Drops a request and its samples, on every rank; False if it isn't here."""
        known = self._queue.remove(request_id)
        self._departures.drop(request_id)
        if known:
            with contextlib.suppress(EngineDiedError):  # then there is nobody to tell
                self.ranks.announce(Remove(request_id))
        return known


def _spent(began: float) -> bool:
    return time.perf_counter() - began > WORK_BUDGET_S
