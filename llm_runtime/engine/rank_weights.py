"""What the control layer refits and releases on one rank of this engine: weights, and the KV cache with all in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from engine_control.config import RankSettings
from engine_control.memory.base import mechanisms
from engine_control.memory.saver import MemorySaver
from engine_control.refit.target import RefitTarget
from llm_runtime.config import LLMConfig
from llm_runtime.engine.model_runner import ModelRunner
from llm_runtime.models.weights import MODULE


class RankWeights:
    """An `engine_control.rank.RankEngine`. Every rank has one; rank 0's belongs to its engine."""

    def __init__(self, runner: ModelRunner, config: LLMConfig, forget_prefixes: Callable[[], object]) -> None:
        """`forget_prefixes` drops the prefix cache, where there is one: on rank 0. With the memory saver enabled,
        afterwards weights and KV cache lie in memory that can be given back."""
        self._runner = runner
        self._forget_prefixes = forget_prefixes
        self.device = runner.device
        self._target = runner.model.refit_target()
        named = "host" if config.memory_saver == "auto" else config.memory_saver
        self.memory = MemorySaver(mechanisms.get(named)(runner.device), pinned=runner.device.type == "cuda")
        if config.control.enable_memory_saver:
            parameters = {f"{MODULE}.{name}" for name, _ in runner.model.named_parameters()}
            self.memory.hold("weights", self._tensors, discardable=parameters.__contains__)
            self.memory.hold("kv_cache", lambda: {"kv_cache": runner.cache.storage}, scratch=True)
            self.memory.on_release("kv_cache", self._forget_kv)
            self.memory.on_release("cuda_graph", lambda: None)

    @property
    def target(self) -> RefitTarget:
        return self._target

    def flush_caches(self, modules: Sequence[str] | None) -> None:
        """Keys and values come from the weights: whatever of them changed, none of them serves another sequence."""
        self._forget_prefixes()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        model = self._runner.model
        found = [*model.named_parameters(), *model.named_buffers()]
        return {f"{MODULE}.{name}": tensor for name, tensor in found}

    def _forget_kv(self) -> None:
        self._runner.cache.forget()
        self._forget_prefixes()


def rank_settings(config: LLMConfig, rank: int) -> RankSettings:
    """What the control layer of that rank needs to know."""
    return RankSettings(rank, config.tp_size, config.weight_load_formats, config.weight_transfer_timeout_s)
