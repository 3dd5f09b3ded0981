"""The weights of a model and of the draft that guesses for it, as one refit target: modules `model` and `draft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine_control.errors import InvalidRequestError
from engine_control.refit.target import RefitTarget, TensorInfo
from llm_runtime.models.weights import MODULE

DRAFT = "draft"


class TargetAndDraft:
    """An `engine_control.refit.target.RefitTarget`. Both models know themselves as `model`."""

    def __init__(self, model: RefitTarget, draft: RefitTarget) -> None:
        self._targets = {MODULE: model, DRAFT: draft}

    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        return {name: target.modules()[MODULE] for name, target in self._targets.items()}

    def default_modules(self, selector: str) -> Sequence[str]:
        """A weight without a module's name is of the first one."""
        known = {"all": (MODULE, DRAFT), "target": (MODULE,), "draft": (DRAFT,)}
        if selector not in known:
            raise InvalidRequestError(
                f"there is no {selector!r} model", field="selector", value=selector, hint=f"Known: {', '.join(known)}."
            )
        return known[selector]

    def tied(self, module: str, name: str) -> str:
        return self._targets[module].tied(MODULE, name)

    def destinations(self, module: str, name: str, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return self._targets[module].destinations(MODULE, name, tensor)

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        return self._targets[module].checkpoint_tensors(MODULE)

    def begin(self, modules: Sequence[str]) -> None:
        for module in modules:
            self._targets[module].begin((MODULE,))

    def finish(self, modules: Sequence[str]) -> None:
        for module in modules:
            self._targets[module].finish((MODULE,))
