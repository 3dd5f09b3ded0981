"""One sequence in the engine: its tokens, how far they are computed, and what was found of them."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from llm_runtime.engine.kv_cache import no_pages
from llm_runtime.engine.radix_cache import Place
from llm_runtime.output import FinishReason, GenerateOutput, TokenLogprob, version_spans
from llm_runtime.params import GenerateRequest
from llm_runtime.text import StopChecker

Scored = list[list[TokenLogprob]]


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and output. computed: of them, those whose keys and values lie in `pages`. A sequence is decoding
    when all but the last are; whenever the last one is computed too, the next token is drawn. drafted: of how many the
    draft model's are there too, if there is one.

    shared: where in the prefix cache its pages end that are there. running: whether it has begun.
    epoch: the cache epoch in which its keys and values were computed; None if the weights changed in between, so that
    nobody else may use them. versions: the weight version that drew each output token. next_scored: the first prompt
    position whose log-prob is still to be found.
    """

    request_id: str
    request: GenerateRequest
    arrival: int
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_checker: StopChecker | None = None
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    drafted: int = 0
    pages: array[int] = field(default_factory=no_pages)
    shared: Place | None = None
    running: bool = False
    epoch: int | None = None
    next_scored: int = 0
    versions: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    num_retractions: int = 0
    finish_reason: FinishReason | None = None
    began: float = field(default_factory=time.monotonic)
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    input_logprobs: list[TokenLogprob] = field(default_factory=list)
    output_top: Scored = field(default_factory=list)
    input_top: list[list[TokenLogprob] | None] = field(default_factory=list)
    output_ids_scored: Scored = field(default_factory=list)
    input_ids_scored: list[list[TokenLogprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.input_ids)
        self.next_scored = self.request.first_scored
        if self.next_scored == 0:  # nothing comes before the first token, so nothing tells its probability
            self.input_logprobs.append((None, self.tokens[0]))
            self.input_top.append(None)
            self.input_ids_scored.append(None)
            self.next_scored = 1

    @property
    def num_prompt(self) -> int:
        return len(self.request.input_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def reusable(self) -> int:
        """How many tokens at the beginning may come from the prefix cache: not the last, whose logits are needed, nor
        any whose logits tell a log-prob that was asked for."""
        last = len(self.tokens) - 1
        return min(last, self.next_scored - 1) if self.next_scored < self.num_prompt else last

    @property
    def wants_scores(self) -> bool:
        """Whether the log-probs of its tokens are handed out at all, and with them those of others."""
        return self.request.return_logprob

    def append(self, token: int, version: str) -> None:
        """Takes a drawn token, and notes whether the sequence is finished by it."""
        self.tokens.append(token)
        self.versions.append(version)
        if self.num_output > self.request.sampling.min_new_tokens or not self.request.sampling.min_new_tokens:
            if token in self.stop_token_ids:
                self.finish_reason = FinishReason("stop", matched=token)
                return
            matched = self.stop_checker.check(self.output_ids) if self.stop_checker is not None else None
            if matched is not None:
                self.finish_reason = FinishReason("stop", matched=matched)
                return
        if self.num_output >= self.max_new_tokens:
            self.finish_reason = FinishReason("length", length=self.num_output)

    def output(self, version: str, reason: FinishReason | None = None) -> GenerateOutput:
        """What there is by now; `version` is the current weights'. `reason` ends it, if nothing else has."""
        request, ended = self.request, self.finish_reason or reason
        scored = request.return_logprob
        spans = version_spans(self.versions, version)
        return GenerateOutput(
            request_id=self.request_id,
            output_ids=self.output_ids,
            finish_reason=ended,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens or 0,
            weight_version=spans[-1].version,
            weight_versions=spans if ended is not None else [],
            num_retractions=self.num_retractions,
            e2e_latency=time.monotonic() - self.began,
            output_token_logprobs=list(self.output_logprobs) if scored else None,
            input_token_logprobs=list(self.input_logprobs) if scored else None,
            output_top_logprobs=list(self.output_top) if scored and request.top_logprobs_num else None,
            input_top_logprobs=list(self.input_top) if scored and request.top_logprobs_num else None,
            output_token_ids_logprobs=list(self.output_ids_scored) if scored and request.token_ids_logprob else None,
            input_token_ids_logprobs=list(self.input_ids_scored) if scored and request.token_ids_logprob else None,
        )
