"""The service that the routes share: the engine's process, the tokenizer, and the path of a request between them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from engine_control.config import engine_environment
from engine_control.errors import EngineError, InvalidRequestError, LimitExceededError
from engine_control.process import EngineState, EngineSupervisor, RestartPolicy
from engine_control.server.metrics import Metrics
from engine_control.server.service import EngineService
from llm_runtime.config import LLMConfig, ServerConfig
from llm_runtime.output import GenerateOutput
from llm_runtime.params import LARGEST_SEED, GenerateRequest, SamplingParams, samples_of
from llm_runtime.text import Tokenizer

WORKER_MODULE = "llm_runtime.server.worker"
GAUGES = ("requests_running", "requests_waiting", "tokens_in_use", "tokens_cached_now", "kv_cache_usage")
STEPS_WAIT_S = 1.0  # of /health_generate for its own request, before it looks whether others make progress
ARBITRARY_SEED = 2**31  # a bound of seeds that nobody chose
LOG_PROBS = 4_000_000  # of one sequence: what a message between the processes has room for


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks for: sequences and their ids, prompt by prompt, all samples of one side by side."""

    request_id: str
    ids: tuple[str, ...]
    requests: tuple[GenerateRequest, ...]


class LLMService(EngineService):
    """One language-model engine and what is served from it."""

    def __init__(self, llm_config: LLMConfig, server_config: ServerConfig) -> None:
        self.llm_config = llm_config
        self.config = server_config
        self.started_at = int(time.time())
        # A refit from disk doesn't change this name, though SGLang's does: a client goes on naming the model as before,
        # and which weights answered it is what `weight_version` says.
        self.model_name = server_config.served_model_name or llm_config.model_path
        supervisor = EngineSupervisor(
            WORKER_MODULE,
            msgspec.json.encode(llm_config),
            environment=engine_environment(llm_config.tp_size),
            policy=RestartPolicy(server_config.engine_start_timeout_s, server_config.max_restarts),
        )
        super().__init__(supervisor, health_generate_timeout_s=server_config.health_generate_timeout_s)
        self.metrics = Metrics(
            "llm_runtime",
            gauges=GAUGES,
            restarts=lambda: supervisor.restarts,
            ready=lambda: supervisor.state is EngineState.READY,
        )
        self.in_flight = self.metrics.gauge("requests_in_flight", "Requests whose reply is not sent completely")
        self._loading: asyncio.Task[Tokenizer | None] | None = None
        seed = llm_config.random_seed
        self._next_seed = secrets.randbelow(ARBITRARY_SEED) if seed is None else seed

    def load_tokenizer(self) -> None:
        """Begins to load it and returns at once."""
        self._loading = asyncio.create_task(asyncio.to_thread(self._load), name="tokenizer")
        self._loading.add_done_callback(lambda done: done.cancelled() or done.exception())  # the engine says it too

    async def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if the service takes and gives token ids alone.

        Raises:
            EngineUnavailableError: the engine takes no requests now.
            InvalidRequestError: the tokenizer can't be loaded.
        """
        self.check_ready()
        assert self._loading is not None  # the app's lifespan has begun
        return await asyncio.shield(self._loading)

    async def text_tokenizer(self) -> Tokenizer:
        """As `tokenizer`, for what can't be done without one."""
        tokenizer = await self.tokenizer()
        if tokenizer is None:
            raise no_tokenizer()
        return tokenizer

    def smallest_request(self) -> GenerateRequest:
        return GenerateRequest(input_ids=(0,), sampling=SamplingParams(max_new_tokens=1, temperature=0.0))

    async def health_generate(self) -> None:
        """As `EngineService`'s; but where many requests wait in front of the smallest one, it is proof enough that the
        engine takes steps meanwhile."""
        answered = asyncio.ensure_future(super().health_generate())
        try:
            async with asyncio.timeout(self.health_generate_timeout_s):
                steps = (await self.supervisor.call("stats"))["steps"]
                while not (await asyncio.wait({answered}, timeout=STEPS_WAIT_S))[0]:
                    if (await self.supervisor.call("stats"))["steps"] > steps:
                        return
                answered.result()
        finally:
            await _cancel([answered])

    def job(self, prompts: Sequence[GenerateRequest], *, rid: str | None = None, rids: Sequence[str] = ()) -> Job:
        """The sequences of these prompts, `n` of each, with seeds for those that chose none. To be called on the event
        loop.

        rid: of the whole, from which several sequences get `rid_0`, `rid_1` and so on; a new one if there is none.
        rids: of each prompt instead, and of its samples `rid_0`, `rid_1`.

        Raises:
            LimitExceededError: they are more than this service queues, or ask for more log-probs than a reply holds.
        """
        for prompt in prompts:
            self._check_log_probs(prompt)
        total = sum(prompt.sampling.n for prompt in prompts)
        if total > self.llm_config.max_queued_requests:
            raise LimitExceededError(
                f"{total} sequences in one request, at most {self.llm_config.max_queued_requests} are taken",
                value=total,
                hint="Send fewer prompts or samples at a time.",
            )
        base = rid or uuid.uuid4().hex
        ids: list[str] = []
        requests: list[GenerateRequest] = []
        for index, prompt in enumerate(prompts):
            n = prompt.sampling.n
            requests += samples_of(replace(prompt, seed=self._seed(prompt.sampling)), n)
            if rids:
                ids += [rids[index]] if n == 1 else [f"{rids[index]}_{sample}" for sample in range(n)]
        ids = ids or ([base] if total == 1 else [f"{base}_{number}" for number in range(total)])
        return Job(base, tuple(ids), tuple(requests))

    async def compute(self, job: Job) -> list[GenerateOutput]:
        """The job's outputs, in its order. If one fails, or this is cancelled, all are aborted between two steps.

        Raises:
            EngineError: what the engine made of the first one that failed.
        """
        tasks = [
            asyncio.ensure_future(self.supervisor.submit(name, request))
            for name, request in zip(job.ids, job.requests, strict=True)
        ]
        try:
            return [msgspec.convert(plain, GenerateOutput) for plain in await asyncio.gather(*tasks)]
        finally:
            await _cancel(tasks)

    async def stream(self, job: Job) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
        """Outputs as far as they are, each with its index in the job, again and again until all have a finish reason.
        A reader who is slow gets the newest. Errors and cancellation are as `compute`'s."""
        arrived: asyncio.Queue[tuple[int, GenerateOutput] | EngineError | None] = asyncio.Queue(maxsize=1)
        tasks = [asyncio.ensure_future(self._follow(job, index, arrived)) for index in range(len(job.ids))]
        going_on = len(tasks)
        try:
            while going_on:
                item = await arrived.get()
                if isinstance(item, EngineError):
                    raise item
                if item is None:
                    going_on -= 1
                else:
                    yield item
        finally:
            await _cancel(tasks)

    async def _follow(
        self, job: Job, index: int, arrived: asyncio.Queue[tuple[int, GenerateOutput] | EngineError | None]
    ) -> None:
        request = replace(job.requests[index], stream=True)
        try:
            async with contextlib.aclosing(self.supervisor.stream(job.ids[index], request)) as outputs:
                async for plain in outputs:
                    await arrived.put((index, msgspec.convert(plain, GenerateOutput)))
            await arrived.put(None)
        except EngineError as error:
            await arrived.put(error)

    async def loads(self) -> dict[str, int]:
        """What is in the engine right now, in SGLang's words.

        Raises:
            EngineUnavailableError: there is no engine to ask.
        """
        stats = await self.supervisor.call("stats")  # fresh: who polls it waits for the engine to be empty
        running, waiting = int(stats["requests_running"]), int(stats["requests_waiting"])
        return {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_total_tokens": int(stats["tokens_in_use"]),
            "max_total_num_tokens": int(self.supervisor.description["max_total_num_tokens"]),
        }

    async def model_info(self) -> dict[str, Any]:
        """The body of `/model_info`."""
        description = await self.description()
        return {
            "model_path": self.llm_config.model_path,
            "served_model_name": self.model_name,
            "tokenizer_path": self.llm_config.tokenizer_path or self.llm_config.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": description.get("weight_version"),
            "load_format": self.llm_config.load_format,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": description.get("model_type"),
            "architectures": description.get("architectures"),
            "context_length": description.get("context_length"),
            "vocab_size": description.get("vocab_size"),
        }

    async def server_info(self) -> dict[str, Any]:
        """The body of `/server_info`: the configuration, then what the engine says of itself."""
        description, stats = await self.description(), await self.stats()
        return {
            **asdict(self.llm_config),
            **description,
            "served_model_name": self.model_name,
            "pp_size": 1,
            "ep_size": 1,
            "disaggregation_mode": "null",
            "status": self.supervisor.state.value,
            "engine": self.engine_process(),
            "server": asdict(self.config),
            "internal_states": [{"stats": stats}],
            "stats": stats,
        }

    def _load(self) -> Tokenizer | None:
        from llm_runtime.models.loading import model_folder

        if self.llm_config.skip_tokenizer_init:
            return None
        return Tokenizer(self.llm_config.tokenizer_path or model_folder(self.llm_config.model_path))

    def _check_log_probs(self, prompt: GenerateRequest) -> None:
        """Refuses what may come to be more than can be answered, before the engine makes it."""
        if not prompt.return_logprob:
            return
        top = min(prompt.top_logprobs_num, int(self.supervisor.description.get("vocab_size", 0)))
        chosen = len(prompt.token_ids_logprob)
        new = prompt.sampling.max_new_tokens
        if new is None:  # as many as fit; without anything beside the tokens' own log-probs a reply holds them
            room = int(self.supervisor.description.get("max_req_input_len", 0))
            new = max(room - len(prompt.input_ids), 0) if top + chosen else 0
        tokens = len(prompt.input_ids) - prompt.first_scored + new
        if tokens * (1 + top + chosen) > LOG_PROBS:
            raise LimitExceededError(
                f"{1 + top + chosen} log-probs of {tokens} tokens, at most {LOG_PROBS} altogether are given",
                field="token_ids_logprob" if chosen > top else "top_logprobs_num",
                value=max(chosen, top),
                hint="Ask for fewer of each token, for fewer tokens, or for those of the prompt in several requests.",
            )

    def _seed(self, sampling: SamplingParams) -> int:
        if sampling.sampling_seed is not None:
            return sampling.sampling_seed
        seed = self._next_seed & LARGEST_SEED
        self._next_seed += sampling.n
        return seed


def no_tokenizer() -> InvalidRequestError:
    return InvalidRequestError(
        "this service has no tokenizer: it takes and gives token ids alone",
        code="no_tokenizer",
        hint="Send input_ids to /generate, or start it without --skip-tokenizer-init.",
    )


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
