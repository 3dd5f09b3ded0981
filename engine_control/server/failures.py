"""How a refusal looks to SGLang's clients and to vLLM's: a route class each, so that every route of a router has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine_control.errors import EngineError, InvalidRequestError, RequestAbortedError

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Failure = Callable[[EngineError], Response]
"""How an app writes an error."""
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


def install_error_handlers(app: FastAPI, failure: Failure, http_failure: Callable[[HTTPException], Response]) -> None:
    """Afterwards every error that leaves a route is answered as `failure` writes it, and what the routing itself
    refuses as `http_failure` does."""

    async def engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return failure(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1]) if first["loc"] else None
        return failure(InvalidRequestError(str(first["msg"]), field=field, value=first.get("input")))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_failure(error)

    async def client_gone(request: Request, error: Exception) -> Response:
        return failure(RequestAbortedError("the client closed the connection"))

    async def unforeseen(request: Request, error: Exception) -> Response:
        logger.error("a request failed in the HTTP process", exc_info=error)
        return failure(EngineError(f"{type(error).__name__} in the HTTP process", hint="See the service's log."))

    app.add_exception_handler(EngineError, engine_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, unforeseen)


def _enveloped(handle: Handler, failure: Failure) -> Handler:
    async def answered(request: Request) -> Response:
        try:
            return await handle(request)
        except EngineError as error:
            return failure(error)

    return answered
