"""Which rows of a step's logits tell what: draws of next tokens, and log-probs of the prompts' own."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from llm_runtime.engine.batches import ForwardBatch, Span, batch_of
from llm_runtime.engine.sampler import Drawn, distribution, likeliest
from llm_runtime.engine.scheduler import Chunk
from llm_runtime.engine.sequence import Sequence
from llm_runtime.engine.speculation import Ahead
from llm_runtime.output import TokenLogprob


@dataclass(frozen=True)
class StepPlan:
    """A step's batch; drawing: the sequences of its draw rows, some of them ahead of themselves; scored: (sequence,
    prompt position) of its score rows, each of which tells the log-prob of the token at that position."""

    batch: ForwardBatch
    drawing: list[Sequence | Ahead]
    scored: list[tuple[Sequence, int]]


def plan_step(chunks: Items[Chunk], page_size: int) -> StepPlan:
    """Row i of the batch is token i of the chunks, side by side."""
    drawing: list[Sequence | Ahead] = []
    scored: list[tuple[Sequence, int]] = []
    score_rows: list[int] = []
    first = 0
    for chunk in chunks:
        sequence = chunk.sequence
        last_scored = min(chunk.end, sequence.num_prompt - 1)
        for position in range(sequence.next_scored, last_scored + 1):
            scored.append((sequence, position))
            score_rows.append(first + position - 1 - chunk.start)
        if chunk.draws:
            drawing += [
                sequence,
                *(Ahead(sequence, chunk.guesses[:n], len(sequence.tokens)) for n in range(1, chunk.draws)),
            ]
        first += chunk.end - chunk.start
    spans = [Span(chunk.tokens, chunk.start, chunk.sequence.pages, chunk.draws) for chunk in chunks]
    batch = batch_of(spans, page_size=page_size, scored=score_rows)
    return StepPlan(batch, drawing, scored)


def note_drawn(drawn: Drawn, taken: Items[tuple[int, Sequence]]) -> None:
    """Keeps what was asked for of the drawn tokens' log-probs: of those rows, for those sequences."""
    whole = [(row, sequence) for row, sequence in taken if sequence.wants_scores and sequence.request.asks_for_others]
    rows = drawn.distribution([row for row, _ in whole]) if whole else None
    tops = _tops(rows, [sequence for _, sequence in whole]) if rows is not None else []
    for row, sequence in taken:
        if sequence.wants_scores:
            sequence.output_logprobs.append((drawn.log_probs[row], drawn.tokens[row]))
    for i, (_, sequence) in enumerate(whole):
        request = sequence.request
        if request.top_logprobs_num:
            sequence.output_top.append(tops[i][: request.top_logprobs_num])
        if request.token_ids_logprob and rows is not None:
            sequence.output_ids_scored.append(_of_ids(rows[i], request.token_ids_logprob))


def note_scored(logits: torch.Tensor, places: Items[tuple[Sequence, int]]) -> None:
    """Keeps the log-probs of prompt tokens, from the logits `[rows, V]` before each."""
    sequences = [sequence for sequence, _ in places]
    log_probs = distribution(logits, [s.request.sampling for s in sequences])
    tokens = [sequence.tokens[position] for sequence, position in places]
    chosen, tops = _of_tokens(log_probs, tokens), _tops(log_probs, sequences)
    for i, (sequence, position) in enumerate(places):
        request = sequence.request
        sequence.input_logprobs.append((chosen[i], tokens[i]))
        sequence.next_scored = position + 1
        if request.top_logprobs_num:
            sequence.input_top.append(tops[i][: request.top_logprobs_num])
        if request.token_ids_logprob:
            sequence.input_ids_scored.append(_of_ids(log_probs[i], request.token_ids_logprob))


def _of_tokens(log_probs: torch.Tensor, tokens: Items[int]) -> list[float]:
    index = torch.tensor(tokens, device=log_probs.device)[:, None]
    found: list[float] = log_probs.gather(1, index)[:, 0].tolist()
    return found


def _tops(log_probs: torch.Tensor, sequences: Items[Sequence]) -> list[list[TokenLogprob]]:
    most = max((sequence.request.top_logprobs_num for sequence in sequences), default=0)
    return likeliest(log_probs, most) if most else []


def _of_ids(row: torch.Tensor, ids: Items[int]) -> list[TokenLogprob]:
    values: list[float] = row[torch.tensor(ids, device=row.device)].tolist()
    return list(zip(values, ids, strict=True))
