"""What one asks for: a prompt as tokens, and how to go on from it. Imports nothing heavy.

Names and defaults are SGLang's (`/generate`, its `sampling_params`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine_control.errors import InvalidRequestError

GREEDY_BELOW = 1e-6  # a temperature below it is greedy
LARGEST_BIAS = 1e6  # of a logit; far beyond any, and far from what fp32 can't hold
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next tokens are chosen, and when to stop.

    max_new_tokens: None is as many as fit the context; 0 computes the prompt's log-probs and nothing else.
    temperature: logits are divided by it; below 1e-6 the likeliest token is taken, and log-probs are of plain logits.
    top_k, top_p, min_p: only the k likeliest tokens, the fewest likeliest whose probabilities reach p, and those with
        at least min_p times the likeliest one's probability, may be chosen. They apply together; -1, 1 and 0: no limit.
    frequency_penalty, presence_penalty: taken off the logit of a token of the output, times how often it is there, or
        once. repetition_penalty: divides positive logits of tokens of prompt and output, and multiplies negative ones.
    logit_bias: added to the logits of those tokens.
    min_new_tokens: until then no stop token is chosen, and no stop string ends the output.
    stop: strings that end the output; they stay out of its text unless `no_stop_trim`. stop_token_ids: tokens that do,
        beside the model's own end tokens, which `ignore_eos` ignores. They stay in the output's ids.
    n: samples of one prompt. sampling_seed: of the first one; sample i has seed + i. Noise depends on a sample's seed,
        the token's position and the token alone.
    """

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            _bounded("max_new_tokens", self.max_new_tokens, 0)
        _bounded("temperature", self.temperature, 0.0)
        _bounded("top_p", self.top_p, 0.0, 1.0, above=True)
        if self.top_k != -1:
            _bounded("top_k", self.top_k, 1)
        _bounded("min_p", self.min_p, 0.0, 1.0)
        _bounded("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _bounded("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _bounded("repetition_penalty", self.repetition_penalty, 0.0, 2.0, above=True)
        _bounded("min_new_tokens", self.min_new_tokens, 0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}",
                field="min_new_tokens",
                value=self.min_new_tokens,
            )
        _bounded("n", self.n, 1, 4096)
        if self.sampling_seed is not None:
            _bounded("sampling_seed", self.sampling_seed, 0, LARGEST_SEED)
        if any(not text for text in self.stop):
            raise InvalidRequestError("an empty stop string would stop at once", field="stop", value="")
        for token, bias in self.logit_bias.items():
            if not abs(bias) <= LARGEST_BIAS:
                raise InvalidRequestError(
                    f"logit_bias of token {token} is {bias}",
                    field="sampling_params.logit_bias",
                    value=bias,
                    hint=f"It must be at least -{LARGEST_BIAS:g} and at most {LARGEST_BIAS:g}.",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One sequence: what the engine computes. A batch, or `n` samples, are several of them.

    input_ids: the prompt. seed: of the noise; what `sampling.sampling_seed` says of a batch has been resolved into it.
    return_logprob: the log-prob of every output token, under the distribution that it was drawn from before top_k,
        top_p and min_p. logprob_start_len: of prompt tokens from that position on as well (-1: of none).
    top_logprobs_num: the so many likeliest tokens at each of these positions. token_ids_logprob: those tokens there.
    stream: what there is so far is handed out after every token.
    """

    input_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    stream: bool = False

    @property
    def first_scored(self) -> int:
        """The first prompt position whose log-prob is asked for; the prompt's length if none is."""
        start = self.logprob_start_len
        return start if self.return_logprob and start >= 0 else len(self.input_ids)

    @property
    def asks_for_others(self) -> bool:
        """Whether log-probs of other tokens than the drawn ones are asked for."""
        return bool(self.top_logprobs_num or self.token_ids_logprob)


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """From a mapping with SGLang's names; None stands for a default where None is no value of its own.

    Raises:
        InvalidRequestError: naming the unknown name, or the value that is out of bounds.
    """
    known = SamplingParams.__dataclass_fields__
    given: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in known:
            raise InvalidRequestError(
                f"unknown sampling parameter {name!r}",
                code="unknown_field",
                field=f"sampling_params.{name}",
                value=name,
                hint=f"Known: {', '.join(known)}.",
            )
        if value is None and name not in ("max_new_tokens", "sampling_seed"):
            continue
        given[name] = _read(name, value)
    return SamplingParams(**given)


def samples_of(request: GenerateRequest, n: int) -> list[GenerateRequest]:
    """The request's `n` samples: the same prompt with seeds that count up."""
    return [replace(request, seed=(request.seed + index) & LARGEST_SEED) for index in range(n)]


_INTEGERS = {"top_k", "min_new_tokens", "n", "max_new_tokens", "sampling_seed"}
_SWITCHES = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}


def _read(name: str, value: Any) -> Any:
    """The value in the field's own type. Strict: no text for a number, no number for a switch."""
    if name in _SWITCHES:
        return value if isinstance(value, bool) else _refuse(name, value, "true or false")
    if value is None:
        return None
    if name in _INTEGERS:
        return (
            value if isinstance(value, int) and not isinstance(value, bool) else _refuse(name, value, "a whole number")
        )
    if name == "stop":
        texts = [value] if isinstance(value, str) else value
        good = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
        return tuple(texts) if good else _refuse(name, value, "a text or a list of texts")
    if name == "stop_token_ids":
        good = isinstance(value, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in value)
        return tuple(value) if good else _refuse(name, value, "a list of token ids")
    if name == "logit_bias":
        try:
            return {int(token): float(bias) for token, bias in dict(value).items()}
        except (TypeError, ValueError):
            return _refuse(name, value, "a mapping of token ids to numbers")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _refuse(name, value, "a number")
    return float(value)


def _refuse(name: str, value: Any, wanted: str) -> Any:
    raise InvalidRequestError(f"{name} must be {wanted}, not {value!r}", field=f"sampling_params.{name}", value=value)


def _bounded(name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Refuses what is not a finite number in [low, high], or in (low, high] if `above`."""
    if math.isfinite(value) and low <= value <= high and not (above and value == low):
        return
    bounds = f"{'more than' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
    raise InvalidRequestError(f"{name} must be {bounds}, not {value}", field=f"sampling_params.{name}", value=value)
