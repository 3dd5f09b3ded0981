"""A model's weights under the checkpoint's names: what refits write to, and what a checkpoint is loaded into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from engine_control.errors import InvalidRequestError
from engine_control.refit.target import TensorInfo
from llm_runtime.layers.placement import Piece, Placed
from llm_runtime.models.base import TensorParallel

MODULE = "model"


class PlacedWeights:
    """This rank's `RefitTarget`: one module called `model`, with every tensor's name and whole shape as a checkpoint
    has them, in the dtype that the model is computed in.

    No view of a weight outlives a call, since sleeping may have moved it.
    """

    def __init__(self, model: torch.nn.Module, tensor_parallel: TensorParallel) -> None:
        self._tensor_parallel = tensor_parallel
        self._pieces: dict[str, Piece] = {}
        for path, module in model.named_modules():
            if isinstance(module, Placed):
                self._pieces.update(module.pieces(path))
        self._infos = {name: TensorInfo(piece.shape, piece.live().dtype) for name, piece in self._pieces.items()}
        first: dict[object, str] = {}
        self._tied = {
            name: first.setdefault((id(getattr(piece.owner, piece.parameter)), piece.start), name)
            for name, piece in self._pieces.items()
        }

    def modules(self) -> Mapping[str, Mapping[str, TensorInfo]]:
        return {MODULE: self._infos}

    def default_modules(self, selector: str) -> Sequence[str]:
        if selector in ("all", "target"):
            return (MODULE,)
        raise InvalidRequestError(
            f"this engine has no {selector!r} model",
            field="selector",
            value=selector,
            hint="Send 'all', 'target' or nothing.",
        )

    def tied(self, module: str, name: str) -> str:
        return self._tied[name]

    def destinations(self, module: str, name: str, tensor: torch.Tensor) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        piece = self._pieces[name]
        return [(piece.live(), piece.part_of(tensor))]

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        return _Whole(self._pieces, self._tensor_parallel)

    def begin(self, modules: Sequence[str]) -> None:
        """Nothing to do: weights lie as they are written, in slices."""

    def finish(self, modules: Sequence[str]) -> None:
        """Nothing to do, as at `begin`."""


class SharedWeights(PlacedWeights):
    """The same of a model that several ranks share: an `engine_control.refit.target.ShardedTarget`. Reading a tensor of
    `checkpoint_tensors` is a collective: every rank reads the same ones in the same order."""

    def own_part(self, module: str, name: str) -> torch.Tensor:
        """`ShardedTarget.own_part`: whole in shape, with zeros where other ranks' parts are."""
        piece = self._pieces[name]
        live = piece.live()
        whole = live.new_zeros(piece.shape)
        piece.part_of(whole).copy_(live)
        return whole


class _Whole(Mapping[str, torch.Tensor]):
    """The checkpoint's tensors, each put together when it is asked for: all of them at once may not fit."""

    def __init__(self, pieces: Mapping[str, Piece], tensor_parallel: TensorParallel) -> None:
        self._pieces = pieces
        self._tensor_parallel = tensor_parallel

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._pieces[name].whole(self._tensor_parallel)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)
