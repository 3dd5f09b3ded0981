"""Where a tensor of the checkpoint lies in this rank's parameters: fused with others, and shared among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine_control.errors import InvalidRequestError
from llm_runtime.layers.fp8 import dequantise
from llm_runtime.models.base import TensorParallel


@dataclass(frozen=True)
class Share:
    """What a rank has of an axis: part `index` of `parts` equal ones, which `copies` neighbouring ranks have alike."""

    parts: int = 1
    index: int = 0
    copies: int = 1


WHOLE = Share()


def evenly(what: str, size: int, tensor_parallel: TensorParallel) -> Share:
    """A rank's part of `size` things.

    Raises:
        InvalidRequestError: they can't be shared evenly; the message names them.
    """
    ranks = tensor_parallel.size
    if size % ranks:
        raise InvalidRequestError(
            f"{what}={size} can't be shared evenly among tp_size={ranks} ranks",
            code="indivisible",
            field="tp_size",
            value=ranks,
            hint=f"Choose a tp_size that divides {size}.",
        )
    return Share(ranks, tensor_parallel.rank)


def kv_share(heads: int, tensor_parallel: TensorParallel) -> Share:
    """A rank's key and value heads; where there are more ranks than heads, several ranks have the same one.

    Raises:
        InvalidRequestError: neither of the two numbers divides the other.
    """
    ranks = tensor_parallel.size
    if ranks > heads and ranks % heads == 0:
        copies = ranks // heads
        return Share(heads, tensor_parallel.rank // copies, copies)
    return evenly("num_key_value_heads", heads, tensor_parallel)


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint, and this rank's part of it in a parameter.

    owner, parameter: the module, and the name in it. The tensor itself is asked for anew each time, since its memory
        may be swapped.
    shape: of the checkpoint's tensor, whole. axis: the one that ranks share.
    start, length: the part's rows in the parameter.
    """

    owner: torch.nn.Module
    parameter: str
    shape: tuple[int, ...]
    axis: int
    share: Share
    start: int
    length: int

    @property
    def dtype(self) -> torch.dtype:
        """That the checkpoint's tensor has here."""
        parameter: torch.Tensor = getattr(self.owner, self.parameter)
        return parameter.dtype

    def live(self) -> torch.Tensor:
        """This rank's part, a view of the parameter."""
        return self._rows(self.parameter)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same part of a tensor of the checkpoint, a view."""
        size = whole.shape[self.axis] // self.share.parts
        return whole.narrow(self.axis, self.share.index * size, size)

    def whole(self, part: torch.Tensor, tensor_parallel: TensorParallel) -> torch.Tensor:
        """The checkpoint's tensor, put together from all ranks' parts, each of which makes this call with its own; it
        may be that memory itself."""
        if self.share.parts == 1:
            return part
        rows = part.movedim(self.axis, 0).reshape(-1)
        gathered = tensor_parallel.all_gather(rows).reshape(self.share.parts, self.share.copies, -1)[:, 0]
        shape = list(self.shape)
        shape.insert(0, shape.pop(self.axis))
        return gathered.reshape(shape).movedim(0, self.axis).contiguous()

    def _rows(self, parameter: str) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, parameter)
        return tensor.detach().narrow(0, self.start, self.length)


@dataclass(frozen=True)
class QuantisedPiece(Piece):
    """A matrix of which bytes lie in the parameter, and its rows' scales in the parameter `scales` (see `fp8`).

    compute_dtype: of the model. A rank has scales for its own part: rows of which it has only some columns have other
        scales on other ranks.
    """

    scales: str
    compute_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.compute_dtype

    def live(self) -> torch.Tensor:
        """What this rank's part stands for, in memory of its own."""
        return dequantise(self._rows(self.parameter), self._rows(self.scales), self.compute_dtype)

    def empty(self) -> torch.Tensor:
        """Memory for this rank's part in the checkpoint's form."""
        return torch.empty_like(self._rows(self.parameter), dtype=self.compute_dtype)

    def write(self, stored: torch.Tensor, scales: torch.Tensor) -> None:
        """Afterwards the part is what these stand for, which `quantise` has made."""
        self._rows(self.parameter).copy_(stored)
        self._rows(self.scales).copy_(scales)


@runtime_checkable
class Placed(Protocol):
    """A layer with weights."""

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        """The checkpoint's names of this layer's weights, and where they lie. `path` is the layer's own name in the
        model; fused layers have their parts' names instead."""


def sibling(path: str, name: str) -> str:
    """`path` with another last word."""
    parent, dot, _ = path.rpartition(".")
    return f"{parent}{dot}{name}"


def empty_parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """Memory on the default device; what is in it is for the loader to write."""
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
