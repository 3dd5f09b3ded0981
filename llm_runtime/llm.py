"""The Python API: a language model in the caller's process."""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine_control.closing import Closing
from engine_control.errors import EnginePausedError, InvalidRequestError
from engine_control.methods import ControlMethods
from engine_control.step_loop import StepLoop
from llm_runtime.config import LLMConfig
from llm_runtime.engine.engine import LLMEngine, build_engine
from llm_runtime.output import Generated, GenerateOutput
from llm_runtime.params import LARGEST_SEED, GenerateRequest, SamplingParams, samples_of, sampling_params
from llm_runtime.text import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


class LLM(ControlMethods, Closing):
    """Generates from prompts, on the same engine and in the same loop as the service, in the caller's thread.

    One LLM is one engine; it is not thread-safe. `ControlMethods` refits it, pauses it and puts it to sleep.
    """

    def __init__(self, model_path: str = "embedded", *, config: LLMConfig | None = None, **fields: Any) -> None:
        """Loads a Hugging Face folder, a hub id, or `embedded`; `fields` are those of `LLMConfig`.

        Raises:
            EngineError: the model can't be loaded or served; naming why.
        """
        if config is None:
            config = LLMConfig(model_path=model_path, **fields)
        self._engine = build_engine(config)
        self._closing = weakref.finalize(self, self._engine.close)
        self._loop: StepLoop[GenerateRequest, GenerateOutput] = StepLoop(self._engine)
        self._control = self._engine.controlled_by(self._loop)
        seed = config.random_seed
        self._next_seed = secrets.randbelow(2**31) if seed is None else seed

    @property
    def engine(self) -> LLMEngine:
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    def control_command(self, name: str, /, **arguments: Any) -> Any:
        answer = self._loop.call(name, arguments)
        self._loop.run_until_idle()
        return answer.result()

    def close(self) -> None:
        self._closing()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] | None = None,
        *,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        top_logprobs_num: int = 0,
        token_ids_logprob: Sequence[int] = (),
        progress: bool | Callable[[int, int], None] = False,
    ) -> list[Generated]:
        """Goes on from each prompt (text, or token ids), all together; `n` samples each, in the order of the prompts.

        sampling: one for all prompts, or one each; a mapping has SGLang's names. A sample without a seed gets one of
        its own, counted on from `LLMConfig.random_seed`. progress: shows a bar, or is called with the samples that are
        done and all of them.

        Raises:
            EngineError: a request is invalid (nothing was computed), or the engine is paused or asleep.
        """
        texts = _as_prompts(prompts)
        each = _as_params(sampling, len(texts))
        requests: list[GenerateRequest] = []
        for prompt, params in zip(texts, each, strict=True):
            seed = params.sampling_seed
            request = GenerateRequest(
                input_ids=self._encode(prompt),
                sampling=params,
                seed=self._next_seed & LARGEST_SEED if seed is None else seed,
                return_logprob=return_logprob,
                logprob_start_len=logprob_start_len,
                top_logprobs_num=top_logprobs_num,
                token_ids_logprob=tuple(token_ids_logprob),
            )
            self._next_seed += 0 if seed is not None else params.n
            self._engine.check_request(request)
            requests += samples_of(request, params.n)
        self._refuse_waiting()
        outputs = self._run(requests, progress)
        return [Generated(self._text(o, r.sampling), o) for r, o in zip(requests, outputs, strict=True)]

    def _run(
        self, requests: list[GenerateRequest], progress: bool | Callable[[int, int], None]
    ) -> list[GenerateOutput]:
        answers = [self._loop.submit(uuid.uuid4().hex, request) for request in requests]
        with _Bar(len(requests), shown=progress is True) as bar:

            def report() -> None:
                done = sum(answer.done() for answer in answers)
                bar.update(done)
                if callable(progress):
                    progress(done, len(answers))

            try:
                self._loop.run_until_idle(report if progress else None)
            finally:
                if not all(answer.done() for answer in answers):
                    self._loop.call("abort_requests", {"abort_all": True})
                    self._loop.run_until_idle()
        return [answer.result() for answer in answers]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise InvalidRequestError(
                "a text prompt needs a tokenizer, and none is loaded", field="prompts", hint="Give token ids."
            )
        return tuple(self.tokenizer.encode(prompt))

    def _text(self, output: GenerateOutput, params: SamplingParams) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.output_text(output.output_ids, output.finish_reason, params)

    def _refuse_waiting(self) -> None:
        """A call in this thread can't wait for a command that nobody else could give."""
        state = self._control.state
        error = state.refusal()
        if error is None and (state.pause is not None or not state.may_step()):
            error = EnginePausedError(
                f"generation waits: the engine is {state.name}", hint="Continue it, or end the weight update, first."
            )
        if error is not None:
            raise error


class _Bar:
    """A progress bar on the terminal, or nothing."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            self._bar = Progress("generating", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._task = self._bar.add_task("samples", total=total)

    def __enter__(self) -> _Bar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str) or (prompts and all(isinstance(token, int) for token in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(sampling: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    given: Sequence[Any]
    given = [sampling or {}] * count if sampling is None or isinstance(sampling, SamplingParams | Mapping) else sampling
    if len(given) != count:
        raise InvalidRequestError(
            f"{len(given)} sampling parameters for {count} prompts", field="sampling", hint="Give one, or one each."
        )
    return [params if isinstance(params, SamplingParams) else sampling_params(params) for params in given]
