"""An MLP of many experts, of which a router chooses a few for each token.

A token's bits don't depend on who else goes to its experts: they are multiplied by row-invariant products, equal scores
of the router go to the lower expert, and a token's experts are added up one by one in the order of their numbers. That
is also the order of transformers, whose roundings this has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llm_runtime.layers.activation import silu_mul
from llm_runtime.layers.linear import ColumnLinear, RowLinear
from llm_runtime.layers.placement import WHOLE, evenly
from llm_runtime.models.base import ModelConfig, OneRank, TensorParallel


@dataclass(frozen=True)
class ExpertParts:
    """Which layers have experts instead of one MLP (`layers`), how many there are, how many a token goes to, and their
    inner width. normalised: a token's weights add up to one."""

    layers: frozenset[int]
    experts: int
    experts_per_token: int
    inner: int
    normalised: bool


def route(scores: torch.Tensor, parts: ExpertParts) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's scores `[N, experts]` -> the experts of each token, `[N, experts_per_token]` int64 in ascending
    order, and their weights, of the scores' dtype. Softmax over all experts in fp32; of equal ones the lower number is
    chosen."""
    probabilities = F.softmax(scores, dim=-1, dtype=torch.float32)
    ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)  # topk promises no order of equals
    weights, experts = ranked[:, : parts.experts_per_token], ids[:, : parts.experts_per_token]
    if parts.normalised:
        weights = weights / in_order(weights.unbind(-1)).unsqueeze(-1)
    experts, order = experts.sort(dim=-1)
    return experts, weights.gather(-1, order).to(scores.dtype)


class Expert(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))` of this rank's part of the inner width: a summand of the whole."""

    def __init__(self, config: ModelConfig, parts: ExpertParts, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, parts.inner
        share = evenly("moe_intermediate_size", inner, tensor_parallel)
        both = {"gate_proj": (inner, share), "up_proj": (inner, share)}
        dtype, quantised = config.dtype, config.quantised
        self.gate_up_proj = ColumnLinear(hidden, both, bias=False, dtype=dtype, quantised=quantised)
        # Ranks are added up once for all experts, not here.
        self.down_proj = RowLinear(
            inner, hidden, share, bias=False, dtype=dtype, tensor_parallel=OneRank(), quantised=quantised
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, hidden_size]` -> the same."""
        y: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return y


class SparseMLP(torch.nn.Module):
    """The sum of each token's experts, by the router's weights; ranks share each expert's inner width.

    Every expert has parameters of its own, as checkpoints store them: a refit writes them where they lie. Experts that
    no token goes to aren't read.
    """

    def __init__(self, config: ModelConfig, parts: ExpertParts, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.parts = parts
        self.tensor_parallel = tensor_parallel
        self.gate = ColumnLinear(config.hidden_size, {"gate": (parts.experts, WHOLE)}, bias=False, dtype=config.dtype)
        self.experts = torch.nn.ModuleList(Expert(config, parts, tensor_parallel) for _ in range(parts.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden_size]` -> the same. Waits for the device, to know how many tokens each expert has; a CUDA graph
        can't hold it (`CausalLM.capturable`)."""
        chosen, weights = route(self.gate(x), self.parts)
        each = chosen.shape[-1]
        order = chosen.flatten().argsort(stable=True)  # places in `[N * each]`, by their experts
        computed = x.new_empty(len(order), x.shape[-1])
        start = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                places = order[start : start + count]
                computed[places] = self.experts[expert](x[places // each])
                start += count
        weighted = computed.view(len(x), each, -1) * weights.unsqueeze(-1)
        return self.tensor_parallel.all_reduce(in_order(weighted.unbind(1)))


def in_order(summands: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum, from the first to the last, each result rounded to the dtype."""
    first, *others = summands
    for other in others:
        first = first + other
    return first
