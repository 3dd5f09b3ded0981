"""From the device to the host without anybody waiting: when something is done, and copies that a reply needs."""

from __future__ import annotations

import time

import torch


class Moment:
    """A point in the work of a device's current stream, or of the one that is named: when all that was launched there
    by now is done. On a CPU that is now."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(stream or torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Returns when it has passed."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Between the two on the device; waits for this one."""
        self.wait()
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return earlier._event.elapsed_time(self._event) / 1000


class HostCopies:
    """Copies of a device's tensors in host memory of their own, made while the device goes on computing.

    On a GPU they are made on a stream of their own into pinned memory, and nobody may write to what is copied. On a CPU
    they are there at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the tensor holds when the work launched so far is done. To be read after `landing`."""
        if tensor.device.type != "cuda":
            return tensor.detach().to("cpu", copy=True)
        source, stream = tensor.detach().contiguous(), self._side()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            copy.copy_(source, non_blocking=True)
        source.record_stream(stream)  # so that its memory isn't given to anybody before it is copied
        return copy

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same of a tensor that nobody else has any use for: on a CPU it is not copied."""
        return self.copy(tensor) if tensor.device.type == "cuda" else tensor

    def landing(self) -> Moment:
        """When all copies that were begun by now are there."""
        return Moment(self._device, self._side() if self._device.type == "cuda" else None)

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream
