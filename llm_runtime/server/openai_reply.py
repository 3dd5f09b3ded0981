"""Replies of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llm_runtime.output import GenerateOutput, TokenLogprob
from llm_runtime.params import GenerateRequest
from llm_runtime.server.generate_reply import meta_info, output_from, version_list
from llm_runtime.server.openai_fields import OpenAIJob
from llm_runtime.text import GrowingText, Tokenizer

Kind = Literal["completion", "chat"]


@dataclass(frozen=True)
class ReplyHead:
    """What every object of one reply begins with."""

    kind: Kind
    request_id: str
    created: int
    model: str

    def whole(self) -> dict[str, Any]:
        return self._head("text_completion", "chat.completion")

    def chunk(self) -> dict[str, Any]:
        return self._head("text_completion", "chat.completion.chunk")

    def _head(self, completion: str, chat: str) -> dict[str, Any]:
        prefix, name = ("cmpl", completion) if self.kind == "completion" else ("chatcmpl", chat)
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
        }


@dataclass(frozen=True)
class Answered:
    """A job with its outputs, each beside its request and the text that it begins with, if the prompt is echoed."""

    job: OpenAIJob
    outputs: Sequence[GenerateOutput]
    requests: Sequence[GenerateRequest]
    tokenizer: Tokenizer


def whole_reply(head: ReplyHead, answered: Answered) -> dict[str, Any]:
    """The reply that isn't a stream."""
    rows = zip(answered.outputs, answered.requests, strict=True)
    choices = [_choice(head.kind, answered, index, output, request) for index, (output, request) in enumerate(rows)]
    last = answered.outputs[0]
    return {
        **head.whole(),
        "choices": choices,
        "usage": usage(answered.outputs, n=answered.requests[0].sampling.n),
        "metadata": {"weight_version": last.weight_version, "weight_versions": version_list(last)},
    }


def usage(outputs: Sequence[GenerateOutput], *, n: int) -> dict[str, Any]:
    """The tokens of prompts (each counted once, whatever its `n`) and outputs."""
    prompt = sum(output.prompt_tokens for output in outputs[::n])
    completion = sum(len(output.output_ids) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs[::n])},
    }


def _choice(
    kind: Kind, answered: Answered, index: int, output: GenerateOutput, request: GenerateRequest
) -> dict[str, Any]:
    job, tokenizer = answered.job, answered.tokenizer
    text = tokenizer.output_text(output.output_ids, output.finish_reason, request.sampling)
    choice: dict[str, Any] = {"index": index, **_ending(output)}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        choice["logprobs"] = chat_logprobs(output, job.top_logprobs, tokenizer) if job.logprobs else None
    else:
        echoed = job.echoed[index // request.sampling.n] if job.echoed is not None else ""
        choice["text"] = echoed + text
        choice["logprobs"] = completion_logprobs(output, job, tokenizer, 0) if job.logprobs else None
    if job.fields.return_meta_info:
        choice["meta_info"] = meta_info(output)
    if job.fields.return_weight_versions:
        choice["weight_versions"] = version_list(output)
    if job.fields.return_token_ids:
        choice |= {"token_ids": output.output_ids, "prompt_token_ids": list(request.input_ids)}
    return choice


@dataclass
class OpenAIChunks:
    """The chunks of one choice's stream: what is new in each."""

    head: ReplyHead
    job: OpenAIJob
    index: int
    request: GenerateRequest
    tokenizer: Tokenizer
    growing: GrowingText = field(init=False)
    tokens: int = 0  # that were in chunks
    offset: int = 0  # characters of tokens that were in chunks
    said: str = ""

    def __post_init__(self) -> None:
        self.growing = GrowingText(self.tokenizer, self.request.sampling)

    def opening(self) -> dict[str, Any] | None:
        """What comes before the first token: of a chat, who speaks; of a completion that echoes, the prompt."""
        if self.head.kind == "chat":
            choice = {"index": self.index, "delta": {"role": "assistant", "content": ""}}
        elif self.job.echoed is not None:
            choice = {"index": self.index, "text": self.job.echoed[self.index // self.request.sampling.n]}
        else:
            return None
        return {**self.head.chunk(), "choices": [{**choice, "logprobs": None, "finish_reason": None}]}

    def chunk(self, output: GenerateOutput) -> dict[str, Any]:
        """What is new in the output."""
        text = self.growing.update(output.output_ids, output.finish_reason)
        new, self.said = text[len(self.said) :], text
        fresh = output_from(output, self.tokens)
        choice: dict[str, Any] = {"index": self.index, **_ending(output)}
        if self.head.kind == "chat":
            choice["delta"] = {"content": new}
            choice["logprobs"] = (
                chat_logprobs(fresh, self.job.top_logprobs, self.tokenizer) if self.job.logprobs else None
            )
        else:
            choice["text"] = new
            choice["logprobs"] = (
                completion_logprobs(fresh, self.job, self.tokenizer, self.offset) if self.job.logprobs else None
            )
            if choice["logprobs"]:
                self.offset += sum(map(len, choice["logprobs"]["tokens"]))
        if self.job.fields.return_token_ids:
            choice["token_ids"] = fresh.output_ids
        if output.finish_reason is not None and self.job.fields.return_weight_versions:
            choice["weight_versions"] = version_list(output)
        self.tokens = len(output.output_ids)
        return {**self.head.chunk(), "choices": [choice]}


def completion_logprobs(output: GenerateOutput, job: OpenAIJob, tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """A completion's log-probs: of the prompt's tokens too, where it is echoed. `offset`: where the text begins."""
    entries, tops = list(output.output_token_logprobs or []), list(output.output_top_logprobs or [])
    if job.echoed is not None:
        entries = [*(output.input_token_logprobs or []), *entries]
        tops = [*(output.input_top_logprobs or []), *tops]  # type: ignore[list-item]
    texts = tokenizer.token_texts([token for _, token in entries])
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    likeliest = None
    if job.top_logprobs:
        likeliest = [
            None if top is None else _by_text([*top, entry], tokenizer)
            for top, entry in zip(tops, entries, strict=True)
        ]
    return {
        "tokens": texts,
        "token_logprobs": [log_prob for log_prob, _ in entries],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


def chat_logprobs(output: GenerateOutput, top_logprobs: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """A chat's log-probs, one entry a token."""
    entries = output.output_token_logprobs or []
    tops = output.output_top_logprobs if top_logprobs else None
    content = _named(entries, tokenizer)
    for position, entry in enumerate(content):
        entry["top_logprobs"] = _named(tops[position], tokenizer) if tops else []
    return {"content": content, "refusal": None}


def _named(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    texts = tokenizer.token_texts([token for _, token in entries])
    return [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
        for text, (log_prob, _) in zip(texts, entries, strict=True)
    ]


def _by_text(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, float | None]:
    """The likeliest first; of tokens with the same text, the likeliest alone."""
    named: dict[str, float | None] = {}
    for text, (log_prob, _) in zip(tokenizer.token_texts([t for _, t in entries]), entries, strict=True):
        named.setdefault(text, log_prob)
    return named


def _ending(output: GenerateOutput) -> dict[str, Any]:
    reason = output.finish_reason
    if reason is None:
        return {"finish_reason": None}
    return {"finish_reason": reason.type, "matched_stop": reason.matched}
