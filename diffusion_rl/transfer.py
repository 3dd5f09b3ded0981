"""Between host and device, without anybody waiting: what a step needs goes there, what a reply needs comes back."""

from __future__ import annotations

from collections.abc import Callable

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device. The caller doesn't wait for what a GPU still has to do, and may change `tensor`."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class HostCopies:
    """Copies of a device's tensors in host memory of their own, made while the device goes on computing.

    On a GPU they are made on a stream of their own into pinned memory; what is copied must not be written to again. On
    a CPU they are there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of what the tensor holds when the work launched so far is done; read it after `landed`."""
        if tensor.device.type != "cuda":
            return tensor.detach().to("cpu", copy=True)
        stream = self._side()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        source = tensor.detach().contiguous()
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            copy.copy_(source, non_blocking=True)
        source.record_stream(stream)  # so that its memory isn't given to anybody before it is copied
        return copy

    def landing(self) -> Moment:
        """When all copies that were begun by now have arrived."""
        if self._device.type != "cuda":
            return Moment()
        event = torch.cuda.Event()
        event.record(self._side())
        return Moment(event.query, event.synchronize)

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream


class Moment:
    """A point in a device's work: on a CPU, and by default, one that has passed."""

    def __init__(self, passed: Callable[[], bool] = lambda: True, wait: Callable[[], None] = lambda: None) -> None:
        self.passed = passed
        self.wait = wait


def moment_of(device: torch.device) -> Moment:
    """When the device has done all that was launched on its current stream by now."""
    if device.type != "cuda":
        return Moment()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return Moment(event.query, event.synchronize)
