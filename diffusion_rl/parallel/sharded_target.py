"""What a refit writes to where ranks share a transformer's weights: names and shapes are the checkpoint's, and each
rank takes its part of what comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from diffusion_rl.parallel.tensor import RowLinear, TensorParallel
from engine_control.refit.target import ModuleTarget


@dataclass(frozen=True)
class _Part:
    """Which part of a weight a rank holds: its share of each section along `dim`, end to end.

    sections: sizes of the whole ones. A weight that is one section is dealt out as it stands.
    """

    dim: int
    sections: tuple[int, ...]
    rank: int
    size: int

    @property
    def shares(self) -> list[int]:
        return [section // self.size for section in self.sections]

    def pairs(self, mine: torch.Tensor, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the rank's tensor, and those of the whole one that belong there."""
        own, sections = mine.split(self.shares, self.dim), whole.split(list(self.sections), self.dim)
        return [(to, section.chunk(self.size, self.dim)[self.rank]) for to, section in zip(own, sections, strict=True)]

    def whole(self, gathered: torch.Tensor) -> torch.Tensor:
        """The whole weight, of the ranks' tensors end to end."""
        if len(self.sections) == 1:
            return gathered
        shares = gathered.split(self.shares * self.size, self.dim)
        return torch.cat([s for i in range(len(self.sections)) for s in shares[i :: len(self.sections)]], self.dim)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a weight: always the same tensor object, so that its memory can be moved."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class DTensorTarget(ModuleTarget):
    """An `engine_control.refit.target.ShardedTarget` of modules whose split weights are DTensors.

    A weight is gathered through the engine's own group, not by `DTensor.full_tensor`, which would need torch's default
    process group.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module], ranks: TensorParallel, *, main: Iterable[str] | None = None
    ) -> None:
        super().__init__(modules, main=main)
        self._ranks = ranks
        self._parts = {name: _parts_of(module, ranks.rank) for name, module in self._modules.items()}

    def destinations(self, module: str, name: str, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        live, part = self._weights(module).live[name], self._parts[module].get(name)
        return [(live, tensor)] if part is None else part.pairs(live, tensor)

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        return _Gathered(self._weights(module).live, self._parts[module], self._ranks)

    def own_part(self, module: str, name: str) -> torch.Tensor:
        live = self._weights(module).live[name]
        whole = torch.zeros(self._infos[module][name].shape, dtype=live.dtype, device=live.device)
        for mine, new in self.destinations(module, name, whole):
            new.copy_(mine)
        return whole

    def _lying(self, module: str) -> dict[str, torch.Tensor]:
        return {name: local_tensor(tensor) for name, tensor in self._modules[module].state_dict().items()}


def _parts_of(module: torch.nn.Module, rank: int) -> dict[str, _Part]:
    """A rank's part of each weight that is split: as many places for every rank."""
    sections = {f"{name}.weight": m.sections for name, m in module.named_modules() if isinstance(m, RowLinear)}
    parts = {}
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, DTensor) and isinstance(tensor.placements[0], Shard):
            dim = tensor.placements[0].dim
            parts[name] = _Part(dim, sections.get(name, (tensor.shape[dim],)), rank, tensor.device_mesh.size())
    return parts


class _Gathered(Mapping[str, torch.Tensor]):
    """Whole weights, each gathered when it is asked for: all of them at once may not fit."""

    def __init__(self, live: Mapping[str, torch.Tensor], parts: Mapping[str, _Part], ranks: TensorParallel) -> None:
        self._live = live
        self._parts = parts
        self._ranks = ranks

    def __getitem__(self, name: str) -> torch.Tensor:
        live, part = self._live[name], self._parts.get(name)
        return live if part is None else part.whole(self._ranks.gather(live, part.dim))

    def __contains__(self, name: object) -> bool:
        return name in self._live

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)
