"""Where the time of a refit by broadcast goes, at rank 0 and at its trainer: for `bench_rank_refit`.

Host clocks around each broadcast, and on a GPU an event before and behind each launch that writes weights. Both cost
microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from engine_control.rank import RankControl
from engine_control.refit.backends._group import BroadcastGroup
from engine_control.refit.backends.distributed import DistributedTransport
from engine_control.weight_kernels import WeightKernels

HOST = ("starting", "first", "waiting", "host", "ending")
"""What a call's seconds are made of: until its first broadcast is begun; from then on until the first load has come,
which the sender puts together meanwhile; waiting for the others; everything else until the last has come; and until the
call is answered, with its last load written and all of it looked at."""


class Moment(NamedTuple):
    """A broadcast's `begin` or `finish`, in the host clock's seconds."""

    name: str
    began: float
    ended: float


class TimedGroup(BroadcastGroup):
    """Takes a joined group's place, and notes its moments."""

    def __init__(self, group: BroadcastGroup) -> None:
        vars(self).update(vars(group))
        self.moments: list[Moment] = []

    def begin(self, tensor: torch.Tensor) -> Any:
        began = time.perf_counter()
        work = super().begin(tensor)
        self.moments.append(Moment("begin", began, time.perf_counter()))
        return work

    def finish(self, work: Any) -> None:
        began = time.perf_counter()
        super().finish(work)
        self.moments.append(Moment("finish", began, time.perf_counter()))

    def taken(self) -> list[Moment]:
        """What was noted since the last time."""
        moments, self.moments = self.moments, []
        return moments


class TimedKernels:
    """A device's kernels, and the seconds of its stream from each call that writes until that has been done."""

    def __init__(self, kernels: WeightKernels) -> None:
        self.device = kernels.device
        self._kernels = kernels
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reads(self, tensor: torch.Tensor) -> bool:
        return self._kernels.reads(tensor)

    def row_sums(
        self, parts: Sequence[torch.Tensor], first_rows: Sequence[int], factors: torch.Tensor, sums: torch.Tensor
    ) -> None:
        self._kernels.row_sums(parts, first_rows, factors, sums)

    def replace(
        self, lives: Sequence[torch.Tensor], news: Sequence[torch.Tensor], olds: Sequence[int] | None
    ) -> torch.Tensor:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        bad = self._kernels.replace(lives, news, olds)
        ended.record()
        self._events.append((began, ended))
        return bad

    def taken_s(self) -> float:
        """The seconds since the last time, of work that has been done."""
        events, self._events = self._events, []
        return sum(began.elapsed_time(ended) for began, ended in events) / 1e3


class Breakdown:
    """Watches rank 0 of an engine while it receives weights in one group."""

    def __init__(self, rank: RankControl, group_name: str) -> None:
        """The group is open."""
        transport = rank._transports["distributed"]
        assert isinstance(transport, DistributedTransport)
        channel = transport._channels[group_name]
        channel.group = self._group = TimedGroup(channel.group)
        kernels = rank._engine.weight_kernels
        if kernels is not None and not isinstance(kernels, TimedKernels):
            rank._engine.weight_kernels = kernels = TimedKernels(kernels)
        self._kernels = kernels

    def watch(self, call: Callable[[], object]) -> dict[str, float]:
        """Makes the update call; its seconds by `HOST`, and on a GPU those that it wrote for."""
        began = time.perf_counter()
        call()
        found = split(began, self._group.taken(), time.perf_counter())
        if self._kernels is not None:
            found["written_s"] = self._kernels.taken_s()
        return found


def split(began: float, moments: Sequence[Moment], ended: float) -> dict[str, float]:
    """The seconds of one call, which received something, by `HOST`."""
    first_begun = next(one for one in moments if one.name == "begin")
    finished = [one for one in moments if one.name == "finish"]
    waiting = sum(one.ended - one.began for one in finished[1:])
    seconds = (
        first_begun.began - began,
        finished[0].ended - first_begun.began,
        waiting,
        finished[-1].ended - finished[0].ended - waiting,
        ended - finished[-1].ended,
    )
    return {f"{name}_s": value for name, value in zip(HOST, seconds, strict=True)}


def sender_split(began: float, moments: Sequence[Moment], ended: float) -> dict[str, float]:
    """The seconds of one `send`: waiting until broadcasts have ended, and all else: above all putting them together."""
    waiting = sum(one.ended - one.began for one in moments if one.name == "finish")
    return {"sender_waiting_s": waiting, "sender_host_s": ended - began - waiting}
