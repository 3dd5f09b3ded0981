"""A refit's view of weights of which some are offloaded: their one place is host memory, whatever the device holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from diffusion_rl.models.offload import LayerwiseOffload
from engine_control.refit.target import ModuleTarget


class OffloadedTarget(ModuleTarget):
    """Before weights are looked at or written, every offload is settled: the device holds no block, and no copy to it
    still reads the host's. So new bytes, undone ones and digests are of one place, a refit takes no device memory for
    them, and the next step brings over what lies there.

    Steps of a staged session may come between; each finds and leaves the weights in the same host memory.
    """

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        offloads: Sequence[LayerwiseOffload],
        *,
        main: Iterable[str] | None = None,
    ) -> None:
        super().__init__(modules, main=main)
        self._offloads = tuple(offloads)

    def tied(self, module: str, name: str) -> str:
        self._settle()
        return super().tied(module, name)

    def destinations(self, module: str, name: str, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        self._settle()
        return super().destinations(module, name, tensor)

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        self._settle()
        return super().checkpoint_tensors(module)

    def begin(self, modules: Sequence[str]) -> None:
        self._settle()
        super().begin(modules)

    def _settle(self) -> None:
        for offload in self._offloads:
            offload.settle()
