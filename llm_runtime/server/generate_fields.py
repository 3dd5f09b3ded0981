"""The fields of `/generate`, with SGLang's names: what a body asks for, as requests of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_control.errors import InvalidRequestError, LimitExceededError
from engine_control.server.bodies import Fields, fields_from
from llm_runtime.config import LLMConfig
from llm_runtime.params import GenerateRequest, SamplingParams, sampling_params
from llm_runtime.server.service import no_tokenizer
from llm_runtime.text import Tokenizer

MOST_PROMPTS = LLMConfig().max_queued_requests
ABSENT = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_output_top_logprobs_b64",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "return_bytes",
    "lora_path",
    "lora_id",
    "session_params",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_room",
)
"""Fields of SGLang's that ask for what this engine hasn't. Others that it doesn't know say when and where a request is
computed, not what comes of it, or are nobody's: they are ignored, as SGLang ignores them."""

ABSENT_SAMPLING = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex",
    "beam_width",
    "stream_interval",
    "custom_params",
    "watermark",
)


class GenerateFields(Fields, frozen=True, kw_only=True):
    """`text` or `input_ids`, one prompt or a list of them, and how to go on. Lists beside a list have one entry a
    prompt. `n` samples, or a list of prompts, are answered with a list."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: int | list[int | None] | None = None
    top_logprobs_num: int | list[int | None] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None


@dataclass(frozen=True)
class GenerateJob:
    """What a body asks for. single: the reply is one object, not a list."""

    prompts: tuple[GenerateRequest, ...]
    single: bool
    stream: bool
    text_in_logprobs: bool
    prompt_token_ids: bool
    rid: str | None
    rids: tuple[str, ...]


def read_generate(body: bytes, tokenizer: Tokenizer | None) -> GenerateJob:
    """What a body asks for. Any thread may call this.

    Raises:
        InvalidRequestError: naming the field.
    """
    values = load_object(body)
    refuse_absent(values, ABSENT)
    fields = fields_from(values, GenerateFields, strict=True)
    prompts, batch = _prompts(fields, tokenizer)
    count = len(prompts)
    params = _each("sampling_params", fields.sampling_params, count, batch=batch)
    read = [_sampling(given or {}) for given in params]
    starts = _each("logprob_start_len", fields.logprob_start_len, count, batch=batch)
    scored = _each("return_logprob", fields.return_logprob, count, batch=batch)
    tops = _each("top_logprobs_num", fields.top_logprobs_num, count, batch=batch)
    chosen = _token_ids_logprob(fields.token_ids_logprob, count, batch=batch)
    rids = fields.rid if isinstance(fields.rid, list) else []
    if isinstance(fields.rid, list) and len(rids) != count:
        raise _wrong_length("rid", len(rids), count)
    return GenerateJob(
        prompts=tuple(
            GenerateRequest(
                input_ids=prompts[i],
                sampling=read[i],
                return_logprob=bool(scored[i]),
                logprob_start_len=_at_least("logprob_start_len", starts[i], -1),
                top_logprobs_num=_at_least("top_logprobs_num", tops[i], 0),
                token_ids_logprob=chosen[i],
            )
            for i in range(count)
        ),
        single=not batch and read[0].n == 1,
        stream=bool(fields.stream),
        text_in_logprobs=bool(fields.return_text_in_logprobs),
        prompt_token_ids=bool(fields.return_prompt_token_ids),
        rid=fields.rid if isinstance(fields.rid, str) else None,
        rids=tuple(rids),
    )


def load_object(body: bytes) -> dict[str, Any]:
    """A body's JSON object.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not a JSON object: {error}", code="invalid_json", hint="Send one JSON object."
        ) from error


def refuse_absent(values: Mapping[str, Any], names: Sequence[str], within: str = "") -> None:
    """Refuses fields that ask for what there isn't; with a value that asks for nothing they may be there.

    Raises:
        InvalidRequestError: naming the first of them.
    """
    for name in names:
        if values.get(name):
            raise InvalidRequestError(
                f"{name} asks for what this engine hasn't",
                code="unsupported_field",
                field=within + name,
                value=values[name],
                hint="Leave it out.",
            )


def token_list(field: str, value: Sequence[Any]) -> tuple[int, ...]:
    """The value as token ids.

    Raises:
        InvalidRequestError: it is no list of whole numbers.
    """
    wrong = next((token for token in value if type(token) is not int), None) if isinstance(value, list) else value
    if not isinstance(value, list) or wrong is not None or None in value:
        raise InvalidRequestError(f"{field} must be a list of token ids", field=field, value=wrong)
    return tuple(value)


def _prompts(fields: GenerateFields, tokenizer: Tokenizer | None) -> tuple[list[tuple[int, ...]], bool]:
    """Each prompt's tokens, and whether they came as a list of prompts."""
    if (fields.text is None) == (fields.input_ids is None):
        raise InvalidRequestError(
            "exactly one of text and input_ids is needed", field="text", hint="Send text, or the tokens of it."
        )
    if fields.input_ids is not None:
        batch = any(isinstance(entry, list) for entry in fields.input_ids)
        lists = fields.input_ids if batch else [fields.input_ids]
        refuse_many(lists)
        return [token_list("input_ids", entry) for entry in lists], batch
    if tokenizer is None:
        raise no_tokenizer()
    batch = isinstance(fields.text, list)
    texts = fields.text if isinstance(fields.text, list) else [fields.text or ""]
    if not texts:
        raise InvalidRequestError("text is an empty list", field="text", hint="Send at least one prompt.")
    refuse_many(texts)
    return [tuple(tokenizer.encode(text)) for text in texts], batch


def refuse_many(prompts: Sequence[object]) -> None:
    """Refuses more prompts than any service queues, before anything is made of them.

    Raises:
        LimitExceededError: naming how many they are.
    """
    if len(prompts) > MOST_PROMPTS:
        raise LimitExceededError(
            f"{len(prompts)} prompts in one request, at most {MOST_PROMPTS} are taken",
            value=len(prompts),
            hint="Send fewer prompts at a time.",
        )


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    refuse_absent(given, ABSENT_SAMPLING, "sampling_params.")
    return sampling_params({name: value for name, value in given.items() if name not in ABSENT_SAMPLING})


def _each(field: str, value: object, count: int, *, batch: bool) -> list[Any]:
    """One entry a prompt, from one for all or a list of them."""
    if not isinstance(value, list):
        return [value] * count
    if not batch and len(value) != 1:
        raise InvalidRequestError(f"{field} is a list, and there is one prompt", field=field, hint="Send one value.")
    if len(value) != count:
        raise _wrong_length(field, len(value), count)
    return value


def _token_ids_logprob(value: list[Any] | None, count: int, *, batch: bool) -> list[tuple[int, ...]]:
    if value is None:
        return [()] * count
    if not any(isinstance(entry, list) or entry is None for entry in value):
        return [token_list("token_ids_logprob", value)] * count
    entries = _each("token_ids_logprob", value, count, batch=batch)
    return [() if entry is None else token_list("token_ids_logprob", entry) for entry in entries]


def _at_least(field: str, value: int | None, low: int) -> int:
    """The value, `low` if it is left out."""
    if value is not None and value < low:
        raise InvalidRequestError(f"{field} must be at least {low}, not {value}", field=field, value=value)
    return low if value is None else value


def _wrong_length(field: str, length: int, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{field} has {length} entries for {count} prompts", field=field, value=length, hint="Send one, or one each."
    )
