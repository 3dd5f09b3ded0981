"""Replies of `/generate`, in SGLang's form: objects with `text`, `output_ids` and `meta_info`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llm_runtime.output import FinishReason, GenerateOutput, TokenLogprob
from llm_runtime.params import GenerateRequest
from llm_runtime.text import GrowingText, Tokenizer

Positions = Sequence[Sequence[TokenLogprob] | None]


def generate_row(
    output: GenerateOutput,
    request: GenerateRequest,
    tokenizer: Tokenizer | None,
    *,
    text_in_logprobs: bool = False,
    prompt_token_ids: bool = False,
) -> dict[str, Any]:
    """A finished output as one object; without a tokenizer it has no `text`."""
    named = tokenizer if text_in_logprobs else None
    row: dict[str, Any] = {}
    if tokenizer is not None:
        row["text"] = tokenizer.output_text(output.output_ids, output.finish_reason, request.sampling)
    row |= {"output_ids": output.output_ids, "meta_info": meta_info(output, named)}
    if prompt_token_ids:
        row["prompt_token_ids"] = list(request.input_ids)
    return row


def meta_info(output: GenerateOutput, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """All about an output but its tokens. With a tokenizer, the third element of each triple is the token's text."""
    info: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": None if output.finish_reason is None else finish_reason(output.finish_reason),
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "reasoning_tokens": 0,
        "num_retractions": output.num_retractions,
        "weight_version": output.weight_version,
    }
    if output.finish_reason is not None:
        info["weight_versions"] = version_list(output)
        info["e2e_latency"] = output.e2e_latency
    if output.output_token_logprobs is not None:
        for side, triples in (("output", output.output_token_logprobs), ("input", output.input_token_logprobs or [])):
            info[f"{side}_token_logprobs"] = _triples(triples, tokenizer)
            info[f"{side}_token_logprobs_length"] = len(triples)
    lists = {
        "output_top_logprobs": output.output_top_logprobs,
        "input_top_logprobs": output.input_top_logprobs,
        "output_token_ids_logprobs": output.output_token_ids_logprobs,
        "input_token_ids_logprobs": output.input_token_ids_logprobs,
    }
    for name, positions in lists.items():
        if positions is not None:
            info[name] = [None if entry is None else _triples(entry, tokenizer) for entry in positions]
    return info


def finish_reason(reason: FinishReason) -> dict[str, Any]:
    """Why an output ended. An abort has no status code: it is an answer like any other, as trainers expect."""
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    if reason.type == "stop":
        return {"type": "stop", "matched": reason.matched}
    return {"type": "abort", "message": reason.message or "Aborted", "status_code": None, "err_type": None}


def version_list(output: GenerateOutput) -> list[dict[str, Any]]:
    """Which weights computed which of the output's tokens."""
    return [asdict(span) for span in output.weight_versions]


@dataclass
class GenerateChunks:
    """The chunks of one sequence's stream. Each has all so far, or, if `incremental`, what is new."""

    request: GenerateRequest
    tokenizer: Tokenizer | None
    incremental: bool
    text_in_logprobs: bool = False
    prompt_token_ids: bool = False
    index: int | None = None  # where there are several sequences
    growing: GrowingText | None = field(init=False)
    tokens: int = 0  # that were in chunks
    said: str = ""

    def __post_init__(self) -> None:
        self.growing = None if self.tokenizer is None else GrowingText(self.tokenizer, self.request.sampling)

    def chunk(self, output: GenerateOutput) -> dict[str, Any]:
        """The next chunk."""
        row: dict[str, Any] = {}
        if self.growing is not None:
            text = self.growing.update(output.output_ids, output.finish_reason)
            row["text"] = text[len(self.said) :] if self.incremental else text
            self.said = text
        shown = output_from(output, self.tokens) if self.incremental else output
        row |= {
            "output_ids": shown.output_ids,
            "meta_info": {
                **meta_info(shown, self.tokenizer if self.text_in_logprobs else None),
                "completion_tokens": len(output.output_ids),
            },
        }
        if self.prompt_token_ids and (not self.incremental or not self.tokens):
            row["prompt_token_ids"] = list(self.request.input_ids)
        if self.index is not None:
            row["index"] = self.index
        self.tokens = len(output.output_ids)
        return row


def output_from(output: GenerateOutput, start: int) -> GenerateOutput:
    """Of the output, what its tokens from `start` on add; what is of the prompt is with the first ones alone."""
    fresh = start == 0

    def tail(values: list[Any] | None) -> list[Any] | None:
        return None if values is None else values[start:]

    def prompts(values: list[Any] | None) -> list[Any] | None:
        return values if fresh or values is None else []

    return replace(
        output,
        output_ids=output.output_ids[start:],
        output_token_logprobs=tail(output.output_token_logprobs),
        output_top_logprobs=tail(output.output_top_logprobs),
        output_token_ids_logprobs=tail(output.output_token_ids_logprobs),
        input_token_logprobs=prompts(output.input_token_logprobs),
        input_top_logprobs=prompts(output.input_top_logprobs),
        input_token_ids_logprobs=prompts(output.input_token_ids_logprobs),
    )


def _triples(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer | None
) -> list[tuple[float | None, int, str | None]]:
    if tokenizer is None:
        return [(log_prob, token, None) for log_prob, token in entries]
    texts = tokenizer.token_texts([token for _, token in entries])
    return [(log_prob, token, text) for (log_prob, token), text in zip(entries, texts, strict=True)]
