"""Clients that send too much, too slowly, or read nothing: each is refused or dropped, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Service, free_port, start_service, stop_service
from pydantic import ValidationError
from starlette.requests import Request

from diffusion_rl.params import Limits
from diffusion_rl.server.negotiation import MAX_RANGES, choose_wire
from diffusion_rl.server.problem import problem_response
from diffusion_rl.server.schema import MAX_ITEMS, RolloutRequest, outline, parse_rollout_request
from engine_control.errors import EngineError, InvalidRequestError, NotAcceptableError
from engine_control.server.clients import SMALL_BODY_BYTES, read_body
from engine_control.server.middleware import BodyLimit

REQUEST = {"prompt": "a red square", "width": 64, "height": 64, "num_inference_steps": 3, "seed": 5}
LONG = {**REQUEST, "num_inference_steps": 1000}
HEAVY = {
    **REQUEST,
    "width": 192,
    "height": 192,
    "num_inference_steps": 7,
    "num_outputs_per_prompt": 4,
    "rollout_return_dit_trajectory": True,
    "rollout_return_denoising_env": True,
    "guidance_scale": 1.0,
    "output_type": "latent",
}
LISTS = [name for name, schema in RolloutRequest.model_json_schema()["properties"].items() if "array" in str(schema)]


@pytest.fixture(scope="module")
def strict(tiny_sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that has little patience and little memory."""
    server: dict[str, object] = {
        "port": free_port(),
        "body_timeout_s": 1.0,
        "send_timeout_s": 4.0,
        "max_reply_bytes_in_flight": 2**20,
    }
    started = start_service({"model_path": str(tiny_sd3_folder)}, server, tmp_path_factory.mktemp("strict") / "log.txt")
    started.wait_until(started.healthy)
    yield started
    stop_service(started)


@contextlib.contextmanager
def connected(service: Service) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(service.base_url.rsplit(":", 1)[1])), timeout=30) as connection:
        yield connection


def head(length: int) -> bytes:
    return (
        b"POST /rollout/generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\naccept: application/json\r\n"
        b"content-length: %d\r\n\r\n" % length
    )


def everything_from(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(2**16):
            received += data
    return received


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of the only answer; afterwards the connection is closed by the other end."""
    top, _, body = everything_from(connection).partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


def metric(service: Service, name: str) -> float:
    found = re.search(rf"^diffusion_rl_{name} (\S+)$", service.http.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found.group(1))


# What is too much.


def test_every_list_of_a_request_has_an_end() -> None:
    assert {"seeds", "sigmas", "affine_coefficients", "rollout_sde_step_indices"} <= set(LISTS)
    for name in LISTS:
        for option in RolloutRequest.model_json_schema()["properties"][name]["anyOf"]:
            assert option["type"] != "array" or option["maxItems"] == MAX_ITEMS, name


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("items", [[None] * 10_000, [[None] * 10_000] * 3], ids=["wrong items", "wrong lists"])
def test_a_list_of_wrong_items_is_one_error(name: str, items: list[object]) -> None:
    with pytest.raises(ValidationError) as caught:
        RolloutRequest.model_validate({"prompt": "x", name: items})
    several = "image" in name or "prompt" in name  # types that it, or an item, may have: a string, a tensor, a list
    assert caught.value.error_count() <= (4 if several else 1)
    with pytest.raises(InvalidRequestError) as refused:
        parse_rollout_request({"prompt": "x", name: items}, limits=Limits(), step_kinds=["sde"], lenient=True)
    assert refused.value.field == name


def test_a_large_body_is_parsed_off_the_event_loop_and_a_small_one_on_it() -> None:
    def request(size: int) -> Any:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": bytes(size), "more_body": False}

        return Request({"type": "http", "method": "POST", "headers": []}, receive)  # type: ignore[arg-type]

    async def threads() -> list[int]:
        return [await read_body(request(n), lambda body: threading.get_ident()) for n in (SMALL_BODY_BYTES, 2**17)]

    small, large = asyncio.run(threads())
    assert small == threading.get_ident() != large


@pytest.mark.parametrize(
    ("field", "item"),
    [("seeds", '"x"'), ("sigmas", "1"), ("image_path", "0.1"), ("prompt", "-1e-9"), (None, "[1]"), (None, "{}")],
)
def test_health_answers_while_bodies_of_millions_of_items_are_refused(
    service: Service, field: str | None, item: str
) -> None:
    items = ", ".join([item] * ((4 * 2**20 - 1000) // (len(item) + 2)))
    body = f'{{"prompt": "x", "{field or "sigmas"}": [{items}]}}'.encode()
    problems: list[Any] = []

    def send() -> None:
        for _ in range(3):
            reply = httpx.post(f"{service.base_url}/rollout/generate", content=body, timeout=60)
            problems.append((reply.status_code, reply.json()["field"], len(reply.content) < 2048))

    sender = threading.Thread(target=send)
    sender.start()
    waits = []
    while sender.is_alive():
        began = time.perf_counter()
        assert service.http.get("/health").status_code == 200
        waits.append(time.perf_counter() - began)
    assert problems == [(400, field, True)] * 3
    assert max(waits) < 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * 3_000_000: 1},
        {"extra_sampling_params": {"x" * 3_000_000: "y" * 500_000}},
        {"extra_sampling_params": ["x" * 3_000_000]},
        {"rollout_sde_type": "x" * 3_000_000},
        {"generator_device": "x" * 3_000_000},
        {"output_type": "x" * 3_000_000},
        {"prompt": " " * 3_000_000},
        {"prompt": {"x" * 3_000_000: 1}},
        {"seed": ["x" * 3_000_000]},
        {"seed": {"x" * 3_000_000: 1}},
        {"image_path": "x" * 3_000_000},
        {"quality": "x" * 3_000_000},
        {"rid": "x" * 3_000_000},
        {"extra_sampling_params": {"quality": [["x" * 1_000_000] * 2]}},
    ],
    ids=lambda fields: "-".join(name[:30] for name in fields),
)
def test_no_refusal_repeats_its_input_at_length(service: Service, fields: dict[str, Any]) -> None:
    reply = service.generate({**REQUEST, **fields})
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/problem+json")
    assert len(reply.content) < 2048
    assert sum(len(name) + len(value) for name, value in reply.headers.items()) < 1024


@pytest.mark.parametrize("name", ["accept", "content-type"])
def test_no_refusal_repeats_a_header_at_length(service: Service, name: str) -> None:
    reply = service.generate(REQUEST, **{name: "text/" + "x" * 50_000})
    assert reply.status_code in (406, 415)
    assert len(reply.content) < 2048


def test_a_path_and_an_id_of_any_length_are_not_repeated(service: Service) -> None:
    assert len(service.http.get("/" + "x" * 50_000).content) < 2048
    for rid in ("x" * 3_000_000, ["x" * 3_000_000], {"x" * 3_000_000: 1}):
        assert len(service.http.post("/abort_request", json={"rid": rid}).content) < 2048


def test_of_an_endless_accept_header_the_beginning_counts() -> None:
    assert choose_wire("application/msgpack, " + "a/b, " * 10_000, "json") == "msgpack"
    with pytest.raises(NotAcceptableError):
        choose_wire("a/b, " * MAX_RANGES + "application/json", "json")


def test_an_outline_is_short_whatever_it_is_of() -> None:
    assert outline(["a", "b"]) == "['a', 'b']"
    assert outline(7) == 7
    assert outline({"a": 1}) == "an object of 1 fields"
    for value in ([list(range(10**5))] * 10**5, ["x" * 10**6], [[[[[[[[]]]]]]]], [{"x" * 10**6: 1}], [10**300]):
        assert len(str(outline(value))) < 1000


def test_headers_without_an_end_close_the_connection(service: Service) -> None:
    with connected(service) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 2**28:  # what is on its way in socket buffers may be many megabytes
                sent += connection.send(b"x" * 2**16)
        assert sent < 2**28
    assert service.healthy()


# What is too slow.


def test_a_body_that_does_not_arrive_in_time_gets_a_408(strict: Service) -> None:
    with connected(strict) as connection:
        connection.sendall(head(1000) + b'{"prompt"')
        status, problem = answer_on(connection)
    assert (status, problem["status"], problem["code"]) == (408, 408, "request_timeout")
    assert problem["value"] == len(b'{"prompt"')
    assert metric(strict, "rollouts_in_flight") == 0


def test_a_body_that_trickles_in_is_no_better(strict: Service) -> None:
    with connected(strict) as connection:
        connection.sendall(head(10_000))
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b" ")
                time.sleep(0.05)
        assert b"408" in everything_from(connection)[:20]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost:"], ids=["nothing", "half of the headers"])
def test_headers_that_do_not_arrive_in_time_close_the_connection(strict: Service, sent: bytes) -> None:
    with connected(strict) as connection:
        connection.sendall(sent)
        assert everything_from(connection) == b""


def test_once_the_body_is_there_the_limit_is_over() -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.request", "body": b"}"}])
    types: list[str] = []

    async def receive() -> Any:
        message = next(messages, None)
        if message is None:
            await asyncio.sleep(0.1)
        return message or {"type": "http.disconnect"}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        types.extend([(await receive())["type"] for _ in range(3)])

    async def send(message: Any) -> None:
        raise AssertionError(message)

    asyncio.run(
        BodyLimit(app, failure=problem_response, max_bytes=10, timeout_s=0.05)(
            {"type": "http", "headers": []}, receive, send
        )
    )
    assert types == ["http.request", "http.request", "http.disconnect"]


# What is not read.


def test_a_reply_that_nobody_reads_holds_up_others_until_its_client_is_dropped(strict: Service) -> None:
    with connected(strict) as connection:
        body = json.dumps(HEAVY).encode()
        connection.sendall(head(len(body)) + body)
        strict.wait_until(lambda: metric(strict, "reply_bytes_in_flight") > 2**20)
        refused = strict.generate(REQUEST)
        assert (refused.status_code, refused.json()["code"]) == (429, "reply_memory_full")
        assert refused.headers["retry-after"] == "1"
        assert strict.healthy()
        strict.wait_until(lambda: metric(strict, "reply_bytes_in_flight") == 0, timeout_s=30)
        assert strict.generate(REQUEST).status_code == 200
        received = everything_from(connection)
        assert b"200 OK" in received[:20]
        assert len(received) < 15_000_000  # what lay in the kernel's buffers
    assert metric(strict, "rollouts_in_flight") == 0
    assert "took nothing of its reply for 4 s" in strict.log.read_text()


def test_the_budget_is_free_again_after_replies_that_were_read(strict: Service) -> None:
    for _ in range(3):
        assert strict.generate(HEAVY).status_code == 200
        strict.wait_until(lambda: metric(strict, "reply_bytes_in_flight") == 0, timeout_s=5)


# The end.


def test_at_shutdown_everybody_is_answered_and_the_process_ends(tiny_sd3_folder: Path, tmp_path: Path) -> None:
    started = start_service({"model_path": str(tiny_sd3_folder)}, {"port": free_port()}, tmp_path / "log.txt")
    started.wait_until(started.healthy)
    errors: list[Any] = []

    def roll_out() -> None:
        try:
            started.client().generate(**LONG)
        except EngineError as error:
            errors.append(error)

    with connected(started) as uploading, connected(started) as idle, connected(started) as reading_nothing:
        body = json.dumps(HEAVY).encode()
        reading_nothing.sendall(head(len(body)) + body)
        started.wait_until(lambda: metric(started, "reply_bytes_in_flight") > 2**20)
        uploading.sendall(head(1000) + b'{"prompt"')
        thread = threading.Thread(target=roll_out)
        thread.start()
        started.wait_until(lambda: metric(started, "rollouts_in_flight") == 3)
        started.wait_until(lambda: started.stats()["samples_running"] > 0)
        started.process.send_signal(signal.SIGTERM)
        status, problem = answer_on(uploading)
        thread.join(5)
        assert everything_from(idle) == b""
        assert started.process.wait(10) == -signal.SIGTERM
        assert b"200 OK" in everything_from(reading_nothing)[:20]
    assert (status, problem["status"], problem["code"]) == (503, 503, "shutting_down")
    assert [(error.status, error.code) for error in errors] == [(503, "shutting_down")]
    log = started.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log
    started.http.close()
