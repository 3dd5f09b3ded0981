"""A model's weights under the checkpoint's names: what refits write to, and what a checkpoint is loaded into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from engine_control.errors import InvalidRequestError
from engine_control.refit.target import TensorInfo
from llm_runtime.layers.fp8 import quantise
from llm_runtime.layers.placement import Piece, Placed, QuantisedPiece
from llm_runtime.models.base import TensorParallel

MODULE = "model"


class PlacedWeights:
    """This rank's `RefitTarget`: one module called `model`, with every tensor's name and whole shape as a checkpoint
    has them, in the dtype that the model is computed in.

    No view of a weight outlives a call, since sleeping may have moved it.

    What comes for a quantised weight waits beside it, as it came, until `finish`, which quantises it: until then the
    bytes are the old ones. While it waits it is the weight for whoever reads, so that a session's digests are of what
    was sent. At other times what is read, and every checksum, is of what the bytes stand for; sending that again
    changes nothing.
    """

    def __init__(self, model: torch.nn.Module, tensor_parallel: TensorParallel) -> None:
        self._tensor_parallel = tensor_parallel
        self._pieces: dict[str, Piece] = {}
        for path, module in model.named_modules():
            if isinstance(module, Placed):
                self._pieces.update(module.pieces(path))
        self._waiting: dict[str, torch.Tensor] = {}
        self._infos = {name: TensorInfo(piece.shape, piece.dtype) for name, piece in self._pieces.items()}
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
        return [(self._writable(name, piece), piece.part_of(tensor))]

    def checkpoint_tensors(self, module: str) -> Mapping[str, torch.Tensor]:
        return _Whole(self)

    def begin(self, modules: Sequence[str]) -> None:
        """Weights lie as they are written, in slices; for quantised ones there is memory when they come, and nothing
        waits yet."""
        self._waiting.clear()

    def finish(self, modules: Sequence[str]) -> None:
        """Quantises what came. If that fails, no weight has changed, and what came still waits."""
        made = [(self._quantised(name), quantise(waiting)) for name, waiting in self._came()]
        for piece, (stored, scales) in made:
            piece.write(stored, scales)
        self._waiting.clear()

    def is_quantised(self, name: str) -> bool:
        return isinstance(self._pieces[name], QuantisedPiece)

    def own(self, name: str) -> torch.Tensor:
        """This rank's part of a weight, as it is now; it may be the live memory itself."""
        waiting = self._waiting.get(name)
        if waiting is None or bool(_nothing_came(waiting)):
            return self._pieces[name].live()
        return waiting

    def whole(self, name: str) -> torch.Tensor:
        """The same of all ranks together."""
        return self._pieces[name].whole(self.own(name), self._tensor_parallel)

    def _writable(self, name: str, piece: Piece) -> torch.Tensor:
        """Where the bytes of a part belong that comes in the checkpoint's form."""
        if not isinstance(piece, QuantisedPiece):
            return piece.live()
        if name not in self._waiting:
            # NaN, which no refit may bring, says that nothing came: also after an undo, which puts it back.
            self._waiting[name] = piece.empty().fill_(torch.nan)
        return self._waiting[name]

    def _came(self) -> list[tuple[str, torch.Tensor]]:
        """What waits, without what was undone."""
        if not self._waiting:
            return []
        nothing = torch.stack([_nothing_came(tensor) for tensor in self._waiting.values()]).tolist()
        return [item for item, undone in zip(self._waiting.items(), nothing, strict=True) if not undone]

    def _quantised(self, name: str) -> QuantisedPiece:
        piece = self._pieces[name]
        assert isinstance(piece, QuantisedPiece)  # nothing else waits
        return piece


class SharedWeights(PlacedWeights):
    """The same of a model that several ranks share: an `engine_control.refit.target.ShardedTarget`. Reading a tensor of
    `checkpoint_tensors` is a collective: every rank reads the same ones in the same order."""

    def own_part(self, module: str, name: str) -> torch.Tensor:
        """`ShardedTarget.own_part`: whole in shape, with zeros where other ranks' parts are."""
        piece, own = self._pieces[name], self.own(name)
        whole = own.new_zeros(piece.shape)
        piece.part_of(whole).copy_(own)
        return whole


class _Whole(Mapping[str, torch.Tensor]):
    """The checkpoint's tensors, each put together when it is asked for: all of them at once may not fit."""

    def __init__(self, weights: PlacedWeights) -> None:
        self._weights = weights
        self._names = weights.modules()[MODULE]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights.whole(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _nothing_came(waiting: torch.Tensor) -> torch.Tensor:
    """Whether there is still what `_writable` has put there, as a tensor."""
    return waiting.flatten()[0].isnan()
