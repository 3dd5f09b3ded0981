"""An MLP of many experts, of which a router chooses a few for each token.

A token's bits don't depend on who else goes to its experts: they are multiplied by row-invariant products, equal scores
of the router go to the lower expert, and a token's experts are added up one by one in the order of their numbers. That
is also the order of transformers, whose roundings this has.

On a GPU all experts of a layer are multiplied by in one product, if that is certified there, and nothing waits for the
device. Elsewhere there are two products for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from llm_runtime.layers.activation import silu_mul
from llm_runtime.layers.linear import ColumnLinear, Multiplies
from llm_runtime.layers.placement import WHOLE, Piece, Share, evenly, sibling
from llm_runtime.models.base import ModelConfig, TensorParallel
from rl_kernels.certify_grouped import ExpertShape
from rl_kernels.grouped_linear import ExpertMatrices, gated_grouped_linear, grouped_linear
from rl_kernels.mode import Choices
from rl_kernels.routing import Places, add_experts, choose_experts


@dataclass(frozen=True)
class ExpertParts:
    """Which layers have experts instead of one MLP (`layers`), how many there are, how many a token goes to, and their
    inner width. normalised: a token's weights add up to one."""

    layers: frozenset[int]
    experts: int
    experts_per_token: int
    inner: int
    normalised: bool


class ExpertLinears(Multiplies):
    """One linear layer of every expert: their matrices below each other, so that one product can read all of them. A
    refit writes each where it lies, under the name that checkpoints have for it."""

    def __init__(
        self, experts: int, layers: Mapping[str, tuple[int, int]], axis: int, share: Share, config: ModelConfig
    ) -> None:
        """layers: what an expert's matrix is made of, below each other: names and whole shapes in the checkpoint, of
        which ranks share an axis."""
        parts = [tuple(n // share.parts if i == axis else n for i, n in enumerate(s)) for s in layers.values()]
        self.lengths = [rows for rows, _ in parts]
        super().__init__(experts * sum(self.lengths), parts[0][1], dtype=config.dtype, quantised=config.quantised)
        self.experts = experts
        self.layers, self.axis, self.share = dict(layers), axis, share

    @property
    def sizes(self) -> tuple[int, int]:
        return sum(self.lengths), self.weight.shape[1]

    def of(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """`[n, K]` -> `[n, N]`, of one expert."""
        length = sum(self.lengths)
        rows = slice(expert * length, (expert + 1) * length)
        return self.times_matrix(x, self.weight[rows], None if self.scale is None else self.scale[rows], None)

    @property
    def matrices(self) -> ExpertMatrices:
        """All experts', as they lie."""
        scales = None if self.scale is None else self.scale.view(self.experts, -1)
        return ExpertMatrices(self.weight.view(self.experts, *self.sizes), scales)

    def pieces(self, path: str) -> Iterator[tuple[str, Piece]]:
        start = 0
        for expert in range(self.experts):
            for (name, shape), length in zip(self.layers.items(), self.lengths, strict=True):
                piece = self.weight_piece(shape, self.axis, self.share, start, length)
                yield f"{sibling(path, f'{expert}.{name}')}.weight", piece
                start += length


class Experts(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))` of each expert, of this rank's part of the inner width: summands of the whole.

    grouped: by one product for all of them; see `group_experts`.
    """

    def __init__(self, config: ModelConfig, parts: ExpertParts, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        hidden, inner, count = config.hidden_size, parts.inner, parts.experts
        share = evenly("moe_intermediate_size", inner, tensor_parallel)
        both = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
        self.gate_up_proj = ExpertLinears(count, both, 0, share, config)
        # Ranks are added up once for all experts, not here.
        self.down_proj = ExpertLinears(count, {"down_proj": (hidden, inner)}, 1, share, config)
        self.parts = parts
        self.grouped = False

    @property
    def shape(self) -> ExpertShape:
        """What decides how a product of all is computed."""
        (_, hidden), (_, inner) = self.gate_up_proj.sizes, self.down_proj.sizes
        return ExpertShape(
            self.parts.experts,
            self.parts.experts_per_token,
            hidden,
            inner,
            self.gate_up_proj.dtype,
            self.gate_up_proj.scale is not None,
        )

    @property
    def groupable(self) -> bool:
        """Whether there is a kernel that multiplies by all of them, as they are kept and multiplied."""
        of_bytes = self.gate_up_proj.of_bytes or self.down_proj.of_bytes
        return self.shape.runs_on(self.gate_up_proj.weight.device) and not of_bytes

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x `[N, hidden_size]` and each row's experts `[N, each]` int32 -> `[N * each, hidden_size]`. Unless they are
        grouped it waits for the device, to know how many rows each expert has, and reads no expert without any."""
        places = Places.of(chosen, self.parts.experts)
        if self.grouped:
            activated = gated_grouped_linear(x, self.gate_up_proj.matrices, places)
            return grouped_linear(activated, self.down_proj.matrices, places)
        computed = x.new_empty(len(places.order), x.shape[-1])
        for expert, own in enumerate(places.order.split(places.counts.tolist())):
            if len(own):
                activated = silu_mul(self.gate_up_proj.of(expert, x[own // places.each]))
                computed[own] = self.down_proj.of(expert, activated)
        return computed


class SparseMLP(torch.nn.Module):
    """The sum of each token's experts, by the router's weights; ranks share each expert's inner width."""

    def __init__(self, config: ModelConfig, parts: ExpertParts, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.parts = parts
        self.tensor_parallel = tensor_parallel
        self.gate = ColumnLinear(config.hidden_size, {"gate": (parts.experts, WHOLE)}, bias=False, dtype=config.dtype)
        self.experts = Experts(config, parts, tensor_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden_size]` -> the same."""
        each, normalised = self.parts.experts_per_token, self.parts.normalised
        chosen, weights = choose_experts(self.gate(x), each, normalised=normalised)
        return self.tensor_parallel.all_reduce(add_experts(self.experts(x, chosen), weights))


def group_experts(model: torch.nn.Module, choices: Choices) -> None:
    """Has all experts of each layer be one product, where the choices say so and there is a kernel."""
    for experts in model.modules():
        if isinstance(experts, Experts):
            experts.grouped = choices.grouped_experts and experts.groupable


def groupable_shapes(model: torch.nn.Module) -> set[ExpertShape]:
    """Of the model's experts, those that could be one product here."""
    return {m.shape for m in model.modules() if isinstance(m, Experts) and m.groupable}
