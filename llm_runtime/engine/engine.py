"""The conductor: `LLMEngine.step()` schedules, computes one forward over a token batch, draws, scores, and finishes.

One thread calls it (see `engine_control.step_loop`), so it holds no lock.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import replace

import torch
import transformers

from engine_control.control import Control
from engine_control.engine import Finished, Progress
from engine_control.errors import EngineError, EngineFaultError, QueueFullError
from engine_control.rank import Outcome, RankCommand, RankControl
from engine_control.step_loop import StepLoop
from llm_runtime.config import LLMConfig
from llm_runtime.engine.admission import Admission
from llm_runtime.engine.certification import make_exact
from llm_runtime.engine.kv_cache import PagePool
from llm_runtime.engine.overlap import Drawn, Overlap, may_run
from llm_runtime.engine.radix_cache import RadixCache
from llm_runtime.engine.rank_weights import RankWeights, rank_settings
from llm_runtime.engine.sampler import draw
from llm_runtime.engine.scheduler import Chunk, Scheduler
from llm_runtime.engine.scoring import StepPlan, note_drawn, note_scored, plan_step
from llm_runtime.engine.sequence import Sequence
from llm_runtime.engine.speculation import Ahead
from llm_runtime.engine.startup import (
    LARGEST_GRAPH,
    graphs_up_to,
    load_draft,
    make_drafter,
    make_runner,
    overlaps,
    pages_for,
    prefill_tokens,
)
from llm_runtime.models.base import CausalLM
from llm_runtime.models.loading import load_model, model_folder
from llm_runtime.output import FinishReason, GenerateOutput
from llm_runtime.parallel.ranks import NoRanks, OnDeath, Ranks, device_of, start_ranks
from llm_runtime.params import GenerateRequest
from llm_runtime.text import Tokenizer
from rl_kernels.certify import Exactness

logger = logging.getLogger(__name__)

COUNTED = (
    "steps",
    "tokens_prefilled",
    "tokens_decoded",
    "tokens_cached",
    "requests_finished",
    "requests_failed",
    "requests_aborted",
)


def build_engine(config: LLMConfig, *, on_death: OnDeath | None = None) -> LLMEngine:
    """Loads the model that `config` names and returns an idle engine.

    Raises:
        InvalidRequestError: the model can't be loaded, or no family serves it.
        NotExactError: `config.deterministic` insists on exactness that can't be had.
    """
    ranks = start_ranks(config, on_death=on_death)
    try:
        return _build(config, ranks)
    except BaseException:
        ranks.close()
        raise


def _build(config: LLMConfig, ranks: Ranks) -> LLMEngine:
    model = load_model(replace(config, device=device_of(0, config)), ranks.tensor_parallel)
    folder = config.tokenizer_path or model_folder(config.model_path)
    tokenizer = None if config.skip_tokenizer_init else Tokenizer(folder)
    return LLMEngine(model, config, tokenizer=tokenizer, ranks=ranks, draft=load_draft(config, model))


class LLMEngine:
    """Advances many sequences, one forward at a time: an `engine_control.engine.ControlledEngine`."""

    def __init__(
        self,
        model: CausalLM,
        config: LLMConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        ranks: Ranks | None = None,
        draft: CausalLM | None = None,
    ) -> None:
        """Is idle afterwards. Certifies the model on its device (see `certification`), together with the other ranks,
        if there are any. draft: guesses tokens ahead (see `speculation`).

        Raises:
            NotExactError: `config.deterministic` insists on exactness that can't be had; or there is a draft, which
                only an exact target can judge.
        """
        self.config = config or LLMConfig()
        self.model = model
        self.tokenizer = tokenizer
        self.weight_version = self.config.weight_version
        self.context_length = min(
            self.config.context_length or model.config.max_position_embeddings, model.config.max_position_embeddings
        )
        page_size = self.config.page_size
        self.ranks: Ranks = ranks or NoRanks()
        pages = self.ranks.agree_on_pages(pages_for(model, self.config, draft=draft))
        self.runner = make_runner(model, self.config, pages)
        prefill = prefill_tokens(self.config, self.runner.device)
        self.exactness: Exactness = make_exact(
            self.runner, self.config.deterministic, graphs_up_to=graphs_up_to(self.config), rows=prefill
        )
        self.ranks.complete(exact=self.exactness.enabled)
        drafter = None if draft is None else make_drafter(draft, self.runner, self.config, exact=self.exactness.enabled)
        self._pool = PagePool(pages)
        room = min(self.context_length, self._pool.usable * page_size)
        self.admission = Admission(model.config, tokenizer, room=room)
        self.prefixes = RadixCache(self._pool, page_size, enabled=not self.config.disable_radix_cache)
        self.scheduler = Scheduler(
            self._pool,
            self.prefixes,
            page_size=page_size,
            max_running=self.config.max_running_requests,
            max_prefill_tokens=prefill,
            drafted=drafter is not None,
        )
        self.drafter = drafter
        guessing = None if drafter is None else drafter.runner
        self.weights = RankWeights(self.runner, self.config, self.prefixes.reset, draft=guessing)
        if self.config.control.enable_memory_saver:  # what is frozen in place would go on with keys that are gone
            self.weights.memory.on_release("kv_cache", self.retract_requests)
        self._rank = RankControl(self.weights, rank_settings(self.config, 0))
        self._run: Overlap | None = None  # steps in flight
        self._handed: list[Finished[GenerateOutput] | Progress[GenerateOutput]] = []  # found between steps
        self._overlaps = overlaps(self.runner, self.config) and drafter is None
        self._held = False
        self._counts: Counter[str] = Counter()
        self._arrivals = 0

    def add_request(self, request_id: str, request: GenerateRequest) -> None:
        """Checks the request against the model and queues it; see `StepEngine.add_request`."""
        self.check_request(request)
        if len(self.scheduler.waiting) >= self.config.max_queued_requests:
            raise QueueFullError(
                f"{len(self.scheduler.waiting)} requests are waiting",
                hint="Send it again later, or raise max_queued_requests.",
            )
        self.scheduler.add(self.admission.sequence(request_id, request, self._arrivals))
        self._arrivals += 1

    def check_request(self, request: GenerateRequest) -> None:
        """Refuses what `add_request` would refuse for the request's own sake, and queues nothing."""
        self.admission.check(request)

    def abort_request(self, request_id: str) -> bool:
        self._land()
        handed = len(self._handed)
        self._handed = [item for item in self._handed if item.request_id != request_id]
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return len(self._handed) < handed
        self.scheduler.remove(sequence)
        self._counts["requests_aborted"] += 1
        return True

    def partial_result(self, request_id: str) -> GenerateOutput | None:
        """What there is by now, as SGLang's trainers depend on it: an aborted request is no error."""
        self._land()
        finished = next((f for f in self._handed if isinstance(f, Finished) and f.request_id == request_id), None)
        if finished is not None:
            return finished.result
        sequence = self.scheduler.find(request_id)
        if sequence is None:
            return None
        waiting = "Abort in waiting queue" if not sequence.num_output else "Aborted"
        return sequence.output(self.weight_version, FinishReason("abort", message=waiting))

    def has_unfinished_requests(self) -> bool:
        begun = bool(self.scheduler.running) or bool(self._handed)
        return begun or (bool(self.scheduler.waiting) and not self._held)

    def hold_admission(self, held: bool) -> None:
        self._held = held

    def request_ids(self) -> list[str]:
        return [*self.running_requests(), *(s.request_id for s in self.scheduler.waiting)]

    def running_requests(self) -> list[str]:
        finished = [item.request_id for item in self._handed if isinstance(item, Finished)]
        return [*finished, *(s.request_id for s in self.scheduler.running)]

    def retract_requests(self) -> int:
        """Their keys and values are computed again later, under the weights of then; tokens that were drawn stay."""
        self._land()
        retracted = list(self.scheduler.running)
        for sequence in retracted:
            self.scheduler.retract(sequence)
        return len(retracted)

    def everywhere(self, command: RankCommand) -> list[Outcome]:
        self._land()
        return self.ranks.everywhere(command, lambda: self._rank.carry_out(command))

    def flush_needs_idle(self) -> bool:
        """As SGLang's: who flushes wants to know that nothing goes on from what was cached. What is finished, and only
        to be handed out, doesn't."""
        return bool(self.scheduler.running)

    def step(self) -> Items[Finished[GenerateOutput] | Progress[GenerateOutput]]:
        """One forward over the tokens of many sequences, and the next token of each that is computed to its end."""
        if self._handed:
            handed, self._handed = self._handed, []
            return handed
        if self._run is not None:
            return self._go_on(self._run)
        chunks = self.scheduler.schedule(admit=not self._held)
        if not chunks:
            return []
        everyone = len(chunks) == len(self.scheduler.running)  # none is in the middle of its prompt, without a page
        if self._overlaps and everyone and len(chunks) <= LARGEST_GRAPH and may_run(chunks):
            self._run = Overlap(self.runner.steps, self.scheduler, chunks, self.weight_version)
            return self._go_on(self._run)
        if self.drafter is not None:
            room = [self.scheduler.room_ahead(chunk, self.drafter.num_steps) for chunk in chunks]
            chunks = self.drafter.guess(chunks, room)
            self.drafter.follow(chunks)
        plan = plan_step(chunks, self.config.page_size)
        self.ranks.announce(plan.batch)
        with self.ranks.together(), torch.inference_mode():
            drawing, scored = self.runner.forward(plan.batch)
            self._score(plan, scored)
            bad = self._draw(plan, drawing)
        return self._finish(chunks, plan, bad)

    def fail_unfinished(self, error: EngineError) -> list[Finished[GenerateOutput]]:
        self._run = None  # what it has in flight is nobody's any more
        finished = [item for item in self._handed if isinstance(item, Finished)]
        self._handed = []
        failed = [*self.scheduler.running, *self.scheduler.waiting]
        for sequence in failed:
            sequence.epoch = None  # nobody knows what the step left in its pages
            self.scheduler.remove(sequence)
        self._counts["requests_failed"] += len(failed)
        return [*finished, *(Finished(sequence.request_id, error=error) for sequence in failed)]

    def stats(self) -> dict[str, float]:
        """Counts since the start, and what is in the engine now."""
        held = self._pool.usable - self._pool.free
        gauges = {
            "requests_retracted": self.scheduler.retracted,
            "guesses": 0 if self.drafter is None else self.drafter.guessed,
            "guesses_accepted": 0 if self.drafter is None else self.drafter.accepted,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "tokens_in_use": sum(s.computed for s in self.scheduler.running),
            "tokens_cached_now": self.prefixes.size * self.config.page_size,
            "kv_cache_usage": held / self._pool.usable,
        }
        return {**{n: float(self._counts[n]) for n in COUNTED}, **{n: float(v) for n, v in gauges.items()}}

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless every page of the KV cache is accounted for."""
        self._land()
        self.scheduler.check()

    def describe(self) -> dict[str, object]:
        """What is loaded and how, for `/server_info`."""
        model, device = self.model.config, self.runner.device
        return {
            "model_path": self.config.model_path,
            "architectures": [model.architecture],
            "model_type": model.raw.get("model_type"),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": self.config.quantization,
            "device": str(device),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "weight_version": self.weight_version,
            "vocab_size": model.vocab_size,
            "eos_token_ids": list(self.admission.eos_token_ids),
            "context_length": self.context_length,
            "max_total_num_tokens": self._pool.usable * self.config.page_size,
            "max_req_input_len": self.admission.room - 1,
            "max_running_requests": self.config.max_running_requests,
            "page_size": self.config.page_size,
            "tp_size": self.config.tp_size,
            "dp_size": 1,
            "speculative_draft_model_path": self.config.speculative_draft_model_path,
            "speculative_num_steps": 0 if self.drafter is None else self.drafter.num_steps,
            "overlap_schedule": self._overlaps,
            "deterministic": self.exactness.describe(),
            "threads": torch.get_num_threads(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def controlled_by(self, loop: StepLoop[GenerateRequest, GenerateOutput]) -> Control:
        """The control layer of this engine; afterwards the loop knows its commands."""
        return Control(
            self,
            self.weights.target,
            loop,
            self.config.control,
            needed_tags=frozenset({"weights", "kv_cache"}),
            world_size=self.config.tp_size,
        )

    def close(self) -> None:
        """Closes transports, and ends the other ranks, if there are any. The engine takes no step afterwards."""
        self._rank.close()
        self.weights.memory.close()
        self.ranks.close()

    def _score(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        done = 0
        for logits in self.runner.logits(hidden):
            note_scored(logits, plan.scored[done : done + len(logits)])
            done += len(logits)

    def _draw(self, plan: StepPlan, hidden: torch.Tensor) -> set[str]:
        """Appends the next tokens of each sequence that draws some; returns the ids of those whose logits are no
        numbers. A token behind a guess counts if the guess was what the sequence came to."""
        done, bad = 0, set()
        for logits in self.runner.logits(hidden):
            rows = plan.drawing[done : done + len(logits)]
            done += len(logits)
            drawn = draw(logits, rows)
            taken: list[tuple[int, Sequence]] = []
            for i, row in enumerate(rows):
                sequence = _own(row)
                if isinstance(row, Ahead) and not row.came_true:
                    continue
                if math.isnan(drawn.log_probs[i]):
                    bad.add(sequence.request_id)
                elif not sequence.max_new_tokens:
                    sequence.finish_reason = FinishReason("length", length=0)
                else:
                    taken.append((i, sequence))
                    sequence.append(drawn.tokens[i], self.weight_version)
            note_drawn(drawn, taken)
        return bad

    def _finish(
        self, chunks: Items[Chunk], plan: StepPlan, bad: set[str]
    ) -> list[Finished[GenerateOutput] | Progress[GenerateOutput]]:
        """Notes what is computed, and hands out what is finished, failed, or asked to be shown."""
        self._counts["steps"] += 1
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.request_id in bad:
                sequence.epoch = None
            if chunk.guesses and self.drafter is not None:
                drawn = len(sequence.tokens) - (chunk.end - len(chunk.guesses))
                self.drafter.settle(chunk, drawn)
                chunk = replace(chunk, end=chunk.start + drawn, guesses=())
            self._computed(chunk, share=True)
        return self._hand_out([row for row in plan.drawing if isinstance(row, Sequence)], bad)

    def _computed(self, chunk: Chunk, *, share: bool) -> None:
        """share: not while a run goes on, whose page tables are on the device."""
        self.scheduler.computed(chunk, share=share)
        decoded = chunk.start >= chunk.sequence.num_prompt and chunk.end - chunk.start == 1
        self._counts["tokens_decoded" if decoded else "tokens_prefilled"] += chunk.end - chunk.start

    def _hand_out(
        self, sequences: Items[Sequence], bad: set[str]
    ) -> list[Finished[GenerateOutput] | Progress[GenerateOutput]]:
        """Of sequences that have drawn: those that are finished, failed, or asked to be shown."""
        results: list[Finished[GenerateOutput] | Progress[GenerateOutput]] = []
        for sequence in sequences:
            if sequence.request_id in bad:
                self.scheduler.remove(sequence)
                self._counts["requests_failed"] += 1
                fault = EngineFaultError(
                    "the model's output is not finite", hint="Look at the weights: the last update may hold NaN."
                )
                results.append(Finished(sequence.request_id, error=fault))
            elif sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
                self._counts["requests_finished"] += 1
                self._counts["tokens_cached"] += sequence.cached_tokens or 0
                results.append(Finished(sequence.request_id, result=sequence.output(self.weight_version)))
            elif sequence.request.stream:
                results.append(Progress(sequence.request_id, sequence.output(self.weight_version)))
        return results

    def _go_on(self, run: Overlap) -> list[Finished[GenerateOutput] | Progress[GenerateOutput]]:
        """Launches a step of the run, and does the book-keeping of the one before it."""
        run.launch(self.weight_version, admit=not self._held)
        results = self._take(run.collect())
        if not run.in_flight:
            self._run = None
        return results

    def _land(self) -> None:
        """Waits for what is in flight, so that every sequence is as its tokens say. `step` hands out what is found."""
        run, self._run = self._run, None
        while run is not None and run.in_flight:
            self._handed += self._take(run.collect())

    def _take(self, drawn: Drawn) -> list[Finished[GenerateOutput] | Progress[GenerateOutput]]:
        """Appends what a run's step drew, and hands out as `_finish` does."""
        self._counts["steps"] += 1
        bad: set[str] = set()
        for sequence, token, log_prob in drawn.tokens:
            if math.isnan(log_prob):
                bad.add(sequence.request_id)
                sequence.epoch = None
            else:
                sequence.append(token, drawn.version)
                if sequence.wants_scores:
                    sequence.output_logprobs.append((log_prob, token))
            self._computed(Chunk(sequence, sequence.computed, sequence.computed + 1), share=False)
        return self._hand_out([sequence for sequence, _, _ in drawn.tokens], bad)


def _own(row: Sequence | Ahead) -> Sequence:
    return row.sequence if isinstance(row, Ahead) else row
