"""The Python API: a rollout pipeline, called like a diffusers pipeline, in the caller's process."""

from __future__ import annotations

import secrets
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_rl.condition_images import load_images
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import family_for
from diffusion_rl.parallel.tensor import refuse_shared_weights
from diffusion_rl.params import RolloutParams, params_from_mapping
from diffusion_rl.rollout.engine import RolloutEngine, build_engine
from diffusion_rl.rollout.replay import Transformers, replay
from diffusion_rl.sample import RolloutSample
from engine_control.closing import Closing
from engine_control.errors import EnginePausedError
from engine_control.methods import ControlMethods
from engine_control.step_loop import StepLoop

Progress = Callable[[int, int], None]


class RolloutPipeline(ControlMethods, Closing):
    """Rolls out prompts and keeps what an RL trainer needs.

    One pipeline is one engine; it is not thread-safe. `ControlMethods` refits it, pauses it and puts it to sleep. Calls
    return one `RolloutSample` per sample, in order: all samples of the first prompt, then those of the second.
    """

    def __init__(
        self, pipeline: Any, *, config: EngineConfig | None = None, defaults_folder: Path | None = None
    ) -> None:
        """Wraps a diffusers pipeline that is loaded already; its modules are set to eval."""
        self._take(RolloutEngine(family_for(pipeline, defaults_folder), config))

    @classmethod
    def from_pretrained(
        cls, model_path: str = "embedded", *, torch_dtype: torch.dtype | None = None, device: str = "auto"
    ) -> RolloutPipeline:
        """Loads a diffusers folder, a hub id, or `embedded`, the small model that comes with this package."""
        dtype = "auto" if torch_dtype is None else str(torch_dtype).removeprefix("torch.")
        return cls.from_config(EngineConfig(model_path=model_path, dtype=dtype, device=device))

    @classmethod
    def from_config(cls, config: EngineConfig) -> RolloutPipeline:
        """Loads what `config` names."""
        made = cls.__new__(cls)
        made._take(build_engine(config))
        return made

    def _take(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._closing = weakref.finalize(self, engine.close)  # also at the interpreter's end
        self._loop: StepLoop[RolloutParams, list[RolloutSample]] = StepLoop(engine)
        self._control = engine.controlled_by(self._loop)

    def control_command(self, name: str, /, **arguments: Any) -> Any:
        answer = self._loop.call(name, arguments)
        self._loop.run_until_idle()
        return answer.result()

    def close(self) -> None:
        """Ends the other ranks, if there are any; the pipeline rolls out nothing afterwards."""
        self._closing()

    @property
    def engine(self) -> RolloutEngine:
        return self._engine

    @property
    def transformer(self) -> torch.nn.Module:
        return self._engine.family.transformer

    @property
    def transformers(self) -> Mapping[str, torch.nn.Module]:
        """Those that compute steps, by their names in the pipeline."""
        return self._engine.family.transformers

    def __call__(
        self, prompt: str | Sequence[str] | None = None, *, progress: Progress | None = None, **fields: Any
    ) -> list[RolloutSample]:
        """Rolls out one prompt or several; `fields` are those of `RolloutParams`. A prompt of another form is one of
        them: `pipeline(prompt_embeds=...)`, `pipeline(prompt_ids=...)`.

        Several prompts are denoised together; prompt p's seeds begin at `seed + p * num_outputs_per_prompt`. Without a
        seed a random one is chosen, and stands in the results. `progress(done, all)` is called after every step.

        Raises:
            EngineError: the request is invalid (nothing was computed), or a sample became non-finite.
        """
        if fields.get("image") is not None:
            limit = self._engine.config.limits.max_image_pixels
            fields["image"] = load_images(fields["image"], max_pixels=limit)
        prompts = [prompt] if prompt is None or isinstance(prompt, str) else list(prompt) or [""]
        first = params_from_mapping({**fields, "prompt": prompts[0]})
        seed = secrets.randbelow(2**31) if first.seed is None and first.seeds is None else first.seed
        requests = []
        for index, text in enumerate(prompts):
            own = {} if seed is None else {"seed": seed + index * first.num_outputs_per_prompt}
            requests.append(params_from_mapping({**fields, **own, "prompt": text}))
        return self._run(requests, progress)

    def replay(
        self,
        samples: Sequence[RolloutSample],
        *,
        transformer: Transformers = None,
        steps: Sequence[int] | None = None,
        lora_name: str | None = None,
    ) -> torch.Tensor:
        """Log-probs of returned samples under given weights, with autograd; see `diffusion_rl.rollout.replay`.
        `lora_name` is the adapter that the pipeline's own transformer computes with.

        Raises:
            InvalidRequestError: ranks share the weights: each rank of a trainer has to make its part of the forward.
        """
        refuse_shared_weights(self._engine.ranks.arrangement.tensor, transformer)
        with self._engine.weights.adapters.active(lora_name):
            return replay(self._engine.family, samples, transformer=transformer, steps=steps)

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

    def _run(self, requests: list[RolloutParams], progress: Progress | None) -> list[RolloutSample]:
        """Runs the requests to their end, in the same loop as the service, in this thread."""
        engine, ids = self._engine, [uuid.uuid4().hex for _ in requests]
        for request in requests:
            engine.check_request(request)
        self._refuse_waiting()
        answers = [self._loop.submit(i, request) for i, request in zip(ids, requests, strict=True)]
        total = sum(r.num_outputs_per_prompt * engine.step_count(r) for r in requests) if progress else 0

        def report() -> None:
            for answer in answers:
                if answer.done() and answer.exception() is not None:
                    answer.result()
            if progress is not None:
                progress(total - engine.remaining_evaluations(), total)

        try:
            self._loop.run_until_idle(report)
            return [sample for answer in answers for sample in answer.result()]
        finally:
            for request_id, answer in zip(ids, answers, strict=True):
                if not answer.done():
                    self._loop.abort(request_id, discard=True)
            self._loop.run_until_idle()
