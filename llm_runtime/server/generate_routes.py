"""`/generate`, SGLang's own route: text or tokens in, text, tokens and log-probs out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_control.errors import EngineError, InvalidRequestError
from engine_control.server.bodies import check_json_content_type, schema_of
from engine_control.server.clients import read_body, unless_disconnected
from engine_control.server.failures import json_response, vllm_failure
from llm_runtime.server.events import event_stream
from llm_runtime.server.generate_fields import GenerateFields, GenerateJob, read_generate
from llm_runtime.server.generate_reply import GenerateChunks, generate_row
from llm_runtime.server.service import Job, LLMService
from llm_runtime.text import Tokenizer

INLINE_BODY_BYTES = 4096  # a body that is longer is read, and its text made tokens, in a worker thread
INLINE_TOKENS = 512  # a chunk that shows more of them is made there, too


def generate_router(service: LLMService) -> APIRouter:
    """`/generate`, by POST and PUT."""
    router = APIRouter(tags=["generation: SGLang's"])

    async def generate(request: Request) -> Response:
        """Goes on from prompts. If the client closes the connection, its sequences leave the batch before the next
        step; if they are aborted otherwise, it gets what there is of them, with `finish_reason.type` `abort`."""
        try:
            check_json_content_type(request)
            tokenizer = await service.tokenizer()
            given = await read_body(request, lambda body: read_generate(body, tokenizer), small=INLINE_BODY_BYTES)
            job = service.job(given.prompts, rid=given.rid, rids=given.rids)
            if given.stream:
                return await event_stream(request, _chunks(service, job, given, tokenizer), stream_error)
            rows = await unless_disconnected(request, _rows(service, job, given, tokenizer))
        except InvalidRequestError as error:
            return _refusal(error)
        return await asyncio.to_thread(json_response, rows[0] if given.single else rows)

    for method in ("POST", "PUT"):
        router.add_api_route(
            "/generate",
            generate,
            methods=[method],
            name="generate",
            response_class=Response,
            openapi_extra=schema_of(GenerateFields),
        )
    return router


def stream_error(error: EngineError) -> dict[str, Any]:
    """An error within a stream."""
    retryable = error.status in (429, 503)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "code": error.status, "retryable": retryable}}


def _refusal(error: InvalidRequestError) -> Response:
    """A sampling parameter that there isn't is refused with a plain text, as SGLang refuses it."""
    if error.code == "unknown_field":
        return json_response({"error": str(error)}, error.status)
    return vllm_failure(error)


async def _rows(service: LLMService, job: Job, given: GenerateJob, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    outputs = await service.compute(job)

    def rows() -> list[dict[str, Any]]:
        return [
            generate_row(
                output,
                request,
                tokenizer,
                text_in_logprobs=given.text_in_logprobs,
                prompt_token_ids=given.prompt_token_ids,
            )
            for output, request in zip(outputs, job.requests, strict=True)
        ]

    return await asyncio.to_thread(rows)


async def _chunks(
    service: LLMService, job: Job, given: GenerateJob, tokenizer: Tokenizer | None
) -> AsyncGenerator[dict[str, Any], None]:
    streams = [
        GenerateChunks(
            request,
            tokenizer,
            service.config.incremental_streaming_output,
            given.text_in_logprobs,
            given.prompt_token_ids,
            None if given.single else index,
        )
        for index, request in enumerate(job.requests)
    ]
    async with contextlib.aclosing(service.stream(job)) as outputs:
        async for index, output in outputs:
            make = streams[index].chunk
            small = len(output.output_ids) + output.prompt_tokens <= INLINE_TOKENS
            yield make(output) if small else await asyncio.to_thread(make, output)
