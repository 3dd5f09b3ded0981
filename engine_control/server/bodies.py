"""How a control route gets its fields: JSON in the body, or the query; unknown keys are ignored, types are lax."""

from __future__ import annotations

import asyncio
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine_control.errors import (
    InvalidRequestError,
    LimitExceededError,
    UnsupportedMediaTypeError,
)

SMALL_BODY_BYTES = 64 * 1024  # takes a millisecond to read
MAX_BRACKETS = 4_000_000  # lists and objects of a body: some ten for each tensor of the largest models
RAW_TYPES = frozenset({"application/vnd.safetensors", "application/x-safetensors", "application/octet-stream"})
WEIGHT_PATHS = frozenset(
    {
        "/begin_weight_update",
        "/collective_rpc",
        "/end_weight_update",
        "/finish_weight_update",
        "/load_lora_adapter_from_tensors",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weights",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/update_weights_from_tensor_checker",
        "/weight_checker",
        "/weights_checker",
    }
)
"""Routes whose bodies hold weights, or a line for each: an app lets them be larger, and slower."""

_REPEATABLE = frozenset({"tags", "target_modules", "module_names"})  # in a query
_AT = re.compile(r"`\$\.([^`.\[]+)[^`]*`$|missing required field `([^`]+)`$")


class Fields(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of one route. What is left out, or null, is what the command itself takes then."""

    body_required: ClassVar[bool] = False

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these fields (of all, if none is named) that aren't left out."""
        values = ((name, getattr(self, name)) for name in names or self.__struct_fields__)
        return {name: value for name, value in values if value is not None}


F = TypeVar("F", bound=Fields)


async def read_fields(request: Request, shape: type[F]) -> F:
    """The request's fields; where body and query both have one, the body's.

    Raises:
        InvalidRequestError: naming the field.
        UnsupportedMediaTypeError: a body that isn't labelled as JSON.
    """
    body = await request.body()
    if not body and shape.body_required:
        raise InvalidRequestError(
            "this route needs a JSON object as its body", code="invalid_json", hint="Send at least {}."
        )
    if body:
        check_json_content_type(request)
    if len(body) <= SMALL_BODY_BYTES:
        return _decoded(body, _query(request), shape)
    return await asyncio.to_thread(_decoded, body, _query(request), shape)


def read_query(request: Request, shape: type[F]) -> F:
    """The request's fields, from the query alone.

    Raises:
        InvalidRequestError: naming the field.
    """
    return _decoded(b"", _query(request), shape)


def fields_from(values: Mapping[str, object], shape: type[F], *, strict: bool = False) -> F:
    """The fields that are among these values; `strict`: in their own types alone.

    Raises:
        InvalidRequestError: naming the field.
    """
    try:
        return msgspec.convert(dict(values), shape, strict=strict)
    except msgspec.ValidationError as error:
        raise _invalid(error, shape) from error


def media_type(request: Request) -> str:
    """What the body is labelled as; JSON if it isn't."""
    return (request.headers.get("content-type") or "application/json").split(";")[0].strip().lower()


async def read_raw(request: Request) -> torch.Tensor:
    """The body as it is, `[bytes]` uint8, read into one piece of memory if its length is known."""
    declared = request.headers.get("content-length", "")
    data, position = bytearray(int(declared) if declared.isdigit() else 0), 0
    async for chunk in request.stream():
        data[position : position + len(chunk)] = chunk
        position += len(chunk)
    if not position or position != len(data):
        raise InvalidRequestError(f"{position} bytes of {len(data)} came", hint="Send one safetensors file.")
    return torch.frombuffer(data, dtype=torch.uint8)


def schema_of(shape: type[Fields]) -> dict[str, Any]:
    """OpenAPI's description of a body with these fields."""
    schema: dict[str, Any] = msgspec.json.schema(shape)["$defs"][shape.__name__]
    return {"requestBody": {"required": shape.body_required, "content": {"application/json": {"schema": schema}}}}


def add_route(
    router: APIRouter, path: str, shape: type[Fields], endpoint: Callable[[Request], Awaitable[Response]], method: str
) -> None:
    """Adds a route that reads those fields, and is described by them."""
    router.add_api_route(
        path,
        endpoint,
        methods=[method],
        name=path.strip("/"),
        description=shape.__doc__,
        response_class=Response,
        openapi_extra=schema_of(shape) if method == "POST" else None,
    )


def _query(request: Request) -> dict[str, Any]:
    given = request.query_params
    return {key: given.getlist(key) if key in _REPEATABLE else value for key, value in given.items()}


def check_json_content_type(request: Request) -> None:
    """Refuses a body that is labelled as anything but JSON.

    Raises:
        UnsupportedMediaTypeError: it is; a missing label is fine.
    """
    kind = media_type(request)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaTypeError(
            f"this route reads JSON, not {kind[:100]}",
            field="Content-Type",
            value=kind,
            hint="Send Content-Type: application/json.",
        )


def _decoded(body: bytes, query: Mapping[str, object], shape: type[F]) -> F:
    if len(body) > SMALL_BODY_BYTES:
        brackets = body.count(b"[") + body.count(b"{")
        if brackets > MAX_BRACKETS:
            raise LimitExceededError(
                f"{brackets} opening brackets in the body, at most {MAX_BRACKETS} are read",
                value=brackets,
                hint="Send fewer lists.",
            )
    try:
        if not query:
            return msgspec.json.decode(body or b"{}", type=shape, strict=False)
        given = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        return fields_from({**query, **given}, shape)
    except msgspec.ValidationError as error:
        raise _invalid(error, shape) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json", hint="Send one JSON object."
        ) from error


def _invalid(error: msgspec.ValidationError, shape: type[Fields]) -> InvalidRequestError:
    found = _AT.search(str(error))
    field = None if found is None else found[1] or found[2]
    wanted = typing.get_type_hints(shape).get(field or "")
    allowed = [
        repr(value)
        for part in (wanted, *typing.get_args(wanted))  # of `Literal[...] | None`, the part
        for value in typing.get_args(part)
        if typing.get_origin(part) is typing.Literal
    ]
    hint = f"One of {', '.join(allowed)}." if allowed else "See /docs."
    return InvalidRequestError(str(error), field=field, hint=hint)
