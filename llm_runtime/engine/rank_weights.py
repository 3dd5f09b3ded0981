"""What the control layer refits and releases on one rank of this engine: weights, and the KV cache with all in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine_control.config import RankSettings
from engine_control.memory.base import mechanisms
from engine_control.memory.saver import MemorySaver
from engine_control.refit.target import RefitTarget
from engine_control.weight_kernels import WeightKernels
from llm_runtime.config import LLMConfig
from llm_runtime.engine.draft_target import DRAFT, TargetAndDraft
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.models.weights import MODULE
from rl_kernels.weights import weight_kernels


class RankWeights:
    """An `engine_control.rank.RankEngine`. Every rank has one; rank 0's belongs to its engine."""

    def __init__(
        self,
        runner: ModelRunner,
        config: LLMConfig,
        forget_prefixes: Callable[[], object],
        *,
        draft: ModelRunner | None = None,
    ) -> None:
        """`forget_prefixes` drops the prefix cache, where there is one: on rank 0. With the memory saver enabled,
        afterwards weights and KV cache lie in memory that can be given back."""
        self._runners = {MODULE: runner} if draft is None else {MODULE: runner, DRAFT: draft}
        self._forget_prefixes = forget_prefixes
        self.device = runner.device
        self.weight_kernels: WeightKernels | None = weight_kernels(runner.device)
        targets = {name: own.model.refit_target() for name, own in self._runners.items()}
        self._target = targets[MODULE] if draft is None else TargetAndDraft(targets[MODULE], targets[DRAFT])
        named = "host" if config.memory_saver == "auto" else config.memory_saver
        mechanism = mechanisms.get(named)(runner.device)
        self.memory = MemorySaver(mechanism, pinned=runner.device.type == "cuda")
        if config.control.enable_memory_saver:
            parameters = {f"{m}.{name}" for m, own in self._runners.items() for name, _ in own.model.named_parameters()}
            self.memory.hold("weights", self._tensors, discardable=parameters.__contains__)
            self.memory.hold("kv_cache", self._caches, scratch=True)
            self.memory.on_release("kv_cache", self._forget_kv)
            self.memory.on_release("cuda_graph", self.drop_graphs)
            if not mechanism.keeps_addresses:
                for tag in ("weights", "kv_cache"):
                    self.memory.on_release(tag, self.drop_graphs)

    @property
    def target(self) -> RefitTarget:
        return self._target

    def flush_caches(self, modules: Sequence[str] | None) -> None:
        """Keys and values come from the weights: whatever of them changed, none of them serves another sequence."""
        self._forget_prefixes()

    def drop_graphs(self) -> None:
        for own in self._runners.values():
            own.drop_graphs()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return {
            f"{module}.{name}": tensor
            for module, own in self._runners.items()
            for named in (own.model.named_parameters(), own.model.named_buffers())
            for name, tensor in named
        }

    def _caches(self) -> Mapping[str, torch.Tensor]:
        return {module: own.cache.storage for module, own in self._runners.items()}

    def _forget_kv(self) -> None:
        for own in self._runners.values():
            own.cache.forget()
        self._forget_prefixes()


def rank_settings(config: LLMConfig, rank: int) -> RankSettings:
    """What the control layer of that rank needs to know."""
    return RankSettings(rank, config.tp_size, config.weight_load_formats, config.weight_transfer_timeout_s)
