"""`/inference/v1/generate`, vLLM's own route: tokens in, tokens out."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine_control.server.bodies import check_json_content_type, schema_of
from engine_control.server.clients import read_body, unless_disconnected
from engine_control.server.failures import VllmRoute, json_response
from llm_runtime.server.generate_routes import INLINE_BODY_BYTES
from llm_runtime.server.openai_routes import refuse_model
from llm_runtime.server.service import LLMService
from llm_runtime.server.token_fields import TokenFields, read_tokens, token_reply


def token_router(service: LLMService) -> APIRouter:
    """That one."""
    router = APIRouter(tags=["generation: vLLM's"], route_class=VllmRoute)

    async def generate(request: Request) -> Response:
        """Goes on from a prompt's tokens, `n` times. `rank` is a token's place among the likeliest that were asked
        for, null behind them."""
        check_json_content_type(request)
        given = await read_body(request, read_tokens, small=INLINE_BODY_BYTES)
        tokenizer = await (service.text_tokenizer() if given.fields.output_mode == "text" else service.tokenizer())
        if (refusal := refuse_model(service, given.fields.model)) is not None:
            return refusal
        job = service.job([given.prompt], rid=given.fields.request_id)
        outputs = await unless_disconnected(request, service.compute(job))
        shown = tokenizer if given.fields.output_mode == "text" else None
        return await asyncio.to_thread(lambda: json_response(token_reply(job.request_id, given, outputs, shown)))

    router.add_api_route(
        "/inference/v1/generate",
        generate,
        methods=["POST"],
        name="inference_generate",
        response_class=Response,
        openapi_extra=schema_of(TokenFields),
    )
    return router
