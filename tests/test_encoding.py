"""Response bodies: what the reference libraries read from them, their lengths, their chunks, and hostile ones."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Gauge
from starlette.types import Message

from diffusion_rl.client import DecodeError, decode_json, decode_msgpack, decode_safetensors
from diffusion_rl.server.encoding import (
    CHUNK_BYTES,
    SAFETENSORS_DTYPES,
    VIEWED_BYTES,
    EncodedBody,
    encode,
    parse_safetensors,
)
from diffusion_rl.server.negotiation import check_json_content_type, choose_wire
from diffusion_rl.server.responses import BodyResponse, RepliesInFlight
from engine_control.errors import NotAcceptableError, UnsupportedMediaTypeError

DECODERS: dict[str, Callable[[bytes], list[dict[str, Any]]]] = {
    "json": decode_json,
    "msgpack": decode_msgpack,
    "safetensors": decode_safetensors,
}
WIRES = list(DECODERS)


def body_of(rows: list[dict[str, Any]], wire: str) -> bytes:
    encoded = encode(rows, wire)  # type: ignore[arg-type]
    chunks = [bytes(chunk) for chunk in encoded.chunks()]
    assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)
    body = b"".join(chunks)
    assert len(body) == encoded.content_length
    return body


def example_rows() -> list[dict[str, Any]]:
    shared = torch.linspace(0, 1, 11)
    return [
        {
            "prompt": f'a "quoted" prompt, ä 日本 \n {i}',
            "seed": 2**64 - 1 - i,
            "latents": torch.randn(3, 16, 8, 8),
            "timesteps": shared,
            "env": {"embeds": [torch.randn(5, 7).bfloat16(), torch.zeros(0, 3)], "lengths": [1, 2], "none": None},
            "kinds": ("sde", "ode"),
            "rate": 0.1,
            "done": True,
        }
        for i in range(3)
    ]


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    else:
        assert left == right


@pytest.mark.parametrize("wire", WIRES)
def test_rows_come_back_as_they_were(wire: str) -> None:
    rows = example_rows()
    assert_equal(rows, DECODERS[wire](body_of(rows, wire)))


@pytest.mark.parametrize("dtype", list(SAFETENSORS_DTYPES), ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_every_dtype_and_shape_comes_back_bit_by_bit(wire: str, dtype: torch.dtype) -> None:
    raw = torch.arange(24 * dtype.itemsize).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    tensor = raw.view(dtype)
    rows = [{"flat": tensor, "scalar": tensor[3], "turned": tensor.reshape(4, 6).T, "empty": tensor[:0].reshape(0, 4)}]
    (decoded,) = DECODERS[wire](body_of(rows, wire))
    for name, sent in rows[0].items():
        assert decoded[name].shape == sent.shape
        assert decoded[name].dtype == dtype
        bits = sent.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(decoded[name].reshape(-1).view(torch.uint8), bits), name


def test_a_msgpack_body_is_byte_for_byte_what_the_plain_library_writes() -> None:
    rows = example_rows()

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raw = safetensors.torch.save({"t": value.contiguous()})
            return {"__tensor__": True, "data": raw, "shape": list(value.shape), "dtype": str(value.dtype)}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    ours = msgpack.unpackb(body_of(rows, "msgpack"), raw=False)
    theirs = msgpack.unpackb(msgpack.packb(plain(rows)), raw=False)
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert our_row["prompt"] == their_row["prompt"]
        assert our_row["latents"].keys() == their_row["latents"].keys()
        assert our_row["latents"]["shape"] == [3, 16, 8, 8]
        assert our_row["latents"]["dtype"] == "torch.float32"
        read = safetensors.torch.load(our_row["latents"]["data"])["t"]
        assert torch.equal(read, safetensors.torch.load(their_row["latents"]["data"])["t"])
    repacked = msgpack.packb(ours)
    assert repacked == body_of(rows, "msgpack")


def test_a_tensor_that_msgpack_has_no_form_for_is_refused_with_the_way_out() -> None:
    huge = torch.zeros(1, dtype=torch.uint8).expand(2**32)
    with pytest.raises(NotAcceptableError, match=r"msgpack holds no tensor.*Ask for application/vnd\.safetensors"):
        encode([{"generated_output": huge}], "msgpack")


def test_a_json_body_holds_base64_of_safetensors_files() -> None:
    rows = example_rows()
    tensor = json.loads(body_of(rows, "json"))[0]["env"]["embeds"][0]
    assert (tensor["__tensor__"], tensor["shape"], tensor["dtype"]) == (True, [5, 7], "torch.bfloat16")
    assert torch.equal(safetensors.torch.load(base64.b64decode(tensor["data"]))["t"], rows[0]["env"]["embeds"][0])


def test_a_safetensors_body_is_a_standard_file_in_which_shared_tensors_lie_once() -> None:
    shared = torch.randn(1000)
    rows = [
        {"own": torch.full((3,), float(i)), "shared": shared, "flags": torch.ones(3, dtype=torch.bool)} for i in (0, 1)
    ]
    body = body_of(rows, "safetensors")
    assert len(body) < 5500
    loaded = safetensors.torch.load(body)
    assert set(loaded) == {"0.own", "0.shared", "0.flags", "1.own", "1.flags"}
    assert torch.equal(loaded["0.shared"], shared)
    first, second = decode_safetensors(body)
    assert first["shared"] is second["shared"]
    assert first["own"].tolist() == [0, 0, 0]
    assert second["own"].tolist() == [1, 1, 1]


def test_decoded_safetensors_are_views_of_a_writable_body() -> None:
    body = bytearray(body_of([{"x": torch.zeros(4)}], "safetensors"))
    (row,) = decode_safetensors(body)
    row["x"] += 1
    assert parse_safetensors(body)[0]["0.x"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
def test_large_tensors_of_msgpack_are_views_of_a_writable_body_and_lie_aligned_in_it(shift: int) -> None:
    tensors = [torch.arange(VIEWED_BYTES // 8 + n, dtype=torch.int64) for n in (-100, 0, 1, 7)]
    rows = [{"a": tensors, "odd": torch.ones(7, dtype=torch.uint8), "text": "x" * n} for n in range(5)]
    sent = body_of(rows, "msgpack")
    memory = bytearray(shift) + sent
    decoded = decode_msgpack(memoryview(memory)[shift:])
    assert_equal(rows, decoded)
    memory[:] = bytes(len(memory))
    for row in decoded:
        changed = [not tensor.any() for tensor in row["a"]]
        assert changed == ([False] * 4 if shift else [tensor.nbytes >= VIEWED_BYTES for tensor in tensors])
    assert_equal(rows, decode_msgpack(sent))  # a body that can't be written to is copied


@pytest.mark.parametrize("wire", WIRES)
def test_large_tensors_are_cut_into_chunks_that_alias_them(wire: str) -> None:
    large = torch.arange(1_000_003, dtype=torch.float32)
    rows = [{"a": large, "odd": torch.ones(7, dtype=torch.uint8)}, {"a": large}]
    encoded = encode(rows, wire)  # type: ignore[arg-type]
    assert_equal(rows, DECODERS[wire](b"".join(encoded.chunks())))
    if wire != "json":
        large[5] = -1.0
        decoded = DECODERS[wire](b"".join(encoded.chunks()))
        assert decoded[1]["a"][5] == -1.0


@pytest.mark.parametrize("wire", WIRES)
def test_the_event_loop_is_free_while_a_huge_reply_is_made(wire: str) -> None:
    rows = [{"a": torch.zeros(32 * 2**20)}, {"a": torch.zeros(32 * 2**20)}]  # 128 MiB each
    sent = 0

    async def send(message: Message) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    async def receive() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    async def make_and_send(encoded: EncodedBody) -> None:
        replies = RepliesInFlight(limit=0, gauge=Gauge("bytes", "Of replies.", registry=None))
        await BodyResponse(encoded, replies)({"type": "http"}, receive, send)

    async def longest_wait() -> float:
        encoded = await asyncio.to_thread(encode, rows, wire)  # type: ignore[arg-type]
        reply = asyncio.create_task(make_and_send(encoded))
        waits = []
        while not reply.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - began)
        assert sent == encoded.content_length > 2**28
        return max(waits)

    assert asyncio.run(longest_wait()) < 0.1


@settings(max_examples=40, deadline=None)
@given(st.text(), st.lists(st.integers(0, 70_000), max_size=3))
def test_no_text_and_no_size_breaks_a_body(text: str, sizes: list[int]) -> None:
    text = text.encode("utf-8", "replace").decode()
    rows = [{"text": text, "tensors": [torch.zeros(size, dtype=torch.uint8) for size in sizes]}]
    for wire in WIRES:
        assert_equal(rows, DECODERS[wire](body_of(rows, wire)))


VALID = {wire: body_of([{"x": torch.arange(4.0), "y": torch.zeros(2, 0)}], wire) for wire in WIRES}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WIRES), st.integers(0, 10_000), st.integers(0, 255), st.integers(0, 60))
def test_damaged_bodies_are_refused_or_read_but_never_crash(wire: str, position: int, value: int, cut: int) -> None:
    damaged = bytearray(VALID[wire])
    damaged[position % len(damaged)] = value
    try:
        DECODERS[wire](bytes(damaged[: len(damaged) - cut]))
    except DecodeError:
        return


def file_with(header: object, data: bytes = bytes(16)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "header",
    [
        {"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}},
        {"t": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 16]}},
        {"t": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}},
        {"t": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 16]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
        {
            "t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "u": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        },
        {"t": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}},
        {"t": None},
        [],
    ],
    ids=str,
)
def test_files_whose_tensors_do_not_tile_them_are_refused(header: object) -> None:
    with pytest.raises(DecodeError):
        parse_safetensors(file_with(header))


def test_a_file_shorter_than_its_header_says_is_refused() -> None:
    for data in (b"", bytes(7), (2**63).to_bytes(8, "little") + b"{}", (50).to_bytes(8, "little") + b"{}"):
        with pytest.raises(DecodeError):
            parse_safetensors(data)


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (None, "msgpack"),
        ("*/*", "msgpack"),
        ("application/*", "msgpack"),
        ("application/json", "json"),
        ("application/json, text/plain, */*", "json"),
        ("application/*;q=0.1, application/json;q=0.05", "msgpack"),
        ("application/json, application/msgpack", "json"),
        ("application/vnd.safetensors, application/msgpack", "safetensors"),
        ("application/json, */*;q=0.5", "json"),
        ("application/msgpack;q=0.2, application/json;q=0.9", "json"),
        ("application/msgpack;q=0, */*", "json"),
        ("application/vnd.safetensors", "safetensors"),
        ("application/x-safetensors, text/html", "safetensors"),
        ("application/vnd.safetensors, application/json", "safetensors"),
        ("application/x-msgpack;q=0.3, application/json;q=0.2", "msgpack"),
        ("text/html, application/xhtml+xml, */*;q=0.8", "msgpack"),
    ],
)
def test_the_accept_header_chooses_the_encoding(accept: str | None, chosen: str) -> None:
    assert choose_wire(accept, "msgpack") == chosen


@pytest.mark.parametrize(
    "accept", ["text/html", "application/json;q=0", "*/*;q=0", "application/json;q=nonsense", "image/*"]
)
def test_nothing_acceptable_is_an_error_of_its_own(accept: str) -> None:
    with pytest.raises(NotAcceptableError):
        choose_wire(accept, "json")


def test_only_json_is_read() -> None:
    for label in (None, "application/json", "application/json; charset=utf-8", "application/vnd.api+json"):
        check_json_content_type(label)
    for label in ("text/plain", "application/msgpack", "multipart/form-data; boundary=x"):
        with pytest.raises(UnsupportedMediaTypeError):
            check_json_content_type(label)
