"""The fields of OpenAI's routes: what a body asks for, as requests of the engine.

Beside OpenAI's fields those of vLLM and SGLang are taken that a trainer needs. What asks for something that there isn't
is refused by name; what asks for nothing of the engine (`user`, `store`, `metadata`) is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from engine_control.errors import InvalidRequestError
from engine_control.server.bodies import Fields, fields_from
from llm_runtime.params import GenerateRequest, SamplingParams, sampling_params
from llm_runtime.server.generate_fields import load_object, refuse_absent, refuse_many, token_list
from llm_runtime.text import Tokenizer

DEFAULT_MAX_TOKENS = 16  # of a completion; a chat goes on to the context's end
ABSENT = (
    "lora_path",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "custom_logit_processor",
    "custom_params",
    "return_hidden_states",
    "return_routed_experts",
    "prompt_logprobs",
    "use_beam_search",
    "prompt_embeds",
)
ABSENT_COMPLETION = (*ABSENT, "suffix")
ABSENT_CHAT = (*ABSENT, "functions", "function_call", "audio", "web_search_options", "continue_final_message", "echo")


class StreamOptions(Fields, frozen=True, kw_only=True):
    """`include_usage`: a last chunk counts the tokens."""

    include_usage: bool | None = None


class OpenAIFields(Fields, frozen=True, kw_only=True):
    """What both routes take."""

    body_required: ClassVar[bool] = True
    model: str | None = None
    rid: str | None = None
    request_id: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_meta_info: bool | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None


class CompletionFields(OpenAIFields, frozen=True, kw_only=True):
    """`prompt`: a text or its tokens, or a list of either. `echo`: the reply begins with the prompt."""

    prompt: Any = None
    logprobs: int | bool | None = None
    echo: bool | None = None


class ChatFields(OpenAIFields, frozen=True, kw_only=True):
    """`messages` are written as the model's chat template says, with `tools` and `chat_template_kwargs` if there are
    any. What the model says of tools stands in the reply as text."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class OpenAIJob:
    """What a body asks for. logprobs: whether to show them; top_logprobs: with so many others. echoed: each prompt's
    text, for replies that begin with it."""

    prompts: tuple[GenerateRequest, ...]
    fields: OpenAIFields
    logprobs: bool
    top_logprobs: int
    echoed: tuple[str, ...] | None = None

    @property
    def stream(self) -> bool:
        return bool(self.fields.stream)

    @property
    def include_usage(self) -> bool:
        options = self.fields.stream_options
        return options is not None and bool(options.include_usage)


def read_completion(body: bytes, tokenizer: Tokenizer) -> OpenAIJob:
    """What a body of `/v1/completions` asks for. Any thread may call this.

    Raises:
        InvalidRequestError: naming the field.
    """
    values = load_object(body)
    refuse_absent(values, ABSENT_COMPLETION)
    fields = fields_from(values, CompletionFields, strict=True)
    _check_common(fields)
    logprobs = fields.logprobs is not None and fields.logprobs is not False
    top = int(fields.logprobs or 0)
    _check_top("logprobs", top)
    echo = bool(fields.echo)
    prompts = [tokenizer.encode(p) if isinstance(p, str) else p for p in _prompts(fields.prompt)]
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    params = _sampling(fields, max_tokens)
    if max_tokens == 0 and not echo:
        raise InvalidRequestError(
            "max_tokens=0 makes nothing", field="max_tokens", value=0, hint="Send echo: true to score the prompt."
        )
    return OpenAIJob(
        prompts=tuple(
            GenerateRequest(
                input_ids=tuple(ids),
                sampling=params,
                return_logprob=logprobs,
                logprob_start_len=0 if echo and logprobs else -1,
                top_logprobs_num=top,
            )
            for ids in prompts
        ),
        fields=fields,
        logprobs=logprobs,
        top_logprobs=top,
        echoed=tuple(tokenizer.text_of(ids, params) for ids in prompts) if echo else None,
    )


def read_chat(body: bytes, tokenizer: Tokenizer) -> OpenAIJob:
    """What a body of `/v1/chat/completions` asks for. Any thread may call this.

    Raises:
        InvalidRequestError: naming the field.
    """
    values = load_object(body)
    refuse_absent(values, ABSENT_CHAT)
    fields = fields_from(values, ChatFields, strict=True)
    _check_common(fields)
    if not fields.messages:
        raise InvalidRequestError("there is no message", field="messages", hint="Send at least one.")
    if fields.tool_choice not in (None, "auto", "none"):
        raise InvalidRequestError(
            "this engine can't force a tool call", code="unsupported_field", field="tool_choice", hint='Send "auto".'
        )
    top = fields.top_logprobs or 0
    _check_top("top_logprobs", top)
    if top and not fields.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs", value=top)
    tools = None if fields.tool_choice == "none" else fields.tools
    ids = tokenizer.chat_prompt([_plain(m) for m in fields.messages], tools, fields.chat_template_kwargs)
    wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    request = GenerateRequest(
        input_ids=tuple(ids),
        sampling=_sampling(fields, wanted),
        return_logprob=bool(fields.logprobs),
        top_logprobs_num=top,
    )
    return OpenAIJob((request,), fields, bool(fields.logprobs), top)


def _check_common(fields: OpenAIFields) -> None:
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequestError(
            "best_of is not what n is, and this engine doesn't choose",
            code="unsupported_field",
            field="best_of",
            value=fields.best_of,
            hint="Send n, and choose among the samples.",
        )
    kind = (fields.response_format or {}).get("type", "text")
    if kind != "text":
        raise InvalidRequestError(
            f"this engine can't hold the output to a {kind}",
            code="unsupported_field",
            field="response_format",
            value=kind,
            hint="Leave it out.",
        )


def _check_top(field: str, top: int) -> None:
    if not 0 <= top <= 1000:
        raise InvalidRequestError(f"{field} must be 0 to 1000, not {top}", field=field, value=top)


def _sampling(fields: OpenAIFields, max_tokens: int | None) -> SamplingParams:
    given = {
        "max_new_tokens": max_tokens,
        "sampling_seed": fields.seed,
        "min_new_tokens": fields.min_tokens,
        "no_stop_trim": fields.no_stop_trim or fields.include_stop_str_in_output,
        "top_k": fields.top_k or None,  # vLLM's 0 is no limit, as -1 is
        **fields.given(
            "n",
            "temperature",
            "top_p",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
            "stop",
            "min_p",
            "repetition_penalty",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ),
    }
    return sampling_params(given)


def _prompts(prompt: Any) -> list[str | Sequence[int]]:
    """Of OpenAI's four forms, the prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [token_list("prompt", prompt)]
        refuse_many(prompt)
        if all(isinstance(entry, str) for entry in prompt):
            return list(prompt)
        return [token_list("prompt", entry) for entry in prompt]
    raise InvalidRequestError(
        "prompt must be a text or a list of token ids, or a list of those", field="prompt", hint="Send at least one."
    )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text: parts of text are joined, others refused."""
    content = message.get("content")
    if not isinstance(content, list):
        return {**message, "content": "" if content is None else content}
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"this model reads text alone, not a {kind}",
                code="unsupported_field",
                field="messages",
                value=kind,
                hint='Send parts {"type": "text", "text": ...}.',
            )
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}
