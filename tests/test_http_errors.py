"""Bad requests: each is refused with a status, a stable code, the field, its value and a hint, and harms nobody."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from functools import partial
from typing import Any

import httpx
import pytest
import torch
from conftest import Service

from diffusion_rl.client import decode_json
from diffusion_rl.config import EngineConfig, ServerConfig
from diffusion_rl.params import Limits
from diffusion_rl.server.app import create_app
from diffusion_rl.server.schema import parse_rollout_request
from engine_control.errors import (
    InvalidRequestError,
    LimitExceededError,
    PayloadTooLargeError,
    UnknownFieldError,
)

GOOD = {"prompt": "a red square", "width": 64, "height": 64, "num_inference_steps": 3, "seed": 5}
BAD: list[tuple[dict[str, Any], str, str, object]] = [
    ({"rollout_sde_type": "sda"}, "unknown_rollout_sde_type", "rollout_sde_type", "sda"),
    ({"rollout_noise_level": -0.1}, "invalid_request", "rollout_noise_level", -0.1),
    ({"rollout_noise_level": "0.7"}, "invalid_request", "rollout_noise_level", "0.7"),
    ({"num_inference_steps": 0}, "invalid_request", "num_inference_steps", 0),
    ({"num_inference_steps": 2.5}, "invalid_request", "num_inference_steps", 2.5),
    ({"num_inference_steps": 1001}, "limit_exceeded", "num_inference_steps", 1001),
    ({"num_inference_steps": True}, "invalid_request", "num_inference_steps", True),
    ({"num_outputs_per_prompt": 17}, "limit_exceeded", "num_outputs_per_prompt", 17),
    ({"num_outputs_per_prompt": 0}, "invalid_request", "num_outputs_per_prompt", 0),
    ({"width": 1024, "height": 1024}, "limit_exceeded", "width", 1024),
    ({"width": 65}, "invalid_request", "width", 65),
    ({"rollout_sde_step_indices": [0, 3]}, "invalid_request", "rollout_sde_step_indices", 3),
    ({"rollout_sde_step_indices": [-1]}, "invalid_request", "rollout_sde_step_indices", -1),
    ({"rollout_sde_step_indices": [1, 1]}, "invalid_request", "rollout_sde_step_indices", "[1, 1]"),
    ({"rollout_return_step_indices": [4]}, "invalid_request", "rollout_return_step_indices", 4),
    ({"rollout_return_step_indices": []}, "invalid_request", "rollout_return_step_indices", "[]"),
    ({"rollout_sde_step_indices": "all"}, "invalid_request", "rollout_sde_step_indices", "all"),
    ({"num_inference_stepz": 3}, "unknown_field", "num_inference_stepz", 3),
    ({"prompt": ""}, "invalid_request", "prompt", ""),
    ({"prompt": "  "}, "invalid_request", "prompt", "  "),
    ({"prompt": None}, "invalid_request", "prompt", None),
    ({"prompt": ["a", "b"]}, "invalid_request", "prompt", "['a', 'b']"),
    ({"prompt": "x" * 8193}, "limit_exceeded", "prompt", 8193),
    ({"seed": -1}, "invalid_request", "seed", -1),
    ({"seed": 2**64}, "invalid_request", "seed", 2.0**64),
    ({"seeds": [1, 2]}, "invalid_request", "seeds", 2),
    ({"num_frames": 16}, "unsupported_field", "num_frames", 16),
    ({"image_path": ["/etc/passwd"]}, "unsupported_field", "image_path", "['/etc/passwd']"),
    ({"extra_sampling_params": {"guidance_scale_2": 3.0}}, "unsupported_field", "guidance_scale_2", 3.0),
    ({"extra_sampling_params": {"boundary_ratio": 0.9}}, "unsupported_field", "boundary_ratio", 0.9),
    ({"extra_sampling_params": {"flow_shit": 3.0}}, "unknown_field", "flow_shit", 3.0),
    ({"extra_sampling_params": {"quality": "high"}}, "invalid_request", "quality", "high"),
    ({"extra_sampling_params": {"rollout": False}}, "invalid_request", "rollout", False),
    ({"extra_sampling_params": [1]}, "invalid_request", "extra_sampling_params", "[1]"),
    ({"output_dtype": "uint9"}, "invalid_request", "output_dtype", "uint9"),
    ({"affine_coefficients": [[1, 0, 0, 0]] * 3}, "invalid_request", "affine_coefficients", "3 rows"),
    ({"rid": ""}, "invalid_request", "rid", ""),
]


@pytest.fixture(scope="module")
def good_output(service: Service) -> torch.Tensor:
    output: torch.Tensor = decode_json(service.generate(GOOD).content)[0]["generated_output"]
    return output


@pytest.mark.parametrize(("fields", "code", "field", "value"), BAD, ids=lambda case: str(case)[:50])
def test_a_bad_field_is_refused_by_name(
    service: Service, fields: dict[str, Any], code: str, field: str, value: object
) -> None:
    reply = service.generate({**GOOD, **fields})
    assert reply.headers["content-type"] == "application/problem+json"
    problem = reply.json()
    assert (reply.status_code, problem["code"], problem["field"], problem["value"]) == (400, code, field, value), (
        problem
    )
    assert problem["hint"]
    assert set(problem) == {"type", "title", "status", "detail", "code", "field", "value", "hint"}
    assert problem["status"] == 400


def test_after_all_bad_requests_a_good_one_has_the_same_bits(service: Service, good_output: torch.Tensor) -> None:
    for fields, *_ in BAD:
        assert service.generate({**GOOD, **fields}).status_code == 400
    again = decode_json(service.generate(GOOD).content)[0]["generated_output"]
    assert torch.equal(again, good_output)


def test_a_misspelt_field_is_told_the_right_name(service: Service) -> None:
    assert "'num_inference_steps'" in service.generate({**GOOD, "num_inference_step": 3}).json()["hint"]
    extra = {**GOOD, "extra_sampling_params": {"flow_shit": 3}}
    assert "'flow_shift'" in service.generate(extra).json()["hint"]
    assert "'cps'" in service.generate({**GOOD, "rollout_sde_type": "cpss"}).json()["hint"]


def test_a_prompt_longer_than_the_text_encoder_reads_is_refused_instead_of_cut(service: Service) -> None:
    problem = service.generate({**GOOD, "prompt": "word " * 200}).json()
    assert (problem["status"], problem["field"]) == (400, "prompt")
    assert problem["hint"]


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"", {}, 400, "invalid_json"),
        (b"\xff\xfe", {}, 400, "invalid_json"),
        (b'{"prompt": "x", "rollout_noise_level": NaN}', {}, 400, "invalid_json"),
        (b'{"prompt": "x", "rollout_noise_level": Infinity}', {}, 400, "invalid_json"),
        (b'{"prompt": "x", "rollout_noise_level": 1e999}', {}, 400, "invalid_json"),
        (b"[1]", {}, 400, "invalid_request"),
        (b"[" * 100_000, {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"\x80", {"content-type": "application/msgpack"}, 415, "unsupported_media_type"),
        (b'{"prompt": "x"}', {"accept": "image/png"}, 406, "not_acceptable"),
        (b'{"width": 64}', {}, 400, "invalid_request"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_a_bad_body_or_header_is_refused(
    service: Service, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    all_headers = {"content-type": "application/json", "accept": "application/json", **headers}
    reply = service.http.post("/rollout/generate", content=content, headers=all_headers)
    problem = reply.json()
    assert (reply.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert reply.headers["content-type"] == "application/problem+json"
    assert problem["hint"]


def memory_of(process_id: int) -> int:
    with open(f"/proc/{process_id}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
def test_a_hundred_megabytes_are_refused_without_being_kept(service: Service, declared: bool) -> None:
    before = memory_of(service.process.pid)
    megabyte = b" " * 2**20
    connection = http.client.HTTPConnection(service.base_url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/rollout/generate")
    connection.putheader("content-type", "application/json")
    if declared:
        connection.putheader("content-length", str(100 * 2**20))
    else:
        connection.putheader("transfer-encoding", "chunked")
    connection.endheaders()
    for _ in range(100):
        connection.send(megabyte if declared else b"100000\r\n" + megabyte + b"\r\n")
    if not declared:
        connection.send(b"0\r\n\r\n")
    reply = connection.getresponse()
    problem = json.loads(reply.read())
    connection.close()
    assert (reply.status, problem["code"]) == (413, "payload_too_large")
    assert memory_of(service.process.pid) - before < 64 * 2**20


def test_paths_and_methods_that_do_not_exist_are_problems_too(service: Service) -> None:
    for method, path, status, code in (
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/rollout/generate", 405, "method_not_allowed"),
        ("POST", "/abort_request", 400, "invalid_json"),
    ):
        reply = service.http.request(method, path)
        assert (reply.status_code, reply.json()["code"]) == (status, code)
        assert reply.headers["content-type"] == "application/problem+json"


def test_the_client_raises_the_classes_that_the_service_raised(service: Service) -> None:
    client = service.client()
    for fields, expected in (
        ({"rollout_noise_level": -1}, InvalidRequestError),
        ({"rollout_noise_level": float("nan")}, InvalidRequestError),
        ({"num_outputs_per_prompt": 99}, LimitExceededError),
        ({"width": 36}, InvalidRequestError),
        ({"sede": 1}, UnknownFieldError),
        ({"negative_prompt": "x" * 40_000_000}, PayloadTooLargeError),
    ):
        with pytest.raises(expected) as caught:
            client.generate("x", **fields)
        assert type(caught.value) is expected


def test_unknown_fields_can_be_let_pass_and_everything_else_is_still_checked() -> None:
    body = {**GOOD, "cfg_normalization": True, "extra_sampling_params": {"enable_teacache": False, "flow_shift": 2.0}}
    parse = partial(parse_rollout_request, limits=Limits(), step_kinds=["sde"])
    assert parse(body, lenient=True).params.flow_shift == 2.0
    with pytest.raises(UnknownFieldError):
        parse(body, lenient=False)
    with pytest.raises(InvalidRequestError):
        parse({**body, "prompt": ""}, lenient=True)


def test_two_apps_in_one_process_share_nothing_and_refuse_what_they_have_no_engine_or_room_for() -> None:
    async def ask(server_config: ServerConfig) -> tuple[httpx.Response, str]:
        transport = httpx.ASGITransport(create_app(EngineConfig(), server_config))
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return await client.post("/rollout/generate", json=GOOD), (await client.get("/metrics")).text

    async def ask_both() -> list[tuple[httpx.Response, str]]:
        return list(await asyncio.gather(ask(ServerConfig()), ask(ServerConfig(max_requests_in_flight=0))))

    (no_engine, first_page), (no_room, second_page) = asyncio.run(ask_both())
    assert (no_engine.status_code, no_engine.json()["code"]) == (503, "engine_unavailable")
    assert (no_room.status_code, no_room.json()["code"], no_room.headers["retry-after"]) == (429, "queue_full", "1")
    assert 'status="503"' in first_page
    assert 'status="503"' not in second_page
    assert 'status="429"' in second_page


def test_an_id_in_use_is_refused(service: Service) -> None:
    body = {**GOOD, "num_inference_steps": 1000, "rid": "busy"}
    first = threading.Thread(target=lambda: service.generate(body))
    first.start()
    service.wait_until(lambda: service.stats()["samples_running"] > 0)
    problem = service.generate({**GOOD, "rid": "busy"}).json()
    assert (problem["status"], problem["code"], problem["field"]) == (400, "duplicate_request_id", "rid")
    service.client().abort("busy")
    first.join(30)
