"""CUDA graphs: a call's launches, captured once for each shape and replayed, where they take longer than their work.

A graph holds the very kernels of the eager call, so its bits are the eager call's (certified at start-up), and a batch
may run either way. Weights are read where they lie: what writes them in place leaves a graph valid; whoever moves
them calls `clear`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from diffusion_rl.models.runner import eager
from engine_control.groups import RankGroup, Traffic
from rl_kernels import AttentionPlan
from rl_kernels.graph_pool import GraphPool

logger = logging.getLogger(__name__)

MAX_TOKENS = 24_000  # of a forward; a larger one keeps the device busy longer than its launches take
MAX_GRAPHS = 16

GraphKey = tuple[object, ...]
Call = Callable[[dict[str, Any]], torch.Tensor]
"""Of arguments by name, tensors among them, and without gradients: what a graph can hold."""


@dataclass(frozen=True)
class _Captured:
    """A graph, the memory that it reads its arguments from, and the memory that it leaves the result in."""

    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    result: torch.Tensor
    sent: Traffic  # by one replay

    def replay(self, inputs: dict[str, Any]) -> torch.Tensor:
        for static, given in zip(self.inputs, _tensors(inputs), strict=True):
            static.copy_(given)
        self.graph.replay()
        return self.result.clone()


class CudaGraphs:
    """A runner that captures a forward the second time that its shapes come, and keeps the `MAX_GRAPHS` used last.

    What can't be captured, or is too large to gain by it, runs eagerly. `run` does so with any other call. Ranks that
    compute a call together capture it together or not at all: a graph writes to the others' memory where it lay then,
    and a call that is captured runs more often than one that isn't.
    """

    def __init__(
        self, *, max_tokens: int = MAX_TOKENS, max_graphs: int = MAX_GRAPHS, group: RankGroup | None = None
    ) -> None:
        """group: the ranks that compute a call together, if it is more than one. A replay doesn't keep the account of
        what the call sends to them by itself."""
        self.captured = 0
        self.replayed = 0
        self.variant: str | None = None  # the adapter that is in force, whose hooks a graph holds too
        self._max_tokens = max_tokens
        self._max_graphs = max_graphs
        self._group = group
        self._traffic = Traffic() if group is None else group.traffic
        self._graphs: OrderedDict[GraphKey, _Captured | None] = OrderedDict()
        self._seen: OrderedDict[GraphKey, None] = OrderedDict()
        self._pool: GraphPool | None = None

    def __call__(self, transformer: torch.nn.Module, plan: AttentionPlan, inputs: dict[str, Any]) -> torch.Tensor:
        forward = partial(eager, transformer, plan)
        if len(plan.text_lengths) * (plan.image_tokens + plan.padded_text) > self._max_tokens:
            return forward(inputs)
        return self.run((self.variant, transformer, *_key(plan, inputs)), forward, inputs)

    def run(self, key: GraphKey, call: Call, inputs: dict[str, Any]) -> torch.Tensor:
        """`call(inputs)`. Equal keys stand for calls of equal launches, but for what the inputs' tensors hold."""
        with torch.cuda.device(_tensors(inputs)[0].device):  # capturing and replaying use the current device's stream
            return self._run(key, call, inputs)

    def clear(self) -> None:
        """Forgets every graph, and frees their memory: the weights that they read lie somewhere else now."""
        self._graphs.clear()
        self._seen.clear()
        if self._pool is not None:
            self._pool.clear()

    def forget(self, variant: str) -> None:
        """Forgets the graphs of one adapter: other tensors have its name now, or none."""
        for graphs in (self._graphs, self._seen):
            for key in [key for key in graphs if key[0] == variant]:
                del graphs[key]

    def _run(self, key: GraphKey, call: Call, inputs: dict[str, Any]) -> torch.Tensor:
        if key not in self._graphs:
            if key not in self._seen:
                self._remember(key)
                return call(inputs)
            self._graphs[key] = self._capture(call, inputs)
            while len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        captured = self._graphs[key]
        if captured is None:
            return call(inputs)
        self.replayed += 1
        self._traffic.add(captured.sent)
        return captured.replay(inputs)

    def _remember(self, key: GraphKey) -> None:
        self._seen[key] = None
        while len(self._seen) > 8 * self._max_graphs:
            self._seen.popitem(last=False)

    def _capture(self, call: Call, inputs: dict[str, Any]) -> _Captured | None:
        """The graph of this call; None if it does something that no graph can hold, here or on another rank."""
        arguments = tree_map_only(torch.Tensor, torch.Tensor.clone, inputs)
        before = replace(self._traffic)

        def counted() -> torch.Tensor:
            nonlocal before
            before = replace(self._traffic)
            return call(arguments)

        if self._pool is None:
            self._pool = GraphPool(_tensors(arguments)[0].device)
        captured = None
        try:
            captured = self._pool.capture(counted)
        except RuntimeError:
            logger.warning("a call can't be captured as a CUDA graph; it runs eagerly", exc_info=True)
            torch.cuda.synchronize()
        finally:
            sent = self._traffic.take_back(before)  # of the last call, which was only written down
        if not self._all_can(captured is not None, _tensors(arguments)[0].device) or captured is None:
            return None
        self.captured += 1
        graph, result = captured
        return _Captured(graph, _tensors(arguments), result, sent)

    def _all_can(self, able: bool, device: torch.device) -> bool:
        return able if self._group is None else self._group.all_can(able, device)


def _key(plan: AttentionPlan, inputs: dict[str, Any]) -> GraphKey:
    """What a graph holds fixed: the plan, the shapes of tensors (also of those in lists), and all other values."""
    shapes = tree_map_only(torch.Tensor, lambda tensor: (tuple(tensor.shape), tensor.dtype), inputs)
    return plan, *((name, repr(value)) for name, value in sorted(shapes.items()))


def _tensors(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors among the arguments, those in lists included, in one order."""
    return [value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor)]
