"""What the control layer refits and releases on one rank of this engine: the pipeline's modules, graphs and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from diffusion_rl.batch import FIRST, SECOND
from diffusion_rl.config import EngineConfig
from diffusion_rl.models import ModelFamily
from diffusion_rl.models.graphs import CudaGraphs
from diffusion_rl.models.offload import offload_of
from diffusion_rl.parallel.arrangement import Arrangement
from diffusion_rl.parallel.layout import layout_of
from diffusion_rl.rollout.adapters import Adapters
from diffusion_rl.rollout.certification import cache_of
from diffusion_rl.rollout.offloaded_target import OffloadedTarget
from diffusion_rl.rollout.prompt_cache import PromptCache
from engine_control.config import RankSettings
from engine_control.memory.base import MemoryMechanism, mechanisms
from engine_control.memory.saver import MemorySaver
from engine_control.refit.target import ModuleTarget
from engine_control.weight_kernels import WeightKernels
from rl_kernels.weights import weight_kernels

TRAINED = (FIRST, SECOND)
"""The modules that a trainer trains: what a session is about that names none, and all that a release without backup may
lose. Nobody would send the others again."""


class RankWeights:
    """An `engine_control.rank.RankEngine`. Every rank has one; rank 0's belongs to its engine."""

    def __init__(
        self, family: ModelFamily, prompts: PromptCache, config: EngineConfig, arrangement: Arrangement
    ) -> None:
        """With the memory saver enabled, afterwards every weight lies in memory that can be given back."""
        self._family = family
        self._arrangement = arrangement
        self._prompts = prompts
        self.adapters = Adapters(family, cache_of(config))
        self._modules: Mapping[str, torch.nn.Module] = {
            name: module for name, module in family.pipeline.components.items() if isinstance(module, torch.nn.Module)
        }
        self.device = family.device
        self.weight_kernels: WeightKernels | None = weight_kernels(family.device)
        self._offloads = [found for module in self._modules.values() if (found := offload_of(module)) is not None]
        trained = [name for name in TRAINED if name in self._modules]
        self.target: ModuleTarget = ModuleTarget(self._modules, main=trained)
        if self._offloads:
            self.target = OffloadedTarget(self._modules, self._offloads, main=trained)
        if family.tensor is not None:
            from diffusion_rl.parallel.sharded_target import DTensorTarget  # DTensor takes a second to import

            self.target = DTensorTarget(self._modules, family.tensor, main=trained)
        mechanism = _mechanism(config, family.device)
        self.memory = MemorySaver(mechanism, pinned=family.device.type == "cuda")
        if config.control.enable_memory_saver:
            parameters = {n for owner in self.target.default_modules("all") for n in self._parameters(owner)}
            self.memory.hold("weights", self._tensors, discardable=parameters.__contains__)
            self.memory.on_release("kv_cache", self._prompts.clear)  # all that is kept between requests
            self.memory.on_release("cuda_graph", self.drop_graphs)
            self.memory.on_release("weights", self.adapters.forget_graphs)  # one that was loaded since may be moved
            if not mechanism.keeps_addresses:
                self.memory.on_release("weights", self.drop_graphs)
            for offload in self._offloads:
                self.memory.on_release("weights", offload.give_device_memory_back)

    def flush_caches(self, modules: Sequence[str] | None) -> None:
        """Prompts and pictures are encoded by text encoders and VAE alone; a graph reads weights where they lie."""
        if modules is None or not set(modules) <= set(TRAINED):
            self._prompts.clear()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All on the device. Offloaded weights stay where they are: there is nothing of them to give back."""
        found = {
            f"{owner}.{name}": self._memory_of(tensor)
            for owner, module in self._modules.items()
            for named in (module.named_parameters(), module.named_buffers())
            for name, tensor in named
            if not any(offload.holds(tensor) for offload in self._offloads)
        }
        return found | self.adapters.tensors()

    def _parameters(self, owner: str) -> list[str]:
        """All that a release without backup may lose of a module: not its buffers, which nobody sends."""
        return [f"{owner}.{name}" for name, _ in self._modules[owner].named_parameters()]

    def _memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._family.tensor is None:
            return tensor
        from diffusion_rl.parallel.sharded_target import local_tensor  # DTensor takes a second to import

        return local_tensor(tensor)

    def drop_graphs(self) -> None:
        """And the memory through which ranks exchange, whose addresses graphs hold."""
        for graphs in (self._family.runner, self._family.decoding.graphs):
            if isinstance(graphs, CudaGraphs):
                graphs.clear()
        self._arrangement.give_back()


def rank_settings(config: EngineConfig, rank: int) -> RankSettings:
    """What the control layer of that rank needs to know."""
    ranks = layout_of(config.parallel).ranks
    return RankSettings(rank, ranks, config.weight_load_formats, config.weight_transfer_timeout_s)


def _mechanism(config: EngineConfig, device: torch.device) -> MemoryMechanism:
    if config.memory_saver != "auto":
        return mechanisms.get(config.memory_saver)(device)
    return mechanisms.get("host")(device)
