"""A process group of its own between a trainer's rank 0 and the ranks of engines: broadcasts from rank 0, no more.

It is made beside torch's default group, so neither side's own groups are touched, and it meets a trainer that calls
torch's `rendezvous("tcp://host:port")`, `PrefixStore(group_name, store)` and `_new_process_group_helper` (as SGLang's
trainers do): the prefixes under which the ranks find each other in the store are those that torch would make.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

BACKENDS = ("nccl", "gloo")
DEVICE_OF = {"nccl": "cuda", "gloo": "cpu"}  # the first device that torch makes the backend for
POLL_S = 0.0005
EAGER_S = 0.05  # without sleeping: a GiB takes three milliseconds
WATCHDOG_S = 7 * 24 * 3600.0  # NCCL's own deadline ends the process, so it never comes before ours


class BroadcastError(Exception):
    """A broadcast did not come, or not whole. The group is of no further use."""


@dataclass(frozen=True)
class Meeting:
    """Where and as whom a rank joins. Rank 0 is the trainer."""

    address: str
    port: int
    rank: int
    world_size: int
    name: str
    backend: str
    timeout_s: float


class BroadcastGroup:
    """A joined group."""

    def __init__(self, meeting: Meeting, device: torch.device, store: TCPStore | None = None) -> None:
        """Returns when all ranks have come. `device`: the CUDA device of this rank, if the backend is NCCL.

        Raises:
            RuntimeError: they didn't come in time, or nobody listens at the address. Nothing is open then.
        """
        self.meeting = meeting
        self.device = device if meeting.backend == "nccl" else torch.device("cpu")
        wait = timedelta(seconds=meeting.timeout_s)
        if store is None:  # torch tries twice to connect
            half = timedelta(seconds=meeting.timeout_s / 2)
            store = TCPStore(meeting.address, meeting.port, meeting.world_size, is_master=False, timeout=half)
            store.set_timeout(wait)
        named = PrefixStore(f"{meeting.name}/", PrefixStore(meeting.name, store))
        prefixed = PrefixStore(f"{DEVICE_OF[meeting.backend]}/", named)
        try:
            self._backend = _nccl(prefixed, meeting) if meeting.backend == "nccl" else _gloo(prefixed, meeting)
        except BaseException:
            del store, named, prefixed  # or the error's traceback keeps the connection open
            raise

    def broadcast(self, tensor: torch.Tensor) -> None:
        """`begin` and `finish`.

        Raises:
            BroadcastError: rank 0 did not send within the time-out, or is gone.
        """
        self.finish(self.begin(tensor))

    def begin(self, tensor: torch.Tensor) -> Any:
        """Begins to send the tensor, contiguous and on `device`, from rank 0 to all. What it returns is for `finish`,
        until which nobody touches the tensor. Broadcasts come in the order in which they are begun.

        Raises:
            BroadcastError: the group is broken.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        flat = tensor.reshape(-1).view(torch.uint8)  # a byte is a byte to both backends, and every dtype has them
        try:
            return self._backend.broadcast([flat], options)
        except RuntimeError as error:
            raise _broken(error) from error

    def finish(self, work: Any) -> None:
        """Afterwards the tensor has rank 0's bytes; on a GPU for what is launched after.

        Raises:
            BroadcastError: rank 0 did not send within the time-out, or is gone.
        """
        try:
            if self.meeting.backend == "nccl":
                self._poll(work)
            else:
                work.wait(timedelta(seconds=self.meeting.timeout_s))
        except RuntimeError as error:
            raise _broken(error) from error

    def close(self) -> None:
        """Leaves the group, at once: NCCL's orderly shutdown would wait until all others leave it too, and those wait
        for this rank's answer first."""
        backend, self._backend = self._backend, None
        if backend is not None and self.meeting.backend == "nccl":
            with contextlib.suppress(RuntimeError):
                backend.abort()

    def _poll(self, work: Any) -> None:
        """Waits until the GPU has it. (NCCL's own wait only orders streams, and its deadline ends the process.)"""
        began = time.monotonic()
        while not work.is_completed():
            waited = time.monotonic() - began
            if waited > self.meeting.timeout_s:
                raise BroadcastError(f"nothing came within {self.meeting.timeout_s:g} s")
            time.sleep(0 if waited < EAGER_S else POLL_S)
        work.wait()


def _broken(error: RuntimeError) -> BroadcastError:
    return BroadcastError(str(error).splitlines()[0] if str(error) else type(error).__name__)


def listening_store(address: str, port: int, world_size: int, *, timeout_s: float) -> TCPStore:
    """The store in which the ranks of a group find each other, served by this process at that address alone.

    port: 0 for a free one; `store.port` is it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _gloo(store: PrefixStore, meeting: Meeting) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=meeting.timeout_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
    return ProcessGroupGloo(store, meeting.rank, meeting.world_size, options)


def _own_address(meeting: Meeting) -> str:
    """The address of this host from which the trainer's is reached. (A host's name need not resolve.)"""
    family, kind, _, _, where = socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # of UDP: nothing is sent
        return str(probe.getsockname()[0])


def _nccl(store: PrefixStore, meeting: Meeting) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=WATCHDOG_S)
    options.is_high_priority_stream = True  # or a broadcast waits until all of a copy beside it has begun
    return ProcessGroupNCCL(store, meeting.rank, meeting.world_size, options)
