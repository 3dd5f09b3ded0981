"""Every error of the service as `application/problem+json` (RFC 9457), mapped here and nowhere else."""

from __future__ import annotations

import logging
from http import HTTPStatus

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine_control.errors import EngineError, InvalidRequestError, RequestAbortedError

logger = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
TITLES = {499: "Client Closed Request"}


class Problem(BaseModel):
    """An error. `code` is stable and made for programs, `detail` and `hint` for people."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    field: str | None = Field(default=None, description="The request field that the error is about.")
    value: str | int | float | bool | None = Field(default=None, description="What that field was (shortened).")
    hint: str | None = Field(default=None, description="The way out.")


def problem_response(error: EngineError) -> Response:
    """The error as a response."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body may still come, and is no request
    return _response(
        Problem(
            title=_title(error.status),
            status=error.status,
            detail=error.message,
            code=error.code,
            field=error.field,
            value=error.value,
            hint=error.hint,
        ),
        headers,
    )


def install_error_handlers(app: FastAPI) -> None:
    """Afterwards every error that leaves a route, or the routing itself, is answered as problem+json."""

    async def engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        return problem_response(error)

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = str(first["loc"][-1]) if first["loc"] else None
        return problem_response(InvalidRequestError(str(first["msg"]), field=field, value=first.get("input")))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        title = _title(error.status_code)
        code = title.lower().replace(" ", "_").replace("-", "_")
        problem = Problem(title=title, status=error.status_code, detail=str(error.detail), code=code, hint="See /docs.")
        return _response(problem, dict(error.headers or {}))

    async def client_gone(request: Request, error: Exception) -> Response:
        return problem_response(RequestAbortedError("the client closed the connection"))

    async def unforeseen(request: Request, error: Exception) -> Response:
        logger.error("a request failed in the HTTP process", exc_info=error)
        return problem_response(
            EngineError(f"{type(error).__name__} in the HTTP process", hint="See the service's log.")
        )

    app.add_exception_handler(EngineError, engine_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, unforeseen)


def _response(problem: Problem, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(problem.model_dump()), problem.status, headers=headers, media_type=PROBLEM_TYPE)


def _title(status: int) -> str:
    try:
        return TITLES.get(status) or HTTPStatus(status).phrase
    except ValueError:
        return "Error"
