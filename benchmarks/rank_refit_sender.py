"""A trainer's rank in a process of its own, for `bench_rank_refit`.

It holds new weights of the names and shapes that it is told, in one flat buffer on its device, and hands them to an
engine of several ranks: by broadcast in a group that it opens, or mapped by every rank where they lie.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.refit_breakdown import TimedGroup, sender_split
from benchmarks.refit_sender import made, places
from engine_control.child import connection_from_descriptor
from engine_control.refit.backends.distributed import FLAT, WeightSender
from engine_control.refit.backends.ipc import ALIGNMENT
from engine_control.refit.manifest import manifest_of
from engine_control.refit.shared_buffers import CudaBuffer, HostBuffer
from engine_control.wire import PeerClosedError, receive_message, send_message

LOOPBACK = "127.0.0.1"
Named = list[tuple[str, torch.Tensor]]


class Trainer:
    """One trainer's rank. Its methods are what it may be asked to do."""

    def __init__(self, *, names: list[list[Any]], device: str, receivers: int) -> None:
        """names: name, shape and dtype of each tensor; receivers: the engine's ranks."""
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        total = sum(_aligned(shape, dtype) for _, shape, dtype in names)
        cuda = self.device.type == "cuda"
        self.buffer = CudaBuffer(total, self.device, receivers) if cuda else HostBuffer(total)
        self.weights = made(names, self.buffer.bytes, self.device)
        self.sender: WeightSender | None = None
        self.buckets: list[Named] = []
        self.form: str | None = None

    def manifest(self) -> dict[str, Any]:
        return {"manifest": manifest_of(("transformer", name, tensor) for name, tensor in self.weights.items())}

    def mapped(self) -> dict[str, Any]:
        """What an engine has to be told to read the weights where they lie."""
        return {"buffer": self.buffer.handle, "tensors": places(self.weights, self.buffer.bytes)}

    def open(self, *, world_size: int, group: str, bucket_bytes: int, packed: bool) -> dict[str, Any]:
        """What the engine has to be told to join, and for each call what it holds: a flattened bucket, or, `packed`,
        all weights in one call with buffers of that size."""
        nccl = self.device.type == "cuda"
        self.sender = WeightSender(
            LOOPBACK,
            world_size=world_size,
            group_name=group,
            backend="nccl" if nccl else "gloo",
            device=self.device if nccl else None,
            packed_bytes=bucket_bytes if packed else None,
        )
        self.form = None if packed else FLAT
        named = list(self.weights.items())
        self.buckets = [named] if packed else bucketed(named, bucket_bytes)
        announced = [self.sender.announce(bucket, load_format=self.form) for bucket in self.buckets]
        return {"init": self.sender.init_info(rank_offset=1), "buckets": announced}

    def join(self) -> dict[str, Any]:
        assert self.sender is not None
        self.sender.join()
        assert self.sender._group is not None
        self.sender._group = self.group = TimedGroup(self.sender._group)
        return {}

    def send(self, *, bucket: int) -> dict[str, Any]:
        assert self.sender is not None
        began = time.perf_counter()
        self.sender.send(self.buckets[bucket], load_format=self.form)
        return sender_split(began, self.group.taken(), time.perf_counter())

    def leave(self) -> dict[str, Any]:
        if self.sender is not None:
            self.sender.close()
        self.sender = None
        return {}


def bucketed(named: Sequence[tuple[str, torch.Tensor]], most: int) -> list[Named]:
    """The tensors in their order, in buckets of at most `most` bytes, or of one larger tensor."""
    buckets: list[Named] = []
    room = 0
    for name, tensor in named:
        if not buckets or tensor.nbytes > room:
            buckets.append([])
            room = most
        buckets[-1].append((name, tensor))
        room -= tensor.nbytes
    return buckets


def _aligned(shape: list[int], dtype: str) -> int:
    nbytes = torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize)
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def main() -> None:
    connection = connection_from_descriptor(int(sys.argv[1]))
    trainer: Trainer | None = None
    try:
        trainer = Trainer(**receive_message(connection))
        send_message(connection, {})
        while True:
            asked = receive_message(connection)
            try:
                answer = getattr(trainer, asked.pop("do"))(**asked)
            except Exception as error:  # the benchmark says what has failed, and measures on
                answer = {"error": f"{type(error).__name__}: {error}"}
            send_message(connection, answer)
    except PeerClosedError:
        if trainer is not None:
            trainer.leave()
            trainer.buffer.close()
