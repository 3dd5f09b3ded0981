"""From logits to tokens and log-probs, row by row: what is drawn depends on the row, its parameters and its seed alone.

The noise of a row is a function of (seed, position, token): Gumbel noise, added to the logits, makes the largest sum a
draw from the softmax (Gumbel-max; Maddison et al., 2014, "A* Sampling"). So a sequence draws the same tokens alone, in
any batch, and again after it was put back into the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import torch

from llm_runtime.output import TokenLogprob
from llm_runtime.params import GenerateRequest, SamplingParams
from rl_kernels.log_softmax_gather import row_log_softmax

MASK = 0xFFFFFFFF
EXCLUDED = float("-inf")
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 number that is
VECTOR = 64  # numbers; more than any CPU computes at once
ONE_THREADS = 32_768  # numbers that torch leaves to one thread


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
    """The tokens `[B]`, and the log-probs `[B, V]` of the distributions that they were drawn from, before top_k, top_p
    and min_p."""

    tokens: list[int]
    log_probs: torch.Tensor

    def of(self, rows: Rows[int]) -> Drawn:
        """Those rows of it."""
        if len(rows) == len(self.tokens):
            return self
        return Drawn([self.tokens[row] for row in rows], self.log_probs[list(rows)])


def draw(logits: torch.Tensor, sequences: Rows[Drawing]) -> Drawn:
    """The next token of each sequence from its row of `logits` `[B, V]` (fp32), which may be overwritten."""
    for row, sequence in enumerate(sequences):
        if adjusts(sequence.request.sampling):
            adjust(logits[row], sequence)
    log_probs = row_log_softmax(tempered(logits, [s.request.sampling for s in sequences]))
    drawn = [row for row, s in enumerate(sequences) if not s.request.sampling.greedy]
    if not drawn:
        return Drawn(logits.argmax(-1).tolist(), log_probs)
    scores = log_probs
    limited = [row for row, s in enumerate(sequences) if not s.request.sampling.greedy and limits(s.request.sampling)]
    if limited:
        scores = log_probs.clone()
        for row in limited:
            restrict(scores[row], sequences[row].request.sampling)
    seeds = [sequences[row].request.seed for row in drawn]
    positions = [len(sequences[row].tokens) for row in drawn]
    noise = gumbel(seeds, positions, logits.shape[-1], device=logits.device)
    if len(drawn) == len(sequences):
        return Drawn((scores + noise).argmax(-1).tolist(), log_probs)
    best = logits.argmax(-1)
    best[drawn] = (scores[drawn] + noise).argmax(-1)
    return Drawn(best.tolist(), log_probs)


def tempered(logits: torch.Tensor, params: Rows[SamplingParams]) -> torch.Tensor:
    """The logits divided by each row's temperature; a greedy row's as they are."""
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    if all(t == 1.0 for t in temperatures):
        return logits
    return logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]


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


def gumbel(seeds: Rows[int], positions: Rows[int], vocab_size: int, *, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise `[B, vocab_size]` (fp32): element (b, v) is a function of (seeds[b], positions[b], v).

    A 64-bit key is mixed from seed and position (splitmix64, Steele et al., 2014); its halves key two rounds of
    murmur3's 32-bit finaliser over the token. On a CPU rows are padded to whole vectors and computed in pieces that one
    thread takes, or of one row: at the ends of what a thread computes, the library's logarithm has other bits.
    """
    keys = [_mixed(_mixed(seed & (2**64 - 1)) ^ position) for seed, position in zip(seeds, positions, strict=True)]
    low = torch.tensor([key & MASK for key in keys], dtype=torch.int64, device=device)[:, None]
    high = torch.tensor([key >> 32 for key in keys], dtype=torch.int64, device=device)[:, None]
    width = -(-vocab_size // VECTOR) * VECTOR
    tokens = torch.arange(width, dtype=torch.int64, device=device) * 0x9E3779B1 & MASK
    rows = len(keys) if device.type != "cpu" else max(ONE_THREADS // width, 1)
    found = [_noise(tokens, low[i : i + rows], high[i : i + rows]) for i in range(0, len(keys), rows)]
    return (found[0] if len(found) == 1 else torch.cat(found))[:, :vocab_size]


def _noise(tokens: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Of u in (0, 1) this is -log(-log(1 - u)): small u, which make large noise, have their full precision in fp32."""
    uniform = _finalised(_finalised(tokens ^ low) ^ high).add_(1).float().mul_(2.0**-32).clamp_max_(BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def likeliest(log_probs: torch.Tensor, count: int) -> list[list[TokenLogprob]]:
    """The `count` likeliest tokens of each row of `[B, V]`, in falling order."""
    values, tokens = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    return [list(zip(v, t, strict=True)) for v, t in zip(values.tolist(), tokens.tolist(), strict=True)]


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


def _finalised(x: torch.Tensor) -> torch.Tensor:
    """murmur3's fmix32 on 32 bits that are held in int64."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)
