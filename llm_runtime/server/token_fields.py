"""vLLM's `/inference/v1/generate`: its fields, and its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from engine_control.errors import InvalidRequestError
from engine_control.server.bodies import Fields, fields_from
from llm_runtime.output import GenerateOutput, TokenLogprob
from llm_runtime.params import GenerateRequest, sampling_params
from llm_runtime.server.generate_fields import load_object, refuse_absent, token_list
from llm_runtime.server.generate_reply import version_list
from llm_runtime.text import Tokenizer

NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""What vLLM's sampling parameters are called here, where that is another name."""

SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
)
OUTPUT_ONLY = ("logprobs", "prompt_logprobs", "detokenize", "output_kind")
DEFAULT_MAX_TOKENS = 16


class TokenFields(Fields, frozen=True, kw_only=True):
    """`token_ids`: one prompt. `sampling_params`: with vLLM's names."""

    body_required: ClassVar[bool] = True
    token_ids: list[Any]
    sampling_params: dict[str, Any] | None = None
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    output_mode: str | None = None


class TokenJob:
    """What a body asks for. prompt_logprobs: None if the prompt isn't scored."""

    def __init__(self, fields: TokenFields) -> None:
        """Raises `InvalidRequestError`, naming the field."""
        given = {name: value for name, value in (fields.sampling_params or {}).items() if value is not None}
        self.fields = fields
        self.logprobs = _count("logprobs", given.get("logprobs"))
        self.prompt_logprobs = _count("prompt_logprobs", given.get("prompt_logprobs"))
        scored = self.logprobs is not None or self.prompt_logprobs is not None
        self.prompt = GenerateRequest(
            input_ids=token_list("token_ids", fields.token_ids),
            sampling=sampling_params(_sampling(given)),
            return_logprob=scored,
            logprob_start_len=-1 if self.prompt_logprobs is None else 0,
            top_logprobs_num=max(self.logprobs or 0, self.prompt_logprobs or 0),
        )


def read_tokens(body: bytes) -> TokenJob:
    """What a body asks for. Any thread may call this.

    Raises:
        InvalidRequestError: naming the field.
    """
    values = load_object(body)
    refuse_absent(values, ("stream", "features", "lora_request", "kv_transfer_params"))
    fields = fields_from(values, TokenFields, strict=True)
    if fields.output_mode not in (None, "tokens", "text"):
        raise InvalidRequestError(
            f"there is no output_mode {fields.output_mode!r}", field="output_mode", hint="Send 'tokens' or 'text'."
        )
    return TokenJob(fields)


def token_reply(
    request_id: str, job: TokenJob, outputs: Sequence[GenerateOutput], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The reply; with a tokenizer, each choice has its text."""
    choices = []
    for index, output in enumerate(outputs):
        choice: dict[str, Any] = {
            "index": index,
            **_ending(output, job),
            "token_ids": output.output_ids,
            "logprobs": None if job.logprobs is None else {"content": _content(output, job.logprobs)},
            "routed_experts": None,
            "weight_versions": version_list(output),
        }
        if tokenizer is not None:
            choice["text"] = tokenizer.output_text(output.output_ids, output.finish_reason, job.prompt.sampling)
        choices.append(choice)
    scores = None if job.prompt_logprobs is None else _prompt_scores(outputs[0], job.prompt_logprobs)
    return {"request_id": request_id, "choices": choices, "prompt_logprobs": scores}


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    taken: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_TOKENS}
    for name, value in given.items():
        if name in NAMES:
            taken[NAMES[name]] = value
        elif name in SAME:
            if (name, value) != ("top_k", 0):  # vLLM's for no limit
                taken[name] = value
        elif name not in OUTPUT_ONLY:
            refuse_absent(given, (name,), "sampling_params.")
    return taken


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= 1000:
        raise InvalidRequestError(
            f"{name} must be 0 to 1000, not {value!r}", field=f"sampling_params.{name}", value=value
        )
    return value


def _ending(output: GenerateOutput, job: TokenJob) -> dict[str, Any]:
    """vLLM's stop reason is what the request named: the model's own end token is none."""
    reason = output.finish_reason
    assert reason is not None
    asked = isinstance(reason.matched, str) or reason.matched in job.prompt.sampling.stop_token_ids
    return {"finish_reason": reason.type, "stop_reason": reason.matched if asked else None}


def _content(output: GenerateOutput, top: int) -> list[dict[str, Any]]:
    tops = output.output_top_logprobs or []
    content = []
    for position, (log_prob, token) in enumerate(output.output_token_logprobs or []):
        likeliest = tops[position] if tops else []
        content.append(
            {
                "token_id": token,
                "logprob": log_prob,
                "rank": _rank(token, likeliest),
                "top_logprobs": [
                    {"token_id": other, "logprob": value, "rank": rank}
                    for rank, (value, other) in enumerate(likeliest[:top], 1)
                ],
            }
        )
    return content


def _rank(token: int, likeliest: Sequence[TokenLogprob]) -> int | None:
    """The token's place among those that were asked for, from 1; None if it isn't one of them."""
    return next((rank for rank, (_, other) in enumerate(likeliest, 1) if other == token), None)


def _prompt_scores(output: GenerateOutput, top: int) -> list[dict[str, Any] | None]:
    """One entry a prompt token, by the token's id; None for the first, which nothing came before."""
    tops = output.input_top_logprobs or []
    scores: list[dict[str, Any] | None] = []
    for position, (log_prob, token) in enumerate(output.input_token_logprobs or []):
        if log_prob is None:
            scores.append(None)
            continue
        likeliest = (tops[position] or []) if tops else []
        entry = {str(other): {"logprob": value, "rank": rank} for rank, (value, other) in enumerate(likeliest[:top], 1)}
        scores.append({str(token): {"logprob": log_prob, "rank": _rank(token, likeliest)}, **entry})
    return scores
