"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_control.server.bodies import check_json_content_type, schema_of
from engine_control.server.clients import read_body, unless_disconnected
from engine_control.server.failures import VllmRoute, json_response
from llm_runtime.output import GenerateOutput
from llm_runtime.server.events import event_stream
from llm_runtime.server.generate_routes import INLINE_BODY_BYTES, INLINE_TOKENS, stream_error
from llm_runtime.server.openai_fields import (
    ChatFields,
    CompletionFields,
    OpenAIJob,
    read_chat,
    read_completion,
)
from llm_runtime.server.openai_reply import Answered, Kind, OpenAIChunks, ReplyHead, usage, whole_reply
from llm_runtime.server.service import Job, LLMService
from llm_runtime.text import Tokenizer

Read = Callable[[bytes, Tokenizer], OpenAIJob]
ANY_MODEL = ("", "default")  # what clients send that have to send something


def openai_router(service: LLMService) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["generation: OpenAI's"], route_class=VllmRoute)

    async def completions(request: Request) -> Response:
        """Goes on from prompts."""
        return await _answer(service, request, "completion", read_completion)

    async def chat(request: Request) -> Response:
        """Answers a conversation."""
        return await _answer(service, request, "chat", read_chat)

    for path, endpoint, shape in (
        ("/v1/completions", completions, CompletionFields),
        ("/v1/chat/completions", chat, ChatFields),
    ):
        router.add_api_route(path, endpoint, methods=["POST"], response_class=Response, openapi_extra=schema_of(shape))

    @router.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        return json_response({"object": "list", "data": [_card(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        return json_response(_card(service)) if name == service.model_name else _no_model(service, name)

    return router


def _card(service: LLMService) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "llm-runtime",
        "root": service.llm_config.model_path,
        "max_model_len": service.supervisor.description.get("context_length"),
    }


def refuse_model(service: LLMService, name: str | None) -> Response | None:
    """The refusal of a request to another model than the one that is served; None if it is to that."""
    ours = (None, *ANY_MODEL, service.model_name, service.llm_config.model_path)
    return None if name in ours else _no_model(service, name or "")


def _no_model(service: LLMService, name: str) -> Response:
    """Not answered by another model than the one that was asked: a client that names one means it."""
    error = {
        "message": f"there is no model {name[:200]!r}; this service has {service.model_name!r}",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, 404)


async def _answer(service: LLMService, request: Request, kind: Kind, read: Read) -> Response:
    check_json_content_type(request)
    tokenizer = await service.text_tokenizer()
    given = await read_body(request, lambda body: read(body, tokenizer), small=INLINE_BODY_BYTES)
    fields = given.fields
    if (refusal := refuse_model(service, fields.model)) is not None:
        return refusal
    job = service.job(given.prompts, rid=fields.rid or fields.request_id)
    head = ReplyHead(kind, job.request_id, int(time.time()), service.model_name)
    if given.stream:
        return await event_stream(request, _chunks(service, head, given, job, tokenizer), stream_error)
    outputs = await unless_disconnected(request, service.compute(job))
    answered = Answered(given, outputs, job.requests, tokenizer)
    return await asyncio.to_thread(lambda: json_response(whole_reply(head, answered)))


async def _chunks(
    service: LLMService, head: ReplyHead, given: OpenAIJob, job: Job, tokenizer: Tokenizer
) -> AsyncGenerator[dict[str, Any], None]:
    streams = [OpenAIChunks(head, given, index, request, tokenizer) for index, request in enumerate(job.requests)]
    opened: set[int] = set()
    latest: dict[int, GenerateOutput] = {}
    async with contextlib.aclosing(service.stream(job)) as outputs:
        async for index, output in outputs:
            latest[index] = output
            if index not in opened:
                opened.add(index)
                if (opening := streams[index].opening()) is not None:
                    yield opening
            make = streams[index].chunk
            small = len(output.output_ids) + output.prompt_tokens <= INLINE_TOKENS
            yield make(output) if small else await asyncio.to_thread(make, output)
    if given.include_usage:
        counted = [latest[index] for index in range(len(streams))]
        yield {**head.chunk(), "choices": [], "usage": usage(counted, n=job.requests[0].sampling.n)}
