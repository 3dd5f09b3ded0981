"""Routes for named LoRA adapters, under SGLang's names. A refusal has `error_message`, which its clients read."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine_control.errors import InvalidRequestError
from engine_control.server.bodies import RAW_TYPES, add_route, media_type, read_fields, read_query, read_raw
from engine_control.server.failures import LoraRoute, json_response
from engine_control.server.port import ControlPort
from engine_control.server.sglang_fields import Command, SglangFields


class LoadLoraAdapter(SglangFields, frozen=True, kw_only=True):
    """Loads a folder that peft has saved, on every rank or on none. A name that is loaded already is replaced."""

    lora_name: str
    lora_path: str
    lora_version: str | None = None
    in_place: bool | None = None
    abort_all_requests: bool | None = None

    def command(self) -> Command:
        return "load_lora_adapter", self.given()


class LoadLoraAdapterFromTensors(SglangFields, frozen=True, kw_only=True):
    """Loads an adapter from peft's configuration and one base64 text for each rank. Without base64: a body of type
    `application/vnd.safetensors`, and the other fields in the query, `config_dict` as JSON."""

    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: list[str]
    load_format: str | None = None
    lora_version: str | None = None
    in_place: bool | None = None
    abort_all_requests: bool | None = None

    def command(self) -> Command:
        given = self.given()
        info = {"serialized_named_tensors": given.pop("serialized_named_tensors")}
        info["load_format"] = given.pop("load_format", None)
        return "load_lora_adapter_from_tensors", {**given, "transport": "tensor", "info": info}


class RawLoraAdapter(SglangFields, frozen=True, kw_only=True):
    """The query beside a body that is a safetensors file."""

    lora_name: str
    config_dict: str
    lora_version: str | None = None
    in_place: bool | None = None
    abort_all_requests: bool | None = None


class UnloadLoraAdapter(SglangFields, frozen=True, kw_only=True):
    """Forgets an adapter, once no request in flight uses it."""

    lora_name: str
    abort_all_requests: bool | None = None

    def command(self) -> Command:
        return "unload_lora_adapter", self.given()


def lora_router(port: ControlPort) -> APIRouter:
    """`/load_lora_adapter`, `/load_lora_adapter_from_tensors`, `/unload_lora_adapter` and `/v1/list_loras`."""
    router = APIRouter(tags=["control: LoRA adapters"], route_class=LoraRoute)

    async def load(request: Request) -> Response:
        return await _done(port, (await read_fields(request, LoadLoraAdapter)).command())

    async def load_from_tensors(request: Request) -> Response:
        if media_type(request) not in RAW_TYPES:
            return await _done(port, (await read_fields(request, LoadLoraAdapterFromTensors)).command())
        beside = read_query(request, RawLoraAdapter)
        info = {"load_format": "safetensors", "safetensors": await read_raw(request)}
        arguments = {**beside.given(), "config_dict": _config(beside.config_dict), "transport": "tensor", "info": info}
        return await _done(port, ("load_lora_adapter_from_tensors", arguments))

    async def unload(request: Request) -> Response:
        return await _done(port, (await read_fields(request, UnloadLoraAdapter)).command())

    add_route(router, "/load_lora_adapter", LoadLoraAdapter, load, "POST")
    add_route(router, "/load_lora_adapter_from_tensors", LoadLoraAdapterFromTensors, load_from_tensors, "POST")
    add_route(router, "/unload_lora_adapter", UnloadLoraAdapter, unload, "POST")

    @router.get("/v1/list_loras", response_class=Response)
    async def list_loras() -> Response:
        """Every adapter by its name: version, source, layers, rank, bytes."""
        return json_response({"loras": await port.call("list_lora_adapters", {})})

    return router


async def _done(port: ControlPort, command: Command) -> Response:
    return json_response({"error_message": "", **await port.call(*command)})


def _config(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"config_dict is no JSON object: {error}", field="config_dict", hint="Send peft's adapter_config.json."
        ) from error
