"""Capturing calls as CUDA graphs, whose memory is one pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
WARM_UPS = 2


class GraphPool:
    """Captures calls into graphs that share their memory: what one replay leaves is there until the next one of any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None  # one for all: libraries keep a workspace for each

    def capture(self, call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of a call, and what it returns: memory that a replay writes anew. It is called some times before,
        to be warm.

        Raises:
            RuntimeError: it does something that no graph can hold; or it failed by itself.
        """
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._side is None:
                self._side = torch.cuda.Stream()
            side, graph = self._side, torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            # Errors of this thread alone: another one may copy a reply meanwhile.
            capturing = torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local")
            with _no_garbage(), capturing:
                result = call()
        return graph, result

    def clear(self) -> None:
        """Once the graphs are gone too, their memory is free."""
        self._pool = None


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A collection may free what belongs to the device, another engine's graph perhaps, and that ends a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
