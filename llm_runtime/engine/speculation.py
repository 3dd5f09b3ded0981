"""Speculative decoding: a small draft model guesses some tokens ahead, and one forward of the target tells how many of
them it would have drawn itself.

What the target draws is a function of its logits, the seed and the position. So a guess is right if it is the token
that the target draws there, and a sequence has the very tokens and log-probs that it has without a draft; a bad draft
only costs time. The draft draws with the target's noise, which makes it agree more often.

The draft has a KV cache of its own, of as many pages as the target's, under the same page numbers: whatever is shared,
evicted or given back of one is so of the other.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from llm_runtime.engine.batches import Span, batch_of
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.engine.sampler import draw
from llm_runtime.engine.scheduler import Chunk
from llm_runtime.engine.sequence import Sequence
from llm_runtime.params import GenerateRequest


@dataclass(frozen=True)
class Ahead:
    """A sequence as it will be if guesses turn out to be right: what drawing a token needs to know of it. It stays so
    when the sequence itself has taken tokens, in front of it in the same step."""

    sequence: Sequence
    guesses: tuple[int, ...]
    length: int  # of the sequence when they were made

    @property
    def came_true(self) -> bool:
        """Whether the sequence has the guesses now as its last tokens, and goes on."""
        sequence = self.sequence
        return sequence.finish_reason is None and tuple(sequence.tokens[self.length :]) == self.guesses

    @property
    def request(self) -> GenerateRequest:
        return self.sequence.request

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self.sequence.stop_token_ids

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[: self.length], *self.guesses]

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.sequence.num_prompt :]

    @property
    def num_output(self) -> int:
        return self.length - self.sequence.num_prompt + len(self.guesses)


class Drafter:
    """Runs the draft model beside the target's."""

    def __init__(self, runner: ModelRunner, num_steps: int) -> None:
        """num_steps: how many tokens it guesses at most."""
        self.runner = runner
        self.num_steps = num_steps
        self.guessed = 0
        self.accepted = 0

    @torch.inference_mode()
    def follow(self, chunks: Items[Chunk]) -> None:
        """Computes the draft's keys and values of prompts, as the target does."""
        spans = [_span(c.sequence, c.sequence.drafted, c.end) for c in chunks if not c.guesses and c.end - c.start > 1]
        if spans:
            self.runner.forward(batch_of(spans, page_size=self.runner.cache.page_size))
        for chunk in chunks:
            if not chunk.guesses and chunk.end - chunk.start > 1:
                chunk.sequence.drafted = chunk.end

    @torch.inference_mode()
    def guess(self, chunks: Items[Chunk], room: Items[int]) -> list[Chunk]:
        """The chunks, those that decode with guesses behind their token: up to `room` of them, for which the sequence
        has pages."""
        counts = {id(c): min(self.num_steps, n) for c, n in zip(chunks, room, strict=True)}
        guesses: dict[int, tuple[int, ...]] = {id(c): () for c in chunks}
        for number in range(self.num_steps):
            active = [c for c in chunks if counts[id(c)] > number]
            if not active:
                break
            ahead = [Ahead(c.sequence, guesses[id(c)], len(c.sequence.tokens)) for c in active]
            starts = [a.sequence.drafted if number == 0 else len(a.tokens) - 1 for a in ahead]
            spans = [
                Span(a.tokens[start:], start, a.sequence.pages, draws=1) for a, start in zip(ahead, starts, strict=True)
            ]
            hidden, _ = self.runner.forward(batch_of(spans, page_size=self.runner.cache.page_size))
            done = 0
            for logits in self.runner.logits(hidden):
                tokens = draw(logits, ahead[done : done + len(logits)]).tokens
                for chunk, token in zip(active[done : done + len(logits)], tokens, strict=True):
                    guesses[id(chunk)] += (token,)
                done += len(logits)
        self.guessed += sum(map(len, guesses.values()))
        return [replace(c, end=c.end + len(guesses[id(c)]), guesses=guesses[id(c)]) for c in chunks]

    def settle(self, chunk: Chunk, drawn: int) -> None:
        """Of a chunk with guesses, `drawn` tokens were taken: all but the last had been guessed."""
        self.accepted += drawn - 1
        before = chunk.start + 1  # tokens of the sequence when it was guessed
        chunk.sequence.drafted = before + min(len(chunk.guesses), drawn) - 1


def _span(sequence: Sequence, start: int, end: int) -> Span:
    return Span(sequence.tokens[start:end], start, sequence.pages)
