"""From logits to tokens and log-probs, row by row: what is drawn depends on the row, its parameters and its seed alone.

The noise of a row is a function of (seed, position, token) (`rl_kernels.gumbel_argmax`), so a sequence draws the same
tokens alone, in any batch, and again after it was put back into the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch

from llm_runtime.output import TokenLogprob
from llm_runtime.params import GenerateRequest, SamplingParams
from rl_kernels.draw_tokens import draw_tokens
from rl_kernels.gumbel_argmax import gumbel_argmax, mixed
from rl_kernels.log_softmax_gather import row_log_softmax

EXCLUDED = float("-inf")


class Drawing(Protocol):
    """What a draw needs to know of a sequence: `engine.sequence.Sequence`, or one ahead of itself."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def stop_token_ids(self) -> frozenset[int]: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def output_ids(self) -> list[int]: ...

    @property
    def num_output(self) -> int: ...


@dataclass(frozen=True)
class Drawn:
    """The tokens `[B]`, and the log-prob of each in the distribution that it was drawn from, before top_k, top_p and
    min_p; NaN if the row's logits are no numbers. logits: `[B, V]`, before they are
    divided by the temperatures of `params`."""

    tokens: list[int]
    log_probs: list[float]
    logits: torch.Tensor
    params: list[SamplingParams]

    def distribution(self, rows: Rows[int]) -> torch.Tensor:
        """All log-probs of those rows, `[rows, V]`."""
        return distribution(self.logits[list(rows)], [self.params[row] for row in rows])


def draw(logits: torch.Tensor, sequences: Rows[Drawing]) -> Drawn:
    """The next token of each sequence from its row of `logits` `[B, V]` (fp32), which may be overwritten."""
    params = [s.request.sampling for s in sequences]
    for row, sequence in enumerate(sequences):
        if adjusts(params[row]):
            adjust(logits[row], sequence)
    keys = noise_keys([s.request.seed for s in sequences], [len(s.tokens) for s in sequences]).to(logits.device)
    greedy = torch.tensor([p.greedy for p in params], device=logits.device)
    tokens, log_probs = draw_tokens(logits, temperatures(params, logits.device), keys, greedy)
    limited = [row for row, p in enumerate(params) if not p.greedy and limits(p)]
    if limited:
        whole = distribution(logits[limited], [params[row] for row in limited])
        scores = whole.clone()
        for scored, row in zip(scores, limited, strict=True):
            restrict(scored, params[row])
        chosen = gumbel_argmax(scores, keys[limited])
        tokens[limited], log_probs[limited] = chosen, whole.gather(1, chosen[:, None])[:, 0]
    return Drawn(tokens.tolist(), log_probs.tolist(), logits, params)


def distribution(logits: torch.Tensor, params: Rows[SamplingParams]) -> torch.Tensor:
    """The log-probs `[B, V]` of the tempered logits `[B, V]`."""
    return row_log_softmax(logits / temperatures(params, logits.device)[:, None])


def temperatures(params: Rows[SamplingParams], device: torch.device) -> torch.Tensor:
    """What each row's logits are divided by, `[B]` fp32."""
    return torch.tensor([divisor(p) for p in params], dtype=torch.float32, device=device)


def divisor(params: SamplingParams) -> float:
    """What a row's logits are divided by: the temperature; of a greedy row 1."""
    return 1.0 if params.greedy else params.temperature


def draws_plainly(params: SamplingParams) -> bool:
    """Whether a draw is of all tokens as the logits have them, so that it needs to know nothing of earlier ones."""
    return not adjusts(params) and (params.greedy or not limits(params))


def adjusts(params: SamplingParams) -> bool:
    """Whether `adjust` may do anything."""
    plain = params.repetition_penalty == 1.0 and not (params.frequency_penalty or params.presence_penalty)
    return not plain or bool(params.logit_bias) or params.min_new_tokens > 0


def adjust(logits: torch.Tensor, sequence: Drawing) -> None:
    """Applies biases, penalties and the minimal length to a row `[V]`, in place."""
    params = sequence.request.sampling
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=logits.device)
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.frequency_penalty or params.presence_penalty:
        counts = sorted(Counter(sequence.output_ids).items())
        if counts:
            seen = torch.tensor([token for token, _ in counts], device=logits.device)
            times = torch.tensor([float(n) for _, n in counts], device=logits.device)
            logits[seen] -= params.frequency_penalty * times + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if sequence.num_output < params.min_new_tokens and sequence.stop_token_ids:
        logits[torch.tensor(sorted(sequence.stop_token_ids), device=logits.device)] = EXCLUDED


def limits(params: SamplingParams) -> bool:
    """Whether some tokens are excluded from the draw."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def restrict(log_probs: torch.Tensor, params: SamplingParams) -> None:
    """Excludes from a row `[V]` what top_k, top_p and min_p do, in place. The likeliest token always stays.

    Each limit is on the whole distribution, and a token stays that all of them let stay. Of equally likely tokens the
    one with the lower id comes first.
    """
    ordered, order = log_probs.sort(descending=True, stable=True)
    keep = torch.ones_like(order, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1.0:
        probabilities = ordered.double().exp()
        before = probabilities.cumsum(0) - probabilities
        keep &= before < params.top_p
    if params.min_p > 0.0:
        keep &= ordered.double().exp() >= params.min_p * ordered[0].double().exp()
    keep[0] = True
    log_probs[order[~keep]] = EXCLUDED


def noise_keys(seeds: Rows[int], positions: Rows[int]) -> torch.Tensor:
    """The noise's keys, int64 `[B]` on the CPU: a seed's key and the position, mixed likewise (`place_rows` makes the
    same on a device)."""
    return mixed(seed_keys(seeds) ^ torch.tensor(positions, dtype=torch.int64))


def seed_keys(seeds: Rows[int]) -> torch.Tensor:
    """Seeds of 64 bits, mixed by splitmix64: int64 `[B]` on the CPU."""
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    return mixed(torch.tensor(signed, dtype=torch.int64))


def likeliest(log_probs: torch.Tensor, count: int) -> list[list[TokenLogprob]]:
    """The `count` likeliest tokens of each row of `[B, V]`, in falling order."""
    values, tokens = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    return [list(zip(v, t, strict=True)) for v, t in zip(values.tolist(), tokens.tolist(), strict=True)]
