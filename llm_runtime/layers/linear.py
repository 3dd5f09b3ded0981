"""Linear layers whose outputs, or whose inputs, are shared among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from llm_runtime.layers.placement import Piece, Share, empty_parameter, sibling
from llm_runtime.models.base import TensorParallel
from rl_kernels.linear import IMPLEMENTATIONS, Linear
from rl_kernels.mode import Choices


class Multiplies(torch.nn.Module):
    """A module that multiplies its input by its `weight` `[N, K]`, by the implementation that is chosen for it."""

    weight: torch.nn.Parameter
    product: Linear

    def __init__(self) -> None:
        super().__init__()
        self.product = F.linear


def choose_products(model: torch.nn.Module, choices: Choices) -> None:
    """Has every linear layer of the model run what is chosen for its shape; the library's call, if nothing is exact.

    `rl_kernels.exact_mode` would do the same to any module, at a price for every operation, which short steps feel.
    """
    for module in model.modules():
        if isinstance(module, Multiplies):
            n, k = module.weight.shape
            name = choices.linear.get((k, n, module.weight.dtype), choices.default_linear)
            module.product = IMPLEMENTATIONS[name] if choices.exact else F.linear


class ColumnLinear(Multiplies):
    """Several linear layers of one input as one product: their outputs side by side, of each this rank's part."""

    def __init__(
        self, in_features: int, outputs: Mapping[str, tuple[int, Share]], *, bias: bool, dtype: torch.dtype
    ) -> None:
        """outputs: each layer's name in the checkpoint, its whole width, and what this rank has of it."""
        super().__init__()
        self.in_features = in_features
        self.outputs = dict(outputs)
        self.widths = [width // share.parts for width, share in self.outputs.values()]
        self.weight = empty_parameter(sum(self.widths), in_features, dtype=dtype)
        self.bias = empty_parameter(sum(self.widths), dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in_features]` -> `[N, sum of widths]`."""
        return self.product(x, self.weight, self.bias)

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        start = 0
        for (name, (width, share)), length in zip(self.outputs.items(), self.widths, strict=True):
            layer = sibling(path, name)
            yield f"{layer}.weight", Piece(self, "weight", (width, self.in_features), 0, share, start, length)
            if self.bias is not None:
                yield f"{layer}.bias", Piece(self, "bias", (width,), 0, share, start, length)
            start += length


class RowLinear(Multiplies):
    """A linear layer of which this rank has some of the inputs; the result is summed over ranks, and whole on each."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        share: Share,
        *,
        bias: bool,
        dtype: torch.dtype,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.shape = out_features, in_features
        self.share = share
        self.tensor_parallel = tensor_parallel
        self.weight = empty_parameter(out_features, in_features // share.parts, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in_features / ranks]` -> `[N, out_features]`."""
        if self.share.parts == 1:
            return self.product(x, self.weight, self.bias)
        y = self.tensor_parallel.all_reduce(self.product(x, self.weight, None))
        return y if self.bias is None else y + self.bias

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        rows = self.shape[0]
        yield f"{path}.weight", Piece(self, "weight", self.shape, 1, self.share, 0, rows)
        if self.bias is not None:
            yield f"{path}.bias", Piece(self, "bias", (rows,), 0, Share(), 0, rows)
