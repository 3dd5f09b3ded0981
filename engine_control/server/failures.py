"""How a refusal looks to SGLang's clients and to vLLM's: a route class each, so that every route of a router has it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from engine_control.errors import EngineError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
RETRY_AFTER_S = 1


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Plain data as JSON. What isn't finite becomes null."""
    return Response(orjson.dumps(value), status, headers=headers, media_type="application/json")


def sglang_failure(error: EngineError) -> Response:
    """`sglang_body`, with the error's own status."""
    return json_response(sglang_body(error), error.status, retry_headers(error))


def sglang_body(error: EngineError) -> dict[str, Any]:
    """`{"success": false, "message", "code", "hint"}`, and the field and its value where the error names one."""
    about = {} if error.field is None else {"field": error.field, "value": error.value}
    return {"success": False, "message": error.message, "code": error.code, "hint": error.hint, **about}


def lora_failure(error: EngineError) -> Response:
    """As `sglang_failure`, with the message as `error_message` too, which is where SGLang's LoRA clients look."""
    return json_response(sglang_body(error) | {"error_message": error.message}, error.status, retry_headers(error))


def vllm_failure(error: EngineError) -> Response:
    """`{"error": {"message", "type", "code"}}`: `type` is the stable code, `code` the status, as in vLLM."""
    body = {
        "message": error.message,
        "type": error.code,
        "param": error.field,
        "code": error.status,
        "hint": error.hint,
    }
    return json_response({"error": body}, error.status, retry_headers(error))


def retry_headers(error: EngineError) -> dict[str, str]:
    """As in every other reply of that status."""
    if error.status == 408:
        return {"connection": "close"}  # the rest of the body may still come, and is no request
    return {"retry-after": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}


class SglangRoute(APIRoute):
    """Answers errors as `sglang_failure` does."""

    def get_route_handler(self) -> Handler:
        return _enveloped(super().get_route_handler(), sglang_failure)


class LoraRoute(APIRoute):
    """Answers errors as `lora_failure` does."""

    def get_route_handler(self) -> Handler:
        return _enveloped(super().get_route_handler(), lora_failure)


class VllmRoute(APIRoute):
    """Answers errors as `vllm_failure` does."""

    def get_route_handler(self) -> Handler:
        return _enveloped(super().get_route_handler(), vllm_failure)


def _enveloped(handle: Handler, failure: Callable[[EngineError], Response]) -> Handler:
    async def answered(request: Request) -> Response:
        try:
            return await handle(request)
        except EngineError as error:
            return failure(error)

    return answered
