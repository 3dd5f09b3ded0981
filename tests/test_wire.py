"""Messages between processes: what arrives is what was sent, and no bytes do more than be refused."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_control.wire import (
    DTYPES,
    MAGIC,
    PREFIX,
    PeerClosedError,
    TensorSpec,
    WireError,
    WireLimits,
    frame,
    receive_message,
    send_message,
)


def through_a_socket(message: object) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send_message, args=(ours, message))
        sender.start()
        received = receive_message(theirs)
        sender.join()
    return received


def receive_bytes(data: bytes, limits: WireLimits | None = None) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: (ours.sendall(data), ours.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            return receive_message(theirs, limits)
        finally:
            theirs.close()
            sender.join()


def bytes_of(message: object) -> bytes:
    return b"".join(frame(message))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_a_tensor_arrives_with_its_dtype_its_shape_and_its_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    received = through_a_socket({"x": tensor})["x"]  # type: ignore[index]
    assert received.dtype == dtype
    assert received.shape == tensor.shape
    assert torch.equal(received.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_tensors_that_are_not_contiguous_or_have_lazy_conjugates_arrive_as_they_look() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    complex_one = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sent = {"t": base.T, "strided": base[::2, 1::2], "expanded": base[:1].expand(3, 6), "conj": complex_one}
    received = through_a_socket(sent)
    for name, tensor in sent.items():
        assert torch.equal(received[name], tensor), name  # type: ignore[index]


def test_a_tensor_that_occurs_twice_travels_once_and_arrives_as_one_object() -> None:
    shared, other = torch.ones(1000), torch.ones(1000)
    message = [{"a": shared}, {"b": [shared, other]}]
    first, second = through_a_socket(message)  # type: ignore[misc]
    assert first["a"] is second["b"][0]
    assert first["a"] is not second["b"][1]
    assert len(bytes_of(message)) < 9000


def test_received_tensors_can_be_written_to_and_share_no_memory() -> None:
    first, second = through_a_socket([torch.zeros(4), torch.zeros(4)])  # type: ignore[misc]
    first += 1
    assert second.tolist() == [0, 0, 0, 0]


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(plain_values)
def test_plain_data_arrives_unchanged(value: object) -> None:
    assert through_a_socket(value) == value


def test_a_message_of_many_megabytes_and_more_tensors_than_one_system_call_takes_arrives() -> None:
    tensors = [torch.full((3,), float(i)) for i in range(3000)]
    received = through_a_socket([torch.arange(4_000_000), *tensors])
    assert received[0][-1] == 3_999_999  # type: ignore[index]
    assert [int(t[2]) for t in received[1:]] == list(range(3000))  # type: ignore[index]


def test_what_can_not_be_written_is_refused_before_a_byte_is_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (
            object(),
            {"x": 2**70},
            torch.zeros(2).to_sparse(),
            torch.zeros(2, device="meta"),
            {"f": lambda: 0},
        ):
            with pytest.raises(WireError):
                send_message(ours, message)
        with pytest.raises(WireError):
            send_message(ours, torch.zeros(100), WireLimits(max_tensor_bytes=399))
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_frames_over_the_limits_are_refused_before_memory_is_taken() -> None:
    tight = WireLimits(max_header_bytes=100, max_tensors=2, max_tensor_bytes=1000)
    for data in (
        PREFIX.pack(MAGIC, 2**32 - 1, 0, 0),
        PREFIX.pack(MAGIC, 0, 101, 0),
        PREFIX.pack(MAGIC, 0, 0, 2**63),
        bytes_of([torch.zeros(1)] * 1 + [torch.zeros(1), torch.zeros(1)]),
        bytes_of(torch.zeros(251)),
    ):
        with pytest.raises(WireError):
            receive_bytes(data, tight)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float32", [2**62, 4], 16),
        TensorSpec("float32", [-1, -4], 16),
        TensorSpec("float32", [3], 16),
        TensorSpec("object", [2], 16),
        TensorSpec("float32", [2**63, 0], 0),
        TensorSpec("uint8", [1] * 100 + [16], 16),
    ],
    ids=str,
)
def test_a_manifest_whose_numbers_do_not_fit_together_is_refused(spec: TensorSpec) -> None:
    manifest = msgspec.msgpack.encode([spec])
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, bytes(4)))
    with pytest.raises(WireError):
        receive_bytes(PREFIX.pack(MAGIC, len(manifest), len(body), spec.nbytes) + manifest + body + bytes(16))


def test_a_reference_to_a_tensor_that_is_not_there_is_refused() -> None:
    for extension in (
        msgspec.msgpack.Ext(1, bytes([9, 0, 0, 0])),
        msgspec.msgpack.Ext(7, b""),
        msgspec.msgpack.Ext(1, b""),
    ):
        body = msgspec.msgpack.encode([extension])
        with pytest.raises(WireError):
            receive_bytes(PREFIX.pack(MAGIC, 1, len(body), 0) + msgspec.msgpack.encode([]) + body)


def test_the_end_of_the_connection_is_told_from_a_malformed_frame() -> None:
    whole = bytes_of({"x": torch.zeros(10)})
    for cut in (0, 5, PREFIX.size, PREFIX.size + 3, len(whole) - 1):
        with pytest.raises(PeerClosedError):
            receive_bytes(whole[:cut])


class Canary:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    empty = msgspec.msgpack.encode([])
    for data in (payload, PREFIX.pack(MAGIC, len(empty), len(payload), 0) + empty + payload):
        with pytest.raises(WireError):
            receive_bytes(data)
    assert not canary.exists()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        receive_bytes(data)


VALID = bytes_of({"id": 1, "rows": [{"x": torch.arange(6.0).reshape(2, 3), "y": torch.zeros(0), "s": "text"}]})


@settings(max_examples=250, deadline=None)
@given(st.integers(0, len(VALID) - 1), st.integers(0, 255), st.integers(0, 40))
def test_a_damaged_frame_is_refused_or_read_but_never_crashes(position: int, value: int, cut: int) -> None:
    damaged = bytearray(VALID)
    damaged[position] = value
    with contextlib.suppress(WireError):
        receive_bytes(bytes(damaged[: len(damaged) - cut]), WireLimits(max_tensor_bytes=2**20))
