"""What one gets: a sequence's tokens, why it ended, and what was asked for beside them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

TokenLogprob = tuple[float | None, int]
"""A log-prob and the token it is of. None: the first token of all, which nothing came before."""


@dataclass(frozen=True)
class FinishReason:
    """Why a sequence ended: `stop` at the stop token or string `matched`, `length` at `length` tokens, or `abort`."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


@dataclass(frozen=True)
class WeightVersionSpan:
    """Output tokens [start, end) were computed by the weights of that version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class GenerateOutput:
    """A sequence, finished or (finish_reason None) as far as it is.

    output_ids: the tokens, a stop token included. cached_tokens: of the prompt, whose keys and values were there
    already when it began. weight_version: of the last token. weight_versions: spans over all output tokens; empty
    until the end. num_retractions: how often it was put back into the queue.

    With `return_logprob`: output_token_logprobs, one a token; input_token_logprobs, one for each prompt token from
    `logprob_start_len` on; the same for `*_top_logprobs` (each position's list in falling order) and
    `*_token_ids_logprobs`, if they were asked for.
    """

    request_id: str
    output_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    weight_version: str
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    num_retractions: int = 0
    e2e_latency: float = 0.0
    output_token_logprobs: list[TokenLogprob] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob]] | None = None
    input_top_logprobs: list[list[TokenLogprob] | None] | None = None
    output_token_ids_logprobs: list[list[TokenLogprob]] | None = None
    input_token_ids_logprobs: list[list[TokenLogprob] | None] | None = None


@dataclass(frozen=True)
class Generated:
    """One sample of one prompt. text is None without a tokenizer; `output` has the tokens, log-probs and versions."""

    text: str | None
    output: GenerateOutput

    @property
    def output_ids(self) -> list[int]:
        return self.output.output_ids


def version_spans(versions: Sequence[str], current: str) -> list[WeightVersionSpan]:
    """The spans of one version a token. Without a token there is one empty span of the current version."""
    spans: list[WeightVersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = WeightVersionSpan(version, spans[-1].start, index + 1)
        else:
            spans.append(WeightVersionSpan(version, index, index + 1))
    return spans or [WeightVersionSpan(current, 0, 0)]
