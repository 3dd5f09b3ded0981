"""Every error of the service as `application/problem+json` (RFC 9457), mapped here and nowhere else."""

from __future__ import annotations

from http import HTTPStatus

import orjson
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine_control.errors import EngineError
from engine_control.server.failures import retry_headers

PROBLEM_TYPE = "application/problem+json"
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
        retry_headers(error),
    )


def http_problem(error: HTTPException) -> Response:
    """What the routing refuses, as a response."""
    title = _title(error.status_code)
    code = title.lower().replace(" ", "_").replace("-", "_")
    problem = Problem(title=title, status=error.status_code, detail=str(error.detail), code=code, hint="See /docs.")
    return _response(problem, dict(error.headers or {}))


def _response(problem: Problem, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(problem.model_dump()), problem.status, headers=headers, media_type=PROBLEM_TYPE)


def _title(status: int) -> str:
    try:
        return TITLES.get(status) or HTTPStatus(status).phrase
    except ValueError:
        return "Error"
