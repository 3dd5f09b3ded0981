"""What the device was told and has not done yet: steps, and results on their way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diffusion_rl.rollout.queue import RequestState, SampleState
from diffusion_rl.sample import RolloutSample
from diffusion_rl.transfer import Moment


@dataclass(frozen=True)
class _Step:
    requests: tuple[RequestState, ...]
    began: Moment
    ended: Moment


class StepsInFlight:
    """Launched steps, the oldest first. Their requests are charged for each when the device has taken it."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, requests: tuple[RequestState, ...], began: Moment, ended: Moment) -> None:
        self._steps.append(_Step(requests, began, ended))

    def settle(self, *, ahead: int | None = None) -> None:
        """Charges requests for what is done. With `ahead`, afterwards at most so many steps are not."""
        while self._steps and (self._steps[0].ended.passed() or (ahead is not None and len(self._steps) > ahead)):
            step = self._steps.popleft()
            seconds = step.ended.seconds_since(step.began)
            for request in step.requests:
                request.denoise_s += seconds


@dataclass(frozen=True)
class Departure:
    """A sample's result on its way to the host: its tensors, and `finite` (a bool), are there once `landed` has passed.

    decoding: from when to when its picture was decoded, and beside how many.
    """

    sample: SampleState
    result: RolloutSample
    finite: torch.Tensor
    landed: Moment
    decoding: tuple[Moment, Moment, int]


class Departures:
    """Those under way, the oldest first."""

    def __init__(self) -> None:
        self._under_way: deque[Departure] = deque()

    def add(self, departure: Departure) -> None:
        departure.sample.departed = True
        self._under_way.append(departure)

    def arrived(self, *, wait: bool) -> Iterator[Departure]:
        """Those that have landed; with `wait` at least one, if any is under way."""
        while self._under_way and (wait or self._under_way[0].landed.passed()):
            wait = False
            departure = self._under_way.popleft()
            departure.landed.wait()
            yield departure

    def drop(self, request_id: str) -> None:
        """Forgets those of a request that is gone, or begins anew."""
        self._under_way = deque(d for d in self._under_way if d.sample.request.request_id != request_id)

    def __len__(self) -> int:
        return len(self._under_way)
