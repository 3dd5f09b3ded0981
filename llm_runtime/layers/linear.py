"""Linear layers whose outputs, or whose inputs, are shared among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from llm_runtime.layers.fp8 import FP8, MULTIPLE, dequantise, scaled_product
from llm_runtime.layers.placement import Piece, QuantisedPiece, Share, empty_parameter, sibling
from llm_runtime.models.base import TensorParallel
from rl_kernels.linear import IMPLEMENTATIONS, Linear, padded_rows, padded_to, quick_sizes
from rl_kernels.mode import Choices
from rl_kernels.settings import exact_library_settings


class Multiplies(torch.nn.Module):
    """A module that multiplies its input by its weight `[N, K]`, by the implementation that is chosen for it.

    `weight` is that matrix; or, if there is a `scale` `[N]`, its bytes (see `fp8`), and `dtype` is what it stands for.
    of_bytes: a quantised weight is multiplied as it is, by an input that is quantised for it.
    """

    weight: torch.nn.Parameter
    scale: torch.nn.Parameter | None
    product: Linear

    def __init__(self, rows: int, columns: int, *, dtype: torch.dtype, quantised: bool = False) -> None:
        super().__init__()
        self.product = F.linear
        self.of_bytes = False
        self.dtype = dtype
        self.weight = empty_parameter(rows, columns, dtype=FP8 if quantised else dtype)
        self.scale = empty_parameter(rows, dtype=torch.float32) if quantised else None

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of the matrix that is multiplied by at a time."""
        rows, columns = self.weight.shape
        return rows, columns

    def times(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`[M, K]` -> `[M, N]`."""
        return self.times_matrix(x, self.weight, self.scale, bias)

    def times_matrix(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The same by the weight, or rows of it. What was quantised is there in the dtype that is computed in for this
        one product only."""
        if scale is None:
            return self.product(x, weight, bias)
        if self.of_bytes:
            return scaled_product(x, weight, scale, bias)
        return self.product(x, dequantise(weight, scale, self.dtype), bias)

    def weight_piece(self, shape: tuple[int, ...], axis: int, share: Share, start: int, length: int) -> Piece:
        """A matrix of the checkpoint, in the weight's rows from `start` on."""
        if self.scale is None:
            return Piece(self, "weight", shape, axis, share, start, length)
        return QuantisedPiece(self, "weight", shape, axis, share, start, length, "scale", self.dtype)


def choose_products(model: torch.nn.Module, choices: Choices) -> None:
    """Has every linear layer of the model run what is chosen for its shape; the library's call, if nothing is exact.
    Where it is padded rows, few rows are padded to a number that is quick on the device.

    `rl_kernels.exact_mode` would do the same to any module, at a price for every operation, which short steps feel.
    """
    for module in model.modules():
        if isinstance(module, Multiplies):
            n, k = module.sizes
            name = choices.linear.get((k, n, module.dtype), choices.default_linear)
            module.product = IMPLEMENTATIONS[name] if choices.exact else F.linear
            if choices.exact and name == "padded_rows":
                with exact_library_settings():
                    sizes = quick_sizes(k, n, module.dtype, module.weight.device)
                module.product = padded_to(sizes) if sizes else padded_rows


def multiply_bytes(model: torch.nn.Module) -> None:
    """Has every quantised layer of the model, unless its sizes are odd ones, multiply bytes (`fp8.scaled_product`)."""
    for module in model.modules():
        if isinstance(module, Multiplies) and module.scale is not None:
            module.of_bytes = all(size % MULTIPLE == 0 for size in module.sizes)


class ColumnLinear(Multiplies):
    """Several linear layers of one input as one product: their outputs side by side, of each this rank's part."""

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, tuple[int, Share]],
        *,
        bias: bool,
        dtype: torch.dtype,
        quantised: bool = False,
    ) -> None:
        """outputs: each layer's name in the checkpoint, its whole width, and what this rank has of it."""
        widths = [width // share.parts for width, share in outputs.values()]
        super().__init__(sum(widths), in_features, dtype=dtype, quantised=quantised)
        self.in_features = in_features
        self.outputs = dict(outputs)
        self.widths = widths
        self.bias = empty_parameter(sum(self.widths), dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in_features]` -> `[N, sum of widths]`."""
        return self.times(x, self.bias)

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        start = 0
        for (name, (width, share)), length in zip(self.outputs.items(), self.widths, strict=True):
            layer = sibling(path, name)
            yield f"{layer}.weight", self.weight_piece((width, self.in_features), 0, share, start, length)
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
        quantised: bool = False,
    ) -> None:
        super().__init__(out_features, in_features // share.parts, dtype=dtype, quantised=quantised)
        self.shape = out_features, in_features
        self.share = share
        self.tensor_parallel = tensor_parallel
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, in_features / ranks]` -> `[N, out_features]`."""
        if self.share.parts == 1:
            return self.times(x, self.bias)
        y = self.tensor_parallel.all_reduce(self.times(x, None))
        return y if self.bias is None else y + self.bias

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        rows = self.shape[0]
        yield f"{path}.weight", self.weight_piece(self.shape, 1, self.share, 0, rows)
        if self.bias is not None:
            yield f"{path}.bias", Piece(self, "bias", (rows,), 0, Share(), 0, rows)
